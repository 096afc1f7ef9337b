"""From keys to URLs, and what may be told of a URL. Pure.

A key is a URL without its scheme, `host[:port]/path[?query]`, written as in a browser: what is percent-encoded stays as it
is, what cannot stand in a URL is encoded.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote_to_bytes, urljoin, urlsplit

from millrace.errors import ObjectNotFoundError, OriginUnavailableError, UsageError
from millrace.origin import unusable

_HOST = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ENCODED_RUN = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
_DOT_SEGMENT = re.compile(r"(?:\.|%2[eE]){1,2}")
_IN_PATHS = "/:@!$&'()*+,;=~%"
_IN_QUERIES = _IN_PATHS + "?[]|"
_PORTS = {"http": 80, "https": 443}


def url_of(scheme: str, key: str) -> str:
    """The URL that `key` names.

    Raises `UsageError` for a name and password in it or for a fragment, `ObjectNotFoundError` for what names no resource.
    """
    host, slash_or_query, rest = re.match(r"([^/?#]*)([/?#]?)(.*)", key, re.DOTALL).groups()  # type: ignore[union-attr]
    if "@" in host:  # the message must not repeat it
        raise UsageError(
            f"a URL of {scheme}:// has a user name or password in it",
            next_step="give them as target_options={'auth': (user, password)}",
        )
    if unusable.CHARACTERS.search(key):
        raise ObjectNotFoundError(
            f"{shown(f'{scheme}://{key}')} is no valid URL", next_step="use UTF-8 without control characters"
        )
    host = _ascii_host(scheme, host)
    if "#" in slash_or_query + rest:
        raise UsageError(
            f"{shown(f'{scheme}://{key}')} has a '#', and what follows it is never sent to a server",
            next_step="leave the part after it out, or write %23 for a '#' in a name",
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
    """Percent-encode what may not stand in a URL; what is encoded already stays so."""
    return quote(_STRAY_PERCENT.sub("%25", text), safe=safe)


def readable(part: str) -> str:
    """A part of a URL's path as people write it in a key: decoded, but for what would mean something else then."""
    return _ENCODED_RUN.sub(lambda run: _decoded(run[0]), part)


def _decoded(run: str) -> str:
    try:
        text = unquote_to_bytes(run).decode()
    except UnicodeDecodeError:
        return run
    return "".join(f"%{ord(char):02X}" if char in "%/?#" or unusable.CHARACTERS.match(char) else char for char in text)


def shown(url: str) -> str:
    """A URL as messages may show it: without its query, which may hold a signature, and without name and password."""
    scheme, separator, rest = url.partition("://")
    plain, question_mark, _ = rest.partition("?")
    host, slash, path = plain.partition("/")
    text = f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}" + ("?..." if question_mark else "")
    return text.encode("utf-8", "backslashreplace").decode()


def same_server(one: str, other: str) -> bool:
    """Whether two URLs have the same scheme, host and port: only then does one's password belong to the other."""
    return _server(one) == _server(other)


def _server(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme)


def redirected(url: str, location: str) -> str:
    """Where an answer of `url` sends the reader.

    Raises `OriginUnavailableError` for a target that is no http(s) URL, `UsageError` for one that gives up encryption.
    """
    try:
        target = urljoin(url, _encoded(location, _IN_QUERIES + "#")).partition("#")[0]
        parts = urlsplit(target)
        usable = parts.scheme in _PORTS and bool(parts.hostname) and "@" not in parts.netloc and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise OriginUnavailableError(f"{shown(url)} redirects to what is no web address", next_step="ask its operator")
    if urlsplit(url).scheme == "https" and parts.scheme == "http":
        raise UsageError(
            f"{shown(url)} redirects to http://, where anybody on the way could change the bytes",
            next_step="read the http:// address itself if that is acceptable",
        )
    return target
