"""This process's share in a node's cache: its disks, metadata and threads, put together once.

Every file system object of a process with the same options uses the same `CacheNode`. A forked child gets a new one (LMDB,
locks, threads and obstore's clients do not survive a fork); what the parent had is left alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from millrace.cache.asking import ASK_ORIGIN, Asking
from millrace.cache.blocks import BLOCK_BYTES, object_id
from millrace.cache.counters import NAMES, wait_until_settled
from millrace.cache.disk import Disk
from millrace.cache.failures import LostDataError, disk_errors
from millrace.cache.first_opens import FirstOpen
from millrace.cache.first_opens import find as find_first_open
from millrace.cache.groups import group_of
from millrace.cache.metadata import MetadataCache
from millrace.cache.native import NativeObject, open_entry
from millrace.cache.no_memory import NoMemory
from millrace.cache.page_map import PageMap
from millrace.cache.placement import owners
from millrace.cache.reader import BlockReader, ObjectReader, OriginReader
from millrace.cache.records import Entry, ObjectName
from millrace.cache.setup import check_directory
from millrace.cache.signals import Stamp
from millrace.cache.small import SmallReader, is_small
from millrace.cache.source import MakeSource, direct
from millrace.cache.threads import Pools, Threads
from millrace.cache.turns import Turns
from millrace.cache.usage import Use
from millrace.config import LOCAL_FOLDER, CacheOptions
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.origin import ObjectInfo, Origin
from millrace.private_files import make_folder

_log = logging.getLogger("millrace")

# Two pools: what somebody waits for does not lie in a queue behind what is only expected, see `fetching.py`.
_FETCH_THREADS = 24
_PREFETCH_THREADS = 16

_RECENT_GROUPS = 1000
_GROUP_SECONDS = 1.0

# Inside a cache directory each node has a folder of its own, named by `CacheOptions.folder`.
_NODE_FOLDERS = "millrace"


class Seen(NamedTuple):
    """The numbers of a disk's index as of one moment."""

    disk: Disk
    stamp: Stamp


