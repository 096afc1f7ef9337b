"""What Millrace requires of remote storage: one narrow Protocol per use, and nothing more.

Keys are `bucket/path/of/object` without a scheme. Byte ranges are half-open. Every call blocks, may be made
from any thread, and raises only `millrace.errors`. Implementations are picklable, and after a fork the child
uses fresh connections of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One version of one object.

    `version` is opaque: an ETag, a version id, or whatever else the origin changes when the bytes change.
    It is given back in `read` as a precondition. `modified` is in Unix seconds.
    """

    key: str
    size: int
    version: str
    modified: float


@dataclass(frozen=True, slots=True)
class Listing:
    """One level of a key space: the objects directly below a prefix, and the deeper prefixes (no trailing slash).

    `is_directory` says of an empty one that the prefix is there all the same: an empty bucket, folder or local directory.
    """

    objects: Sequence[ObjectInfo]
    prefixes: Sequence[str]
    is_directory: bool = False


@dataclass(frozen=True, slots=True)
class ListingPage:
    """A stretch of a listing, as one request brings it: at most 1,000 objects in the origin's order.

    `last` says that nothing follows; a page may be empty and not the last one. `is_directory` says that the prefix itself is
    there, whatever lies below: its folder's marker was seen, or it is a bucket or a local directory. `last` and
    `is_directory` may both be False for an empty page: then there is no such prefix so far.
    """

    objects: Sequence[ObjectInfo]
    last: bool
    is_directory: bool = False


@runtime_checkable
class Readable(Protocol):
    """Reads whole objects and ranges of them."""

    @property
    def identity(self) -> str:
        """Names the storage (scheme and endpoint) without any secret: equal means the same bytes under the same key."""
        ...

    @property
    def head_is_local(self) -> bool:
        """Whether `head` sends no request over a network, so that a page of a listing is no cheaper way to many of them."""
        ...

    def is_immutable(self, key: str) -> bool:
        """Whether what `key` names can never change, as a file of a commit: it is never asked about again. No request."""
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
        """List what lies directly below `prefix` (a directory, with or without the trailing slash).

        Empty where there is nothing; raises `ObjectNotFoundError` where there is no such bucket.
        """
        ...

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        """Yield every object below the directory `prefix`, in pages, in bounded memory.

        A key that ends in a slash is an empty folder. Raises `ObjectNotFoundError` where there is no such bucket.
        """
        ...

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        """As `list_all`, from the keys that follow `after` in the origin's order (the whole by default).

        Lazy: one request for each page that is taken, none before. `settled` gives what an earlier listing said of an empty
        object, or of an empty folder by its key without the slash: if unchanged, nobody asks again which of both it is.
        """
        ...


class ObjectWriter(AbstractContextManager["ObjectWriter"], Protocol):
    """Streams one object out. Leaving the `with` block normally publishes it; by an exception, aborts it."""

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
        """Remove objects. A key that does not exist is no error."""
        ...


@runtime_checkable
class Origin(Readable, Listable, Writable, Protocol):
    """Everything at once: what the file system needs."""
