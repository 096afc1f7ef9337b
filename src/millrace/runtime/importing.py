"""Imports at the first use, by threads that send requests, in processes that may fork meanwhile.

A module that is half imported when a process forks stays locked in the child, which does not have the thread that would
unlock it. So these imports happen under one lock, for which a fork waits. Plain import statements are for modules that are
imported together with the package that uses them.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - see below
import contextlib
import importlib
import importlib.util
import logging  # noqa: F401 - see below
import os
import threading
from collections.abc import Iterator
from typing import Any

# Some modules of Python acquire a lock before each fork and release it afterwards. One that is imported while a fork waits
# here only releases, which prints an error. Those that our imports need are therefore imported first.

# Limits the wait: the import may itself wait for the thread that forks.
_FORK_WAITS_SECONDS = 30.0

_lock = threading.RLock()
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
