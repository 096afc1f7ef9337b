"""Space on one disk: the capacity, the free space that must remain (`min_free`), and reservations of writers.

`Space` decides whether more bytes may be written, and reserves them. Far from the limits a process reserves in memory only.
Near them it also records the reservation in the index, so that all processes stay inside the limits together.

`FreeSpace` observes the disk while other programs write to it. The writes between two looks cannot be seen in advance, so
the fastest recent rate is expected to continue, and that much is freed early (`headroom`). A burst from nothing is seen
after a close look at most if the disk was near `min_free`, and after a tick at most otherwise. The decisions are pure.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from millrace.config import Amount
from millrace.errors import StorageError
from millrace.runtime.failures import raise_disk_error
from millrace.runtime.maintenance import TICK_SECONDS
from millrace.store.index import Index

_EXACT_BYTES = 1 << 30
_RESERVED_SECONDS = 60.0
_SLACK_SECONDS = 0.05
_RESERVE_ATTEMPTS = 4
_RESERVE_SECONDS = 0.25  # for which a reservation waits for others
_RESERVE_PAUSE_SECONDS = 0.004

CLOSE_LOOK_SECONDS = 0.05
REMEMBERED_SECONDS = 2.0
"""For how long a look is used to predict writes."""

_AVERAGED_SECONDS = 0.2  # a block of this store is on the disk a moment before it is in the index
_SAFETY = 2  # a look may be late, and removal takes time
_UNSEEN_SECONDS = 2.0  # until other processes close a removed file, see `Disk.tidy`


def bytes_of(amount: Amount, disk_bytes: int) -> int:
    """An amount in bytes on a disk of `disk_bytes`."""
    return amount.nbytes if amount.nbytes is not None else int((amount.share or 0.0) * disk_bytes)


class _Slack(NamedTuple):
    """The bytes that may be reserved without another look, under these limits, until then (`time.monotonic`)."""

    nbytes: int = 0
    limits: tuple[Amount, Amount] | None = None
    until: float = 0.0


class Space:
    """The space that the store in `directory` may use. Thread- and process-safe.

    `resized` returns the capacity that all processes use instead of `capacity`, or None. `on_failure` is called with the
    error of a disk that fails where no error is raised. Other methods raise `StorageError`.
    """

    def __init__(
        self,
        directory: Path,
        index: Index,
        *,
        capacity: Amount,
        min_free: Amount,
        resized: Callable[[], Amount | None],
        on_failure: Callable[[StorageError], None],
    ) -> None:
        self._directory = directory
        self._index = index
        self._capacity = capacity
        self._min_free = min_free
        self._resized = resized
        self._on_failure = on_failure
        self._reserved = 0
        self._released = 0  # so far
        # Not a condition: an interrupt in its methods, which are written in Python, would leave it locked.
        self._lock = threading.Lock()
        self._owner = os.urandom(16)
        self._announced = False
        self._slack = _Slack()

    def set_limits(self, *, capacity: Amount, min_free: Amount) -> None:
        """Change the limits of future writes. Stored bytes stay."""
        self._capacity, self._min_free = capacity, min_free

    @property
    def limits(self) -> tuple[Amount, Amount]:
        """The present capacity and `min_free`."""
        return self._limit(), self._min_free

    def shortage(self, nbytes: int) -> int:
        """The bytes to remove before `nbytes` more keep the store inside its capacity and the disk above `min_free`.

        Reservations of all processes count as used. Zero or less: the bytes fit.
        """
        return self._shortage(nbytes, self._index.used_bytes(), self._reserved_by_others())

    def has_room(self, nbytes: int) -> bool:
        """Whether there is no `shortage`."""
        return self.shortage(nbytes) <= 0

    def is_in_doubt(self, nbytes: int) -> bool:
        """Whether `nbytes` fit by now, or may fit in a moment: a block of this process counts twice between its write and
        its `release`.
        """
        return self.shortage(nbytes) <= self._reserved

    def leaves_min_free(self, nbytes: int) -> bool:
        """Whether `nbytes` more leave the disk above `min_free`. Ignores the capacity."""
        total, free = self._total_and_free()
        return free - self._reserved - nbytes >= bytes_of(self._min_free, total)

    def reserve(self, nbytes: int, *, wait: bool = True) -> bool:
        """Reserve space until `release`. False if there is none, or the disk fails.

        With `wait`, waits for the end of present reservations where that may help, see `is_in_doubt`. Other processes see
        the reservation when the store is nearly full (the last eighth, or 1 GiB if that is more). A reservation ends by
        itself after a minute.
        """
        deadline = time.monotonic() + _RESERVE_SECONDS
        for _ in range(_RESERVE_ATTEMPTS):
            with self._lock:
                in_doubt = False
                try:
                    granted = self._reserve(nbytes)
                    in_doubt = not granted and self.is_in_doubt(nbytes)
                except StorageError as error:
                    self._on_failure(error)
                    granted = False
                self._reserved += nbytes if granted else 0
                present = self._released + self._reserved
            if granted or not (in_doubt and wait) or not self._wait_for(present, deadline):
                return granted
        return False

    def _wait_for(self, released: int, deadline: float) -> bool:
        """Wait until so many bytes were released; False if that takes too long."""
        while self._released < released:
            if time.monotonic() > deadline:
                return False
            time.sleep(_RESERVE_PAUSE_SECONDS)
        return True

    def release(self, nbytes: int) -> None:
        """End a reservation: the bytes were written, or will not be."""
        with self._lock:
            self._reserved -= nbytes
            self._released += nbytes
            if self._announced:
                try:
                    self._index.release(self._owner, self._reserved)
                    self._announced = self._reserved > 0
                except StorageError as error:
                    self._on_failure(error)

    def capacity_bytes(self) -> int:
        """The capacity on this disk."""
        limit = self._limit()
        return self.size_of(limit) if limit.nbytes is None else limit.nbytes  # the first takes a system call

    def free_bytes(self) -> int:
        """Free bytes of the disk."""
        return self._total_and_free()[1]

    def min_free_bytes(self) -> int:
        """The bytes of the disk that must stay free."""
        return self.size_of(self._min_free)

    def disk_bytes(self) -> int:
        """The size of the disk."""
        return self._total_and_free()[0]

    def size_of(self, amount: Amount) -> int:
        """An amount in bytes on this disk."""
        return bytes_of(amount, self.disk_bytes())

    # --- inside -----------------------------------------------------------------------------------

    def _reserve(self, nbytes: int) -> bool:
        if self._takes_from_slack(nbytes):
            return True
        shortage = self.shortage(nbytes)
        if shortage > 0:
            return False
        if not self._announced and -shortage >= max(self.capacity_bytes() // 8, _EXACT_BYTES):
            self._slack = _Slack(-shortage // 8, self.limits, time.monotonic() + _SLACK_SECONDS)
            return True
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        granted = self._index.reserve(
            self._owner,
            self._reserved + nbytes,
            now=now,
            until=now + _RESERVED_SECONDS,
            fits=lambda used, others: self._shortage(nbytes, used, others) <= 0,
        )
        self._announced = self._announced or granted
        return granted

    def _takes_from_slack(self, nbytes: int) -> bool:
        """Reserve from the space that was free a moment ago: a look costs more than the write of a small object."""
        slack = self._slack
        if slack.nbytes < nbytes or self._announced or time.monotonic() >= slack.until or slack.limits != self.limits:
            return False
        self._slack = slack._replace(nbytes=slack.nbytes - nbytes)
        return True

    def _reserved_by_others(self) -> int:
        return self._index.reserved_bytes(but=self._owner, now=time.clock_gettime(time.CLOCK_BOOTTIME))

    def _shortage(self, nbytes: int, used: int, others: int) -> int:
        total, free = self._total_and_free()
        wanted = self._reserved + others + nbytes
        return max(wanted + bytes_of(self._min_free, total) - free, used + wanted - bytes_of(self._limit(), total))

    def _total_and_free(self) -> tuple[int, int]:
        try:
            disk = os.statvfs(self._directory)
        except OSError as error:
            raise_disk_error(error, self._directory)
        return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize

    def _limit(self) -> Amount:
        """The capacity set by `resize`, which applies to every process, or else this process's option."""
        return self._resized() or self._capacity


