"""Counters of cache activity, summed over every process that used a store.

Each process counts in its own small memory-mapped file, so counting takes no lock that another process could hold
and a killed process loses nothing. `totals` adds the files up. The files of processes that ended are folded into one, so
their number stays that of the live processes.

Opens of cached objects are noted first and counted twice a second (`usage.py`). So each file also contains the time up to
which everything is counted. `wait_until_settled` uses it for complete sums.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import struct
import threading
import time
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from millrace.metrics import HISTOGRAMS, Distribution
from millrace.runtime.directories import locked_directory
from millrace.runtime.failures import disk_errors, reason_of
from millrace.runtime.locks import StoppedHolderError
from millrace.runtime.maintenance import TICK_SECONDS
from millrace.runtime.private_files import make_folder, make_way, new_file, opener, read_file, recreate

_log = logging.getLogger("millrace.cache")

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
    "moved_bytes",
    "corrupt_records",
    "mapped_bytes",
    "evictions",
    "evicted_bytes",
    "full_saves",
    "delta_saves",
    "save_failures",
    "save_raw_bytes",
    "served_cached_bytes",
    "relayed_bytes",
)
"""The counters, in the order of their places in a file. New counters are appended.

`origin_bytes` left the origin; `cache_bytes` were served from this disk (a natively opened file counts once, with its
size, whatever part of it is read); `uncached_bytes` were fetched and not stored, for lack of space. In a cluster
`peer_bytes` came from other nodes and `served_bytes` went to them; `peer_failures` are requests to a peer that failed.
`served_cached_bytes` is the part of `served_bytes` that was cached before the request of a reader. `relayed_bytes` were
fetched to serve other nodes: they are in `origin_bytes` or `peer_bytes` here, and in `peer_bytes` of the reader.
`moved_bytes` came from other nodes because members joined or left; they count as neither `peer_bytes` nor `cache_bytes`.
`corrupt_records` of the index did not verify and were removed. `mapped_bytes` is the part of `cache_bytes` that was
mapped. `evictions` removed `evicted_bytes`. The others count checkpoints that processes of this machine saved, from
`save_raw_bytes`.

`metrics.COUNTERS` declares the exported name of each.
"""

LIVE_NAMES = ("upload_backlog_bytes",)
"""Values that a process sets, and that end with it."""

_SLOTS = {name: slot for slot, name in enumerate(NAMES)}
_FILE_BYTES = 4096
_U64 = struct.Struct("<Q")
_RETIRED = "retired"
_MOST = 1 << 60  # no counter reaches this: a higher number is damage

# The last word of a file: the moment (`time.monotonic_ns`, the same clock in all processes of a machine) before which
# everything is counted. 0 where nothing is ever counted late; 1 where that begins.
_SETTLED = _FILE_BYTES // _U64.size - 1

# The word before it marks a file of counters; in the sums of ended processes it is their checksum.
_MARK = _SETTLED - 1
_VERSION = 3  # 2 had one more counter
_LIVE_MARK = int.from_bytes(b"MLRCcnt3", "little")

# The places of the histograms, each with a count for every bucket, one for larger values, and the sum; then of live values.
_FIRST_BUCKET, _FIRST_LIVE, _AFTER_LIVE = 64, 448, 480


class _Histogram(NamedTuple):
    bounds: tuple[float, ...]
    slot: int
    sum_slot: int
    scale: int
    """The sum is stored as a multiple of this part of its unit: microseconds, or bytes."""


def _placed() -> dict[str, _Histogram]:
    found, slot = {}, _FIRST_BUCKET
    for series in HISTOGRAMS:
        bounds = series.metric.bounds
        sum_slot = slot + len(bounds) + 1
        found[series.counter] = _Histogram(bounds, slot, sum_slot, 1 if series.counter.endswith("_bytes") else 10**6)
        slot = sum_slot + 1
    return found


_HISTOGRAMS = _placed()
_COUNTS = struct.Struct(f"<{_AFTER_LIVE}Q")
_LIVE_SLOTS = {name: slot for slot, name in enumerate(LIVE_NAMES, _FIRST_LIVE)}


class Measures(NamedTuple):
    """Counters, histograms, and the sums of live processes' values, by name."""

    counters: dict[str, int]
    histograms: dict[str, Distribution]
    live: dict[str, int]


