"""What to do, and when: the decisions of the limits, as pure functions. Nothing here waits, reads a clock or keeps anything.

Times are seconds of one clock, whose zero does not matter. Randomness comes in as a number from [0, 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from millrace.errors import MillraceError, OriginBusyError, OriginUnavailableError

BURST_SECONDS = 0.1
"""What a rate allows at once after a pause: as many requests as belong to so long a time, and at least one."""

FEW_REQUESTS = 4
"""What goes to an origin at first when its gate has opened again."""

LEAST_REQUESTS = 2
"""The smallest window: with one, a request that hangs would hold up all others of the node."""

LONGEST_CLOSED_SECONDS = 15 * 60.0
"""No answer closes a gate for longer: after that somebody asks again, whatever the origin (or a proxy) said."""

_FIRST_BACKOFF_SECONDS, _MOST_BACKOFF_SECONDS = 0.5, 5.0
_FIRST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.25, 4.0
_SHORTEST_PAUSE_SECONDS = 0.05
_ROUNDING_SECONDS = 1e-6
_SPREAD, _MOST_SPREAD_SECONDS = 0.1, 5.0


# --- the rate -------------------------------------------------------------------------------------


def next_start(booked_until: float, now: float, per_second: float) -> tuple[float, float]:
    """When a request may begin that comes now, and the schedule after it (the virtual schedule of GCRA).

    `booked_until` is the schedule so far: each request that begins books `1 / per_second` of it, from now on at the
    earliest. One that may not begin yet books nothing, and asks again at its time: it may be gone by then, its process
    killed. So no booking at this rate is further ahead than an interval and the burst; one that is counts as none.
    """
    interval = 1.0 / per_second
    tolerance = max(BURST_SECONDS - interval, 0.0)
    if booked_until > now + tolerance + interval + _ROUNDING_SECONDS:
        booked_until = now
    booked = max(booked_until, now)
    start = max(now, booked - tolerance)
    return start, booked + interval if start <= now else booked


# --- the window -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """How many requests may be in flight: `size` grows by one for each success below `threshold`, above it by one for each
    windowful of successes. Between `LEAST_REQUESTS` and `most`.
    """

    size: float
    threshold: float
    most: int

    @property
    def requests(self) -> int:
        return max(1, min(int(self.size), self.most))

    @property
    def is_open(self) -> bool:
        """Whether nothing is held back."""
        return self.size >= self.most


def after_success(window: Window) -> Window:
    if window.is_open:
        return window  # it may be larger than this process uses
    grown = window.size + (1.0 if window.size < window.threshold else 1.0 / max(window.size, 1.0))
    return replace(window, size=min(grown, float(window.most)))


def after_busy(window: Window) -> Window:
    """A few at first, then quickly up to the half of what was too much, then slowly."""
    half = max(float(min(LEAST_REQUESTS, window.most)), min(window.size, float(window.most)) / 2)
    return Window(size=min(half, float(FEW_REQUESTS)), threshold=half, most=window.most)


# --- pauses ---------------------------------------------------------------------------------------


def pause_of_gate(closings: int, retry_after: float | None, draw: float) -> float:
    """For how many seconds nobody of the node asks an origin that is busy.

    As long as it asked for, and a little more, so that the nodes of a cluster do not all come back in the same moment. Where
    it did not say: twice as long for each closing since the last success (`closings`, 0 at first), half of it by chance.
    """
    if retry_after is not None:
        asked = max(retry_after, _SHORTEST_PAUSE_SECONDS)
        return min(asked + draw * min(asked * _SPREAD, _MOST_SPREAD_SECONDS), LONGEST_CLOSED_SECONDS)
    whole = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(closings, 20), _MOST_PAUSE_SECONDS)
    return whole * (0.5 + 0.5 * draw)


def backoff(failures: int, draw: float) -> float:
    """How long one request waits before it is tried again, after `failures` tries (1 at first): full jitter.

    Anything between nothing and a ceiling that doubles, up to 5 s: requests that failed together do not come back together.
    """
    return draw * min(_FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 20), _MOST_BACKOFF_SECONDS)


# --- what may be tried again ----------------------------------------------------------------------


class Verdict(Enum):
    """What an error means for the request that met it."""

    RAISE = "raise"
    RETRY = "retry"
    WAIT_FOR_GATE = "wait"
    """Try again when the origin wants requests again; it has refused this one without doing anything."""


def verdict_on(error: MillraceError) -> Verdict:
    """Whether another try can help. Everything but a busy and an unavailable origin stays as it is."""
    if isinstance(error, OriginBusyError):
        return Verdict.WAIT_FOR_GATE
    passing = isinstance(error, OriginUnavailableError) and not error.is_final
    return Verdict.RETRY if passing else Verdict.RAISE


def is_unsure(error: MillraceError) -> bool:
    """Whether the try that failed so may have done its work all the same.

    Twice is as once, but for a put that must make a new object: a second try finds what the first one made.
    """
    return verdict_on(error) is Verdict.RETRY
