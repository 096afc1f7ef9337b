"""Native pyarrow files over complete data files: no Python between pyarrow and the bytes after the open."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

import pyarrow as pa

from millrace.cache.store import disk_errors

SMALL_FILE_BYTES = 1 << 20
"""Files up to this size are read whole by one `pread`, which costs less than a map that is set up and torn down."""

_MAX_MAPS = 4096  # the kernel allows 65,530 maps a process, and others need some


class MapCache:
    """Keeps memory maps of complete files open, the least recently used closed first. Thread-safe.

    A map stays valid as long as anything reads through it, also after its file was unlinked.
    """

    def __init__(self, max_maps: int = _MAX_MAPS) -> None:
        self._buffers: OrderedDict[str, pa.Buffer] = OrderedDict()
        self._max_maps = max_maps
        self._lock = threading.Lock()

    def open(self, path: str, size: int) -> pa.BufferReader:
        """Open a complete data file of `size` bytes. Raises `FileNotFoundError` when it was removed."""
        if size <= SMALL_FILE_BYTES:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(descriptor, size, 0)
            finally:
                os.close(descriptor)
            return pa.BufferReader(pa.py_buffer(data))
        with self._lock:
            buffer = self._buffers.get(path)
            if buffer is not None:
                self._buffers.move_to_end(path)
                return pa.BufferReader(buffer)
        with disk_errors(path):
            buffer = pa.memory_map(path, "r").read_buffer(size)
        with self._lock:
            self._buffers[path] = buffer
            while len(self._buffers) > self._max_maps:
                self._buffers.popitem(last=False)
        return pa.BufferReader(buffer)
