"""Carries questions to an origin out: each request in a turn, and each question as often as patience allows.

The two are apart, since a question may cost several requests, one after the other: `retried` is around the question,
`in_turn` around each request, in the same thread. What they know of each other is in the thread's `_now`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from millrace.errors import (
    MillraceError,
    ObjectExistsError,
    OriginBusyError,
    OriginUnavailableError,
    OutcomeUnknownError,
)
from millrace.events import Event, emit
from millrace.origin.limits import patience
from millrace.origin.limits.budget import Budget, Closed, Turn
from millrace.origin.limits.chance import CHANCE
from millrace.origin.limits.decisions import Verdict, backoff, is_unsure, verdict_on

Result = TypeVar("Result")


def retried(what: str, question: Callable[[], Result], *, once: bool = False) -> Result:
    """Call `question` until it succeeds, fails for good, or `patience.PATIENCE` is used up. `what` is its URL, for people.

    Raises what it raises; the error of the last try says how often and how long it was tried. With `once` it must make a
    new object: where it finds one, after a try of its own that may have made it, that is an `OutcomeUnknownError`.
    """
    trouble, outer = _Trouble(what), _now.trouble
    try:
        while True:
            _now.trouble = trouble
            trouble.begin()
            try:
                return question()
            except MillraceError as error:
                if error is trouble.refused:
                    raise
                if verdict_on(error) is Verdict.RAISE:
                    if isinstance(error, ObjectExistsError) and trouble.unsure is not None:
                        raise _whose(what, trouble.unsure) from error
                    raise
                trouble.failed(error)
                if once and is_unsure(error):
                    trouble.unsure = error
            trouble.check()
            trouble.pause()
    finally:
        _now.trouble = outer


def in_turn(
    budget: Budget, what: str, request: Callable[[], Result], ask_retry_after: Callable[[], float | None]
) -> Result:
    """Call `request` once, with a turn of `budget`. Raises what it raises, and `OriginBusyError` for a gate that stays shut.

    `ask_retry_after` is called, once for the whole node, when an origin that is busy did not say for how long.
    """
    trouble, outer = _now.trouble or _Trouble(what), _now.kept
    succeeded = answered = False
    turn = Turn()
    try:
        trouble.enter(budget, turn)
        _now.kept = None
        try:
            result = request()
            succeeded = answered = True
            return result
        except MillraceError as error:
            answered = verdict_on(error) is Verdict.RAISE
            if isinstance(error, OriginBusyError):
                trouble.close_gate(budget, turn, error, ask_retry_after)
            raise
    finally:
        kept, _now.kept = _now.kept if turn.began else None, outer
        if succeeded and kept is not None:
            kept.begin(budget, turn)
        else:
            budget.leave(turn, answered=answered)


def keep() -> Callable[[], None]:
    """Inside of `in_turn`, in its thread: the turn of a request that succeeds ends when what this gives is called."""
    kept = _now.kept = _Kept()
    return kept.end


class _Kept:
    """A turn that outlives its request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._turn: tuple[Budget, Turn] | None = None

    def begin(self, budget: Budget, turn: Turn) -> None:
        with self._lock:
            if not self._ended:
                self._turn = (budget, turn)
                budget.answered(turn)
                return
        budget.leave(turn, answered=True)

    def end(self) -> None:
        """Idempotent; also before the request has returned."""
        with self._lock:
            self._ended = True
            kept, self._turn = self._turn, None
        if kept is not None:
            kept[0].leave(kept[1], answered=False)


class _Now(threading.local):
    """What this thread is about. A signal's handler may ask something of its own meanwhile: all put back what they found."""

    trouble: _Trouble | None = None
    kept: _Kept | None = None


class _Trouble:
    """What one question has met so far. `seconds` counts failing tries and the pauses for them, not the waits for turns."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._patience = patience.PATIENCE
        self._last: MillraceError | None = None
        self._tries = 0
        self._counted_tries = 0
        self._began = 0.0
        self._waited = 0.0
        self.seconds = 0.0
        self.unsure: MillraceError | None = None
        self.refused: MillraceError | None = None
        """What was raised because the gate stays closed for too long: no request was sent, and none will be."""

    @property
    def seconds_left(self) -> float:
        return self._patience.seconds - self.seconds

    def begin(self) -> None:
        """A try begins."""
        self._began, self._waited = time.monotonic(), 0.0

    def enter(self, budget: Budget, turn: Turn) -> None:
        """Wait for a turn. Raises `OriginBusyError` where the gate stays closed for longer than the patience lasts."""
        asked = time.monotonic()
        entered = budget.enter(self.seconds_left, turn)
        self._waited += time.monotonic() - asked
        if isinstance(entered, Closed):
            self.refused = self._closed(entered.seconds)
            raise self.refused
        self.seconds += turn.closed_seconds

    def close_gate(
        self, budget: Budget, turn: Turn, error: OriginBusyError, ask_retry_after: Callable[[], float | None]
    ) -> None:
        """Before the turn is given back: nobody begins a request in between, and the question is one of those in flight."""
        first = budget.busy(turn, error.retry_after)
        if first and error.retry_after is None:
            asked = time.monotonic()
            budget.book()
            self._waited += time.monotonic() - asked
            error.retry_after = ask_retry_after()
            if error.retry_after is not None:
                budget.busy(turn, error.retry_after)

    def failed(self, error: MillraceError) -> None:
        self._last = error
        self._tries += 1
        self._counted_tries += not isinstance(error, OriginBusyError)
        self.seconds += max(0.0, time.monotonic() - self._began - self._waited)
        emit(Event(name="origin.request.failed", subject=self._what, detail=f"try {self._tries}: {error}"))

    def pause(self) -> None:
        """Wait before the next try; an origin that is busy is waited for at its gate."""
        if not isinstance(self._last, OriginBusyError):
            wait = min(backoff(self._counted_tries, CHANCE.random()), self.seconds_left)
            time.sleep(wait)
            self.seconds += wait

    def check(self) -> None:
        """Raise the error of the last try when no other one is due."""
        if self._last is not None and (self.seconds_left <= 0 or self._counted_tries >= self._patience.tries):
            raise self._told(self._last) from self._last

    def _closed(self, seconds: float) -> MillraceError:
        tried = f" ({self._so_far()})" if self._tries else ""
        error = OriginBusyError(
            f"{self._what}: the origin asks for fewer requests, and for a pause of {seconds:.0f} s more{tried}",
            next_step="try again after that, or lower 'request_rate' and 'max_requests'",
            retry_after=seconds,
        )
        error.__cause__ = self._last
        return error

    def _told(self, last: MillraceError) -> MillraceError:
        message = f"{last.message} ({self._so_far()})"
        if isinstance(last, OriginBusyError):
            return OriginBusyError(message, next_step=last.next_step, retry_after=last.retry_after)
        return OriginUnavailableError(message, next_step=last.next_step)

    def _so_far(self) -> str:
        times = "once" if self._tries == 1 else f"{self._tries} times"
        return f"tried {times} in {self.seconds:.1f} s"


_now = _Now()


def _whose(what: str, lost: MillraceError) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"{what} exists now, made by this write, whose answer was lost ({lost.message}), or by another",
        next_step="read it to see whose it is",
    )
