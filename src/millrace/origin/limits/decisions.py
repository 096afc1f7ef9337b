"""The decisions of the limiter, as pure functions: rate, stopped processes, window, pauses, and what to retry.

Nothing here waits or reads a clock. Times are seconds of one clock, whose zero does not
matter. Random numbers are arguments from [0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum

from millrace.config import SILENCE_SECONDS
from millrace.errors import MillraceError, OriginBusyError, OriginUnavailableError
from millrace.runtime.locks import GRACE_SECONDS

BURST_SECONDS = 0.1
"""After a pause, a rate allows the requests of this time at once, and at least one."""

FEW_REQUESTS = 4
"""The size of the window when the gate opens again."""

LEAST_REQUESTS = 2
"""The smallest window. With one, a request that hangs would block all others of the node."""

LONGEST_CLOSED_SECONDS = 15 * 60.0
"""The longest time for which a response closes the gate, whatever the origin (or a proxy) requests."""

_FIRST_BACKOFF_SECONDS, _MOST_BACKOFF_SECONDS = 0.5, 5.0
_FIRST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.25, 4.0
_SHORTEST_PAUSE_SECONDS = 0.05
_ROUNDING_SECONDS = 1e-6
_LOOK_AGAIN_SECONDS = SILENCE_SECONDS / 2
_SPREAD, _MOST_SPREAD_SECONDS = 0.1, 5.0


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


# --- slots of stopped processes -------------------------------------------------------------------


def _none_runs(slots: Collection[int]) -> Collection[int]:
    return ()


class SilentSlots:
    """Counts the slots of stopped processes. A slot's mark changes at intervals while its process runs.

    Other processes use as many additional slots. Otherwise a stopped process that has all slots would stop every process of
    the node.
    """

    def __init__(self) -> None:
        self._marks = b""
        self._changed: list[float] = []
        self._looked = -math.inf
        self._silent: frozenset[int] = frozenset()

    def look(
        self, marks: bytes, now: float, running: Callable[[Collection[int]], Collection[int]] = _none_runs
    ) -> None:
        """Compare the marks of all slots (0: free) at `now` with those of the last call, which must be recent to count.

        `running` returns the slots whose processes run although their marks have not changed, as on a busy machine. It is
        called for slots that would be counted from now on.
        """
        if now - self._looked > _LOOK_AGAIN_SECONDS:
            self._changed = [now] * len(marks)
        else:
            for slot, (old, new) in enumerate(zip(self._marks, marks, strict=True)):
                if old != new:
                    self._changed[slot] = now
        self._marks, self._looked = marks, now
        silent = frozenset(
            slot
            for slot, (mark, since) in enumerate(zip(marks, self._changed, strict=True))
            if mark and now - since >= SILENCE_SECONDS
        )
        if candidates := silent - self._silent:
            for active in running(candidates):
                self._changed[active] = now - SILENCE_SECONDS + GRACE_SECONDS  # checked again in a moment
                silent -= {active}
        self._silent = silent

    def count(self, now: float) -> int:
        """The number of these slots at the last look; 0 if that was too long ago."""
        return len(self._silent) if now - self._looked <= _LOOK_AGAIN_SECONDS else 0


# --- the window -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
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
    return replace(window, size=min(grown, float(window.most)))


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


def backoff(failures: int, draw: float) -> float:
    """The wait before the next try of a request, after `failures` tries (1 at first), with full jitter.

    Between 0 and a maximum that doubles up to 5 s: requests that failed together do not return together.
    """
    return draw * min(_FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 20), _MOST_BACKOFF_SECONDS)


# --- what is retried, and for how long ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Patience:
    """When retries end: after `seconds` of trouble (failed tries, pauses, a closed gate), or `tries` failed tries.

    A response "slow down" counts by its time only. The wait for a slot is not trouble: a node with much to read waits as
    long as necessary.
    """

    seconds: float = 60.0
    tries: int = 12


PATIENCE = Patience()
"""For every request; read at each request, so that a test can change it. A server that restarts is waited for 10 to 20
seconds. One that refuses connections for about half a minute, or does not respond for a minute, is an error."""


def patience_within(timeout: float | None) -> Patience:
    """The patience with the option `timeout` (seconds, None: not set).

    No try starts after two thirds of the time, and none takes longer than the last third. So a request without a response
    is sent twice.
    """
    if timeout is None:
        return PATIENCE
    return Patience(seconds=min(PATIENCE.seconds, timeout - request_seconds(timeout)), tries=PATIENCE.tries)


def request_seconds(timeout: float) -> float:
    """The longest time of a single request with the option `timeout`, both in seconds."""
    return timeout / 3


class Verdict(Enum):
    """What an error means for its request."""

    RAISE = "raise"
    RETRY = "retry"
    WAIT_FOR_GATE = "wait"
    """Retry when the gate is open. The origin has refused this request without any effect."""


def verdict_on(error: MillraceError) -> Verdict:
    """Whether a retry can help: only if the origin is busy or unavailable."""
    if isinstance(error, OriginBusyError):
        return Verdict.WAIT_FOR_GATE
    passing = isinstance(error, OriginUnavailableError) and not error.is_final
    return Verdict.RETRY if passing else Verdict.RAISE


def patience_with(error: MillraceError, usual_seconds: float, *, answered_lately: bool) -> float:
    """For how many seconds a request that fails with `error` is retried.

    A server that restarts in the middle of a run is waited for. An address that never worked is not: an unknown host, or a
    port without TLS, does not change.
    """
    brief = error.brief_seconds if isinstance(error, OriginUnavailableError) else None
    return usual_seconds if brief is None or answered_lately else min(brief, usual_seconds)


def is_unsure(error: MillraceError) -> bool:
    """Whether the failed try may have had its effect.

    This matters only for a PUT that must create a new object: the second try finds the object of the first.
    """
    return verdict_on(error) is Verdict.RETRY
