"""Small objects: fetched whole with one request, kept in segments, read from there.

The shape is that of `reader.py`, with one block an object: a table of flights in the process and a byte-range lock between
processes see to it that each object is fetched once, and what cannot be kept is held in memory for a moment. A fetch that
somebody waits for runs in his own thread, since a hop to another costs more than all else that is done for a small object.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from typing_extensions import Buffer

from millrace.cache.blocks import BLOCK_BYTES
from millrace.cache.disk import Disk
from millrace.cache.evictor import Newcomer
from millrace.cache.failures import LostDataError
from millrace.cache.maps import MapSlot
from millrace.cache.reader import ObjectReader
from millrace.cache.records import Entry, ObjectName
from millrace.cache.segment_files import data_bytes
from millrace.cache.segments import SMALL_OBJECT_BYTES, appended_bytes
from millrace.cache.source import Keep, Source, lock_key
from millrace.cache.threads import Threads
from millrace.errors import OriginUnavailableError, StorageError
from millrace.events import Event, emit
from millrace.origin import ObjectInfo, Origin

_POLL_SECONDS = (0.001, 0.05)  # first and longest pause while another process fetches


def is_small(size: int, entry: Entry | None) -> bool:
    """Whether an object belongs into a segment. One that has a file of its own already stays there."""
    return size <= SMALL_OBJECT_BYTES and (entry is None or entry.place != 0)


def stored_object(disk: Disk, entry: Entry, *, verify: bool = False) -> tuple[Buffer, MapSlot | None] | None:
    """The bytes of an object in a segment, and the slot of the map that they are part of; without one they are a copy.

    They are verified when this process reads them for the first time and their segment is not sealed, or always with
    `verify`. None when they are wrong or gone: the object is then forgotten, which is counted and reported. Raises
    `StorageError` when the disk fails.
    """
    found: tuple[Buffer, MapSlot | None] | None
    try:
        if verify:
            data = disk.segment_maps.read(entry)
            found = None if data is None else (data, None)
        else:
            found = disk.segment_maps.get(entry)
    except LostDataError as error:
        if disk.store.index.get(entry.object_id) != entry:
            return None  # evicted since its record was read
        emit(Event(name="cache.file.lost", subject=str(disk.store.directory), detail=str(error)))
        _forget_lost(disk, entry)
        return None
    if found is None:
        disk.drop_wrong(entry)
    return found


def _forget_lost(disk: Disk, entry: Entry) -> None:
    """Forget an object whose segment somebody cut, or all objects of a segment that somebody removed or replaced."""
    try:
        data_bytes(disk.segments.directory, entry.place)
    except LostDataError:
        disk.store.index.remove_segment(entry.place)
    else:
        disk.store.index.remove(entry.object_id)
    disk.segment_maps.forget(entry.place)


class SmallReader:
    """The `ObjectReader` of an object that is kept in a segment. It has no descriptor.

    What was read once stays readable through this reader, whatever becomes of the object. `group` is asked when the object
    is about to be kept. `verify` reads from the disk with a checksum every time.
    """

    def __init__(
        self,
        *,
        source: Source,
        origin: Origin,
        info: ObjectInfo,
        object_id: bytes,
        disk: Disk,
        threads: Threads,
        verify: bool,
        group: Callable[[], str],
        reopen: Callable[[], ObjectReader],
    ) -> None:
        self._source = source
        self._origin = origin
        self._info = info
        self._key = (object_id, 0)
        self._disk = disk
        self._threads = threads
        self._verify = verify
        self._group = group
        self._reopen = reopen
        self._pid = os.getpid()
        self._heir: ObjectReader | None = None
        self._data: Buffer | None = b"" if info.size == 0 else None
        self._closed = False

    @property
    def size(self) -> int:
        return self._info.size

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES

    @property
    def directory(self) -> Path:
        """The store that the object goes to."""
        return self._disk.store.directory

    def close(self) -> None:
        self._closed = True
        self._data = None
        if self._heir is not None:
            self._heir.close()

    def read(self, start: int, stop: int) -> Buffer:
        if self._closed:
            raise ValueError(f"the reader of {self._info.key} is closed")
        start, stop = max(0, start), min(stop, self._info.size)
        if stop <= start:
            return b""
        data = self._data
        if data is None:
            if self._pid != os.getpid():
                return self._in_this_process().read(start, stop)
            data = self._data = self._whole()
        if stop - start == self._info.size:
            return data
        piece = memoryview(data)[start:stop]
        # A small piece as a copy: as a view it would keep the whole object in memory.
        return bytes(piece) if len(piece) < self._info.size // 4 else piece

    def prefetch(self, blocks: range) -> None:
        if self._pid != os.getpid():
            self._in_this_process().prefetch(blocks)
            return
        if self._closed or not blocks or self._data is not None:
            return
        try:
            self._threads.ahead.submit(self._bring)
        except RuntimeError as error:  # the interpreter is shutting down
            emit(Event(name="cache.prefetch.refused", subject=self._info.key, detail=str(error)))

    # --- what `filling.py` asks for besides -------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        """Whether the disk would keep `nbytes` more, as far as can be told before."""
        try:
            return self._disk.store.has_room(nbytes)
        except StorageError as error:
            self._report(error)
            return False

    def missing(self, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that are not here; all of them when the disk cannot tell."""
        try:
            return [] if self._entry() is not None else list(blocks)
        except StorageError as error:
            self._report(error)
            return list(blocks)

    def is_sound(self, block: int) -> bool:
        """Whether the object is here and its bytes, read now, are right; a wrong one is forgotten, and counted."""
        try:
            entry = self._entry()
            return entry is not None and stored_object(self._disk, entry, verify=True) is not None
        except StorageError as error:
            self._report(error)
            return False

    def fetch(self, blocks: Sequence[int]) -> dict[int, Buffer]:
        """Bring the object here and return its bytes, waiting for it when it is on its way already."""
        return {block: self._whole() for block in blocks}

    def let_go(self, blocks: Sequence[int]) -> None:
        """Forget the object where it was not kept and is held in memory: a fetch then keeps it, where there is room now."""
        self._disk.held.drop(self._key[0], blocks)

    # --- inside -----------------------------------------------------------------------------------

    def _in_this_process(self) -> ObjectReader:
        """The same object, opened by this process: the one that was inherited by a fork belongs to another disk."""
        if self._heir is None:
            self._heir = self._reopen()
        return self._heir

    def _whole(self) -> Buffer:
        """All bytes of the object, from wherever they are."""
        data = self._stored()
        if data is None:
            data = self._disk.held.get(self._key[0], (0,)).get(0)
        if data is not None:
            return data
        mine, theirs = self._disk.flights.board(self._key[0], (0,))
        return self._fetch(mine[0]) if mine else theirs[0].result()

    def _bring(self) -> None:
        """Fetch the object in a thread of a pool, unless it is here or on its way. Errors surface when it is read."""
        if not threading.main_thread().is_alive():
            return  # the interpreter is ending and waits for its pools
        if not self.missing((0,)) or self._disk.held.get(self._key[0], (0,)):
            return
        mine, _ = self._disk.flights.board(self._key[0], (0,))
        if mine:
            self._fetch(mine[0])

    def _entry(self) -> Entry | None:
        entry = self._disk.store.index.get(self._key[0])
        return entry if entry is not None and entry.place else None

    def _stored(self) -> Buffer | None:
        """The object from this disk; None when it is not here, or cannot be read."""
        try:
            entry = self._entry()
            found = None if entry is None else stored_object(self._disk, entry, verify=self._verify)
        except StorageError as error:
            self._report(error)
            return None
        if entry is None or found is None:
            return None
        self._disk.counters.add("cache_bytes", entry.size)
        self._disk.usage.hit(entry, entry.size)
        return found[0]

    def _fetch(self, flight: Future[Buffer]) -> Buffer:
        """Fetch the object, or await the process that does, and give it to everyone who waits for this flight."""
        try:
            data = self._fetch_or_await()
        except Exception as error:
            self._disk.flights.fail(self._key, flight, error)
            raise
        except BaseException:
            # Ctrl-C in this thread is not for those in others.
            interrupted = OriginUnavailableError(f"{self._info.key} was not fetched", next_step="read it again")
            self._disk.flights.fail(self._key, flight, interrupted)
            raise
        self._disk.flights.land(self._key, flight, data)
        return data

    def _fetch_or_await(self) -> Buffer:
        locks = self._disk.locks
        key = lock_key(self._source, self._key[0], 0, 0)
        pause, longest = _POLL_SECONDS
        deadline = time.monotonic() + locks.patience_seconds()
        while True:
            locked = locks.try_acquire(key)
            try:
                # Another process may have brought it between the caller's look and the lock.
                data = self._stored()
                overdue = time.monotonic() > deadline
                if overdue and not locked:
                    locks.overtook()
                if data is None and (locked or overdue):
                    data = self._fetch_now()
            finally:
                if locked:
                    locks.release(key)
            if data is not None:
                return data
            time.sleep(pause)
            pause = min(pause * 2, longest)

    def _fetch_now(self) -> Buffer:
        info, counters = self._info, self._disk.counters
        data, keep = self._source.read(0, info.size)
        key, name = self._key[0], ObjectName(self._origin.identity, info.key, info.version)
        self._disk.missed(
            Entry(key, 0, info.size, max(1, info.size), 0, packed_name=name.pack()), info.size, self._group
        )
        newcomer = Newcomer(key, info.size, lambda: name, self._group, keep)
        with self._disk.reserved(appended_bytes(info.size), newcomer) as room:
            if not room and keep is Keep.OWNED:
                self._disk.report_full(info.size, newcomer)
            if room and self._kept(data, keep):
                room.wrote(room.left)
            else:
                counters.add("uncached_bytes", info.size)
                self._disk.held.put(self._key, data)
        return data

    def _kept(self, data: Buffer, keep: Keep) -> bool:
        """Put the object into a segment; a disk that will not take it costs the copy, not the read."""
        info, disk = self._info, self._disk
        name = ObjectName(self._origin.identity, info.key, info.version)
        try:
            for _ in range(2):
                group = disk.segment_group(name, self._group(), keep)
                placed = disk.segments.append(group, self._key[0], name, data, most_bytes=disk.segment_bytes(name))
                entry = disk.store.index.add_small(
                    self._key[0],
                    info.size,
                    name,
                    segment=placed.segment,
                    offset=placed.offset,
                    checksum=placed.checksum,
                )
                if entry is not None:
                    disk.usage.missed(entry, 0, self._group, kept=True)
                    return True
                disk.segments.forget(placed.segment)  # it was removed meanwhile
        except StorageError as error:
            self._report(error)
        return False

    def _report(self, error: StorageError) -> None:
        self._disk.report(error)
