"""Runs several requests of one operation at once. An interrupt or the first error ends the wait for all of them.

Such requests continue in the background. `at_late_end` is for their end, also for those of `store_access.py` and
`upload.py`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# A signal just before the kernel starts to wait does not end the wait.
_LOOK_SECONDS = 0.5


def side_by_side(action: Callable[[Item], Result], items: Sequence[Item], threads: int, name: str) -> list[Result]:
    """The results of `action` for each of `items`, in their order, `threads` at a time (named `name`).

    Raises the first error. After that, and after an interrupt, no further item is started. Items in progress continue in the
    background (`at_late_end`): each may wait for a slot or be retried for a minute. A pool would wait for its threads.
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
        for each in at_end:
            each()

    at_end: list[Callable[[], None]] = []
    results: list[Any] = [None] * len(items)
    try:
        _start(work, min(len(items), threads), name)
        for _ in items:
            number, results[number], error = _next(ended)
            if error is not None:
                raise error
    except BaseException:
        if (late := action_at_late_end()) is not None:
            at_end.append(late)
        raise
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


# --- requests that continue in the background ------------------------------------------------------

_at_late_end: ContextVar[Callable[[], None] | None] = ContextVar("millrace-origin-late-end", default=None)


@contextmanager
def at_late_end(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` when a request of the `with` block ends that has continued in the background, as after Ctrl-C.

    Not for requests of fsspec's libraries, which may continue in threads of their own.
    """
    token = _at_late_end.set(action)
    try:
        yield
    finally:
        _at_late_end.reset(token)


def action_at_late_end() -> Callable[[], None] | None:
    """The action of the current `at_late_end`, for the code that runs a request in another thread."""
    return _at_late_end.get()
