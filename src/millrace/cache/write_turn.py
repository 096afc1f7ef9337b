"""Whose turn it is to write a store's index, with an end to the waiting.

LMDB has a lock for this, but whoever waits for that waits for ever, and a process that is stopped (Ctrl-Z, a debugger, a
container that is paused) while it writes would stop every other one of the machine. So each takes this lock before LMDB's,
and does without the index when its holder does not go on: the read then goes to the origin.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.cache.failures import disk_errors
from millrace.errors import StorageError

PATIENCE_SECONDS = 10.0
"""How long somebody who writes may take: a thousand times what is usual, for machines on which hundreds want a processor."""

_PAUSE_SECONDS = (0.00005, 0.005)  # first and longest one between two looks

# A `struct flock` on 64-bit Linux (type, whence, start, length, pid) of one byte. The kernel drops such a lock with the last
# descriptor of the open file, however its process ends.
_FLOCK = struct.Struct("hhqqi4x")
_TAKE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
_GIVE_BACK = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0)


class WriteTurn:
    """A lock between all threads of all processes, by the file `path`. A context manager, not to be nested.

    Entering raises `StorageError` after `PATIENCE_SECONDS`; from then on at once, until the lock was free again.
    """

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._path = path
        self._thread = threading.Lock()
        self._stuck = False

    @contextmanager
    def since(self, moment: float | None) -> Iterator[None]:
        """The same for who has waited for something else before, which counts: since `moment`, a `time.monotonic()`."""
        self._enter(math.inf if moment is None else moment + PATIENCE_SECONDS)
        try:
            yield
        finally:
            self.__exit__()

    def __enter__(self) -> None:
        self._enter(math.inf)

    def _enter(self, at_the_latest: float) -> None:
        deadline = min(time.monotonic() + (0.0 if self._stuck else PATIENCE_SECONDS), at_the_latest)
        # Those of this process wait for each other here, where it costs less.
        if not self._thread.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._given_up()
        try:
            pause, longest = _PAUSE_SECONDS
            while not self._take():
                if time.monotonic() >= deadline:
                    self._stuck = True
                    raise self._given_up()
                time.sleep(pause)
                pause = min(2 * pause, longest)
            self._stuck = False
        except BaseException:
            self._thread.release()
            raise

    def __exit__(self, *_: object) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _GIVE_BACK)
        self._thread.release()

    def abandon(self) -> None:
        """In a forked child: let go of what the parent holds, which is to end with the parent."""
        os.close(self._descriptor)

    close = abandon

    def _take(self) -> bool:
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _TAKE)
        except (BlockingIOError, PermissionError):  # EAGAIN or, as POSIX allows, EACCES
            return False
        return True

    def _given_up(self) -> StorageError:
        return StorageError(
            f"the process that writes to the cache in {self._path.parent} does not go on",
            next_step="continue or end processes that are stopped (state T in 'ps')",
        )
