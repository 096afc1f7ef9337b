"""Fetches parts of blocks: the missing pages of the ranges that a reader requests, and nothing around them.

A reader that scans an object fetches whole blocks (`fetching.py`). Any other read fetches its own pages: a column of a wide
Parquet file is a small part of each block. One fetch at a time works on a block, of pages or of the whole, in all threads
and processes of a node. A flight of pages ends with an empty result: the other readers of the block then look for the pages
that they need, and fetch those that are still missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial

from typing_extensions import Buffer

from millrace.cache.eviction.copies import Keep
from millrace.cache.eviction.evictor import Candidate
from millrace.cache.reading.fetching import MOST_REQUESTS, Fetcher, bridged, log_wait, number_flights
from millrace.cache.reading.locations import FileLocation
from millrace.errors import StorageError, shown_key
from millrace.runtime.locks import Flight, LockWait, Outcome, in_fetch
from millrace.store.records import RUN_BLOCKS, blocks_of

_log = logging.getLogger("millrace.cache")

Span = tuple[int, int]
"""The byte range `[start, stop)` of an object."""

Pieces = dict[int, Buffer]
"""Fetched bytes, by their first byte in the object."""

_WASTED_PART = 8
"""Up to this part (1/n) of the requested bytes is fetched as holes between the ranges, where that saves requests."""


class PageFetcher:
    """Fetches pages for one reader. Thread-safe."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._disk = fetcher.disk
        self._entry = fetcher.entry
        self._block_bytes = fetcher.entry.block_bytes

    def load(self, spans: Sequence[Span], location: FileLocation, *, waited_for: bool = True) -> Pieces:
        """Fetch the missing pages of ascending byte ranges, or wait for the threads and processes that fetch them.

        Returns the bytes that were received meanwhile. All others are cached, unless they were removed since. Raises the
        errors of `CachedReader.read`.
        """
        pieces: Pieces = {}
        while gaps := self._gaps(spans, pieces, location):
            began = time.perf_counter()
            touched = sorted({block for gap in gaps for block in blocks_of(*gap, self._block_bytes)})
            mine, theirs = self._disk.flights.join(self._entry.object_id, touched)
            try:
                if mine:
                    pieces.update(self._fetch(gaps, mine, location, waited_for=waited_for))
            except Exception as error:
                self._fetcher.fail(mine, error)
                raise
            except BaseException:  # an interrupt of this thread only
                self._fetcher.fail(mine, self._fetcher.interrupted())
                raise
            for block, flight in theirs.items():
                flight.promote()
                if flight.exception() is None and memoryview(whole := flight.result()).nbytes:
                    pieces[block * self._block_bytes] = whole
            if waited_for:
                log_wait(self._fetcher.key, [*mine.values(), *theirs.values()], began)
        return pieces

    def start(self, spans: Sequence[Span], location: FileLocation) -> None:
        """Start to fetch the missing pages of ascending byte ranges without waiting. Errors are left to the reads."""
        for group in self._groups(spans):
            copy = location.duplicate()
            if copy is None:
                return
            try:
                self._fetcher.threads.ahead.submit(self._load_ahead, group, copy)
            except RuntimeError:  # the interpreter is shutting down
                copy.close()
                return

    def joined(self, spans: Sequence[Span]) -> list[Span]:
        """Ascending byte ranges, joined where that saves requests."""
        return [span for group in self._groups(spans) for span in group]

    def _groups(self, spans: Sequence[Span]) -> list[list[Span]]:
        """The ranges in groups of which no two share a block, joined where that saves requests."""
        groups: list[list[Span]] = []
        for start, stop in spans:
            last = groups[-1][-1][1] if groups else 0
            if last and start // self._block_bytes <= (last - 1) // self._block_bytes:
                groups[-1].append((start, stop))
            else:
                groups.append([(start, stop)])
        return [self._bridged(group, sum(stop - start for start, stop in group) // _WASTED_PART) for group in groups]

    def _bridged(self, spans: Sequence[Span], waste_bytes: int = 0) -> list[Span]:
        touched = {block for span in spans for block in blocks_of(*span, self._block_bytes)}
        return bridged(spans, waste_bytes, most=MOST_REQUESTS * len(touched))

    def _load_ahead(self, spans: Sequence[Span], location: FileLocation) -> None:
        try:
            if threading.main_thread().is_alive():  # else the interpreter is ending and waits for its pools
                self.load(spans, location, waited_for=False)
        except Exception as error:  # noqa: BLE001 - the read that needs these bytes raises its own
            _log.debug("%s: read-ahead failed: %s", shown_key(self._fetcher.key), error)
        finally:
            location.close()

    def _gaps(self, spans: Iterable[Span], pieces: Pieces, location: FileLocation) -> list[Span]:
        """The ranges of pages to fetch: those that are neither cached nor in `pieces`."""
        wanted = [part for span in spans for part in without(span, pieces)]
        gaps: list[Span] = []
        try:
            for start, stop in [gap for span in wanted for gap in location.gaps(*span)]:
                if gaps and start <= gaps[-1][1]:  # two ranges in one page
                    gaps[-1] = gaps[-1][0], max(gaps[-1][1], stop)
                else:
                    gaps.append((start, stop))
        except StorageError as error:
            location.report(error)
            return wanted
        return gaps

    def _fetch(
        self, gaps: Sequence[Span], flights: dict[int, Flight], location: FileLocation, *, waited_for: bool
    ) -> Pieces:
        """Fetch the part of the gaps inside these blocks, under their locks; completes their flights."""
        number_flights(flights.values())
        inside = [cut for gap in gaps for cut in self._cut(gap, flights)]
        fetch = partial(self._fetch_locked, inside, flights, location, waited_for=waited_for)
        pieces = in_fetch(next(iter(flights.values())).fetch_id, fetch)
        for block, flight in flights.items():
            self._disk.flights.complete((self._entry.object_id, block), flight, b"")
        return pieces

    def _cut(self, span: Span, blocks: Iterable[int]) -> list[Span]:
        """The parts of a range inside some ascending blocks."""
        cut: list[Span] = []
        for block in blocks:
            start, stop = max(span[0], block * self._block_bytes), min(span[1], (block + 1) * self._block_bytes)
            if start < stop and cut and cut[-1][1] == start:
                cut[-1] = cut[-1][0], stop
            elif start < stop:
                cut.append((start, stop))
        return cut

    def _fetch_locked(
        self, gaps: Sequence[Span], blocks: Iterable[int], location: FileLocation, *, waited_for: bool
    ) -> Pieces:
        locks = self._disk.locks
        keys = [self._fetcher.lock_key(block) for block in blocks]
        lock_wait = LockWait(locks)
        while True:
            try:
                for key in keys:
                    if not locks.try_acquire(key) and not lock_wait.is_over(key):
                        break
                else:
                    # Another process may have stored pages between the caller's lookup and the locks.
                    return self._request(self._gaps(gaps, {}, location), location, waited_for=waited_for)
            finally:
                try:
                    locks.let_go(*keys)
                except BaseException:  # an interrupt; other processes would wait for the locks
                    locks.let_go(*keys)
                    raise
            time.sleep(lock_wait.next_pause())

    def _request(self, gaps: Sequence[Span], location: FileLocation, *, waited_for: bool) -> Pieces:
        requests = [part for gap in self._bridged(gaps) for part in self._requests(gap)]
        if len(requests) < 2 or not waited_for:
            return {start: self._request_one(start, stop, location) for start, stop in requests}
        outcomes: dict[int, Outcome[Buffer]] = {}
        for start, stop in requests:
            # Each has a descriptor of its own: after an interrupt the reader may be closed before they end.
            request = partial(self._request_and_close, start, stop, location.duplicate())
            outcomes[start] = Outcome()
            try:
                self._fetcher.threads.demand.submit(outcomes[start].run, request)
            except RuntimeError:  # the interpreter is shutting down
                outcomes[start].set_result(request())
        for outcome in outcomes.values():
            outcome.wait()
        return {start: outcome.result() for start, outcome in outcomes.items()}

    def _requests(self, gap: Span) -> Iterable[Span]:
        """A range as requests of a bounded size, cut at the boundaries of blocks."""
        start, stop = gap
        while start < stop:
            end = min(stop, (start // self._block_bytes + RUN_BLOCKS) * self._block_bytes)
            if stop - start <= RUN_BLOCKS * self._block_bytes:
                end = stop
            yield start, end
            start = end

    def _request_and_close(self, start: int, stop: int, location: FileLocation | None) -> Buffer:
        try:
            return self._request_one(start, stop, location)
        finally:
            if location is not None:
                location.close()

    def _request_one(self, start: int, stop: int, location: FileLocation | None) -> Buffer:
        """Send one request and store its pages. Without a location, or without space, they are not stored."""
        disk, entry, group = self._disk, self._entry, self._fetcher.group
        data, keep, peer_bytes = self._fetcher.request(start, stop)
        disk.missed(entry, stop - start, group, peer_bytes=peer_bytes, served=self._fetcher.for_peers)
        candidate = Candidate(entry.object_id, entry.size, lambda: entry.name, group, keep)
        kept = False
        if location is not None:
            with disk.reserved(stop - start, candidate) as room:
                if room:
                    kept = self._try_store(location, start, data, keep)
                    room.wrote(stop - start if kept else 0)
                elif keep is Keep.OWNED:
                    disk.report_full(stop - start, candidate)
        if not kept:
            disk.counters.add("uncached_bytes", stop - start)
        return data

    def _try_store(self, location: FileLocation, start: int, data: Buffer, keep: Keep) -> bool:
        try:
            return location.store_pages(start, data, keep, self._fetcher.group)
        except StorageError as error:
            location.report(error)
            return False


def without(span: Span, pieces: Pieces) -> list[Span]:
    """The parts of a range that are in none of the pieces."""
    start, stop = span
    left: list[Span] = []
    for begin, data in sorted(pieces.items()):
        end = begin + memoryview(data).nbytes
        if end <= start or begin >= stop:
            continue
        if begin > start:
            left.append((start, begin))
        start = max(start, end)
    if start < stop:
        left.append((start, stop))
    return left
