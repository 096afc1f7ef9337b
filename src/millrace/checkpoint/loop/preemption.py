"""A job that is told to end (SIGTERM from a scheduler, a spot notice) saves once more if there is time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from millrace.errors import UsageError
from millrace.events import Event, emit


class PreemptionWatch:
    """Notes a signal, and ends the process by it when nobody has answered within `grace_seconds`.

    A handler runs in the middle of a step, where no state is whole: it only takes the note, and the loop saves when the
    step is done. The second signal, and the end of the grace, have the effect that the first would have had without this.
    To be made in the main thread. Not for forked children: there `noted` stays what it was.
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM,), *, grace_seconds: float = 25.0) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals can only be watched from the main thread",
                next_step="watch them there, or ask your scheduler's own notice and call save",
            )
        self.noted = False
        """Whether a signal has come."""
        self._noted_at = 0.0
        self._grace_seconds = grace_seconds
        self._pid = os.getpid()
        self._timer: threading.Timer | None = None
        self._before: dict[int, Any] = {number: signal.signal(number, self._note) for number in signals}

    @property
    def seconds_left(self) -> float:
        """Of the grace, in seconds; all of it before a signal has come."""
        return self._grace_seconds - (time.monotonic() - self._noted_at if self.noted else 0.0)

    def close(self) -> None:
        """Give the signals back, and let the grace no longer end. In the main thread."""
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted or os.getpid() != self._pid:
            self._pass_on(number, frame)
            return
        self.noted, self._noted_at = True, time.monotonic()
        emit(Event(name="run.preempted", subject=signal.Signals(number).name))
        self._timer = threading.Timer(self._grace_seconds, self._give_up, (number,))
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self, number: int) -> None:
        os.write(
            2, f"millrace: {self._grace_seconds:g} s after the signal: what is not durable by now is lost\n".encode()
        )
        if self._before.get(number) in (signal.SIG_DFL, None):
            os._exit(128 + number)  # the main thread may be in a call that no handler interrupts
        os.kill(self._pid, number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
