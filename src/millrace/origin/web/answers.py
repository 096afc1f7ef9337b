"""What the headers of an HTTP answer say: versions, ranges, pauses, refusals. Pure."""

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

Headers = Mapping[str, str]
"""Headers by name, found in any case of letters (as urllib3's `HTTPHeaderDict`)."""

_MADE_UP = "~"
"""Begins the version of an object without a strong ETag."""

_LONGEST_TAG = 200
_LONGEST_PAUSE = 1e9  # and no infinity
_CONTENT_RANGE = re.compile(r"bytes\s+(?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)\s*", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,18}")  # fits into 63 bits; int() itself refuses thousands of digits
# The draft's header that the Hugging Face hub sends: `"api";r=0;t=55` is no request left for 55 seconds.
_RATE_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")
_ENCODED_FILES = {
    "gzip": (".gz", ".tgz"), "x-gzip": (".gz", ".tgz"), "br": (".br",), "zstd": (".zst",),
    "compress": (".z",), "x-compress": (".z",), "bzip2": (".bz2",), "x-bzip2": (".bz2",), "xz": (".xz",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ContentRange:
    """The bytes `[start, stop)` of `total` (None: not told); both 0 where the range was not satisfiable."""

    start: int
    stop: int
    total: int | None


def content_range(headers: Headers) -> ContentRange | None:
    """What `Content-Range` says, None where it is missing or makes no sense."""
    match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
    if match is None:
        return None
    start, stop = (int(match[1]), int(match[2]) + 1) if match[1] is not None else (0, 0)
    total = None if match[3] == "*" else int(match[3])
    if stop < start or (total is not None and stop > total):
        return None
    return ContentRange(start, stop, total)


def content_length(headers: Headers) -> int | None:
    """The number of bytes of the body, None where the answer does not say (as with chunks)."""
    return None if "Transfer-Encoding" in headers else number(headers.get("Content-Length"))


def number(text: str | None) -> int | None:
    """The size that a header tells, None where it tells none that can be."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def version_of(headers: Headers, size: int) -> str:
    """The version of an object of `size` bytes: a strong ETag; else what there is of a weak one and a date, and the size.

    A weak ETag only promises that two answers mean the same, so it counts together with the date and the size. A server that
    gives neither has versions by size alone: an overwrite of the same size is not seen.
    """
    tag = headers.get("ETag", "").strip()
    if tag and not tag.startswith(("W/", _MADE_UP)):
        return tag if len(tag) <= _LONGEST_TAG and tag.isascii() else f"{_MADE_UP}{_digest(tag)}"
    return f"{_MADE_UP}{_digest(tag) if tag else ''};{headers.get('Last-Modified', '').strip()[:64]};{size}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def precondition(version: str | None) -> dict[str, str]:
    """The header that makes a server refuse to answer with another version, where it understands one.

    The answer is compared all the same: many servers ignore these headers.
    """
    if version is None:
        return {}
    if version.startswith('"'):
        return {"If-Match": version}
    date = version.split(";")[1] if version.startswith(_MADE_UP) and version.count(";") == 2 else ""
    return {"If-Unmodified-Since": date} if date else {}


def modified_of(headers: Headers) -> float:
    """When the object was changed, in Unix seconds; 0 where the server does not say."""
    return _seconds(headers.get("Last-Modified", "")) or 0.0


def _seconds(date: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def retry_after(headers: Headers, now: float) -> float | None:
    """For how many seconds the server wants to be left alone, None where it does not say. `now` is in Unix seconds."""
    asked = parse_retry_after(headers.get("Retry-After"), now)
    if asked is not None:
        return min(asked, _LONGEST_PAUSE)
    spent = _RATE_LIMIT.search(headers.get("RateLimit", ""))
    return min(float(spent[1]), _LONGEST_PAUSE) if spent else None


def check_encoding(headers: Headers, url: str) -> None:
    """Raise `UsageError` for a body that the server has compressed although it was asked not to.

    Its ranges would be those of other bytes. A file that *is* compressed (`x.csv.gz`) may say so: those are its bytes.
    """
    coding = headers.get("Content-Encoding", "identity").strip().lower()
    suffix = posixpath.splitext(unquote(urlsplit(url).path))[1].lower()
    if coding not in ("", "identity") and suffix not in _ENCODED_FILES.get(coding, ()):
        raise UsageError(
            f"{shown(url)} is sent compressed ({coding[:20]}) although the plain bytes were asked for",
            next_step="switch compression off in the server for it: ranges and sizes cannot be trusted so",
        )


def refusal(status: int, headers: Headers, url: str, now: float) -> MillraceError:
    """The error for an answer whose status is no success. `now` is in Unix seconds."""
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
            f"{name}: the server asks for fewer requests (status {status})",
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
        f"{name}: the server answered with status {status}", next_step="open it in a browser or with curl"
    )
