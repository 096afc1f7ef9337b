"""The registry of state that a forked child process must reset.

A child gets a copy of the parent's memory, but none of its threads. A lock that another thread held stays locked in the
child, connections and LMDB environments still belong to the parent, and work in progress never ends. A module with
such state registers a reset here, or keeps the state in a `PerProcess`. Resets run in the child before `os.fork` returns, in
the order of registration. They must not take locks or wait, and must not raise.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
Kept = TypeVar("Kept")

_depth = 0
_resets: list[Callable[[], None]] = []
_inherited: list[Any] = []


def depth() -> int:
    """The number of forks between this process and the one that first imported Millrace."""
    return _depth


def reset_in_child(reset: Callable[[], None]) -> None:
    """Run `reset` in every forked child, for the life of the process."""
    _resets.append(reset)


def objects_reset_in_child(reset: Callable[[Kept], None]) -> weakref.WeakSet[Kept]:
    """Returns a set; `reset` runs in every forked child for each object in it that is alive."""
    objects: weakref.WeakSet[Kept] = weakref.WeakSet()

    def reset_all() -> None:
        for each in list(objects):
            reset(each)

    reset_in_child(reset_all)
    return objects


def keep_inherited(value: Any) -> None:
    """Keep a parent's object for the life of this process: its destructor would use threads or connections of the parent."""
    _inherited.append(value)


class Owner:
    """The process that created an object. Cheap to check: no system call."""

    __slots__ = ("_depth",)

    def __init__(self) -> None:
        self._depth = _depth

    @property
    def is_this_process(self) -> bool:
        """False in a process that was forked from the owner."""
        return self._depth == _depth


class PerProcess(Generic[Value]):
    """A value that each process creates at its first use, such as a client with connections.

    `make` gets the parent's value, or None in the first process. The parent's value is kept and never destroyed. Thread-safe
    if `make` is: two threads at the first use may create two values, of which one is then used.
    """

    __slots__ = ("_make", "_owner", "_value")

    def __init__(self, make: Callable[[Value | None], Value]) -> None:
        self._make = make
        self._value = make(None)
        self._owner = Owner()

    def get(self) -> Value:
        """This process's value."""
        if not self._owner.is_this_process:
            keep_inherited(self._value)
            self._value = self._make(self._value)
            self._owner = Owner()
        return self._value


def _after_fork() -> None:
    global _depth
    _depth += 1
    for reset in _resets:
        reset()


os.register_at_fork(after_in_child=_after_fork)
