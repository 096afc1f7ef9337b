"""Ctrl-C at a chosen moment."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

WITH_IS_BROKEN = sys.version_info[:2] == (3, 14)
"""Whether a signal handler may run, and raise, after `__enter__` in C and before its block (python/cpython#148874)."""


@contextmanager
def interrupts() -> Iterator[Callable[[float], None]]:
    """Gives a function that has `KeyboardInterrupt` raised in the main thread so many seconds from then, in the place of one
    that has not come yet. None comes after the block."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def after(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # an interrupt during a collection would be raised, and lost, in a callback (Hypothesis has one)
    try:
        yield after
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


def interrupted_inside(
    function: Callable[..., object], action: Callable[[], object], *, then: Callable[[], None] = lambda: None
) -> None:
    """Call `action` in the main thread, and raise `KeyboardInterrupt` in it when it waits inside `function`, in Python.

    However slow the machine is, the interrupt comes neither before the call nor in its first lines. `then` is called after
    it in another thread, for which this function waits.
    """
    main, ended, raised = threading.main_thread().ident, threading.Event(), threading.Event()
    assert main is not None

    def interrupt(*_: object) -> None:
        raised.set()
        raise KeyboardInterrupt

    def watch() -> None:
        while not ended.is_set():
            frame = sys._current_frames().get(main)
            while frame is not None and frame.f_code is not function.__code__:
                frame = frame.f_back
            if frame is not None:
                signal.pthread_kill(main, signal.SIGUSR1)
                raised.wait(300)
                then()
                return
            time.sleep(0.005)

    before = signal.signal(signal.SIGUSR1, interrupt)
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        action()
    finally:
        ended.set()
        watching.join()
        signal.signal(signal.SIGUSR1, before)


def interrupted_at(number: int, action: Callable[[], object]) -> KeyboardInterrupt | None:
    """Call `action`, and raise `KeyboardInterrupt` in it at the `number`-th moment at which Python runs signal handlers.

    These are the first instruction of each function in Python, also of a generator that continues, and the end of each call
    of a function in C; loops, too, but these are not covered. Nor are
    - the functions that `Thread.start` calls, where Python itself leaves a lock held;
    - destructors, whose exceptions Python discards;
    - the end of `__enter__` in C, as of a lock, where only Python 3.14 runs handlers (`WITH_IS_BROKEN`).

    Returns the exception that `action` raised, with its traceback, which refers to all that was interrupted; None if it
    ended before.
    """
    moments = 0
    own = sys._getframe()

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal moments
        if event == "c_return" and (argument is sys.setprofile or getattr(argument, "__name__", None) == "__enter__"):
            return
        if event in ("call", "c_return") and not _is_exempt(frame, own):
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


def _is_exempt(frame: FrameType, outer: FrameType) -> bool:
    """Whether the frame is that of a destructor, or was called by one or by `Thread.start` inside `outer`."""
    if frame.f_code.co_name == "__del__":
        return True
    caller = frame.f_back
    while caller is not None and caller is not outer:
        if caller.f_code is threading.Thread.start.__code__ or caller.f_code.co_name == "__del__":
            return True
        caller = caller.f_back
    return False


class InterruptedWhenDeleted:
    """An object in whose destructor Ctrl-C arrives: Python prints the `KeyboardInterrupt` and discards it."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
