"""Saves that run beside the training: one at a time, none of them lost in silence.

Leaving the process waits for the save in flight. That happens before the interpreter shuts down its thread pools, so
everything that a save uses still works. An error that nobody has asked for by then is one line on stderr.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its end of work first, so that ours comes before it
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from millrace.errors import ConfigurationError, UsageError
from millrace.events import Event, emit

OnBusy = Literal["wait", "skip"]
Phase = Literal["staging", "writing", "uploading", "done"]

_MAX_LINE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """What one save has written, and what it took.

    `raw_bytes` before the codec, `stored_bytes` in files of its own, `restore_bytes` in all that a whole restore reads.
    `staged_seconds` and `waited_seconds` (for an earlier save) are what the training loop waited; `seconds` is from the call
    until everything was durable.
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
    """How far a save has come: `done_bytes` of `total_bytes` in its phase."""

    step: int
    phase: Phase
    done_bytes: int
    total_bytes: int


Report = Callable[[SaveProgress], None]

_PIECE_SECONDS = 0.5


def wait_for(ended: threading.Event, timeout: float | None = None) -> bool:
    """`ended.wait(timeout)` in short pieces: a Ctrl-C that comes just before a thread goes to sleep does not wake it."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _PIECE_SECONDS if deadline is None else min(_PIECE_SECONDS, deadline - time.monotonic())
        if ended.wait(max(0.0, left)):
            return True
        if deadline is not None and time.monotonic() >= deadline:
            return False


class PendingSave:
    """A save in flight, or one that has ended. Thread-safe.

    `skipped`: nothing is saved, because another save was in flight (`on_busy="skip"`); `result()` is None then.
    """

    def __init__(self, step: int, *, skipped: bool = False) -> None:
        self.step, self.skipped = step, skipped
        self._ended = threading.Event()
        self._result: SaveResult | None = None
        self._error: BaseException | None = None
        # Whether somebody knows of the error.
        self._seen = False
        if skipped:
            self._ended.set()

    @classmethod
    def skip(cls, step: int) -> PendingSave:
        """One that is not made."""
        return cls(step, skipped=True)

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
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> SaveResult | None:
        """Wait until the save is durable. Raises its error, and `TimeoutError` after `timeout` seconds without an end."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended and return its error. Raises `TimeoutError` as `result` does."""
        if not wait_for(self._ended, timeout):
            raise TimeoutError(f"the save of step {self.step} takes longer than {timeout} s")
        self._seen = True
        return self._error

    def _known_error(self) -> BaseException | None:
        """What has gone wrong so far; whoever asks has not seen it yet."""
        return self._error

    def _end(self, result: SaveResult | None, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._ended.set()

    def _take_error(self) -> BaseException | None:
        """The error, if nobody has seen it; from now on somebody has."""
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
                next_step="ask for its result there",
            )
            self._seen = True
        self._ended.set()


