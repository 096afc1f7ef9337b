"""Records of verified bytes: a reader does not verify bytes again that this process, or another one, has verified.

- `VerifiedBlocks` (`store.py`): the blocks of data files that this process has verified. Kept in memory.
- The seal of a data file: all of its blocks were read and found right while the file had this inode and change time. Stored
  in the index record of the object. A hard link to the file changes the change time as well, but not the modification
  time; so the seal also has this time and the number of links.
- The seal of a segment: the same for all objects that the index had in a segment at that moment. Stored in a table.

A process compares the seal with the file before it maps it. A file that was cut, changed, replaced or appended to since has
another inode or change time. Its bytes are then verified again, at their first use in each process.

Objects get rising generations in the step that enters them into the index. So the highest generation of the moment defines
the objects that the seal of a segment covers: an object whose bytes were written before the seal, and entered later, is not
covered.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import xxhash

from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.runtime.failures import LostDataError
from millrace.runtime.forks import Pool
from millrace.runtime.locks import NamedLocks, Outcome, lock_number
from millrace.store.index import Index
from millrace.store.maps import MapSlot, lost_or_failed
from millrace.store.records import Entry, block_count, generation_key, segment_unit
from millrace.store.segment_files import data_path
from millrace.store.store import Store
from millrace.store.transactions import Writing

INLINE_BYTES = 64 << 20
"""An object up to this size is sealed while its open waits; larger ones in the background, and read through blocks."""

_ATTEMPTS = 3
_THREADS = 2

_SEAL = struct.Struct("<QqQ")
_SWEPT = 8  # seals of removed segments that are deleted when another one is recorded
_PAUSE_SECONDS = 10.0
_REMEMBERED = 4096


def slot_holds(entry: Entry, slot: MapSlot) -> bool:
    """Whether a file had not changed since its blocks were verified when it was mapped."""
    return (entry.seal_inode, entry.seal_ctime_ns) == (slot.inode, slot.ctime_ns)


class _Background:
    """Threads that verify files, until `close` or the end of the interpreter. Thread-safe; not usable after a fork."""

    def __init__(self, threads: int, name: str, report: Callable[[StorageError], None]) -> None:
        self._report = report
        self._pool = Pool(threads, name)
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """End the work in progress. A later process completes it."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _ending(self) -> bool:
        main = threading.main_thread()
        # Not in the main thread itself: an interrupt (Ctrl-C) inside of `is_alive` marks the thread as ended.
        return self._closed or not (threading.current_thread() is main or main.is_alive())


class Sealer(_Background):
    """Verifies and seals the data files of a store. Thread-safe; one file at a time in a process. Not usable after a fork.

    `report` is called with the error of a disk that fails in the background.
    """

    def __init__(self, store: Store, *, report: Callable[[StorageError], None]) -> None:
        super().__init__(_THREADS, "millrace-seal", report)
        self._store = store
        self._waiting: set[int] = set()
        self._running: dict[int, Outcome[Entry | None]] = {}

    def sealed(self, entry: Entry) -> Entry | None:
        """The record of a complete object with its seal, which is made now if it is missing.

        None when that takes too long and continues in the background, or when blocks are wrong: read through blocks then.
        Raises `LostDataError` when the file is gone or cut, `StorageError` when the disk fails.
        """
        if entry.sealed:
            return entry
        if entry.size > INLINE_BYTES:
            self.start(entry)
            return None
        return self._seal_or_join(entry)

    def seal(self, entry: Entry) -> Entry | None:
        """As `sealed`, but waits however long it takes; the seal holds for the present state of the file."""
        sealed = entry if entry.sealed else self._seal_or_join(entry)
        if sealed is not None:
            with lost_or_failed(self._store.path(entry)):
                if sealed.seal_holds(os.stat(self._store.path(entry), follow_symlinks=False)):
                    return sealed
            sealed = self.check_seal(sealed)
            sealed = sealed if sealed.sealed else self._seal_or_join(sealed)
        return sealed

    def start(self, entry: Entry) -> None:
        """Seal a complete object in the background. Errors are reported."""
        with self._lock:
            running = self._running.get(entry.generation)
            if self._closed or entry.generation in self._waiting or (running is not None and not running.done()):
                return
            self._waiting.add(entry.generation)
        try:
            self._pool.submit(self._seal_in_background, entry)
        except RuntimeError:  # the interpreter is ending; the next process seals it
            self._waiting.discard(entry.generation)

    def check_seal(self, entry: Entry) -> Entry:
        """The record of an object whose file does not match its seal: with a new seal if only links were added or removed,
        otherwise without one, which is recorded; the file must then be verified again.
        """
        with contextlib.suppress(OSError):
            found = os.stat(self._store.path(entry), follow_symlinks=False)
            if (
                (entry.seal_inode, entry.seal_mtime_ns) == (found.st_ino, found.st_mtime_ns)
                and entry.seal_links != found.st_nlink
                and self._store.index.seal(entry, found)
            ):
                return entry.with_seal(found)
        emit(Event(name="cache.file.changed", subject=self._store.path(entry), detail="its blocks are verified again"))
        self._store.index.unseal(entry)
        return entry.with_seal(None)

    def _seal_in_background(self, entry: Entry) -> None:
        self._waiting.discard(entry.generation)
        if self._ending():
            return
        try:
            self._seal_or_join(entry)
        except LostDataError as error:
            emit(Event(name="cache.file.lost", subject=str(self._store.directory), detail=str(error)))
        except StorageError as error:
            self._report(error)

    def _seal_or_join(self, entry: Entry) -> Entry | None:
        mine = outcome = Outcome[Entry | None]()
        try:
            with self._lock:
                outcome = self._running.get(entry.generation, mine)
                if outcome.done():  # an interrupt has left it
                    outcome = mine
                self._running[entry.generation] = outcome
            if outcome is mine:
                mine.set_result(self._seal(entry))
        except Exception as error:  # raised in every thread that waits for the same file
            mine.set_exception(error)
            raise
        except BaseException:  # an interrupt of this thread only: the others read through blocks
            mine.set_result(None)
            raise
        finally:
            with self._lock:
                if self._running.get(entry.generation) is mine:
                    del self._running[entry.generation]
        return outcome.result()

    def _seal(self, entry: Entry) -> Entry | None:
        descriptor = self._store.open_data(entry)
        try:
            for _ in range(_ATTEMPTS):
                before = os.fstat(descriptor)
                blocks = range(block_count(entry.size, entry.block_bytes))
                wrong = self._store.drop_wrong_blocks(entry, descriptor, blocks, stop=self._ending)
                if wrong is None or wrong:
                    return None
                sealed = entry.with_seal(before)
                if sealed.seal_holds(os.fstat(descriptor)):  # no process wrote meanwhile
                    return sealed if self._store.index.seal(entry, before) else None
            return None
        finally:
            os.close(descriptor)


