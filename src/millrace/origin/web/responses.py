"""Parses HTTP responses: versions, ranges, pauses and refusals from headers, and checked bodies."""

from __future__ import annotations

import email.utils
import hashlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from millrace.errors import (
    DeniedError,
    MillraceError,
    ObjectChangedError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    UsageError,
)
from millrace.origin.limits.retry_after import parse_retry_after
from millrace.origin.web.addresses import shown
from millrace.origin.web.connections import Response

Headers = Mapping[str, str]
"""Headers by name; lookups ignore case, as in urllib3's `HTTPHeaderDict`."""

_MADE_UP = "~"
"""The prefix of the version of an object without a strong ETag."""

_MOST_INDEX_BYTES = 64 << 20
_LONGEST_TAG = 200
_LONGEST_PAUSE = 1e9  # excludes infinity
_CONTENT_RANGE = re.compile(r"bytes\s+(?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)\s*", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,18}")  # fits into 63 bits; int() itself refuses thousands of digits
# The header of a draft that the Hugging Face hub sends: `"api";r=0;t=55` means 0 requests left for 55 seconds.
_RATE_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")
_ENCODED_FILES = {
    "gzip": (".gz", ".tgz"), "x-gzip": (".gz", ".tgz"), "br": (".br",), "zstd": (".zst",),
    "compress": (".z",), "x-compress": (".z",), "bzip2": (".bz2",), "x-bzip2": (".bz2",), "xz": (".xz",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ContentRange:
    """The bytes `[start, stop)` of `total` (None: unknown); both 0 if the range was not satisfiable."""

    start: int
    stop: int
    total: int | None


def content_range(headers: Headers) -> ContentRange | None:
    """The parsed `Content-Range`; None if it is missing or invalid."""
    match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
    if match is None:
        return None
    start, stop = (int(match[1]), int(match[2]) + 1) if match[1] is not None else (0, 0)
    total = None if match[3] == "*" else int(match[3])
    if stop < start or (total is not None and stop > total):
        return None
    return ContentRange(start, stop, total)


def content_length(response: Response) -> int | None:
    """The size of the body in bytes; None if the response does not have it (as with chunks).

    Raises `OriginUnavailableError` for an invalid value: the end of the body is then unknown (RFC 9112, 6.3).
    """
    text = response.headers.get("Content-Length")
    if text is None or "Transfer-Encoding" in response.headers:
        return None
    size = number(text)
    if size is None or size >= 1 << 63:
        raise OriginUnavailableError(
            f"{shown(response.url)}: the response has the invalid length {text!r:.40}",
            next_step="check the server, and proxies in front of it",
        )
    return size


def number(text: str | None) -> int | None:
    """The size in a header's value; None for an invalid one."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def version_of(headers: Headers, size: int) -> str:
    """The version of an object of `size` bytes: a strong ETag, or else a weak ETag, date and size as available.

    A weak ETag only means that two responses are equivalent, so it counts together with the date and the size. Without both,
    the version is the size alone: an overwrite of the same size is not detected.
    """
    tag = headers.get("ETag", "").strip()
    if tag and not tag.startswith(("W/", _MADE_UP)):
        return tag if len(tag) <= _LONGEST_TAG and tag.isascii() else f"{_MADE_UP}{_digest(tag)}"
    return f"{_MADE_UP}{_digest(tag) if tag else ''};{headers.get('Last-Modified', '').strip()[:64]};{size}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def precondition(version: str | None) -> dict[str, str]:
    """The header with which a server refuses to send another version. Empty if there is none for this version.

    The caller must also compare the response: many servers ignore these headers.
    """
    if version is None:
        return {}
    if version.startswith('"'):
        return {"If-Match": version}
    date = version.split(";")[1] if version.startswith(_MADE_UP) and version.count(";") == 2 else ""
    return {"If-Unmodified-Since": date} if date else {}


def modified_of(headers: Headers) -> float:
    """The time of the last change in Unix seconds; 0 if unknown."""
    return _seconds(headers.get("Last-Modified", "")) or 0.0


def _seconds(date: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def retry_after(headers: Headers, now: float) -> float | None:
    """The pause in seconds that the server requests; None without such a header. `now` is in Unix seconds."""
    requested = parse_retry_after(headers.get("Retry-After"), now)
    if requested is not None:
        return min(requested, _LONGEST_PAUSE)
    spent = _RATE_LIMIT.search(headers.get("RateLimit", ""))
    return min(float(spent[1]), _LONGEST_PAUSE) if spent else None


def check_encoding(headers: Headers, url: str) -> None:
    """Raise `UsageError` for a body that the server has compressed against the request.

    Its ranges would be of other bytes. A file that is compressed itself (`x.csv.gz`) may have such a header.
    """
    coding = headers.get("Content-Encoding", "identity").strip().lower()
    transfer = headers.get("Transfer-Encoding", "chunked").strip().lower()
    if transfer not in ("chunked", "identity"):  # Python's HTTP library would return it with the sizes of its chunks
        raise UsageError(
            f"{shown(url)} is sent in an unknown form ({transfer[:20]})",
            next_step="disable compression for it in the server, and in proxies in front of it",
        )
    suffix = posixpath.splitext(unquote(urlsplit(url).path))[1].lower()
    if coding not in ("", "identity") and suffix not in _ENCODED_FILES.get(coding, ()):
        raise UsageError(
            f"{shown(url)} is sent compressed ({coding[:20]}) although the plain bytes were requested",
            next_step="disable compression for it in the server: ranges and sizes are wrong with it",
        )


def refusal(status: int, headers: Headers, url: str, now: float) -> MillraceError:
    """The error for a response without success. `now` is in Unix seconds."""
    name = shown(url)
    if status in (404, 410):
        return ObjectNotFoundError(f"{name} does not exist", next_step="check the name")
    if status in (401, 403, 407, 451):
        return DeniedError(
            f"access to {name} was denied (status {status})", next_step="check user name, password or token for it"
        )
    if status == 412:
        return ObjectChangedError(f"{name} was overwritten while it was read", next_step="open it again")
    pause = retry_after(headers, now)
    if status == 429 or (status == 503 and pause is not None):
        return OriginBusyError(
            f"{name}: the server requests a lower rate (status {status})",
            next_step="read with fewer workers, or later",
            retry_after=pause,
        )
    if status == 503:
        return OriginBusyError(f"{name}: the server is overloaded (status 503)", next_step="try again later")
    if status in (408, 425) or status >= 500:
        failed = OriginUnavailableError(f"{name}: the server failed (status {status})", next_step="try again later")
        failed.is_final = status in (501, 505)
        return failed
    return UsageError(
        f"{name}: the server responded with status {status}", next_step="open it in a browser or with curl"
    )


# --- bodies ---------------------------------------------------------------------------------------


def announced_range(response: Response, url: str, start: int, stop: int) -> tuple[ContentRange, int]:
    """The range of a 206 and the size of the object; it may end before `stop` only at the end of the object.

    Raises `OriginUnavailableError` for a range that was not requested.
    """
    found = content_range(response.headers)
    if found is None or found.total is None or found.start != start or found.stop != min(stop, found.total):
        raise OriginUnavailableError(
            f"{shown(url)} responds with another range than [{start}, {stop})",
            next_step="read again; if it persists, a proxy in between is broken",
        )
    return found, found.total


def exact_body(response: Response, url: str, start: int, stop: int) -> bytes:
    """The body, which must be exactly the bytes `[start, stop)`. Raises `OriginUnavailableError` for fewer or more."""
    data = response.read(stop - start)
    if len(data) != stop - start or response.read(1):
        raise OriginUnavailableError(
            f"{shown(url)} sent {len(data)} bytes for the range [{start}, {stop})",
            next_step="read again; if it persists, a proxy in between truncates bodies",
        )
    return data


def index_text(response: Response, url: str) -> str:
    """The index page of a directory. Raises `UsageError` for another kind of response, and for one that is too long."""
    check_encoding(response.headers, url)
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in ("text/html", "application/xhtml+xml"):
        raise UsageError(
            f"{shown(url)} cannot be listed: the server has no index page of it",
            next_step="name each object, or enable index pages in the server (autoindex)",
        )
    body = response.read(_MOST_INDEX_BYTES + 1)
    if len(body) > _MOST_INDEX_BYTES:
        raise UsageError(f"the index page {shown(url)} is too long", next_step="list directories below it")
    return body.decode("utf-8", "replace")
