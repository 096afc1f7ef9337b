"""Converts keys to URLs, and URLs to a form without secrets. Pure.

A key is a URL without its scheme, `host[:port]/path[?query]`, written as in a browser: percent-encoded characters stay as
they are, and characters that are not allowed in a URL are encoded.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote_to_bytes, urljoin, urlsplit

from millrace.errors import ObjectNotFoundError, OriginUnavailableError, UsageError
from millrace.origin.keys import UNUSABLE_CHARACTERS

_HOST = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ENCODED_RUN = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
_DOT_SEGMENT = re.compile(r"(?:\.|%2[eE]){1,2}")
_IN_PATHS = "/:@!$&'()*+,;=~%"
_IN_QUERIES = _IN_PATHS + "?[]|"
_PORTS = {"http": 80, "https": 443}


def url_of(scheme: str, key: str) -> str:
    """The URL that `key` names.

    Raises `UsageError` for a user name, password or fragment, and `ObjectNotFoundError` for an invalid URL.
    """
    host, slash_or_query, rest = re.match(r"([^/?#]*)([/?#]?)(.*)", key, re.DOTALL).groups()  # type: ignore[union-attr]
    if "@" in host:  # not shown in the message
        raise UsageError(
            f"a URL of {scheme}:// has a user name or password in it",
            next_step="set target_options={'auth': (user, password)}",
        )
    if UNUSABLE_CHARACTERS.search(key):
        raise ObjectNotFoundError(
            f"{shown(f'{scheme}://{key}')} is not a valid URL", next_step="use UTF-8 without control characters"
        )
    host = _ascii_host(scheme, host)
    if "#" in slash_or_query + rest:
        raise UsageError(
            f"{shown(f'{scheme}://{key}')} has a '#', and the part after it is never sent to a server",
            next_step="remove that part, or write %23 for a '#' in a name",
        )
    path, question_mark, query = (slash_or_query + rest).partition("?")
    if any(_DOT_SEGMENT.fullmatch(part) for part in path.split("/")):
        raise ObjectNotFoundError(
            f"{shown(f'{scheme}://{key}')} has '.' or '..' as a part of its path", next_step="write the path without it"
        )
    return f"{scheme}://{host}{_encoded(path, _IN_PATHS) or '/'}{question_mark}{_encoded(query, _IN_QUERIES)}"


def _ascii_host(scheme: str, host: str) -> str:
    try:
        ascii_host = host if host.isascii() else host.encode("idna").decode()
    except UnicodeError:
        ascii_host = ""
    match = _HOST.fullmatch(ascii_host)
    if match is None or int(match["port"] or 0) > 65_535:
        raise ObjectNotFoundError(
            f"{scheme}:// without a valid name of a server", next_step=f"write {scheme}://host/path"
        )
    return ascii_host


def _encoded(text: str, safe: str) -> str:
    """Percent-encode the characters that are not allowed in a URL; encoded ones stay."""
    return quote(_STRAY_PERCENT.sub("%25", text), safe=safe)


def readable(part: str) -> str:
    """A part of a URL's path as users write it in a key: decoded, except for characters that would change its meaning."""
    return _ENCODED_RUN.sub(lambda run: _decoded(run[0]), part)


def _decoded(run: str) -> str:
    try:
        text = unquote_to_bytes(run).decode()
    except UnicodeDecodeError:
        return run
    return "".join(f"%{ord(char):02X}" if char in "%/?#" or UNUSABLE_CHARACTERS.match(char) else char for char in text)


def shown(url: str) -> str:
    """A URL for messages: without its query, which may be a signature, and without user name and password."""
    scheme, separator, rest = url.partition("://")
    plain, question_mark, _ = rest.partition("?")
    host, slash, path = plain.partition("/")
    text = f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}" + ("?..." if question_mark else "")
    return text.encode("utf-8", "backslashreplace").decode()


def same_server(one: str, other: str) -> bool:
    """Whether two URLs have the same scheme, host and port. A password must not be sent to another server."""
    return _server(one) == _server(other)


def _server(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme)


def redirected(url: str, location: str) -> str:
    """The target of a redirect from `url`.

    Raises `OriginUnavailableError` for a target that is not an http(s) URL, `UsageError` for one without encryption.
    """
    try:
        target = urljoin(url, _encoded(location, _IN_QUERIES + "#")).partition("#")[0]
        parts = urlsplit(target)
        usable = parts.scheme in _PORTS and bool(parts.hostname) and "@" not in parts.netloc and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise OriginUnavailableError(f"{shown(url)} redirects to an invalid web address", next_step="ask its operator")
    if urlsplit(url).scheme == "https" and parts.scheme == "http":
        raise UsageError(
            f"{shown(url)} redirects to http://, where the bytes can be changed on the way",
            next_step="read the http:// address itself if that is acceptable",
        )
    return target
