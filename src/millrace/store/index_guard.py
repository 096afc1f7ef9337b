"""Surrounds every LMDB transaction: a cut or damaged index is not used, and a death inside LMDB leaves a mark.

LMDB does not verify its file. It reads through a map, so a file that was cut kills the process (SIGBUS), and some damaged
pages end it by an assertion (SIGABRT) or a bad address. A check of the length before each transaction prevents the first.
The others cannot be caught in the process. So each process marks a word of the signals page while it has transactions open,
under a lock that ends with the process. A word that is marked and not locked belongs to a process that died in a
transaction: the next process that opens the store checks the index (`setup.py`) and rebuilds it where that fails.
A check that passes is accepted `_MOST_CHECKS` times in a row: it cannot find all damage.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from millrace.runtime.failures import disk_errors
from millrace.runtime.locks import is_byte_locked, try_lock_byte
from millrace.runtime.private_files import new_file
from millrace.store.environment import DAMAGED_NAME, DamagedIndexError
from millrace.store.signals import Signals

# Words of the signals page: the time of the last passed check, in seconds since the boot; the number of checks passed in a
# row; an unused word; whether the index is retired; and the words of processes.
_CHECKED_AT, _PASSED, _UNREAD, _RETIRED = 2, 3, 4, 5
_FIRST, _WORDS = 8, 504
_RETIRED_MARK = int.from_bytes(b"gave up", "little")  # not a value that a damaged page is likely to hold
_AGAIN_SECONDS = 60.0
_MOST_CHECKS = 1
_MOST_CHECKS_IN_USE = 8  # while other processes use the index: they would lose the cache


class IndexGuard:
    """A context manager around transactions on the index whose data file is `data`. Thread-safe, and may be nested.

    Entering raises `DamagedIndexError` once the index is damaged. Not usable after a fork.
    """

    def __init__(self, data: str, signals: Signals) -> None:
        self._data = data
        self._numbers = signals.numbers
        self._nbytes = 0
        self._inside = 0  # not in the page, which may be damaged
        self._error: DamagedIndexError | None = None
        self._file = self._lock = -1
        with disk_errors(signals.path):
            # A separate descriptor: LMDB moves the position of its own.
            self._lock = os.open(signals.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                self._slot = self._claim()
            except BaseException:
                self.close()
                raise

    def _claim(self) -> int:
        """The word of this process. The unused word if all are taken: the death of this process is then not noticed."""
        for number in range(_WORDS):
            slot = _FIRST + (os.getpid() + number) % _WORDS
            if not self._numbers[slot] and try_lock_byte(self._lock, slot):
                return slot
        return _UNREAD

    def watch(self) -> None:
        """Begin to check that the data file, which LMDB has opened, does not become shorter."""
        with disk_errors(self._data):
            self._file = os.open(self._data, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def __enter__(self) -> None:
        if self._error is not None:
            raise self._error
        if self._file >= 0:
            known = self._nbytes  # before the check: another thread may find a longer file meanwhile
            nbytes = os.lseek(self._file, 0, os.SEEK_END)
            if nbytes < known:
                raise self.damaged("it was cut")
            if nbytes > known:
                self._nbytes = nbytes
        if self._numbers[_RETIRED] == _RETIRED_MARK:
            raise self.damaged("another process discarded it")
        self._inside += 1
        self._numbers[self._slot] = 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1  # no other thread runs between this line's instructions, nor between those of the next one
        self._numbers[self._slot] = self._inside > 0

    def damaged(self, why: str) -> DamagedIndexError:
        """The error of this and every later transaction. The next process that opens the store rebuilds the index."""
        if self._error is None:
            self._error = DamagedIndexError(
                f"cache index {self._data}: {why}",
                next_step="restart the processes that use the cache: the index is then rebuilt",
            )
            self._mark()
        return self._error

    def _mark(self) -> None:
        try:
            found = os.stat(self._data)
            if self._file < 0 or os.path.samestat(found, os.fstat(self._file)):  # else it has been replaced already
                os.close(new_file(Path(self._data).parent / DAMAGED_NAME))
        except OSError:
            return  # a full disk, or the index is gone: the next process that opens it finds the damage itself

    def close(self) -> None:
        """Release everything; in a forked child, close the parent's files."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1


def died_inside(signals: Signals) -> list[int]:
    """The words of processes that died in a transaction. Under the lock of the set-up."""
    left = [slot for slot in range(_FIRST, _FIRST + _WORDS) if signals.numbers[slot]]
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
            return sum(is_byte_locked(descriptor, slot) for slot in range(_FIRST, _FIRST + _WORDS))
        finally:
            os.close(descriptor)


def retire(signals: Signals) -> None:
    """Make every process that has the index open stop using it, before it is removed.

    Otherwise they would continue with the removed index and miss the writes of other processes. Their hot opens also become
    invalid.
    """
    signals.numbers[_RETIRED] = _RETIRED_MARK
    stamp = signals.read()
    signals.removed(stamp.removals + 1)
    signals.changed(stamp.changes + 1)


def _passed_in_a_row(signals: Signals) -> int:
    """The number of checks that the index has passed in a row, each less than a minute after the one before."""
    last = signals.numbers[_CHECKED_AT]
    return signals.numbers[_PASSED] if last and 0 <= _now() - last < _AGAIN_SECONDS else 0


def note_check(signals: Signals, slots: list[int]) -> None:
    """Record a passed check, and clear the marks in these words."""
    passed = _passed_in_a_row(signals) + 1
    signals.numbers[_CHECKED_AT], signals.numbers[_PASSED] = _now(), passed
    for slot in slots:
        signals.numbers[slot] = 0


def _now() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME))
