"""Removes data files that no record names: what a process leaves that is killed between the record's end and its file's.

A record is made before its file and forgotten before its file is removed, so a file without one belongs to nobody. (A
segment's files come first, but under a lock until the record is there.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from millrace.cache.environment import DATA_NAME
from millrace.cache.failures import disk_errors
from millrace.cache.index import Index
from millrace.cache.segment_files import generations
from millrace.cache.segments import Segments
from millrace.cache.store import Store, unlink
from millrace.events import Event, emit

_FOLDERS = 256
_ID_DIGITS = 32


class Leftovers:
    """Goes through the files of a store, a folder at each call of `look`. One process of a node at a time."""

    def __init__(self, store: Store, segments: Segments) -> None:
        self._directory = store.directory
        self._index: Index = store.index
        self._segments = segments
        self._next = 0
        self._inode = self._index_inode()

    def look(self) -> None:
        """Look at the next folder of data files, or, after the last one, at the segments."""
        if self._index_inode() != self._inode:
            return  # somebody removed the index; the files are those of another by now
        folder, self._next = self._next, (self._next + 1) % (_FOLDERS + 1)
        if folder < _FOLDERS:
            for path in self._nameless(f"{self._directory}/objects/{folder:02x}"):
                unlink(path)
                emit(Event(name="cache.leftover.removed", subject=path))
            return
        for generation in generations(self._segments.directory):
            if self._index.segment(generation) is None and self._segments.remove(generation, lambda: None):
                emit(Event(name="cache.leftover.removed", subject=f"{self._segments.directory}/{generation}.data"))

    def _index_inode(self) -> int:
        try:
            return os.stat(self._directory / "index" / DATA_NAME).st_ino
        except FileNotFoundError:
            return 0

    def _nameless(self, folder: str) -> Iterator[str]:
        with disk_errors(folder):
            try:
                names = os.listdir(folder)
            except FileNotFoundError:
                return
        for name in names:
            digits, _, generation = name.partition("-")
            if len(digits) != _ID_DIGITS or not generation.isdecimal():
                continue  # not ours: a rebuild decides
            entry = self._index.get(bytes.fromhex(digits))
            if entry is None or entry.place or entry.generation != int(generation):
                yield f"{folder}/{name}"
