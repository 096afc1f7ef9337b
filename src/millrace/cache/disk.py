"""One cache directory, open in one process: its store, retention rules, eviction records, counters, maps and fetches, and
the blocks in memory that it could not store.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import Buffer

from millrace.cache.attribution import Attribution, JobAndPrefix, Reads, job_of
from millrace.cache.counters import NO_MEASURES, Counters, Measures, without_dip
from millrace.cache.eviction import keep_policy
from millrace.cache.eviction.audit import Audit, Leftovers
from millrace.cache.eviction.copies import Copies, Keep
from millrace.cache.eviction.evictor import Candidate, Evictor
from millrace.cache.eviction.policy import EvictionPolicy
from millrace.cache.eviction.retention import NO_RULES, Place, Rules, decode, encode
from millrace.cache.eviction.usage import FindGroup, Read, UsageLog, copies_of
from millrace.cache.eviction.usage_records import UsageRecords
from millrace.cache.footers import Footers
from millrace.cache.metadata.page_map import PageMap
from millrace.config import DEFAULT_CAPACITY, CacheOptions, parse_amount
from millrace.errors import MillraceError, StorageError
from millrace.events import Event, emit
from millrace.figures import size_text
from millrace.runtime import forks
from millrace.runtime.directories import locked_directory
from millrace.runtime.failures import FailingDiskError, disk_errors
from millrace.runtime.forks import importing
from millrace.runtime.locks import BlockKey, Flights, NamedLocks
from millrace.runtime.maintenance import register_periodic, unregister
from millrace.runtime.private_files import read_file, replace_file
from millrace.store.environment import DamagedIndexError
from millrace.store.index import Index
from millrace.store.maps import MapCache, Sweeper
from millrace.store.records import Entry, ObjectName, segment_unit
from millrace.store.seals import Sealer, SegmentSealer
from millrace.store.segment_files import data_path
from millrace.store.segment_maps import SegmentMaps
from millrace.store.segments import SEGMENT_BYTES, Segments
from millrace.store.setup import RULES_NAME, RULES_TEXT
from millrace.store.signals import REMOVALS, Signals
from millrace.store.space import bytes_of
from millrace.store.store import Store, VerifiedBlocks

_log = logging.getLogger("millrace.cache")

_POLICY: EvictionPolicy = keep_policy
"""The eviction policy of every store."""

_BATCHES = 64  # uses are recorded when their bytes reach this fraction (1/n) of the capacity, or twice a second
_BATCH_WITHOUT_CAPACITY = 64 << 20  # nothing is evicted, so that the order of uses does not matter

_LOOK_EVERY_SECONDS = 0.5  # for changes of the rules

_SEGMENTS_OF_A_QUOTA = 16  # the capacity holds at least this many segments

_MOST_METADATA_BYTES = 2 << 30  # some twenty million listed keys

HELD_BYTES = 64 << 20
"""The most bytes of blocks in memory that the disks of a process could not store."""

_DEFAULT_CAPACITY = parse_amount(DEFAULT_CAPACITY, option="capacity")


class _HeldMemory:
    """The blocks of all `HeldBlocks` that share this memory. Drops the least recently used first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes
        self.used = 0
        self.blocks: OrderedDict[tuple[HeldBlocks, BlockKey], bytes] = OrderedDict()
        self.lock = threading.Lock()


_held_memory = _HeldMemory(HELD_BYTES)


def _drop_held_memory() -> None:
    global _held_memory
    _held_memory = _HeldMemory(HELD_BYTES)  # another thread of the parent may have held the lock


forks.reset_in_child(_drop_held_memory)


