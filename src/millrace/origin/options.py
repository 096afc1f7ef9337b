"""Translates the options that users already pass to s3fs into those of obstore. Pure; one table per scheme.

An option that is not in the table is an error that lists the known ones: a misspelt `secret` must not turn into an
anonymous request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from millrace.errors import ConfigurationError

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
S3_CLIENT_KWARGS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "endpoint_url", "region_name")


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """What obstore needs: `config` goes to the store's constructor, `client_options` to its HTTP client.

    `endpoint` is the non-secret part of the identity of the storage, without a trailing slash.
    """

    config: Mapping[str, Any] = field(repr=False)
    client_options: Mapping[str, Any] = field(repr=False)
    endpoint: str
    profile: str | None = None
    """The named profile of `~/.aws` to take credentials from."""
    signs_itself: bool = False
    """Explicit keys are in `config`, or requests are not signed at all: no credentials are looked for."""


def _reject_unknown(given: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigurationError(
            f"unknown {what} {', '.join(map(repr, unknown))}", next_step=f"known ones are {', '.join(known)}"
        )


def s3_options(target_options: Mapping[str, Any], environ: Mapping[str, str]) -> StoreOptions:
    """Translate s3fs-style `target_options`.

    Credentials that are not given are found by `credentials.py` and obstore. Raises `ConfigurationError` for an unknown
    option, a secret without its key, a profile beside explicit keys, or an endpoint with a password in it.
    """
    _reject_unknown(target_options, S3_OPTIONS, "S3 option")
    client_kwargs = dict(target_options.get("client_kwargs") or {})
    _reject_unknown(client_kwargs, S3_CLIENT_KWARGS, "entry in client_kwargs:")

    def pick(name: str, client_name: str | None = None) -> Any:
        value = target_options.get(name)
        return client_kwargs.get(client_name) if value is None and client_name else value

    key, secret = pick("key", "aws_access_key_id"), pick("secret", "aws_secret_access_key")
    if (key is None) != (secret is None):
        raise ConfigurationError("S3 options 'key' and 'secret' belong together", next_step="give both, or neither")
    token = pick("token", "aws_session_token")
    endpoint = pick("endpoint_url", "endpoint_url") or environ.get(
        "AWS_ENDPOINT_URL_S3", environ.get("AWS_ENDPOINT_URL")
    )
    region = pick("region", "region_name") or environ.get("AWS_REGION", environ.get("AWS_DEFAULT_REGION", "us-east-1"))
    if endpoint and "://" not in endpoint:
        scheme = "https" if target_options.get("use_ssl", True) else "http"
        endpoint = f"{scheme}://{endpoint}"

    if endpoint and "@" in urlsplit(endpoint).netloc:
        raise ConfigurationError(
            "endpoint_url has a user name or password in it", next_step="give them as 'key' and 'secret'"
        )
    profile = target_options.get("profile")
    if profile is not None and key is not None:
        raise ConfigurationError("S3 options 'profile' and 'key' exclude each other", next_step="give one of them")

    config: dict[str, Any] = {"region": region}
    if endpoint:
        config["endpoint"] = endpoint.rstrip("/")
    if key is not None:
        config["access_key_id"], config["secret_access_key"] = key, secret
        if token is not None:
            config["session_token"] = token
    if target_options.get("anon"):
        config["skip_signature"] = True
    client_options: dict[str, Any] = {"allow_http": True} if endpoint and endpoint.startswith("http://") else {}
    return StoreOptions(
        config=config,
        client_options=client_options,
        endpoint=config.get("endpoint", f"aws:{region}"),
        profile=profile,
        signs_itself=key is not None or bool(target_options.get("anon")),
    )
