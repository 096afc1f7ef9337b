"""Which options of a storage may be shown or stored where others read them: those that contain no secret. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Options that identify the storage, and are not secret.
_PLACE_OPTIONS = frozenset(
    {
        "account_name", "bucket", "endpoint", "endpoint_url", "fo", "global_store", "host", "instance", "org", "path",
        "port", "project", "ref", "region", "repo", "root_file_id", "sha", "share", "target_protocol", "user", "username",
    }
)  # fmt: skip
# Parts of the names of options with secrets: they are not part of an identity, not even as a checksum.
_SECRET = re.compile(r"(?i)pass|secret|token|key|cred|auth|acct|cert|kerb|sas|cookie|header|connection_string")
_PLAIN = re.compile(r"[\w./:+-]{0,200}")
# Other options whose text is not secret, unless it is a URL with a login or a query.
_NAMES = frozenset(
    {"account_host", "account_name", "client_id", "endpoint", "endpoint_url", "profile", "project", "region", "region_name",
     "tenant_id", "verify"}
)  # fmt: skip
# Values of `token` that name a way to log in.
_WAYS = frozenset({"anon", "cloud", "google_default"})


def is_secret(name: str) -> bool:
    """Whether an option of this name contains a secret."""
    return bool(_SECRET.search(name))


def is_public(name: str, value: str | int) -> bool:
    """Whether an identity shows this option: it identifies the storage, and contains no login."""
    return name in _PLACE_OPTIONS and _PLAIN.fullmatch(str(value)) is not None


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that identify a storage and the way to access it, also those inside other options.

    Leaves out everything that may be secret: credentials, headers, cookies, objects, and URLs with a login or a query.
    """
    kept: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            if not is_secret(name) and (inner := without_secrets(value)):
                kept[name] = inner
        elif _is_harmless(name, value):
            kept[name] = value
    return kept


def _is_harmless(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return True
    if not isinstance(value, str):
        return isinstance(value, int | float) and not is_secret(name)
    if name == "token":
        return value in _WAYS
    return is_public(name, value) or (name in _NAMES and not set(value) & set("@?#;"))
