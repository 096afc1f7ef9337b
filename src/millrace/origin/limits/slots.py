"""Limits the requests of all processes of a node to one origin: slots, gate and rate.

`NodeLimiter` makes requests wait. Its state is common to the processes: a `NodeState`, in a small mapped file.

A slot is one request in flight. The process that has it holds a kernel lock (an open file description lock) on a byte of the
file, so the slots of a killed process become free. The rest of the state are doubles (`Number`). A read of one is one load
without a lock; a change takes a lock between the processes.

Layout of the file: one page of numbers after a line with the format and the boot of the machine; then a mark for each slot,
one byte that is not 0 while the slot is taken; then a sign of life for each slot (see `runtime.locks`), which its process
writes at intervals (`beat`). The marks are hints, to find a free slot without a system call for each: only the locks count.

The rules for the rate, the window and the gate, at the end, are pure. They neither wait nor read a clock: times are seconds
of one clock, and random numbers are arguments from [0, 1).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import math
import mmap
import os
import random
import stat
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast

from millrace.config import MOST_REQUESTS, SILENCE_SECONDS
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.runtime import forks, private_files
from millrace.runtime.failures import reason_of
from millrace.runtime.locks import Sign, SilenceCheck, has_byte_lock, is_byte_locked, start_beats, this_process

JITTER = random.SystemRandom()
"""Random numbers from the operating system, so that forked children do not draw the same ones. Thread-safe. Not from
`random` itself, whose state belongs to the user, who seeds and saves it for exact resumption."""

# How often a process looks for a slot that another one released: the first and the longest interval.
_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.001, 0.02
# How often it tries every slot: the marks of a killed process stay.
_THOROUGH_SECONDS = 1.0
# How often a waiter counts the slots of stopped processes, and for how long a count is used.
_COUNT_SECONDS, _COUNTED_SECONDS = 0.1, 1.0
# Other waiters are woken. They also look by themselves, in case a wake-up is lost.
_BEHIND_SECONDS = 0.5
# For how long a response shows that an origin's address is right, so that failures are retried; how often one is noted.
_LATELY_SECONDS = 3600.0
_NOTED_SECONDS = 60.0

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


# --- slots, gate and queue --------------------------------------------------------------------------


class Slot:
    """The slot of one request: empty when created, then in the queue, then with a `number`.

    `started` is the time at which it was acquired; `gate_seconds` the part of the wait for a closed gate. A limiter refers
    to slots weakly: one without references, because its thread was interrupted twice, is released.
    """

    __slots__ = ("__weakref__", "_bell", "gate_seconds", "number", "started")

    def __init__(self) -> None:
        self.number = -1
        self.started = 0.0
        self.gate_seconds = 0.0
        self._bell: threading.Lock | None = None

    def sleep(self, seconds: float) -> None:
        """Wait until `wake`, at most so long."""
        assert self._bell is not None
        self._bell.acquire(timeout=seconds)

    def prepare_sleep(self) -> None:
        """Must be called before other threads may call `wake`."""
        self._bell = threading.Lock()
        self._bell.acquire()

    def wake(self) -> None:
        """Called with the limiter's lock."""
        if self._bell is not None and self._bell.locked():
            self._bell.release()


@dataclass(frozen=True, slots=True)
class GateClosed:
    """No slot: the gate stays closed for `seconds`, longer than the caller would wait."""

    seconds: float