class HeldBlocks:
    """The fetched blocks that one disk could not store, until newer ones replace them. Thread-safe.

    Without them, a reader of 64 KiB at a time would fetch the same 4 MiB block sixty-four times when the disk is full. Each
    disk has its own, because others may belong to other storage. All disks of a process share `HELD_BYTES`; with
    `capacity_bytes` it uses its own memory instead.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._memory = _held_memory if capacity_bytes is None else _HeldMemory(capacity_bytes)

    def put(self, key: BlockKey, data: Buffer) -> None:
        """Hold a copy of a block: the original would keep its larger buffer alive."""
        copy = bytes(data)
        memory = self._memory
        with memory.lock:
            old = memory.blocks.pop((self, key), b"")
            memory.blocks[self, key] = copy
            memory.used += len(copy) - len(old)
            while memory.used > memory.capacity:
                memory.used -= len(memory.blocks.popitem(last=False)[1])

    def get(self, object_id: bytes, blocks: Iterable[int]) -> dict[int, Buffer]:
        """The members of `blocks` that are held."""
        memory = self._memory
        if not memory.blocks:
            return {}
        found: dict[int, Buffer] = {}
        with memory.lock:
            for block in blocks:
                place = (self, (object_id, block))
                data = memory.blocks.get(place)
                if data is not None:
                    memory.blocks.move_to_end(place)
                    found[block] = data
        return found

    def drop(self, object_id: bytes, blocks: Iterable[int]) -> None:
        """Drop `blocks`: they are to be stored on disk, which has space again."""
        memory = self._memory
        with memory.lock:
            for block in blocks:
                memory.used -= len(memory.blocks.pop((self, (object_id, block)), b""))

    def clear(self) -> None:
        """Drop all blocks."""
        memory = self._memory
        with memory.lock:
            for place in [place for place in memory.blocks if place[0] is self]:
                memory.used -= len(memory.blocks.pop(place))


class RulesFile:
    """The file `rules.json` of the store in `directory`. Thread- and process-safe. Nothing is open between two calls.

    The file is next to the index, not in it, since the index is rebuilt from data files after a crash. A change is written
    to a new file and renamed, under a lock of the directory, so a reader gets either the old rules or the new ones. An
    unreadable file is reported once, and the last readable rules stay in force. A file that is empty or all zeros is
    replaced by the next change; any other unreadable file is left for repair.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._path = directory / RULES_NAME
        self._clock = clock
        self._lock = threading.Lock()
        self._rules = NO_RULES
        self._seen: tuple[int, ...] | None = None
        self._look_at = -1.0

    def current(self) -> Rules:
        """The rules, at most half a second old; reads the disk at most that often."""
        if self._clock() < self._look_at:
            return self._rules
        with self._lock:
            self._look_at = self._clock() + _LOOK_EVERY_SECONDS
            self._look()
        return self._rules

    def exists(self) -> bool:
        """Whether rules were ever set."""
        return os.path.lexists(self._path)

    def change(self, edit: Callable[[Rules], Rules]) -> Rules:
        """Replace the rules by `edit` of the newest ones; returns them. Writes nothing if nothing changes.

        Raises `UnsupportedFormatError` or `StorageError` when the file cannot be read, and `StorageError` when it cannot be
        written; the old rules then hold.
        """
        # Excludes the other threads as well. `current` must not wait for it: reads use the rules.
        with disk_errors(self._path), locked_directory(self._directory, fcntl.LOCK_EX) as directory:
            blank = self._is_blank()
            old = self._rules if blank else self._read()
            new = edit(old)
            if new != old or blank:
                replace_file(self._path, encode(new))
                os.fsync(directory)
            with self._lock:
                self._rules, self._seen, self._look_at = new, None, -1.0
        return new

    def _look(self) -> None:
        try:
            about = os.stat(self._path)
            seen: tuple[int, ...] = (about.st_ino, about.st_mtime_ns, about.st_size)
        except FileNotFoundError:
            seen = ()
        except OSError as error:
            seen = (error.errno or 0,)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            with disk_errors(self._path):
                self._rules = self._read()
        except MillraceError as error:
            emit(Event(name="cache.rules.unreadable", subject=str(self._path), detail=str(error)))
            _log.warning(
                "%s: not in force until it is mended, unless this process has read them before: %s", error, RULES_TEXT
            )

    def _is_blank(self) -> bool:
        """Whether the file exists, but is empty or all zeros, so that there is nothing to repair."""
        try:
            return not read_file(self._path).strip(b"\0")
        except FileNotFoundError:
            return False

    def _read(self) -> Rules:
        try:
            data = read_file(self._path)
        except FileNotFoundError:
            return NO_RULES
        return decode(data, source=str(self._path))