class SaveRunner:
    """Runs saves in a thread of their own, one at a time. Thread-safe.

    `on_busy` says what becomes of a save while another is in flight: "wait" for that one, or "skip" it.
    In a forked process there is no save in flight, and a new one is a `UsageError`.
    """

    def __init__(self, *, on_busy: OnBusy = "wait") -> None:
        if on_busy not in ("wait", "skip"):
            raise ConfigurationError(f"on_busy={on_busy!r}", next_step="choose 'wait' or 'skip'")
        self._on_busy = on_busy
        self._lock = threading.Lock()
        self._current: PendingSave | None = None
        self._failed: deque[PendingSave] = deque()
        self._closed = False
        self._process = os.getpid()

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        current = self._current
        return current is not None and not current.done()

    def submit(
        self, step: int, work: Callable[[Report], SaveResult], *, on_progress: Report | None = None
    ) -> PendingSave:
        """Run `work` in a thread of its own, after any save that is in flight; or skip it.

        What `work` gives to its argument reaches `on_progress`, in the same thread. Raises `UsageError` after `close`,
        and in a forked process. Errors of `work` come from the returned object, or else from `check`; what `on_progress`
        raises is an event, and no save ends by it.

        Whoever stages a state for this calls `drain` before (or looks at `busy`, to skip): then no more than one state
        is in flight, and none is staged in vain.
        """
        if os.getpid() != self._process:
            raise UsageError(
                f"step {step} cannot be saved in a process forked from the one that saves",
                next_step="save in the training process, or make another manager here",
            )
        with self._lock:
            if self._closed:
                raise UsageError(f"step {step} comes after the end of saving", next_step="save before closing")
            if self.busy and self._on_busy == "skip":
                return PendingSave.skip(step)
            self.drain()
            pending = PendingSave(step)
            # Not daemonic: should waiting at exit be impossible, Python itself waits.
            thread = threading.Thread(
                target=self._run, args=(pending, work, on_progress), name=f"millrace-save-{step}", daemon=False
            )
            _registry.begin(pending)
            self._current = pending
            try:
                thread.start()
            except RuntimeError:
                # No more threads, or the interpreter is about to end: then this thread does it.
                self._run(pending, work, on_progress)
        return pending

    def check(self) -> None:
        """Raise the error of an earlier save, if there is one that nobody has seen; once."""
        while self._failed:
            error = self._failed.popleft()._take_error()
            if error is not None:
                raise error

    def drain(self, timeout: float | None = None) -> float:
        """Wait for the save in flight, `timeout` seconds at most; the seconds that this took. Raises nothing of it."""
        current = self._current
        if current is None or current.done():
            return 0.0
        began = time.monotonic()
        wait_for(current._ended, timeout)
        return time.monotonic() - began

    def close(self) -> None:
        """Wait for the save in flight and take no more. May be called again."""
        self._closed = True
        self.drain()

    def _run(self, pending: PendingSave, work: Callable[[Report], SaveResult], on_progress: Report | None) -> None:
        result: SaveResult | None = None
        failure: BaseException | None = None
        try:
            result = work(_safe(on_progress))
        except BaseException as error:  # noqa: BLE001 - raised where somebody asks
            failure = error
            self._failed.append(pending)
            # The frames hold the whole state; this one goes on, and holds it by `work`.
            traceback.clear_frames(error.__traceback__)
        del work
        _registry.end(pending, result, failure)


def _safe(on_progress: Report | None) -> Report:
    def report(progress: SaveProgress) -> None:
        if on_progress is None:
            return
        try:
            on_progress(progress)
        except Exception as error:  # noqa: BLE001 - the listener's fault, of any kind
            detail = f"{type(error).__name__}: {error}"
            emit(Event(name="checkpoint.progress.failed", subject=f"step {progress.step}", detail=detail))

    return report


class _Registry:
    """All saves of this process that are in flight, or have failed without anybody knowing."""

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

    def drain_and_tell(self) -> None:
        for pending in tuple(self._in_flight):
            wait_for(pending._ended)
        self.tell()

    def tell(self) -> None:
        """Say on stderr what nobody knows yet."""
        for pending in self._failed:
            error = pending._take_error()
            if error is not None:
                _say(f"the save of step {pending.step} failed: {_in_short(error)}")
        for pending in tuple(self._in_flight):
            _say(f"the save of step {pending.step} was broken off, and is lost")

    def reset_in_child(self) -> None:
        in_flight, failed = self._in_flight, self._failed
        self.__init__()  # type: ignore[misc]
        for pending in (*in_flight, *failed):
            pending._end_in_child()


def _in_short(error: BaseException) -> str:
    # Torch's exception for all ranks prints tracebacks: the first rank's error says what happened.
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_LINE]


def _say(line: str) -> None:
    try:
        print(f"millrace: {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        # Stderr is closed: there is nowhere left to say it.
        return


_registry = _Registry()

# `atexit` itself is too late: by then thread pools, which some storages use, take no more work.
_before_pools_end: Any = getattr(threading, "_register_atexit", atexit.register)
_before_pools_end(_registry.drain_and_tell)
# For what was broken off there, by a second Ctrl-C say.
atexit.register(_registry.tell)
os.register_at_fork(after_in_child=_registry.reset_in_child)
