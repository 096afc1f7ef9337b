"""Reads objects out of segments: verified once in each process, from then on as slices of a map of the whole segment.

The first read of an object by a process is a `pread` with a checksum. It finds what a crash, a disk or a hand has done to
the bytes, and an unreadable disk is an error then, where through a map it would kill the process. Later reads copy nothing.

A slice whose pages the kernel has dropped would be read in by page faults, which on ext4 takes three times as long as
`pread` (26 KB cold: 223-277 us, against 74). Asking the kernel for the range first (`will_need`) makes it equal
(71-86 us), and where the pages are there costs about a microsecond, no more than asking whether they are: through ctypes
1.3 us, mincore 1.3-1.7; `preadv2(RWF_NOWAIT)` takes .5 but looks at one page and needs a descriptor a segment. (In the same
run pread with its checksum took 3.0 us, a slice .14.)
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pyarrow as pa
import xxhash

from millrace.cache.failures import LostDataError
from millrace.cache.maps import MapCache, MapSlot, lost_or_failed, will_need
from millrace.cache.records import Entry
from millrace.cache.segments import SEGMENT_BYTES, data_path

_UNIT_SHIFT = 9  # one bit for 512 bytes: no two objects of that size begin in the same unit
_SLICED_BYTES = 1 << _UNIT_SHIFT
_MARKED_SEGMENTS = 2048  # at 16 KiB each


class SegmentMaps:
    """The bytes of objects in the segments of `directory`, by their records. Thread-safe.

    The maps are kept among those of `maps`, which also gives them up; nothing else stays open, so nothing of it has to be
    let go of after a fork. Raises `LostDataError` when a segment is gone or ends before the object does, `StorageError`
    when the disk fails.
    """

    def __init__(self, directory: Path, maps: MapCache) -> None:
        self._directory = directory
        self._maps = maps
        self._verified: dict[int, bytearray] = {}
        self._lock = threading.Lock()

    def read(self, entry: Entry) -> bytes | None:
        """A private copy of an object, verified. None when its bytes are wrong."""
        path = data_path(self._directory, entry.place)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                data = os.pread(descriptor, entry.size, entry.offset)
            finally:
                os.close(descriptor)
        except OSError:
            with lost_or_failed(path):
                raise
        if len(data) != entry.size:
            raise LostDataError(f"{path} is shorter than it was", next_step="open the object again")
        return data if xxhash.xxh3_64_intdigest(data) == entry.checksum else None

    def get(self, entry: Entry) -> tuple[pa.Buffer, MapSlot | None] | None:
        """An object, as a slice of the map in the slot; or, without a slot, as a private copy. None when it is wrong.

        The first time in a process, and always below 512 bytes, it is a copy, which was verified.
        """
        unit = entry.offset >> _UNIT_SHIFT
        marks = self._verified.get(entry.place)
        if marks is not None and entry.size >= _SLICED_BYTES and marks[unit >> 3] >> (unit & 7) & 1:
            return self._slice(entry)
        data = self.read(entry)
        if data is None:
            return None
        if entry.size >= _SLICED_BYTES:
            self._mark(entry.place, unit)
        return pa.py_buffer(data), None

    def slot_for_later(self, entry: Entry) -> MapSlot | None:
        """The map in which an object that `get` has just verified can be found from now on.

        None below 512 bytes, and where the map is too short: a segment that grows is not mapped for each of its objects.
        """
        if entry.size < _SLICED_BYTES:
            return None
        stop = entry.offset + entry.size
        slot = self._maps.get(entry.place)
        if slot is None:
            return self._map(entry.place, stop)
        buffer = slot.buffer
        return slot if buffer is not None and buffer.size >= stop else None

    def forget(self, segment: int) -> None:
        """Verify everything in a segment again before it is believed, and give up its map."""
        with self._lock:
            self._verified.pop(segment, None)
        self._maps.drop(segment)

    def _slice(self, entry: Entry) -> tuple[pa.Buffer, MapSlot]:
        stop = entry.offset + entry.size
        slot = self._maps.get(entry.place)
        buffer = None if slot is None else slot.buffer
        while slot is None or buffer is None or buffer.size < stop:  # a map may be given up between the two steps
            slot = self._map(entry.place, stop)
            buffer = slot.buffer
        piece = buffer.slice(entry.offset, entry.size)
        will_need(piece)
        return piece, slot

    def _map(self, segment: int, stop: int) -> MapSlot:
        """A map of a segment as long as the file is now, at least up to `stop`: never past its end."""
        path = data_path(self._directory, segment)
        with lost_or_failed(path):
            nbytes = os.stat(path).st_size
        if nbytes < stop:
            raise LostDataError(f"{path} is shorter than it was", next_step="open the object again")
        self._maps.drop(segment)  # one from before the segment grew
        return self._maps.open(segment, path, nbytes)

    def _mark(self, segment: int, unit: int) -> None:
        with self._lock:
            marks = self._verified.get(segment)
            if marks is None:
                marks = self._verified[segment] = bytearray((SEGMENT_BYTES >> _UNIT_SHIFT) // 8)
                while len(self._verified) > _MARKED_SEGMENTS:
                    del self._verified[next(iter(self._verified))]
            marks[unit >> 3] |= 1 << (unit & 7)
