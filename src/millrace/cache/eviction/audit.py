"""Finds leftovers of processes that were killed between two steps: units without a usage record, files without a unit."""

from __future__ import annotations

import time

from millrace.cache.eviction.usage import group_of
from millrace.cache.eviction.usage_records import UsageRecords
from millrace.store.index import Index
from millrace.store.leftovers import Leftovers
from millrace.store.records import segment_unit

_ADOPTED = b"adopted"
_PAGE = 1000
_SMALL_PAGE = 200
_LEFTOVERS_SECONDS = 2.0


class Audit:
    """Checks a store in small steps. One process of a node at a time (see `Evictor`)."""

    def __init__(self, index: Index, records: UsageRecords, leftovers: Leftovers) -> None:
        self._index = index
        self._records = records
        self._leftovers = leftovers
        self._after = b""
        self._leftovers_at = 0.0

    def go_on(self) -> None:
        """Check the next few units, and at intervals some files."""
        self._after = self._enter_page(self._after, _SMALL_PAGE)
        now = time.monotonic()
        if now >= self._leftovers_at:
            self._leftovers_at = now + _LEFTOVERS_SECONDS
            self._leftovers.look()

    def adopt(self, *, again: bool = False) -> None:
        """Create the missing usage records, once for each index: after a rebuild no unit has one."""
        if not again and self._records.is_marked(_ADOPTED):
            return
        segments = self._index.segment_records()
        self._records.enter_unknown(
            [(segment_unit(s.generation), s.generation, s.written_bytes, s.group) for s in segments], now=time.time()
        )
        after = self._enter_page(b"", _PAGE)
        while after:
            after = self._enter_page(after, _PAGE)
        self._records.set_mark(_ADOPTED)

    def _enter_page(self, after: bytes, limit: int) -> bytes:
        """Enter the objects of one page. Returns the start of the next page; empty after the last."""
        page = self._index.page(after, limit)
        large = [
            (entry.object_id, 0, entry.size, group_of(entry.name.origin, entry.name.key))
            for entry in page
            if not entry.place and entry.present
        ]
        if None in self._records.used_at([key for key, *_ in large]):
            self._records.enter_unknown(large, now=time.time())
        return page[-1].object_id if len(page) == limit else b""
