"""A page of memory that every process of a node maps: it shows whether a store's index has lost or changed records.

A process that keeps results of the index in memory (open maps, hot opens, descriptions) stores these numbers with them and
compares them at each use. This reads a word of memory instead of the index.

Each number is the id of the last LMDB transaction that removed or changed something. It is raised *before* that transaction
commits, so no process uses its results after the commit. If the process dies in between, the next transaction has the same
id, and the only cost is one lookup. Results that are read while a number is raised and its transaction not yet visible must
not be kept; `Index.stamp` ensures this.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

from millrace.runtime.failures import disk_errors

_PAGE_BYTES = 4096
_REMOVALS, _CHANGES = 0, 1


class Stamp(NamedTuple):
    """The numbers as of one moment."""

    removals: int
    changes: int


class Signals:
    """The mapped page in the file `path`, created if it is missing. Thread- and process-safe, and usable after a fork.

    Writing happens under LMDB's writers' lock only (see `Index`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                # Without holes: a write to one through a map on a full disk kills the process.
                os.posix_fallocate(descriptor, 0, _PAGE_BYTES)
                page = mmap.mmap(descriptor, _PAGE_BYTES)
            finally:
                os.close(descriptor)
        self.numbers = memoryview(page).cast("Q")
        """The page itself, for the fastest test: removals at 0, changes at 1; `index_guard.py` uses the rest.

        Valid as long as it is referenced.
        """

    @property
    def removals(self) -> int:
        """Changes when objects are removed, or a file is found to have changed."""
        return self.numbers[_REMOVALS]

    @property
    def changes(self) -> int:
        """Changes when this node writes to the origin."""
        return self.numbers[_CHANGES]

    def read(self) -> Stamp:
        """Both numbers."""
        return Stamp(self.numbers[_REMOVALS], self.numbers[_CHANGES])

    def removed(self, transaction: int) -> None:
        """Record that the transaction of this id, not yet committed, removes something."""
        self.numbers[_REMOVALS] = transaction

    def changed(self, transaction: int) -> None:
        """Record that the transaction of this id, not yet committed, changes descriptions of the origin."""
        self.numbers[_CHANGES] = transaction

    def lower_to(self, transaction: int) -> None:
        """Reset numbers of transactions that were never committed. Only under the lock of writers."""
        for slot in (_REMOVALS, _CHANGES):
            self.numbers[slot] = min(self.numbers[slot], transaction)
