"""Runs saves in the background, one at a time, and makes sure that no error is lost.

Leaving the process waits for the save in flight. This happens before the interpreter shuts down its thread pools, so
everything that a save uses still works. An error that was not raised by then is one line on stderr.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its exit handler must be registered first: ours then runs before it
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Literal

from millrace.errors import RetryableError, UsageError
from millrace.events import Event, emit
from millrace.runtime import forks
from millrace.runtime.failures import reason_of

Phase = Literal["staging", "writing", "uploading", "done"]

_MAX_LINE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """The figures of one save.

    `raw_bytes` before the codec, `stored_bytes` in its own files, `restore_bytes` in all files that a whole restore reads.
    The training was blocked by the save for `staged_seconds` and for `waited_seconds` (until an earlier save ended).
    `seconds` is from the call until everything was durable.
    """

    step: int
    url: str
    kind: Literal["full", "delta"]
    raw_bytes: int
    stored_bytes: int
    restore_bytes: int
    staged_seconds: float
    waited_seconds: float
    seconds: float
    chunks_full: int
    chunks_delta: int
    chunks_referenced: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProgress:
    """The progress of a save: `done_bytes` of `total_bytes` in its phase."""

    step: int
    phase: Phase
    done_bytes: int
    total_bytes: int


Report = Callable[[SaveProgress], None]


class ProgressMeter:
    """Adds up bytes from several threads, and reports them in the thread that adds."""

    def __init__(self, step: int, report: Report) -> None:
        self._step, self._report = step, report
        self._lock = threading.Lock()
        self._phase: Phase = "staging"
        self._done = self._total = 0

    def begin(self, phase: Phase, total_bytes: int) -> None:
        """Begin a phase with 0 bytes done; with all of them in the phase "done"."""
        with self._lock:
            self._phase, self._total = phase, total_bytes
            self._done = total_bytes if phase == "done" else 0
            self._emit()

    def advance(self, nbytes: int) -> None:
        """Add `nbytes` to the bytes that are done."""
        with self._lock:
            self._done = min(self._done + nbytes, self._total)
            self._emit()

    def reach(self, done_bytes: int, total_bytes: int) -> None:
        """Set both numbers."""
        with self._lock:
            self._done, self._total = done_bytes, total_bytes
            self._emit()

    def _emit(self) -> None:
        self._report(SaveProgress(step=self._step, phase=self._phase, done_bytes=self._done, total_bytes=self._total))


# `active` in a thread that runs an `on_progress` function.
_in_progress = threading.local()


def refuse_in_progress() -> None:
    """Raise `UsageError` in an `on_progress` function: the save that calls it would wait for itself."""
    if getattr(_in_progress, "active", False):
        raise UsageError(
            "on_progress cannot save, restore, prune, close, or wait for a save",
            next_step="do that in the training loop",
        )


_PIECE_SECONDS = 0.5


def wait_for(ended: threading.Event, timeout: float | None = None) -> bool:
    """`ended.wait(timeout)` in short pieces: a Ctrl-C just before a thread starts to wait does not wake it."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _PIECE_SECONDS if deadline is None else min(_PIECE_SECONDS, deadline - time.monotonic())
        if ended.wait(max(0.0, left)):
            return True
        if deadline is not None and time.monotonic() >= deadline:
            return False


