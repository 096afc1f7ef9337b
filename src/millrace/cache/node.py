"""This process's share of a node's cache: its disks, metadata and threads.

Every file system object of a process with the same options uses the same `CacheNode`. A forked child gets a new one (LMDB,
locks, threads and obstore's clients do not survive a fork). The parent's objects are not touched.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from millrace.cache.counters import NAMES, wait_until_settled
from millrace.cache.disk import Disk
from millrace.cache.eviction.copies import StillACopy
from millrace.cache.eviction.retention import NO_RULES
from millrace.cache.eviction.usage import CHECKPOINT_FILES, AccessRecord, group_of
from millrace.cache.metadata.metadata import ORIGIN_METADATA, MetadataCache, UncachedMetadata
from millrace.cache.metadata.page_map import PageMap
from millrace.cache.metadata.sources import MetadataSource
from millrace.cache.reading.fetching import DirectSource, MakeSource
from millrace.cache.reading.locations import (
    FileLocation,
    Location,
    LookupResult,
    NativeObject,
    SegmentLocation,
    belongs_in_segment,
    look_up,
    open_entry,
)
from millrace.cache.reading.reader import CachedReader, ObjectReader, OriginReader
from millrace.cache.reading.threads import Pools, Threads
from millrace.config import LOCAL_FOLDER, CacheOptions, resolve
from millrace.errors import DiskFullError, MillraceError, StorageError
from millrace.events import Event, emit
from millrace.origin import ObjectInfo, Origin
from millrace.runtime import forks
from millrace.runtime.failures import LostDataError, disk_errors
from millrace.runtime.forks import Pool
from millrace.runtime.locks import StoppedHolderError
from millrace.runtime.pipeline import limit_arenas
from millrace.runtime.private_files import make_folder
from millrace.store.records import BLOCK_BYTES, Entry, ObjectName, object_id, owners
from millrace.store.setup import check_directory, expire_metadata
from millrace.store.signals import Stamp

# Two pools: fetches that a caller waits for do not queue behind prefetches, see `fetching.py`.
_FETCH_THREADS = 24
_PREFETCH_THREADS = 16

# Between two attempts to open a disk next to a stopped process: each may take `SILENCE_SECONDS`.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 2.0, 60.0

_RECENT_GROUPS = 1000
_GROUP_SECONDS = 1.0

# Inside a cache directory each node has its own folder, named by `CacheOptions.folder`.
_NODE_FOLDERS = "millrace"


class IndexVersion(NamedTuple):
    """The numbers of a disk's index at one moment."""

    disk: Disk
    stamp: Stamp


