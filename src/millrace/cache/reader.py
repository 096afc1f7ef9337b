"""Reads one object version: what is on this disk from there, the rest from its source, each block fetched once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Protocol

from typing_extensions import Buffer

from millrace.cache.blocks import BLOCK_BYTES, RUN_BLOCKS, ReadAhead, blocks_of, span_of
from millrace.cache.counters import Counters
from millrace.cache.disk import Disk
from millrace.cache.evictor import Newcomer
from millrace.cache.failures import disk_errors
from millrace.cache.fetching import Fetcher
from millrace.cache.held import HELD_BYTES
from millrace.cache.records import Entry
from millrace.cache.sealing import seal_holds
from millrace.cache.source import Keep, Source
from millrace.cache.threads import Threads
from millrace.cache.usage import FindGroup
from millrace.errors import StorageError
from millrace.origin import ObjectInfo


class ObjectReader(Protocol):
    """Random access to one pinned version of one object. Thread-safe. Close it to give its descriptor back.

    Reads return the bytes of that version or raise: `ObjectChangedError` when a block is missing here and the origin has
    another version by now, `OriginUnavailableError` when a block is missing here and the origin does not answer.
    """

    @property
    def size(self) -> int:
        """Bytes of the object."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    def read(self, start: int, stop: int) -> Buffer:
        """The bytes `[start, stop)`, cut at the end of the object."""
        ...

    def prefetch(self, blocks: range) -> None:
        """Begin to fetch those of `blocks` that are not here, without waiting. Errors surface when they are read."""
        ...

    def close(self) -> None:
        """Give the descriptor back. Idempotent; fetches under way keep one of their own."""
        ...


class OriginReader:
    """An `ObjectReader` that keeps nothing: for when the disk cannot be used."""

    def __init__(self, *, source: Source, info: ObjectInfo, counters: Counters | None) -> None:
        self._source = source
        self._info = info
        self._counters = counters

    @property
    def size(self) -> int:
        return self._info.size

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES

    def read(self, start: int, stop: int) -> Buffer:
        start, stop = max(0, start), min(stop, self._info.size)
        if stop <= start:
            return b""
        return read_through(self._source, start, stop, self._counters)

    def prefetch(self, blocks: range) -> None:
        """Nothing: there is no place to put it."""

    def close(self) -> None:
        """Nothing to give back."""


def read_through(source: Source, start: int, stop: int, counters: Counters | None) -> Buffer:
    """Read a range without keeping it, and count that where there is a place for it."""
    data = source.read(start, stop).data
    if counters is not None:
        counters.add("uncached_bytes", stop - start)
    return data


