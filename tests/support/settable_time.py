"""Makes `time.time` settable in this process and in those that it forks; loaded before all modules that refer to it."""

from __future__ import annotations

import time

_real = time.time
_still: float | None = None
_ahead = 0.0


def hold(seconds: float) -> None:
    """Let no time pass: it is now `seconds`, and in addition what `advance` adds."""
    global _still
    _still = seconds


def advance(seconds: float) -> None:
    """Set the time forward."""
    global _ahead
    _ahead += seconds


def _time() -> float:
    return (_real() if _still is None else _still) + _ahead


time.time = _time
