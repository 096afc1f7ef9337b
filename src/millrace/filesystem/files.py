"""File objects over objects: a readable one whose blocks come through the cache, a writable one that streams out."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from typing_extensions import Buffer

from millrace.cache.blocks import READ_AHEAD_BLOCKS, ReadAhead
from millrace.cache.reader import ObjectReader
from millrace.origin import ObjectWriter


class CachedFile(io.RawIOBase):
    """A readable, seekable file over an object that is not completely here yet.

    pyarrow calls `read_buffer` when it is there, which saves a copy. Like any file object, one position: use one object
    a thread (pyarrow serialises its own calls).
    """

    def __init__(self, reader: ObjectReader, *, path: str, sequential: bool) -> None:
        super().__init__()
        self._reader = reader
        self._position = 0
        self._ahead = ReadAhead(window=READ_AHEAD_BLOCKS if sequential else 0)
        self.name = path
        self.mode = "rb"
        self.size = reader.size
        if sequential:
            reader.prefetch(self._ahead.wanted(reader.size, reader.block_bytes))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._check_open()
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}.get(whence)
        if base is None:
            raise ValueError(f"invalid whence {whence}")
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
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
        data = memoryview(self._take(len(view)))
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
        if self._ahead.window:
            self._reader.prefetch(self._ahead.wanted(self.size, self._reader.block_bytes))
        data = self._reader.read(start, stop)
        self._position = stop
        return data

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name} is closed")


class UploadFile(io.RawIOBase):
    """A writable file that streams one object to the origin. The object becomes visible when the file is closed.

    Leaving a `with` block by an exception, or losing the last reference without `close`, discards what was written.
    """

    def __init__(self, writer: ObjectWriter, *, path: str, on_published: Callable[[], None]) -> None:
        super().__init__()
        self._writer = writer
        self._on_published = on_published
        self._position = 0
        self._failed = False
        self.name = path
        self.mode = "wb"

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Buffer, /) -> int:
        if self.closed:
            raise ValueError(f"{self.name} is closed")
        written = self._writer.write(data)
        self._position += written
        return written

    def discard(self) -> None:
        """Abort the upload; nothing becomes visible."""
        self._failed = True
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self._failed:
                self._writer.abort()
            else:
                self._writer.close()
                self._on_published()
        finally:
            super().close()

    def __exit__(self, exc_type: Any, exc: Any, trace: Any) -> None:
        self._failed = self._failed or exc_type is not None
        self.close()

    def __del__(self) -> None:
        # Closing here would publish half an object after an exception elsewhere.
        if not self.closed:
            self.discard()