class Room:
    """Space in a store that was reserved for one writer; true if any was granted."""

    def __init__(self, store: Store, nbytes: int) -> None:
        self._store = store
        self.left = nbytes

    def __bool__(self) -> bool:
        return self.left > 0

    def wrote(self, nbytes: int) -> None:
        """Release the bytes that were written, which count as used from now on."""
        nbytes = min(nbytes, self.left)
        if nbytes:
            self.left -= nbytes
            self._store.space.release(nbytes)


def _rebuild(directory: Path, index: Index) -> object:
    with importing():
        from millrace.cache.rebuild import (
            rebuild,  # once in the lifetime of a store, not in every process that opens it
        )

    return rebuild(directory, index)


class Disk:
    """A store with its locks, counters, maps and fetches. One for each directory in a process, whatever the options."""

    def __init__(self, directory: Path, options: CacheOptions) -> None:
        self.rules = RulesFile(directory)
        self.store = Store(
            directory,
            capacity=options.capacity,
            min_free=options.min_free,
            rebuild=_rebuild,
            resized=lambda: self.rules.current().capacity,
            on_corrupt=lambda: self.counters.add("corrupt_blocks"),
            on_dropped=lambda: self.counters.add("corrupt_records"),
            on_failure=self.report,
        )
        self.locks = NamedLocks(directory / "locks")
        self.counters = Counters(directory / "counters")
        self.attribution = Attribution(directory / "counters" / "reads", job=job_of(os.environ))
        self.sealer = Sealer(self.store, report=self.report)
        self.verified = VerifiedBlocks()
        self.maps = MapCache()
        self.segment_sealer = SegmentSealer(
            directory / "segments", self.store.index, self.locks, on_wrong=self.drop_wrong, report=self.report
        )
        self.segments = Segments(directory / "segments", self.store.index, on_rest=self.segment_sealer.start)
        self.segment_maps = SegmentMaps(self.segments.directory, self.maps, self.segment_sealer.get)
        self.usage = UsageLog(self._count_opens)
        self.records = UsageRecords(self.store.index, _POLICY)
        self.copies = Copies(self.store.index, self.records)
        self.evictor = Evictor(
            self.store,
            self.rules.current,
            self.records,
            self.locks,
            feed=self.write_down_uses,
            remove_object=self._evict_object,
            remove_segment=self._evict_segment,
            report=self.report,
            copies=self.copies,
            policy=_POLICY,
            audit=Audit(self.store.index, self.records, Leftovers(self.store, self.segments)),
        )
        self._sweeper = Sweeper()
        self.flights = Flights()
        self.held = HeldBlocks()
        self.footers = Footers(
            self.store.index,
            capacity_bytes=self.store.space.capacity_bytes,
            may_grow=self.store.space.leaves_min_free,
            report=self.report,
        )
        self._limits = (options.capacity, options.min_free)
        self._warn_about_resize(options)
        self._full_reported: dict[Place | None, object] = {}
        self._missed_bytes = self._settle_after = 0
        self._is_maintained = False
        self._owner = forks.Owner()
        self._measures: Measures | None = None
        self._attributed: dict[JobAndPrefix, Reads] = {}
        self.failed = False

    def start_maintenance(self) -> None:
        """Register `tidy` to run twice a second, because this disk keeps state in memory from now on."""
        if not self._is_maintained:
            self.counters.counts_late()
            register_periodic(self.tidy)
            register_periodic(self.look_at_room)
            atexit.register(self._count_last_uses)
            self._is_maintained = True

    def tidy(self) -> None:
        """Record the uses, enforce the limits, and release maps of removed files."""
        self.add_up()
        if self.failed:
            return
        try:
            self._tidy()
        except StorageError as error:
            self.report(error)

    def look_at_room(self) -> float | None:
        """Evict when another program fills the disk. Returns in how many seconds to check again, as `Evictor.look`."""
        if self.failed:
            return None
        try:
            return self.evictor.look()
        except StorageError as error:
            self.report(error)
            return None

    def add_up(self) -> None:
        """Count all accesses that this process has noted, and publish the time up to which they are counted."""
        moment = time.monotonic_ns()
        self.usage.settle()
        self.counters.settled(moment)

    def _count_last_uses(self) -> None:
        """At the end of the process: count the uses since the last `tidy`, without waiting for other processes.

        The eviction records do not get them: they need the lock of the index.
        """
        if self._owner.is_this_process and not self.failed:
            self.attribution.add(self.usage.drain())

    def measures(self) -> Measures:
        """The counters, over all processes. If they cannot be read, as on a failed disk, those of the last call: sums over
        several disks must not decrease. A disk error is reported.
        """
        if self._measures is None or not self.failed:
            try:
                self._measures = without_dip(self._measures, self.counters.measures())
            except StorageError as error:
                if not self.failed:
                    self.report(error)
        found = self._measures or NO_MEASURES
        return found._replace(live=NO_MEASURES.live) if self.failed else found

    def attributed(self) -> dict[JobAndPrefix, Reads]:
        """What jobs read of which prefixes, over all processes; of a failed disk, the result of the last call."""
        if not self.failed:
            self._attributed = self.attribution.totals()
        return self._attributed

    def _tidy(self) -> None:
        self.write_down_uses()
        self.store.index.drop_damaged()
        self.segments.release_idle()
        self.segment_maps.look_again()
        for segment in self.segment_maps.worth_sealing():
            self.segment_sealer.start(segment)
        self.evictor.enforce()
        removals = self.signals.numbers[REMOVALS]
        if (everything := self._sweeper.due(removals)) or self.maps.unchecked:
            self.maps.sweep(all_of_them=everything)
        if everything:
            self.store.index.clear_dead_readers()
            self._bound_metadata()

    def _bound_metadata(self) -> None:
        """Listings that are never requested again are never replaced: when there are too many, all are dropped."""
        nbytes = self.store.index.meta_bytes()
        if nbytes > _MOST_METADATA_BYTES:
            PageMap(self.store.index).clear()
            emit(Event(name="cache.metadata.cleared", subject=str(self.store.directory), nbytes=nbytes))

    def _count_opens(self, opens: int, nbytes: int) -> None:
        self.counters.add("native_opens", opens)
        self.counters.add("mapped_bytes", nbytes)  # before the sum that includes them, see `without_dip`
        self.counters.add("cache_bytes", nbytes)

    @property
    def signals(self) -> Signals:
        """Whether anything was removed or changed in the index, by any process; see `Index.stamp`."""
        return self.store.index.signals

    def limit(self, options: CacheOptions) -> None:
        """Apply the limits of `options`; the newest are valid."""
        limits = (options.capacity, options.min_free)
        if limits != self._limits:
            _log.warning("the cache in %s gets new limits: capacity or min_free differ", self.store.directory)
            self._limits = limits
            self.store.space.set_limits(capacity=options.capacity, min_free=options.min_free)
            self._warn_about_resize(options)

    def _warn_about_resize(self, options: CacheOptions) -> None:
        """Warn when the option `capacity` is set, but an earlier `resize` overrides it."""
        resized = self.rules.current().capacity
        if resized not in (None, options.capacity) and options.capacity != _DEFAULT_CAPACITY:
            _log.warning(
                "the cache in %s was resized to %s, which holds in place of the option 'capacity' until "
                "'millrace resize --default'",
                self.store.directory,
                size_text(self.store.space.capacity_bytes()),
            )

    # --- use and eviction -----------------------------------------------------------------------------

    @contextmanager
    def reserved(self, nbytes: int, candidate: Candidate) -> Iterator[Room]:
        """Reserve space inside a `with` block; other objects may be evicted for it."""
        room = Room(self.store, nbytes if self.evictor.reserve(nbytes, candidate) else 0)
        try:
            yield room
        finally:
            if room:
                self.evictor.give_back(room.left, candidate)
            room.wrote(room.left)

    def segment_group(self, name: ObjectName, group: str, keep: Keep = Keep.OWNED) -> str:
        """The group of segments for an object of `group`. Objects that count to a quota are evicted only for each other, and
        copies that other nodes own are evicted first, so both have their own segments.
        """
        place = self.rules.current().rule_of(name).quota_place
        own = group if place is None else f"{group} {place[1]!r}"
        return own if keep is Keep.OWNED else copies_of(own)

    def segment_bytes(self, name: ObjectName) -> int:
        """The largest size of a segment with this object: eviction removes it whole, which must not be most of a quota."""
        quota = self.rules.current().rule_of(name).quota
        return SEGMENT_BYTES if quota is None else self.store.space.size_of(quota) // _SEGMENTS_OF_A_QUOTA

    def find_copies(self, origin_identity: str, keys: Collection[str]) -> list[bytes]:
        """The ids of the cached objects with these keys that are copies, or in segments of copies."""
        self.write_down_uses()
        return self.copies.find(origin_identity, keys)

    def mark_copies(self) -> int:
        """Mark all units that this node should not hold as copies, after owners have changed. Returns their number."""
        self.write_down_uses()
        return self.copies.mark_all()

    def missed(self, entry: Entry, nbytes: int, group: FindGroup, *, peer_bytes: int = 0, served: bool = False) -> None:
        """Note bytes that were fetched; see `Read`.

        Uses are written down often enough for eviction to see them one after the other.
        """
        self.usage.note(Read(entry, nbytes, hit=False, kept=False, group=group, peer_bytes=peer_bytes, served=served))
        self._missed_bytes += nbytes  # threads may lose an addition, which delays the next check a little
        if self._missed_bytes <= self._settle_after:
            return
        try:
            batch = self.store.space.capacity_bytes() // _BATCHES or _BATCH_WITHOUT_CAPACITY
            pending = self.usage.settle()
            if pending > batch:
                self.write_down_uses()
                pending = 0
            self._missed_bytes, self._settle_after = 0, batch - pending
        except StorageError as error:
            self.report(error)

    def write_down_uses(self) -> None:
        """Enter the uses by this process since the last call into the records."""
        tallies = self.usage.drain()
        self.attribution.add(tallies)
        if not tallies:
            return
        forgotten = self.records.note(tallies, capacity_bytes=self.store.space.capacity_bytes(), now=time.time())
        for object_id in forgotten:
            entry = self.store.index.get(object_id)
            if entry is not None and not entry.cached_bytes:  # opened once, never kept
                self.store.remove(object_id)

    def last_used(self, entry: Entry) -> int | None:
        """When an object, or any object in its segment, was last used, in Unix seconds; None if unknown."""
        return self.records.used_at([segment_unit(entry.place) if entry.place else entry.object_id])[0]

    def _evict_object(self, object_id: bytes) -> bool:
        entry = self.store.index.get(object_id)
        if entry is None or entry.place or self.store.is_linked(entry):
            return False
        self.maps.drop(entry.generation)
        self.store.remove(object_id)
        self._evicted(self.store.path(entry), entry.cached_bytes)
        return True

    def _evict_segment(self, generation: int) -> bool:
        nbytes = self._remove_segment(generation)
        if nbytes is None:
            return False
        self._evicted(data_path(self.segments.directory, generation), nbytes)
        return True

    def _remove_segment(self, generation: int) -> int | None:
        """Remove a segment. Returns its size on the disk, None if another process removes it or it is in use."""
        path = data_path(self.segments.directory, generation)
        try:
            nbytes = 512 * os.stat(path).st_blocks
        except OSError:  # another process removes it
            nbytes = 0
        if not self.segments.remove(generation, lambda: self.store.index.remove_segment(generation)):
            return None
        self.segment_maps.drop(generation)
        return nbytes

    def _evicted(self, subject: str, nbytes: int) -> None:
        self.counters.add("evictions")
        self.counters.add("evicted_bytes", nbytes)
        emit(Event(name="cache.evicted", subject=subject, nbytes=nbytes))

    def drop_wrong(self, entry: Entry) -> None:
        """Remove a damaged object from a segment; it is counted and reported."""
        if self.store.index.get(entry.object_id) != entry:
            return  # evicted since its record was read
        path = data_path(self.segments.directory, entry.place)
        emit(Event(name="cache.block.corrupt", subject=path, nbytes=entry.size, detail=f"offset {entry.offset}"))
        self.counters.add("corrupt_blocks")
        self.store.index.remove(entry.object_id)

    def remove(self, object_id: bytes) -> None:
        """Remove an object version, its file and its map. Readers that have it open keep reading."""
        self.footers.drop(object_id)
        entry = self.store.index.get(object_id)
        if entry is not None:
            self.maps.drop(entry.generation)
            self.store.remove(object_id)

    def drop_empty_segments(self) -> None:
        """Remove empty segments. A segment that is being appended to stays, for the evictor."""
        for record in self.store.index.segment_records():
            if record.written_bytes and not record.live_bytes:
                self._remove_segment(record.generation)

    def report(self, error: StorageError, subject: str | None = None) -> None:
        """Report a disk error of a read or write that continues without the disk.

        This process stops using a device that fails or has a damaged index: reads go to the origin.
        """
        emit(Event(name="cache.disk.failed", subject=subject or str(self.store.directory), detail=str(error)))
        if isinstance(error, (FailingDiskError, DamagedIndexError)) and not self.failed:
            self.failed = True
            self.maps.clear()
            emit(Event(name="cache.disk.left_out", subject=str(self.store.directory), detail=str(error)))
            _log.warning("the cache in %s is left out from now on: %s", self.store.directory, error)

    def report_full(self, nbytes: int, candidate: Candidate) -> None:
        """Warn once per process that reads continue uncached: a slow second epoch should not be the first sign.

        If a quota has no space for `nbytes` of an object, the warning names the quota, once for each.
        """
        if self.failed:
            return
        try:
            rule = self.rules.current().rule_of(candidate.name())
            place = rule.quota_place if self.store.space.has_room(nbytes) else None
            if place in self._full_reported:
                return
            capacity, disk = self.store.space.capacity_bytes(), self.store.space.disk_bytes()
            used = self.store.index.used_bytes()
        except StorageError as error:
            self.report(error)
            return
        mine = object()
        if self._full_reported.setdefault(place, mine) is not mine:  # another thread reports it
            return
        emit(Event(name="cache.full", subject=str(self.store.directory), detail="" if place is None else place[1]))
        if place is not None and rule.quota is not None:
            _log.warning(
                "the quota of %s in the cache in %s is full (%s): reads of it continue uncached",
                place[1] or "everything",
                self.store.directory,
                size_text(bytes_of(rule.quota, disk)),
            )
            return
        _log.warning(
            "the cache in %s is full (capacity %s, used %s, or min_free is reached): reads continue uncached",
            self.store.directory,
            size_text(capacity),
            size_text(used),
        )

    def close(self) -> None:
        """Close everything; files and maps that are in use stay readable."""
        self.sealer.close()
        self.segment_sealer.close()
        unregister(self.tidy)
        unregister(self.look_at_room)
        atexit.unregister(self._count_last_uses)
        try:
            self.write_down_uses()
        except StorageError as error:
            self.report(error)
        self.maps.clear()
        self.held.clear()
        self.segments.close()
        self.attribution.close()
        self.counters.close()
        self.locks.close()
        self.store.close()

    def abandon(self) -> None:
        """In a forked child: release the parent's kernel locks and maps, and touch nothing else of it."""
        self.maps.abandon()
        self.segments.abandon()
        self.attribution.abandon()
        self.counters.abandon()