_LIVE_NAME = re.compile("[0-9]+-[0-9a-f]{12}")
_SUMS_TEXT = "the counts of processes that ended"

SETTLE_SECONDS = 10 * TICK_SECONDS
"""The wait for processes to add their noted values to the counters. It takes them one tick; a process that is stopped, or
gets no CPU time, is not waited for.
"""

_LOOK_SECONDS = TICK_SECONDS / 25


class Counters:
    """The counters of this process in a store, and the sums over all. Thread-safe; not usable after a fork."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._is_filed = True
        with disk_errors(directory):
            self._open(directory)
        self._lock = threading.Lock()

    def _open(self, directory: Path) -> None:
        make_folder(directory)
        path = directory / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            with locked_directory(directory, fcntl.LOCK_EX):
                self._fold()
                self._descriptor = _new_file(path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, StoppedHolderError):
                raise
            # Cached data can still be read, and freed, while the disk is full or while a stopped process holds the lock;
            # only the counts end with this process.
            _log.warning(
                "%s: the reads of this process are missing in the totals of the cache: %s", directory, reason_of(error)
            )
            self._descriptor = os.memfd_create("millrace-counters", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, _FILE_BYTES)
            self._is_filed = False
        self._map = mmap.mmap(self._descriptor, _FILE_BYTES)
        self._numbers = memoryview(self._map).cast("Q")
        self._numbers[_MARK] = _LIVE_MARK

    def abandon(self) -> None:
        """In a forked child: release the parent's lock, so that it ends with the parent. The map is never written."""
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

    def observe(self, name: str, value: float) -> None:
        """Add one observation to a histogram of `metrics.HISTOGRAMS`, for every process to see at once."""
        bounds, slot, sum_slot, scale = _HISTOGRAMS[name]
        slot += bisect_left(bounds, value)
        amount = round(value * scale)
        with self._lock:
            self._numbers[slot] += 1
            self._numbers[sum_slot] += amount

    def set_live(self, name: str, value: int) -> None:
        """Set a value of `LIVE_NAMES`, until this process ends."""
        self._numbers[_LIVE_SLOTS[name]] = value

    def counts_late(self) -> None:
        """From now on this process notes some accesses before it counts them: others may wait for its `settled`."""
        if not self._numbers[_SETTLED]:
            self._numbers[_SETTLED] = 1

    def settled(self, moment: int) -> None:
        """Everything that this process noted before `moment` (`time.monotonic_ns`) is counted."""
        if self._numbers[_SETTLED]:
            self._numbers[_SETTLED] = moment

    def lacks(self, moment: int) -> bool:
        """Whether a live process has not counted everything before `moment` yet."""
        with disk_errors(self.directory), locked_directory(self.directory, fcntl.LOCK_SH):
            return any(0 < _settled(path) < moment and _is_alive(path) for path in _live_files(self.directory))

    def measures(self) -> Measures:
        """The sums over every process, dead or alive, since the store was made; of live values over live processes.

        Raises `StorageError`.
        """
        with disk_errors(self.directory):
            sums = _sums_in(self.directory)
        return _measured(sums if self._is_filed else _added([sums, self._numbers[:_AFTER_LIVE].tolist()]))

    def _fold(self) -> None:
        """Add the files of ended processes to the retired sums. Runs under the directory's exclusive lock."""
        retired = self.directory / _RETIRED
        make_way(retired, lost=_SUMS_TEXT)
        sums = _read(retired)
        if sums is None:
            recreate(retired, "does not verify", lost=_SUMS_TEXT)
            sums = [0] * _AFTER_LIVE
        ended: list[Path] = []
        for path in _live_files(self.directory):
            make_way(path)
            if _is_alive(path):
                continue
            ended.append(path)
            counts = _read(path)
            if counts is None:
                recreate(path, "does not hold counters", lost="the counts of one process")
            else:
                sums = _added([sums, counts])
        if ended:
            temporary = self.directory / f"{_RETIRED}.new"
            with open(new_file(temporary), "wb") as file:
                file.write(_pack_retired(sums))
            os.replace(temporary, self.directory / _RETIRED)
            for path in ended:
                path.unlink(missing_ok=True)


