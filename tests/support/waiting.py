"""Waits for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], *, seconds: float = 300.0) -> None:
    """Wait until `condition()` is true; fails after `seconds`, which a working test never needs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true after {seconds} seconds"
        time.sleep(0.005)
