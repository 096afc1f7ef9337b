"""Reads one object version: what is on this disk from there, the rest from the origin, each block fetched once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait

from typing_extensions import Buffer

from millrace.cache.blocks import RUN_BLOCKS, blocks_of, coalesce, span_of
from millrace.cache.counters import Counters
from millrace.cache.flight import PATIENCE_SECONDS, Flights, ProcessLocks
from millrace.cache.held import HeldBlocks
from millrace.cache.index import Entry
from millrace.cache.store import Store
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.origin import ObjectInfo, Origin

_POLL_SECONDS = (0.001, 0.05)  # first and longest pause while another process fetches


class ObjectReader:
    """Random access to one pinned version of one object. Thread-safe. Close it to give its descriptor back.

    Reads return the bytes of that version or raise: `ObjectChangedError` when a block is missing here and the origin has
    another version by now, `OriginUnavailableError` when a block is missing here and the origin does not answer.
    """

    def __init__(
        self,
        *,
        origin: Origin,
        info: ObjectInfo,
        entry: Entry,
        store: Store,
        flights: Flights,
        held: HeldBlocks,
        locks: ProcessLocks,
        counters: Counters,
        executor: Executor,
        verify: bool,
        on_full: Callable[[], None],
    ) -> None:
        self._origin = origin
        self._info = info
        self._entry = entry
        self._store = store
        self._flights = flights
        self._held = held
        self._locks = locks
        self._counters = counters
        self._executor = executor
        self._verify = verify
        self._on_full = on_full
        self._descriptor = store.open_data(entry)

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return self._entry.size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._entry.block_bytes

    def close(self) -> None:
        """Give the descriptor back. Idempotent; fetches under way keep one of their own."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def read(self, start: int, stop: int) -> Buffer:
        """The bytes `[start, stop)`, cut at the end of the object."""
        start, stop = max(0, start), min(stop, self._entry.size)
        if stop <= start:
            return b""
        blocks = blocks_of(start, stop, self._entry.block_bytes)
        fetched = self.fetch(self._store.missing(self._entry, blocks))
        kept = stop - start - sum(self._overlap(block, start, stop) for block in fetched)
        if kept:
            self._counters.add("cache_bytes", kept)
        if not fetched and not self._verify:
            return self._pread(start, stop)
        if len(blocks) == 1 and fetched:
            return self._cut(fetched[blocks[0]], blocks[0], start, stop)
        result = bytearray(stop - start)
        for block in blocks:
            data = fetched.get(block)
            if data is None:
                data = self._stored_block(block)
            piece = self._cut(data, block, start, stop)
            offset = max(block * self._entry.block_bytes, start) - start
            result[offset : offset + len(piece)] = piece
        return result

    def fetch(self, blocks: Sequence[int]) -> dict[int, Buffer]:
        """Bring missing blocks here and return their bytes, waiting for those that are on their way already."""
        if not blocks:
            return {}
        held = self._held.get(self._entry.object_id, blocks)
        waiting = self.start_fetch([block for block in blocks if block not in held])
        wait(waiting.values())
        return {**held, **{block: future.result() for block, future in waiting.items()}}

    def start_fetch(self, blocks: Sequence[int]) -> dict[int, Future[Buffer]]:
        """Begin to fetch missing blocks; returns a future for each of them."""
        mine, theirs = self._flights.board(self._entry.object_id, blocks)
        runs = coalesce(mine, RUN_BLOCKS)
        for number, run in enumerate(runs):
            try:
                # A descriptor of its own: the reader may be closed before the fetch ends, and opening the name again
                # could make a new file where this one was removed.
                descriptor = os.dup(self._descriptor)
                self._executor.submit(self._fetch_run, run, descriptor)
            except (OSError, RuntimeError) as error:  # closed, out of descriptors, or the interpreter is shutting down
                for rest in runs[number:]:
                    self._flights.fail(self._entry.object_id, rest, error)
                break
        return {**mine, **theirs}

    def prefetch(self, blocks: range) -> None:
        """Begin to fetch those of `blocks` that are not here, without waiting. Errors surface when they are read."""
        missing = self._store.missing(self._entry, blocks)
        held = self._held.get(self._entry.object_id, missing)
        if len(held) < len(missing):
            self.start_fetch([block for block in missing if block not in held])

    # --- one run of blocks, in a thread of the pool -----------------------------------------------

    def _fetch_run(self, run: range, descriptor: int) -> None:
        try:
            self._fetch_pending(set(run), descriptor)
        except BaseException as error:  # noqa: BLE001 - whoever waits for these blocks must hear of it
            self._flights.fail(self._entry.object_id, run, error)
        finally:
            os.close(descriptor)

    def _fetch_pending(self, pending: set[int], descriptor: int) -> None:
        """Fetch or await every block of `pending`, whichever process gets to it first."""
        object_id = self._entry.object_id
        pause, longest = _POLL_SECONDS
        deadline = time.monotonic() + PATIENCE_SECONDS
        while pending:
            overdue = time.monotonic() > deadline
            locked = [block for block in sorted(pending) if self._locks.try_acquire((object_id, block))]
            try:
                # Another process may have finished a block between the caller's look and the lock.
                landed = {block for block in pending if self._land_stored(block, descriptor)}
                for part in coalesce(set(pending if overdue else locked) - landed, RUN_BLOCKS):
                    self._fetch_part(part, descriptor)
                    landed.update(part)
            finally:
                for block in locked:
                    self._locks.release((object_id, block))
            pending -= landed
            if pending:
                time.sleep(pause)
                pause = min(pause * 2, longest)

    def _land_stored(self, block: int, descriptor: int) -> bool:
        data = self._store.read_block(self._entry, descriptor, block)
        if data is None:
            return False
        self._counters.add("cache_bytes", len(data))
        self._flights.land(self._entry.object_id, block, data)
        return True

    def _fetch_part(self, part: range, descriptor: int) -> None:
        """One request to the origin; its blocks are stored, then given to whoever waits."""
        entry = self._entry
        start, stop = span_of(part.start, part.stop, entry.size, entry.block_bytes)
        data = memoryview(self._origin.read(self._info.key, start, stop, version=self._info.version)).cast("B")
        self._counters.add("origin_requests")
        self._counters.add("origin_bytes", stop - start)
        keep = self._store.has_room(stop - start)
        if not keep:
            self._on_full()
        for block in part:
            block_start, block_stop = span_of(block, block + 1, entry.size, entry.block_bytes)
            piece = data[block_start - start : block_stop - start]
            if keep:
                keep = self._try_store(descriptor, block, piece)
            if not keep:
                self._counters.add("uncached_bytes", len(piece))
                self._held.put((entry.object_id, block), piece)
            self._flights.land(entry.object_id, block, piece)

    def _try_store(self, descriptor: int, block: int, piece: Buffer) -> bool:
        """Store a block; a disk that will not take it costs the copy, not the read."""
        try:
            return self._store.write_block(self._entry, descriptor, block, piece)
        except StorageError as error:
            emit(Event(name="cache.disk.failed", subject=self._store.path(self._entry), detail=str(error)))
            return False

    # --- bytes ------------------------------------------------------------------------------------

    def _overlap(self, block: int, start: int, stop: int) -> int:
        block_start = block * self._entry.block_bytes
        return min(block_start + self._entry.block_bytes, stop) - max(block_start, start)

    def _cut(self, data: Buffer, block: int, start: int, stop: int) -> memoryview:
        """The part of a block's bytes that lies in `[start, stop)`."""
        base = block * self._entry.block_bytes
        return memoryview(data)[max(0, start - base) : stop - base]

    def _pread(self, start: int, stop: int) -> Buffer:
        data = os.pread(self._descriptor, stop - start, start)
        if len(data) == stop - start:
            return data
        # Shorter than it was made: somebody truncated the file. The blocks concerned fail their checksum below.
        return b"".join(
            bytes(self._cut(self._stored_block(block), block, start, stop))
            for block in blocks_of(start, stop, self._entry.block_bytes)
        )

    def _stored_block(self, block: int) -> Buffer:
        """A block from this disk, verified; a wrong one is fetched again."""
        data = self._store.read_block(self._entry, self._descriptor, block)
        if data is not None:
            return data
        self._counters.add("corrupt_blocks")
        return self.fetch([block])[block]
