"""Fetches missing blocks of one object version: in runs of neighbours, each block once for all threads and processes.

A `Source` has the blocks that are not on this disk: the origin, or in a cluster the peers and then the origin. A single
node has the origin only (`DirectSource`). In a cluster, `millrace.cluster` provides its own `Source`. No other module of the
cache depends on the cluster.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple, Protocol

from typing_extensions import Buffer

from millrace.cache.counters import Counters
from millrace.cache.disk import Disk, Room
from millrace.cache.eviction.copies import Keep
from millrace.cache.eviction.evictor import Candidate
from millrace.cache.eviction.usage import CHECKPOINT_FILES, FindGroup
from millrace.cache.reading.locations import FileLocation, Location
from millrace.cache.reading.threads import Threads
from millrace.errors import OriginUnavailableError, StorageError, shown_key
from millrace.events import Event, emit, fetch_id
from millrace.origin import ObjectInfo, Origin
from millrace.runtime.locks import Flight, LockWait, in_fetch, lock_number, new_fetch_id
from millrace.store.records import RUN_BLOCKS, blocks_of, coalesce, span_of

_log = logging.getLogger("millrace.cache")

_ONE_BLOCK = range(1)
_THROUGH_PEER = 1 << 40  # beyond any block


class _FetchedHere(threading.local):
    nbytes = 0


fetched_here = _FetchedHere()
"""How many bytes this thread has fetched so far. What it waited for, another thread or process has fetched."""


class Fetched(NamedTuple):
    """The requested bytes, how they may be kept, and how many of them came from peers (the others: from the origin)."""

    data: Buffer
    keep: Keep
    peer_bytes: int = 0


class Source(Protocol):
    """Reads any range of one pinned version of one object. Thread-safe; updates the counters."""

    def read(self, start: int, stop: int) -> Fetched:
        """The bytes `[start, stop)`, a range inside the object. Raises the errors of `Readable.read`."""
        ...

    def fetches_through_peer(self, start: int) -> bool:
        """Whether another node is requested to fetch the bytes at `start`, which may take long; see `Fetcher.lock_key`."""
        ...


class DirectSource:
    """The `Source` of a node without a cluster: every byte comes from the origin."""

    def __init__(self, origin: Origin, info: ObjectInfo, counters: Counters | None) -> None:
        self._origin = origin
        self._info = info
        self._counters = counters

    def read(self, start: int, stop: int) -> Fetched:
        began = time.perf_counter()
        data = self._origin.read(self._info.key, start, stop, version=self._info.version)
        seconds = time.perf_counter() - began
        log_fetch(self._info.key, start, stop, "the origin", seconds)
        if self._counters is not None:
            self._counters.observe("origin_seconds", seconds)
            self._counters.add("origin_requests")
            self._counters.add("origin_bytes", stop - start)
        return Fetched(data, Keep.OWNED)

    def fetches_through_peer(self, start: int) -> bool:
        return False


def log_fetch(key: str, start: int, stop: int, source: str, seconds: float) -> None:
    """Log at DEBUG that a range was received from `source`."""
    if _log.isEnabledFor(logging.DEBUG):
        text = "%s: bytes %d to %d from %s in %.6f s (fetch %s)"
        _log.debug(text, shown_key(key), start, stop, source, seconds, fetch_id.get())


def cached_counter(*, for_peers: bool) -> str:
    """The name of the counter of bytes that were read from this disk."""
    return "served_cached_bytes" if for_peers else "cache_bytes"


MakeSource = Callable[[Origin, ObjectInfo, Counters | None], Source]
"""Makes the `Source` of an object version: its origin and description, and the counters to update (None: none)."""


# --- fetches ----------------------------------------------------------------------------------------


class Fetcher:
    """Fetches blocks for one reader. Thread-safe. `for_peers`: see `CachedReader`."""

    def __init__(
        self,
        *,
        source: Source,
        key: str,
        location: Location,
        disk: Disk,
        threads: Threads,
        group: FindGroup,
        for_peers: bool = False,
    ) -> None:
        self.source = source
        self.key = key
        self.location = location
        self.entry = location.entry
        self.disk = disk
        self.threads = threads
        self.group = group
        self.for_peers = for_peers

    def start(self, blocks: Sequence[int], *, waited_for: bool) -> dict[int, Flight]:
        """Start to fetch missing blocks; returns a flight for each of them.

        `waited_for`: the caller waits for them. A prefetch of these blocks that has not begun is then moved to the pool for
        reads that are waited for.
        """
        mine, theirs = self.disk.flights.join(self.entry.object_id, blocks)
        unsent = mine
        try:
            unsent = dict(mine)
            if waited_for:
                for flight in theirs.values():
                    flight.promote()
            for numbers in coalesce(mine, RUN_BLOCKS):
                flights = {block: mine[block] for block in numbers}
                number_flights(flights.values())
                # The run has a descriptor of its own: the reader may be closed before the fetch ends.
                _Run(self, flights, self.location.duplicate(), waited_for=waited_for).submit()
                for block in numbers:
                    del unsent[block]
        except BaseException:  # also Ctrl-C: without an error, later readers of these blocks would wait forever
            self.fail(unsent, self.interrupted())
            raise
        return {**mine, **theirs}

    def fetch_here(self) -> Buffer:
        """Fetch an object of one block in this thread, or wait for the thread or process that fetches it.

        Another thread costs more time than all other work for a small object.
        """
        began = time.perf_counter()
        mine, theirs = self.disk.flights.join(self.entry.object_id, (0,))
        if theirs:
            theirs[0].promote()
            theirs[0].exception()  # waits
            log_wait(self.key, theirs.values(), began)
            return theirs[0].result()
        try:
            number_flights(mine.values())
            in_fetch(mine[0].fetch_id, lambda: self._fetch_or_wait(mine[0]))
        except Exception as error:
            self.fail(mine, error)
            raise
        except BaseException:  # an interrupt of this thread only
            self.fail(mine, self.interrupted())
            raise
        log_wait(self.key, mine.values(), began)
        return mine[0].result()

    def _fetch_or_wait(self, flight: Flight) -> None:
        locks, key = self.disk.locks, self.lock_key(0)
        wait = LockWait(locks)
        while True:
            try:
                locked = locks.try_acquire(key)
                # Another process may have stored it between the caller's lookup and the lock.
                if self.complete_stored(0, flight, self.location):
                    return
                if locked or wait.is_over(key):
                    self.fetch_part(_ONE_BLOCK, {0: flight}, self.location)
                    return
            finally:
                try:
                    locks.let_go(key)
                except BaseException:  # an interrupt; other processes would wait for the lock
                    locks.let_go(key)
                    raise
            time.sleep(wait.next_pause())

    def fail(self, flights: dict[int, Flight], error: BaseException) -> None:
        """Raise `error` in all threads that wait for these blocks, except for blocks that were fetched."""
        for block, flight in flights.items():
            self.disk.flights.fail((self.entry.object_id, block), flight, error)

    def interrupted(self) -> OriginUnavailableError:
        """The error for other threads when the fetching thread was interrupted."""
        return OriginUnavailableError(f"{shown_key(self.key)} was not fetched", next_step="read it again")

    # --- steps of a run, in a thread of a pool ----------------------------------------------------

    def lock_key(self, block: int) -> int:
        """The lock of one block's fetch between the processes of a node.

        A fetch through another node holds another lock than a fetch from the origin. The server of a node takes the second
        kind only, so nodes that disagree about the owner of a block cannot wait for each other in a cycle.
        """
        through_peer = self.source.fetches_through_peer(block * self.entry.block_bytes)
        return lock_number(self.entry.object_id, block + _THROUGH_PEER if through_peer else block)

    def complete_stored(self, block: int, flight: Flight, location: Location | None) -> bool:
        """Complete the flight of a block that is cached by now."""
        if location is None:
            return False
        try:
            data = location.read_block(block)
        except StorageError as error:
            location.report(error)
            return False
        if data is None:
            return False
        self.disk.counters.add(cached_counter(for_peers=self.for_peers), memoryview(data).nbytes)
        self.disk.flights.complete((self.entry.object_id, block), flight, data)
        return True

    def fetch_part(self, part: range, flights: dict[int, Flight], location: Location | None) -> None:
        """Request neighbouring blocks; store them, then complete their flights. Without a location nothing is stored."""
        entry, counters = self.entry, self.disk.counters
        start, stop = span_of(part.start, part.stop, entry.size, entry.block_bytes)
        (response, how, peer_bytes), fetched_bytes = self._read_uncached(start, stop, location)
        fetched_here.nbytes += fetched_bytes
        self.disk.missed(entry, fetched_bytes, self.group, peer_bytes=peer_bytes, served=self.for_peers)
        candidate = Candidate(entry.object_id, entry.size, lambda: entry.name, self.group, how)
        nbytes = 0 if location is None else location.stored_bytes(fetched_bytes)
        with self.disk.reserved(nbytes, candidate) if location else nullcontext(Room(self.disk.store, 0)) as room:
            keep = bool(room)
            if location is not None and not keep and how is Keep.OWNED:
                self.disk.report_full(stop - start, candidate)
            for block in part:
                block_start, block_stop = span_of(block, block + 1, entry.size, entry.block_bytes)
                piece = (
                    response
                    if len(part) == 1
                    else memoryview(response).cast("B")[block_start - start : block_stop - start]
                )
                keep = keep and self._try_store(location, block, piece, how)
                if keep and location is not None:
                    room.wrote(location.stored_bytes(block_stop - block_start))
                else:
                    counters.add("uncached_bytes", block_stop - block_start)
                    self.disk.held.put((entry.object_id, block), piece)
                self.disk.flights.complete((entry.object_id, block), flights[block], piece)

    def request(self, start: int, stop: int) -> Fetched:
        """The bytes `[start, stop)` from a peer or the origin."""
        found = self.source.read(start, stop)
        return found._replace(keep=Keep.CHECKPOINT) if self.key.endswith(CHECKPOINT_FILES) else found

    def _read_uncached(self, start: int, stop: int, location: Location | None) -> tuple[Fetched, int]:
        """The bytes of neighbouring blocks, and how many of them were fetched. Cached pages are not."""
        gaps: list[tuple[int, int]] = []
        if isinstance(location, FileLocation):
            try:
                gaps = location.gaps(start, stop)
            except StorageError as error:
                location.report(error)
        if not isinstance(location, FileLocation) or sum(end - begin for begin, end in gaps) in (0, stop - start):
            return self.request(start, stop), stop - start
        data, keep, fetched_bytes, peer_bytes = bytearray(stop - start), Keep.OWNED, 0, 0
        most = MOST_REQUESTS * len(blocks_of(start, stop, self.entry.block_bytes))
        for begin, end, is_gap in _with_gaps(start, stop, bridged(gaps, 0, most=most), self.entry.block_bytes):
            # Verified, since the block's checksum is computed over these bytes.
            piece: Buffer | None = None if is_gap else self.cached_pages(location, begin, end, verify=True)
            if piece is None:
                piece, how, from_peers = self.request(begin, end)
                keep = how if keep is Keep.OWNED else keep
                fetched_bytes += end - begin
                peer_bytes += from_peers
            data[begin - start : end - start] = memoryview(piece).cast("B")
        self.disk.counters.add(cached_counter(for_peers=self.for_peers), stop - start - fetched_bytes)
        return Fetched(memoryview(data), keep, peer_bytes), fetched_bytes

    def cached_pages(self, location: FileLocation, start: int, stop: int, *, verify: bool = False) -> bytes | None:
        """A range inside one block that is not complete; None when any of its pages is missing, wrong or unreadable."""
        try:
            return location.read_pages(start, stop, verify=verify)
        except StorageError as error:
            location.report(error)
            return None

    def _try_store(self, location: Location | None, block: int, piece: Buffer, how: Keep) -> bool:
        """Store a block. When the disk fails, the block is not stored, but the read succeeds."""
        if location is None:
            return False
        try:
            return location.store_block(block, piece, how, self.group)
        except StorageError as error:
            location.report(error)
            return False


MOST_REQUESTS = 8
"""The most requests for the missing parts of a block. Beyond it, cached pages in between are fetched again."""


def bridged(spans: Sequence[tuple[int, int]], waste_bytes: int, *, most: int) -> list[tuple[int, int]]:
    """Ascending byte ranges, joined across the smallest holes while these have at most `waste_bytes` together, or while
    more than `most` ranges are left.
    """
    holes = sorted(
        (max(0, after[0] - before[1]), number) for number, (before, after) in enumerate(itertools.pairwise(spans))
    )
    joined: set[int] = set()
    for nbytes, number in holes:
        waste_bytes -= nbytes
        if waste_bytes < 0 and len(spans) - len(joined) <= most:
            break
        joined.add(number)
    result: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(spans):
        if number - 1 in joined:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        else:
            result.append((start, stop))
    return result


def _with_gaps(
    start: int, stop: int, gaps: Sequence[tuple[int, int]], block_bytes: int
) -> Iterator[tuple[int, int, bool]]:
    """The range `[start, stop)` in parts: each of the gaps, and the rest between them, cut at the boundaries of blocks."""
    for begin, end in [*gaps, (stop, stop)]:
        while start < begin:
            cut = min(begin, (start // block_bytes + 1) * block_bytes)
            yield start, cut, False
            start = cut
        if begin < end:
            yield begin, end, True
        start = end


def log_wait(key: str, flights: Iterable[Flight], began: float) -> None:
    """Log at DEBUG how long a read has waited for missing blocks. `began` is in seconds of `time.perf_counter`."""
    if _log.isEnabledFor(logging.DEBUG):
        ids, seconds = ", ".join(sorted({flight.fetch_id for flight in flights})), time.perf_counter() - began
        _log.debug("%s: waited %.6f s for missing blocks (fetch %s)", shown_key(key), seconds, ids)


def number_flights(flights: Iterable[Flight]) -> None:
    """Give these flights the id of the fetch in progress in this thread, or a new one."""
    identifier = fetch_id.get() or new_fetch_id()
    for flight in flights:
        flight.fetch_id = identifier


class _Run:
    """Neighbouring blocks in flight. Begins once, in the pool that takes it first; owns its location."""

    def __init__(
        self, fetcher: Fetcher, flights: dict[int, Flight], location: Location | None, *, waited_for: bool
    ) -> None:
        self._fetcher = fetcher
        self._flights = flights
        self._location = location
        self._waited_for = waited_for
        self._begun = threading.Lock()  # acquired once and never released
        self._pending = set(flights)
        self._wait = LockWait(fetcher.disk.locks)
        for flight in flights.values():
            flight.on_promote(self.prioritize)

    def submit(self) -> None:
        """Begin in the pool for runs of its kind."""
        threads = self._fetcher.threads
        try:
            (threads.demand if self._waited_for else threads.ahead).submit(self._begin)
        except RuntimeError as error:  # the interpreter is shutting down
            if not self._waited_for:
                emit(Event(name="cache.prefetch.refused", subject=shown_key(self._fetcher.key), detail=str(error)))
                self._begin(self._refused)
            else:
                self._begin(self._continue)  # in the caller's thread: a thread that outlives the main one reads on

    def prioritize(self) -> None:
        """Begin in the other pool if a thread waits for blocks of a prefetch that has not begun."""
        if not self._waited_for:
            self._waited_for = True
            if not self._begun.locked():
                self.submit()

    def _begin(self, how: Callable[[], None] | None = None) -> None:
        if self._begun.acquire(blocking=False):  # else the other pool was first
            self._wait = LockWait(self._fetcher.disk.locks)
            (how or self._continue)()

    def _continue(self) -> None:
        fetcher, again = self._fetcher, True
        while again:
            failure: Exception | None = None
            try:
                if not self._waited_for and not threading.main_thread().is_alive():
                    # The interpreter is ending and waits for its pools: prefetches are given up.
                    raise OriginUnavailableError(f"{shown_key(fetcher.key)} was not fetched: the process is ending")
                self._step()
                if self._pending:
                    # Other runs must not wait for a thread while this one waits for another process.
                    pool = fetcher.threads.demand if self._waited_for else fetcher.threads.ahead
                    again = fetcher.threads.pause(pool, self._wait.next_pause(), self._continue, self._refused)
                    continue
            except Exception as error:  # noqa: BLE001 - the waiting threads raise it
                failure = error
            except BaseException:  # an interrupt of this thread only
                self._end(fetcher.interrupted())
                raise
            self._end(failure)
            return

    def _step(self) -> None:
        """Fetch every block of the run that no other process fetches, and read the blocks that were stored meanwhile."""
        fetcher, locks = self._fetcher, self._fetcher.disk.locks
        keys = {block: fetcher.lock_key(block) for block in self._pending}
        locked: list[int] = []
        overdue: list[int] = []
        try:
            for block in sorted(self._pending):
                if locks.try_acquire(keys[block]):
                    locked.append(block)
                elif self._wait.is_over(keys[block]):
                    overdue.append(block)
            # Another process may have stored a block between the caller's lookup and the lock.
            done = {b for b in self._pending if fetcher.complete_stored(b, self._flights[b], self._location)}
            for part in coalesce({*locked, *overdue} - done, RUN_BLOCKS):
                fetch = partial(fetcher.fetch_part, part, self._flights, self._location)
                in_fetch(self._flights[part.start].fetch_id, fetch)
                done.update(part)
        finally:
            for block in locked:
                locks.release(keys[block])
        self._pending -= done

    def _refused(self) -> None:
        reason = f"cannot fetch {shown_key(self._fetcher.key)}: the process is ending"
        self._end(OriginUnavailableError(reason, next_step="read it again"))

    def _end(self, error: Exception | None = None) -> None:
        # Each flight refers to its run: as a cycle, their bytes would stay in memory until the next garbage collection.
        flights, self._flights = self._flights, {}
        try:
            if self._location is not None:
                self._location.close()
        finally:
            if error is not None:
                self._fetcher.fail(flights, error)
