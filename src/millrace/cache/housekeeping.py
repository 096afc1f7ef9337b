"""One daemon thread a process, for what has to be looked at now and then although nobody asks for it.

A process that sits idle must still let go of files that another one has evicted. The thread starts with the first chore
and ends with the last; a forked child has neither thread nor chores. A chore may ask to be done again before the next tick.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from millrace.errors import MillraceError
from millrace.events import Event, emit

_log = logging.getLogger("millrace")

TICK_SECONDS = 0.5

Chore = Callable[[], float | None]
"""Gives in how many seconds it is to be done again; None: with the next tick."""


class _Housekeeping:
    def __init__(self) -> None:
        self._chores: dict[Chore, float] = {}  # and when each is due, in monotonic seconds
        self._lock = threading.Lock()  # of the list and the thread
        self._running = threading.Lock()  # held while chores run, so that `forget` can wait for them
        self._thread: threading.Thread | None = None

    def __contains__(self, chore: Chore) -> bool:
        return chore in self._chores

    def add(self, chore: Chore) -> None:
        with self._lock:
            self._chores[chore] = time.monotonic() + TICK_SECONDS
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="millrace-housekeeping", daemon=True)
                self._thread.start()

    def forget(self, chore: Chore) -> None:
        with self._running, self._lock:
            self._chores.pop(chore, None)

    def run_all(self) -> None:
        with self._running:
            self._run_some(list(self._chores))

    def _run_due(self) -> None:
        with self._running:
            now = time.monotonic()
            self._run_some([chore for chore, due in list(self._chores.items()) if due <= now])

    def _run_some(self, chores: list[Chore]) -> None:
        for chore in chores:
            pause = None
            try:
                pause = chore()
            except Exception as error:  # noqa: BLE001 - without the thread there is no next look, which may go well
                if not isinstance(error, MillraceError):
                    _log.exception("a defect in housekeeping")
                emit(Event(name="cache.housekeeping.failed", subject=repr(chore), detail=str(error)))
            self._chores[chore] = time.monotonic() + (TICK_SECONDS if pause is None else pause)

    def _next_due(self) -> float:
        with self._lock:
            return min(self._chores.values(), default=0.0)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(min(TICK_SECONDS, max(0.0, self._next_due() - time.monotonic())))
            self._run_due()
            with self._lock:
                if not self._chores:
                    self._thread = None
                    return


_housekeeping = _Housekeeping()


def every_tick(chore: Chore) -> None:
    """Call `chore` twice a second from now on, from the process's one thread for such things, or sooner where it says so.

    Asking again changes nothing.

    Only a `MillraceError` may come out of it.
    """
    if chore not in _housekeeping:
        _housekeeping.add(chore)


def no_more(chore: Chore) -> None:
    """Never call `chore` again; waits for the call under way."""
    _housekeeping.forget(chore)


def tick() -> None:
    """Do every chore now, in this thread. For tests."""
    _housekeeping.run_all()


def _after_fork() -> None:
    global _housekeeping
    _housekeeping = _Housekeeping()


os.register_at_fork(after_in_child=_after_fork)
