"""Pauses the garbage collector while many objects are created."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import TypeVar

from millrace.runtime import forks

Value = TypeVar("Value")

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


def _resume_in_child() -> None:
    """A forked process (such as a data loader's worker) does not have the threads that would end the pauses."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


forks.reset_in_child(_resume_in_child)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause cyclic garbage collection, of all threads, while many long-lived objects are created.

    Each of tens of thousands of tensors needs a few dozen objects. The collector visits all of them repeatedly, which takes
    longer than their creation. The block must be short and must not wait for storage. Thread-safe, may be nested; a disabled
    collector stays disabled.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


def each_paused(values: Iterator[Value]) -> Iterator[Value]:
    """The same values, with garbage collection paused while each is created, but not while it is used."""
    while True:
        with collection_paused():
            try:
                value = next(values)
            except StopIteration:
                return
        yield value
