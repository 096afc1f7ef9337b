"""Waits for a condition, or for an action of another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def wait_until(condition: Callable[[], bool], problem: str = "not true", *, seconds: float = 300.0) -> None:
    """Wait until `condition()` is true; fails with `problem` after `seconds`, which a working test never needs.

    It is checked every 5 ms, after some seconds ten times per second.
    """
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, f"{problem} after {seconds} seconds"
        time.sleep(min(0.1, max(0.005, waited / 50)))


def in_other_thread(action: Callable[[], Result], *, seconds: float = 120.0) -> Result:
    """Return or raise the result of `action`, called in a thread of its own; fails when it does not end in time."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it does not end"
    if errors:
        raise errors[0]
    return results[0]
