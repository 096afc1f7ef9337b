"""A clock that tests set."""

from __future__ import annotations

import time


class Clock:
    """Returns `now`, in seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class TimeWithoutWaits:
    """In place of the module `time` in a module that waits: only a sleep moves it, and takes no time."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
