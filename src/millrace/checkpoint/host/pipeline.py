"""Runs work on several threads and gives the results in order, in bounded memory, with every error raised."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

from millrace.checkpoint.host.priority import lower_priority

Job = TypeVar("Job")
Result = TypeVar("Result")

_MAX_DEFAULT_THREADS = 8


def default_threads() -> int:
    """One thread a core that this process may use, up to eight: beyond that, storage is the limit."""
    return min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)))


def background_threads() -> int:
    """Half as many, at least one: beside a training loop, which needs cores of its own."""
    return max(1, min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)) // 2))


def run_in_order(
    jobs: Iterable[Job], work: Callable[[Job], Result], threads: int, *, niceness: int = 0
) -> Generator[Result, None, None]:
    """Yield `work(job)` for every job, in order.

    Idle threads take the next job, whichever it is; at most `2 * threads + 2` jobs are begun and not yet yielded.
    `jobs` is consumed in the caller's thread. The first exception of any job, in order, is raised here, after every
    running job has ended and the rest has been dropped. The threads are `niceness` nicer than the caller (on Linux).

    Works while the interpreter shuts down, as long as somebody waits for it.
    """
    pool = ThreadPool(work, threads, niceness)
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
    """Threads for one kind of work, started as they are needed.

    Unlike `ThreadPoolExecutor`, which refuses work from the moment the main thread ends.
    """

    def __init__(self, work: Callable[[Job], Result], size: int, niceness: int = 0) -> None:
        self._work, self._size, self._niceness = work, size, niceness
        self._jobs: queue.SimpleQueue[tuple[Future[Result], Job] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> Future[Result]:
        if len(self._threads) < self._size:
            # Daemonic: whoever waits for the results decides how long they live.
            thread = threading.Thread(target=self._run, name=f"millrace-checkpoint-{len(self._threads)}", daemon=True)
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
        lower_priority(self._niceness)
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = self._work(job)
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # So that nothing is kept while this thread waits.
            del entry, future, job
