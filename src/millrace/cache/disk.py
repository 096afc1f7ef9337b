"""One cache directory, as one process has it open: its store, and what goes with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.cache.audit import Audit
from millrace.cache.copies import Copies, StillACopy
from millrace.cache.counters import Counters
from millrace.cache.evictor import Evictor, Newcomer
from millrace.cache.failures import FailingDiskError
from millrace.cache.flight import Flights, ProcessLocks
from millrace.cache.footers import Footers
from millrace.cache.groups import copies_of
from millrace.cache.held import HeldBlocks
from millrace.cache.housekeeping import every_tick, no_more
from millrace.cache.leftovers import Leftovers
from millrace.cache.maps import MapCache, Sweeper
from millrace.cache.page_map import PageMap
from millrace.cache.records import Entry, ObjectName, segment_unit
from millrace.cache.rules import Place
from millrace.cache.sealing import Sealer
from millrace.cache.segment_files import data_path
from millrace.cache.segment_maps import SegmentMaps
from millrace.cache.segment_seals import SegmentSealer
from millrace.cache.segments import SEGMENT_BYTES, Segments
from millrace.cache.signals import Signals
from millrace.cache.source import Keep
from millrace.cache.store import Store
from millrace.cache.unit_rules import held_bytes, rule_of
from millrace.cache.usage import FindGroup, UsageLog
from millrace.cache.usage_records import UsageRecords
from millrace.cache.verified import VerifiedBlocks
from millrace.config import DEFAULT_CAPACITY, CacheOptions, parse_amount
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.figures import size_text

_log = logging.getLogger("millrace")

_BATCHES = 64  # uses are written down when they come to one part in so many of the capacity, or twice a second

_SEGMENTS_OF_A_QUOTA = 16  # so many at least fill it

_MOST_METADATA_BYTES = 2 << 30  # some twenty million listed keys

_DEFAULT_CAPACITY = parse_amount(DEFAULT_CAPACITY, option="capacity")


class Room:
    """Room in a store that was reserved for one writer; true when there is any."""

    def __init__(self, store: Store, nbytes: int) -> None:
        self._store = store
        self.left = nbytes

    def __bool__(self) -> bool:
        return self.left > 0

    def wrote(self, nbytes: int) -> None:
        """Give back what was written, and so counts as used from now on."""
        nbytes = min(nbytes, self.left)
        if nbytes:
            self.left -= nbytes
            self._store.release(nbytes)


class Disk:
    """A store with its locks, counters, maps and fetches. One a process and directory, whatever the options."""

    def __init__(self, directory: Path, options: CacheOptions) -> None:
        self.store = Store(directory, capacity=options.capacity, min_free=options.min_free)
        self.locks = ProcessLocks(directory / "locks")
        self.counters = Counters(directory / "counters")
        self.store.on_corrupt = lambda: self.counters.add("corrupt_blocks")
        self.store.on_failure = self.report
        self.sealer = Sealer(self.store, report=self.report)
        self.verified = VerifiedBlocks()
        self.maps = MapCache()
        self.segment_sealer = SegmentSealer(
            directory / "segments", self.store.index, self.locks, on_wrong=self.drop_wrong, report=self.report
        )
        self.segments = Segments(directory / "segments", self.store.index, on_rest=self.segment_sealer.start)
        self.segment_maps = SegmentMaps(self.segments.directory, self.maps, self.segment_sealer.get)
        self.usage = UsageLog(self._count_opens)
        self.records = UsageRecords(self.store.index)
        self._copies = Copies(self.store.index, self.records)
        self.evictor = Evictor(
            self.store,
            self.records,
            self.locks,
            feed=self.write_down_uses,
            remove_object=self._evict_object,
            remove_segment=self._evict_segment,
            report=self.report,
            copies=self._copies,
            audit=Audit(self.store.index, self.records, Leftovers(self.store, self.segments)),
        )
        self._sweeper = Sweeper()
        self.flights = Flights()
        self.held = HeldBlocks()
        self.footers = Footers(
            self.store.index,
            capacity_bytes=self.store.capacity_bytes,
            may_grow=self.store.leaves_min_free,
            report=self.report,
        )
        self._limits = (options.capacity, options.min_free)
        self._tell_of_resize(options)
        self._full_reported: set[Place | None] = set()
        self._missed_bytes = self._settle_after = 0
        self._keeps_house = False
        self.failed = False

    def keep_house(self) -> None:
        """Have `tidy` called twice a second, because something is kept in memory from now on."""
        if not self._keeps_house:
            self.counters.counts_late()
            every_tick(self.tidy)
            every_tick(self.look_at_room)
            self._keeps_house = True

    def tidy(self) -> None:
        """Write down what was used, see to the limits, and let go of maps whose files are gone."""
        self.add_up()
        if self.failed:
            return
        try:
            self._tidy()
        except StorageError as error:
            self.report(error)

    def look_at_room(self) -> float | None:
        """Give way to another program that fills the disk; gives when to look again, as `Evictor.look`."""
        if self.failed:
            return None
        try:
            return self.evictor.look()
        except StorageError as error:
            self.report(error)
            return None

    def add_up(self) -> None:
        """Count what this process has noted so far, and say so to who waits for it."""
        moment = time.monotonic_ns()
        self.usage.settle()
        self.counters.settled(moment)

    def _tidy(self) -> None:
        self.write_down_uses()
        self.segments.release_idle()
        self.segment_maps.look_again()
        for segment in self.segment_maps.worth_sealing():
            self.segment_sealer.start(segment)
        self.evictor.enforce()
        removals = self.signals.removals
        if (everything := self._sweeper.due(removals)) or self.maps.unchecked:
            self.maps.sweep(all_of_them=everything)
        if everything:
            self.store.index.forget_dead_readers()
            self._bound_metadata()

    def _bound_metadata(self) -> None:
        """Listings that nobody asks for again are never replaced: when there are too many, all are forgotten."""
        nbytes = self.store.index.meta_bytes()
        if nbytes > _MOST_METADATA_BYTES:
            PageMap(self.store.index).clear()
            emit(Event(name="cache.metadata.cleared", subject=str(self.store.directory), nbytes=nbytes))

    def _count_opens(self, opens: int, nbytes: int) -> None:
        self.counters.add("native_opens", opens)
        self.counters.add("cache_bytes", nbytes)

    @property
    def signals(self) -> Signals:
        """Whether anything was removed or changed in the index, by any process; see `Index.stamp`."""
        return self.store.index.signals

    def limit(self, options: CacheOptions) -> None:
        """Take the limits of `options`; the newest hold."""
        limits = (options.capacity, options.min_free)
        if limits != self._limits:
            _log.warning("the cache in %s gets new limits: capacity or min_free differ", self.store.directory)
            self._limits = limits
            self.store.set_limits(capacity=options.capacity, min_free=options.min_free)
            self._tell_of_resize(options)

    def _tell_of_resize(self, options: CacheOptions) -> None:
        """Who asks for a capacity of his own should know that it is not what holds."""
        resized = self.store.rules.current().capacity
        if resized not in (None, options.capacity) and options.capacity != _DEFAULT_CAPACITY:
            _log.warning(
                "the cache in %s was resized to %s, which holds in place of the option 'capacity' until "
                "'millrace resize --default'",
                self.store.directory,
                size_text(self.store.capacity_bytes()),
            )

    def enforce_limits(self) -> None:
        """Bring the store inside its limits, after these were lowered. What is pinned stays even if it is too much."""
        self.evictor.enforce(patient=True)

    # --- what is used, and what goes ----------------------------------------------------------------

    @contextmanager
    def reserved(self, nbytes: int, newcomer: Newcomer) -> Iterator[Room]:
        """Reserve room for the time of the block, for which others may be evicted."""
        room = Room(self.store, nbytes if self.evictor.reserve(nbytes, newcomer) else 0)
        try:
            yield room
        finally:
            if room:
                self.evictor.give_back(room.left, newcomer)
            room.wrote(room.left)

    def segment_group(self, name: ObjectName, group: str, keep: Keep = Keep.OWNED) -> str:
        """Whose segments an object of `group` goes to: those that count to a quota leave for each other only, and copies
        of what other nodes own go before anything else.
        """
        place = rule_of(self.store.rules.current(), name).quota_place
        own = group if place is None else f"{group} {place[1]!r}"
        return own if keep is Keep.OWNED else copies_of(own)

    def segment_bytes(self, name: ObjectName) -> int:
        """How large a segment with this object may grow: eviction takes it whole, which must not be most of a quota."""
        quota = rule_of(self.store.rules.current(), name).quota
        return SEGMENT_BYTES if quota is None else quota.of(self.store.disk_bytes()) // _SEGMENTS_OF_A_QUOTA

    @property
    def still_a_copy(self) -> StillACopy | None:
        """Says which objects other nodes own; None where nothing is a copy, or everything. A cluster puts its own here."""
        return self._copies.still_a_copy

    @still_a_copy.setter
    def still_a_copy(self, ask: StillACopy | None) -> None:
        self._copies.still_a_copy = ask

    def mark_copies(self) -> int:
        """After owners have changed: make everything a copy of which this node is to hold nothing; gives how many units."""
        self.write_down_uses()
        return self._copies.mark_all()

    def missed(self, entry: Entry, nbytes: int, group: FindGroup) -> None:
        """Note bytes from the origin. Uses are written down often enough for eviction to see them one after the other."""
        self.usage.missed(entry, nbytes, group, kept=False)
        self._missed_bytes += nbytes  # by threads at once: one that is lost delays the next look a little
        if self._missed_bytes <= self._settle_after:
            return
        try:
            batch, pending = self.store.capacity_bytes() // _BATCHES, self.usage.settle()
            if pending > batch:
                self.write_down_uses()
                pending = 0
            self._missed_bytes, self._settle_after = 0, batch - pending
        except StorageError as error:
            self.report(error)

    def write_down_uses(self) -> None:
        """Enter what this process has used since the last time into the records."""
        tallies = self.usage.drain()
        if not tallies:
            return
        forgotten = self.records.note(tallies, capacity_bytes=self.store.capacity_bytes(), now=time.time())
        for object_id in forgotten:
            entry = self.store.index.get(object_id)
            if entry is not None and not entry.present:  # opened once, never kept
                self.store.remove(object_id)

    def last_used(self, entry: Entry) -> int | None:
        """When an object, or anything in its segment, was last used, in Unix seconds; None where that is not known."""
        return self.records.used_at([segment_unit(entry.place) if entry.place else entry.object_id])[0]

    def _evict_object(self, object_id: bytes) -> bool:
        entry = self.store.index.get(object_id)
        if entry is None or entry.place:
            return False
        nbytes = held_bytes(self.store.index, entry)
        self.maps.drop(entry.generation)
        self.store.remove(object_id)
        emit(Event(name="cache.evicted", subject=self.store.path(entry), nbytes=nbytes))
        return True

    def _evict_segment(self, generation: int) -> bool:
        if not self.segments.remove(generation, lambda: self.store.index.remove_segment(generation)):
            return False
        self.segment_maps.forget(generation)
        emit(Event(name="cache.evicted", subject=f"{self.segments.directory}/{generation}.data"))
        return True

    def drop_wrong(self, entry: Entry) -> None:
        """Forget an object in a segment whose bytes are wrong, which is counted and reported."""
        if self.store.index.get(entry.object_id) != entry:
            return  # evicted since its record was read
        path = data_path(self.segments.directory, entry.place)
        emit(Event(name="cache.block.corrupt", subject=path, nbytes=entry.size, detail=f"offset {entry.offset}"))
        self.counters.add("corrupt_blocks")
        self.store.index.remove(entry.object_id)

    def remove(self, object_id: bytes) -> None:
        """Forget an object version, its file and its map. Readers that have it open keep reading."""
        self.footers.drop(object_id)
        entry = self.store.index.get(object_id)
        if entry is not None:
            self.maps.drop(entry.generation)
            self.store.remove(object_id)

    def drop_empty_segments(self) -> None:
        """Remove the segments in which nothing is left. One that somebody appends to stays, for the evictor."""
        for record in self.store.index.segment_records():
            if record.written_bytes and not record.live_bytes:
                self._evict_segment(record.generation)

    def report(self, error: StorageError, subject: str | None = None) -> None:
        """Report what the disk answered to a read or write that goes on without it.

        A device that fails is left out from now on, by this process: what it holds is forgotten, and nothing is asked of it.
        """
        emit(Event(name="cache.disk.failed", subject=subject or str(self.store.directory), detail=str(error)))
        if isinstance(error, FailingDiskError) and not self.failed:
            self.failed = True
            self.maps.clear()
            emit(Event(name="cache.disk.left_out", subject=str(self.store.directory), detail=str(error)))
            _log.warning("the cache in %s is left out from now on: %s", self.store.directory, error)

    def report_full(self, nbytes: int, newcomer: Newcomer) -> None:
        """Say once a process that reads go on without being kept: nobody should find out by a slow second epoch.

        Where it is a quota that has no room for `nbytes` of an object, that is said, once of each.
        """
        if self.failed:
            return
        try:
            rule = rule_of(self.store.rules.current(), newcomer.name())
            place = rule.quota_place if self.store.has_room(nbytes) else None
            if place in self._full_reported:
                return
            capacity, used, disk = self.store.capacity_bytes(), self.store.index.used_bytes(), self.store.disk_bytes()
        except StorageError as error:
            self.report(error)
            return
        self._full_reported.add(place)
        emit(Event(name="cache.full", subject=str(self.store.directory), detail="" if place is None else place[1]))
        if place is not None and rule.quota is not None:
            _log.warning(
                "the quota of %s in the cache in %s is full (%s): reads of it go on uncached",
                place[1] or "everything",
                self.store.directory,
                size_text(rule.quota.of(disk)),
            )
            return
        _log.warning(
            "the cache in %s is full (capacity %s, used %s, or min_free is reached): reads go on uncached",
            self.store.directory,
            size_text(capacity),
            size_text(used),
        )

    def close(self) -> None:
        """Close everything; files and maps that are in use stay readable."""
        self.sealer.close()
        self.segment_sealer.close()
        no_more(self.tidy)
        no_more(self.look_at_room)
        try:
            self.write_down_uses()
        except StorageError as error:
            self.report(error)
        self.maps.clear()
        self.held.clear()
        self.segments.close()
        self.counters.close()
        self.locks.close()
        self.store.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's kernel locks and of its maps, and touch nothing else of it."""
        self.maps.abandon()
        self.segments.abandon()
        self.counters.abandon()
        self.locks.close()
        self.store.index.abandon()
