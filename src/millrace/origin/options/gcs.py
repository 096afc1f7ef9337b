"""The options of gcsfs, as those of obstore."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from millrace.errors import ConfigurationError
from millrace.origin.options.store import (
    StoreOptions,
    boolean,
    check_sendable,
    check_texts,
    checked_endpoint,
    http_options,
    reject_unknown,
    stripped_environ,
    unusable_in,
)

GCS_OPTIONS = ("anon", "endpoint_url", "project", "token")

_ENDPOINT = "https://storage.googleapis.com"

# Ways of gcsfs that need a person, or a file that gcsfs itself has written.
_OTHER_WAYS = ("browser", "cache")


def gcs_options(target_options: Mapping[str, Any], environ: Mapping[str, str]) -> StoreOptions:
    """Translate gcsfs-style `target_options`.

    `token` is `"anon"`, `"google_default"`, `"cloud"` (the identity of this machine), the path of a JSON file with
    credentials, the content of such a file as a dict, or a bearer token. `project` is ignored. `credentials/gcs.py` finds
    missing credentials. Raises `ConfigurationError`.
    """
    environ = stripped_environ(environ)
    reject_unknown(target_options, GCS_OPTIONS, "GCS option")
    given = {name: value for name, value in target_options.items() if value is not None}
    check_texts({"endpoint_url": given.get("endpoint_url")}, "GCS option")
    anon = boolean(given.get("anon"), "GCS option 'anon'")
    emulator = environ.get("STORAGE_EMULATOR_HOST")
    endpoint = given.get("endpoint_url") or emulator or environ.get("GOOGLE_BASE_URL") or _ENDPOINT
    if "://" not in endpoint:
        endpoint = f"http://{endpoint}" if endpoint == emulator else f"https://{endpoint}"
    endpoint = checked_endpoint(endpoint, "endpoint_url", "'token'")
    token = given.get("token")
    if not (token is None or isinstance(token, str | Mapping) or hasattr(token, "refresh")):
        raise ConfigurationError(
            "GCS option 'token' is neither a text, a dict nor credentials of google-auth",
            next_step="use the path of a JSON file, a dict, 'anon', 'google_default' or 'cloud'",
        )
    if isinstance(token, str) and _is_bearer(token):
        check_sendable(token, "GCS option 'token'")
    elif isinstance(token, str) and unusable_in(token, lines=False):
        raise ConfigurationError(
            "GCS option 'token' is not a path of one line", next_step="use the path of a JSON file"
        )
    if isinstance(token, str) and token in _OTHER_WAYS:
        raise ConfigurationError(
            f"GCS option token={token!r} needs gcsfs",
            next_step="log in by `gcloud auth application-default login`, or use a path, a dict, 'anon' or 'cloud'",
        )
    if anon and token not in (None, "anon"):
        raise ConfigurationError("GCS options 'anon' and 'token' exclude each other", next_step="set one of them")
    anonymous = anon or token == "anon" or (token is None and endpoint == _with_scheme(emulator))
    config: dict[str, Any] = {"base_url": endpoint}
    fixed = {"token": token, "expires_at": None} if _is_bearer(token) else None
    if anonymous and endpoint == _ENDPOINT:
        config["skip_signature"] = True
    elif anonymous:
        # An emulator accepts any token. obstore needs one before a write, even without signatures.
        fixed = {"token": "anonymous", "expires_at": None}
    return StoreOptions(
        config=config,
        client_options=http_options(endpoint),
        endpoint=endpoint,
        fixed=fixed,
        signs_itself=anonymous and fixed is None,
        may_write=not anonymous or fixed is not None,
        hints={"token": token} if token not in (None, "anon") and fixed is None else {},
    )


def _with_scheme(host: str | None) -> str | None:
    return host if host is None or "://" in host else f"http://{host}"


def _is_bearer(token: Any) -> bool:
    """Whether a token is a bearer token: Google's start with `ya29.`; others have no slash and are not a keyword."""
    if not isinstance(token, str) or token in ("anon", "cloud", "google_default"):
        return False
    return token.startswith("ya29.") or not (os.sep in token or token.startswith("~") or token.endswith(".json"))
