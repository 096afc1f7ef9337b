"""The base class of Millrace's own origins: defaults for the Protocol, and slots and retries for their requests.

An operation on an origin may need several requests: a listing of a web server is a page and a HEAD for each of its links. So
that each request takes a slot, and only the failed one is retried, these origins pass each request to a `RequestLimiter`.
For any other class `limits.LimitedOrigin` takes one slot for each call.

Requests of an `Operation` end together, so that the cleanup after a failure does not take as long as the failure.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn, Protocol, Self, TypeVar

from typing_extensions import Buffer

from millrace.errors import ConfigurationError, ObjectChangedError, OriginUnavailableError, UsageError
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo, ObjectWriter

Result = TypeVar("Result")


class RequestLimiter(Protocol):
    """Limits and retries requests. Thread-safe; safe across fork. `url` is `scheme://key`, which errors name."""

    @property
    def request_seconds(self) -> float:
        """The longest time of one request; `inf` if only the client's own limits apply."""
        ...

    def retrying(self, url: str, operation: Callable[[], Result], *, once: bool = False) -> Result:
        """Return the result of `operation`, which is retried if that can help. Its requests take slots; it has none itself.

        Raises its errors. With `once` it must create a new object, see `limits.retrying`.
        """
        ...

    def slot(self, url: str, request: Callable[[], Result]) -> Result:
        """Return the result of `request`, which is one request, started when a slot is free, and not retried here.

        `request` must not take another slot: with a limit of one request at once it would wait for itself.
        """
        ...


def request_seconds(timeout: float) -> float:
    """The longest time of a single request with the option `timeout`, both in seconds."""
    return timeout / 3


class _Unlimited:
    request_seconds = math.inf

    def retrying(self, url: str, operation: Callable[[], Result], *, once: bool = False) -> Result:
        return operation()

    def slot(self, url: str, request: Callable[[], Result]) -> Result:
        return request()


UNLIMITED: RequestLimiter = _Unlimited()
"""No limits and no retries."""


class Operation:
    """The requests in all threads that run `part_of(operation)`, or in a copy of such a context.

    After one of them has failed because its origin did not respond in time, further ones to an origin with the option
    `timeout` fail at once. So the check whether a write has arrived, or the removal of its objects, does not take the same
    time again. Has no effect on origins without that option. Thread-safe.
    """

    def __init__(self) -> None:
        self.ended_by: OriginUnavailableError | None = None
        """The error that ended the operation; None allows requests again."""


_current: ContextVar[Operation | None] = ContextVar("millrace-origin-operation", default=None)


@contextlib.contextmanager
def part_of(operation: Operation) -> Iterator[None]:
    """Make the requests of this thread inside of the `with` block a part of `operation`."""
    token = _current.set(operation)
    try:
        yield
    finally:
        _current.reset(token)


def refuse_if_ended(what: str) -> None:
    """Raise `OriginUnavailableError` for a request to the URL `what` if the current operation has ended."""
    operation = _current.get()
    ended_by = operation.ended_by if operation is not None else None
    if ended_by is not None:
        raise OriginUnavailableError(
            f"{what}: not requested, since the origin has not answered before ({ended_by.message})",
            next_step=ended_by.next_step,
        ) from ended_by


def note_failure(error: BaseException) -> None:
    """End the current operation if `error` is that of an origin that did not respond in time."""
    operation = _current.get()
    if operation is not None and isinstance(error, OriginUnavailableError) and not error.is_final:
        operation.ended_by = operation.ended_by or error


