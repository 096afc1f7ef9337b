"""Which units of a store are copies that other nodes own: they use spare space, and are evicted first.

A unit is marked when a copy is kept (`usage_records.py`). A mark is a hint: owners change with the members of the cluster,
so the evictor calls `still_a_copy`, which uses the present placement. A unit that this node owns now loses
its mark. After the opposite change, when units of this node have new owners, `mark_all` checks every unit.

An object with its own file is a copy if this node should hold no part of it. A segment is a copy if this is true for all
its objects, of which 32 are checked. If one in ten is owned, one such segment in thirty is taken for a copy; if one in 4 is,
none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

from millrace.cache.eviction.usage_records import Draw, UnitRecord, UsageRecords
from millrace.store.index import Index

StillACopy = Callable[[bytes, int], bool]
"""Whether another node owns all of the object with this id and size in bytes. Thread-safe, quick, never raises."""

_ASKED_OF_A_SEGMENT = 32
_ANSWER_SECONDS = 1.0  # for which the result of a segment is kept
_MAX_ANSWERS = 4096
_PAGE = 1000
_DRAWS = 8  # each twice as large as the one before


class Keep(Enum):
    """The units that may be evicted to store bytes that were just fetched."""

    OWNED = "owned"
    """Other nodes read these bytes from this node: they compete with cached objects by the usual policy."""
    COPY = "copy"
    """Another node owns them: they are stored in spare space only, and are evicted first."""


class Copies:
    """The copies in the store with this index. Thread- and process-safe; raises `StorageError` when the disk fails.

    `still_a_copy` is None on a node without a cluster, and for a client of a cluster: then nothing is a copy.
    """

    def __init__(self, index: Index, records: UsageRecords) -> None:
        self._index = index
        self._records = records
        self._answers: dict[int, tuple[float, bool]] = {}
        self.still_a_copy: StillACopy | None = None

    @property
    def are_told_apart(self) -> bool:
        """Whether units of this store can be copies."""
        return self.still_a_copy is not None

    def draw(self, count: int) -> Draw:
        """About `count` random copies, by the present placement.

        None if no copies are left, or if this node owns the first two thousand that were checked.
        """
        for attempt in range(_DRAWS if self.still_a_copy is not None else 0):
            drawn = self._records.draw_copies(count << attempt)
            copies = [record for record in drawn.records if self.is_copy(record)]
            owned = {record.unit.key for record in drawn.records} - {record.unit.key for record in copies}
            if owned:
                self._records.mark_copies(owned, copy=False)
            if copies or not self._records.copy_count():
                return Draw(copies, drawn.groups, drawn.clock)
        return Draw((), {}, 0)

    def is_copy(self, record: UnitRecord) -> bool:
        """Whether a unit is marked, and its mark still true."""
        return record.unit.copy and self._is_of_others(record)

    def mark_all(self) -> int:
        """Mark all units that this node should not hold, after owners have changed. Returns the number of new marks."""
        marked = 0
        after = b""
        self._answers.clear()
        while self.still_a_copy is not None and (page := self._records.page(after, _PAGE)):
            after = page[-1].unit.key
            new = [record.unit.key for record in page if not record.unit.copy and self._is_of_others(record)]
            if new:
                self._records.mark_copies(new, copy=True)
                marked += len(new)
        return marked

    def _is_of_others(self, record: UnitRecord) -> bool:
        ask = self.still_a_copy
        if ask is None:
            return False
        if not record.segment:
            return ask(record.unit.key, record.unit.nbytes)
        now = time.monotonic()
        until, answer = self._answers.get(record.segment, (0.0, False))
        if now >= until:
            some = self._index.entries_in(record.segment, limit=_ASKED_OF_A_SEGMENT)
            answer = all(ask(entry.object_id, entry.size) for entry in some)
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            self._answers[record.segment] = (now + _ANSWER_SECONDS, answer)
        return answer
