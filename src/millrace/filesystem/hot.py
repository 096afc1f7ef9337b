"""Results of recent opens of this process: the next open of the same path costs about a microsecond.

An open looks up the object of the path, whether all of it is cached, and where. The results are valid until a write or a
removal increments a number in a page that all processes of the node map (`signals.py`), or until the metadata expires. An
entry contains those numbers and that time, and a hit compares them instead of repeating the lookups.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable

import pyarrow as pa

from millrace.cache.eviction.usage import AccessRecord
from millrace.cache.reading.locations import NativeObject
from millrace.errors import StorageError, shown_key
from millrace.events import Hooks
from millrace.runtime import forks
from millrace.store.maps import MapSlot, will_need
from millrace.store.records import Entry
from millrace.store.signals import Signals, Stamp

_log = logging.getLogger("millrace.filesystem")

open_hooks: Hooks[[str, str]] = Hooks("open hook")
"""Called with the identity of the origin and the key when this process opens an object, in the thread that opens it.

An open without hooks costs one truth test: `if open_hooks.registered: open_hooks.call(...)`. A forked child has none.
"""

forks.reset_in_child(open_hooks.registered.clear)


def log_mapped(entry: Entry, began: float) -> None:
    """Log at DEBUG an open that is served by a memory map. `began` is in seconds of `time.time`.

    Opens of the same path by the same process are logged from then on: they log only where there is a hook.
    """
    if _log.isEnabledFor(logging.DEBUG):
        key, seconds = shown_key(entry.name.key), time.time() - began
        _log.debug("%s: all %d bytes mapped in %.6f s", key, entry.size, seconds)
        if not open_hooks.registered:
            _keep_logging()


def _keep_logging() -> None:
    """Have `open_hooks` in use until DEBUG is disabled, so that opens from a map are logged, too."""

    def check_level(identity: str, key: str) -> None:
        if not _log.isEnabledFor(logging.DEBUG):
            remove()

    remove = open_hooks.add(check_level)


_MAX_ENTRIES = 1 << 16
_IDLE_SECONDS = 10.0  # after this time the kernel may have dropped the pages


class HotOpen(AccessRecord):
    """The result of opening one path. It refers to a map by its slot, and so keeps neither memory nor disk space.

    Valid while the numbers of the signals are equal to `changes` (index of the metadata) and `removals` (store of the
    bytes).
    """

    __slots__ = (
        "changes",
        "disk",
        "last",
        "metadata",
        "offset",
        "removals",
        "signals",
        "since",
        "slot",
        "touched",
        "until",
        "whole",
    )

    def __init__(
        self,
        found: NativeObject,
        slot: MapSlot,
        removals: int,
        since: float,
        until: float,
        changes: tuple[Signals, int],
    ) -> None:
        # On the path of every first open: positional, and without the base class.
        self.entry = found.entry
        self.disk = disk = found.disk
        self.slot = slot
        self.offset = found.offset
        self.whole = found.offset == 0 and found.buffer is slot.buffer
        self.since = since
        self.until = until
        self.signals = disk.store.index.signals.numbers
        self.removals = removals
        self.metadata = changes[0].numbers
        self.changes = changes[1]
        self.last = since  # just read or requested
        self.touched = disk.usage.touched


class HotOpens:
    """Recent opens of one file system in this process, by the path as the caller wrote it.

    Keeps the last 32,768 to 65,536 paths in two generations; when the young one is full, the old one is dropped. Thread-safe
    without a lock: every step is one operation on a dict, and threads that change generations at the same time lose entries
    at worst, which a full lookup finds again. After a fork all entries are invalid, as their maps are.
    """

    def __init__(self, *, max_entries: int = _MAX_ENTRIES) -> None:
        self.clock: Callable[[], float] = time.time
        self._young: dict[str, HotOpen] = {}
        self._old: dict[str, HotOpen] = {}
        self._limit = max_entries // 2
        _all.add(self)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, path: str) -> pa.Buffer | None:
        """All bytes of the object at `path`, if its entry is valid; counts as a use. None: a full lookup is needed."""
        hot = self._young.get(path)
        if hot is None:
            hot = self._old.pop(path, None)
            if hot is None:
                return None
            self._put(path, hot)
        slot = hot.slot
        buffer = slot.buffer
        # There is no buffer if the cache was closed or inherited by a fork.
        # If the clock was set back, the age is unknown.
        if buffer is None or not hot.since <= (now := self.clock()) < hot.until:
            return None
        try:
            if hot.metadata[1] != hot.changes or (hot.signals[0] != hot.removals and not _renew(hot)):
                return None
        except ValueError:  # the disk of the metadata was closed, and its signals are unmapped
            return None
        slot.used = True
        hot.touched(hot)
        if open_hooks.registered:
            open_hooks.call(hot.entry.name.origin, hot.entry.name.key)
            log_mapped(hot.entry, now)
        if hot.whole:
            return buffer
        piece = buffer.slice(hot.offset, hot.entry.size)
        if now - hot.last > _IDLE_SECONDS:
            will_need(piece)
        hot.last = now
        return piece

    def keep(self, path: str, found: NativeObject, *, until: float, changes: tuple[Signals, int]) -> HotOpen | None:
        """Keep an open until something changes, at most until `until`. A private copy is not kept."""
        if found.slot is None or found.removals is None:
            return None
        hot = HotOpen(found, found.slot, found.removals, self.clock(), until, changes)
        self._put(path, hot)
        return hot

    def _put(self, path: str, hot: HotOpen) -> None:
        young = self._young
        if len(young) >= self._limit and path not in young:
            self._old, self._young = young, {path: hot}
        else:
            young[path] = hot


_all: weakref.WeakSet[HotOpens] = weakref.WeakSet()


def drop_hot_opens() -> None:
    """Drop the opens of all file systems of this process, after a change that could not be written to the index."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread creates a file system
            kept = list(_all)
            break
    for opens in kept:
        opens._young, opens._old = {}, {}


def _renew(hot: HotOpen) -> bool:
    """Whether the object is still stored after a removal from the store. One lookup in the index."""
    index = hot.disk.store.index
    try:
        stamp: Stamp | None = index.stamp()
        if stamp is None or index.get(hot.entry.object_id) != hot.entry:
            return False
    except StorageError:
        return False  # the full lookup raises and reports the same error
    hot.removals = stamp.removals
    return True
