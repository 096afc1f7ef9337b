"""The state that the processes of a node share for one origin, in a small mapped file, and the rules by which it changes.

A slot is one request in flight. The process that has it holds a kernel lock (an open file description lock) on a byte of the
file, so the slots of a killed process become free. The numbers are doubles. A read is one load without a lock; a change
takes a lock between the processes.

Layout of the file: one page of numbers after a line with the format and the boot of the machine; then a mark for each slot,
one byte that is not 0 while the slot is taken; then a sign of life for each slot (see `runtime.locks`), which its process
writes at intervals (`beat`). The marks are hints, to find a free slot without a system call for each: only the locks count.

The rules for the rate, the window and the gate are pure. They neither wait nor read a clock: times are seconds of one clock,
and random numbers are arguments from [0, 1).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import stat
import struct
import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, cast

from millrace.config import MOST_REQUESTS, SILENCE_SECONDS
from millrace.errors import StorageError
from millrace.runtime import private_files
from millrace.runtime.locks import Sign, has_byte_lock, is_byte_locked, this_process

BURST_SECONDS = 0.1
"""After a pause, a rate allows the requests of this time at once, and at least one."""

FEW_REQUESTS = 4
"""The size of the window when the gate opens again."""

LEAST_REQUESTS = 2
"""The smallest window. With one, a request that hangs would block all others of the node."""

LONGEST_CLOSED_SECONDS = 15 * 60.0
"""The longest time for which a response closes the gate, whatever the origin (or a proxy) requests."""

_FIRST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.25, 4.0
_SHORTEST_PAUSE_SECONDS = 0.05
_ROUNDING_SECONDS = 1e-6
_SPREAD, _MOST_SPREAD_SECONDS = 0.1, 5.0

_PAGE = 4096
_MARKS = _PAGE
_SIGNS = 2 * _PAGE
_SIGN = struct.Struct("<QQQ")
_TIME = struct.Struct("<Q")  # the first number of a sign
_NBYTES = _SIGNS + _SIGN.size * MOST_REQUESTS
_LINE_BYTES = 64  # before the numbers
_FORMAT = b"millrace-limits 3 "

# Each lock is on one byte, which is part of the format. The last byte is behind the end of the file.
_MUTEX_BYTE = 0
_WAITING_BYTE = _NBYTES


class Number(IntEnum):
    """The index of each number. Times are seconds of the machine's monotonic clock. A new file has only zeros."""

    BOOKED_UNTIL = 0
    """The schedule of the rate."""
    CLOSED_UNTIL = 1
    CLOSED_AT = 2
    CLOSINGS = 3
    """How often the gate has closed since the last success."""
    HELD_BACK = 4
    """`MOST_REQUESTS` minus the size of the window."""
    THRESHOLD = 5
    ANSWERED_AT = 6
    """The time of the last response of the origin to this node, exact to a minute; 0 for never."""


_TIMES = (Number.BOOKED_UNTIL, Number.CLOSED_UNTIL, Number.CLOSED_AT)
_FURTHEST_SECONDS = 3600.0  # no booking and no closed gate is further ahead of now


@functools.cache
def _flock(kind: int, byte: int) -> bytes:
    """The kernel's description of a lock on one byte; cached, at most two for each slot."""
    return struct.pack("hhqqi", kind, os.SEEK_SET, byte, 1, 0)


