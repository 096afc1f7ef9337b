"""Runs work on several threads and returns the results in order, in bounded memory, with every error raised."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

_MAX_DEFAULT_THREADS = 8


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
    pending: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(job))
            if len(pending) > 2 * threads + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        pool.close()


class ThreadPool(Generic[Job, Result]):
    """Threads for one kind of work, started on demand.

    Accepts work after the main thread has ended, unlike `ThreadPoolExecutor`.
    """

    def __init__(self, work: Callable[[Job], Result], size: int) -> None:
        self._work, self._size = work, size
        self._jobs: queue.SimpleQueue[tuple[Future[Result], Job] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> Future[Result]:
        if len(self._threads) < self._size:
            # Daemons: the caller that waits for the results decides how long they run.
            name = f"millrace-checkpoint-{len(self._threads)}"
            thread = threading.Thread(target=copy_context().run, args=(self._run,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        future: Future[Result] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Wait for the jobs that are not cancelled."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = self._work(job)
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # Keep no reference while this thread waits.
            del entry, future, job