def _new_file(path: Path) -> int:
    """Create the file of a process. Returns its locked descriptor. Leaves nothing behind on failure."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Not a hole: writing to one through a map on a full disk would kill the process.
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)
        # The lock marks this process as live; the kernel releases it when the process ends, however it ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def wait_until_settled(all_counters: Sequence[Counters], moment: int) -> None:
    """Wait until all live processes have added their notes from before `moment`: a tick, `SETTLE_SECONDS` at most."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while any(counters.lacks(moment) for counters in all_counters) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def totals(directory: Path) -> dict[str, int]:
    """The sums over every process that used the store of this counters directory."""
    return _measured(_sums_in(directory)).counters


def _sums_in(directory: Path) -> list[int]:
    """The sums of all files. Values of `LIVE_NAMES` count in the files of live processes only."""
    if not directory.is_dir():
        return [0] * _AFTER_LIVE
    with locked_directory(directory, fcntl.LOCK_SH):
        found = [_read(directory / _RETIRED)]  # damage is reported by the process that folds the file
        for path in _live_files(directory):
            counts = _read(path)
            if counts is not None and any(counts[_FIRST_LIVE:]) and not _is_alive(path):
                counts[_FIRST_LIVE:] = [0] * (_AFTER_LIVE - _FIRST_LIVE)
            found.append(counts)
    return _added([[0] * _AFTER_LIVE, *(counts for counts in found if counts is not None)])


def _added(all_counts: Iterable[Sequence[int]]) -> list[int]:
    """The sums of lists of counts, place by place."""
    return [sum(place) for place in zip(*all_counts, strict=True)]


def _measured(sums: Sequence[int]) -> Measures:
    return Measures(
        dict(zip(NAMES, sums, strict=False)),
        {
            name: Distribution(tuple(sums[found.slot : found.sum_slot]), sums[found.sum_slot] / found.scale)
            for name, found in _HISTOGRAMS.items()
        },
        {name: sums[slot] for name, slot in _LIVE_SLOTS.items()},
    )


NO_MEASURES = _measured([0] * _AFTER_LIVE)


def without_dip(before: Measures | None, now: Measures) -> Measures:
    """The measures `now`, whose bytes from disk (cached bytes without the mapped ones) are not less than `before`. Pure.

    A process adds to `mapped_bytes` before `cache_bytes`, so sums that are read in between have too few cached bytes. Where
    another counter is less than before, the counters were reset, and `now` is returned unchanged.
    """
    if before is None:
        return now
    old, new = before.counters, now.counters
    if any(new[name] < old[name] for name in NAMES if name != "cache_bytes"):
        return now
    least = new["mapped_bytes"] + old["cache_bytes"] - old["mapped_bytes"]
    return now._replace(counters={**new, "cache_bytes": max(new["cache_bytes"], least)})


def _live_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if _LIVE_NAME.fullmatch(path.name))


def _is_alive(path: Path) -> bool:
    """Whether the process of a file still runs. Under a lock of the directory."""
    try:
        descriptor = opener(str(path), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor open, too
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _pack_retired(sums: Sequence[int]) -> bytes:
    data = b"".join(_U64.pack(value) for value in sums[:_FIRST_LIVE]).ljust(_MARK * _U64.size, b"\0")
    return (data + xxhash.xxh3_64_digest(data, _VERSION)).ljust(_FILE_BYTES, b"\0")


def _read(path: Path) -> list[int] | None:
    """The counters in a file, zeros without a file; None if it does not verify."""
    data = _data(path)
    if data is None:
        return [0] * _AFTER_LIVE
    at = _MARK * _U64.size
    mark = xxhash.xxh3_64_digest(data[:at], _VERSION) if path.name == _RETIRED else _U64.pack(_LIVE_MARK)
    counts = list(_COUNTS.unpack_from(data)) if data[at : at + 8] == mark else []
    return counts if counts and max(counts) < _MOST else None


def _settled(path: Path) -> int:
    data = _data(path)
    return 0 if data is None or _read(path) is None else int(_U64.unpack_from(data, _U64.size * _SETTLED)[0])


def _data(path: Path) -> bytes | None:
    """The bytes of a file of counters, truncated or padded to their length; None without a file."""
    try:
        return read_file(path)[:_FILE_BYTES].ljust(_FILE_BYTES, b"\0")
    except (FileNotFoundError, IsADirectoryError):
        return None