class BlockReader:
    """The usual `ObjectReader`: over the blocks of a store."""

    _open_readers = 0

    def __init__(
        self,
        *,
        source: Source,
        info: ObjectInfo,
        entry: Entry,
        disk: Disk,
        threads: Threads,
        verify: bool,
        group: FindGroup,
        reopen: Callable[[], ObjectReader],
    ) -> None:
        self._descriptor = -1
        self._source = source
        self._info = info
        self._entry = entry
        self._disk = disk
        self._store = disk.store
        self._verify = verify
        self._group = group
        self._reopen = reopen
        self._pid = os.getpid()
        self._heir: ObjectReader | None = None
        self._descriptor = disk.store.open_data(entry)
        BlockReader._open_readers += 1
        self._verified = disk.verified.of(entry.generation)
        self._believed = self._seal_holds()
        self._fetcher = Fetcher(
            source=source,
            key=info.key,
            entry=self._entry,
            disk=disk,
            threads=threads,
            verified=self._verified,
            group=group,
        )
        self._reads = ReadAhead()

    @property
    def size(self) -> int:
        return self._entry.size

    @property
    def block_bytes(self) -> int:
        return self._entry.block_bytes

    @property
    def directory(self) -> Path:
        """The store that the blocks go to."""
        return self._store.directory

    def has_room(self, nbytes: int) -> bool:
        """Whether the disk would keep `nbytes` more, as far as can be told before."""
        try:
            return self._store.has_room(nbytes)
        except StorageError as error:
            self._report(error)
            return False

    def missing(self, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that are not here; all of them when the disk cannot tell."""
        return self._missing(blocks)

    def is_sound(self, block: int) -> bool:
        """Whether a block is here and its bytes, read from the disk now, are right. A wrong one is forgotten and counted."""
        try:
            return self._store.read_block(self._entry, self._descriptor, block) is not None
        except StorageError as error:
            self._report(error)
            return False

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            BlockReader._open_readers -= 1
            os.close(descriptor)
        if self._heir is not None:
            self._heir.close()

    def __del__(self) -> None:
        self.close()

    def read(self, start: int, stop: int) -> Buffer:
        if self._fetcher.removed or self._pid != os.getpid():
            return self._anew().read(start, stop)
        if self._descriptor < 0:
            raise ValueError(f"the reader of {self._info.key} is closed")
        start, stop = max(0, start), min(stop, self._entry.size)
        if stop <= start:
            return b""
        blocks = blocks_of(start, stop, self._entry.block_bytes)
        missing = self._missing(blocks)
        tail = self._disk.footers.read(self._entry.object_id, start, stop) if missing else None
        if tail is not None:
            self._disk.counters.add("cache_bytes", stop - start)
            return tail
        reads = self._reads = self._reads.after(start, stop)
        if missing and self._better_read_alone(start, stop, missing, reads) and not self._finds_room(missing):
            wanted = read_through(self._source, start, stop, self._disk.counters)
            # To the policy these are the blocks that would have been kept, or it would never hear enough to let them in.
            self._disk.missed(self._entry, sum(stop - start for start, stop in self._spans(missing)), self._group)
            self._offer_tail(start, stop, wanted)
            return wanted
        fetched = self.fetch(missing)
        if blocks[-1] in fetched:
            self._offer_tail(blocks[-1] * self._entry.block_bytes, stop, fetched[blocks[-1]])
        kept = stop - start - sum(self._overlap(block, start, stop) for block in fetched)
        if kept:
            self._disk.counters.add("cache_bytes", kept)
            self._disk.usage.hit(self._entry, kept, self._group)
        if not fetched and (self._believed or self._verified.issuperset(blocks)) and not self._verify:
            return self._pread(start, stop)
        if len(blocks) == 1 and fetched:
            return _without_waste(self._cut(fetched[blocks[0]], blocks[0], start, stop), self._entry.block_bytes)
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
        held = self._disk.held.get(self._entry.object_id, blocks)
        wanted = [block for block in blocks if block not in held]
        waiting = self._fetcher.start(wanted, self._descriptor, waited_for=True)
        wait(waiting.values())
        return {**held, **{block: future.result() for block, future in waiting.items()}}

    def let_go(self, blocks: Sequence[int]) -> None:
        """Forget what of `blocks` was not kept and is held in memory: a fetch then keeps them, where there is room now."""
        self._disk.held.drop(self._entry.object_id, blocks)

    def prefetch(self, blocks: range) -> None:
        if self._fetcher.removed or self._pid != os.getpid():
            self._anew().prefetch(blocks)
            return
        if self._descriptor < 0 or not blocks:
            return
        if not self.has_room(len(blocks) * self._entry.block_bytes):
            # What is fetched ahead must fit into memory until it is read, beside that of the other readers.
            blocks = blocks[: HELD_BYTES // (2 * self._entry.block_bytes * max(1, BlockReader._open_readers))]
        missing = self._missing(blocks)
        held = self._disk.held.get(self._entry.object_id, missing)
        if len(held) < len(missing):
            wanted = [block for block in missing if block not in held]
            self._fetcher.start(wanted, self._descriptor, waited_for=False)

    # --- inside -----------------------------------------------------------------------------------

    def _anew(self) -> ObjectReader:
        """The same version opened anew: a reader that was inherited by a fork has no threads to fetch with, and where the
        object was removed from the store, nothing that is fetched can be kept any more.
        """
        if self._heir is None:
            self._heir = self._reopen()
        return self._heir

    def _seal_holds(self) -> bool:
        """Whether the file as a whole was verified and not touched since; then no block has to be looked at."""
        entry = self._entry
        if not entry.sealed:
            return False
        if seal_holds(entry, os.fstat(self._descriptor)):
            return True
        self._entry = self._disk.sealer.break_seal(entry)
        return False

    def _offer_tail(self, start: int, stop: int, data: Buffer) -> None:
        """After a read of the object's end, which was not kept: have its footer kept, if it has one."""
        last = (self._entry.size - 1) // self._entry.block_bytes
        if stop == self._entry.size and self._missing([last]):
            self._disk.footers.put(self._entry.object_id, start, data)

    def _better_read_alone(self, start: int, stop: int, missing: Sequence[int], reads: ReadAhead) -> bool:
        """Whether to read just what is asked for, where nothing can be kept: none of its blocks is here, held or on its
        way, and what lies around it is not likely to be asked for next.
        """
        name, blocks = self._entry.object_id, blocks_of(start, stop, self._entry.block_bytes)
        if len(missing) < len(blocks) or self._disk.held.get(name, blocks):
            return False
        if any((name, block) in self._disk.flights for block in blocks):
            return False
        crowded = BlockReader._open_readers * self._entry.block_bytes > HELD_BYTES // 2  # a block of each would not fit
        # Who begins at the beginning goes on, as a rule. What needs several requests comes faster block by block.
        scans = reads.scans or start == 0 or stop - start > RUN_BLOCKS * self._entry.block_bytes
        return crowded or not scans

    def _finds_room(self, missing: Sequence[int]) -> bool:
        """Whether these blocks would be kept; makes room for them where the policy agrees."""
        spans = self._spans(missing)
        # What another node fetches for this one is its own, and here a copy.
        how = Keep.COPY if self._source.asks_to_fetch(spans[0][0]) else Keep.OWNED
        newcomer = Newcomer(self._entry.object_id, self._entry.size, lambda: self._entry.name, self._group, how)
        with self._disk.reserved(sum(stop - start for start, stop in spans), newcomer) as room:
            return bool(room)

    def _spans(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """The byte range of each block."""
        return [span_of(block, block + 1, self._entry.size, self._entry.block_bytes) for block in blocks]

    def _missing(self, blocks: Sequence[int]) -> list[int]:
        try:
            return self._store.missing(self._entry, blocks)
        except StorageError as error:
            self._report(error)
            return list(blocks)

    def _report(self, error: StorageError) -> None:
        self._disk.report(error, self._store.path(self._entry))

    # --- bytes ------------------------------------------------------------------------------------

    def _overlap(self, block: int, start: int, stop: int) -> int:
        block_start = block * self._entry.block_bytes
        return min(block_start + self._entry.block_bytes, stop) - max(block_start, start)

    def _cut(self, data: Buffer, block: int, start: int, stop: int) -> memoryview:
        """The part of a block's bytes that lies in `[start, stop)`."""
        base = block * self._entry.block_bytes
        return memoryview(data)[max(0, start - base) : stop - base]

    def _pread(self, start: int, stop: int) -> Buffer:
        try:
            with disk_errors(self._store.path(self._entry)):
                data = os.pread(self._descriptor, stop - start, start)
        except StorageError as error:
            self._report(error)
            data = b""
        if len(data) == stop - start:
            return data
        # Unreadable, or shorter than it was made: somebody cut the file. The blocks concerned are fetched again.
        return b"".join(
            bytes(self._cut(self._stored_block(block), block, start, stop))
            for block in blocks_of(start, stop, self._entry.block_bytes)
        )

    def _stored_block(self, block: int) -> Buffer:
        """A block from this disk, verified; a wrong or unreadable one is fetched again."""
        try:
            data = self._store.read_block(self._entry, self._descriptor, block)
        except StorageError as error:
            self._report(error)
            start, stop = span_of(block, block + 1, self._entry.size, self._entry.block_bytes)
            return read_through(self._source, start, stop, self._disk.counters)
        if data is not None:
            self._verified.add(block)
            return data
        self._verified.discard(block)
        return self.fetch([block])[block]


def _without_waste(piece: memoryview, block_bytes: int) -> Buffer:
    """A small piece of a block as a copy: as a view it would keep the whole of what was fetched in memory."""
    return bytes(piece) if len(piece) < block_bytes // 4 else piece
