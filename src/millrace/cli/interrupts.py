"""Signals that end a command: Ctrl-C, SIGTERM and SIGHUP, none of which is lost.

Python raises `KeyboardInterrupt` at an arbitrary place of the main thread, and discards it inside a destructor or a callback
of a C library. A long command would then continue. So the signal is also recorded, and `check` raises it again.

SIGTERM (from a service manager, `timeout`, the end of a container) and SIGHUP (the terminal was closed) are handled in the
same way. Each is raised as a `KeyboardInterrupt` with two arguments: a word and the exit code.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}

_seen: int | None = None


def _interruption(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt(_WORDS[signal.Signals(number)], 128 + number)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` for the signals until the end of the block."""
    before = {}
    try:
        for number in _WORDS:
            # nohup(1) sets SIGHUP to be ignored; keep that.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def remembered() -> Iterator[None]:
    """Record interrupts until the end of the block. Outside the main thread this does nothing."""
    global _seen
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: FrameType | None) -> None:
        global _seen
        _seen = number
        raise _interruption(number)

    try:
        with handled(interrupt):
            try:
                yield
            finally:
                check()  # also after an error: a library may replace the interrupt by an exception of its own
    finally:
        _seen = None


def check() -> None:
    """Raise `KeyboardInterrupt` if an interrupt was recorded: Python may have discarded the first one."""
    if _seen is not None:
        raise _interruption(_seen)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """End the process at Ctrl-C until the end of the block, for imports: a library may discard a `KeyboardInterrupt`.

    Does nothing if Ctrl-C is ignored or handled already, and outside the main thread.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"millrace: interrupted; nothing is left running\n")
    os._exit(130)
