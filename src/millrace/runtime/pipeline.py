"""Heavy work: jobs on several threads with their results in order, and the process's memory meanwhile.

`run_in_order` needs bounded memory and raises every error. The other functions pause the garbage collector, and decide which
freed memory glibc keeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import copy_context
from typing import Generic, TypeVar, cast

from millrace.runtime import forks

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
    pending: deque[Call[Job, Result]] = deque()
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


class Call(Generic[Job, Result]):
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
        self._jobs: queue.SimpleQueue[Call[Job, Result] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._working: set[int] = set()
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()

    def submit(self, job: Job) -> Call[Job, Result]:
        if len(self._threads) < self._size:
            # Daemons: the caller that waits for the results decides how long they run.
            name = f"millrace-checkpoint-{len(self._threads)}"
            thread = threading.Thread(target=copy_context().run, args=(self._run,), name=name, daemon=True)
            # Before it starts: an interrupt may end `start` after the thread has started, and `close` must end it.
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # there are too many threads
                self._threads.remove(thread)
                raise
        call: Call[Job, Result] = Call(job)
        self._jobs.put(call)
        return call

    def close(self) -> None:
        """Wait for the jobs that are not cancelled. After an interrupt it can be called again."""
        for _ in self._threads:
            self._jobs.put(None)
        # An interrupted `join` takes a working thread for one that has ended (Python before 3.13). A forked process has no
        # thread that is alive.
        while self._working and any(thread.is_alive() for thread in self._threads):
            with contextlib.suppress(queue.Empty):
                self._ends.get(timeout=_SIGNAL_SECONDS)
        for thread in self._threads:
            if thread.is_alive():  # not if its start was interrupted: it has no job left, and `join` may raise
                thread.join()

    def _run(self) -> None:
        self._working.add(threading.get_ident())
        while (call := self._jobs.get()) is not None:
            call.run(self._work)
            del call  # no reference to the job or its result while this thread waits
        self._working.discard(threading.get_ident())
        self._ends.put(None)


# --- memory -------------------------------------------------------------------------------------------

Value = TypeVar("Value")

_libc = ctypes.CDLL(None)
_libc.malloc.argtypes, _libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
_libc.free.argtypes, _libc.free.restype = (ctypes.c_void_p,), None
_mallopt = getattr(_libc, "mallopt", None)

_M_ARENA_MAX = -8
_LEAST_ARENAS = 2
_KEPT_BYTES = 8 << 20  # several encoded chunks; glibc keeps up to twice as much

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


def _resume_in_child() -> None:
    """A forked process (such as a data loader's worker) does not have the threads that would end the pauses."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


forks.reset_in_child(_resume_in_child)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause cyclic garbage collection, of all threads, while many long-lived objects are created.

    Each of tens of thousands of tensors needs a few dozen objects. The collector visits all of them repeatedly, which takes
    longer than their creation. The block must be short and must not wait for storage. Thread-safe, may be nested; a disabled
    collector stays disabled.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


def each_paused(values: Iterator[Value]) -> Iterator[Value]:
    """The same values, with garbage collection paused while each is created, but not while it is used."""
    while True:
        with collection_paused():
            try:
                value = next(values)
            except StopIteration:
                return
        yield value


def limit_arenas() -> None:
    """Limit glibc to one arena per core of the machine, and at least two. Call it before threads allocate memory.

    By default glibc makes up to eight per core, for the first threads that allocate, and each keeps some 20 MB of freed
    responses. The limit is that of the whole process. It has no effect without glibc, and none where glibc has fixed a limit
    before: for `MALLOC_ARENA_MAX`, or with more than eight arenas, as after `ray.init()` or work with many native threads.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, max(_LEAST_ARENAS, os.cpu_count() or 1))


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks below 8 MiB, which it otherwise returns to the kernel, and receives zeroed page by page.

    glibc raises its limit by itself, up to 32 MiB, when a larger block than before is freed, as this function does; it takes
    10 us. It respects the limits that the environment sets (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`).
    """
    _libc.free(_libc.malloc(_KEPT_BYTES))
