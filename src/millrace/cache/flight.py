"""One fetch a block at a time, over the threads of a process and the processes of a node.

Inside a process a table of futures; between processes a byte-range lock on one file of the store, at an offset computed
from the block. The kernel releases such a lock when its holder dies, however it dies (a forked child closes what it
inherited of it, see `node.py`), so there is nobody to elect, nothing to time out in the usual case and nothing to clean up.
A holder that is alive but silent (SIGSTOP) is waited for `PATIENCE_SECONDS` and then overtaken: a second fetch of the same
bytes costs a request and does no harm.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from typing_extensions import Buffer

from millrace.cache.failures import disk_errors

PATIENCE_SECONDS = 30.0
_LITTLE_PATIENCE_SECONDS = 1.0
_REMEMBERED_SECONDS = 60.0

_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, pid

BlockKey = tuple[bytes, int]
"""An object id and a block number."""


class ProcessLocks:
    """Byte-range locks that any process on this machine respects. Thread-safe for different blocks."""

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._overtaken_at = -_REMEMBERED_SECONDS

    def patience_seconds(self) -> float:
        """How long to wait for who has a lock. A process that is stopped may have many of them: for a minute after one was
        overtaken, the others are not waited for as long.
        """
        lately = time.monotonic() - self._overtaken_at < _REMEMBERED_SECONDS
        return min(_LITTLE_PATIENCE_SECONDS, PATIENCE_SECONDS) if lately else PATIENCE_SECONDS

    def overtook(self) -> None:
        """Somebody did not go on in all that time."""
        self._overtaken_at = time.monotonic()

    def close(self) -> None:
        """Release everything; in a forked child, let go of the parent's locks, so that they end with the parent."""
        os.close(self._descriptor)

    def try_acquire(self, key: BlockKey) -> bool:
        """Take the lock of a block unless another process has it."""
        try:
            self._set(key, fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError):  # EAGAIN or, as POSIX allows, EACCES: held by another process
            return False
        return True

    def release(self, key: BlockKey) -> None:
        """Give the lock of a block back."""
        self._set(key, fcntl.F_UNLCK)

    def _set(self, key: BlockKey, kind: int) -> None:
        object_id, block = key
        digest = hashlib.blake2b(object_id + block.to_bytes(8, "big"), digest_size=8).digest()
        offset = int.from_bytes(digest, "big") >> 2
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))


class Flight(Future[Buffer]):
    """A block on its way here. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._hasten: Callable[[], None] | None = None
        self._wanted = False

    def carried_by(self, hasten: Callable[[], None]) -> None:
        """Have `hasten` called, once or twice, when somebody waits for the block: at once, where somebody does already."""
        self._hasten = hasten
        if self._wanted:
            hasten()

    def hasten(self) -> None:
        """Say that somebody waits for the block, which was only expected to be wanted so far."""
        # Written before the other is read, as in `carried_by`: one of the two sees both.
        self._wanted = True
        if self._hasten is not None:
            self._hasten()


class Flights:
    """The fetches under way in this process. Thread-safe."""

    def __init__(self) -> None:
        self._futures: dict[BlockKey, Flight] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._futures

    def board(self, object_id: bytes, blocks: Iterable[int]) -> tuple[dict[int, Flight], dict[int, Flight]]:
        """Split `blocks` into those that the caller must fetch and those that are on their way already.

        The caller must land every one of the first kind, by `land` or `fail`, with the future that it got here.
        """
        mine: dict[int, Flight] = {}
        theirs: dict[int, Flight] = {}
        with self._lock:
            for block in blocks:
                future = self._futures.get((object_id, block))
                if future is None:
                    self._futures[object_id, block] = mine[block] = Flight()
                else:
                    theirs[block] = future
        return mine, theirs

    def land(self, key: BlockKey, future: Future[Buffer], data: Buffer) -> None:
        """Give a fetched block to everyone who waits for it."""
        self._remove(key, future)
        future.set_result(data)

    def fail(self, key: BlockKey, future: Future[Buffer], error: BaseException) -> None:
        """Give `error` to everyone who waits for a block, unless it has landed."""
        self._remove(key, future)
        if not future.done():
            future.set_exception(error)

    def _remove(self, key: BlockKey, future: Future[Buffer]) -> None:
        # Only this flight: after it has landed, another one for the same block may be under way.
        with self._lock:
            if self._futures.get(key) is future:
                del self._futures[key]
