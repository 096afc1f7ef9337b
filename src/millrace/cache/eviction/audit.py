"""Finds leftovers of processes that were killed between two steps: units without a usage record, files without a unit.

A record of the index is created before its file, and removed before its file, so a file without a record is unused. (The
files of a segment are created first, but locked until the record exists.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from millrace.cache.eviction.usage import CHECKPOINT_FILES, copies_of, group_of
from millrace.cache.eviction.usage_records import UsageRecords
from millrace.events import Event, emit
from millrace.runtime.failures import disk_errors
from millrace.store.environment import DATA_NAME
from millrace.store.folders import remove_abandoned
from millrace.store.index import Index
from millrace.store.records import SIDECAR_SUFFIX, ObjectName, segment_unit
from millrace.store.segment_files import generations
from millrace.store.segments import Segments
from millrace.store.store import Store, unlink

_ADOPTED = b"adopted"
_PAGE = 1000
_SMALL_PAGE = 200
_LEFTOVERS_SECONDS = 2.0
_FOLDERS = 256
_ID_DIGITS = 32


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
            (entry.object_id, 0, entry.size, _group_of(entry.name))
            for entry in page
            if not entry.place and entry.cached_bytes
        ]
        if None in self._records.used_at([key for key, *_ in large]):
            self._records.enter_unknown(large, now=time.time())
        return page[-1].object_id if len(page) == limit else b""


def _group_of(name: ObjectName) -> str:
    group = group_of(name.origin, name.key)
    return copies_of(group) if name.key.endswith(CHECKPOINT_FILES) else group


class Leftovers:
    """Checks the files of a store, one directory per call of `look`. One process of a node at a time."""

    def __init__(self, store: Store, segments: Segments) -> None:
        self._directory = store.directory
        self._index: Index = store.index
        self._segments = segments
        self._next = 0
        self._inode = self._index_inode()

    def look(self) -> None:
        """Check the folders of ended processes and the next directory of data files; after the last one, the segments."""
        for path in remove_abandoned(self._directory):
            emit(Event(name="cache.leftover.removed", subject=path))
        if self._index_inode() != self._inode:
            return  # the index was removed; the files belong to another one now
        folder, self._next = self._next, (self._next + 1) % (_FOLDERS + 1)
        if folder < _FOLDERS:
            for path in self._unrecorded(f"{self._directory}/objects/{folder:02x}"):
                unlink(path)
                if not os.path.lexists(path):  # a directory that is not empty stays
                    emit(Event(name="cache.leftover.removed", subject=path))
            return
        for generation in generations(self._segments.directory):
            if self._index.segment(generation) is None and self._segments.remove(generation, lambda: None):
                emit(Event(name="cache.leftover.removed", subject=f"{self._segments.directory}/{generation}.data"))

    def _index_inode(self) -> int:
        with disk_errors(self._directory):
            try:
                return os.stat(self._directory / "index" / DATA_NAME).st_ino
            except (FileNotFoundError, NotADirectoryError):
                return 0

    def _unrecorded(self, folder: str) -> Iterator[str]:
        with disk_errors(folder):
            try:
                names = os.listdir(folder)
            except FileNotFoundError:
                return
        for name in names:
            digits, _, generation = name.removesuffix(SIDECAR_SUFFIX).partition("-")
            if len(digits) != _ID_DIGITS or not generation.isdecimal():
                continue  # another file: a rebuild decides
            entry = self._index.get(bytes.fromhex(digits))
            if entry is None or entry.place or entry.generation != int(generation):
                yield f"{folder}/{name}"
