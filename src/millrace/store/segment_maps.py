"""Reads objects from segments, as slices of a map of the whole segment if it is sealed or the object was verified.

A segment that a process has verified completely is sealed (`seals.py`). While the seal holds, every read of an object is a
slice. Otherwise the first read of an object by a process is a `pread` with a checksum, which finds damage by a crash, a disk
or a user, and later reads are slices. Slices copy nothing.

A slice whose pages are not in memory would be read by page faults, which on ext4 takes three times as long as `pread` (26 KB
cold: 223-277 us, against 74). A request for the range first (`will_need`) makes it equal (71-86 us). When the pages are in
memory, the request takes about a microsecond, no more than a test: through ctypes 1.3 us, mincore 1.3-1.7;
`preadv2(RWF_NOWAIT)` takes .5 but tests one page and needs a descriptor per segment. (In the same run pread with its
checksum took 3.0 us, a slice .14.)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import xxhash

from millrace.runtime.failures import LostDataError
from millrace.store.maps import MapCache, MapSlot, is_resident, lost_or_failed, will_need
from millrace.store.records import Entry
from millrace.store.seals import SegmentSeal
from millrace.store.segment_files import data_bytes, data_path
from millrace.store.segments import SEGMENT_BYTES

_UNIT_SHIFT = 9  # one bit per 512 bytes: two objects of that size never begin in the same unit
_SLICED_BYTES = 1 << _UNIT_SHIFT
_MARKED_SEGMENTS = 2048  # at 16 KiB each
_REMEMBERED_SEGMENTS = 1 << 16
_REQUESTS_BEFORE_A_LOOK = 32
_RESIDENT_SECONDS = 10.0  # as for `HotOpens`: pages that were not used for longer may be out of memory
_WORTH_SEALING_BYTES = 4 << 20
_WORTH_SEALING_PART = 8


class _Sealed:
    """The seal of a segment, as this process has read it: objects up to `generation` are right in the map of `slot`.

    The generation 0, which no object has, stands for a missing seal. Until `resident_until` the whole map is assumed to be
    in memory.
    """

    __slots__ = ("generation", "look_at", "requests", "resident_until", "slot")

    def __init__(self, generation: int, slot: MapSlot | None) -> None:
        self.generation = generation
        self.slot = slot
        self.resident_until = 0.0
        self.requests = 0
        self.look_at = 0.0

    def load(self, piece: pa.Buffer, whole: pa.Buffer) -> None:
        """Load the missing pages of a slice, unless the whole map was in memory a moment ago.

        A request for one slice takes one or two microseconds, a test of a whole segment as long as a hundred slices.
        """
        now = time.monotonic()
        if now < self.resident_until:
            return
        will_need(piece)
        self.requests += 1
        if self.requests >= _REQUESTS_BEFORE_A_LOOK and now >= self.look_at:
            self.requests, self.look_at = 0, now + _RESIDENT_SECONDS
            if is_resident(whole):
                self.resident_until = self.look_at


class _Verified:
    """The objects of an unsealed segment that this process has verified, by the unit in which they begin, and their file.

    They are then returned only from a map that is not younger. A change of an unmapped file shows in its change time.
    """

    __slots__ = ("_ctime_ns", "_inode", "_units")

    def __init__(self, file: os.stat_result) -> None:
        self._inode, self._ctime_ns = file.st_ino, file.st_ctime_ns
        self._units = bytearray((SEGMENT_BYTES >> _UNIT_SHIFT) // 8)

    def is_of(self, file: os.stat_result) -> bool:
        return (self._inode, self._ctime_ns) == (file.st_ino, file.st_ctime_ns)

    def add(self, unit: int) -> None:
        self._units[unit >> 3] |= 1 << (unit & 7)

    def has(self, unit: int) -> bool:
        return bool(self._units[unit >> 3] >> (unit & 7) & 1)

    def holds_for(self, slot: MapSlot) -> bool:
        return slot.inode == self._inode and slot.ctime_ns <= self._ctime_ns


class SegmentMaps:
    """The bytes of objects in the segments of `directory`, by their records. Thread-safe.

    The maps are kept in `maps`, which also closes them. Nothing else stays open, so a fork needs no reset. `seal_of` returns
    the seal of a segment. Raises `LostDataError` when a segment is missing or ends before the object does, `StorageError`
    when the disk fails.
    """

    def __init__(self, directory: Path, maps: MapCache, seal_of: Callable[[int], SegmentSeal | None]) -> None:
        self._directory = directory
        self._maps = maps
        self._seal_of = seal_of
        self._sealed: dict[int, _Sealed] = {}
        self._verified: dict[int, _Verified] = {}
        self._verified_bytes: dict[int, int] = {}  # of each unsealed segment, since `worth_sealing` last returned it
        self._lock = threading.Lock()

    def read(self, entry: Entry) -> bytes | None:
        """A private copy of an object, verified. None when its bytes are wrong."""
        data, _ = self._read(entry)
        return data

    def _read(self, entry: Entry) -> tuple[bytes | None, os.stat_result]:
        """As `read`, with the status of the file before."""
        path = data_path(self._directory, entry.place)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                file = os.fstat(descriptor)
                data = os.pread(descriptor, entry.size, entry.offset)
            finally:
                os.close(descriptor)
        except OSError:
            with lost_or_failed(path):
                raise
        if len(data) != entry.size:
            raise LostDataError(f"{path}: is shorter than before", next_step="open the object again")
        return (data if xxhash.xxh3_64_intdigest(data) == entry.checksum else None), file

    def sealed(self, entry: Entry) -> tuple[pa.Buffer, MapSlot] | None:
        """An object from a segment whose seal holds, as a slice of the map in the slot; otherwise None."""
        sealed = self._sealed.get(entry.place)
        if sealed is None:
            sealed = self._look_for_seal(entry.place)
        if entry.generation > sealed.generation:
            return None
        slot = sealed.slot
        buffer = None if slot is None else slot.buffer
        if slot is None or buffer is None:  # the map was closed; the file may be another one by now
            sealed = self._look_for_seal(entry.place)
            slot = sealed.slot
            buffer = None if slot is None else slot.buffer
            if slot is None or buffer is None or entry.generation > sealed.generation:
                return None
        if buffer.size < entry.offset + entry.size:
            return None
        slot.used = True
        piece = buffer.slice(entry.offset, entry.size)
        sealed.load(piece, buffer)
        return piece, slot

    def get(self, entry: Entry) -> tuple[pa.Buffer, MapSlot | None] | None:
        """An object, as a slice of the map in the slot, or without a slot as a private copy. None when its bytes are wrong.

        From a segment without a seal it is a verified copy at the first use in a process, and always below 512 bytes.
        """
        found = self.sealed(entry)
        if found is not None:
            return found
        unit = entry.offset >> _UNIT_SHIFT
        verified = self._verified.get(entry.place)
        if verified is not None and entry.size >= _SLICED_BYTES and verified.has(unit):
            sliced = self._slice(entry, verified)
            if sliced is not None:
                return sliced
        data, file = self._read(entry)
        if data is None:
            return None
        self._mark(entry, unit, file)
        return pa.py_buffer(data), None

    def slot_for_later(self, entry: Entry) -> MapSlot | None:
        """The map that contains an object that `get` has just verified.

        None below 512 bytes, and when the map is too short: a segment that grows is not mapped for each of its objects.
        """
        if entry.size < _SLICED_BYTES:
            return None
        stop = entry.offset + entry.size
        slot = self._maps.get(entry.place)
        if slot is None:
            slot = self._map(entry.place, stop)
        buffer, verified = slot.buffer, self._verified.get(entry.place)
        if buffer is None or buffer.size < stop:
            return None
        return slot if verified is not None and verified.holds_for(slot) else None

    def drop(self, segment: int) -> None:
        """Discard the verified objects of a segment, and close its map."""
        with self._lock:
            self._verified.pop(segment, None)
            self._verified_bytes.pop(segment, None)
            self._sealed.pop(segment, None)
        self._maps.drop(segment)

    def look_again(self) -> None:
        """Look again for missing seals at the next read. Called periodically."""
        with self._lock:
            self._sealed = {segment: sealed for segment, sealed in self._sealed.items() if sealed.generation}

    def worth_sealing(self) -> list[int]:
        """The segments of which this process has verified an eighth, or 4 MiB, since this last returned them.

        To verify the rest once takes less than to verify each object in every later process.
        """
        with self._lock:
            verified = dict(self._verified_bytes)
        found = []
        for segment, nbytes in verified.items():
            try:
                whole = os.stat(data_path(self._directory, segment)).st_size
            except OSError:  # removed meanwhile; otherwise its readers raise the same error
                whole = 0
            if nbytes >= min(_WORTH_SEALING_BYTES, whole // _WORTH_SEALING_PART):
                self._verified_bytes.pop(segment, None)
                found += [segment] if whole else []
        return found

    def _look_for_seal(self, segment: int) -> _Sealed:
        seal = self._seal_of(segment)
        found = _Sealed(0, None)
        if seal is not None:
            slot = self._maps.get(segment)
            if slot is None or not seal.holds(slot):  # one from before it was sealed
                slot = self._map(segment, 1)
            if seal.holds(slot):
                found = _Sealed(seal.generation, slot)
        with self._lock:
            if len(self._sealed) >= _REMEMBERED_SEGMENTS:
                self._sealed.clear()
            self._sealed[segment] = found
        return found

    def _slice(self, entry: Entry, verified: _Verified) -> tuple[pa.Buffer, MapSlot] | None:
        """A verified object, as a slice of a map; None when the file may have changed before it was mapped."""
        stop = entry.offset + entry.size
        slot = self._maps.get(entry.place)
        buffer = None if slot is None else slot.buffer
        while slot is None or buffer is None or buffer.size < stop:  # a map may be closed between the two steps
            slot = self._map(entry.place, stop)
            buffer = slot.buffer
        if not verified.holds_for(slot):
            return None
        piece = buffer.slice(entry.offset, entry.size)
        will_need(piece)
        return piece, slot

    def _map(self, segment: int, stop: int) -> MapSlot:
        """A map of the present length of a segment, which is at least `stop`."""
        path = data_path(self._directory, segment)
        nbytes = data_bytes(self._directory, segment)
        if nbytes < stop:
            raise LostDataError(f"{path}: is shorter than before", next_step="open the object again")
        self._maps.drop(segment)  # one from before the segment grew
        return self._maps.open(segment, path, nbytes)

    def _mark(self, entry: Entry, unit: int, file: os.stat_result) -> None:
        """Record that an object was verified, in a file with this status before."""
        segment = entry.place
        with self._lock:
            if len(self._verified_bytes) >= _REMEMBERED_SEGMENTS:
                self._verified_bytes.clear()
            self._verified_bytes[segment] = self._verified_bytes.get(segment, 0) + entry.size
            if entry.size < _SLICED_BYTES:
                return
            verified = self._verified.get(segment)
            if verified is None or not verified.is_of(file):
                self._verified.pop(segment, None)
                verified = self._verified[segment] = _Verified(file)
                while len(self._verified) > _MARKED_SEGMENTS:
                    del self._verified[next(iter(self._verified))]
            verified.add(unit)
