"""The scheduler behind `fs.load` and `fs.prefetch`: one thread finds objects, several threads fetch their pieces."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from millrace.cache.filling import FetchedPiece, Fill

_LINGER_SECONDS = 0.1  # how long an idle thread waits for the next task
_GRACE_SECONDS = 1.0


class ObjectFetch:
    """One object version whose pieces are fetched. The attributes change under the lock of the scheduler."""

    def __init__(self, fill: Fill) -> None:
        self.fill = fill
        self.pieces_left = 1  # one more than are queued, until `seal`

    def is_wanted(self) -> bool:
        """Whether the pieces that are still queued should be fetched."""
        return True


Fetch = TypeVar("Fetch", bound=ObjectFetch)


class FetchScheduler(Generic[Fetch]):
    """Runs tasks in up to `threads` threads. A thread starts when a task finds all others busy, and ends when it is idle.

    `feed` runs in a thread of its own and adds tasks; the work ends when it has returned and every task has ended.
    `on_piece(fetch, piece, result, error)` is called after each piece, with neither result nor error if the piece was
    skipped; `on_object(fetch)` after the last piece of an object; `on_error` with an exception that escapes from `feed`, a
    task or another callback; `on_idle` when the work has ended. They run without the lock, in the thread concerned.

    `changed` is the lock of the scheduler and of its user's counters. It is notified when no task is left, when the queue
    was full, and at `close`. Thread-safe. Not usable in a forked child.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        feed: Callable[[], None],
        on_piece: Callable[[Fetch, range, FetchedPiece | None, BaseException | None], None],
        on_object: Callable[[Fetch], None],
        on_error: Callable[[BaseException], None],
        on_idle: Callable[[], None] = lambda: None,
        max_queued: int = 100_000,
        daemon_feed: bool = False,
    ) -> None:
        # Threads enter the lock and not its conditions: an interrupt in the Python code of those would leave it locked.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.is_closed = False
        self._added = threading.Condition(self.lock)
        self._feed = feed
        self._on_piece = on_piece
        self._on_object = on_object
        self._on_error = on_error
        self._on_idle = on_idle
        self._max_queued = max_queued
        self._tasks: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._name = name
        self._limit = threads
        self._free = list(range(threads))  # numbers of threads that do not run
        self._threads: dict[int, threading.Thread] = {}
        self._waiting = self._running = 0
        self._fed = False
        self._feeder = threading.Thread(target=self._run_feed, name=f"{name}-feed", daemon=daemon_feed)

    def start(self) -> None:
        """Start the thread of `feed`."""
        self._feeder.start()

    # --- state; call these with the lock held -------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a task is queued or running."""
        return bool(self._tasks or self._running)

    @property
    def has_ended(self) -> bool:
        """Whether all work is done, or the scheduler is closed."""
        return self.is_closed or (self._fed and not self.is_busy)

    @property
    def is_fed(self) -> bool:
        """Whether `feed` has returned."""
        return self._fed

    @property
    def has_room(self) -> bool:
        """Whether the queue is not full."""
        return len(self._tasks) < self._max_queued

    # --- work ---------------------------------------------------------------------------------------

    def add(self, task: Callable[..., None], *arguments: Any, first: bool = False) -> None:
        """Queue `task(*arguments)`, with `first` before all others. Raises `RuntimeError` if no thread can be started.

        `close` runs the tasks that are left, so a task must check `is_closed` before it does anything but clean up.
        """
        with self.lock:
            (self._tasks.appendleft if first else self._tasks.append)((task, arguments))
            self._added.notify()
            if self._free and len(self._tasks) > self._waiting:
                self._start_thread()

    def fetch(self, fetch: Fetch, piece: range, *, first: bool = False) -> None:
        """Queue a piece of an object."""
        with self.lock:
            fetch.pieces_left += 1
            self.add(self._fetch_piece, fetch, piece, first=first)

    def fetch_now(self, fetch: Fetch, piece: range) -> None:
        """Fetch a piece of an object in this thread."""
        with self.lock:
            fetch.pieces_left += 1
        self._fetch_piece(fetch, piece)

    def seal(self, fetch: Fetch) -> None:
        """Declare that no further piece of an object follows. Required for every `ObjectFetch`."""
        with self.lock:
            fetch.pieces_left -= 1
            ended = not fetch.pieces_left
        if ended:
            fetch.fill.close()
            self._on_object(fetch)

    def stop(self) -> None:
        """Fetch nothing more. Does not wait; `close` must follow."""
        with self.lock:
            self.is_closed = True
            self.changed.notify_all()
            self._added.notify_all()

    def close(self, *, wait_for_tasks: bool = False) -> None:
        """Fetch nothing more. Waits up to a second for `feed`, and with `wait_for_tasks` for the tasks. Idempotent.

        Requests in progress end in the background.
        """
        self.stop()
        with self.lock:
            left = list(self._tasks)
            self._tasks.clear()
            threads = [self._feeder, *(self._threads.values() if wait_for_tasks else ())]
        for task, arguments in left:
            task(*arguments)
        deadline = time.monotonic() + _GRACE_SECONDS
        for thread in threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _fetch_piece(self, fetch: Fetch, piece: range) -> None:
        result: FetchedPiece | None = None
        error: BaseException | None = None
        # The interpreter waits for these threads at its end; nothing reads the bytes then.
        if not self.is_closed and threading.main_thread().is_alive() and fetch.is_wanted():
            try:
                result = fetch.fill.fetch(piece)
            except BaseException as raised:  # noqa: BLE001 - of any kind: the user of the scheduler decides
                error = raised
        try:
            self._on_piece(fetch, piece, result, error)
        finally:
            self.seal(fetch)

    # --- threads ------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        number = self._free.pop()
        # Not a daemon: at the end of the interpreter it would be stopped inside a library.
        thread = threading.Thread(target=self._work, args=(number,), name=f"{self._name}-{number}")
        try:
            thread.start()
        except BaseException:
            self._free.append(number)
            if len(self._free) == self._limit:
                raise
            return  # another thread will run the task
        self._threads[number] = thread

    def _run_feed(self) -> None:
        try:
            self._feed()
        except BaseException as error:  # noqa: BLE001 - of any kind: the user of the scheduler waits for this thread
            self._on_error(error)
        finally:
            with self.lock:
                self._fed = True
                self._added.notify_all()
            self._check_idle()

    def _work(self, number: int) -> None:
        while (step := self._next(number)) is not None:
            task, arguments = step
            try:
                task(*arguments)
            except BaseException as error:  # noqa: BLE001 - as above
                self._on_error(error)
            finally:
                del step, task, arguments  # the next wait must not keep an object alive
                with self.lock:
                    self._running -= 1
                self._check_idle()

    def _next(self, number: int) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        with self.lock:
            self._waiting += 1
            self._added.wait_for(lambda: self._tasks or self._fed or self.is_closed, _LINGER_SECONDS)
            self._waiting -= 1
            if not self._tasks:
                self._free.append(number)
                return None
            self._running += 1
            if len(self._tasks) == self._max_queued:
                self.changed.notify_all()  # `feed` waits for space
            return self._tasks.popleft()

    def _check_idle(self) -> None:
        with self.lock:
            if self.is_busy:
                return
            self.changed.notify_all()
            ended = self._fed
        if ended:
            self._on_idle()
