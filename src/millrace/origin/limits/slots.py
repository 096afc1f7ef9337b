"""Limits the requests of all processes of a node to one origin: slots, gate and rate, shared through a `NodeState`."""

from __future__ import annotations

import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from millrace.config import MOST_REQUESTS
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.origin.limits.node_state import (
    LONGEST_CLOSED_SECONDS,
    NodeState,
    Number,
    Window,
    after_busy,
    after_success,
    next_start,
    pause_of_gate,
)
from millrace.runtime import forks
from millrace.runtime.failures import reason_of
from millrace.runtime.locks import SilenceCheck, start_beats

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
