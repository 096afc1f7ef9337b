"""Reads one object version: cached blocks from this disk, missing blocks from its source. Each block is fetched once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import Buffer

from millrace.cache.counters import Counters
from millrace.cache.disk import HELD_BYTES, Disk
from millrace.cache.eviction.copies import Keep
from millrace.cache.eviction.evictor import Candidate
from millrace.cache.eviction.usage import CHECKPOINT_FILES, FindGroup, Read
from millrace.cache.footers import MOST_TAIL_BYTES
from millrace.cache.reading.fetching import Fetched, Fetcher, Source, cached_counter, log_wait
from millrace.cache.reading.locations import FileLocation, Location, SegmentLocation
from millrace.cache.reading.pages import PageFetcher, without
from millrace.cache.reading.threads import Threads
from millrace.errors import StorageError, shown_key
from millrace.events import fetch_id
from millrace.origin import ObjectInfo
from millrace.runtime import forks
from millrace.runtime.locks import in_fetch, new_fetch_id
from millrace.store.records import BLOCK_BYTES, RUN_BLOCKS, Entry, ReadAhead, blocks_of, span_of

_log = logging.getLogger("millrace.cache")

_NO_READS = ReadAhead()


class OriginReader:
    """Reads from its source and stores nothing: for nodes whose disk cannot be used. Methods as of `CachedReader`."""

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
        return read_through(self._source, start, stop, self._counters).data

    def is_fetched_by_peer(self, start: int, stop: int) -> bool:
        """Whether another node fetches, and stores, the blocks at the beginning and the end of a range."""
        return self._source.fetches_through_peer(start) and self._source.fetches_through_peer(max(start, stop - 1))

    def cached(self, start: int, stop: int) -> Buffer | None:
        return None

    def prefetch(self, blocks: range) -> None:
        """Nothing: blocks cannot be stored."""

    def prefetch_ranges(self, spans: Sequence[tuple[int, int]], *, wait: bool = False) -> None:
        """Nothing: blocks cannot be stored."""

    def close(self) -> None:
        """Nothing to release."""


def read_through(source: Source, start: int, stop: int, counters: Counters | None) -> Fetched:
    """Read a range without storing it. Counts the bytes if `counters` is given."""
    found = in_fetch(fetch_id.get() or new_fetch_id(), lambda: source.read(start, stop))
    if counters is not None:
        counters.add("uncached_bytes", stop - start)
    return found


class CachedReader:
    """Random access to one pinned version of one object: reads cached blocks from the disk, fetches missing blocks and
    stores them. Thread-safe. Close it to release its descriptor.

    Reads return the bytes of that version or raise: `ObjectChangedError` when a block is not cached and the origin has
    another version by now, `OriginUnavailableError` when a block is not cached and the origin does not respond.

    After a fork, or when the object was removed from the store, it continues with a reader that `reopen` returns: an
    inherited reader has no threads, and blocks of a removed object cannot be stored. `group` is called when a block is
    about to be stored. `verify` reads from the disk with a checksum on every read. `for_peers`: the reads serve other nodes,
    which count them; they fetch missing pages only.
    """

    def __init__(
        self,
        *,
        source: Source,
        info: ObjectInfo,
        location: Location,
        disk: Disk,
        threads: Threads,
        verify: bool,
        group: FindGroup,
        reopen: Callable[[], ObjectReader],
        for_peers: bool = False,
    ) -> None:
        self._source = source
        self._info = info
        self._location = location
        self._disk = disk
        self._verify = verify
        self._group = group
        self._reopen = reopen
        self._for_peers = for_peers
        self._owner = forks.Owner()
        self._reopened: ObjectReader | None = None
        self._whole: Buffer | None = None if info.size else b""
        """All bytes of a small object that was read: they stay readable when the object is evicted."""
        self._closed = False
        self._block_bytes = location.entry.block_bytes if isinstance(location, FileLocation) else BLOCK_BYTES
        self._threads = threads
        self._fetcher_made: Fetcher | None = None
        self._reads = _NO_READS

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return self._info.size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._block_bytes

    @property
    def directory(self) -> Path:
        """The store that the blocks are stored in."""
        return self._disk.store.directory

    def has_room(self, nbytes: int) -> bool:
        """Whether the disk would probably keep `nbytes` more."""
        try:
            wanted = self._disk.evictor.is_wanted(self._location.entry.object_id)
            return wanted or self._disk.store.space.has_room(nbytes)
        except StorageError as error:
            self._location.report(error)
            return False

    def missing(self, blocks: Sequence[int]) -> list[int]:
        """The members of `blocks` that are not cached; all of them when the disk fails."""
        try:
            return self._location.missing(blocks)
        except StorageError as error:
            self._location.report(error)
            return list(blocks)

    def cached(self, start: int, stop: int) -> Buffer | None:
        """The bytes `[start, stop)` if all of them are cached on this node's disk; otherwise None."""
        return None if self._closed or self._is_stale or self.gaps(start, stop) else self.read(start, stop)

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The byte ranges to fetch so that `[start, stop)` is cached, ascending; the whole range when the disk fails."""
        try:
            if isinstance(self._location, FileLocation):
                return self._location.gaps(start, stop)
            return [(0, self.size)] if self._location.missing([0]) else []
        except StorageError as error:
            self._location.report(error)
            return [(start, stop)]

    def is_sound(self, block: int) -> bool:
        """Whether a block is cached and its bytes, read from the disk now, are correct. A damaged block is removed."""
        try:
            return self._location.read_block(block) is not None
        except StorageError as error:
            self._location.report(error)
            return False

    def close(self) -> None:
        """Release the descriptor. Idempotent; fetches in flight have one of their own."""
        self._closed = True
        self._whole = None
        self._location.close()
        if self._reopened is not None:
            self._reopened.close()

    def read(self, start: int, stop: int) -> Buffer:
        """The bytes `[start, stop)`, cut at the end of the object."""
        if self._closed:
            raise ValueError(f"the reader of {self._info.key} is closed")
        if self._is_stale and self._whole is None:
            return self._reopen_once().read(start, stop)
        start, stop = max(0, start), min(stop, self._info.size)
        if stop <= start:
            return b""
        location = self._location
        if isinstance(location, SegmentLocation):
            return self._read_small(location, start, stop)
        return self._read_blocks(location, start, stop)

    def fetch(self, blocks: Sequence[int]) -> dict[int, Buffer]:
        """Fetch missing blocks and return their bytes; waits for those that are already in flight."""
        if not blocks:
            return {}
        fetcher = self._fetcher
        held = self._disk.held.get(fetcher.entry.object_id, blocks)
        if isinstance(self._location, SegmentLocation):
            return held or {0: fetcher.fetch_here()}
        began = time.perf_counter()
        found, wanted = held, [block for block in blocks if block not in held]
        while wanted:
            flights = fetcher.start(wanted, waited_for=True)
            for flight in flights.values():
                flight.wait()
            log_wait(self._info.key, flights.values(), began)
            found.update(
                (block, data) for block, flight in flights.items() if memoryview(data := flight.result()).nbytes
            )
            wanted = [block for block in wanted if block not in found]  # of these only pages were in flight
        return found

    def release_held(self, blocks: Sequence[int]) -> None:
        """Drop blocks that were not stored and are held in memory. The next fetch stores them if there is space by then."""
        self._disk.held.drop(self._location.entry.object_id, blocks)

    def prefetch(self, blocks: range) -> None:
        """Start to fetch missing blocks without waiting. A later read of these blocks raises their errors."""
        if self._closed or not blocks or self._whole is not None:
            return
        if self._is_stale:
            self._reopen_once().prefetch(blocks)
            return
        if not self.has_room(len(blocks) * self._block_bytes):
            # Prefetched blocks must fit into memory until they are read, next to those of the other readers.
            readers = max(1, len(FileLocation.open_descriptors))
            blocks = blocks[: HELD_BYTES // (2 * self._block_bytes * readers)]
        missing = self.missing(blocks)
        held = self._disk.held.get(self._fetcher.entry.object_id, missing)
        if len(held) < len(missing):
            self._fetcher.start([block for block in missing if block not in held], waited_for=False)

    def prefetch_ranges(self, spans: Sequence[tuple[int, int]], *, wait: bool = False) -> None:
        """Start to fetch the missing parts of ascending byte ranges, and little around them.

        With `wait` they are cached when this returns, and it raises the errors of `read`; otherwise a later read does.
        Ranges that find no space are not fetched; nor a small object with `wait`.
        """
        if self._closed or self._whole is not None:
            return
        if self._is_stale:
            self._reopen_once().prefetch_ranges(spans, wait=wait)
        elif isinstance(self._location, SegmentLocation):
            if not wait:  # else the read itself fetches the object, in one request
                self.prefetch(range(1))
        else:
            missing = [span for span in spans if self.gaps(*span)]
            if missing and self.has_room(sum(stop - start for start, stop in missing)):
                fetcher = PageFetcher(self._fetcher)
                if wait:
                    fetcher.load(fetcher.joined(missing), self._location)
                else:
                    fetcher.start(missing, self._location)

    @property
    def _fetcher(self) -> Fetcher:
        """Made at the first fetch: most readers of small objects read cached bytes only."""
        if self._fetcher_made is None:
            self._fetcher_made = Fetcher(
                source=self._source,
                key=self._info.key,
                location=self._location,
                disk=self._disk,
                threads=self._threads,
                group=self._group,
                for_peers=self._for_peers,
            )
        return self._fetcher_made

    @property
    def _is_stale(self) -> bool:
        """Whether the object was removed from the store, or this process is a fork of the one that made this reader."""
        return self._location.removed or not self._owner.is_this_process

    def _reopen_once(self) -> ObjectReader:
        """The same object version, opened again; again when it was removed since.

        Another thread may use the reader that is replaced, which is closed by its last user.
        """
        reopened = self._reopened
        if reopened is None or (isinstance(reopened, CachedReader) and reopened._is_stale):
            reopened = self._reopened = self._reopen()
        return reopened

    def _count_cached(self, entry: Entry, nbytes: int) -> None:
        """Count bytes that were read from this disk."""
        self._disk.counters.add(cached_counter(for_peers=self._for_peers), nbytes)
        self._disk.usage.note(Read(entry, nbytes, hit=True, kept=True, group=self._group, served=self._for_peers))

    def _measure_disk_read(self, start: int, stop: int, began: float) -> None:
        if self._for_peers:
            return
        seconds = time.perf_counter() - began
        self._disk.counters.observe("disk_seconds", seconds)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s: bytes %d to %d from disk in %.6f s", shown_key(self._info.key), start, stop, seconds)

    # --- small objects ----------------------------------------------------------------------------

    def _read_small(self, location: SegmentLocation, start: int, stop: int) -> Buffer:
        whole = self._whole
        if whole is None:
            began = time.perf_counter()
            whole = self._stored_whole(location)
            if whole is not None:
                self._measure_disk_read(0, self._info.size, began)
            else:
                whole = self.fetch((0,))[0]
            self._whole = whole
        return (
            whole if stop - start == self._info.size else _without_waste(memoryview(whole)[start:stop], self._info.size)
        )

    def _stored_whole(self, location: SegmentLocation) -> Buffer | None:
        """All bytes of a small object from this disk; None when it is not cached or cannot be read."""
        try:
            found = location.read_whole(verify=self._verify)
        except StorageError as error:
            location.report(error)
            return None
        if found is None:
            return None
        entry, data = found
        self._count_cached(entry, entry.size)
        return data

    # --- objects of many blocks -------------------------------------------------------------------

    def _read_blocks(self, location: FileLocation, start: int, stop: int) -> Buffer:
        """Read a range of an object that has a data file. Scans, and reads from the beginning, fetch the missing blocks.

        Other reads fetch only the missing pages. If nothing can be stored, such a read requests only its own range.
        """
        began = time.perf_counter()
        entry = location.entry
        blocks = blocks_of(start, stop, entry.block_bytes)
        missing = self.missing(blocks)
        may_have_tail = missing and start >= entry.size - MOST_TAIL_BYTES
        tail = self._disk.footers.read(entry.object_id, start, stop) if may_have_tail else None
        if tail is not None:
            self._disk.counters.add(cached_counter(for_peers=self._for_peers), stop - start)
            self._measure_disk_read(start, stop, began)
            return tail
        reads = self._reads = self._reads.after(start, stop)
        by_pages, gaps = False, list[tuple[int, int]]()
        if missing and not self._disk.held.get(entry.object_id, missing):
            gaps = self.gaps(start, stop)
            by_pages = not gaps or not (reads.scans or start == 0) or self._for_peers
        if missing and (gaps or not by_pages) and self._better_read_alone(start, stop, missing, reads):
            spans = gaps if by_pages else self._spans(missing)
            if not self._can_store(spans):
                wanted = read_through(self._source, start, stop, self._disk.counters)
                # The policy counts the bytes that would have been stored; else it would never admit them.
                nbytes = sum(stop - start for start, stop in spans)
                peer_bytes = nbytes if wanted.peer_bytes else 0
                self._disk.missed(entry, nbytes, self._group, peer_bytes=peer_bytes, served=self._for_peers)
                self._keep_footer(start, stop, wanted.data)
                return wanted.data
        if by_pages:
            return self._read_pages(location, start, stop, set(missing), began)
        fetched = self.fetch(missing)
        if blocks[-1] in fetched:
            self._keep_footer(blocks[-1] * entry.block_bytes, stop, fetched[blocks[-1]])
        cached = stop - start - sum(self._overlap(block, start, stop) for block in fetched)
        if cached:
            self._count_cached(entry, cached)
        if not fetched and location.are_verified(blocks) and not self._verify:
            verified = self._read_verified(location, start, stop)
            self._measure_disk_read(start, stop, began)
            return verified
        if len(blocks) == 1 and fetched:
            return _without_waste(self._cut(fetched[blocks[0]], blocks[0], start, stop), entry.block_bytes)
        result = bytearray(stop - start)
        for block in blocks:
            data = fetched.get(block)
            if data is None:
                data = self._stored_block(block)
            piece = self._cut(data, block, start, stop)
            offset = max(block * entry.block_bytes, start) - start
            result[offset : offset + len(piece)] = piece
        if not fetched:
            self._measure_disk_read(start, stop, began)
        return result

    def _keep_footer(self, start: int, stop: int, data: Buffer) -> None:
        """After a read of the object's end that was not stored: keep its Parquet footer, if it has one."""
        entry = self._location.entry
        if stop == entry.size and self.gaps(start, stop):
            self._disk.footers.put(entry.object_id, start, data)

    def _better_read_alone(self, start: int, stop: int, missing: Sequence[int], reads: ReadAhead) -> bool:
        """Whether to read only the requested range when nothing can be stored.

        True when none of its blocks is cached, held or in flight, and a read of its surroundings is not likely.
        """
        entry = self._location.entry
        blocks = blocks_of(start, stop, entry.block_bytes)
        in_flight = any((entry.object_id, block) in self._disk.flights for block in blocks)
        if len(missing) < len(blocks) or in_flight or self._disk.held.get(entry.object_id, blocks):
            return False
        # One block for each reader would not fit into memory.
        crowded = len(FileLocation.open_descriptors) * entry.block_bytes > HELD_BYTES // 2
        # A read that starts at the beginning usually continues. A range of several requests is faster block by block.
        scans = reads.scans or start == 0 or stop - start > RUN_BLOCKS * entry.block_bytes
        return crowded or not scans

    def _read_pages(self, location: FileLocation, start: int, stop: int, missing: set[int], began: float) -> Buffer:
        """Read a range of which the blocks `missing` are not complete. Fetches only its missing pages."""
        fetcher = self._fetcher
        pieces = PageFetcher(fetcher).load([(start, stop)], location)
        for begin, data in pieces.items():
            if begin <= start and stop <= begin + memoryview(data).nbytes:
                piece = memoryview(data).cast("B")[start - begin : stop - begin]
                self._keep_footer(start, stop, piece)
                return _without_waste(piece, memoryview(data).nbytes)
        result = bytearray(stop - start)
        for begin, data in pieces.items():
            piece = memoryview(data).cast("B")[max(0, start - begin) : stop - begin]
            result[max(0, begin - start) : max(0, begin - start) + len(piece)] = piece
        cached = without((start, stop), pieces)
        for first, end in cached:
            for block in blocks_of(first, end, self._block_bytes):
                low, high = max(first, block * self._block_bytes), min(end, (block + 1) * self._block_bytes)
                part: Buffer | None = None
                if block in missing:
                    part = fetcher.cached_pages(location, low, high, verify=self._verify)
                elif location.are_verified([block]) and not self._verify:
                    part = self._read_verified(location, low, high)
                if part is None:  # a complete block, or a damaged page
                    part = self._cut(self._stored_block(block), block, low, high)
                result[low - start : high - start] = memoryview(part).cast("B")
        nbytes = sum(end - first for first, end in cached)
        if nbytes:
            self._count_cached(location.entry, nbytes)
        if nbytes == stop - start:
            self._measure_disk_read(start, stop, began)
        return result

    def _can_store(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether these byte ranges would be stored; evicts for them where the policy allows it."""
        entry = self._location.entry
        # A block that another node fetches for this one is owned by that node, and a copy on this one.
        how = Keep.COPY if self._source.fetches_through_peer(spans[0][0]) else Keep.OWNED
        if self._info.key.endswith(CHECKPOINT_FILES):
            how = Keep.CHECKPOINT
        candidate = Candidate(entry.object_id, entry.size, lambda: entry.name, self._group, how)
        with self._disk.reserved(sum(stop - start for start, stop in spans), candidate) as room:
            return bool(room)

    def _spans(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """The byte range of each block."""
        entry = self._location.entry
        return [span_of(block, block + 1, entry.size, entry.block_bytes) for block in blocks]

    def _overlap(self, block: int, start: int, stop: int) -> int:
        """How many bytes of a block are in `[start, stop)`."""
        block_start = block * self._block_bytes
        return min(block_start + self._block_bytes, stop) - max(block_start, start)

    def _cut(self, data: Buffer, block: int, start: int, stop: int) -> memoryview:
        """The part of a block's bytes in `[start, stop)`."""
        base = block * self._block_bytes
        return memoryview(data)[max(0, start - base) : stop - base]

    def _read_verified(self, location: FileLocation, start: int, stop: int) -> Buffer:
        try:
            data = location.read_range(start, stop)
        except StorageError as error:
            location.report(error)
            data = b""
        if len(data) == stop - start:
            return data
        # The file is unreadable, or shorter than when it was opened. The missing blocks are fetched again.
        return b"".join(
            bytes(self._cut(self._stored_block(block), block, start, stop))
            for block in blocks_of(start, stop, self._block_bytes)
        )

    def _stored_block(self, block: int) -> Buffer:
        """A block from this disk, verified; a damaged or unreadable one is fetched again."""
        try:
            data = self._location.read_block(block)
        except StorageError as error:
            self._location.report(error)
            ((start, stop),) = self._spans([block])
            return read_through(self._source, start, stop, self._disk.counters).data
        return self.fetch([block])[block] if data is None else data


ObjectReader = CachedReader | OriginReader


def _without_waste(piece: memoryview, whole_bytes: int) -> Buffer:
    """A small part of a larger buffer as a copy: as a view it would keep the whole buffer in memory."""
    return bytes(piece) if len(piece) < whole_bytes // 4 else piece


# --- ranges as in a slice -------------------------------------------------------------------------------

Range = tuple[int | None, int | None]
"""Start and stop as in a slice: None for the ends, negative from the end."""


def _position(value: int | None, size: int, *, default: int) -> int:
    """One end of a `Range` in an object of `size` bytes."""
    if value is None:
        return default
    return max(0, size + value) if value < 0 else min(value, size)


def bounds(wanted: Range, size: int) -> tuple[int, int]:
    """The bytes `[start, stop)` of a `Range` in an object of `size` bytes."""
    start = _position(wanted[0], size, default=0)
    return start, max(start, _position(wanted[1], size, default=size))


def read_ranges(reader: ObjectReader, ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range of one object. Missing blocks are fetched at once."""
    spans = [bounds(wanted, reader.size) for wanted in ranges]
    if len(spans) > 1:
        reader.prefetch_ranges(sorted(span for span in spans if span[0] < span[1]), wait=True)
    return [bytes(reader.read(start, stop)) for start, stop in spans]
