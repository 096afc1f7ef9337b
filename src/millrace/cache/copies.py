"""Which units of a store are copies of what other nodes own: these lie in spare room, and go before anything else.

A unit is marked when a copy is kept (`usage_records.py`). A mark is a hint: owners change with the members of the cluster,
so whoever wants to evict a copy asks `still_a_copy`, which knows the present placement. A unit that is owned by now loses
its mark. After a change the other way round, when what was owned here has a new owner, `mark_all` looks at every unit.

An object with a file of its own is a copy when this node is to hold no part of it. A segment is one when that holds of all
its objects, of which 32 are asked: if one in ten is owned, one such segment in thirty is taken for a copy; of one in four,
none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from millrace.cache.index import Index
from millrace.cache.usage_records import Draw, UnitRecord, UsageRecords

StillACopy = Callable[[bytes, int], bool]
"""Says of an object, by its id and size in bytes, whether another node owns all of it. Thread-safe, quick, never raises."""

_ASKED_OF_A_SEGMENT = 32
_ANSWER_SECONDS = 1.0  # for which what was said of a segment is believed
_MAX_ANSWERS = 4096
_PAGE = 1000
_DRAWS = 8  # each twice as large as the one before


class Copies:
    """The copies in the store with this index. Thread- and process-safe; raises `StorageError` when the disk fails.

    `still_a_copy` is None in a node alone, and where a mere client of a cluster caches: then nothing is a copy.
    """

    def __init__(self, index: Index, records: UsageRecords) -> None:
        self._index = index
        self._records = records
        self._answers: dict[int, tuple[float, bool]] = {}
        self.still_a_copy: StillACopy | None = None

    @property
    def are_told_apart(self) -> bool:
        """Whether anything here can be a copy."""
        return self.still_a_copy is not None

    def draw(self, count: int) -> Draw:
        """About `count` copies, at random, as they are by the present placement.

        None when there are no more, or the first two thousand that were looked at are owned by now.
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
        """Mark every unit of which this node is to hold nothing, after owners have changed; gives how many were not yet."""
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