class CacheNode:
    """The cache of this node, as one process sees it. Thread-safe. Get it by `cache_node`, never directly."""

    def __init__(self, options: CacheOptions) -> None:
        self.options = options
        self.source: MakeSource = direct
        """Where what is not here comes from; a cluster puts its own in this place before the node is used."""
        self.again: Callable[[], CacheNode] = lambda: cache_node(options)
        """This node as a forked child has it; a cluster puts its own in this place, too."""
        self.asking: Asking = ASK_ORIGIN
        """Whom to ask about keys; a cluster puts its own in this place, too."""
        self.closed = False
        self._disks = _open_disks(options)
        self._threads = Pools(
            demand=ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="millrace-fetch"),
            ahead=ThreadPoolExecutor(_PREFETCH_THREADS, thread_name_prefix="millrace-ahead"),
        )
        self._recent_groups: dict[tuple[str, str], tuple[str, float]] = {}
        self._weights = {str(disk.store.directory): _weight(disk, options) for disk in self._disks}
        self._turns: dict[Disk, Turns] = {}
        self._metadata, self._metadata_disk = self._remember_on_first_disk()

    @property
    def metadata(self) -> MetadataCache | NoMemory:
        """What is known of the origin, remembered on the first disk that works."""
        if self._metadata_disk is not None and self._metadata_disk.failed:
            self._metadata, self._metadata_disk = self._remember_on_first_disk()
        return self._metadata

    def _remember_on_first_disk(self) -> tuple[MetadataCache | NoMemory, Disk | None]:
        disk = next(iter(self.open_disks), None)
        if disk is None:
            return NoMemory(lambda: self.asking), None
        return self._remember_on(disk, self.options.max_age_seconds), disk

    def _remember_on(self, disk: Disk, max_age_seconds: float) -> MetadataCache:
        return MetadataCache(
            PageMap(disk.store.index),
            self._turns.setdefault(disk, Turns(disk.locks)),  # one for all: who asks at the same time asks once
            max_age_seconds=max_age_seconds,
            on_changed=self.discard,
            report=disk.report,
            asking=lambda: self.asking,
        )

    def metadata_within(self, max_age_seconds: float) -> MetadataCache | NoMemory:
        """The same memory as `metadata`, believed for another time than the options say."""
        metadata = self.metadata
        if self._metadata_disk is None:
            return metadata
        return self._remember_on(self._metadata_disk, max_age_seconds)

    def open_native(self, origin: Origin, info: ObjectInfo) -> pa.BufferReader | None:
        """A native pyarrow file of an object that is completely here, else None."""
        found = self.find_native(origin, info)
        return None if found is None else pa.BufferReader(found.buffer)

    def find_native(self, origin: Origin, info: ObjectInfo, seen: Seen | None = None) -> NativeObject | None:
        """The memory of an object that is completely here, else None. Counts as one use of it.

        `seen` is what `changes` gave before the metadata was asked.
        """
        if not self.options.native:
            return None
        name = object_id(origin.identity, info.key, info.version, info.size)
        disk = self._disk_of(name)
        if disk is None:
            return None
        try:
            # What was noted before the metadata was asked was noted before the record is read, too.
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
            disk.keep_house()
            disk.usage.touched(Use(found.entry))
        return found

    def find_known(self, origin: Origin, key: str) -> FirstOpen | None:
        """What `changes`, the metadata and `find_native` say of a key, by one look at the index.

        None when that is not enough, or fails: then ask them. Unlike these it counts as no use: the caller notes it.
        """
        disk = self._metadata_disk
        if disk is None or disk.failed or len(self._disks) > 1 or not self.options.native:
            return None
        metadata = self._metadata
        if isinstance(metadata, NoMemory):
            return None
        try:
            first = find_first_open(disk, metadata, origin.identity, key, metadata.belief_in(origin, key))
        except StorageError:
            return None  # the long way meets the same error, and tells of it
        if first is not None:
            disk.keep_house()
        return first

    def changes(self) -> Seen | None:
        """The numbers of the disk that has the metadata, to be taken before the metadata is asked.

        What it then says holds while they are the same. None when one is just being changed, or nothing is remembered.
        """
        disk = self._metadata_disk
        if disk is None or disk.failed:
            return None
        try:
            stamp = disk.store.index.stamp()
        except StorageError as error:
            disk.report(error)
            return None
        return None if stamp is None else Seen(disk, stamp)

    def open_reader(
        self, origin: Origin, info: ObjectInfo, *, threads: Threads | None = None, source: MakeSource | None = None
    ) -> ObjectReader:
        """Random access to an object, from here and from the origin. The caller closes it.

        `threads` fetch for it in place of the node's own, from `source` in place of the node's.
        A disk that cannot be used costs the cache, not the read: the bytes then come straight from the origin.
        """
        make = source or self.source
        name = object_id(origin.identity, info.key, info.version, info.size)
        disk = self._disk_of(name)
        if disk is None:
            return OriginReader(source=make(origin, info, name, None), info=info, counters=None)
        disk.keep_house()
        for _ in range(2):
            try:
                if is_small(info.size, disk.store.index.get(name)):
                    return self._small_reader(origin, info, name, disk, threads or self._threads, make)
                entry = disk.store.index.create(name, info.size, BLOCK_BYTES, _name_of(origin, info))
                return BlockReader(
                    source=make(origin, info, name, disk.counters),
                    info=info,
                    entry=entry,
                    disk=disk,
                    threads=threads or self._threads,
                    verify=not self.options.native,
                    group=lambda: self._group_of(origin, info),
                    reopen=lambda: self.again().open_reader(origin, info),
                )
            except LostDataError as error:
                self._give_up(disk, name, error)
            except StorageError as error:
                disk.report(error)
                break
        return OriginReader(source=make(origin, info, name, disk.counters), info=info, counters=disk.counters)

    def _small_reader(
        self, origin: Origin, info: ObjectInfo, name: bytes, disk: Disk, threads: Threads, make: MakeSource
    ) -> SmallReader:
        return SmallReader(
            source=make(origin, info, name, disk.counters),
            origin=origin,
            info=info,
            object_id=name,
            disk=disk,
            threads=threads,
            verify=not self.options.native,
            group=lambda: self._group_of(origin, info),
            reopen=lambda: self.again().open_reader(origin, info),
        )

    def _group_of(self, origin: Origin, info: ObjectInfo) -> str:
        """The data set of an object. Of a folder that was listed the answer holds for a second: asking the index is slow."""
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
        """Forget one version of an object (it was overwritten or removed at the origin)."""
        name = object_id(origin.identity, info.key, info.version, info.size)
        disk = self._disk_of(name)
        if disk is not None:
            self._remove(disk, name)

    def _remove(self, disk: Disk, name: bytes) -> None:
        """Forget an object; a disk in trouble costs nobody his answer."""
        try:
            disk.remove(name)
        except StorageError as error:
            disk.report(error)

    def counters(self, *, settled: bool = False) -> dict[str, int]:
        """What the cache did since it was made, over all processes and disks of this node.

        Other processes count their opens up to half a second late. `settled` waits for them: what was opened before is
        in the sums, whoever did it, unless a process does not get to it for `PATIENCE_SECONDS`.
        """
        sums, disks, now = dict.fromkeys(NAMES, 0), self.open_disks, time.monotonic_ns()
        for disk in disks:
            disk.add_up()
        if settled:
            wait_until_settled([disk.counters for disk in disks], now)
        for disk in disks:
            for name, value in disk.counters.totals().items():
                sums[name] += value
        return sums

    def disks(self) -> list[tuple[Path, int, int]]:
        """Directory, used bytes and capacity in bytes of every disk."""
        return [
            (disk.store.directory, disk.store.index.used_bytes(), disk.store.capacity_bytes())
            for disk in self.open_disks
        ]

    @property
    def open_disks(self) -> Sequence[Disk]:
        """The disks that this node uses; one that could not be opened, or has failed since, is not among them."""
        return [disk for disk in self._disks if not disk.failed]

    def entries(self) -> list[Entry]:
        """The record of every object version that is here, on any disk."""
        return [entry for disk in self.open_disks for entry in disk.store.index.entries()]

    def close(self) -> None:
        """Wait for fetches under way. The disks stay open: other nodes of this process may use them."""
        self.closed = True
        self._threads.close()

    def disk_of(self, name: bytes) -> Disk | None:
        """The disk that an object is on, if it is here, by its id; None when no disk can be used."""
        return self._disk_of(name)

    def _disk_of(self, name: bytes) -> Disk | None:
        """Objects are spread over the disks by their id and the disks' capacities. None when no disk can be used."""
        if len(self._disks) == 1:  # the usual case, in the way of every open
            return None if self._disks[0].failed else self._disks[0]
        disks = self.open_disks
        if len(disks) < 2:
            return disks[0] if disks else None
        by_directory = {str(disk.store.directory): disk for disk in disks}
        return by_directory[owners(name, ((place, self._weights[place]) for place in by_directory))[0]]

    def _give_up(self, disk: Disk, name: bytes, error: LostDataError) -> None:
        """Forget an object whose file somebody removed or cut; it is fetched anew."""
        emit(Event(name="cache.file.lost", subject=str(disk.store.directory), detail=str(error)))
        self._remove(disk, name)