class PendingSave:
    """A save in flight, or one that has ended. Thread-safe.

    `skipped`: nothing was saved, because another save was in flight (`on_busy="skip"`). Then `result()` is None.
    """

    def __init__(self, step: int, *, skipped: bool = False) -> None:
        self.step, self.skipped = step, skipped
        self._ended = threading.Event()
        self._result: SaveResult | None = None
        self._error: BaseException | None = None
        # Whether the error was raised or returned to a caller.
        self._seen = False
        if skipped:
            self._ended.set()

    def __repr__(self) -> str:
        if not self.done():
            state = "in flight"
        elif self.skipped:
            state = "skipped"
        else:
            error = self._known_error()
            state = "saved" if error is None else f"failed: {type(error).__name__}"
        return f"<PendingSave of step {self.step}, {state}>"

    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> SaveResult | None:
        """Wait until the save is durable. Raises its error, and `TimeoutError` if it takes longer than `timeout` seconds."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended and return its error. Raises `TimeoutError` as `result` does."""
        if not self.done():
            refuse_in_progress()
        if not wait_for(self._ended, timeout):
            raise TimeoutError(f"the save of step {self.step} takes longer than {timeout} s")
        self._seen = True
        return self._error

    def _known_error(self) -> BaseException | None:
        """The error so far. This does not count as seen."""
        return self._error

    def _end(self, result: SaveResult | None, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._ended.set()

    def _take_error(self) -> BaseException | None:
        """The error if it was not seen yet. It is seen from now on."""
        if self._seen or self._error is None:
            return None
        self._seen = True
        return self._error

    def _end_in_child(self) -> None:
        # Another thread of the parent may have held the old one's lock.
        ended, self._ended = self._ended, threading.Event()
        if not ended.is_set():
            self._error = UsageError(
                f"the save of step {self.step} is in flight in the process from which this one was forked",
                next_step="call its result() there",
            )
            self._seen = True
        self._ended.set()


class SaveRunner:
    """Runs saves in a background thread, one at a time. Thread-safe.

    In a forked process there is no save in flight, and a new one is a `UsageError`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: PendingSave | None = None
        self._failed: deque[PendingSave] = deque()
        self._closed = False
        self._owner = forks.Owner()

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        current = self._current
        return current is not None and not current.done()

    @property
    def last_error(self) -> BaseException | None:
        """The error of the last save, if it has ended with one. This does not count as seen."""
        current = self._current
        return None if current is None else current._known_error()

    def submit(
        self,
        step: int,
        work: Callable[[Report], SaveResult],
        *,
        on_progress: Report | None = None,
        unused: Callable[[Exception], None] = lambda error: None,
    ) -> PendingSave:
        """Run `work` in a background thread, after any save in flight.

        `work` is called with a function that passes its argument to `on_progress`, in the same thread. Raises `UsageError`
        after `close`, and in a forked process. Errors of `work` are raised by the returned object or by `check`. An error of
        `on_progress`, of any kind, is an event and does not end the save. `unused` is called with an error if
        this raises, as after Ctrl-C, and `work` never runs.

        Call `drain` before staging a state for this: then no more than one state is in flight.
        """
        if not self._owner.is_this_process:
            raise UsageError(
                f"step {step} cannot be saved in a process forked from the one that saves",
                next_step="save in the training process, or make another manager here",
            )
        pending = PendingSave(step)
        # Taken by the thread, which then ends the save, or by this call if the thread never runs.
        to_end = [pending]
        try:
            with self._lock:
                if self._closed:
                    raise UsageError(f"step {step} comes after the end of saving", next_step="save before closing")
                self.drain()
                # Not a daemon: if waiting at exit is impossible, Python itself waits.
                thread = threading.Thread(
                    target=copy_context().run,
                    args=(self._run, to_end, work, on_progress),
                    name=f"millrace-save-{step}",
                    daemon=False,
                )
                _registry.begin(pending)
                self._current = pending
                try:
                    thread.start()
                except RuntimeError:
                    # No more threads, or the interpreter is about to end: then this thread runs it.
                    self._run(to_end, work, on_progress)
        except BaseException:
            _end_unbegun(to_end, unused)
            raise
        return pending

    def check(self) -> None:
        """Raise the error of an earlier save that was not seen yet, once."""
        while self._failed:
            error = self._failed.popleft()._take_error()
            if error is not None:
                raise error

    def drain(self, timeout: float | None = None) -> float:
        """Wait for the save in flight, at most `timeout` seconds. Returns the seconds waited. Ignores the save's error."""
        refuse_in_progress()
        current = self._current
        if current is None or current.done():
            return 0.0
        began = time.monotonic()
        wait_for(current._ended, timeout)
        return time.monotonic() - began

    def close(self) -> None:
        """Wait for the save in flight and accept no more. Idempotent."""
        self._closed = True
        self.drain()

    def _run(self, to_end: list[PendingSave], work: Callable[[Report], SaveResult], on_progress: Report | None) -> None:
        try:
            pending = to_end.pop()
        except IndexError:  # interrupted before it began
            return
        result: SaveResult | None = None
        failure: BaseException | None = None
        try:
            result = work(_safe(on_progress))
        except BaseException as error:  # noqa: BLE001 - raised by `result` or `check`
            failure = error
            self._failed.append(pending)
            # The frames refer to the whole state. This frame remains, and refers to it through `work`.
            traceback.clear_frames(error.__traceback__)
        del work
        _registry.end(pending, result, failure)


def _end_unbegun(to_end: list[PendingSave], unused: Callable[[Exception], None]) -> None:
    """End the save in `to_end`, which is empty if the thread has begun. The caller of `submit` receives the error."""
    try:
        pending = to_end.pop()
    except IndexError:
        return
    pending._seen = True
    # Not the error itself, whose traceback refers to the state.
    error = RetryableError(f"step {pending.step}: its save did not begin", next_step="save again")
    _registry.end(pending, None, error)
    unused(error)


def _safe(on_progress: Report | None) -> Report:
    def report(progress: SaveProgress) -> None:
        if on_progress is None:
            return
        _in_progress.active = True
        try:
            on_progress(progress)
        except BaseException as error:  # noqa: BLE001 - a fault of the listener, of any kind
            emit(Event(name="checkpoint.progress.failed", subject=f"step {progress.step}", detail=reason_of(error)))
        finally:
            _in_progress.active = False

    return report


class _Registry:
    """All saves of this process that are in flight, or have failed with an error that was not seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: set[PendingSave] = set()
        self._failed: list[PendingSave] = []

    def begin(self, pending: PendingSave) -> None:
        with self._lock:
            self._in_flight.add(pending)

    def end(self, pending: PendingSave, result: SaveResult | None, error: BaseException | None) -> None:
        with self._lock:
            if error is not None:
                self._failed = [*(one for one in self._failed if not one._seen), pending]
            pending._end(result, error)
            self._in_flight.discard(pending)

    def drain_and_print(self) -> None:
        while (pending := self._any_in_flight()) is not None:  # the end of a near save starts its upload
            wait_for(pending._ended)
        self.print_errors()

    def _any_in_flight(self) -> PendingSave | None:
        with self._lock:
            return next((pending for pending in self._in_flight if not pending.done()), None)

    def print_errors(self) -> None:
        """Print the errors that were not seen, and the saves that did not end, to stderr."""
        for pending in self._failed:
            error = pending._take_error()
            if error is not None:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_LINE]
                _print(f"the save of step {pending.step} failed: {reason}")
        for pending in tuple(self._in_flight):
            _print(f"the save of step {pending.step} was interrupted, and is lost")

    def reset_in_child(self) -> None:
        in_flight, failed = self._in_flight, self._failed
        self.__init__()  # type: ignore[misc]
        for pending in (*in_flight, *failed):
            pending._end_in_child()


def _print(line: str) -> None:
    try:
        print(f"millrace: {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        # Stderr is closed.
        return


_registry = _Registry()

# `atexit` itself is too late: by then thread pools, which some storages use, accept no more work.
_before_pools_end: Any = getattr(threading, "_register_atexit", atexit.register)
_before_pools_end(_registry.drain_and_print)
# Again for saves that were interrupted there, for example by a second Ctrl-C.
atexit.register(_registry.print_errors)
forks.reset_in_child(_registry.reset_in_child)
