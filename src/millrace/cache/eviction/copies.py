"""Which units of a store use only spare space, and are evicted first: copies that other nodes own, and checkpoint files.

A checkpoint is read once per start of a job, and its origin keeps it. So on every node, also on its owner, its files count
as copies: no other data is evicted for them, and all other data replaces them.

A unit is marked when a copy is kept (`usage_records.py`). A mark is a hint: owners change with the members of the cluster,
so the evictor calls `still_a_copy`, which uses the present placement. A unit that this node owns now loses
its mark. After the opposite change, when units of this node have new owners, `mark_all` checks every unit.

An object with its own file is a copy if this node should hold no part of it. A segment is a copy if this is true for all
its objects, of which 32 are checked. If one in ten is owned, one such segment in thirty is taken for a copy; if one in 4 is,
none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from enum import Enum

from millrace.cache.eviction.usage import CHECKPOINT_FILES
from millrace.cache.eviction.usage_records import Draw, UnitRecord, UsageRecords
from millrace.store.index import Index

StillACopy = Callable[[bytes, int], bool]
"""Whether another node owns all of the object with this id and size in bytes. Thread-safe, quick, never raises."""

_SAMPLED_ENTRIES = 32
_RESULT_SECONDS = 1.0  # for which the result of a segment is kept
_MAX_RESULTS = 4096
_PAGE = 1000
_DRAWS = 8  # each twice as large as the one before
_DRAWS_ALONE = 2  # without a cluster only checkpoint files are copies, and the marks of others stay

_RESTORE_SECONDS = 600.0
"""Checkpoint files that were used within this time are not replaced by those of another checkpoint."""


class Keep(Enum):
    """The units that may be evicted to store bytes that were just fetched."""

    OWNED = "owned"
    """Other nodes read these bytes from this node: they compete with cached objects by the usual policy."""
    COPY = "copy"
    """Another node owns them: they are stored in spare space only, and are evicted first."""
    CHECKPOINT = "checkpoint"
    """They belong to a checkpoint: as `COPY`, on every node. They may replace older checkpoint files."""


class Copies:
    """The copies in the store with this index. Thread- and process-safe; raises `StorageError` when the disk fails.

    `still_a_copy` is set when a process joins a cluster (`CacheNode.distinguish_copies`). It is None without a cluster, and
    for a client of a cluster: then only checkpoint files are copies.
    """

    def __init__(self, index: Index, records: UsageRecords) -> None:
        self._index = index
        self._records = records
        self._results: dict[int, tuple[float, bool]] = {}
        self.still_a_copy: StillACopy | None = None

    def draw(self, count: int) -> Draw:
        """About `count` random copies, by the present placement.

        None if no copies are left, or if this node owns the first two thousand that were checked.
        """
        attempts = _DRAWS if self.still_a_copy is not None else _DRAWS_ALONE
        for attempt in range(attempts if self._records.copy_count() else 0):
            drawn = self._records.draw_copies(count << attempt)
            copies = [record for record in drawn.records if self.is_copy(record)]
            owned = {record.unit.key for record in drawn.records} - {record.unit.key for record in copies}
            if owned and self.still_a_copy is not None:
                self._records.mark_copies(owned, copy=False)
            if copies or not self._records.copy_count():
                return Draw(copies, drawn.groups, drawn.clock)
        return Draw((), {}, 0)

    def is_copy(self, record: UnitRecord) -> bool:
        """Whether a unit is marked, and its mark still true."""
        return record.unit.copy and self._is_of_others(record)

    def is_idle_checkpoint(self, record: UnitRecord) -> bool:
        """Whether a unit with its own file belongs to a checkpoint that is not being restored."""
        return not record.segment and time.time() - record.used_at > _RESTORE_SECONDS and self._is_checkpoint(record)

    def find(self, origin_identity: str, keys: Collection[str]) -> list[bytes]:
        """The ids of the cached objects with these keys in units that are marked."""
        found: list[bytes] = []
        for record in self._records.draw_copies(self._records.copy_count()).records:
            entry = None if record.segment else self._index.get(record.unit.key)
            entries = self._index.entries_in(record.segment) if record.segment else [entry] if entry else []
            names = ((each.object_id, each.name) for each in entries)
            found += [name for name, of in names if of.origin == origin_identity and of.key in keys]
        return found

    def mark_all(self) -> int:
        """Mark all units that this node should not hold, after owners have changed. Returns the number of new marks."""
        marked = 0
        after = b""
        self._results.clear()
        while self.still_a_copy is not None and (page := self._records.page(after, _PAGE)):
            after = page[-1].unit.key
            new = [record.unit.key for record in page if not record.unit.copy and self._is_of_others(record)]
            if new:
                self._records.mark_copies(new, copy=True)
                marked += len(new)
        return marked

    def _is_of_others(self, record: UnitRecord) -> bool:
        still_a_copy = self.still_a_copy
        if not record.segment:
            if still_a_copy is not None and still_a_copy(record.unit.key, record.unit.nbytes):
                return True
            return self._is_checkpoint(record)
        now = time.monotonic()
        until, result = self._results.get(record.segment, (0.0, False))
        if now >= until:
            some = self._index.entries_in(record.segment, limit=_SAMPLED_ENTRIES)
            result = all(
                entry.name.key.endswith(CHECKPOINT_FILES)
                or (still_a_copy is not None and still_a_copy(entry.object_id, entry.size))
                for entry in some
            )
            if len(self._results) >= _MAX_RESULTS:
                self._results.clear()
            self._results[record.segment] = (now + _RESULT_SECONDS, result)
        return result

    def _is_checkpoint(self, record: UnitRecord) -> bool:
        entry = self._index.get(record.unit.key)
        return entry is not None and entry.name.key.endswith(CHECKPOINT_FILES)
