"""Removes data files without an index record, which remain when a process is killed between the two removals.

A record is created before its file, and removed before its file, so a file without a record is unused. (The files of a
segment are created first, but locked until the record exists.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from millrace.events import Event, emit
from millrace.runtime.failures import disk_errors
from millrace.store.environment import DATA_NAME
from millrace.store.index import Index
from millrace.store.segment_files import generations
from millrace.store.segments import Segments
from millrace.store.store import Store, unlink

_FOLDERS = 256
_ID_DIGITS = 32


class Leftovers:
    """Checks the files of a store, one directory per call of `look`. One process of a node at a time."""

    def __init__(self, store: Store, segments: Segments) -> None:
        self._directory = store.directory
        self._index: Index = store.index
        self._segments = segments
        self._next = 0
        self._inode = self._index_inode()

    def look(self) -> None:
        """Check the next directory of data files; after the last one, the segments."""
        if self._index_inode() != self._inode:
            return  # the index was removed; the files belong to another one now
        folder, self._next = self._next, (self._next + 1) % (_FOLDERS + 1)
        if folder < _FOLDERS:
            for path in self._unrecorded(f"{self._directory}/objects/{folder:02x}"):
                unlink(path)
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
            digits, _, generation = name.partition("-")
            if len(digits) != _ID_DIGITS or not generation.isdecimal():
                continue  # another file: a rebuild decides
            entry = self._index.get(bytes.fromhex(digits))
            if entry is None or entry.place or entry.generation != int(generation):
                yield f"{folder}/{name}"
