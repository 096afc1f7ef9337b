"""Periodic tasks: functions that one daemon thread of the process calls at intervals.

A process that is idle must still close files that another process has evicted, count its reads and write heartbeats.
The thread starts with the first task and ends with the last one. A forked child has neither the thread nor the tasks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from millrace.errors import MillraceError
from millrace.events import Event, emit
from millrace.runtime import forks
from millrace.runtime.failures import DEFECT

_log = logging.getLogger("millrace.runtime")

TICK_SECONDS = 0.5
"""The interval between two calls of a task that does not return another one."""

Task = Callable[[], float | bool | None]
"""Returns the seconds until its next call; None or True: `TICK_SECONDS`; False: it is not called again."""


class PeriodicThread:
    """Calls tasks in one daemon thread, which runs while there is any task. Thread-safe; not inherited by a forked child."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._create()
        forks.reset_in_child(self._create)

    def _create(self) -> None:
        self.due: dict[Task, float] = {}
        """The tasks, and when each is called next, in monotonic seconds. Others may check whether a task is registered."""
        self._lock = threading.Lock()  # of the tasks and the thread
        self._running = threading.Lock()  # held while tasks run, so that `unregister` can wait for them
        self._thread: threading.Thread | None = None

    def register(self, task: Task) -> None:
        """Call `task` from now on. Cheap when it is registered already. Raises `RuntimeError` when no thread can start."""
        if task in self.due:
            return
        with self._lock:
            self.due[task] = time.monotonic() + TICK_SECONDS
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    del self.due[task]
                    raise
                self._thread = thread

    def unregister(self, task: Task) -> None:
        """Do not call `task` again. Waits for the call in progress."""
        with self._running, self._lock:
            self.due.pop(task, None)

    def run_all(self) -> None:
        """Call every task now, in the caller's thread."""
        with self._running:
            with self._lock:
                tasks = list(self.due)
            self._call(tasks)

    def _call(self, tasks: list[Task]) -> None:
        for task in tasks:
            pause = self._result_of(task)
            if pause is False:
                with self._lock:
                    self.due.pop(task, None)
                # `register` may have found it in the table just before.
                pause = self._result_of(task)
            if pause is not False:
                with self._lock:
                    self.due[task] = time.monotonic() + (TICK_SECONDS if pause is None or pause is True else pause)

    def _result_of(self, task: Task) -> float | bool | None:
        try:
            return task()
        except Exception as error:  # noqa: BLE001 - the thread must continue; the next call may succeed
            if not isinstance(error, MillraceError):
                _log.exception("%s: a periodic task failed because of a defect", self._name)
            reason = str(error) if isinstance(error, MillraceError) else DEFECT
            emit(Event(name="cache.maintenance.failed", detail=reason))
            return None

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            with self._lock:
                next_due = min(self.due.values(), default=0.0)
            pause.wait(min(TICK_SECONDS, max(0.0, next_due - time.monotonic())))
            with self._running:
                now = time.monotonic()
                with self._lock:
                    tasks = [task for task, due in self.due.items() if due <= now]
                self._call(tasks)
            with self._lock:
                if not self.due:
                    self._thread = None
                    return


_maintenance = PeriodicThread("millrace-maintenance")


def register_periodic(task: Task) -> None:
    """Call `task` twice a second from now on, or at the intervals that it returns. Registering it again has no effect.

    All tasks share one thread. A `MillraceError` is reported as an event, any other exception also in the log.
    """
    _maintenance.register(task)


def start() -> None:
    """Start the thread of all tasks, before this thread lowers its priority: a thread has the priority of its creator."""
    _maintenance.register(_stay)


def _stay() -> float:
    return 3600.0


def unregister(task: Task) -> None:
    """Do not call `task` again. Waits for the call in progress."""
    _maintenance.unregister(task)


def run_tasks() -> None:
    """Call every task now, in the caller's thread. For tests."""
    _maintenance.run_all()
