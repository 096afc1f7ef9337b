"""The readable files that users get (Python file objects for fsspec callers, native files for pyarrow), and ranges of files.

A native file behaves like one of `pyarrow.fs.LocalFileSystem`, whether its bytes are in memory or must be fetched. A seek
may go past the end, where reads return nothing; a negative position is a `ValueError`; `read_at` does not move the position;
lines are not supported. pyarrow's own classes differ from each other here, so without `MemoryFile` and `FetchingFile`
a program could pass its first epoch and fail in the second. C++ readers use the object below directly and never read outside
a file.

`read_batch` serves fsspec's `cat_ranges` and `cat`: each object is opened once, and several are read at the same time.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from typing_extensions import Buffer

from millrace.cache.reading.reader import ObjectReader, Range
from millrace.errors import ObjectChangedError, ObjectNotFoundError
from millrace.filesystem.columns import ColumnAhead
from millrace.origin.side_by_side import side_by_side
from millrace.store.records import PAGE_BYTES, READ_AHEAD_BLOCKS, ReadAhead

_BUFFER_BYTES = 256 << 10


def target_of_seek(offset: int, whence: int, position: int, size: int) -> int:
    """The position in a file of `size` bytes after `seek(offset, whence)` at `position`. Raises `ValueError`."""
    base = {os.SEEK_SET: 0, os.SEEK_CUR: position, os.SEEK_END: size}.get(whence)
    if base is None:
        raise ValueError(f"invalid whence {whence}")
    if base + offset < 0:
        raise ValueError(f"negative position {base + offset}")
    return base + offset


class CachedFile(io.RawIOBase):
    """A readable, seekable file over an object that is not completely cached.

    pyarrow calls `read_buffer`, which saves a copy. Like any file object it has one position: use one object per thread
    (pyarrow serialises its own calls). `on_changed` is called when a read detects that the object was overwritten or
    removed, so that the next open requests the metadata again.
    """

    def __init__(
        self, reader: ObjectReader, *, path: str, sequential: bool, on_changed: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._reader = reader
        self._on_changed = on_changed
        self._position = 0
        self._ahead = ReadAhead(window=READ_AHEAD_BLOCKS if sequential else 0)
        self._columns: ColumnAhead | None = None
        self.name = path
        self.mode = "rb"
        self.size = reader.size
        self._begun = False
        self._wanted = range(0)
        if sequential:
            # Only this until the first read has its bytes: other fetches would share the bandwidth.
            reader.prefetch(range(min(1, reader.size)))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._check_open()
        self._position = target_of_seek(offset, whence, self._position, self.size)
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        return bytes(self._take(size))

    def readall(self) -> bytes:
        return self.read()

    def read_buffer(self, nbytes: int | None = None) -> pa.Buffer:
        """Up to `nbytes` (default: the rest) as an Arrow buffer."""
        return pa.py_buffer(self._take(nbytes))

    def readinto(self, target: Any, /) -> int:
        view = memoryview(target).cast("B")
        data = memoryview(self._take(len(view))).cast("B")  # Arrow buffers have signed bytes
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()

    def _take(self, size: int | None) -> Buffer:
        data = self.take_at(self._position, size)
        self._position += memoryview(data).nbytes
        return data

    def take_at(self, start: int, size: int | None) -> Buffer:
        """Up to `size` bytes (default: the rest) from `start` on. Does not move the position."""
        self._check_open()
        stop = self.size if size is None or size < 0 else min(start + size, self.size)
        if stop <= start:
            return b""
        self._ahead = self._ahead.after(start, stop)
        if start and not self._ahead.scans:  # a Parquet file begins with its magic bytes, not with a column
            self._fetch_columns_ahead(start, stop)
        if self._begun:
            self._fetch_ahead()
        try:
            data = self._reader.read(start, stop)
        except (ObjectChangedError, ObjectNotFoundError):
            self._on_changed()
            raise
        if not self._begun:
            self._begun = True
            self._fetch_ahead()
        return data

    def _fetch_columns_ahead(self, start: int, stop: int) -> None:
        if self._columns is None:
            self._columns = ColumnAhead(self.size, self._reader.cached)
        if spans := self._columns.after(start, stop):
            self._reader.prefetch_ranges(spans)

    def _fetch_ahead(self) -> None:
        wanted = self._ahead.wanted(self.size, self._reader.block_bytes)
        if wanted and wanted != self._wanted:  # small reads in one block need the same blocks
            self._wanted = wanted
            self._reader.prefetch(wanted)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name} is closed")


class _MappedBytes(io.RawIOBase):
    """The raw half of `MappedFile`."""

    def __init__(self, buffer: pa.Buffer, path: str) -> None:
        self._view = memoryview(buffer).cast("B")
        self._position = 0
        self.name = path
        self.mode = "rb"

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = target_of_seek(offset, whence, self._position, len(self._view))
        return self._position

    def readall(self) -> bytes:
        data = self._view[self._position :].tobytes()
        self._position += len(data)
        return data

    def readinto(self, target: Any, /) -> int:
        start = self._position
        data = self._view[start : start + len(target)]
        target[: len(data)] = data
        self._position = start + len(data)
        return len(data)


class MappedFile(io.BufferedReader):
    """The file that `open(path, "rb")` returns for a completely cached object: over its memory map."""

    def __init__(self, buffer: pa.Buffer, path: str) -> None:
        super().__init__(_MappedBytes(buffer, path))
        self._buffer = buffer
        self.size = buffer.size

    def tell(self) -> int:
        if self.closed:  # the base class would return the position
            raise ValueError(f"{self.name} is closed")
        return super().tell()

    def read_buffer(self, nbytes: int | None = None) -> pa.Buffer:
        """Up to `nbytes` (default: the rest) as an Arrow buffer, without a copy. pyarrow calls it."""
        start = min(self.tell(), self.size)
        stop = self.size if nbytes is None or nbytes < 0 else min(start + nbytes, self.size)
        self.seek(stop)
        return self._buffer.slice(start, stop - start)


class BufferedFile(io.BufferedReader):
    """The file that `open(path, "rb")` returns otherwise: a `CachedFile` with a buffer of 256 KiB for small reads."""

    def __init__(self, file: CachedFile) -> None:
        super().__init__(file, _BUFFER_BYTES)
        self._file = file
        self.size = file.size

    def read_buffer(self, nbytes: int | None = None) -> pa.Buffer:
        """Up to `nbytes` (default: the rest) as an Arrow buffer. pyarrow calls it: a column is not widened to the buffer."""
        if nbytes is not None and 0 <= nbytes < PAGE_BYTES:
            return pa.py_buffer(self.read(nbytes))
        start = self.tell()
        data = self._file.take_at(start, nbytes)
        self.seek(start + memoryview(data).nbytes)
        return pa.py_buffer(data)


class MemoryFile(pa.BufferReader):  # type: ignore[misc]
    """All bytes of an object, in memory or mapped."""

    _beyond = 0
    """Bytes by which the position is past the end. The position of the base class stays at the end."""
    _known_size: int | None = None
    """The size, once requested. Every call of the base class releases the GIL: with many threads that costs a switch
    between threads, so `seek` makes no call that it can avoid.
    """

    def tell(self) -> int:
        return int(super().tell()) + self._beyond

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        size = self._known_size
        if size is None:
            size = self._known_size = int(self.size())
        target = target_of_seek(position, whence, self.tell() if whence == os.SEEK_CUR else 0, size)
        super().seek(min(target, size))
        self._beyond = max(0, target - size)
        return target

    def read(self, nbytes: int | None = None) -> bytes:
        if self._beyond and not self.closed:
            return b""  # pyarrow would create a buffer of negative size
        data: bytes = pa.BufferReader.read(self, nbytes)
        return data

    def read_at(self, nbytes: int, offset: int) -> bytes:
        try:
            data: bytes = pa.BufferReader.read_at(self, nbytes, offset)
        except OSError:
            if offset <= self.size():
                raise
            return b""
        return data

    def get_stream(self, file_offset: int, nbytes: int) -> pa.NativeFile:
        return super().get_stream(min(file_offset, self.size()), nbytes)


class FetchingFile(pa.PythonFile):  # type: ignore[misc]
    """A native file over a Python file that fetches its bytes."""

    readline = pa.NativeFile.readline
    readlines = pa.NativeFile.readlines

    def __init__(self, file: Any) -> None:
        # pyarrow has stored `file` in `__cinit__`.
        self._reading_at = threading.Lock()

    def __new__(cls, file: Any) -> FetchingFile:
        made: FetchingFile = super().__new__(cls, file, mode="r")
        return made

    def read_at(self, nbytes: int, offset: int) -> bytes:
        # pyarrow moves the only position of the Python file; one thread at a time.
        with self._reading_at:
            position = self.tell()
            try:
                data: bytes = super().read_at(nbytes, offset)
            finally:
                self.seek(position)
        return data

    def read(self, nbytes: int | None = None) -> bytes:
        if nbytes is None and self.tell() > self.size():
            return b""  # pyarrow would create a buffer of negative size
        data: bytes = super().read(nbytes)
        return data


# --- ranges of many objects -------------------------------------------------------------------------

_OBJECTS_AT_A_TIME = 16

ReadRanges = Callable[[str, Sequence[Range]], list[bytes]]


def read_batch(paths: Sequence[str], ranges: Sequence[Range], read: ReadRanges) -> list[bytes | Exception]:
    """Call `read(path, its ranges)` for every different path, several at a time; results in the order of `paths`.

    If it raises, the exception is the result of every range of that object.
    """
    places: dict[str, list[int]] = {}
    for place, path in enumerate(paths):
        places.setdefault(path, []).append(place)
    results: list[bytes | Exception] = [b""] * len(paths)

    def one(path: str) -> None:
        mine = places[path]
        try:
            for place, data in zip(mine, read(path, [ranges[place] for place in mine]), strict=True):
                results[place] = data
        except Exception as error:  # noqa: BLE001 - returned to the caller, which decides
            for place in mine:
                results[place] = error

    side_by_side(one, list(places), _OBJECTS_AT_A_TIME, "millrace-batch")
    return results


def as_list(value: int | Sequence[int | None] | None, count: int) -> list[int | None]:
    """fsspec's bounds, one for all or one for each, as a list. Raises `ValueError` for another number of them."""
    values = [value] * count if value is None or isinstance(value, int) else list(value)
    if len(values) != count:
        raise ValueError(f"{len(values)} bounds for {count} paths")
    return values
