"""What the processes of a node know together about one origin: numbers and slots in a small mapped file.

A slot is one request in flight. Whoever has it holds a lock of the kernel (an open file description lock) on a byte of the
file, so that a process that is killed gives its slots back. The numbers are doubles, read without a lock, each by one
load, and changed under a lock that spans the processes.

File: one page of numbers behind a line that names the format and the boot of the machine, then a byte for each slot that is
1 when taken. These bytes are hints, to find a free slot without asking the kernel about each: only the locks count.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import stat
import struct
import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from millrace import private_files
from millrace.errors import StorageError

_PAGE = 4096
_HINTS = _PAGE
_NBYTES = 2 * _PAGE
_LINE_BYTES = 64  # the numbers begin behind it
_FORMAT = b"millrace-limits 1 "

# Locks are on bytes of their own; which ones is part of the format. The waiting one lies behind the end of the file.
_MUTEX_BYTE = 0
_WAITING_BYTE = _NBYTES

_MUTEX_SECONDS = 1.0


class Number(IntEnum):
    """Where each number lies. Times are of the machine's monotonic clock, in seconds; a new file is all zeros."""

    BOOKED_UNTIL = 0
    """The schedule of the rate."""
    CLOSED_UNTIL = 1
    CLOSED_AT = 2
    CLOSINGS = 3
    """How often the gate has closed since the last success."""
    HELD_BACK = 4
    """The size of the window, as what it lacks of `MOST_REQUESTS`."""
    THRESHOLD = 5


@functools.cache
def _flock(kind: int, byte: int) -> bytes:
    """What the kernel takes for a lock on one byte; at most two for each slot."""
    return struct.pack("hhqqi", kind, os.SEEK_SET, byte, 1, 0)


