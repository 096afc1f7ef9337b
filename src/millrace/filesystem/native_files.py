"""What pyarrow gets when it opens an object: one behaviour, whether the bytes lie in memory or are still to be fetched.

It is that of the files of `pyarrow.fs.LocalFileSystem`: one may go past the end, where nothing is to read; a negative
position is a `ValueError`; `read_at` does not move the position; there are no lines. pyarrow's own classes differ in these
points from each other, so without these two a program could pass its first epoch and fail in the second.

Only Python sees the difference: C++ readers use what lies beneath, and never read outside a file.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pyarrow as pa


def target_of_seek(offset: int, whence: int, position: int, size: int) -> int:
    """Where a file of `size` bytes that stands at `position` is after `seek(offset, whence)`. Raises `ValueError`."""
    base = {os.SEEK_SET: 0, os.SEEK_CUR: position, os.SEEK_END: size}.get(whence)
    if base is None:
        raise ValueError(f"invalid whence {whence}")
    if base + offset < 0:
        raise ValueError(f"negative position {base + offset}")
    return base + offset


class MemoryFile(pa.BufferReader):  # type: ignore[misc]
    """All bytes of an object, in memory or mapped."""

    _beyond = 0
    """By how many bytes the position lies past the end, where the reader beneath cannot stand: that stands at the end."""

    def tell(self) -> int:
        return int(super().tell()) + self._beyond

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        size = self.size()
        target = target_of_seek(position, whence, self.tell(), size)
        super().seek(min(target, size))
        self._beyond = max(0, target - size)
        return target

    def read(self, nbytes: int | None = None) -> bytes:
        if self._beyond:
            return b""  # pyarrow would make a buffer of negative size of all that is left
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
    """A native file over a Python file that fetches what is read."""

    readline = pa.NativeFile.readline
    readlines = pa.NativeFile.readlines

    def __init__(self, file: Any) -> None:
        # pyarrow took `file` when this was made (`__cinit__`).
        self._reading_at = threading.Lock()

    def __new__(cls, file: Any) -> FetchingFile:
        made: FetchingFile = super().__new__(cls, file, mode="r")
        return made

    def read_at(self, nbytes: int, offset: int) -> bytes:
        # pyarrow moves the one position of the Python file, for one thread at a time.
        with self._reading_at:
            position = self.tell()
            try:
                data: bytes = super().read_at(nbytes, offset)
            finally:
                self.seek(position)
        return data

    def read(self, nbytes: int | None = None) -> bytes:
        if nbytes is None and self.tell() > self.size():
            return b""  # of which pyarrow would make a buffer of negative size
        data: bytes = super().read(nbytes)
        return data
