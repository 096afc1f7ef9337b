"""The common part of the translations of all schemes: `StoreOptions`, and checks of options and credentials. Pure.

A secret that was read from a file often ends in a newline. An HTTP client refuses such a value late, or fails with an
internal error, so every text is cleaned and checked before the first request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from millrace.config import unknown_names
from millrace.errors import ConfigurationError

_NETLOC = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?")
_PATH = re.compile(r"[A-Za-z0-9/:@!$&'()*+,;=~%._-]*")

_VISIBLE = re.compile(r"[!-~]*")
# Control characters other than tab and line ends, and bytes that were not UTF-8, as Python keeps them in a string.
_NEVER = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
# A private key or a JSON document has several lines and is not changed.
_DOCUMENT = re.compile(r"\s*[{\[]|[\s\S]*-----BEGIN ")


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """The options of obstore: `config` for the store's constructor, `client_options` for its HTTP client.

    `endpoint` is the public part of the identity of the storage, without a trailing slash.
    """

    config: Mapping[str, Any] = field(repr=False)
    client_options: Mapping[str, Any] = field(repr=False)
    endpoint: str
    region: str = ""
    """Only for Amazon's own S3, whose address contains it."""
    fixed: Mapping[str, Any] | None = field(default=None, repr=False)
    """Explicit credentials, which never change, in the form of obstore's credential providers."""
    signs_itself: bool = False
    """Whether `config` is complete, or requests are not signed: no credentials are searched."""
    may_write: bool = True
    """False if obstore cannot write: it would search for credentials, which the options exclude."""
    hints: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Options with the place of the credentials (`profile`, `credential`, `token`, ...)."""

    @property
    def address(self) -> str:
        """The URL of the server."""
        return f"https://s3.{self.region}.amazonaws.com" if self.region else self.endpoint


def reject_unknown(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Raise `ConfigurationError` for options that are not in `known`, except for those with the value None."""
    unknown = sorted(name for name in set(given) - set(known) if given[name] is not None)
    if unknown:
        raise unknown_names(f"unknown {what}", unknown, known)


def boolean(value: Any, what: str, *, default: bool = False) -> bool:
    """An option that is True or False; `default` for None. Raises `ConfigurationError` for others, such as "false"."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what} is neither True nor False", next_step="use one of them")
    return value


def check_texts(given: Mapping[str, Any], what: str, *, sendable: bool = True) -> None:
    """Raise `ConfigurationError` for the first value that is not None and not a text, or cannot be sent in a request.

    The message has the name of the option, and never its value, which may be a secret. `sendable=False`: checks the type.
    """
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise ConfigurationError(f"{what} {name!r} is not a text", next_step="use a string")
        if value and sendable:
            check_sendable(value, f"{what} {name!r}")


def checked_mapping(value: Any, what: str) -> dict[str, Any]:
    """A dict of options, empty for None; all `target_options` pass through here.

    Removes surrounding white space from every text. Raises `ConfigurationError` for another type, and for a text with
    characters that no option can have.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigurationError(f"{what} is not a dict of options", next_step="use a dict, such as {'name': value}")
    cleaned = {name: stripped(each) for name, each in value.items()}
    for name, each in cleaned.items():
        if unusable_in(each):
            raise ConfigurationError(
                f"{what}: {name!r} contains a control character or invalid Unicode",
                next_step="copy the value again, or encode the file that it was read from as UTF-8",
            )
    return cleaned


def checked_endpoint(endpoint: str, name: str, instead: str) -> str:
    """An endpoint without the slash at its end. Raises `ConfigurationError` for an invalid URL or one with a password."""
    check_sendable(endpoint, name)  # first: `urlsplit` removes line ends
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:  # without the cause, whose text has the value
        raise ConfigurationError(
            f"{name} has an address or a port that cannot be used",
            next_step="write https://host, or http://host:port with a port from 1 to 65535",
        ) from None
    if "@" in parts.netloc:
        raise ConfigurationError(f"{name} has a user name or password in it", next_step=f"use {instead} instead")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            f"{name} is not a URL of a server", next_step="write https://host, or http://host:port"
        )
    if parts.query or parts.fragment:
        raise ConfigurationError(f"{name} has a query in it", next_step=f"use {instead} instead")
    if not _NETLOC.fullmatch(parts.netloc) or port == 0 or not _PATH.fullmatch(parts.path):
        raise ConfigurationError(
            f"{name} contains a character that a URL cannot have, or a port that cannot be used",
            next_step="write https://host, or http://host:port, in ASCII and without spaces",
        )
    return endpoint.rstrip("/")


def http_options(endpoint: str | None) -> dict[str, Any]:
    """The options of the HTTP client for an endpoint; unencrypted only with `http://`."""
    return {"allow_http": True} if endpoint and endpoint.startswith("http://") else {}


# --- texts ----------------------------------------------------------------------------------------


def stripped(value: Any) -> Any:
    """`value` without white space around its texts, also inside mappings, lists and tuples. Documents stay as they are."""
    if isinstance(value, str):
        return value if is_document(value) else value.strip()
    if type(value) is dict:
        return {name: stripped(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(stripped(each) for each in value)
    return value


def stripped_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment's variables without white space around their values; a value of white space is empty, as if unset."""
    return {name: value.strip() for name, value in environ.items()}


def is_document(text: str) -> bool:
    """Whether a text is a key in PEM or a JSON document, which may have several lines."""
    return "\n" in text and _DOCUMENT.match(text) is not None


def unusable_in(value: Any, *, lines: bool = True) -> bool:
    """Whether a text in `value` has characters that no option can have. `lines=False`: also line ends outside documents."""
    if isinstance(value, str):
        return bool(_NEVER.search(value)) or (not lines and not is_document(value) and len(value.splitlines()) > 1)
    if isinstance(value, Mapping):
        return any(unusable_in(each, lines=lines) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return any(unusable_in(each, lines=lines) for each in value)
    return False


def is_sendable(text: str) -> bool:
    """Whether a text consists of visible ASCII characters only, as a credential in a header or a part of a host must."""
    return _VISIBLE.fullmatch(text) is not None


def check_sendable(text: str, what: str) -> None:
    """Raise `ConfigurationError`, which names `what` and not the text, for one that is not sendable."""
    if not is_sendable(text):
        raise ConfigurationError(
            f"{what} contains a space, a line end, or a character that is not ASCII",
            next_step="copy the value again; a newline inside it often comes from the file that it was read from",
        )
