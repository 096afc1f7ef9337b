"""What every scheme's translation has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from millrace.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """What obstore needs: `config` goes to the store's constructor, `client_options` to its HTTP client.

    `endpoint` is the non-secret part of the identity of the storage, without a trailing slash.
    """

    config: Mapping[str, Any] = field(repr=False)
    client_options: Mapping[str, Any] = field(repr=False)
    endpoint: str
    fixed: Mapping[str, Any] | None = field(default=None, repr=False)
    """Credentials that were given and never change, as obstore's credential provider answers them."""
    signs_itself: bool = False
    """`config` says all that is needed, or requests are not signed at all: no credentials are looked for."""
    may_write: bool = True
    """False where obstore cannot even ask: it would look for credentials that the options say are not wanted."""
    hints: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Where to look for credentials (`profile`, `credential`, `token`, ...), if the options say so."""


def reject_unknown(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Raise `ConfigurationError` for what is not in `known`. A value of None counts as not given, known or not."""
    unknown = sorted(name for name in set(given) - set(known) if given[name] is not None)
    if unknown:
        raise ConfigurationError(
            f"unknown {what} {', '.join(map(repr, unknown))}", next_step=f"known ones are {', '.join(known)}"
        )


def boolean(value: Any, what: str, *, default: bool = False) -> bool:
    """An option that is True or False, `default` for None. Raises `ConfigurationError` for another: "false" is no False."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what} is neither True nor False", next_step="give one of them")
    return value


def check_texts(given: Mapping[str, Any], what: str) -> None:
    """Raise `ConfigurationError` for the first that is neither None nor a text; its value, maybe a secret, is not told."""
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise ConfigurationError(f"{what} {name!r} is no text", next_step="give a string")


def checked_mapping(value: Any, what: str) -> dict[str, Any]:
    """A dict, empty for None. Raises `ConfigurationError` for what is none, or has names that are no texts."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigurationError(f"{what} is no dict of options", next_step="give a dict, such as {'name': value}")
    return dict(value)


def checked_endpoint(endpoint: str, name: str, instead: str) -> str:
    """An endpoint without the slash at its end. Raises `ConfigurationError` for one that is no URL or holds a password."""
    parts = urlsplit(endpoint)
    if "@" in parts.netloc:
        raise ConfigurationError(f"{name} has a user name or password in it", next_step=f"give them as {instead}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"{name} is no URL of a server", next_step="write https://host, or http://host:port")
    if parts.query or parts.fragment:
        raise ConfigurationError(f"{name} has a query in it", next_step=f"give what it says as {instead}")
    return endpoint.rstrip("/")


def http_options(endpoint: str | None) -> dict[str, Any]:
    """What the HTTP client needs for an endpoint; unencrypted only where the user wrote `http://`."""
    return {"allow_http": True} if endpoint and endpoint.startswith("http://") else {}