def _name_of(origin: Origin, info: ObjectInfo) -> ObjectName:
    return ObjectName(origin.identity, info.key, info.version)


class _Process:
    """What this process has open."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.nodes: dict[CacheOptions, CacheNode] = {}
        self.disks: dict[Path, Disk] = {}


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


def store_directory(cache_dir: Path, folder: str = LOCAL_FOLDER) -> Path:
    """The store of the node that has `folder` in a cache directory."""
    return cache_dir / _NODE_FOLDERS / folder


def store_exists(options: CacheOptions) -> bool:
    """Whether any of the cache directories has been used before. Makes nothing. Raises `StorageError`."""
    return any(_store_exists(directory) for directory in options.cache_dirs)


def _store_exists(cache_dir: Path) -> bool:
    with disk_errors(cache_dir):
        return (store_directory(cache_dir) / "FORMAT").exists()


def check_cache_dir(cache_dir: Path) -> None:
    """Raise what opening the cache in `cache_dir` would because of what lies there already. Makes nothing."""
    check_directory(store_directory(cache_dir))


def nodes_are_open() -> bool:
    """Whether this process has any cache open."""
    return bool(_process.nodes or _process.disks)


def close_nodes() -> None:
    """Close every cache of this process; the next use opens them again. For tests."""
    with _process.lock:
        for node in _process.nodes.values():
            node.close()
        for disk in _process.disks.values():
            disk.close()
        _process.nodes.clear()
        _process.disks.clear()


def _weight(disk: Disk, options: CacheOptions) -> float:
    """What share of the objects a disk gets: that of the capacities in the options, which all processes of a node have.

    Not of the present limits: a resize at run time must not move objects to where nobody has them.
    """
    return float(max(1, options.capacity.of(shutil.disk_usage(disk.store.directory).total)))


def _open_disks(options: CacheOptions) -> list[Disk]:
    """The disks that can be used. One that is full, read-only or broken is left out, and said aloud.

    Raises `ConfigurationError` or `UnsupportedFormatError` for a directory that holds something else.
    """
    disks = []
    for directory in options.cache_dirs:
        try:
            disks.append(_disk(store_directory(directory, options.folder), options))
        except StorageError as error:
            emit(Event(name="cache.disk.failed", subject=str(directory), detail=str(error)))
            _log.warning("no caching in %s: %s", directory, error)
    return disks


def _disk(directory: Path, options: CacheOptions) -> Disk:
    """The disk in `directory`, opened at first use."""
    with _process.lock:
        disk = _process.disks.get(directory)
        if disk is None:
            with disk_errors(directory.parent):
                make_folder(directory.parent)
            disk = _process.disks[directory] = Disk(directory, options)
    disk.limit(options)
    return disk


def _forget_after_fork() -> None:
    global _process
    for disk in _process.disks.values():
        disk.abandon()
    # What the parent had is never closed here, not even by the interpreter at its end: that would wait for threads which
    # this process does not have. The extra reference keeps it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_process))
    _process = _Process()


os.register_at_fork(after_in_child=_forget_after_fork)
