"""What the last opens of a process found, so that the next open of the same path costs about a microsecond.

An open asks three things: what the path names now, whether all of it is here, and where. The answers stay true until
somebody writes or removes something, which raises a number in a page that all processes of the node map (`signals.py`), or
until the metadata expires. So an entry carries those numbers and that time, and a hit compares them instead of asking.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa

from millrace.cache.maps import MapSlot, will_need
from millrace.cache.native import NativeObject
from millrace.cache.signals import Signals, Stamp
from millrace.cache.usage import Use
from millrace.errors import StorageError
from millrace.filesystem import opens

_MAX_ENTRIES = 1 << 16
_IDLE_SECONDS = 10.0  # what was not used for longer may be out of memory by now


class HotOpen(Use):
    """What one path stands for. It refers to a map by its slot, and so keeps neither memory nor disk space.

    It holds while the numbers of the signals are these: `changes` of the index that has the metadata, `removals` of the
    store that has the bytes.
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
        # In the way of every first open: by position, and without the base class.
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
        self.last = since  # it was just read, or asked for
        self.touched = disk.usage.touched


class HotOpens:
    """Recent opens of one file system in this process, by the path as the caller wrote it.

    Holds the last 32,768 to 65,536 paths: they are in two generations, and when the young one is full, the old one goes.
    Thread-safe without a lock: every step is one operation on a dict, and threads that meet at the change of generations
    lose entries at worst, which are then found again the long way. After a fork all entries are void, as their maps are.
    """

    def __init__(self, *, max_entries: int = _MAX_ENTRIES) -> None:
        self.clock: Callable[[], float] = time.time
        self._young: dict[str, HotOpen] = {}
        self._old: dict[str, HotOpen] = {}
        self._limit = max_entries // 2

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, path: str) -> pa.Buffer | None:
        """All bytes of what `path` names, if that is still known; counts as a use. None: ask the long way."""
        hot = self._young.get(path)
        if hot is None:
            hot = self._old.pop(path, None)
            if hot is None:
                return None
            self._put(path, hot)
        slot = hot.slot
        buffer = slot.buffer
        # Where the cache was closed, or inherited by a fork, there is no buffer.
        # A clock that was put back says nothing about how old this is.
        if buffer is None or not hot.since <= (now := self.clock()) < hot.until:
            return None
        try:
            if hot.metadata[1] != hot.changes or (hot.signals[0] != hot.removals and not _renew(hot)):
                return None
        except ValueError:  # the disk that has the metadata was closed: its signals are not mapped any more
            return None
        slot.used = True
        hot.touched(hot)
        if opens.listeners:
            opens.tell(hot.entry.name.origin, hot.entry.name.key)
        if hot.whole:
            return buffer
        piece = buffer.slice(hot.offset, hot.entry.size)
        if now - hot.last > _IDLE_SECONDS:
            will_need(piece)
        hot.last = now
        return piece

    def keep(self, path: str, found: NativeObject, *, until: float, changes: tuple[Signals, int]) -> HotOpen | None:
        """Remember an open, as long as nothing changes, but not longer than `until`. A private copy is not kept."""
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


def _renew(hot: HotOpen) -> bool:
    """After something was removed from the store: whether it was something else. One look at the index."""
    index = hot.disk.store.index
    try:
        stamp: Stamp | None = index.stamp()
        if stamp is None or index.get(hot.entry.object_id) != hot.entry:
            return False
    except StorageError:
        return False  # the long way meets the same error, and tells of it
    hot.removals = stamp.removals
    return True