class BaseOrigin:
    """One storage system, created from (scheme, target_options). Implements `Origin` together with a subclass.

    A subclass has `identity`, `head`, `read_range`, `list_level`, `list_pages` and, unless it is read only, `put`,
    `open_writer` and `delete`. It sends each request inside of `_slot`, and each part of a listing or removal inside of
    `_retrying`. `head`, `read` and `put` are retried by the caller (`LimitedOrigin`).

    Thread-safe; safe across fork; pickles as (scheme, target_options), which includes explicit secrets, as documented.
    """

    cannot_be_written = ""
    """For a read-only origin: the problem and the next step of its errors, separated by `; `."""

    _limiter: RequestLimiter = UNLIMITED

    def __init__(self, scheme: str, target_options: Mapping[str, Any] | None = None) -> None:
        self._scheme = scheme
        self._target_options = dict(target_options or {})
        self._identity = scheme

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.identity!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._scheme, self._target_options)

    def within(self, limiter: RequestLimiter) -> Self:
        """The same origin, with the same connections, whose requests use `limiter`."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _limiter=limiter)
        return twin

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def head_is_local(self) -> bool:
        return False

    def is_immutable(self, key: str) -> bool:
        return False

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        if not 0 <= start <= stop:
            raise ConfigurationError(f"bad byte range [{start}, {stop}) of {self._shown(key)}")
        return self.read_range(key, start, stop, version) if start < stop else b""

    def read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        """As `read`, for a range with at least one byte."""
        raise NotImplementedError

    def list_level(self, prefix: str) -> Listing:
        raise NotImplementedError

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        raise NotImplementedError

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        return (page.objects for page in self.list_pages(prefix) if page.objects)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._refuse_write()

    def open_writer(self, key: str) -> ObjectWriter:
        self._refuse_write()

    def delete(self, keys: Sequence[str]) -> None:
        self._refuse_write()

    def _refuse_write(self) -> NoReturn:
        problem, _, next_step = self.cannot_be_written.partition("; ")
        raise UsageError(problem, next_step=next_step)

    # --- for subclasses ---------------------------------------------------------------------------

    def _retrying(self, key: str, operation: Callable[[], Result]) -> Result:
        return self._limiter.retrying(self._url(key), operation)

    def _slot(self, key: str, request: Callable[[], Result]) -> Result:
        return self._limiter.slot(self._url(key), request)

    def _url(self, key: str) -> str:
        return f"file:///{key.lstrip('/')}" if self._scheme == "file" else f"{self._scheme}://{key}"

    def _shown(self, key: str) -> str:
        """The URL of `key` for error messages, without secrets."""
        return self._url(key)

    def _overwritten(self, key: str) -> ObjectChangedError:
        """The error for a read of an older version."""
        return ObjectChangedError(f"{self._shown(key)} was overwritten while it was read", next_step="open it again")

    def _outside(self, key: str, start: int, stop: int, size: int | None) -> UsageError:
        """The error for a range that ends past the end of an object that has not changed. `size` may be unknown."""
        end = f"the {size} bytes" if size is not None else "the end"
        return UsageError(
            f"the range [{start}, {stop}) ends past {end} of {self._shown(key)}", next_step="read inside the object"
        )


def resumed(
    begin: Callable[[str], Iterator[ListingPage]],
    after: str,
    retrying: Callable[[Callable[[], ListingPage | None]], ListingPage | None],
) -> Iterator[ListingPage]:
    """The pages that follow `after`. If one fails, `retrying` may call again for it, and the listing continues there.

    `begin(after)` starts a listing behind a key.
    """
    pages: Iterator[ListingPage] | None = None
    position, is_directory = after, False

    def next_page() -> ListingPage | None:
        nonlocal pages
        if pages is None:
            pages = begin(position)
        try:
            return next(pages, None)
        except BaseException:
            pages = None  # a generator that has raised has ended: the next try starts behind the last page
            raise

    while (page := retrying(next_page)) is not None:
        # True from the first page that shows it, also if the listing had to start again behind that page.
        is_directory = is_directory or page.is_directory
        if page.objects:
            position = page.objects[-1].key
        yield page if page.is_directory == is_directory else replace(page, is_directory=is_directory)
        if page.last:
            return


def pages_of(objects: Iterator[ObjectInfo], size: int, *, is_directory: bool) -> Iterator[ListingPage]:
    """Pages of at most `size` objects; the last one may be empty."""
    page: list[ObjectInfo] = []
    for info in objects:
        page.append(info)
        if len(page) == size:
            yield ListingPage(page, False, is_directory)
            page = []
    yield ListingPage(page, True, is_directory)


def walk(
    list_level: Callable[[str], Listing],
    listing: Listing,
    after: str,
    empty_folder: Callable[[str], ObjectInfo | None],
) -> Iterator[ObjectInfo]:
    """The objects of and below `listing` that follow `after`, in the order of the keys. One level is in memory at a time.

    `empty_folder` describes an empty directory, whose key ends in a slash; None if it was removed meanwhile.
    """
    entries: list[tuple[str, ObjectInfo | None]] = [(info.key, info) for info in listing.objects]
    entries += [(f"{name}/", None) for name in listing.prefixes]
    for key, info in sorted(entries, key=lambda entry: entry[0]):
        if info is None:
            if key > after or after.startswith(key):
                level = list_level(key)
                is_empty = level.is_directory and not (level.objects or level.prefixes)
                if key > after and is_empty and (folder := empty_folder(key)) is not None:
                    yield folder
                yield from walk(list_level, level, after, empty_folder)
        elif key > after:
            yield info