class CacheNode:
    """The cache of this node, as one process sees it. Thread-safe. Get it by `cache_node` or `open_node`.

    `source` makes the sources of missing blocks: the origin, or in a cluster its members. Metadata that is not cached or
    stale is requested from `metadata_source`. With `earlier`, a cache for the same options, this one uses its disks and
    threads. An open reader whose object was removed continues through the node that `reopen` returns, also in a forked
    child; by default this node, and in a child that of `cache_node`.
    """

    def __init__(
        self,
        options: CacheOptions,
        *,
        source: MakeSource = DirectSource,
        metadata_source: MetadataSource = ORIGIN_METADATA,
        reopen: Callable[[], CacheNode] | None = None,
        earlier: CacheNode | None = None,
    ) -> None:
        self.options = options
        self.source = source
        self.metadata_source = metadata_source
        self._reopen = reopen or self._this_or_successor
        self._owner = forks.Owner()
        self.closed = False
        self._recent_groups: dict[tuple[str, str], tuple[str, float]] = {}
        self._failure: StorageError | None = None
        self._reported: set[tuple[Path, str]] = set()
        self._next_attempt, self._pause = math.inf, _FIRST_PAUSE_SECONDS
        if earlier is None:
            limit_arenas()
            self._disks = self._open_disks()
            self._weights = self._weights_of(self._disks)
            self._threads = Pools(
                demand=Pool(_FETCH_THREADS, "millrace-fetch"),
                ahead=Pool(_PREFETCH_THREADS, "millrace-ahead"),
            )
        else:  # failures that it has reported are not reported again
            self._disks, self._weights, self._threads = earlier._disks, earlier._weights, earlier._threads
            self._failure, self._reported = earlier._failure, earlier._reported
            self._next_attempt, self._pause = earlier._next_attempt, earlier._pause
        self._metadata, self._metadata_disk = self._remember_on_one_disk()

    def _open_disks(self) -> list[Disk]:
        """The usable disks. A disk that is full, read-only or broken is left out, with a warning.

        Raises `ConfigurationError` or `UnsupportedFormatError` for a directory with other content.
        """
        disks, is_stopped = [], False
        for directory in self.options.cache_dirs:
            try:
                disks.append(_disk(store_directory(directory, self.options.folder), self.options))
            except StorageError as error:
                self._report_once(directory, f"no caching in this directory: {error}")
                self._failure = error
                is_stopped = is_stopped or isinstance(error, StoppedHolderError)
        if is_stopped:
            self._next_attempt = time.monotonic() + self._pause
        known = [disk for disk in disks if disk.rules.exists()]
        for disk in disks if known else ():
            if disk not in known:  # it was added or replaced since the rules were set
                self._copy_rules(known[0], disk)
        return disks

    def _report_once(self, directory: Path, detail: str) -> None:
        """Report an error of a cache directory, unless it was reported before."""
        if (directory, detail) not in self._reported:
            self._reported.add((directory, detail))
            emit(Event(name="cache.disk.failed", subject=str(directory), detail=detail))

    def open_again(self) -> bool:
        """Open disks that could not be opened because another process was stopped; returns whether one was opened.

        Does nothing between two attempts, which are further and further apart.
        """
        if time.monotonic() < self._next_attempt:
            return False
        self._next_attempt, self._pause = math.inf, min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        new = [disk for disk in self._open_disks() if disk not in self._disks]
        if not new:
            return False
        disks = [*self._disks, *new]
        self._weights, self._disks = self._weights_of(disks), disks
        self._metadata, self._metadata_disk = self._remember_on_one_disk()
        for disk in new:
            emit(Event(name="cache.disk.opened", subject=str(disk.store.directory)))
        return True

    def _weights_of(self, disks: Sequence[Disk]) -> dict[str, float]:
        return {str(disk.store.directory): float(self._capacity_of(disk)) for disk in disks}

    def _copy_rules(self, known: Disk, disk: Disk) -> None:
        """Copy the retention rules of a disk to another one, which has none. That disk adds its part to quotas in bytes."""
        failing = known
        try:
            whole, rules = self._capacity_of(known), known.rules.current()
            failing = disk
            copied = rules.in_proportion(self._capacity_of(disk), whole)
            disk.rules.change(lambda old: copied if old == NO_RULES else old)
        except StorageError as error:
            failing.report(error)

    def _capacity_of(self, disk: Disk) -> int:
        """The capacity by the options, which all processes of a node have. It is also the disk's share of the objects.

        The present limits do not count: a resize at run time must not assign cached objects to other disks.
        """
        return max(1, disk.store.space.size_of(self.options.capacity))

    def apply_limits(self) -> None:
        """Apply the limits of this node's options to its disks again: another node of this process may have changed them."""
        for disk in self.open_disks:
            try:
                disk.limit(self.options)
            except StorageError as error:
                disk.report(error)

    def distinguish_copies(self, still_a_copy: StillACopy | None) -> None:
        """Make the disks evict first what other nodes own by the present placement. See `Copies`."""
        for disk in self.open_disks:
            disk.copies.still_a_copy = still_a_copy

    def unusable(self) -> StorageError:
        """The error of a call that needs a disk, when none can be used."""
        if isinstance(self._failure, DiskFullError):
            return DiskFullError(self._failure.message, next_step=self._failure.next_step)
        why = f" ({self._failure.message})" if self._failure is not None else ""
        return StorageError(f"no cache directory can be used{why}", next_step="run 'millrace doctor'")

    @property
    def metadata(self) -> MetadataCache | UncachedMetadata:
        """The cached metadata, stored on one usable disk."""
        if self._metadata_disk is not None and self._metadata_disk.failed:
            self._metadata, self._metadata_disk = self._remember_on_one_disk()
        return self._metadata

    def _remember_on_one_disk(self) -> tuple[MetadataCache | UncachedMetadata, Disk | None]:
        # The same disk in all processes, also if their options name the directories in another order.
        disk = min(self.open_disks, key=lambda each: each.store.directory, default=None)
        if disk is None:
            return UncachedMetadata(self.metadata_source, expire_elsewhere=partial(self._expire_metadata, None)), None
        return self._remember_on(disk, self.options.max_age_seconds), disk

    def _remember_on(self, disk: Disk, max_age_seconds: float, since: float = -math.inf) -> MetadataCache:
        return MetadataCache(
            PageMap(disk.store.index),
            disk.locks,
            max_age_seconds=max_age_seconds,
            since=since,
            on_changed=self.discard,
            report=disk.report,
            source=self.metadata_source,
            ahead=self._threads.ahead,
            expire_elsewhere=partial(self._expire_metadata, disk),
        )

    def _expire_metadata(self, disk: Disk | None, own: bool) -> None:
        """Expire the metadata on all disks but `disk`. A process that cannot use `disk` has its metadata there.

        `own`: also on `disk`, whose index this process cannot change. Another process may have replaced it by a new one.
        """
        for directory in self.options.cache_dirs:
            store = store_directory(directory, self.options.folder)
            is_own = disk is not None and disk.store.directory == store
            if is_own and not own:
                continue
            others = (each for each in self.open_disks if each.store.directory == store and not is_own)
            other = next(others, None)
            try:
                if other is None or not _clear_metadata(other):
                    expire_metadata(store, time.time())
            except MillraceError as error:
                _process.unexpired.add(store)
                self._report_once(directory, f"other processes may use old metadata in this directory: {error}")
            else:
                _process.unexpired.discard(store)

    def metadata_within(self, max_age_seconds: float, since: float = -math.inf) -> MetadataCache | UncachedMetadata:
        """The same cached metadata as `metadata`, with another maximum age, and only from the time `since` on."""
        metadata = self.metadata
        if self._metadata_disk is None:
            return metadata
        return self._remember_on(self._metadata_disk, max_age_seconds, since)

    def find_native(self, origin: Origin, info: ObjectInfo, seen: IndexVersion | None = None) -> NativeObject | None:
        """The memory of a complete object, else None. Counts as one use of it.

        `seen` is the result of `changes` from before the metadata was read.
        """
        if not self.options.native:
            return None
        name = object_id(origin.identity, info.key, info.version, info.size)
        disk = self.disk_of(name)
        if disk is None:
            return None
        try:
            # A version from before the metadata is also from before the record.
            stamp = seen.stamp if seen is not None and seen.disk is disk else disk.store.index.stamp()
            entry = disk.store.index.get(name)
            found = None if entry is None else open_entry(disk, entry, stamp)
        except LostDataError as error:
            self._give_up(disk, name, error)
            return None
        except StorageError as error:
            disk.report(error)
            return None
        if found is not None:
            disk.start_maintenance()
            disk.usage.touched(AccessRecord(found.entry))
        return found

    def find_known(self, origin: Origin, key: str) -> LookupResult | None:
        """The results of `changes`, the metadata and `find_native` for a key, by one index transaction.

        None if that does not suffice, or fails: then call these functions. The caller notes the access.
        """
        disk = self._metadata_disk
        if disk is None or disk.failed or len(self._disks) > 1 or not self.options.native:
            return None
        metadata = self._metadata
        if isinstance(metadata, UncachedMetadata):
            return None
        try:
            first = look_up(disk, metadata, origin, key)
        except StorageError:
            return None  # the slow path raises the same error and reports it
        if first is not None:
            disk.start_maintenance()
        return first

    def changes(self) -> IndexVersion | None:
        """The index version of the disk with the metadata, to be read before the metadata.

        The metadata is valid while they are unchanged. None during a change, or without a usable disk.
        """
        disk = self._metadata_disk
        if disk is None or disk.failed:
            return None
        try:
            stamp = disk.store.index.stamp()
        except StorageError as error:
            disk.report(error)
            return None
        return None if stamp is None else IndexVersion(disk, stamp)

    def open_reader(
        self,
        origin: Origin,
        info: ObjectInfo,
        *,
        threads: Threads | None = None,
        source: MakeSource | None = None,
        verify: bool = False,
        for_peers: bool = False,
    ) -> ObjectReader:
        """Random access to an object, from the disk and from the origin. The caller closes it.

        `threads` fetch for it in place of the node's own, from `source` in place of the node's. `verify` checks every read
        from the disk, as without the option `native`. `for_peers`: see `CachedReader`.
        Without a usable disk the bytes come from the origin.
        """
        make = source or self.source
        name = object_id(origin.identity, info.key, info.version, info.size)
        disk = self.disk_of(name)
        if disk is None:
            return OriginReader(source=make(origin, info, None), info=info, counters=None)
        disk.start_maintenance()
        for _ in range(2):
            try:
                location = self._locate(origin, info, name, disk)
                return CachedReader(
                    source=make(origin, info, disk.counters),
                    info=info,
                    location=location,
                    disk=disk,
                    threads=threads or self._threads,
                    verify=verify or not self.options.native,
                    group=lambda: self._group_of(origin, info),
                    reopen=lambda: self._reopen().open_reader(
                        origin, info, threads=threads, source=source, verify=verify, for_peers=for_peers
                    ),
                    for_peers=for_peers,
                )
            except LostDataError as error:
                self._give_up(disk, name, error)
            except StorageError as error:
                self._failure = error
                disk.report(error)
                break
        return OriginReader(source=make(origin, info, disk.counters), info=info, counters=disk.counters)

    def _this_or_successor(self) -> CacheNode:
        """This node, or the one that takes its place in a forked child and after `close`."""
        return self if self._owner.is_this_process and not self.closed else cache_node(self.options)

    def open_passing_reader(self, origin: Origin, info: ObjectInfo) -> OriginReader:
        """Random access to an object from the source of missing blocks. Nothing is stored on this node."""
        name = object_id(origin.identity, info.key, info.version, info.size)
        disk = self.disk_of(name)
        counters = None if disk is None else disk.counters
        return OriginReader(source=self.source(origin, info, counters), info=info, counters=counters)

    @staticmethod
    def _locate(origin: Origin, info: ObjectInfo, name: bytes, disk: Disk) -> Location:
        """Where an object version is stored, or where its blocks will be stored."""
        index = disk.store.index
        if belongs_in_segment(info.size, index.get(name)):
            return SegmentLocation(disk, name, info.size, _name_of(origin, info))
        return FileLocation(disk, index.create(name, info.size, BLOCK_BYTES, _name_of(origin, info)))

    def _group_of(self, origin: Origin, info: ObjectInfo) -> str:
        """The data set of an object. The result for a listed directory is kept for a second: an index lookup is slow."""
        folder = (origin.identity, info.key.rpartition("/")[0])
        known = self._recent_groups.get(folder)
        if known is not None and time.monotonic() < known[1]:
            return known[0]
        root = self.metadata.listing_root(origin, info.key)
        group = group_of(origin.identity, info.key, root)
        if root is not None:
            if len(self._recent_groups) >= _RECENT_GROUPS:
                self._recent_groups.clear()
            self._recent_groups[folder] = (group, time.monotonic() + _GROUP_SECONDS)
        return group

    def discard(self, origin: Origin, info: ObjectInfo) -> None:
        """Remove one version of an object (it was overwritten or removed at the origin)."""
        name = object_id(origin.identity, info.key, info.version, info.size)
        disk = self.disk_of(name)
        if disk is not None:
            self._remove(disk, name)

    def drop_checkpoint_files(self, origin_identity: str, keys: Collection[str]) -> None:
        """Remove all versions of the checkpoint files among `keys`, which were removed at the origin."""
        files = {key for key in keys if key.endswith(CHECKPOINT_FILES)}
        for disk in self.open_disks if files else ():
            try:
                for name in disk.find_copies(origin_identity, files):
                    disk.remove(name)
            except StorageError as error:
                disk.report(error)

    def _remove(self, disk: Disk, name: bytes) -> None:
        """Remove an object. A disk error is reported and does not fail the caller."""
        try:
            disk.remove(name)
        except StorageError as error:
            disk.report(error)

    def counters(self, *, settled: bool = False) -> dict[str, int]:
        """The counters since the cache was created, over all processes and disks of this node.

        Other processes count their opens up to half a second late. `settled` waits for them, for at most
        `PATIENCE_SECONDS`: then the sums include all earlier opens.
        """
        sums, disks, now = dict.fromkeys(NAMES, 0), self.open_disks, time.monotonic_ns()
        for disk in disks:
            disk.add_up()
        if settled:
            wait_until_settled([disk.counters for disk in disks], now)
        for disk in self.all_disks:
            for name, value in disk.measures().counters.items():
                sums[name] += value
        return sums

    def disks(self) -> list[tuple[Path, int, int]]:
        """Directory, used bytes and capacity in bytes of every disk."""
        return [
            (disk.store.directory, disk.store.index.used_bytes(), disk.store.space.capacity_bytes())
            for disk in self.open_disks
        ]

    @property
    def open_disks(self) -> Sequence[Disk]:
        """The disks in use, without those that could not be opened or have failed since."""
        return [disk for disk in self._disks if not disk.failed]

    @property
    def all_disks(self) -> Sequence[Disk]:
        """The disks in use, and those that have failed since they were opened."""
        return self._disks

    def entries(self) -> list[Entry]:
        """The record of every cached object version, on any disk."""
        return [entry for disk in self.open_disks for entry in disk.store.index.entries()]

    def close(self) -> None:
        """Wait for fetches in progress. The disks stay open: other nodes of this process may use them."""
        self.closed = True
        self._threads.close()

    def disk_of(self, name: bytes) -> Disk | None:
        """The disk of an object, by its id and the disks' capacities. None if no disk can be used."""
        if len(self._disks) == 1:  # the usual case, on the path of every open
            return None if self._disks[0].failed else self._disks[0]
        disks = self.open_disks
        if len(disks) < 2:
            return disks[0] if disks else None
        by_directory = {str(disk.store.directory): disk for disk in disks}
        return by_directory[owners(name, ((place, self._weights[place]) for place in by_directory))[0]]

    def _give_up(self, disk: Disk, name: bytes, error: LostDataError) -> None:
        """Remove an object whose file was removed or truncated. It is fetched again."""
        emit(Event(name="cache.file.lost", subject=str(disk.store.directory), detail=str(error)))
        self._remove(disk, name)


