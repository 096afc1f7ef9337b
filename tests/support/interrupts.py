"""Ctrl-C at a chosen moment."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts() -> Iterator[Callable[[float], None]]:
    """Gives a function that has `KeyboardInterrupt` raised in the main thread so many seconds from then, in the place of one
    that has not come yet. None comes after the block."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def after(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # one that comes during a collection would be raised, and lost, in a callback (Hypothesis has one)
    try:
        yield after
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


def interrupted_at(number: int, action: Callable[[], object]) -> KeyboardInterrupt | None:
    """Call `action`, and raise `KeyboardInterrupt` in it at the `number`-th moment at which Python runs signal handlers.

    These are the first instruction of each function in Python, also of a generator that continues, and the end of each call
    of a function in C; loops, too, but these are not covered. Nor are the functions that `Thread.start` calls, where Python
    itself leaves a lock held. Returns the exception that `action` raised, with its traceback, which refers to all that was
    interrupted; None if it ended before.
    """
    moments = 0

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal moments
        if event in ("call", "c_return") and argument is not sys.setprofile and not _starts_a_thread(frame.f_back):
            moments += 1
            if moments > number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    gc.disable()  # an interrupt in the destructor of something else would be a warning
    try:
        sys.setprofile(interrupt)
        action()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.setprofile(None)
        gc.enable()
    return None


def _starts_a_thread(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not threading.Thread.start.__code__:
        frame = frame.f_back
    return frame is not None
