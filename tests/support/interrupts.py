"""Ctrl-C at a chosen moment."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[Callable[[float], None]]:
    """Gives a function that has `KeyboardInterrupt` raised in the main thread so many seconds from then, in the place of one
    that has not come yet. None comes after the block."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def after(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield after
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
