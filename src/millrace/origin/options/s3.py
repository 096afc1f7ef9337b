"""The options of s3fs, as those of obstore."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millrace.errors import ConfigurationError
from millrace.origin.options.store import (
    StoreOptions,
    boolean,
    check_texts,
    checked_endpoint,
    checked_mapping,
    http_options,
    reject_unknown,
    stripped_environ,
)

S3_OPTIONS = (
    "anon",
    "client_kwargs",
    "endpoint_url",
    "key",
    "profile",
    "region",
    "secret",
    "token",
    "use_ssl",
)
_TEXTS = ("endpoint_url", "key", "region", "secret", "token")
S3_CLIENT_KWARGS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "endpoint_url", "region_name")

# In the order of precedence; the last one is obstore's own, and must be in the identity as well.
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

_REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
_REGION = re.compile(r"[A-Za-z0-9._-]+")


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def s3_options(target_options: Mapping[str, Any], environ: Mapping[str, str]) -> StoreOptions:
    """Translate s3fs-style `target_options`.

    `credentials/s3.py` and obstore find missing credentials. Raises `ConfigurationError` for an unknown option, a secret
    without its key, a profile together with explicit keys, or an endpoint with a password.
    """
    environ = stripped_environ(environ)
    reject_unknown(target_options, S3_OPTIONS, "S3 option")
    client_kwargs = checked_mapping(target_options.get("client_kwargs"), "S3 option 'client_kwargs'")
    reject_unknown(client_kwargs, S3_CLIENT_KWARGS, "entry in client_kwargs:")
    check_texts(client_kwargs, "S3 option in client_kwargs:")
    check_texts({name: target_options.get(name) for name in _TEXTS}, "S3 option")
    check_texts({"profile": target_options.get("profile")}, "S3 option", sendable=False)
    anonymous = boolean(target_options.get("anon"), "S3 option 'anon'")
    encrypts = boolean(target_options.get("use_ssl"), "S3 option 'use_ssl'", default=True)

    def pick(name: str, client_name: str | None = None) -> Any:
        value = target_options.get(name)
        return client_kwargs.get(client_name) if value is None and client_name else value

    key, secret = pick("key", "aws_access_key_id"), pick("secret", "aws_secret_access_key")
    if (key is None) != (secret is None):
        raise ConfigurationError("S3 options 'key' and 'secret' belong together", next_step="set both, or neither")
    token = pick("token", "aws_session_token")
    endpoint = pick("endpoint_url", "endpoint_url") or _first(environ, _ENDPOINT_VARIABLES)
    region = pick("region", "region_name") or _first(environ, _REGION_VARIABLES) or "us-east-1"
    if not _REGION.fullmatch(region):  # it is part of a host name and of each signature
        raise ConfigurationError(
            "S3 option 'region' (or AWS_REGION) contains a character that no region has",
            next_step="write a name such as 'us-east-1'",
        )
    if endpoint and "://" not in endpoint:
        scheme = "https" if encrypts else "http"
        endpoint = f"{scheme}://{endpoint}"
    if endpoint:
        endpoint = checked_endpoint(endpoint, "endpoint_url", "'key' and 'secret'")
    profile = target_options.get("profile")
    if profile is not None and key is not None:
        raise ConfigurationError("S3 options 'profile' and 'key' exclude each other", next_step="set one of them")

    config: dict[str, Any] = {"region": region}
    if endpoint:
        config["endpoint"] = endpoint
    if anonymous:
        config["skip_signature"] = True
    # Not in `config`: obstore would add a session token of the environment.
    fixed = {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}
    return StoreOptions(
        config=config,
        client_options=http_options(endpoint),
        endpoint=endpoint or f"aws:{region}",
        region="" if endpoint else region,
        fixed=None if key is None or anonymous else fixed,
        signs_itself=anonymous,
        hints={"profile": profile} if profile is not None else {},
    )
