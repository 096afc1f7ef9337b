"""Carries one request to an origin out: with a turn of the budget, and as often as its patience allows."""

from __future__ import annotations

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


def carry_out(
    budget: Budget,
    what: str,
    request: Callable[[], Result],
    ask_retry_after: Callable[[], float | None],
    *,
    once: bool = False,
) -> Result:
    """Call `request` until it succeeds, fails for good, or `patience.PATIENCE` is used up. `what` is its URL, for people.

    `ask_retry_after` is called, once for the whole node, when an origin that is busy did not say for how long. Raises what
    `request` raises; the error of the last try says how often and how long it was tried. With `once` the request must make
    a new object: where it finds one, after a try of its own that may have made it, that is an `OutcomeUnknownError`.
    """
    trouble = _Trouble(what)
    while True:
        turn, answered = Turn(), False
        try:
            entered = budget.enter(trouble.seconds_left, turn)
            if isinstance(entered, Closed):
                raise trouble.closed(entered.seconds)
            trouble.seconds += turn.closed_seconds
            try:
                result = request()
                answered = True
                return result
            except MillraceError as error:
                answered = verdict_on(error) is Verdict.RAISE
                if answered:
                    if isinstance(error, ObjectExistsError) and trouble.unsure is not None:
                        raise _whose(what, trouble.unsure) from error
                    raise
                trouble.failed(error, time.monotonic() - turn.began)
                if once and is_unsure(error):
                    trouble.unsure = error
                if isinstance(error, OriginBusyError):
                    _close_gate(budget, turn, error, ask_retry_after)
        finally:
            budget.leave(turn, answered=answered)
        trouble.check()
        trouble.pause()


def _close_gate(
    budget: Budget, turn: Turn, error: OriginBusyError, ask_retry_after: Callable[[], float | None]
) -> None:
    """Before the turn is given back: nobody begins a request in between, and the question is one of those in flight."""
    first = budget.busy(turn, error.retry_after)
    if first and error.retry_after is None:
        error.retry_after = ask_retry_after()
        if error.retry_after is not None:
            budget.busy(turn, error.retry_after)


class _Trouble:
    """What one request has met so far. `seconds` counts failing tries and the pauses for them, not the waits for a turn."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._patience = patience.PATIENCE
        self._last: MillraceError | None = None
        self._tries = 0
        self._counted_tries = 0
        self.seconds = 0.0
        self.unsure: MillraceError | None = None

    @property
    def seconds_left(self) -> float:
        return self._patience.seconds - self.seconds

    def failed(self, error: MillraceError, seconds: float) -> None:
        self._last = error
        self._tries += 1
        self._counted_tries += not isinstance(error, OriginBusyError)
        self.seconds += seconds
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

    def closed(self, seconds: float) -> MillraceError:
        """The error for a gate that stays closed for longer than the patience lasts."""
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


def _whose(what: str, lost: MillraceError) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"{what} exists now, made by this write, whose answer was lost ({lost.message}), or by another",
        next_step="read it to see whose it is",
    )
