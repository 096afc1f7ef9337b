"""Waits for a condition, or for an action of another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def wait_until(condition: Callable[[], bool], *, seconds: float = 300.0) -> None:
    """Wait until `condition()` is true; fails after `seconds`, which a working test never needs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true after {seconds} seconds"
        time.sleep(0.005)


def in_other_thread(action: Callable[[], Result], *, seconds: float = 120.0) -> Result:
    """What `action` returns or raises in a thread of its own; fails when it does not end in time."""
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
    assert not thread.is_alive(), "it waits for ever"
    if errors:
        raise errors[0]
    return results[0]
