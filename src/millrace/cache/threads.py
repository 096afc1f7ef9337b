"""The threads in which a node fetches: a pool for what somebody waits for, one for what is only expected."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads(Protocol):
    """Where fetches run. Thread-safe; not to be used in a forked child."""

    @property
    def demand(self) -> Executor:
        """For what somebody waits for."""
        ...

    @property
    def ahead(self) -> Executor:
        """For what is only expected to be wanted; may lie in a queue for long."""
        ...

    def pause(self, executor: Executor, seconds: float, work: Callable[[], None], refused: Callable[[], None]) -> bool:
        """Run `work` in `executor` after a pause that takes no thread of it; or call `refused`, where it is closed by then.

        True: the pause is over already, and the caller is to go on by itself.
        """
        ...


class Pools:
    """The `Threads` of a node."""

    def __init__(self, *, demand: Executor, ahead: Executor) -> None:
        self.demand = demand
        self.ahead = ahead
        self._pausing = _Pausing()

    def pause(self, executor: Executor, seconds: float, work: Callable[[], None], refused: Callable[[], None]) -> bool:
        """See `Threads.pause`."""

        def submit() -> None:
            try:
                executor.submit(work)
            except RuntimeError:  # closed, or the interpreter is shutting down
                refused()

        self._pausing.call_after(seconds, submit)
        return False

    def close(self) -> None:
        """Wait for what is under way in the pools."""
        self.ahead.shutdown(wait=True, cancel_futures=False)
        self.demand.shutdown(wait=True)


class _Inline(Executor):
    """Runs what is submitted at once, in the calling thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the future carries it, as with any executor
            future.set_exception(error)
        return future


class CallersThread:
    """The `Threads` of those who bring threads of their own: everything happens in the calling one, pauses included."""

    def __init__(self) -> None:
        self.demand: Executor = _Inline()
        self.ahead: Executor = self.demand

    def pause(self, executor: Executor, seconds: float, work: Callable[[], None], refused: Callable[[], None]) -> bool:
        """See `Threads.pause`."""
        time.sleep(seconds)
        return True


CALLERS_THREAD = CallersThread()
"""For all of them: it has no state."""


class _Pausing:
    """Calls functions after a pause, all from one thread, which is there while it has something to wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()  # of two that are due at once the older goes first
        self._running = False

    def call_after(self, seconds: float, function: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), function))
            if not self._running:
                threading.Thread(target=self._run, name="millrace-pausing", daemon=True).start()
                self._running = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._due:
                    self._running = False
                    return
                pause = self._due[0][0] - time.monotonic()
                if pause > 0:
                    self._changed.wait(pause)
                    continue
                function = heapq.heappop(self._due)[2]
            function()
