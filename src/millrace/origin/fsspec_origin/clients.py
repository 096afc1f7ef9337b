"""The library's file systems of a process: one for all threads where it can be shared, else a few that take turns.

Most libraries hold one connection and are not thread-safe. None is used after a fork: a child makes its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from fsspec import get_filesystem_class
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

_MOST_AT_ONCE = 8
_MOST_IDLE = 8
_SHARED = (AsyncFileSystem, ArrowFSWrapper, LocalFileSystem, MemoryFileSystem)

# Those of a parent process: never destroyed, since that could speak on its connections, or wait for its threads.
_inherited: list[_Pool] = []


class _Pool:
    """What belongs to one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.shared: Any = None
        self.shares: bool | None = None  # not known before there is one
        self.idle: list[Any] = []
        self.turns = threading.BoundedSemaphore(_MOST_AT_ONCE)


class Clients:
    """Lends file systems of one class. Thread-safe, safe across fork; makes none before the first use."""

    def __init__(self, cls: type[Any], options: Mapping[str, Any]) -> None:
        self._cls = cls
        self._options = _private(cls, options)
        self._pool = _Pool()

    @contextlib.contextmanager
    def lend(self) -> Iterator[Any]:
        """A file system for one request; waits while too many are lent."""
        pool = self._own()
        if pool.shared is not None:
            yield pool.shared
            return
        with pool.turns, self._lent(pool) as fs:
            yield fs

    @contextlib.contextmanager
    def lend_long(self) -> Iterator[Any]:
        """A file system for as long as it takes: others do not wait for its end, and so may be asked meanwhile."""
        pool = self._own()
        if pool.shared is not None:
            yield pool.shared
            return
        with self._lent(pool) as fs:
            yield fs

    @contextlib.contextmanager
    def _lent(self, pool: _Pool) -> Iterator[Any]:
        with pool.lock:
            fs = pool.idle.pop() if pool.idle else pool.shared
            if fs is None and pool.shares is None:
                fs = self._cls(**self._options)
                pool.shares = isinstance(innermost(fs), _SHARED)
                pool.shared = fs if pool.shares else None
        if fs is None:
            fs = self._cls(**self._options)  # may take long: not while others wait for the lock
        try:
            yield fs
        except FileNotFoundError:
            self._give_back(pool, fs)  # an answer like any other
            raise
        else:
            self._give_back(pool, fs)
        # After any other failure its connection may be in any state: the next user gets a new one.

    def _give_back(self, pool: _Pool, fs: Any) -> None:
        with pool.lock:
            if fs is not pool.shared and len(pool.idle) < _MOST_IDLE:
                pool.idle.append(fs)

    def _own(self) -> _Pool:
        pool = self._pool
        if pool.pid != os.getpid():
            _inherited.append(pool)
            pool = self._pool = _Pool()
        return pool


def _private(cls: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with which a client shares nothing with others that fsspec keeps, and no listings between threads.

    A client that threads share must keep no listings: one from before a question is no answer to it. The others can be told
    to forget before each question, and some of them cannot do without.
    """
    own: dict[str, Any] = {"use_listings_cache": False} if issubclass(cls, AsyncFileSystem) else {}
    own |= {**options, "skip_instance_cache": True}
    target, inner = options.get("target_protocol"), options.get("target_options") or {}
    if isinstance(target, str):
        own["target_options"] = _private(get_filesystem_class(target), inner)
    elif "://" in str(options.get("fo")):
        own["target_options"] = {**inner, "skip_instance_cache": True}
    return own


def innermost(fs: Any) -> Any:
    """The file system behind those that only rename paths (`dir`)."""
    while getattr(fs, "protocol", None) == "dir" and getattr(fs, "fs", None) is not None:
        fs = fs.fs
    return fs
