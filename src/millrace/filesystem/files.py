"""A readable file object over an object whose blocks come through the cache."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from typing_extensions import Buffer

from millrace.cache.blocks import READ_AHEAD_BLOCKS, ReadAhead
from millrace.cache.reader import ObjectReader
from millrace.errors import ObjectChangedError, ObjectNotFoundError
from millrace.filesystem.native_files import target_of_seek

_BUFFER_BYTES = 256 << 10


class CachedFile(io.RawIOBase):
    """A readable, seekable file over an object that is not completely here yet.

    pyarrow calls `read_buffer` when it is there, which saves a copy. Like any file object, one position: use one object
    a thread (pyarrow serialises its own calls). `on_changed` is called when a read finds that the object was overwritten
    or removed, so that the next open asks the origin anew.
    """

    def __init__(
        self, reader: ObjectReader, *, path: str, sequential: bool, on_changed: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._reader = reader
        self._on_changed = on_changed
        self._position = 0
        self._ahead = ReadAhead(window=READ_AHEAD_BLOCKS if sequential else 0)
        self.name = path
        self.mode = "rb"
        self.size = reader.size
        self._begun = False
        self._wanted = range(0)
        if sequential:
            # No more until the first read has its bytes: what is fetched beside them shares the bandwidth.
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
        data = memoryview(self._take(len(view))).cast("B")  # Arrow's are of signed bytes
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()

    def _take(self, size: int | None) -> Buffer:
        self._check_open()
        stop = self.size if size is None or size < 0 else min(self._position + size, self.size)
        start = self._position
        if stop <= start:
            return b""
        self._ahead = self._ahead.after(start, stop)
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
        self._position = stop
        return data

    def _fetch_ahead(self) -> None:
        wanted = self._ahead.wanted(self.size, self._reader.block_bytes)
        if wanted and wanted != self._wanted:  # small reads in one block want the same
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
    """What `open(path, "rb")` returns for an object that is completely here: a file over its memory map."""

    def __init__(self, buffer: pa.Buffer, path: str) -> None:
        super().__init__(_MappedBytes(buffer, path))
        self._buffer = buffer
        self.size = buffer.size

    def read_buffer(self, nbytes: int | None = None) -> pa.Buffer:
        """Up to `nbytes` (default: the rest) as an Arrow buffer, without a copy. pyarrow calls it."""
        start = min(self.tell(), self.size)
        stop = self.size if nbytes is None or nbytes < 0 else min(start + nbytes, self.size)
        self.seek(stop)
        return self._buffer.slice(start, stop - start)


class BufferedFile(io.BufferedReader):
    """What `open(path, "rb")` returns: a `CachedFile` read in pieces of 256 KiB, so that lines and bytes are cheap."""

    def __init__(self, file: CachedFile) -> None:
        super().__init__(file, _BUFFER_BYTES)
        self.size = file.size
