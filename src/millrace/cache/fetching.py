"""Brings blocks of one object version here: in runs of neighbours, each block once for all threads and processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext

from typing_extensions import Buffer

from millrace.cache.blocks import RUN_BLOCKS, coalesce, span_of
from millrace.cache.disk import Disk, Room
from millrace.cache.evictor import Newcomer
from millrace.cache.failures import disk_errors
from millrace.cache.flight import BlockKey, Flight
from millrace.cache.records import Entry
from millrace.cache.source import Keep, Source, lock_key
from millrace.cache.threads import Threads
from millrace.cache.usage import FindGroup
from millrace.errors import OriginUnavailableError, StorageError

_POLL_SECONDS = (0.001, 0.05)  # first and longest pause while another process fetches
_NO_FILE = -1


class Fetcher:
    """Fetches blocks for one reader. Thread-safe. Blocks that are read from the disk on the way are added to `verified`."""

    def __init__(
        self,
        *,
        source: Source,
        key: str,
        entry: Entry,
        disk: Disk,
        threads: Threads,
        verified: set[int],
        group: FindGroup,
    ) -> None:
        self.source = source
        self.key = key
        self.entry = entry
        self.disk = disk
        self.threads = threads
        self.verified = verified
        self.group = group
        self.removed = False
        """Whether the object was evicted or freed meanwhile, so that nothing more can be kept."""

    def start(self, blocks: Sequence[int], descriptor: int, *, waited_for: bool) -> dict[int, Flight]:
        """Begin to fetch missing blocks into the file `descriptor`; returns a flight for each of them.

        `waited_for` says that somebody is about to wait for them: what was only expected so far, and has not begun, then
        goes before everything that is only expected.
        """
        mine, theirs = self.disk.flights.board(self.entry.object_id, blocks)
        if waited_for:
            for flight in theirs.values():
                flight.hasten()
        for numbers in coalesce(mine, RUN_BLOCKS):
            flights = {block: mine[block] for block in numbers}
            # A descriptor of its own: the reader may be closed before the fetch ends, and opening the name again could
            # make a new file where this one was removed.
            _Run(self, flights, self._duplicate(descriptor), waited_for=waited_for).submit()
        return {**mine, **theirs}

    def _duplicate(self, descriptor: int) -> int:
        """Another descriptor of the file; `_NO_FILE` where the process has none left: the fetch then keeps nothing."""
        try:
            with disk_errors(self.disk.store.path(self.entry)):
                return os.dup(descriptor)
        except StorageError as error:
            self._report(error)
            return _NO_FILE

    def fail(self, flights: dict[int, Flight], error: BaseException) -> None:
        """Give `error` to everyone who waits for these blocks, but for those that have landed."""
        for block, flight in flights.items():
            self.disk.flights.fail((self.entry.object_id, block), flight, error)

    # --- what a run does, in a thread of a pool ---------------------------------------------------

    def lock_key(self, block: int) -> BlockKey:
        return lock_key(self.source, self.entry.object_id, block, block * self.entry.block_bytes)

    def land_stored(self, block: int, flight: Flight, descriptor: int) -> bool:
        """Give a block to whoever waits for it if it is here by now."""
        if descriptor == _NO_FILE:
            return False
        try:
            data = self.disk.store.read_block(self.entry, descriptor, block)
        except StorageError as error:
            self._report(error)
            return False
        if data is None:
            return False
        self.verified.add(block)
        self.disk.counters.add("cache_bytes", len(data))
        self.disk.flights.land((self.entry.object_id, block), flight, data)
        return True

    def fetch_part(self, part: range, flights: dict[int, Flight], descriptor: int) -> None:
        """One request; its blocks are stored, then given to whoever waits."""
        entry, counters = self.entry, self.disk.counters
        start, stop = span_of(part.start, part.stop, entry.size, entry.block_bytes)
        answer, how = self.source.read(start, stop)
        data = memoryview(answer).cast("B")
        self.disk.missed(entry, stop - start, self.group)
        newcomer = Newcomer(entry.object_id, entry.size, lambda: entry.name, self.group, how)
        has_file = descriptor != _NO_FILE
        with self.disk.reserved(stop - start, newcomer) if has_file else nullcontext(Room(self.disk.store, 0)) as room:
            keep = bool(room)
            if has_file and not keep and how is Keep.OWNED:
                self.disk.report_full(stop - start, newcomer)
            for block in part:
                block_start, block_stop = span_of(block, block + 1, entry.size, entry.block_bytes)
                piece = data[block_start - start : block_stop - start]
                keep = keep and self._try_store(descriptor, block, piece, how)
                if keep:
                    room.wrote(len(piece))
                else:
                    counters.add("uncached_bytes", len(piece))
                    self.disk.held.put((entry.object_id, block), piece)
                self.disk.flights.land((entry.object_id, block), flights[block], piece)

    def _try_store(self, descriptor: int, block: int, piece: Buffer, how: Keep) -> bool:
        """Store a block; a disk that will not take it costs the copy, not the read."""
        try:
            entry = self.disk.store.write_block(self.entry, descriptor, block, piece)
        except StorageError as error:
            self._report(error)
            return False
        if entry is None:
            self.removed = True
            return False
        self.verified.add(block)
        self.disk.usage.missed(entry, 0, self.group, kept=True, copy=how is Keep.COPY)
        if entry.complete and not entry.sealed:
            self.disk.sealer.start(entry)
        return True

    def _report(self, error: StorageError) -> None:
        self.disk.report(error, self.disk.store.path(self.entry))


class _Run:
    """Neighbouring blocks on their way. Begins once, in the pool that gets to it first; owns its descriptor."""

    def __init__(self, fetcher: Fetcher, flights: dict[int, Flight], descriptor: int, *, waited_for: bool) -> None:
        self._fetcher = fetcher
        self._flights = flights
        self._descriptor = descriptor
        self._waited_for = waited_for
        self._begun = threading.Lock()  # taken once and never given back
        self._pending = set(flights)
        self._pause, self._longest_pause = _POLL_SECONDS
        self._deadline = 0.0
        for flight in flights.values():
            flight.carried_by(self.hasten)

    def submit(self) -> None:
        """Have it begun by the pool for runs of its kind."""
        threads = self._fetcher.threads
        try:
            (threads.demand if self._waited_for else threads.ahead).submit(self._begin)
        except RuntimeError:  # the interpreter is shutting down
            if self._begun.acquire(blocking=False):
                self._refused()

    def hasten(self) -> None:
        """Somebody waits: if it lies in the queue of what is only expected, have it begun by the other pool."""
        if not self._waited_for:
            self._waited_for = True
            if not self._begun.locked():
                self.submit()

    def _begin(self) -> None:
        if self._begun.acquire(blocking=False):  # else the other pool was here before
            self._deadline = time.monotonic() + self._fetcher.disk.locks.patience_seconds()
            self._go_on()

    def _go_on(self) -> None:
        fetcher, on = self._fetcher, True
        while on:
            try:
                if not self._waited_for and not threading.main_thread().is_alive():
                    # The interpreter is ending and waits for its pools: what nobody waits for is not fetched any more.
                    raise OriginUnavailableError(f"{fetcher.key} was not fetched: the process is ending")
                self._step()
            except BaseException as error:  # noqa: BLE001 - whoever waits for these blocks must hear of it
                self._end(error)
                return
            if not self._pending:
                self._end()
                return
            # Others must not wait for a thread while this one waits for another process.
            pause, self._pause = self._pause, min(self._pause * 2, self._longest_pause)
            pool = fetcher.threads.demand if self._waited_for else fetcher.threads.ahead
            on = fetcher.threads.pause(pool, pause, self._go_on, self._refused)

    def _step(self) -> None:
        """Fetch every block of the run that no other process is at, and look for what those have brought."""
        fetcher, locks = self._fetcher, self._fetcher.disk.locks
        overdue = time.monotonic() > self._deadline
        keys = {block: fetcher.lock_key(block) for block in self._pending}
        locked: list[int] = []
        try:
            for block in sorted(self._pending):
                if locks.try_acquire(keys[block]):
                    locked.append(block)
            # Another process may have finished a block between the caller's look and the lock.
            landed = {b for b in self._pending if fetcher.land_stored(b, self._flights[b], self._descriptor)}
            if overdue and len(locked) + len(landed) < len(self._pending):
                locks.overtook()
            for part in coalesce(set(self._pending if overdue else locked) - landed, RUN_BLOCKS):
                fetcher.fetch_part(part, self._flights, self._descriptor)
                landed.update(part)
        finally:
            for block in locked:
                locks.release(keys[block])
        self._pending -= landed

    def _refused(self) -> None:
        reason = f"cannot fetch {self._fetcher.key}: the process is ending"
        self._end(OriginUnavailableError(reason, next_step="read it again"))

    def _end(self, error: BaseException | None = None) -> None:
        if self._descriptor != _NO_FILE:
            os.close(self._descriptor)
        # Each of them knows its run: as a circle, what they carry would stay in memory until the next collection of garbage.
        flights, self._flights = self._flights, {}
        if error is not None:
            self._fetcher.fail(flights, error)
