"""Storage that is away for a while ends no training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from millrace.errors import RetryableError

Value = TypeVar("Value")

# An attempt is itself patient for up to a minute, inside of the storage's client.
_ATTEMPTS = 10
_PAUSE_SECONDS = 5.0


def patiently(act: Callable[[], Value]) -> Value:
    """Do it again for some minutes while the storage is away: a worker that gives up is started again, and that is counted.

    A call that all workers make together fails on all of them or on none, so they stay in step.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return act()
        except RetryableError:
            time.sleep(_PAUSE_SECONDS)
    return act()
