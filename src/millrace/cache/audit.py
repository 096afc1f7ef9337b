"""Finds what processes leave that are killed between two steps: units without a record of use, files without a unit."""

from __future__ import annotations

import time

from millrace.cache.groups import group_of
from millrace.cache.index import Index
from millrace.cache.leftovers import Leftovers
from millrace.cache.records import segment_unit
from millrace.cache.usage_records import UsageRecords

_ADOPTED = b"adopted"
_PAGE = 1000
_SMALL_PAGE = 200
_LEFTOVERS_SECONDS = 2.0


class Audit:
    """Looks through a store, a little at a time. One process of a node at a time (see `Evictor`)."""

    def __init__(self, index: Index, records: UsageRecords, leftovers: Leftovers) -> None:
        self._index = index
        self._records = records
        self._leftovers = leftovers
        self._after = b""
        self._leftovers_at = 0.0

    def go_on(self) -> None:
        """Look at the next few units, and now and then at some files."""
        self._after = self._enter_page(self._after, _SMALL_PAGE)
        now = time.monotonic()
        if now >= self._leftovers_at:
            self._leftovers_at = now + _LEFTOVERS_SECONDS
            self._leftovers.look()

    def adopt(self, *, again: bool = False) -> None:
        """Give all units without a record a fresh one, once for each index: after a rebuild nothing has one."""
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
        """Likewise those of one page of objects; gives where the next one begins, nothing after the last."""
        page = self._index.page(after, limit)
        large = [
            (entry.object_id, 0, entry.size, group_of(entry.name.origin, entry.name.key))
            for entry in page
            if not entry.place and entry.present
        ]
        if None in self._records.used_at([key for key, *_ in large]):
            self._records.enter_unknown(large, now=time.time())
        return page[-1].object_id if len(page) == limit else b""
