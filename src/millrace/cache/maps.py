"""Memory maps of files that are never written again, kept open for the next reader.

A map costs 20 to 40 microseconds to make and nothing to use again, so those of complete data files and of segments stay
open, in a bounded number. Who remembers a map (see `hot.py`) holds its `MapSlot`, not its memory: the map can then be
given up at any time, for want of slots or because its file was removed, and nobody keeps a removed file's space.
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

from millrace.cache.failures import NO_FILE_ERRNOS, LostDataError, disk_errors
from millrace.errors import StorageError

_MAX_MAPS = 4096  # the kernel allows 65,530 maps a process, and others need some


_PAGE_MASK = ~(mmap.PAGESIZE - 1)
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)


def will_need(buffer: pa.Buffer) -> None:
    """Have the kernel read in what it has dropped of a mapped buffer: by one read, where page faults take many small ones.

    Costs about a microsecond when all of it is in memory.
    """
    start = buffer.address & _PAGE_MASK
    _madvise(start, buffer.address + buffer.size - start, mmap.MADV_WILLNEED)


def is_resident(buffer: pa.Buffer) -> bool:
    """Whether all of a mapped buffer is in memory. Takes 25 ns a page."""
    start = buffer.address & _PAGE_MASK
    nbytes = buffer.address + buffer.size - start
    pages = bytearray(-(-nbytes // mmap.PAGESIZE))
    answer = _mincore(start, nbytes, (ctypes.c_ubyte * len(pages)).from_buffer(pages))
    return answer == 0 and pages.count(1) == len(pages)  # the other bits of each are 0


class MapSlot:
    """The place of one map. `buffer` is its memory, or None once the map was given up: then open the file again.

    Take `buffer` into a variable before testing it; what is in the variable stays readable whatever becomes of the map and
    of its file. Set `used` at every use: what was not used since the last look is given up first. `inode` and `ctime_ns`
    are the file's, as of just after it was mapped.
    """

    __slots__ = ("buffer", "ctime_ns", "inode", "path", "used")

    def __init__(self, buffer: pa.Buffer, path: str, stat: os.stat_result) -> None:
        self.buffer: pa.Buffer | None = buffer
        self.path = path
        self.inode = stat.st_ino
        self.ctime_ns = stat.st_ctime_ns
        self.used = False


class Sweeper:
    """Decides when every map has to be looked at: after removals, and now and then in any case.

    A removal is signalled before its file is unlinked, so one look right after the signal may come too early.
    """

    _LOOKS_AFTER_REMOVAL = 3
    _IDLE_TICKS = 60

    def __init__(self) -> None:
        self._removals = -1
        self._looks = 0
        self._idle = 0

    def due(self, removals: int) -> bool:
        """Called at every tick with the number of the store's removals: whether to look at every map now."""
        if removals != self._removals:
            self._removals, self._looks = removals, self._LOOKS_AFTER_REMOVAL
        self._idle += 1
        if not self._looks and self._idle < self._IDLE_TICKS:
            return False
        self._looks, self._idle = max(0, self._looks - 1), 0
        return True


class MapCache:
    """Keeps memory maps open, at most `max_maps`. Thread-safe; `get` takes no lock.

    Maps are named by the generation of their file, which a store never uses twice. Which one makes room for another is
    decided by the CLOCK algorithm (Corbató 1968): the oldest, but for those that were used since they were last looked at.
    """

    def __init__(self, max_maps: int = _MAX_MAPS) -> None:
        self._slots: OrderedDict[int, MapSlot] = OrderedDict()
        self._unchecked: list[int] = []
        self._max_maps = max_maps
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, generation: int) -> MapSlot | None:
        """The map of a file, when it is open."""
        slot = self._slots.get(generation)
        if slot is not None:
            slot.used = True
        return slot

    def open(self, generation: int, path: str, size: int) -> MapSlot:
        """The map of the first `size` bytes of a file, made when there is none.

        Raises `LostDataError` when the file is gone or shorter, `StorageError` when the disk fails.
        """
        slot = self.get(generation)
        if slot is not None:
            return slot
        with lost_or_failed(path):
            with pa.memory_map(path, "r") as mapped:
                buffer = mapped.read_buffer(size)
            # Afterwards: what is found out of date now was so when it was mapped, or is since.
            stat = os.stat(path, follow_symlinks=False)
        if buffer.size != size:
            raise LostDataError(f"{path} is shorter than it was", next_step="open the object again")
        with self._lock:
            # Another thread may have been faster; then its map is the one that is known.
            slot = self._slots.setdefault(generation, MapSlot(buffer, path, stat))
            self._unchecked.append(generation)
            while len(self._slots) > self._max_maps:
                self._give_up_one()
        return slot

    def drop(self, generation: int) -> None:
        """Give up the map of a removed file, whose space the disk gets back when its last reader has gone."""
        with self._lock:
            self._drop(generation)

    def sweep(self, *, all_of_them: bool) -> None:
        """Give up the maps of files that were unlinked, by whichever process, at a `stat` a file.

        Looks at every map, or only at those that were made since the last sweep: such a one may have been made while its
        file was being removed.
        """
        with self._lock:
            fresh, self._unchecked = self._unchecked, []
            looked_at = dict(self._slots) if all_of_them else {g: s for g in fresh if (s := self._slots.get(g))}
        ended = [generation for generation, slot in looked_at.items() if not os.path.lexists(slot.path)]
        with self._lock:
            for generation in ended:
                self._drop(generation)

    @property
    def unchecked(self) -> bool:
        """Whether maps were made since the last sweep."""
        return bool(self._unchecked)

    def clear(self) -> None:
        """Give up every map."""
        with self._lock:
            self._clear()

    def abandon(self) -> None:
        """`clear` in a forked child, where a thread that is not there any more may have held the lock."""
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

    def _give_up_one(self) -> None:
        while True:
            generation, slot = self._slots.popitem(last=False)
            if not slot.used:
                slot.buffer = None
                return
            slot.used = False
            self._slots[generation] = slot


@contextmanager
def lost_or_failed(path: str) -> Iterator[None]:
    """Turn the operating system's errors on a data file into ours; one that is gone, or no file, into `LostDataError`."""
    try:
        with disk_errors(path):
            yield
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError):
            raise LostDataError(f"{path} is gone", next_step="open the object again") from error
        if isinstance(cause, OSError) and cause.errno in NO_FILE_ERRNOS:
            raise LostDataError(f"{path} is no file any more", next_step="open the object again") from error
        raise
