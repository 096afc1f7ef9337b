"""Runs several requests of one operation at once. An interrupt or the first error ends the wait for all of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# A signal just before the kernel starts to wait does not end the wait.
_LOOK_SECONDS = 0.5


def side_by_side(action: Callable[[Item], Result], items: Sequence[Item], threads: int, name: str) -> list[Result]:
    """The results of `action` for each of `items`, in their order, `threads` at a time (named `name`).

    Raises the first error. After that, and after an interrupt, no further item is started. Items in progress continue in the
    background: each may wait for a slot or be retried for a minute. A pool would wait for its threads.
    """
    if len(items) < 2:
        return [action(item) for item in items]
    left = list(reversed(range(len(items))))
    ended: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        while left:
            try:
                number = left.pop()
            except IndexError:  # another thread has taken the last one
                return
            try:
                ended.put((number, action(items[number]), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
                ended.put((number, None, error))

    results: list[Any] = [None] * len(items)
    try:
        _start(work, min(len(items), threads), name)
        for _ in items:
            number, results[number], error = _next(ended)
            if error is not None:
                raise error
    finally:
        left.clear()
    return results


def _start(work: Callable[[], None], threads: int, name: str) -> None:
    for count in range(threads):
        try:
            threading.Thread(target=copy_context().run, args=(work,), name=f"{name}_{count}", daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            if not count:
                work()
            return


def _next(ended: queue.SimpleQueue[Any]) -> Any:
    while True:
        try:
            return ended.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            continue
