"""Native pyarrow files over complete data files: no Python between pyarrow and the bytes after the open."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from millrace.cache.store import LostDataError, disk_errors
from millrace.errors import StorageError

SMALL_FILE_BYTES = 1 << 20
"""Files up to this size are read whole by one `pread`, which costs less than a map that is set up and torn down."""

_MAX_MAPS = 4096  # the kernel allows 65,530 maps a process, and others need some


@contextmanager
def _lost_or_failed(path: str) -> Iterator[None]:
    try:
        with disk_errors(path):
            yield
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise LostDataError(f"{path} is gone", next_step="open the object again") from error
        raise


class MapCache:
    """Keeps memory maps of complete files open, the least recently used closed first. Thread-safe.

    A map stays valid as long as anything reads through it, also after its file was unlinked.
    """

    def __init__(self, max_maps: int = _MAX_MAPS) -> None:
        self._buffers: OrderedDict[str, pa.Buffer] = OrderedDict()
        self._max_maps = max_maps
        self._lock = threading.Lock()

    def open(self, path: str, size: int) -> pa.BufferReader:
        """Open a complete data file of `size` bytes.

        Raises `LostDataError` when it is gone or shorter, `StorageError` when the disk fails.
        """
        if size <= SMALL_FILE_BYTES:
            with _lost_or_failed(path):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    data = os.pread(descriptor, size, 0)
                finally:
                    os.close(descriptor)
            if len(data) != size:
                raise LostDataError(f"{path} is shorter than it was", next_step="open the object again")
            return pa.BufferReader(pa.py_buffer(data))
        with self._lock:
            buffer = self._buffers.get(path)
            if buffer is not None:
                self._buffers.move_to_end(path)
                return pa.BufferReader(buffer)
        with _lost_or_failed(path), pa.memory_map(path, "r") as mapped:
            buffer = mapped.read_buffer(size)
        if buffer.size != size:
            raise LostDataError(f"{path} is shorter than it was", next_step="open the object again")
        with self._lock:
            self._buffers[path] = buffer
            while len(self._buffers) > self._max_maps:
                self._buffers.popitem(last=False)
        return pa.BufferReader(buffer)

    def drop(self, path: str) -> None:
        """Close the map of a removed file, whose space the disk gets back when its last reader has gone."""
        with self._lock:
            self._buffers.pop(path, None)
