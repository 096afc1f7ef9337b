"""Keeps the garbage collector from walking over what is only being built."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from typing import TypeVar

Value = TypeVar("Value")

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


def _resume_in_child() -> None:
    """A forked process (a data loader's worker, say) lacks the threads that would end the pauses."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_resume_in_child)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause cyclic garbage collection, of all threads, while many objects are made that will be kept.

    Each of tens of thousands of tensors needs a few dozen objects; the collector goes over all of them again and again, and
    takes longer than making them. For a stretch of Python of bounded length: nothing in it may wait for storage.
    Thread-safe, may be nested, leaves a collector alone that was off before.
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
    """The same values, with garbage collection paused while each of them is made, and not while it is used."""
    while True:
        with collection_paused():
            try:
                value = next(values)
            except StopIteration:
                return
        yield value
