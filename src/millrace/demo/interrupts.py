"""Ctrl-C that is not lost.

Python raises `KeyboardInterrupt` wherever the main thread happens to be, and swallows it when that is a destructor or a
callback of a C library. A job that runs for minutes would then go on as if nothing had been pressed. So the signal is also
remembered, and long waits ask `check` now and then.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_seen = False


@contextmanager
def remembered() -> Iterator[None]:
    """Remember interrupts from here to the end of the block. Outside of the main thread this does nothing."""
    global _seen
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        global _seen
        _seen = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        check()
    finally:
        signal.signal(signal.SIGINT, before)
        _seen = False


@contextmanager
def held_back() -> Iterator[None]:
    """Hold Ctrl-C back for the few seconds of the block, in which it would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def check() -> None:
    """Raise `KeyboardInterrupt` when one has come, and may have been swallowed."""
    if _seen:
        raise KeyboardInterrupt
