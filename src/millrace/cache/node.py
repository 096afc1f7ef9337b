"""This process's share in a node's cache: its stores, metadata, maps, fetches and threads, put together once.

Every file system object of a process with the same options uses the same `CacheNode`. A forked child gets a new one (LMDB,
locks, threads and obstore's clients do not survive a fork); what the parent had is left alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from millrace.cache.blocks import BLOCK_BYTES, object_id
from millrace.cache.counters import NAMES, Counters
from millrace.cache.flight import Flights, ProcessLocks
from millrace.cache.held import HeldBlocks
from millrace.cache.index import Entry
from millrace.cache.maps import MapCache
from millrace.cache.metadata import MetadataCache
from millrace.cache.reader import ObjectReader
from millrace.cache.store import Store
from millrace.config import CacheOptions
from millrace.events import Event, emit
from millrace.origin import ObjectInfo, Origin

_log = logging.getLogger("millrace")

_FETCH_THREADS = 24

# The folder of a node inside a cache directory. Nodes that share a directory will each have a folder of their own.
_NODE_FOLDER = Path("millrace", "local")


class CacheNode:
    """The cache of this node, as one process sees it. Thread-safe. Get it by `cache_node`, never directly."""

    def __init__(self, options: CacheOptions) -> None:
        self.options = options
        self._disks = [_disk(directory / _NODE_FOLDER, options) for directory in options.cache_dirs]
        self._maps = MapCache()
        self._flights = Flights()
        self._held = HeldBlocks()
        self._executor = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="millrace-fetch")
        self.metadata = MetadataCache(
            self._disks[0].store.index, max_age_seconds=options.max_age_seconds, on_changed=self.discard
        )

    def open_native(self, origin: Origin, info: ObjectInfo) -> pa.BufferReader | None:
        """A native pyarrow file of an object that is completely here, else None."""
        if not self.options.native:
            return None
        name = object_id(origin.identity, info.key, info.version, info.size)
        disk = self._disk_of(name)
        entry = disk.store.index.get(name)
        if entry is None or not entry.complete:
            return None
        try:
            file = self._maps.open(disk.store.path(entry), entry.size)
        except FileNotFoundError:
            # Removed between the look-up and the open, or by hand: it is read anew.
            disk.store.remove(name)
            return None
        disk.counters.add("native_opens")
        disk.counters.add("cache_bytes", entry.size)
        return file

    def open_reader(self, origin: Origin, info: ObjectInfo) -> ObjectReader:
        """Random access to an object, from here and from the origin. The caller closes it."""
        name = object_id(origin.identity, info.key, info.version, info.size)
        disk = self._disk_of(name)
        return ObjectReader(
            origin=origin,
            info=info,
            entry=disk.store.index.create(name, info.size, BLOCK_BYTES),
            store=disk.store,
            flights=self._flights,
            held=self._held,
            locks=disk.locks,
            counters=disk.counters,
            executor=self._executor,
            verify=not self.options.native,
            on_full=disk.report_full,
        )

    def discard(self, origin: Origin, info: ObjectInfo) -> None:
        """Forget one version of an object (it was overwritten or removed at the origin)."""
        name = object_id(origin.identity, info.key, info.version, info.size)
        self._disk_of(name).store.remove(name)

    def counters(self) -> dict[str, int]:
        """What the cache did since it was made, over all processes and disks of this node."""
        sums = dict.fromkeys(NAMES, 0)
        for disk in self._disks:
            for name, value in disk.counters.totals().items():
                sums[name] += value
        return sums

    def disks(self) -> list[tuple[Path, int, int]]:
        """Directory, used bytes and capacity in bytes of every disk."""
        return [
            (disk.store.directory, disk.store.index.used_bytes(), disk.store.capacity_bytes()) for disk in self._disks
        ]

    def entries(self) -> list[Entry]:
        """The record of every object version that is here, on any disk."""
        return [entry for disk in self._disks for entry in disk.store.index.entries()]

    def close(self) -> None:
        """Wait for fetches under way. The disks stay open: other nodes of this process may use them."""
        self._executor.shutdown(wait=True)

    def _disk_of(self, name: bytes) -> _Disk:
        """Objects are spread over the disks by their id."""
        return self._disks[int.from_bytes(name[:4], "big") % len(self._disks)]


class _Disk:
    """One cache directory with everything that belongs to it. One a process, since LMDB opens an index once."""

    def __init__(self, directory: Path, options: CacheOptions) -> None:
        self.store = Store(directory, capacity=options.capacity, min_free=options.min_free)
        self.locks = ProcessLocks(directory / "locks")
        self.counters = Counters(directory / "counters")
        self._full_reported = False

    def report_full(self) -> None:
        """Say once a process that reads go on without being kept: nobody should find out by a slow second epoch."""
        if not self._full_reported:
            self._full_reported = True
            emit(Event(name="cache.full", subject=str(self.store.directory)))
            _log.warning(
                "the cache in %s is full (capacity %.1f GB, used %.1f GB, or min_free is reached): reads go on uncached",
                self.store.directory,
                self.store.capacity_bytes() / 1e9,
                self.store.index.used_bytes() / 1e9,
            )

    def close(self) -> None:
        self.counters.close()
        self.locks.close()
        self.store.close()


class _Process:
    """What this process has open."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.nodes: dict[CacheOptions, CacheNode] = {}
        self.disks: dict[Path, _Disk] = {}


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


def store_exists(options: CacheOptions) -> bool:
    """Whether any of the cache directories has been used before. Makes nothing."""
    return any((directory / _NODE_FOLDER / "FORMAT").exists() for directory in options.cache_dirs)


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


def _disk(directory: Path, options: CacheOptions) -> _Disk:
    """The disk in `directory`, opened at first use; the newest options set its limits."""
    disk = _process.disks.get(directory)
    if disk is None:
        disk = _process.disks[directory] = _Disk(directory, options)
    disk.store.set_limits(capacity=options.capacity, min_free=options.min_free)
    return disk


def _forget_after_fork() -> None:
    global _process
    # What the parent had is never closed here, not even by the interpreter at its end: that would wait for threads which
    # this process does not have. The extra reference keeps it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_process))
    _process = _Process()


os.register_at_fork(after_in_child=_forget_after_fork)
