"""The requirements for remote storage: one narrow Protocol for each use.

Keys are `bucket/path/of/object` without a scheme. Byte ranges are half-open. Every call blocks, is thread-safe, and raises
only `millrace.errors`. Implementations are picklable. After a fork the child uses its own connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple, Protocol, Self, runtime_checkable

from typing_extensions import Buffer


class ObjectInfo(NamedTuple):
    """One version of one object.

    `version` is opaque: an ETag, a version id, or another value that changes with the bytes. It is the precondition of
    `read`. `modified` is in Unix seconds.
    """

    key: str
    size: int
    version: str
    modified: float


class Listing(NamedTuple):
    """One level of a key space: the objects directly below a prefix, and the deeper prefixes (no trailing slash).

    `is_directory` is True for an empty level that exists: an empty bucket, folder or local directory.
    """

    objects: Sequence[ObjectInfo]
    prefixes: Sequence[str]
    is_directory: bool = False


class ListingPage(NamedTuple):
    """A part of a listing from one request: at most 1,000 objects in the origin's order.

    `last`: nothing follows; an empty page may not be the last one. `is_directory`: the prefix itself exists, because it is a
    bucket or a local directory, or because its folder's marker was found. Both may be False for an empty page: the prefix
    has not been found so far.
    """

    objects: Sequence[ObjectInfo]
    last: bool
    is_directory: bool = False


@runtime_checkable
class Readable(Protocol):
    """Reads whole objects and ranges of them."""

    @property
    def identity(self) -> str:
        """The name of the storage (scheme and endpoint) without secrets. Equal names: the same bytes for the same key."""
        ...

    @property
    def head_is_local(self) -> bool:
        """Whether `head` sends no request over a network. Otherwise a page of a listing is a cheaper way to many of them."""
        ...

    def is_immutable(self, key: str) -> bool:
        """Whether the object can never change, as a file of a commit, so that its metadata stay valid. No request."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Describe the newest version of `key`. Raises `ObjectNotFoundError`."""
        ...

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        """Return exactly the bytes `[start, stop)` of `key`. Raises `UsageError` when they end past the object's end.

        With `version`, the bytes are of that version or `ObjectChangedError` is raised.
        """
        ...


@runtime_checkable
class Listable(Protocol):
    """Enumerates keys."""

    def list_level(self, prefix: str) -> Listing:
        """List the level directly below `prefix` (a directory, with or without the trailing slash).

        Empty for a missing prefix; raises `ObjectNotFoundError` for a missing bucket.
        """
        ...

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        """Yield every object below the directory `prefix`, in pages, in bounded memory.

        A key that ends in a slash is an empty folder. Raises `ObjectNotFoundError` for a missing bucket.
        """
        ...

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        """As `list_all`, for the keys that follow `after` in the origin's order (all by default).

        Lazy: one request for each consumed page. `settled` returns the entry of an earlier listing for an empty object, or
        for an empty folder by its key without the slash. If that is unchanged, no request checks which of both it is.
        """
        ...


class ObjectWriter(AbstractContextManager["ObjectWriter"], Protocol):
    """Streams one object to the origin. The end of the `with` block publishes it; an exception aborts it."""

    def write(self, data: Buffer, /) -> int: ...

    def close(self) -> None:
        """Publish the object; returns when the origin has acknowledged all of it. Idempotent."""
        ...

    def abort(self) -> None:
        """Discard everything written so far; nothing becomes visible. Idempotent, never raises."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


@runtime_checkable
class Writable(Protocol):
    """Creates and removes objects."""

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Write one object in one request. With `if_absent`, raises `ObjectExistsError` when `key` exists."""
        ...

    def open_writer(self, key: str) -> ObjectWriter:
        """Open `key` for a streaming (multipart) upload in bounded memory. Invisible until closed."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects. A missing key is not an error."""
        ...


@runtime_checkable
class Origin(Readable, Listable, Writable, Protocol):
    """All of them: the requirement of the file system."""


def request_seconds(timeout: float) -> float:
    """The longest time of a single request with the option `timeout`, both in seconds."""
    return timeout / 3
