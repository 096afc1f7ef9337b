"""Requests to origins within limits: the base class of Millrace's own origins, and `LimitedOrigin` around any origin.

An operation on an origin may need several requests: a listing of a web server is a page and a HEAD for each of its links. So
that each request takes a slot, and only the failed one is retried, these origins pass each request to a `RequestLimiter`.
For any other class `LimitedOrigin` takes one slot for each call. The slots and retries themselves are in `limits`, which is
imported with the first request.

Requests of an `Operation` end together, so that the cleanup after a failure does not take as long as the failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeVar, runtime_checkable

from typing_extensions import Buffer

from millrace.config import LIMIT_NAMES, resolve_limits
from millrace.errors import ConfigurationError, ObjectChangedError, OriginUnavailableError, UsageError
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo, ObjectWriter, Origin, request_seconds
from millrace.runtime.forks import imported

if TYPE_CHECKING:
    from millrace.origin.limits.slots import NodeLimiter

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


class _Unlimited:
    request_seconds = math.inf

    def retrying(self, url: str, operation: Callable[[], Result], *, once: bool = False) -> Result:
        return operation()

    def slot(self, url: str, request: Callable[[], Result]) -> Result:
        return request()


UNLIMITED: RequestLimiter = _Unlimited()
"""No limits and no retries."""


def byte_view(data: Buffer) -> memoryview:
    """The bytes of a contiguous buffer of any type and shape. Raises `TypeError` for another one."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a shape with a 0, such as (0, 3), cannot be cast


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
            f"{what}: not requested, since the origin did not respond before ({ended_by.message})",
            next_step=ended_by.next_step,
        ) from ended_by


def note_failure(error: BaseException) -> None:
    """End the current operation if `error` is that of an origin that did not respond in time."""
    operation = _current.get()
    if operation is not None and isinstance(error, OriginUnavailableError) and not error.is_final:
        operation.ended_by = operation.ended_by or error


class BaseOrigin(ABC):
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
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, _limiter=limiter)
        return copy

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

    @abstractmethod
    def read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        """As `read`, for a range with at least one byte."""

    @abstractmethod
    def list_level(self, prefix: str) -> Listing: ...

    @abstractmethod
    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]: ...

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
            if page.objects[-1].key == position:
                raise _endless(position)
            position = page.objects[-1].key
        yield page if page.is_directory == is_directory else page._replace(is_directory=is_directory)
        if page.last:
            return


def _endless(key: str) -> OriginUnavailableError:
    error = OriginUnavailableError(
        f"the listing repeats the page that ends with {key}",
        next_step="check the server, and proxies in front of it: they ignore where a page begins",
    )
    error.is_final = True
    return error


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


# --- an origin within limits ----------------------------------------------------------------------

DEFAULT_MAX_REQUESTS = 128
"""A network card of 100 Gbit/s needs about 130 requests at the 90 MB/s that S3 delivers for one. With small objects, at
30 ms each, 128 at once are some 4,000 a second; S3 supports 5,500 for one prefix."""

DEFAULT_MAX_WEB_REQUESTS = 16
"""For web servers, whose capacity is unknown: as many as a few browsers send."""