class NodeLimiter:
    """Limits the requests in flight to one origin and the requests that start in a second, and closes its gate.

    `most` and `per_second` (None: no limit) are for this process. The state is common to all processes that use the file
    `path`. If the file cannot be used, the state is private to this process, and an event (`origin.limits.private`) has the
    reason. Where the user has set no limit (`is_default`), the event is another one (`origin.limits.default`) that is not a
    warning: the cache in the same directory warns already.

    Thread-safe. Safe across fork: the child has none of the parent's requests in flight and uses the same file. Signals
    interrupt a wait, as any sleep.
    """

    def __init__(
        self, identity: str, path: Path | None, *, most: int, per_second: float | None, is_default: bool = False
    ) -> None:
        self._identity = identity
        self._is_default = is_default
        self.path = path
        self.most = most
        self.per_second = per_second
        self._state: NodeState | None = None
        beat = weakref.WeakMethod(self._beat)
        self._weak_beat = lambda: (method := beat()) is not None and method()  # does not keep the limiter alive
        self._after_fork()

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._schedule = threading.Lock()
        self._waiting: deque[weakref.ref[Slot]] = deque()
        self._held: dict[int, weakref.ref[Slot]] = {}
        self._lost: deque[weakref.ref[Slot]] = deque()
        self._next = JITTER.randrange(MOST_REQUESTS)
        self._thorough_at = 0.0
        self._silence: SilenceCheck | None = None
        self._silent = 0
        self._counted_at = -math.inf
        state = self._state
        if state is not None:
            try:
                state.after_fork()
            except OSError as error:
                self._report_private(reason_of(error))

    @property
    def is_idle(self) -> bool:
        """Whether no request of this process has a slot or waits for one."""
        return not self._held and not self._waiting

    # --- one request ------------------------------------------------------------------------------

    def acquire(self, patience_seconds: float, slot: Slot | None = None) -> Slot | GateClosed:
        """Wait until a request may start. Every `Slot` must be passed to `release`.

        `patience_seconds` limits the total wait for a closed gate. The wait for a free slot has no limit, unless stopped
        processes hold the slots. A caller that may be interrupted creates the `slot` before the `try` whose `finally`
        releases it.
        """
        slot = slot or Slot()
        try:
            return self._acquire(slot, patience_seconds)
        except BaseException:
            self._let_go(slot)
            raise

    def _acquire(self, slot: Slot, patience_seconds: float) -> Slot | GateClosed:
        while True:
            pause = self._closed_for()
            if pause > 0:
                if slot.gate_seconds + pause > patience_seconds:
                    return GateClosed(pause)
                time.sleep(pause)
                slot.gate_seconds += pause
                continue
            if not self._take_slot(slot):
                continue
            self.wait_for_rate()
            if self._closed_for() <= 0:
                slot.started = time.monotonic()
                return slot
            self._let_go(slot)

    def release(self, slot: Slot, *, responded: bool) -> None:
        """Release a slot, also an empty one. `responded`: the origin responded, and not with "slow down"."""
        self._let_go(slot)
        if responded:
            self._succeeded(slot)

    @property
    def responded_lately(self) -> bool:
        """Whether the origin has responded to any process of this node in the last hour."""
        at = self._shared_state().numbers[Number.ANSWERED_AT]
        return bool(at) and 0 <= time.monotonic() - at < _LATELY_SECONDS

    def note_response(self) -> None:
        """Record that the origin has served a request."""
        state, now = self._shared_state(), time.monotonic()
        if not 0 <= now - state.numbers[Number.ANSWERED_AT] < _NOTED_SECONDS:
            with self._lock, state.exclusive():
                state.numbers[Number.ANSWERED_AT] = now

    def wait_for_rate(self) -> None:
        """Wait until the rate allows one more request."""
        if self.per_second is None:
            return
        state = self._shared_state()
        with self._schedule:  # one thread of a process looks, the others follow
            while True:
                with self._lock, state.exclusive():
                    now, booked = time.monotonic(), state.number(Number.BOOKED_UNTIL)
                    start, state.numbers[Number.BOOKED_UNTIL] = next_start(booked, now, self.per_second)
                if start <= now:
                    return
                time.sleep(start - now)

    # --- gate and window --------------------------------------------------------------------------

    def close_gate(self, slot: Slot, retry_after: float | None) -> bool:
        """Close the gate for the whole node after a "slow down", for `retry_after` seconds if the origin sent that.

        Of requests that were in flight together only the first counts; True for that one.
        """
        state = self._shared_state()
        with self._lock, state.exclusive():
            now, numbers = time.monotonic(), state.numbers
            first = slot.started > state.number(Number.CLOSED_AT) or now < state.number(Number.CLOSED_AT)
            closings = int(state.number(Number.CLOSINGS))
            pause = left = self._closed_for()
            if first or retry_after is not None:
                pause = max(left, pause_of_gate(closings, retry_after, JITTER.random()))
                numbers[Number.CLOSED_UNTIL] = now + pause
            if first:
                numbers[Number.CLOSED_AT] = now
                numbers[Number.CLOSINGS] = closings + 1
                self._set_window(after_busy(self._window()))
        if first or pause > left + 1.0:
            requested = "" if retry_after is None else f", the origin requested {retry_after:.3g} s"
            emit(Event(name="origin.gate.closed", subject=self._identity, detail=f"for {pause:.2f} s{requested}"))
        return first

    def _succeeded(self, slot: Slot) -> None:
        state = self._shared_state()
        numbers = state.numbers
        if not numbers[Number.CLOSINGS] and MOST_REQUESTS - numbers[Number.HELD_BACK] >= self.most:
            return  # the usual case
        with self._lock, state.exclusive():
            if slot.started <= state.number(Number.CLOSED_AT):
                return  # started before the closing, so it does not show that the origin has recovered
            closings, numbers[Number.CLOSINGS] = int(state.number(Number.CLOSINGS)), 0.0
            window = after_success(self._window())
            self._set_window(window)
        if closings:
            detail = f"pauses before: {closings}; requests at once now: {window.requests}"
            emit(Event(name="origin.gate.opened", subject=self._identity, detail=detail))

    def _closed_for(self) -> float:
        """The seconds until the gate opens; 0 or less if it is open."""
        until = self._shared_state().number(Number.CLOSED_UNTIL)
        seconds = until - time.monotonic() if until else 0.0
        return seconds if seconds <= LONGEST_CLOSED_SECONDS else 0.0

    def _window(self) -> Window:
        state = self._shared_state()
        return Window(MOST_REQUESTS - state.number(Number.HELD_BACK), state.number(Number.THRESHOLD), self.most)

    def _set_window(self, window: Window) -> None:
        numbers = self._shared_state().numbers
        numbers[Number.HELD_BACK] = MOST_REQUESTS - window.size
        numbers[Number.THRESHOLD] = window.threshold

    # --- slots ------------------------------------------------------------------------------------

    def _take_slot(self, slot: Slot) -> bool:
        """Take a slot, first come, first served; False if the gate has closed meanwhile."""
        state = self._shared_state()
        with self._lock:
            if self._first_waiting(state) is None and self._take_free(state, slot):
                return True
            slot.prepare_sleep()
            self._waiting.append(weakref.ref(slot))
            if len(self._waiting) == 1:
                state.set_waiting(True)
        took = self._wait_for_slot(state, slot)
        with self._lock:
            self._end_wait(state, slot)
        return took

    def _wait_for_slot(self, state: NodeState, slot: Slot) -> bool:
        look = _FIRST_LOOK_SECONDS
        while True:
            with self._lock:
                first = self._first_waiting(state) is slot
                if first and state.is_shared:
                    self._look_for_silent(state)
                if first and self._take_free(state, slot):
                    return True
            if self._closed_for() > 0:
                return False
            # Only the first waiter of a process looks for the slots that other processes release.
            slot.sleep(look * JITTER.uniform(0.5, 1.0) if first else _BEHIND_SECONDS)
            look = min(look * 1.5, _LAST_LOOK_SECONDS) if first else _FIRST_LOOK_SECONDS

    def _look_for_silent(self, state: NodeState) -> None:
        """Count the slots of stopped processes, at intervals. Called with the lock.

        Other processes use as many additional slots. Otherwise a stopped process that has all slots would stop every process
        of the node.
        """
        now = time.monotonic()
        if now >= self._counted_at + _COUNT_SECONDS:
            self._silence = check = self._silence or SilenceCheck(state.sign_of, {}, state.has_slot)
            taken = state.taken_by_others(self._window().requests + self._silent)
            self._silent = sum(map(check.is_silent, taken))
            self._counted_at = now

    def _first_waiting(self, state: NodeState) -> Slot | None:
        """The next waiter of this process; called with the lock."""
        while self._waiting:
            slot = self._waiting[0]()
            if slot is not None:
                return slot
            self._waiting.popleft()
            if not self._waiting:
                state.set_waiting(False)
        return None

    def _end_wait(self, state: NodeState, slot: Slot) -> None:
        """Remove the slot from the queue, if it is there; called with the lock."""
        reference = weakref.ref(slot)
        if reference in self._waiting:
            self._waiting.remove(reference)
            if not self._waiting:
                state.set_waiting(False)
        if (following := self._first_waiting(state)) is not None:
            following.wake()

    def _take_free(self, state: NodeState, slot: Slot) -> bool:
        """Take any free slot within the window; called with the lock."""
        if self._lost:
            count = len(self._lost)
            for number in [number for number, holder in self._held.items() if holder() is None]:
                self._give_back(state, number)
            for _ in range(count):  # last: after an interrupt before this, the next call only looks again
                self._lost.popleft()
        now = time.monotonic()
        silent = self._silent if now < self._counted_at + _COUNTED_SECONDS else 0
        stop = min(self._window().requests + silent, MOST_REQUESTS)
        start = self._next % stop
        for begin, end in ((start, stop), (0, start)):
            number = state.find_free(begin, end)
            while number >= 0:
                if self._take(state, number, slot):
                    return True
                number = state.find_free(number + 1, end)
        if now >= self._thorough_at:
            for number in range(stop):
                if self._take(state, number, slot):
                    return True
            self._thorough_at = now + _THOROUGH_SECONDS  # only without success: a killed process may have had several
        return False

    def _take(self, state: NodeState, number: int, slot: Slot) -> bool:
        """Try to take a slot. An entry in `_held` precedes the lock and outlives it, so that no interrupt loses a slot."""
        if number in self._held:
            return False
        slot.number = number
        self._held[number] = weakref.ref(slot, self._lost.append)
        if state.take(number):
            self._next = number
            if state.is_shared:
                start_beats(self._weak_beat)
            return True
        del self._held[number]
        return False

    def _beat(self) -> bool:
        """Write a sign of life for each slot of this process; returns whether it has any."""
        state = self._state
        if state is not None and self._lock.acquire(blocking=False):  # the thread that has it may be delayed
            try:
                for number in self._held:
                    state.beat(number)
            finally:
                self._lock.release()
        return bool(self._held)

    def _give_back(self, state: NodeState, number: int) -> None:
        state.release(number)
        del self._held[number]

    def _let_go(self, slot: Slot) -> None:
        """Release what the slot has: its number or its place in the queue. Idempotent."""
        state = self._shared_state()
        with self._lock:
            holder = self._held.get(slot.number)
            if holder is not None and holder() is slot:  # otherwise empty, or the parent's from before a fork
                self._give_back(state, slot.number)
            if not self._waiting:
                return
            if weakref.ref(slot) in self._waiting:
                self._end_wait(state, slot)
            # If other processes wait, too, each gets the same chance. Otherwise the next waiter need not look.
            elif not state.others_wait() and (following := self._first_waiting(state)) is not None:
                following.wake()

    # --- the shared state -------------------------------------------------------------------------

    def _shared_state(self) -> NodeState:
        state = self._state
        if state is None:
            with self._lock:
                state = self._state
                if state is None:
                    state = self._state = self._open_state()
        return state

    def _open_state(self) -> NodeState:
        if self.path is None:
            self._report_private("this user has no cache directory")
            return NodeState(None)
        try:
            return NodeState(self.path)
        except (StorageError, OSError) as error:
            self._report_private(reason_of(error))
            return NodeState(None)

    def _report_private(self, reason: str) -> None:
        name = "origin.limits.default" if self._is_default else "origin.limits.private"
        detail = reason if self.path is None else f"{self.path}: {reason}"
        emit(Event(name=name, subject=self._identity, detail=detail))