class NodeState:
    """See the module. `NodeState(path)` is shared by all processes that open `path`; `NodeState(None)` is private.

    Not thread-safe, except for reading `numbers`: the caller has a lock for the threads of its process, whose slots all
    belong to one open file description. A forked child must call `after_fork` first.

    Raises `StorageError` or `OSError` if the file cannot be used or the file system has no such locks.
    """

    def __init__(self, path: Path | None) -> None:
        self._locks: int | None = None
        self._mutex_is_stuck = False
        if path is None:
            self._map_private_memory()
            return
        # A separate open file: the map, also that of a child, keeps a copy of its descriptor, which must not hold locks.
        descriptor = _open_file(path)
        try:
            self._map = mmap.mmap(descriptor, _NBYTES)
            mapped = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        self._locks = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.numbers = memoryview(self._map)[_LINE_BYTES:_PAGE].cast("d")
        """By `Number`. Changed by this process only inside `exclusive`."""
        try:
            self._require_same_file(path, mapped)
            self._begin()
        except BaseException:
            self.close()
            raise

    def _map_private_memory(self) -> None:
        self._map = mmap.mmap(-1, _NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.numbers = memoryview(self._map)[_LINE_BYTES:_PAGE].cast("d")

    @property
    def is_shared(self) -> bool:
        return self._locks is not None

    # --- slots ------------------------------------------------------------------------------------

    def find_free(self, start: int, stop: int) -> int:
        """The first slot of `[start, stop)` whose mark is 0; -1 for none."""
        found = self._map.find(b"\0", _MARKS + start, _MARKS + stop)
        return found - _MARKS if found >= 0 else -1

    def take(self, slot: int) -> bool:
        """Take a slot that this process does not have; False if another process has it."""
        if self._locks is not None and not self._lock(_flock(fcntl.F_WRLCK, _MARKS + slot)):
            return False
        _SIGN.pack_into(self._map, _SIGNS + slot * _SIGN.size, time.monotonic_ns(), *this_process())
        self._map[_MARKS + slot] = 1
        return True

    def release(self, slot: int) -> None:
        """Release a slot of this process."""
        self._map[_MARKS + slot] = 0  # before the unlock: only the holder of a slot writes its mark
        if self._locks is not None:
            self._lock(_flock(fcntl.F_UNLCK, _MARKS + slot))

    def beat(self, slot: int) -> None:
        """Write a sign of life for a slot of this process."""
        _TIME.pack_into(self._map, _SIGNS + slot * _SIGN.size, time.monotonic_ns())

    def sign_of(self, slot: int) -> Sign:
        """The last sign of life of the process that has, or had, a slot."""
        return cast(Sign, _SIGN.unpack_from(self._map, _SIGNS + slot * _SIGN.size))

    def has_slot(self, process: int, slot: int) -> bool:
        """Whether a process has a slot. Slow."""
        return self._locks is not None and has_byte_lock(process, self._locks, _MARKS + slot)

    def taken_by_others(self, window: int = 0) -> list[int]:
        """The slots that other processes have. Slots of `[0, window)` need no mark: a process may be stopped before it."""
        if self._locks is None:
            return []
        marks = self._map[_MARKS : _MARKS + MOST_REQUESTS]
        # The marks of a killed process stay; its locks do not.
        looked_at = [slot for slot, mark in enumerate(marks) if mark or slot < window]
        return [slot for slot in looked_at if is_byte_locked(self._locks, _MARKS + slot)]

    # --- waiting processes ------------------------------------------------------------------------

    def set_waiting(self, waiting: bool) -> None:
        """Show the other processes whether a thread of this one waits for a slot."""
        if self._locks is not None:
            self._lock(_flock(fcntl.F_RDLCK if waiting else fcntl.F_UNLCK, _WAITING_BYTE))

    def others_wait(self) -> bool:
        """Whether a thread of another process waits for a slot."""
        if self._locks is None:
            return False
        return is_byte_locked(self._locks, _WAITING_BYTE)

    # --- numbers ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Change the numbers while no other process does. Held for microseconds.

        A process that is stopped at this point must not stop the others. They continue without the lock after
        `SILENCE_SECONDS`, and then without any wait until the lock is free again.
        """
        if self._locks is None:
            yield
            return
        give_up = time.monotonic() + (0.0 if self._mutex_is_stuck else SILENCE_SECONDS)
        pause = 20e-6
        while not (taken := self._lock(_flock(fcntl.F_WRLCK, _MUTEX_BYTE))) and time.monotonic() < give_up:
            time.sleep(pause)
            pause = min(pause * 2, 2e-3)
        self._mutex_is_stuck = not taken
        try:
            yield
        finally:
            self._lock(_flock(fcntl.F_UNLCK, _MUTEX_BYTE))

    def number(self, which: Number) -> float:
        """A number; 0 for an impossible value, as in a damaged file."""
        value: float = self.numbers[which]
        if not value:
            return 0.0  # the usual case, in each request
        most = time.monotonic() + _FURTHEST_SECONDS if which in _TIMES else MOST_REQUESTS
        return value if 0.0 <= value <= most else 0.0

    # --- life -------------------------------------------------------------------------------------

    def after_fork(self) -> None:
        """In a forked child: close the parent's slots, which would otherwise stay taken until the child ends.

        Raises `OSError` if the file cannot be opened again; the state is then private to the child.
        """
        inherited, self._locks = self._locks, None
        try:
            if inherited is not None:
                # Not by name, which may belong to another file by now.
                self._locks = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            if inherited is not None:
                os.close(inherited)
            if self._locks is None:
                self._map_private_memory()

    def close(self) -> None:
        """Release everything. Idempotent."""
        descriptor, self._locks = self._locks, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_locks", None) is not None:
            self.close()

    def _begin(self) -> None:
        """Initialize a new file, and one of another boot, whose times are of another clock."""
        # Read as bytes: text would import a codec, in a thread that sends a request (see `runtime.forks`).
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        line = (_FORMAT + boot).ljust(_LINE_BYTES, b"\n")[:_LINE_BYTES]
        with self.exclusive():
            if self._map[:_LINE_BYTES] != line:
                self._map[:_NBYTES] = bytes(_NBYTES)
                self._map[:_LINE_BYTES] = line

    def _require_same_file(self, path: Path, mapped: os.stat_result) -> None:
        """Check that the locks are on the mapped file: another one may have replaced it between the two opens."""
        assert self._locks is not None
        status = os.fstat(self._locks)
        if not os.path.samestat(status, mapped) or status.st_size < _NBYTES:
            raise StorageError(f"{path} changes while it is opened", next_step="remove it")
        self._lock(_flock(fcntl.F_UNLCK, _MUTEX_BYTE), probing=True)

    def _lock(self, operation: bytes, *, probing: bool = False) -> bool:
        """Execute one lock operation without waiting; False if another process has the lock.

        Any other error (no memory for one more lock) counts as success, because limits must not stop reads. With `probing`
        it is raised.
        """
        assert self._locks is not None
        try:
            fcntl.fcntl(self._locks, fcntl.F_OFD_SETLK, operation)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if probing:
                raise
        return True


def slots_in_use(path: Path) -> int:
    """The slots of the file `path` that processes of this machine hold. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        marks = os.pread(descriptor, MOST_REQUESTS, _MARKS)
        # The marks of a killed process stay; its locks do not.
        return sum(is_byte_locked(descriptor, _MARKS + slot) for slot, mark in enumerate(marks) if mark)
    finally:
        os.close(descriptor)


def _open_file(path: Path) -> int:
    """Open or create the file, with all its space on the disk: a map without space would kill the process."""
    private_files.make_folder(path.parent)
    private_files.make_way(path)
    descriptor = private_files.opener(str(path), os.O_RDWR | os.O_CREAT)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise StorageError(f"{path} is not a file of this user", next_step="remove it")
        os.posix_fallocate(descriptor, 0, _NBYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


# --- the rate -------------------------------------------------------------------------------------


def next_start(booked_until: float, now: float, per_second: float) -> tuple[float, float]:
    """When a new request may start, and the schedule after it (the virtual schedule of GCRA).

    `booked_until` is the present schedule. Each request that starts books `1 / per_second` of it. A request that may not
    start yet books nothing and must call again at its time, because its process may be killed before. So no booking is
    further ahead than an interval and the burst. A booking that is further ahead is ignored.
    """
    interval = 1.0 / per_second
    tolerance = max(BURST_SECONDS - interval, 0.0)
    if booked_until > now + tolerance + interval + _ROUNDING_SECONDS:
        booked_until = now
    booked = max(booked_until, now)
    start = max(now, booked - tolerance)
    return start, booked + interval if start <= now else booked


# --- the window -----------------------------------------------------------------------------------


class Window(NamedTuple):
    """How many requests may be in flight, between `LEAST_REQUESTS` and `most`.

    `size` grows by one for each success below `threshold`, and above it by one for each windowful of successes.
    """

    size: float
    threshold: float
    most: int

    @property
    def requests(self) -> int:
        return max(1, min(int(self.size), self.most))

    @property
    def is_open(self) -> bool:
        """Whether the window is at its maximum."""
        return self.size >= self.most


def after_success(window: Window) -> Window:
    """The window after a successful request."""
    if window.is_open:
        return window  # it may be larger than the maximum of this process
    grown = window.size + (1.0 if window.size < window.threshold else 1.0 / max(window.size, 1.0))
    return window._replace(size=min(grown, float(window.most)))


def after_busy(window: Window) -> Window:
    """The window after a "slow down": a few requests, then fast growth to half of the old size, then slow growth."""
    half = max(float(min(LEAST_REQUESTS, window.most)), min(window.size, float(window.most)) / 2)
    return Window(size=min(half, float(FEW_REQUESTS)), threshold=half, most=window.most)


# --- pauses ---------------------------------------------------------------------------------------


def pause_of_gate(closings: int, retry_after: float | None, draw: float) -> float:
    """For how many seconds the gate closes after a "slow down".

    With `retry_after` (seconds), for that time and a little more, so that the nodes of a cluster do not return together.
    Without, the time doubles with each closing since the last success (`closings`, 0 at first); half of it is random.
    """
    if retry_after is not None:
        requested = max(retry_after, _SHORTEST_PAUSE_SECONDS)
        return min(requested + draw * min(requested * _SPREAD, _MOST_SPREAD_SECONDS), LONGEST_CLOSED_SECONDS)
    whole = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(closings, 20), _MOST_PAUSE_SECONDS)
    return whole * (0.5 + 0.5 * draw)
