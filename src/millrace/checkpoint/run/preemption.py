"""Preemption: a job that receives a signal to end (SIGTERM from a scheduler, a spot notice) saves once more."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from millrace.checkpoint.arguments import real_number, sequence, whole_number
from millrace.config import shown
from millrace.errors import ConfigurationError, UsageError
from millrace.events import Event, emit
from millrace.runtime import forks

# A signal in this time after the first one is the same: torchrun passes on what its scheduler sends to all processes.
_REPEAT_SECONDS = 2.0


class PreemptionWatch:
    """Records a signal, and ends the process with it after `grace_seconds`.

    A handler runs in the middle of a step, when the state is not consistent. So it only records the signal, and the loop
    saves after the step. A second signal, two seconds later or more, and the end of the grace period, have the effect that
    the first one would have had without this object. Watches of several managers record the same signal. Create it in the
    main thread. Not for forked children: `noted` does not change there.
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM,), *, grace_seconds: float = 25.0) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals can only be watched from the main thread",
                next_step="watch them there, or poll your scheduler's notice and call save",
            )
        numbers = [
            whole_number("signals", each, least=1)
            for each in sequence("signals", signals, "signals, as [signal.SIGTERM]")
        ]
        uncatchable = {signal.SIGKILL, signal.SIGSTOP}
        if not numbers or not set(numbers) <= signal.valid_signals() - uncatchable:
            raise ConfigurationError(
                f"signals={shown(signals)}", next_step="give signals that a process can handle, as [signal.SIGTERM]"
            )
        self.noted = False
        """Whether a signal was received."""
        self._noted_at = 0.0
        self._grace_seconds = real_number("grace_seconds", grace_seconds, least=0)
        self._owner = forks.Owner()
        self._timer: threading.Timer | None = None
        self._closed = False
        self._before: dict[int, Any] = {}
        for each in dict.fromkeys(numbers):
            self._before[each] = signal.signal(each, self._note)

    def close(self) -> None:
        """Restore the signal handlers, and stop the grace period. Call it in the main thread.

        A watch that was created later keeps this one's handler, which then has the effect of the handler before it.
        """
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._closed:
            self._pass_on(number, frame)
            return
        if self.noted or not self._owner.is_this_process:
            seconds = time.monotonic() - self._noted_at
            if seconds >= min(_REPEAT_SECONDS, self._grace_seconds) or not self._owner.is_this_process:
                self._pass_on(number, frame)
            return
        self._noted_at, self.noted = time.monotonic(), True
        self._timer = threading.Timer(self._grace_seconds, self._give_up, (number,))
        self._timer.daemon = True
        # In a thread: a hook or a log handler may need a lock that the interrupted code holds.
        event = Event(name="run.preempted", subject=_name_of(number))
        report = threading.Thread(target=emit, args=(event,), name="millrace-preempted", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: an error would end the loop before it saves
            self._timer.start()
            report.start()
        earlier = self._handler_before(number)
        if isinstance(getattr(earlier, "__self__", None), PreemptionWatch):  # of another manager, which saves as well
            earlier(number, frame)

    def _give_up(self, number: int) -> None:
        if self._closed:
            return
        text = f"millrace: {self._grace_seconds:g} s after the signal: what is not durable by now is lost\n"
        with contextlib.suppress(OSError):  # no stderr; one that is full, with a reader that has stopped, is left out
            if select.select([], [2], [], 0)[1]:
                os.write(2, text.encode())
        if self._handler_before(number) in (signal.SIG_DFL, None):
            os._exit(128 + number)  # the main thread may be in a call that no handler interrupts
        os.kill(os.getpid(), number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = self._handler_before(number)
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _handler_before(self, number: int) -> Any:
        """The handler of the signal before this watch. Watches that are closed by now are skipped."""
        before = self._before.get(number, signal.SIG_DFL)
        while isinstance(watch := getattr(before, "__self__", None), PreemptionWatch) and watch._closed:
            before = watch._before.get(number, signal.SIG_DFL)
        return before


def _name_of(number: int) -> str:
    """The name of a signal; most of the real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
