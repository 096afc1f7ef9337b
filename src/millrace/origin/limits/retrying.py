"""Executes operations on an origin: each request in a slot, and each operation as often as the patience allows.

An operation may need several requests, one after the other. So `retried` is around the operation and `in_slot` around each
request, in the same thread. They share the `_Trouble` of the operation, which `_current` holds for the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from millrace.errors import (
    ChangedError,
    MillraceError,
    MissingError,
    ObjectExistsError,
    OriginBusyError,
    OriginUnavailableError,
    OutcomeUnknownError,
    shown_key,
)
from millrace.events import Event, emit, fetch_id
from millrace.origin.limits.slots import JITTER, GateClosed, NodeLimiter, Slot
from millrace.origin.protocol import request_seconds

_log = logging.getLogger("millrace.origin")

Result = TypeVar("Result")

_FIRST_BACKOFF_SECONDS, _MOST_BACKOFF_SECONDS = 0.5, 5.0


# --- what is retried, and for how long ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Patience:
    """When retries end: after `seconds` of trouble (failed tries, pauses, a closed gate), or `tries` failed tries.

    A response "slow down" counts by its time only. The wait for a slot is not trouble: a node with much to read waits as
    long as necessary.
    """

    seconds: float = 60.0
    tries: int = 60


PATIENCE = Patience()
"""For every request; read at each request, so that a test can change it. The time ends first, after some 26 tries: training
continues after a server that was away for half a minute, also if it refused connections."""


def patience_within(timeout: float | None) -> Patience:
    """The patience with the option `timeout` (seconds, None: not set).

    No try starts after two thirds of the time, and none takes longer than the last third. So a request without a response
    is sent twice.
    """
    if timeout is None:
        return PATIENCE
    return Patience(seconds=min(PATIENCE.seconds, timeout - request_seconds(timeout)), tries=PATIENCE.tries)


def backoff(failures: int, draw: float) -> float:
    """The wait before the next try of a request, after `failures` tries (1 at first), with full jitter.

    Between 0 and a maximum that doubles up to 5 s: requests that failed together do not return together.
    """
    return draw * min(_FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 20), _MOST_BACKOFF_SECONDS)


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


def patience_with(error: MillraceError, usual_seconds: float, *, responded_lately: bool) -> float:
    """For how many seconds a request that fails with `error` is retried.

    A server that restarts in the middle of a run is waited for. An address that never worked is not: an unknown host, or a
    port without TLS, does not change.
    """
    brief = error.brief_seconds if isinstance(error, OriginUnavailableError) else None
    return usual_seconds if brief is None or responded_lately else min(brief, usual_seconds)


def is_unsure(error: MillraceError) -> bool:
    """Whether the failed try may have had its effect.

    This matters only for a PUT that must create a new object: the second try finds the object of the first.
    """
    return verdict_on(error) is Verdict.RETRY


# --- requests and operations ----------------------------------------------------------------------


def retried(url: str, operation: Callable[[], Result], *, once: bool = False, timeout: float | None = None) -> Result:
    """Call `operation` until it succeeds, fails for good, or the patience ends. `url` is for messages.

    Raises the error of the last try, with the number and time of the tries. With `once`, the operation must create a new
    object: if it finds one after a try that may have created it, that is an `OutcomeUnknownError`. `timeout` is the option
    of that name.
    """
    trouble, outer = _Trouble(url, timeout), _current.trouble
    try:
        while True:
            _current.trouble = trouble
            trouble.begin()
            try:
                return operation()
            except MillraceError as error:
                if error is trouble.refused:
                    raise
                if verdict_on(error) is Verdict.RAISE:
                    if isinstance(error, ObjectExistsError) and trouble.unsure is not None:
                        raise _unknown_outcome(url, trouble.unsure) from error
                    raise
                trouble.failed(error)
                if once and is_unsure(error):
                    trouble.unsure = error
            trouble.check()
            trouble.pause()
    finally:
        _current.trouble = outer


def in_slot(
    limiter: NodeLimiter,
    url: str,
    request: Callable[[], Result],
    request_retry_after: Callable[[], float | None],
    *,
    timeout: float | None = None,
) -> Result:
    """Call `request` once, in a slot of `limiter`. Raises its error, and `OriginBusyError` if the gate stays closed.

    `request_retry_after` is called, once for the whole node, when a busy origin did not send `Retry-After`.
    """
    trouble = _current.trouble or _Trouble(url, timeout)
    responded = False
    slot = Slot()
    try:
        trouble.acquire(limiter, slot)
        try:
            result = request()
            responded = True
            if _log.isEnabledFor(logging.DEBUG):
                trouble.log_request(time.monotonic() - slot.started)
            limiter.note_response()
            return result
        except MillraceError as error:
            responded = verdict_on(error) is Verdict.RAISE
            if isinstance(error, MissingError | ChangedError):  # only the origin itself can report these
                limiter.note_response()
            trouble.responded_lately = limiter.responded_lately
            if isinstance(error, OriginBusyError):
                trouble.close_gate(limiter, slot, error, request_retry_after)
            raise
    finally:
        limiter.release(slot, responded=responded)


class _Trouble:
    """The failures of one operation. `seconds` counts failed tries and their pauses, but not the waits for slots."""

    def __init__(self, url: str, timeout: float | None) -> None:
        self._url = url
        self._patience = patience_within(timeout)
        self._last: MillraceError | None = None
        self._tries = 0
        self._counted_tries = 0
        self._began = 0.0
        self._waited = 0.0
        self.seconds = 0.0
        self.responded_lately = False
        self.unsure: MillraceError | None = None
        """The error of the last try that may have had its effect."""
        self.refused: MillraceError | None = None
        """The error for a gate that stays closed for too long: no request was sent, and none will be."""

    def begin(self) -> None:
        """Start the clock of a try."""
        self._began, self._waited = time.monotonic(), 0.0

    def acquire(self, limiter: NodeLimiter, slot: Slot) -> None:
        """Wait for a slot. Raises `OriginBusyError` if the gate stays closed for longer than the patience lasts."""
        began = time.monotonic()
        acquired = limiter.acquire(self._patience.seconds - self.seconds, slot)
        self._waited += time.monotonic() - began
        if isinstance(acquired, GateClosed):
            self.refused = self._gate_error(acquired.seconds)
            raise self.refused
        self.seconds += slot.gate_seconds

    def close_gate(
        self,
        limiter: NodeLimiter,
        slot: Slot,
        error: OriginBusyError,
        request_retry_after: Callable[[], float | None],
    ) -> None:
        """Close the gate while the slot is held, so that no request starts in between; this request uses the same slot."""
        first = limiter.close_gate(slot, error.retry_after)
        if first and error.retry_after is None:
            began = time.monotonic()
            limiter.wait_for_rate()
            self._waited += time.monotonic() - began
            error.retry_after = request_retry_after()
            if error.retry_after is not None:
                limiter.close_gate(slot, error.retry_after)

    def failed(self, error: MillraceError) -> None:
        """Count a failed try."""
        self._last = error
        self._tries += 1
        self._counted_tries += not isinstance(error, OriginBusyError)
        self.seconds += max(0.0, time.monotonic() - self._began - self._waited)
        emit(Event(name="origin.request.failed", subject=shown_key(self._url), detail=f"try {self._tries}: {error}"))

    def log_request(self, seconds: float) -> None:
        """Log a request that succeeded."""
        found = fetch_id.get()
        part = f" (fetch {found})" if found else ""
        _log.debug(
            "%s: a request took %.6f s, after %.6f s in the queue%s", shown_key(self._url), seconds, self._waited, part
        )

    def pause(self) -> None:
        """Wait before the next try. The pause for a busy origin is at its gate."""
        if not isinstance(self._last, OriginBusyError):
            wait = min(backoff(self._counted_tries, JITTER.random()), self._most_seconds() - self.seconds)
            time.sleep(wait)
            self.seconds += wait

    def check(self) -> None:
        """Raise the error of the last try if there must be no other one."""
        if self._last is not None and (
            self.seconds >= self._most_seconds() or self._counted_tries >= self._most_tries()
        ):
            raise self._final_error(self._last) from self._last

    def _most_seconds(self) -> float:
        if self._last is None:
            return self._patience.seconds
        return patience_with(self._last, self._patience.seconds, responded_lately=self.responded_lately)

    def _most_tries(self) -> int:
        most = self._last.most_tries if isinstance(self._last, OriginUnavailableError) else None
        return self._patience.tries if most is None else min(most, self._patience.tries)

    def _gate_error(self, seconds: float) -> MillraceError:
        tried = f" ({self._so_far()})" if self._tries else ""
        error = OriginBusyError(
            f"{self._url}: the origin requests a lower rate, and a pause of {seconds:.0f} s more{tried}",
            next_step="try again after that, or lower 'request_rate' and 'max_requests'",
            retry_after=seconds,
        )
        error.__cause__ = self._last
        return error

    def _final_error(self, last: MillraceError) -> MillraceError:
        message = f"{last.message} ({self._so_far()})"
        if isinstance(last, OriginBusyError):
            return OriginBusyError(message, next_step=last.next_step, retry_after=last.retry_after)
        return OriginUnavailableError(message, next_step=last.next_step)

    def _so_far(self) -> str:
        times = "once" if self._tries == 1 else f"{self._tries} times"
        return f"tried {times} in {self.seconds:.1f} s"


class _Current(threading.local):
    """The operation of this thread. A signal handler may start another one, so `retried` restores the previous value."""

    trouble: _Trouble | None = None


_current = _Current()


def _unknown_outcome(url: str, lost: MillraceError) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"{url} exists now, made by this write, whose response was lost ({lost.message}), or by another",
        next_step="read it to see whose it is",
    )
