"""Seals of segments: what one process has verified, another one need not verify again.

A seal says that every object which the index had in a segment when it was looked at was read from the file and found right,
while the file had this inode and change time. Whoever maps the segment compares these, as with the seal of a large file
(`sealing.py`): a segment that was cut, flipped, replaced, or appended to since has others, and its objects are then verified
one by one, at the first use in each process.

Objects get rising generations in the step that enters them into the index. So the highest one of that moment tells what the
seal covers: what was written to the file before, and entered later, is not believed because of it.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from millrace.cache.failures import LostDataError
from millrace.cache.flight import ProcessLocks
from millrace.cache.index import Index
from millrace.cache.maps import MapSlot, lost_or_failed
from millrace.cache.records import Entry, generation_key, segment_unit
from millrace.cache.segment_files import data_path
from millrace.errors import StorageError

_SEAL = struct.Struct("<QqQ")
_SWEPT = 8  # seals of removed segments that go whenever one is made
_PAUSE_SECONDS = 10.0
_REMEMBERED = 4096


class SegmentSeal(NamedTuple):
    """The inode and change time of a segment's file, and the generation up to which its objects were then verified."""

    inode: int
    ctime_ns: int
    generation: int

    def holds(self, slot: MapSlot) -> bool:
        """Whether a file was mapped while it was as when its objects were verified."""
        return (self.inode, self.ctime_ns) == (slot.inode, slot.ctime_ns)


class SegmentSeals:
    """The seals that are recorded in a store's index. Thread- and process-safe; raises what `Index` raises."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._table = index.table(b"seals")

    def get(self, segment: int) -> SegmentSeal | None:
        """The seal of a segment; None where it has none."""
        with self._index.reading() as txn:
            value = txn.get(generation_key(segment), db=self._table)
            return None if value is None else SegmentSeal._make(_SEAL.unpack(value))

    def put(self, segment: int, seal: SegmentSeal) -> bool:
        """Record a seal in place of any other; false when the segment was removed meanwhile."""
        with self._index.writing() as txn:
            if not self._index.has_segment(txn, segment):
                return False
            txn.put(generation_key(segment), _SEAL.pack(*seal), db=self._table)
            # The oldest seals are of the oldest segments, the likeliest to be gone.
            cursor = txn.cursor(self._table)
            more = cursor.first()
            for _ in range(_SWEPT):
                if more and not self._index.has_segment(txn, int.from_bytes(cursor.key(), "big")):
                    more = cursor.delete()
                else:
                    more = more and cursor.next()
            return True


class SegmentSealer:
    """Verifies segments as a whole, in the background, and seals them. Thread-safe; not usable after a fork.

    One segment at a time in a process, each by one process of the node at a time, and by each process at most once in ten
    seconds. `on_wrong` is told of an object whose bytes are wrong, and forgets it; `report` hears of a disk that fails.
    """

    def __init__(
        self,
        directory: Path,
        index: Index,
        locks: ProcessLocks,
        *,
        on_wrong: Callable[[Entry], None],
        report: Callable[[StorageError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._index = index
        self._seals = SegmentSeals(index)
        self._locks = locks
        self._on_wrong = on_wrong
        self._report = report
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="millrace-seal-segments")
        self._started: OrderedDict[int, float] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def get(self, segment: int) -> SegmentSeal | None:
        """The seal of a segment; None where it has none. Raises `StorageError`."""
        return self._seals.get(segment)

    def start(self, segment: int) -> None:
        """Seal a segment in the background, unless that was tried a moment ago. Errors are reported."""
        now = self._clock()
        with self._lock:
            if self._closed or now - self._started.get(segment, -_PAUSE_SECONDS) < _PAUSE_SECONDS:
                return
            self._started[segment] = now
            self._started.move_to_end(segment)
            while len(self._started) > _REMEMBERED:
                self._started.popitem(last=False)
        try:
            self._pool.submit(self._seal_in_background, segment)
        except RuntimeError:  # the interpreter is ending; another process seals it
            return

    def close(self) -> None:
        """End what is under way."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def seal(self, segment: int) -> bool:
        """Verify all objects of a segment that are in the index, and record that they are right; gives whether it did.

        Objects that are wrong are forgotten, and the others sealed. Nothing is recorded when the file was written to
        meanwhile, or another process is at it. Raises `LostDataError` and `StorageError`.
        """
        key = (segment_unit(segment), 0)
        if not self._locks.try_acquire(key):
            return False
        try:
            return self._seal(segment)
        finally:
            self._locks.release(key)

    # --- inside -----------------------------------------------------------------------------------

    def _seal_in_background(self, segment: int) -> None:
        try:
            if not self._ending():
                self.seal(segment)
        except LostDataError:
            return  # removed meanwhile; or who reads from it meets the same, and tells of it
        except StorageError as error:
            self._report(error)

    def _seal(self, segment: int) -> bool:
        path = data_path(self._directory, segment)
        with lost_or_failed(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                before = os.fstat(descriptor)
                # First the number, then the objects: those that are entered in between are verified in vain.
                seal = SegmentSeal(before.st_ino, before.st_ctime_ns, self._index.last_generation)
                entries = self._index.entries_in(segment)
                if not before.st_size or not entries or self._is_sealed(segment, seal, entries):
                    return False
                for entry in sorted(entries, key=lambda entry: entry.offset):
                    if self._ending():
                        return False
                    data = os.pread(descriptor, entry.size, entry.offset)
                    if xxhash.xxh3_64_intdigest(data) != entry.checksum:
                        self._on_wrong(entry)
                after = os.fstat(descriptor)
            finally:
                os.close(descriptor)
        if (before.st_ctime_ns, before.st_size) != (after.st_ctime_ns, after.st_size):
            return False
        return self._seals.put(segment, seal)

    def _is_sealed(self, segment: int, seal: SegmentSeal, entries: list[Entry]) -> bool:
        """Whether there is a seal of the file as it is now that covers these objects."""
        old = self._seals.get(segment)
        same_file = old is not None and old[:2] == seal[:2]
        return same_file and old is not None and all(entry.generation <= old.generation for entry in entries)

    def _ending(self) -> bool:
        return self._closed or not threading.main_thread().is_alive()