# --- other programs that fill the disk ------------------------------------------------------------


class Look(NamedTuple):
    """The state of a disk at one moment, as if nothing had been evicted: `left_bytes` free, `kept_bytes` in the store.

    `at` is in seconds of any monotonic clock.
    """

    at: float
    left_bytes: int
    kept_bytes: int


def headroom(looks: Sequence[Look], *, min_free_bytes: int) -> int:
    """The bytes to keep free beyond `min_free_bytes`: twice the most that others wrote between two close looks.

    At most `min_free_bytes`. `looks` are in the order of time. Pure.
    """
    return min(int(_SAFETY * CLOSE_LOOK_SECONDS * _fastest(looks)), min_free_bytes)


def until_next_look(looks: Sequence[Look], *, free_bytes: int, min_free_bytes: int) -> float | None:
    """The seconds until the next look; None: with the next tick. Pure.

    Close looks begin at twice `min_free_bytes`, or earlier when two ticks of the others' writes might cross it.
    """
    expected = _SAFETY * TICK_SECONDS * _fastest(looks)
    near = free_bytes < max(2 * min_free_bytes, min_free_bytes + expected)
    return CLOSE_LOOK_SECONDS if near else None


def _fastest(looks: Sequence[Look]) -> float:
    """The highest rate at which others wrote, in bytes per second."""
    fastest = 0.0
    earlier = 0
    for look in looks[1:]:
        while looks[earlier + 1].at <= look.at - _AVERAGED_SECONDS:
            earlier += 1
        before = looks[earlier]
        fallen = before.left_bytes - look.left_bytes
        ours = max(0, look.kept_bytes - before.kept_bytes)
        fastest = max(fastest, (fallen - ours) / max(look.at - before.at, _AVERAGED_SECONDS))
    return fastest


