"""Imports at the first use, by threads that send requests, in processes that may fork meanwhile.

A module that is half imported when a process forks stays locked in the child for ever: the thread that would unlock it
is not there. So these imports happen under one lock, which a fork waits for. Plain import statements stay for what is
imported together with the modules of this package.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from typing import Any

# An import that itself waits for the thread that forks must not stop it for ever.
_FORK_WAITS_SECONDS = 30.0

_lock = threading.RLock()
_at_fork = threading.local()
_imported: dict[str, Any] = {}


def imported(name: str) -> Any:
    """The module of this full name, imported at the first call; afterwards no more than a look into a dictionary.

    For use inside functions only: called while a module is imported, it could wait for another thread that waits for it.
    """
    module = _imported.get(name)
    if module is None:
        with importing():
            module = _imported[name] = importlib.import_module(name)
    return module


def is_installed(name: str) -> bool:
    """Whether a module of this full name can be found. Does not import it, but the packages that it lies in."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even a package that it would lie in
        return False
    except ValueError:  # imported, in a way that left no trace of where from
        return True


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """No fork of this process happens inside, and no other thread is inside: for what imports in ways of its own."""
    with _lock:
        yield


def _before_fork() -> None:
    _at_fork.held = _lock.acquire(timeout=_FORK_WAITS_SECONDS)


def _after_fork_in_parent() -> None:
    if _at_fork.held:
        _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
