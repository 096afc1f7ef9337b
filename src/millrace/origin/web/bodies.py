"""The bytes of a range out of an answer, or an error: never fewer, never others. And the text of an index page."""

from __future__ import annotations

from millrace.errors import MillraceError, OriginUnavailableError, UsageError
from millrace.origin.web.addresses import shown
from millrace.origin.web.answers import ContentRange, check_encoding, content_range
from millrace.origin.web.connections import Answer

_MOST_INDEX_BYTES = 64 << 20


def announced_range(answer: Answer, url: str, start: int, stop: int) -> tuple[ContentRange, int]:
    """What a 206 says that it brings, and the size of the whole; it may end before `stop` only where the object does.

    Raises `OriginUnavailableError` for a range that was not asked for.
    """
    told = content_range(answer.headers)
    if told is None or told.total is None or told.start != start or told.stop != min(stop, told.total):
        raise OriginUnavailableError(
            f"{shown(url)} answers with another range than [{start}, {stop})",
            next_step="read again; if it persists, a proxy in between is broken",
        )
    return told, told.total


def exact_body(answer: Answer, url: str, start: int, stop: int) -> bytes:
    """The body, which must be exactly the bytes `[start, stop)`. Raises `OriginUnavailableError` for fewer or more."""
    data = answer.read(stop - start)
    if len(data) != stop - start or answer.read(1):
        raise OriginUnavailableError(
            f"{shown(url)} answered {len(data)} bytes for the range [{start}, {stop})",
            next_step="read again; if it persists, a proxy in between truncates bodies",
        )
    return data


def outside(url: str, start: int, stop: int, size: int | None) -> MillraceError:
    """The error for a range that ends past the end of an object that has not changed."""
    known = f"the {size} bytes" if size is not None else "the end"
    return UsageError(
        f"the range [{start}, {stop}) ends past {known} of {shown(url)}", next_step="read inside the object"
    )


def index_text(answer: Answer, url: str) -> str:
    """The page that lists a directory. Raises `UsageError` for what is no page with links, or too long a one."""
    check_encoding(answer.headers, url)
    kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in ("text/html", "application/xhtml+xml"):
        raise UsageError(
            f"{shown(url)} cannot be listed: the server shows no index page of it",
            next_step="name each object, or let the server show an index (autoindex)",
        )
    body = answer.read(_MOST_INDEX_BYTES + 1)
    if len(body) > _MOST_INDEX_BYTES:
        raise UsageError(f"the index page {shown(url)} is too long", next_step="list directories below it")
    return body.decode("utf-8", "replace")
