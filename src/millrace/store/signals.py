"""A page of memory that every process of a node maps: it shows whether a store's index has lost or changed records.

A process that keeps results of the index in memory (open maps, hot opens, descriptions) stores these numbers with them and
compares them at each use. This reads a word of memory instead of the index.

Each number is the id of the last LMDB transaction that removed or changed something. It is raised *before* that transaction
commits, so no process uses its results after the commit. If the process dies in between, the next transaction has the same
id, and the only cost is one lookup. Results that are read while a number is raised and its transaction not yet visible must
not be kept; `Index.stamp` ensures this.

The page also contains a word for each process, by which the next process finds those that died in a transaction (see
`transactions.py`). A check of the index that passes is accepted `_MOST_CHECKS` times in a row: it cannot find all damage.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from pathlib import Path
from typing import NamedTuple

from millrace.runtime.failures import disk_errors
from millrace.runtime.locks import is_byte_locked

_PAGE_BYTES = 4096
REMOVALS, CHANGES = 0, 1
"""The words that change when objects are removed or a file is found to have changed, and when this node writes to the
origin.
"""

CHECKED_AT, _PASSED = 2, 3
"""The words with the time of the last passed check of the index, in seconds since the boot, and the number of checks that
passed in a row.
"""
UNUSED, RETIRED = 4, 5
"""The word of processes that have none of their own, and the word that shows whether the index is retired."""
CHANGE_ID = (1 << 48) - 1
"""The bits of `CHANGES` with the id of a transaction. Those above count expiries (`expire_metadata`)."""
METADATA_SINCE = 6
"""The word with a time (`time.time`, a float): metadata that was requested before it is not used."""
FIRST, WORDS = 8, 504
"""The words of processes. That of a process is not 0 while it has a transaction open."""
RETIRED_MARK = int.from_bytes(b"gave up", "little")  # not a value that a damaged page is likely to hold

_EXPIRIES = 4 * CHANGES + 3  # the highest 16 bits of the word, on processors of today, which are little-endian
_AT_ONCE_SECONDS = 0.001
_AGAIN_SECONDS = 60.0
_MOST_CHECKS = 1
_MOST_CHECKS_IN_USE = 8  # while other processes use the index: they would lose the cache


class Stamp(NamedTuple):
    """The numbers as of one moment."""

    removals: int
    changes: int


class Signals:
    """The mapped page in the file `path`, created if it is missing. Thread- and process-safe, and usable after a fork.

    Except for `expire_metadata`, writing happens under LMDB's writers' lock only (see `Index`).
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
        """The page itself: `REMOVALS`, `CHANGES`, and the other words.

        Valid as long as it is referenced.
        """
        self.times = memoryview(page).cast("d")
        """The same words as floats, for `METADATA_SINCE`."""
        self._halves = memoryview(page).cast("H")

    def read(self) -> Stamp:
        """Both numbers."""
        return Stamp(self.numbers[REMOVALS], self.numbers[CHANGES])

    def removed(self, transaction: int) -> None:
        """Record that the transaction of this id, not yet committed, removes something."""
        self.numbers[REMOVALS] = transaction

    def changed(self, transaction: int) -> None:
        """Record that the transaction of this id, not yet committed, changes descriptions of the origin."""
        self.numbers[CHANGES] = self.numbers[CHANGES] & ~CHANGE_ID | transaction

    def lower_to(self, transaction: int) -> None:
        """Reset numbers of transactions that were never committed. Only under the lock of writers."""
        self.numbers[REMOVALS] = min(self.numbers[REMOVALS], transaction)
        if self.numbers[CHANGES] & CHANGE_ID > transaction:
            self.changed(transaction)
        if self.times[METADATA_SINCE] > (now := time.time()):  # the clock was set back, or the page is damaged
            self.times[METADATA_SINCE] = now

    def expire_metadata(self, moment: float) -> None:
        """Expire the metadata that was requested before `moment`, for all processes, where no transaction is possible.

        Without a lock. A process that was interrupted in the middle may have replaced a later moment: it sets another one.
        """
        began = -math.inf
        while time.monotonic() - began > _AT_ONCE_SECONDS:
            began = time.monotonic()
            if not self.times[METADATA_SINCE] >= moment:  # also for NaN, in a damaged page
                self.times[METADATA_SINCE] = moment
            # After it: what is looked up from now on is not older.
            self._halves[_EXPIRIES] = (self._halves[_EXPIRIES] + 1) & 0xFFFF  # the id stays: another process may set it
            moment = max(moment, time.time())


# --- processes that died in a transaction ---------------------------------------------------------


def died_inside(signals: Signals) -> list[int]:
    """The words of processes that died in a transaction. Under the lock of the set-up."""
    left = [slot for slot in range(FIRST, FIRST + WORDS) if signals.numbers[slot]]
    if not left:
        return []
    with disk_errors(signals.path):
        descriptor = os.open(signals.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return [slot for slot in left if not is_byte_locked(descriptor, slot)]
        finally:
            os.close(descriptor)


def is_worth_a_check(signals: Signals) -> bool:
    """Whether to check the index. When deaths follow one check after another, the checks miss the damage.

    Many processes that end at once, without closing the store, also leave many marks. So many users allow as many checks.
    """
    users = _users(signals)
    return _passed_in_a_row(signals) < (max(_MOST_CHECKS_IN_USE, users) if users else _MOST_CHECKS)


def _users(signals: Signals) -> int:
    """The number of processes that have the index open."""
    with disk_errors(signals.path):
        descriptor = os.open(signals.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return sum(is_byte_locked(descriptor, slot) for slot in range(FIRST, FIRST + WORDS))
        finally:
            os.close(descriptor)


def retire(signals: Signals) -> None:
    """Make every process that has the index open stop using it, before it is removed.

    Otherwise they would continue with the removed index and miss the writes of other processes. Their hot opens also become
    invalid.
    """
    signals.numbers[RETIRED] = RETIRED_MARK
    stamp = signals.read()
    signals.removed(stamp.removals + 1)
    signals.changed((stamp.changes & CHANGE_ID) + 1)


def _passed_in_a_row(signals: Signals) -> int:
    """The number of checks that the index has passed in a row, each less than a minute after the one before."""
    last = signals.numbers[CHECKED_AT]
    return signals.numbers[_PASSED] if last and 0 <= _now() - last < _AGAIN_SECONDS else 0


def note_check(signals: Signals, slots: list[int]) -> None:
    """Record a passed check, and clear the marks in these words."""
    passed = _passed_in_a_row(signals) + 1
    signals.numbers[CHECKED_AT], signals.numbers[_PASSED] = _now(), passed
    for slot in slots:
        signals.numbers[slot] = 0


def _now() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME))
