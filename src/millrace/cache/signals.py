"""A page of memory that every process of a node maps: whether anything was removed or changed in a store's index.

Whoever keeps something in memory that the index could contradict (open maps, hot opens, descriptions) notes the numbers
with it and compares them at each use, at the cost of reading a word of memory, instead of asking the index.

Each number is the id of the last LMDB transaction that removed or changed something. It is raised *before* that transaction
commits, so nobody trusts his memory after the commit; if the process dies in between, the next transaction gets the same
id, and nothing is lost but a look at the index. What is looked up while a number is raised and its transaction not yet
visible must not be remembered: `Index.stamp` sees to that.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

from millrace.cache.failures import disk_errors

_PAGE_BYTES = 4096
_REMOVALS, _CHANGES = 0, 1


class Stamp(NamedTuple):
    """The numbers as of one moment."""

    removals: int
    changes: int


class Signals:
    """The mapped page in the file `path`, made when it is missing. Thread- and process-safe, and usable after a fork.

    Writing happens under LMDB's writers' lock only (see `Index`).
    """

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                # Not a hole: writing to one through a map on a full disk would kill the process.
                os.posix_fallocate(descriptor, 0, _PAGE_BYTES)
                page = mmap.mmap(descriptor, _PAGE_BYTES)
            finally:
                os.close(descriptor)
        self.numbers = memoryview(page).cast("Q")
        """The page itself, for the quickest look: removals at 0, changes at 1. Read only; stays valid for who holds it."""

    @property
    def removals(self) -> int:
        """Another number than before: objects were removed, or their files were found to be changed."""
        return self.numbers[_REMOVALS]

    @property
    def changes(self) -> int:
        """Another number than before: something was written at the origin through this node."""
        return self.numbers[_CHANGES]

    def read(self) -> Stamp:
        """Both numbers."""
        return Stamp(self.numbers[_REMOVALS], self.numbers[_CHANGES])

    def removed(self, transaction: int) -> None:
        """Say that the transaction of this id, not yet committed, removes something."""
        self.numbers[_REMOVALS] = transaction

    def changed(self, transaction: int) -> None:
        """Say that the transaction of this id, not yet committed, changes what is known of the origin."""
        self.numbers[_CHANGES] = transaction

    def lower_to(self, transaction: int) -> None:
        """Take back what a transaction raised that was never committed. Only while nobody else writes."""
        for slot in (_REMOVALS, _CHANGES):
            self.numbers[slot] = min(self.numbers[slot], transaction)