class FreeSpace:
    """Recent looks at the disk, and removals. One thread calls `look`; the rest is thread-safe. Raises `StorageError`."""

    def __init__(self, space: Space, index: Index) -> None:
        self._space = space
        self._index = index
        self._looks: deque[Look] = deque()
        self._evicted = 0  # bytes, by this process, so far
        self._came_free = 0  # of these
        self._unseen: list[tuple[float, int]] = []
        self._lock = threading.Lock()  # of the removals
        self.headroom = 0
        """The bytes to keep free beyond `min_free`, as of the last look."""

    def look(self) -> float | None:
        """Measure the free space, and update `headroom`. Returns the seconds until the next look; None: the next tick."""
        free, min_free = self._space.free_bytes(), self._space.min_free_bytes()
        now, kept = time.monotonic(), self._index.used_bytes()
        while self._looks and self._looks[0].at < now - REMEMBERED_SECONDS:
            self._looks.popleft()
        self._looks.append(Look(now, free - self._came_free, kept + self._evicted))
        looks = list(self._looks)
        self.headroom = headroom(looks, min_free_bytes=min_free)
        return until_next_look(looks, free_bytes=free, min_free_bytes=min_free)

    def too_little(self) -> int:
        """The bytes to remove for `min_free`. Recently removed files may still be mapped; they count as free."""
        now = time.monotonic()
        with self._lock:
            self._unseen = [(until, nbytes) for until, nbytes in self._unseen if until > now]
            unseen = sum(nbytes for _, nbytes in self._unseen)
        return self._space.min_free_bytes() - self._space.free_bytes() - unseen

    def short_of_headroom(self, nbytes: int) -> int:
        """The bytes to remove before `nbytes` more leave the headroom; 0 when no headroom is needed."""
        return self.too_little() + self.headroom + nbytes if self.headroom else 0

    def removed(self, nbytes: int, came_free: int) -> None:
        """Note that `nbytes` were removed, and that `came_free` more bytes were free afterwards."""
        with self._lock:
            self._evicted += nbytes
            # Others write at the same time: all came free, or nothing.
            if came_free >= nbytes // 2:
                self._came_free += nbytes
            else:
                self._unseen.append((time.monotonic() + _UNSEEN_SECONDS, nbytes))
