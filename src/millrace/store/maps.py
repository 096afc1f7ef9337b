"""Memory maps of files that are never written again, kept open for the next reader.

A map takes 20 to 40 microseconds to create and no time to use again. So the maps of complete data files and of segments stay
open, in a bounded number. A caller that keeps a map (see `HotOpen`) keeps its `MapSlot`, not its memory. The map can then be
closed at any time, for lack of slots or because its file was removed, and the space of a removed file is freed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from millrace.errors import StorageError
from millrace.runtime.failures import NO_FILE_ERRNOS, LostDataError, disk_errors

_MAX_MAPS = 4096  # the kernel allows 65,530 maps per process, and other libraries need some

_PAGE_MASK = ~(mmap.PAGESIZE - 1)
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)


def will_need(buffer: pa.Buffer) -> None:
    """Load the missing pages of a mapped buffer with one read, where page faults take many small ones.

    Takes about a microsecond when all pages are in memory.
    """
    start = buffer.address & _PAGE_MASK
    _madvise(start, buffer.address + buffer.size - start, mmap.MADV_WILLNEED)


def is_resident(buffer: pa.Buffer) -> bool:
    """Whether all of a mapped buffer is in memory. Takes 25 ns per page."""
    start = buffer.address & _PAGE_MASK
    nbytes = buffer.address + buffer.size - start
    pages = bytearray(-(-nbytes // mmap.PAGESIZE))
    status = _mincore(start, nbytes, (ctypes.c_ubyte * len(pages)).from_buffer(pages))
    return status == 0 and pages.count(1) == len(pages)  # the other bits of each are 0


class MapSlot:
    """One map. `buffer` is its memory, or None after the map was closed: then open the file again.

    Assign `buffer` to a variable before testing it; it stays readable after the map is closed and the file removed.
    Set `used` at every use: maps that were not used since the last look are closed first. `inode` and `ctime_ns` are those
    of the file just after it was mapped.
    """

    __slots__ = ("buffer", "ctime_ns", "inode", "path", "used")

    def __init__(self, buffer: pa.Buffer, path: str, stat: os.stat_result) -> None:
        self.buffer: pa.Buffer | None = buffer
        self.path = path
        self.inode = stat.st_ino
        self.ctime_ns = stat.st_ctime_ns
        self.used = False


class Sweeper:
    """Decides when to check every map: after removals, and at long intervals in any case.

    A removal is signalled before its file is unlinked, so one check right after the signal may be too early.
    """

    _LOOKS_AFTER_REMOVAL = 3
    _IDLE_TICKS = 60

    def __init__(self) -> None:
        self._removals = -1
        self._looks = 0
        self._idle = 0

    def due(self, removals: int) -> bool:
        """Whether to check every map now. Called at every tick with the number of the store's removals."""
        if removals != self._removals:
            self._removals, self._looks = removals, self._LOOKS_AFTER_REMOVAL
        self._idle += 1
        if not self._looks and self._idle < self._IDLE_TICKS:
            return False
        self._looks, self._idle = max(0, self._looks - 1), 0
        return True


class MapCache:
    """Keeps memory maps open, at most `max_maps`. Thread-safe; `get` takes no lock.

    Maps are identified by the generation of their file, which a store never uses twice. The CLOCK algorithm (Corbató 1968)
    selects the map to close: the oldest that was not used since its last check.
    """

    def __init__(self, max_maps: int = _MAX_MAPS) -> None:
        self._slots: OrderedDict[int, MapSlot] = OrderedDict()
        self._unchecked: list[int] = []
        self._max_maps = max_maps
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, generation: int) -> MapSlot | None:
        """The map of a file, or None if it is not open."""
        slot = self._slots.get(generation)
        if slot is not None:
            slot.used = True
        return slot

    def open(self, generation: int, path: str, size: int) -> MapSlot:
        """The map of the first `size` bytes of a file, created if it is not open.

        Raises `LostDataError` when the file is gone or shorter, `StorageError` when the disk fails.
        """
        slot = self.get(generation)
        if slot is not None:
            return slot
        with lost_or_failed(path):
            with pa.memory_map(path, "r") as mapped:
                buffer = mapped.read_buffer(size)
            # After the map: a change that is found now happened before or after it was mapped.
            stat = os.stat(path, follow_symlinks=False)
        if buffer.size != size:
            raise LostDataError(f"{path}: is shorter than before", next_step="open the object again")
        with self._lock:
            # Another thread may have been faster; then its map is used.
            slot = self._slots.setdefault(generation, MapSlot(buffer, path, stat))
            self._unchecked.append(generation)
            while len(self._slots) > self._max_maps:
                self._close_one()
        return slot

    def drop(self, generation: int) -> None:
        """Close the map of a removed file. The disk frees its space after the last reader."""
        with self._lock:
            self._drop(generation)

    def sweep(self, *, all_of_them: bool) -> None:
        """Close the maps of files that any process has unlinked. Takes one `stat` per file.

        Checks every map, or only those that were created since the last sweep: their files may have been removed meanwhile.
        """
        with self._lock:
            fresh, self._unchecked = self._unchecked, []
            checked = dict(self._slots) if all_of_them else {g: s for g in fresh if (s := self._slots.get(g))}
        ended = [generation for generation, slot in checked.items() if not os.path.lexists(slot.path)]
        with self._lock:
            for generation in ended:
                self._drop(generation)

    @property
    def unchecked(self) -> bool:
        """Whether maps were created since the last sweep."""
        return bool(self._unchecked)

    def clear(self) -> None:
        """Close every map."""
        with self._lock:
            self._clear()

    def abandon(self) -> None:
        """`clear` in a forked child, where a thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        for slot in self._slots.values():
            slot.buffer = None
        self._slots.clear()
        self._unchecked.clear()

    def _drop(self, generation: int) -> None:
        slot = self._slots.pop(generation, None)
        if slot is not None:
            slot.buffer = None

    def _close_one(self) -> None:
        while True:
            generation, slot = self._slots.popitem(last=False)
            if not slot.used:
                slot.buffer = None
                return
            slot.used = False
            self._slots[generation] = slot


@contextmanager
def lost_or_failed(path: str) -> Iterator[None]:
    """Translate the system's errors on a data file; a file that is missing, or not a file, raises `LostDataError`."""
    try:
        with disk_errors(path):
            yield
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError):
            raise LostDataError(f"{path}: is gone", next_step="open the object again") from error
        if isinstance(cause, OSError) and cause.errno in NO_FILE_ERRNOS:
            raise LostDataError(f"{path}: is not a file any more", next_step="open the object again") from error
        raise
