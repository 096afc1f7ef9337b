"""fsspec's class for a protocol, and its file systems in this process: one for all threads if it can be shared, else a few.

Most libraries have one connection and are not thread-safe. A forked child creates its own file systems.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from fsspec import get_filesystem_class
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from millrace.errors import ConfigurationError, MissingDependencyError
from millrace.runtime import forks

# The packages of libraries; for others fsspec's message is shown.
_PACKAGES = {
    "dropbox": "dropboxdrivefs dropbox requests",
    "gdrive": "gdrive-fsspec",
    "sftp": "paramiko",
    "smb": "smbprotocol",
    "ssh": "paramiko",
}

_MOST_AT_ONCE = 8
_MOST_IDLE = 8
_LOOK_SECONDS = 0.01  # for a place
_SHARED = (AsyncFileSystem, ArrowFSWrapper, LocalFileSystem, MemoryFileSystem)


def class_of(scheme: str) -> Any:
    """fsspec's class. Raises `ConfigurationError` for an unknown protocol, `MissingDependencyError` without its library."""
    try:
        return get_filesystem_class(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        raise MissingDependencyError(
            f"{scheme}:// needs a library that is not installed",
            next_step=f"pip install {package}" if package else str(error).splitlines()[0],
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"fsspec has no protocol {scheme!r}", next_step="register it with fsspec.register_implementation"
        ) from error


class _Place:
    """Allows the use of a file system while it is referred to."""

    __slots__ = ("__weakref__",)


class _Pool:
    """The file systems of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shared: Any = None
        self.shares: bool | None = None  # unknown before the first one
        self.idle: list[Any] = []
        self.places: list[weakref.ref[_Place]] = []

    def take(self, place: _Place) -> bool:
        """Take a place if one is free. Not Python's semaphore, which an interrupt (Ctrl-C) can leave locked."""
        with self.lock:
            self.places = [each for each in self.places if each() is not None]
            if len(self.places) < _MOST_AT_ONCE:
                self.places.append(weakref.ref(place))
                return True
            return False


class Clients:
    """Lends file systems of one class. Thread-safe, safe across fork. Creates the first one at the first use."""

    def __init__(self, cls: type[Any], options: Mapping[str, Any]) -> None:
        self._cls = cls
        self._options = _private(cls, options)
        self._pools: forks.PerProcess[_Pool] = forks.PerProcess(lambda _: _Pool())

    @contextlib.contextmanager
    def lend(self) -> Iterator[Any]:
        """A file system for one request. Waits while too many are in use."""
        pool = self._pools.get()
        if pool.shared is not None:
            yield pool.shared
            return
        place = _Place()
        try:
            while not pool.take(place):
                time.sleep(_LOOK_SECONDS)
            with self._lent(pool) as fs:
                yield fs
        finally:
            del place

    @contextlib.contextmanager
    def lend_long(self) -> Iterator[Any]:
        """A file system for a long operation, which may use others meanwhile: it does not count in the limit of `lend`."""
        pool = self._pools.get()
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
            self._give_back(pool, fs)  # a normal response
            raise
        else:
            self._give_back(pool, fs)
        # After any other failure its connection may be unusable: it is not used again.

    def _give_back(self, pool: _Pool, fs: Any) -> None:
        with pool.lock:
            if fs is not pool.shared and len(pool.idle) < _MOST_IDLE:
                pool.idle.append(fs)


def _private(cls: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for a client that is not in fsspec's instance cache, and caches no listings if threads share it.

    A cached listing may be older than the request. The caches of unshared clients are invalidated before each request,
    because some libraries cannot disable them.
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