_WEB = frozenset({"http", "https"})  # one origin is many servers; the first part of each key is one
_MOST_LIMITERS = 64  # limiters of web servers that one origin keeps open without using them
_FOLDER = ("millrace", "limits")  # in a cache directory, next to the nodes' folders: they share the limits
_SERVER = re.compile(r"[^/?#]*")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The explicit limits (`config.LIMIT_NAMES`) of an origin of this `scheme`.

    Other limits come from the environment and the file where the origin is used, because directories differ per node.
    """

    scheme: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, scheme: str, arguments: Mapping[str, Any] | None = None) -> Limits:
        """The limits with these options; None stands for an option that is not set."""
        given = {name: value for name, value in (arguments or {}).items() if name in LIMIT_NAMES and value is not None}
        return cls(scheme=scheme, arguments=given)


def limited(origin: Origin, limits: Limits) -> Origin:
    """`origin` within `limits`; unchanged if it sends no requests over a network. Raises `ConfigurationError`."""
    return origin if origin.head_is_local else LimitedOrigin(origin, limits)


def requests_in_flight(cache_dir: Path) -> int:
    """The requests to origins in progress, of all processes that share `cache_dir`."""
    slots_in_use = imported("millrace.origin.limits.slots").slots_in_use
    in_flight = 0
    with contextlib.suppress(OSError):  # without the directory there was no request
        for path in cache_dir.joinpath(*_FOLDER).iterdir():
            with contextlib.suppress(OSError):  # a file that is not one of slots
                in_flight += slots_in_use(path)
    return in_flight


@runtime_checkable
class _SendsWhole(Protocol):
    """A writer that can send a small object by one request."""

    def send_whole_by(self, put: Callable[[Buffer], None]) -> None: ...


class OriginLimiter:
    """The `RequestLimiter` of one origin: the node's limiter for each URL, and retries.

    On the web each server has a limiter, also one that is reached by a redirect. Thread-safe, safe across fork. It uses the
    `origin` only for its name, and for the header `Retry-After` if the origin's library hides that.
    """

    def __init__(self, origin: Origin, limits: Limits) -> None:
        self._origin = origin
        self._is_web = limits.scheme in _WEB
        found = resolve_limits(limits.arguments)
        self._directory = found.directory.joinpath(*_FOLDER) if found.directory is not None else None
        self._most = found.max_requests or (DEFAULT_MAX_WEB_REQUESTS if self._is_web else DEFAULT_MAX_REQUESTS)
        self._per_second = found.requests_per_second
        self._is_default = not found.max_requests and not found.requests_per_second
        self._timeout = found.timeout_seconds
        self.request_seconds = math.inf if self._timeout is None else request_seconds(self._timeout)
        self._limiters: dict[str, NodeLimiter] = {}

    # The modules that send requests are imported here: a process that finds everything in the cache does not need them.

    def retrying(self, url: str, operation: Callable[[], Result], *, once: bool = False) -> Result:
        plain, mark, _ = url.partition("?") if self._is_web else (url, "", "")
        shown = f"{plain}?..." if mark else plain  # the query may be a signature
        retried = imported("millrace.origin.limits.retrying").retried
        if self._timeout is not None:
            refuse_if_ended(shown)
        try:
            result: Result = retried(shown, operation, once=once, timeout=self._timeout)
        except OriginUnavailableError as error:
            note_failure(error)
            raise
        return result

    def slot(self, url: str, request: Callable[[], Result]) -> Result:
        in_slot = imported("millrace.origin.limits.retrying").in_slot
        result: Result = in_slot(
            self.limiter_of(url), url, request, lambda: self._retry_after(url), timeout=self._timeout
        )
        return result

    def limiter_of(self, url: str) -> NodeLimiter:
        """The limiter of a request for `url`."""
        name = self._name(url)
        limiter = self._limiters.get(name)
        if limiter is not None and name:
            self._limiters[name] = self._limiters.pop(name, limiter)  # the most recently used is the last
        if limiter is None:
            identity = name or self._origin.identity
            file = hashlib.blake2b(identity.encode(errors="surrogateescape"), digest_size=16).hexdigest()
            path = self._directory / file if self._directory is not None else None
            node_limiter = imported("millrace.origin.limits.slots").node_limiter
            made: NodeLimiter = node_limiter(
                identity, path, most=self._most, per_second=self._per_second, is_default=self._is_default
            )
            limiter = self._limiters.setdefault(name, made)
            self._drop_idle()
        return limiter

    def _name(self, url: str) -> str:
        """The name of the limiter: empty, or on the web the server."""
        if not self._is_web:
            return ""
        scheme, _, rest = url.partition("://")
        server = _SERVER.match(rest)
        assert server is not None  # it matches any text
        return f"{scheme} {server[0]}"

    def _drop_idle(self) -> None:
        """Drop limiters of servers, each with two open files. Their state stays in the file."""
        for name in list(self._limiters)[:-_MOST_LIMITERS]:
            limiter = self._limiters.get(name)
            if limiter is not None and limiter.is_idle:
                self._limiters.pop(name, None)

    def _retry_after(self, url: str) -> float | None:
        module = imported("millrace.origin.limits.retry_after")  # HTTP and TLS, which are rarely needed
        seconds: float | None = module.request_retry_after(self._origin, url.partition("://")[2])
        return seconds


class LimitedOrigin:
    """`inner` within the limits of this node, with retries.

    A `BaseOrigin` takes a slot for each of its requests; for other origins each call takes one. Thread-safe, safe across
    fork; pickles as `inner` and the explicit limits. Streams of `open_writer` with several parts are neither limited nor
    retried here: the library that sends them retries each part.
    """

    def __init__(self, inner: Origin, limits: Limits) -> None:
        self.inner = inner
        self._limits = limits
        self._limiter = OriginLimiter(inner, limits)
        self._takes_slots = isinstance(inner, BaseOrigin)
        self._origin: Origin = inner.within(self._limiter) if isinstance(inner, BaseOrigin) else inner

    def __repr__(self) -> str:
        return f"LimitedOrigin({self.inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.inner, self._limits)

    @property
    def identity(self) -> str:
        return self.inner.identity

    @property
    def head_is_local(self) -> bool:
        return False  # see `limited`

    def is_immutable(self, key: str) -> bool:
        return self.inner.is_immutable(key)

    # --- requests ---------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        return self._retried(key, lambda: self._origin.head(key))

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        return self._retried(key, lambda: self._origin.read(key, start, stop, version=version))

    def list_level(self, prefix: str) -> Listing:
        if self._takes_slots:
            return self._origin.list_level(prefix)
        return self._retried(prefix, lambda: self._origin.list_level(prefix))

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        for page in self.list_pages(prefix):
            if page.objects:
                yield page.objects

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        if self._takes_slots:
            return self._origin.list_pages(prefix, after=after, settled=settled)
        return resumed(
            lambda behind: self._origin.list_pages(prefix, after=behind, settled=settled),
            after,
            lambda next_page: self._retried(prefix, next_page),
        )

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._retried(key, lambda: self._origin.put(key, data, if_absent=if_absent), once=if_absent)

    def open_writer(self, key: str) -> ObjectWriter:
        writer = self._retried(key, lambda: self._origin.open_writer(key))
        if isinstance(writer, _SendsWhole):
            writer.send_whole_by(lambda data: self.put(key, data))
        return writer

    def delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        if self._takes_slots:
            self._origin.delete(keys)
        else:
            self._retried(keys[0], lambda: self._origin.delete(keys))

    def _retried(self, key: str, operation: Callable[[], Result], *, once: bool = False) -> Result:
        url = self._url(key)
        if self._takes_slots:
            return self._limiter.retrying(url, operation, once=once)
        return self._limiter.retrying(url, lambda: self._limiter.slot(url, operation), once=once)

    def limiter_of(self, key: str) -> NodeLimiter:
        """The limiter of requests for `key`: one for all keys, on the web one for each server."""
        return self._limiter.limiter_of(self._url(key))

    def _url(self, key: str) -> str:
        return f"{self._limits.scheme}://{key}"
