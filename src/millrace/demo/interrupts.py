"""Ctrl-C, SIGTERM and SIGHUP that are not lost.

Python raises `KeyboardInterrupt` wherever the main thread happens to be, and swallows it when that is a destructor or a
callback of a C library. A job that runs for minutes would then go on as if nothing had been pressed. So the signal is also
remembered, and long waits ask `check` now and then.

A SIGTERM (from a service manager, `timeout`, a container's end) and a SIGHUP (the terminal was closed) are the same wish.
Each comes as a `KeyboardInterrupt` whose arguments are a word and the exit code.
"""

from __future__ import annotations

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
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have `handler` called for the signals, until the end of the block."""
    before = {}
    try:
        for number in _WORDS:
            # nohup(1) ignores SIGHUP, and means it.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def remembered() -> Iterator[None]:
    """Remember interrupts from here to the end of the block. Outside of the main thread this does nothing."""
    global _seen
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: FrameType | None) -> None:
        global _seen
        _seen = number
        raise _interruption(number)

    try:
        with _handled(interrupt):
            yield
            check()
    finally:
        _seen = None


@contextmanager
def held_back() -> Iterator[None]:
    """Hold interrupts back for the few seconds of the block, in which they would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    with _handled(lambda number, _frame: interrupts.append(number)):
        yield
    if interrupts:
        raise _interruption(interrupts[0])


def check() -> None:
    """Raise `KeyboardInterrupt` when an interrupt has come, and may have been swallowed."""
    if _seen is not None:
        raise _interruption(_seen)