def _clear_metadata(disk: Disk) -> bool:
    """Drop all metadata on a disk; returns whether its index could be changed."""
    try:
        PageMap(disk.store.index).clear()
    except StorageError as error:
        disk.report(error)
        return False
    return True


def _name_of(origin: Origin, info: ObjectInfo) -> ObjectName:
    return ObjectName(origin.identity, info.key, info.version)


class _Process:
    """The open caches of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.nodes: dict[CacheOptions, CacheNode] = {}
        self.disks: dict[Path, Disk] = {}
        self.unexpired: set[Path] = set()  # stores with metadata from before a write of this process


_process = _Process()


def cache_node(options: CacheOptions) -> CacheNode:
    """The cache of this process for `options`, made at first use."""
    node = _process.nodes.get(options)
    if node is None:
        with _process.lock:
            node = _process.nodes.get(options)
            if node is None:
                node = _process.nodes[options] = CacheNode(options)
    return node


def open_node(
    options: CacheOptions,
    *,
    source: MakeSource,
    metadata_source: MetadataSource,
    reopen: Callable[[], CacheNode],
) -> CacheNode:
    """Replace the cache of this process for `options`, because the process joins or leaves a cluster. See `CacheNode`.

    The new cache uses the disks and threads of the earlier one. Open readers keep the earlier one.
    """
    earlier = cache_node(options)
    node = CacheNode(options, source=source, metadata_source=metadata_source, reopen=reopen, earlier=earlier)
    _process.nodes[options] = node
    return node


def store_directory(cache_dir: Path, folder: str = LOCAL_FOLDER) -> Path:
    """The store of the node that has `folder` in a cache directory."""
    return cache_dir / _NODE_FOLDERS / folder


def first_open_disk() -> Disk | None:
    """A disk that this process has open and that works, if any."""
    return next((disk for disk in list(_process.disks.values()) if not disk.failed), None)


def default_store() -> Path | None:
    """The store of this machine with the default options; None if it was never used. Raises `MillraceError`."""
    (directory, *_) = resolve({}).cache_dirs
    if not _store_exists(directory):
        return None
    check_cache_dir(directory)  # another version may have made it
    return store_directory(directory)


def store_exists(options: CacheOptions) -> bool:
    """Whether any of the cache directories has been used before. Creates nothing. Raises `StorageError`."""
    return any(_store_exists(directory) for directory in options.cache_dirs)


def _store_exists(cache_dir: Path) -> bool:
    with disk_errors(cache_dir):
        return (store_directory(cache_dir) / "FORMAT").exists()


def check_cache_dir(cache_dir: Path) -> None:
    """Raise the error that opening the cache in `cache_dir` would raise for its present content. Creates nothing."""
    check_directory(store_directory(cache_dir))


def close_nodes() -> None:
    """Close every cache of this process; the next use opens them again. For tests."""
    with _process.lock:
        for node in _process.nodes.values():
            node.close()
        for disk in _process.disks.values():
            disk.close()
        _process.nodes.clear()
        _process.disks.clear()


def _disk(directory: Path, options: CacheOptions) -> Disk:
    """The disk in `directory`, opened at first use."""
    with _process.lock:
        disk = _process.disks.get(directory)
        if disk is None:
            with disk_errors(directory.parent):
                make_folder(directory.parent)
            disk = Disk(directory, options)
            if directory in _process.unexpired:
                disk.signals.expire_metadata(time.time())
                _process.unexpired.discard(directory)
            _process.disks[directory] = disk
    disk.limit(options)
    return disk


def _reset_after_fork() -> None:
    global _process
    for disk in _process.disks.values():
        disk.abandon()
    # The parent's objects are never closed here, not even by the interpreter at its end: that would wait for threads which
    # this process does not have. The extra reference keeps them alive.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_process))
    _process = _Process()


forks.reset_in_child(_reset_after_fork)
