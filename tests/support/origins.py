"""An origin in memory, for tests: counts its requests, and simulates failures of real origins on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

from millrace.errors import ObjectChangedError, ObjectExistsError, ObjectNotFoundError, UsageError
from millrace.origin import Listing, ListingPage, ObjectInfo


@dataclass
class MemoryOrigin:
    """Implements `millrace.origin.Origin` over a dict. Thread-safe; one process.

    `requests` records every call as (operation, key, start, stop), a listing as one for each page. `before_read` runs before
    a range is read and may sleep, raise, or change the object; so does `before_list(prefix, after)` before a page is listed.
    Keys that begin with `immutable_below` are declared immutable.
    """

    identity: str = "memory"
    before_read: Callable[[str, int, int], None] | None = None
    before_list: Callable[[str, str], None] | None = None
    head_is_local: bool = False
    immutable_below: str = ""
    requests: list[tuple[str, str, int, int]] = field(default_factory=list)
    _objects: dict[str, tuple[bytes, int, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _versions: int = 0

    def is_immutable(self, key: str) -> bool:
        return key.startswith(self.immutable_below) if self.immutable_below else False

    def bytes_read(self) -> int:
        """Bytes of all ranges that were served."""
        return sum(stop - start for operation, _, start, stop in self.requests if operation == "read")

    def count(self, operation: str) -> int:
        """How often an operation was requested."""
        return sum(1 for name, *_ in self.requests if name == operation)

    def head(self, key: str) -> ObjectInfo:
        self.requests.append(("head", key, 0, 0))
        return self._info(key)

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        if self.before_read is not None:
            self.before_read(key, start, stop)
        with self._lock:
            self.requests.append(("read", key, start, stop))
            info = self._info(key)
            if version is not None and version != info.version:
                raise ObjectChangedError(f"memory://{key} was overwritten", next_step="open it again")
            if not 0 <= start <= stop <= info.size:
                raise UsageError(f"the range [{start}, {stop}) ends past the {info.size} bytes of memory://{key}")
            return self._objects[key][0][start:stop]

    def list_level(self, prefix: str) -> Listing:
        self.requests.append(("list", prefix, 0, 0))
        base = f"{prefix.rstrip('/')}/" if prefix else ""
        below = [key for key in sorted(self._objects) if key.startswith(base)]
        prefixes = {base + key[len(base) :].split("/", 1)[0] for key in below if "/" in key[len(base) :]}
        objects = [self._info(key) for key in below if "/" not in key[len(base) :]]
        return Listing(objects=objects, prefixes=sorted(prefixes))

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        return (page.objects for page in self.list_pages(prefix) if page.objects)

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        base, last = f"{prefix.rstrip('/')}/", False
        while not last:
            if self.before_list is not None:
                self.before_list(prefix, after)
            self.requests.append(("list", prefix, 0, 0))
            with self._lock:
                below = sorted(key for key in self._objects if key.startswith(base) and key > after)
                page = [self._info(key) for key in below[:1000]]
            last = len(below) <= 1000
            yield ListingPage(page, last)
            after = page[-1].key if page else after

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        with self._lock:
            if if_absent and key in self._objects:
                raise ObjectExistsError(f"memory://{key} exists already")
            self._versions += 1
            self._objects[key] = (bytes(data), self._versions, time.time())

    def open_writer(self, key: str) -> _MemoryWriter:
        return _MemoryWriter(self, key)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._objects.pop(key, None)

    def _info(self, key: str) -> ObjectInfo:
        if key not in self._objects:
            raise ObjectNotFoundError(f"memory://{key} does not exist", next_step="check the name")
        data, version, modified = self._objects[key]
        return ObjectInfo(key=key, size=len(data), version=f"v{version}", modified=modified)


class _MemoryWriter:
    def __init__(self, origin: MemoryOrigin, key: str) -> None:
        self._origin, self._key, self._data = origin, key, bytearray()
        self._closed = False

    def write(self, data: Buffer, /) -> int:
        self._data += memoryview(data).cast("B")
        return len(memoryview(data).cast("B"))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._origin.put(self._key, self._data)

    def abort(self) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if exc_type is None:
            self.close()
        else:
            self.abort()


def content(origin: MemoryOrigin, key: str) -> bytes:
    """The bytes of an object, without a request."""
    return origin._objects[key][0]
