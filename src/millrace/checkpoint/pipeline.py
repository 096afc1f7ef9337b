"""Runs work on several threads and gives the results in order, in bounded memory, with every error raised."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

_MAX_DEFAULT_THREADS = 8


def default_threads() -> int:
    """One thread a core that this process may use, up to eight: beyond that, storage is the limit."""
    return min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)))


def run_in_order(jobs: Iterable[Job], work: Callable[[Job], Result], threads: int) -> Generator[Result, None, None]:
    """Yield `work(job)` for every job, in order.

    Idle threads take the next job, whichever it is; at most `2 * threads + 2` jobs are begun and not yet yielded.
    `jobs` is consumed in the caller's thread. The first exception of any job, in order, is raised here, after every
    running job has ended and the rest has been dropped.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="millrace-checkpoint") as pool:
        pending: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                pending.append(pool.submit(work, job))
                if len(pending) > 2 * threads + 1:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
