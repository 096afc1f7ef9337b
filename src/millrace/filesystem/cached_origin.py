"""The cache of a file system in the role of an origin: `CheckpointReader(url, origin=fs.as_origin())`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer

from millrace.cache.reading.reader import ObjectReader
from millrace.errors import ObjectChangedError, ObjectNotFoundError, UsageError
from millrace.origin import ObjectInfo
from millrace.runtime import forks

if TYPE_CHECKING:
    from millrace.filesystem.listing import ListingFileSystem

_OPEN_READERS = 64


class CachedOrigin:
    """Reads through the cache of a file system (a `Readable`): each byte comes from the origin once for all readers.

    Thread-safe, picklable, usable after a fork. Raises the errors of the file system.
    """

    def __init__(self, fs: ListingFileSystem) -> None:
        self._fs = fs
        self._start()

    def _start(self) -> None:
        self._owner = forks.Owner()
        self._readers: OrderedDict[tuple[str, str], ObjectReader] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedOrigin, (self._fs,)

    @property
    def identity(self) -> str:
        return self._fs.origin.identity

    @property
    def head_is_local(self) -> bool:
        return self._fs.origin.head_is_local

    def is_immutable(self, key: str) -> bool:
        return self._fs.origin.is_immutable(key)

    def head(self, key: str) -> ObjectInfo:
        return self._fs.node.metadata.stat(self._fs.origin, key)

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        info = self.head(key)
        if version is not None and info.version != version:
            # The cached metadata is of another version: only the origin can serve the requested one.
            return self._fs.origin.read(key, start, stop, version=version)
        if not 0 <= start <= stop <= info.size:
            raise UsageError(f"the range [{start}, {stop}) ends past the {info.size} bytes of {key}")
        native = self._fs.node.find_native(self._fs.origin, info)
        if native is not None:
            return memoryview(native.buffer).cast("B")[start:stop]
        try:
            return self._reader(info).read(start, stop)
        except (ObjectChangedError, ObjectNotFoundError):  # the next read requests the metadata again
            self._fs.node.metadata.drop_outdated(self._fs.origin, key)
            raise

    def _reader(self, info: ObjectInfo) -> ObjectReader:
        """A reader of this version, kept for the next ranges. A dropped reader is closed by its last user."""
        if not self._owner.is_this_process:
            self._start()
        with self._lock:
            name = info.key, info.version
            reader = self._readers.pop(name, None)
            if reader is None:
                reader = self._fs.node.open_reader(self._fs.origin, info)
            self._readers[name] = reader
            while len(self._readers) > _OPEN_READERS:
                self._readers.popitem(last=False)
            return reader
