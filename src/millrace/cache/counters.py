"""What the cache did, summed over every process that used a store.

Each process counts in a small memory-mapped file of its own, so counting takes no lock that another process could hold
and a killed process loses nothing. `totals` adds the files up. The files of processes that ended are folded into one, so
their number stays that of the live processes.

Opens of what is here are noted first and counted twice a second (`usage.py`). So each file also says up to which moment
everything is counted, for whoever wants sums that nothing is missing from (`wait_until_settled`).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from millrace.cache.failures import disk_errors
from millrace.cache.housekeeping import TICK_SECONDS
from millrace.private_files import make_folder, new_file, opener, read_file

NAMES = (
    "origin_requests",
    "origin_bytes",
    "cache_bytes",
    "native_opens",
    "uncached_bytes",
    "corrupt_blocks",
    "peer_requests",
    "peer_bytes",
    "served_requests",
    "served_bytes",
    "peer_failures",
    "hedged_requests",
    "moved_bytes",
)
"""The counters, in the order in which they lie in a file. New ones are appended.

`origin_bytes` left the origin; `cache_bytes` were served from this disk (a natively opened file counts once, with its
size, whatever part of it is read); `uncached_bytes` came from elsewhere and were not kept, for want of room. In a cluster
`peer_bytes` came from other nodes and `served_bytes` went to them; `peer_failures` are requests that a peer did not answer
as it should, and `hedged_requests` second ones that were sent because the first was slow. `moved_bytes` came from other
nodes because members came or went; they count as neither `peer_bytes` nor `cache_bytes`.
"""

_SLOTS = {name: slot for slot, name in enumerate(NAMES)}
_FILE_BYTES = 4096
_U64 = struct.Struct("<Q")
_RETIRED = "retired"

# The last word of a file: the moment (`time.monotonic_ns`, the same clock in all processes of a machine) before which
# everything is counted. 0 where nothing is ever counted late; 1 where that begins.
_SETTLED = _FILE_BYTES // _U64.size - 1

PATIENCE_SECONDS = 10 * TICK_SECONDS
"""So long is waited for processes to count what they noted. It takes them one tick; one that is stopped, or has no time at
all, takes longer than anybody should wait for it.
"""

_LOOK_SECONDS = TICK_SECONDS / 25


class Counters:
    """The counters of this process in a store, and the sums over all. Thread-safe; not usable after a fork."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._is_filed = True
        with disk_errors(directory):
            self._open(directory)
        self._lock = threading.Lock()

    def _open(self, directory: Path) -> None:
        make_folder(directory)
        path = directory / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        with _directory_lock(directory, fcntl.LOCK_EX):
            try:
                self._fold()
                self._descriptor = _new_file(path)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # What is cached on a full disk can still be read, and freed; only the counts end with this process.
                self._descriptor = os.memfd_create("millrace-counters", os.MFD_CLOEXEC)
                os.ftruncate(self._descriptor, _FILE_BYTES)
                self._is_filed = False
            self._map = mmap.mmap(self._descriptor, _FILE_BYTES)
            self._numbers = memoryview(self._map).cast("Q")

    def abandon(self) -> None:
        """In a forked child: let go of the parent's lock, so that it ends with the parent. The map is never written."""
        os.close(self._descriptor)

    def close(self) -> None:
        """Stop counting; the file is folded by the next process that opens the store."""
        self._numbers.release()
        self._map.close()
        os.close(self._descriptor)

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one counter, for every process to see at once."""
        slot = _SLOTS[name]
        with self._lock:
            self._numbers[slot] += amount

    def counts_late(self) -> None:
        """From now on this process notes some things before it counts them: others may wait for its `settled`."""
        if not self._numbers[_SETTLED]:
            self._numbers[_SETTLED] = 1

    def settled(self, moment: int) -> None:
        """Everything that this process noted before `moment` (`time.monotonic_ns`) is counted."""
        if self._numbers[_SETTLED]:
            self._numbers[_SETTLED] = moment

    def lacks(self, moment: int) -> bool:
        """Whether a process that lives has not said yet that everything before `moment` is counted."""
        with _directory_lock(self._directory, fcntl.LOCK_SH):
            return any(0 < _settled(path) < moment and _is_alive(path) for path in _live_files(self._directory))

    def totals(self) -> dict[str, int]:
        """The sums over every process, dead or alive, since the store was made."""
        sums = totals(self._directory)
        own = {} if self._is_filed else {name: self._numbers[slot] for name, slot in _SLOTS.items()}
        return {name: value + own.get(name, 0) for name, value in sums.items()}

    def _fold(self) -> None:
        """Add the files of ended processes to the retired sums. Runs under the directory's exclusive lock."""
        sums = _read(self._directory / _RETIRED)
        ended: list[Path] = []
        for path in _live_files(self._directory):
            if _is_alive(path):
                continue
            sums = [a + b for a, b in zip(sums, _read(path), strict=True)]
            ended.append(path)
        if ended:
            temporary = self._directory / f"{_RETIRED}.new"
            with open(new_file(temporary), "wb") as file:
                file.write(b"".join(_U64.pack(value) for value in sums).ljust(_FILE_BYTES, b"\0"))
            os.replace(temporary, self._directory / _RETIRED)
            for path in ended:
                path.unlink()


def _new_file(path: Path) -> int:
    """Make the file of a process; gives its descriptor, locked. Leaves nothing when that fails."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Not a hole: writing to one through a map on a full disk would kill the process.
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)
        # The lock says that this process lives; the kernel drops it when it ends, however it ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def wait_until_settled(all_counters: Sequence[Counters], moment: int) -> None:
    """Wait until all live processes have counted what they noted before `moment`: a tick, `PATIENCE_SECONDS` at most."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(counters.lacks(moment) for counters in all_counters) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def totals(directory: Path) -> dict[str, int]:
    """The sums over every process that used the store of this counters directory."""
    sums = [0] * len(NAMES)
    if directory.is_dir():
        with _directory_lock(directory, fcntl.LOCK_SH):
            for path in [directory / _RETIRED, *_live_files(directory)]:
                sums = [a + b for a, b in zip(sums, _read(path), strict=True)]
    return dict(zip(NAMES, sums, strict=True))


@contextmanager
def _directory_lock(directory: Path, kind: int) -> Iterator[None]:
    """Hold a lock on a directory for a `with` block."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def _live_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if not path.name.startswith(_RETIRED))


def _is_alive(path: Path) -> bool:
    """Whether the process of a file still runs. Under a lock of the directory."""
    descriptor = opener(str(path), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _read(path: Path) -> list[int]:
    return _words(path)[: len(NAMES)]


def _settled(path: Path) -> int:
    return _words(path)[_SETTLED]


def _words(path: Path) -> list[int]:
    try:
        data = read_file(path)
    except FileNotFoundError:
        data = b""
    return [word for (word,) in _U64.iter_unpack(data.ljust(_FILE_BYTES, b"\0"))]
