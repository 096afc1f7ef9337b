"""Runs work on several threads and returns the results in order, in bounded memory, with every error raised."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextvars import copy_context
from typing import Generic, TypeVar, cast

Job = TypeVar("Job")
Result = TypeVar("Result")

_MAX_DEFAULT_THREADS = 8
_SIGNAL_SECONDS = 0.5  # a signal just before the kernel starts to wait does not end the wait


def default_threads() -> int:
    """One thread per core that this process may use, up to eight: beyond that, storage is the limit."""
    return min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)))


def run_in_order(jobs: Iterable[Job], work: Callable[[Job], Result], threads: int) -> Generator[Result, None, None]:
    """Yield `work(job)` for every job, in order.

    At most `2 * threads + 2` jobs are begun and not yet yielded. `jobs` is consumed in the caller's thread. The first
    exception of any job, in order, is raised here, after every running job has ended and the rest has been dropped.

    Also works while the interpreter shuts down, if the caller waits for the results.
    """
    pool = ThreadPool(work, threads)
    pending: deque[_Call[Job, Result]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(job))
            if len(pending) > 2 * threads + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for call in pending:
            call.is_cancelled = True
        pool.close()
        for call in pending:
            call.forget()


class _Call(Generic[Job, Result]):
    """One job, and its outcome for the one thread that waits for it.

    No `Future`: an interrupt (Ctrl-C) of that thread in the Python code of its condition would block the pool without end.
    """

    __slots__ = ("_ended", "_error", "_result", "is_cancelled", "job")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.is_cancelled = False
        self._ended = threading.Lock()
        self._ended.acquire()
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self, work: Callable[[Job], Result]) -> None:
        """Do the job, unless it is cancelled."""
        if not self.is_cancelled:
            try:
                self._result = work(self.job)
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                self._error = error
        del self.job  # its memory, which may be much, is free before the result is used
        self._ended.release()

    def forget(self) -> None:
        """Drop the error of a job whose result is not used. Its traceback refers to this call and the caller's data."""
        self._error = None

    def result(self) -> Result:
        """Wait for the end of the job; returns or raises its outcome. Called once."""
        while not self._ended.acquire(timeout=_SIGNAL_SECONDS):
            pass
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # the traceback refers to both frames of this call: a cycle
        return cast(Result, self._result)


class ThreadPool(Generic[Job, Result]):
    """Threads for one kind of work, started on demand.

    Accepts work after the main thread has ended, unlike `ThreadPoolExecutor`.
    """

    def __init__(self, work: Callable[[Job], Result], size: int) -> None:
        self._work, self._size = work, size
        self._jobs: queue.SimpleQueue[_Call[Job, Result] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> _Call[Job, Result]:
        if len(self._threads) < self._size:
            # Daemons: the caller that waits for the results decides how long they run.
            name = f"millrace-checkpoint-{len(self._threads)}"
            thread = threading.Thread(target=copy_context().run, args=(self._run,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        call: _Call[Job, Result] = _Call(job)
        self._jobs.put(call)
        return call

    def close(self) -> None:
        """Wait for the jobs that are not cancelled."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (call := self._jobs.get()) is not None:
            call.run(self._work)
            del call  # no reference to the job or its result while this thread waits