# --- one limiter for each origin in a process ---------------------------------------------------------

_limiters: weakref.WeakValueDictionary[Hashable, NodeLimiter] = weakref.WeakValueDictionary()
_limiters_lock = threading.Lock()


def node_limiter(
    identity: str, path: Path | None, *, most: int, per_second: float | None, is_default: bool = False
) -> NodeLimiter:
    """This process's limiter with these limits, which exists as long as it is used. Opens no file."""
    key = (identity, path, most, per_second, is_default)
    with _limiters_lock:
        limiter = _limiters.get(key)
        if limiter is None:
            limiter = _limiters[key] = NodeLimiter(
                identity, path, most=most, per_second=per_second, is_default=is_default
            )
        return limiter


def _after_fork_in_child() -> None:
    global _limiters_lock
    _limiters_lock = threading.Lock()
    for limiter in list(_limiters.values()):
        limiter._after_fork()


forks.reset_in_child(_after_fork_in_child)


# --- the state of the node ----------------------------------------------------------------------------


class Number:
    """The index of each number. Times are seconds of the machine's monotonic clock. A new file has only zeros.

    Not an enumeration: in Python 3.11 access to a member is a function call, which costs a request half a microsecond.
    """

    BOOKED_UNTIL: Final = 0
    """The schedule of the rate."""
    CLOSED_UNTIL: Final = 1
    CLOSED_AT: Final = 2
    CLOSINGS: Final = 3
    """How often the gate has closed since the last success."""
    HELD_BACK: Final = 4
    """`MOST_REQUESTS` minus the size of the window."""
    THRESHOLD: Final = 5
    ANSWERED_AT: Final = 6
    """The time of the last response of the origin to this node, exact to a minute; 0 for never."""


_TIMES = (Number.BOOKED_UNTIL, Number.CLOSED_UNTIL, Number.CLOSED_AT)
_FURTHEST_SECONDS = 3600.0  # no booking and no closed gate is further ahead of now


@functools.cache
def _flock(kind: int, byte: int) -> bytes:
    """The kernel's description of a lock on one byte; cached, at most two for each slot."""
    return struct.pack("hhqqi", kind, os.SEEK_SET, byte, 1, 0)


class NodeState:
    """What the processes of a node share, see the module.

    `NodeState(path)` is shared by all processes that open `path`; `NodeState(None)` is private.

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

    def number(self, which: int) -> float:
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