class SegmentSeal(NamedTuple):
    """The inode and change time of a segment's file, and the generation up to which its objects were then verified."""

    inode: int
    ctime_ns: int
    generation: int

    def holds(self, slot: MapSlot) -> bool:
        """Whether a file had not changed since its objects were verified when it was mapped."""
        return (self.inode, self.ctime_ns) == (slot.inode, slot.ctime_ns)


class SegmentSeals:
    """The table of seals of segments in a store's index. Thread- and process-safe; raises the errors of `Index`."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._table = index.table(b"seals")

    def get(self, segment: int) -> SegmentSeal | None:
        """The seal of a segment, or None."""
        with self._index.reading() as txn:
            value = txn.get(generation_key(segment), db=self._table)
            return None if value is None else SegmentSeal._make(_SEAL.unpack(value))

    def put(self, segment: int, seal: SegmentSeal) -> bool:
        """Record a seal in place of any other. False when the segment was removed meanwhile."""

        def write(txn: Writing) -> bool:
            if not self._index.has_segment(txn, segment):
                return False
            txn.put(generation_key(segment), _SEAL.pack(*seal), db=self._table)
            # The oldest seals are those of the oldest segments, which are the most likely to be removed.
            cursor = txn.cursor(self._table)
            more = cursor.first()
            for _ in range(_SWEPT):
                if more and not self._index.has_segment(txn, int.from_bytes(cursor.key(), "big")):
                    more = cursor.delete()
                else:
                    more = more and cursor.next()
            return True

        return self._index.write(write)


class SegmentSealer(_Background):
    """Verifies whole segments in the background, and seals them. Thread-safe; not usable after a fork.

    A process seals one segment at a time, and each at most once in ten seconds. One process of the node at a time seals a
    segment. `on_wrong` is called with an object whose bytes are wrong, to remove it; `report` with the error of a disk that
    fails.
    """

    def __init__(
        self,
        directory: Path,
        index: Index,
        locks: NamedLocks,
        *,
        on_wrong: Callable[[Entry], None],
        report: Callable[[StorageError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(1, "millrace-seal-segments", report)
        self._directory = directory
        self._index = index
        self._seals = SegmentSeals(index)
        self._locks = locks
        self._on_wrong = on_wrong
        self._clock = clock
        self._started: OrderedDict[int, float] = OrderedDict()

    def get(self, segment: int) -> SegmentSeal | None:
        """The seal of a segment, or None. Raises `StorageError`."""
        return self._seals.get(segment)

    def start(self, segment: int) -> None:
        """Seal a segment in the background, unless that was tried in the last ten seconds. Errors are reported."""
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

    def seal(self, segment: int) -> bool:
        """Verify all objects of a segment that are in the index, and record the seal. Returns whether it was recorded.

        Wrong objects are removed, and the others sealed. Nothing is recorded when the file was written to meanwhile, or
        another process seals the segment. Raises `LostDataError` and `StorageError`.
        """
        number = lock_number(segment_unit(segment))
        if not self._locks.try_acquire(number):
            return False
        try:
            return self._seal(segment)
        finally:
            self._locks.release(number)

    def _seal_in_background(self, segment: int) -> None:
        try:
            if not self._ending():
                self.seal(segment)
        except LostDataError:
            return  # removed meanwhile; otherwise the next reader raises the same error and reports it
        except StorageError as error:
            self._report(error)

    def _seal(self, segment: int) -> bool:
        path = data_path(self._directory, segment)
        with lost_or_failed(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                before = os.fstat(descriptor)
                # The generation first, then the objects: those that are entered in between are verified, but not covered.
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
        """Whether there is a seal of the file in its present state that covers these objects."""
        old = self._seals.get(segment)
        same_file = old is not None and old[:2] == seal[:2]
        return same_file and old is not None and all(entry.generation <= old.generation for entry in entries)
