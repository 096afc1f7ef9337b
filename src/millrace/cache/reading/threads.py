"""The threads in which a node fetches: one pool for reads that a caller waits for, one for prefetches."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

_log = logging.getLogger("millrace.cache")

P = ParamSpec("P")
T = TypeVar("T")


class Pools:
    """The pools in which a node fetches. Thread-safe; not usable after a fork.

    `demand` is for fetches that a caller waits for, `ahead` for prefetches, which may wait in the queue for long.
    """

    def __init__(self, *, demand: Executor, ahead: Executor) -> None:
        self.demand = demand
        self.ahead = ahead
        self._pausing = _Pausing()

    def pause(self, executor: Executor, seconds: float, work: Callable[[], None], refused: Callable[[], None]) -> bool:
        """Run `work` in `executor` after a pause that takes none of its threads; or call `refused` if it is closed by then.

        True: the pause is already over, and the caller continues by itself.
        """

        def submit() -> None:
            try:
                executor.submit(work)
            except BaseException:  # noqa: BLE001 - closed, or no thread: without this the waiters would wait without end
                refused()

        self._pausing.call_after(seconds, submit)
        return False

    def close(self) -> None:
        """Wait for the work in progress in the pools."""
        self.ahead.shutdown(wait=True, cancel_futures=False)
        self.demand.shutdown(wait=True)


class _Inline(Executor):
    """Runs submitted work at once, in the calling thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the future carries it, as with any executor; an interrupt is raised
            future.set_exception(error)
        return future


class CallersThread:
    """For callers with their own threads: fetches and pauses run in the calling thread. Used as `Pools`."""

    def __init__(self) -> None:
        self.demand: Executor = _Inline()
        self.ahead: Executor = self.demand

    def pause(self, executor: Executor, seconds: float, work: Callable[[], None], refused: Callable[[], None]) -> bool:
        time.sleep(seconds)
        return True


Threads = Pools | CallersThread

CALLERS_THREAD = CallersThread()
"""One for all callers: it has no state."""


class _Pausing:
    """Calls functions after a pause, all from one thread, which exists while calls are pending."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # entered instead of its condition, which an interrupt could leave locked
        self._changed = threading.Condition(self._lock)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()  # of two that are due at once the older is called first
        self._running = False

    def call_after(self, seconds: float, function: Callable[[], None]) -> None:
        with self._lock:
            if not self._running:  # if no thread can be started this raises, and nothing was scheduled
                threading.Thread(target=self._run, name="millrace-pausing", daemon=True).start()
                self._running = True
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), function))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._running = False
                    return
                pause = self._due[0][0] - time.monotonic()
                if pause > 0:
                    self._changed.wait(pause)
                    continue
                function = heapq.heappop(self._due)[2]
            try:
                function()
            except BaseException:  # noqa: BLE001 - this thread serves all pauses of the process
                _log.exception("a defect in a fetch that was to continue after a pause")