class Board:
    """See the module. `Board(path)` is shared by all processes that open `path`; `Board(None)` is of this process alone.

    Not thread-safe, but for reading `numbers`: the owner has a lock for the threads of its process, whose slots are all of
    one open file description. A forked child calls `after_fork` before anything else.

    Raises `StorageError` or `OSError` where the file cannot be had, or the file system has no such locks.
    """

    def __init__(self, path: Path | None) -> None:
        self._locks: int | None = None
        if path is None:
            self._map = mmap.mmap(-1, _NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            # Of its own description: the map keeps a copy of the descriptor, also in a child, where no lock may hang on it.
            with contextlib.closing(_File(path)) as file:
                self._map = mmap.mmap(file.descriptor, _NBYTES)
                mapped = os.fstat(file.descriptor)
            self._locks = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.numbers = memoryview(self._map)[_LINE_BYTES:_PAGE].cast("d")
        """By `Number`. Written by this process under `exclusive` only."""
        if self._locks is not None:
            try:
                self._require_same_file(path, mapped)
                self._begin()
            except BaseException:
                self.close()
                raise

    @property
    def is_shared(self) -> bool:
        return self._locks is not None

    # --- slots ------------------------------------------------------------------------------------

    def find(self, start: int, stop: int) -> int:
        """The first slot of `[start, stop)` that seems free, -1 where none does."""
        found = self._map.find(b"\0", _HINTS + start, _HINTS + stop)
        return found - _HINTS if found >= 0 else -1

    def take(self, slot: int) -> bool:
        """Take a slot that this process does not have; False where another has it."""
        if self._locks is not None and not self._lock(_flock(fcntl.F_WRLCK, _HINTS + slot)):
            return False
        self._map[_HINTS + slot] = 1
        return True

    def give(self, slot: int) -> None:
        """Give back a slot that this process has."""
        self._map[_HINTS + slot] = 0  # first: then only who has a slot ever writes its hint
        if self._locks is not None:
            self._lock(_flock(fcntl.F_UNLCK, _HINTS + slot))

    # --- who waits --------------------------------------------------------------------------------

    def say_waiting(self, waiting: bool) -> None:
        """Tell the other processes whether somebody of this one waits for a slot."""
        if self._locks is not None:
            self._lock(_flock(fcntl.F_RDLCK if waiting else fcntl.F_UNLCK, _WAITING_BYTE))

    def others_wait(self) -> bool:
        """Whether somebody of another process waits for a slot."""
        if self._locks is None:
            return False
        answer = fcntl.fcntl(self._locks, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, _WAITING_BYTE))
        return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)

    # --- numbers ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Change the numbers while no other process does.

        It is held for microseconds. One that is stopped just then must not stop all others: after a second they go on.
        """
        if self._locks is None:
            yield
            return
        give_up = time.monotonic() + _MUTEX_SECONDS
        pause = 20e-6
        while not self._lock(_flock(fcntl.F_WRLCK, _MUTEX_BYTE)) and time.monotonic() < give_up:
            time.sleep(pause)
            pause = min(pause * 2, 2e-3)
        try:
            yield
        finally:
            self._lock(_flock(fcntl.F_UNLCK, _MUTEX_BYTE))

    def reset(self) -> None:
        """Forget all numbers and hints; under `exclusive`."""
        self._map[:_NBYTES] = bytes(_NBYTES)

    # --- life -------------------------------------------------------------------------------------

    def after_fork(self) -> None:
        """In a child: let go of the parent's slots, which would stay taken for as long as the child lives.

        Raises `OSError` where the file cannot be opened again; then this board is of the child alone.
        """
        inherited, self._locks = self._locks, None
        try:
            if inherited is not None:
                # By its descriptor: the name may belong to another file by now.
                self._locks = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            if inherited is not None:
                os.close(inherited)
            if self._locks is None:
                self._map = mmap.mmap(-1, _NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self.numbers = memoryview(self._map)[_LINE_BYTES:_PAGE].cast("d")

    def close(self) -> None:
        """Give everything back. Idempotent."""
        descriptor, self._locks = self._locks, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_locks", None) is not None:
            self.close()

    def _begin(self) -> None:
        """Make the file what it should be; numbers of another boot are of another clock."""
        line = (_FORMAT + _boot_id()).ljust(_LINE_BYTES, b"\n")[:_LINE_BYTES]
        with self.exclusive():
            if self._map[:_LINE_BYTES] != line:
                self.reset()
                self._map[:_LINE_BYTES] = line

    def _require_same_file(self, path: Path | None, mapped: os.stat_result) -> None:
        """The locks must be on the file whose numbers these are: another one may have come into its place meanwhile."""
        assert self._locks is not None
        status = os.fstat(self._locks)
        if not os.path.samestat(status, mapped) or status.st_size < _NBYTES:
            raise StorageError(f"{path} changes while it is opened", next_step="remove it")
        self._lock(_flock(fcntl.F_UNLCK, _MUTEX_BYTE), probing=True)

    def _lock(self, what: bytes, *, probing: bool = False) -> bool:
        """Carry out one lock operation without waiting; False where another process is in the way.

        Any other failure of the kernel (no memory for one more lock) counts as done: the limits are a courtesy, no reason
        to stop reading. With `probing` it is raised.
        """
        assert self._locks is not None
        try:
            fcntl.fcntl(self._locks, fcntl.F_OFD_SETLK, what)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if probing:
                raise
        return True


class _File:
    """The file behind a board, of the right size and with its room on the disk: a map without it would kill the process."""

    def __init__(self, path: Path) -> None:
        private_files.make_folder(path.parent)
        private_files.require_file(path)
        self.descriptor = private_files.opener(str(path), os.O_RDWR | os.O_CREAT)
        try:
            status = os.fstat(self.descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise StorageError(f"{path} is no file of this user", next_step="remove it")
            os.posix_fallocate(self.descriptor, 0, _NBYTES)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.descriptor)


def _boot_id() -> bytes:
    # As bytes: to read it as text would import a codec, in a thread that sends a request (see `origin.importing`).
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
