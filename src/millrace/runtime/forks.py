"""State, imports and pools of threads in processes that fork.

A child gets a copy of the parent's memory, but none of its threads. A lock that another thread held stays locked in the
child, connections and LMDB environments still belong to the parent, and work in progress never ends. A module with
such state registers a reset here, or keeps the state in a `PerProcess`. Resets run in the child before `os.fork` returns, in
the order of registration. They must not take locks or wait, and must not raise.

For the same reason a module that is half imported at a fork stays locked in the child. So imports at the first use, by
threads that send requests, happen under one lock, for which a fork waits (`imported`, `importing`). Plain import statements
are for modules that are imported together with the package that uses them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging  # noqa: F401 - see below
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor  # also: see below
from functools import partial
from typing import Any, Generic, TypeVar

# Some modules of Python acquire a lock before each fork and release it afterwards. One that is imported while a fork waits
# here only releases, which prints an error. Those that our imports need are therefore imported first.


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
        _run_all([partial(reset, each) for each in list(objects)])

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

    `make` gets the parent's value, or None in the first process. A child never destroys its parent's value, even if it drops
    this object: the destructor of a client may wait for a lock that a thread of the parent had. Thread-safe if `make` is:
    two threads at the first use may create two values, of which one is then used.
    """

    __slots__ = ("__weakref__", "_make", "_owner", "_value")

    def __init__(self, make: Callable[[Value | None], Value]) -> None:
        self._make = make
        self._value = make(None)
        self._owner = Owner()
        _per_process.add(weakref.ref(self, _per_process.discard))

    def get(self) -> Value:
        """This process's value."""
        if not self._owner.is_this_process:
            keep_inherited(self._value)
            self._value = self._make(self._value)
            self._owner = Owner()
        return self._value


_per_process: set[weakref.ref[PerProcess[Any]]] = set()
"""Every operation on it is one step, without a lock: another thread may fork."""


# --- imports at the first use -----------------------------------------------------------------------

# Limits the wait: the import may itself wait for the thread that forks.
_FORK_WAITS_SECONDS = 30.0

_import_lock = threading.RLock()
_at_fork = threading.local()
_imported: dict[str, Any] = {}


def imported(name: str) -> Any:
    """The module of this full name, imported at the first call. Later calls are a dictionary lookup.

    Only for use inside functions: a call during the import of a module could deadlock with another thread.
    """
    module = _imported.get(name)
    if module is None:
        with importing():
            module = _imported[name] = importlib.import_module(name)
    return module


def is_installed(name: str) -> bool:
    """Whether a module of this full name can be found. Imports its parent packages, but not the module."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
    except ValueError:  # imported without a known location
        return True


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """No fork of this process and no other such block happens inside. For code with its own import methods."""
    with _import_lock:
        yield


# --- forks --------------------------------------------------------------------------------------------


def _before_fork() -> None:
    _at_fork.held, _at_fork.values = False, []  # Ctrl-C may end the wait, and then the fork happens all the same
    _at_fork.held = _import_lock.acquire(timeout=_FORK_WAITS_SECONDS)
    # Before the fork: in the child, the hook of another library may drop an object first, as fsspec's drops file systems.
    _at_fork.values = _values_per_process()


def _after_fork_in_parent() -> None:
    if _at_fork.held:
        _import_lock.release()
    _at_fork.values = []


def _after_fork_in_child() -> None:
    global _import_lock, _depth
    _import_lock = threading.RLock()
    _depth += 1
    _run_all([_keep_values, *_resets])


def _keep_values() -> None:
    keep_inherited(_at_fork.values)
    keep_inherited(_values_per_process())  # also of those that other threads created since


def _values_per_process() -> list[Any]:
    objects = [reference() for reference in _per_process.copy()]
    return [each._value for each in objects if each is not None]


def _run_all(resets: Iterable[Callable[[], None]]) -> None:
    """Run all of these, also after an exception of one: with any state of the parent, the child could wait without end."""
    with contextlib.ExitStack() as stack:
        for reset in reversed(list(resets)):
            stack.callback(reset)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# --- pools ----------------------------------------------------------------------------------------


class Pool(ThreadPoolExecutor):
    """Threads for fetches, started on demand. An interrupt (Ctrl-C) of `submit` leaves none of the pool's locks held.

    Python's pool counts its idle threads with a semaphore, whose condition is entered in the thread that submits.
    """

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._idle_semaphore = _Idle()


class _Idle(threading.Semaphore):
    """A semaphore for callers that do not wait. Each method is one step, so that an interrupt cannot leave it locked."""

    def __init__(self) -> None:
        super().__init__(0)
        self._idle: list[None] = []

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        try:
            self._idle.pop()
        except IndexError:
            return False
        return True

    def release(self, n: int = 1) -> None:
        self._idle.extend([None] * n)
