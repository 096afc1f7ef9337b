"""Counts what a save has done, for whoever wants to see it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from millrace.checkpoint.loop.saving import Phase, SaveProgress


class ProgressMeter:
    """Adds up bytes from several threads and reports them, in the thread that counts."""

    def __init__(self, step: int, report: Callable[[SaveProgress], None]) -> None:
        self._step, self._report = step, report
        self._lock = threading.Lock()
        self._phase: Phase = "staging"
        self._done = self._total = 0

    def begin(self, phase: Phase, total_bytes: int) -> None:
        """The next phase begins with nothing done; "done" is one in which everything is."""
        with self._lock:
            self._phase, self._total = phase, total_bytes
            self._done = total_bytes if phase == "done" else 0
            self._tell()

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._done = min(self._done + nbytes, self._total)
            self._tell()

    def reach(self, done_bytes: int, total_bytes: int) -> None:
        """So many bytes are done now, of so many."""
        with self._lock:
            self._done, self._total = done_bytes, total_bytes
            self._tell()

    def _tell(self) -> None:
        self._report(SaveProgress(step=self._step, phase=self._phase, done_bytes=self._done, total_bytes=self._total))
