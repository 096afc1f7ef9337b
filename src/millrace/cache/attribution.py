"""Reads by job and prefix, summed over every process that used a store.

One file of fixed rows, which every process of the store maps. A process adds the reads that it has noted, twice a second and
never on the path of a read, under a lock of the file. It does not wait for the lock: the rest is added later. The number of
rows is fixed, so that the number of metrics is bounded: the others are added to a row without names. A process that opens
the file frees its damaged rows and recreates the file if something else has its name. A file that cannot be used ends the
attribution only.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash

from millrace.cache.eviction.usage import Tally, group_of, url_of
from millrace.errors import StorageError, printable
from millrace.events import Event, emit
from millrace.runtime.directories import locked_directory
from millrace.runtime.failures import reason_of
from millrace.runtime.private_files import make_way, opener
from millrace.store.records import ObjectName

_log = logging.getLogger("millrace.cache")

ROWS = 256
"""The most pairs of a job and a prefix with rows of their own. One more row is for all others."""

_ROW_BYTES = 384
_NUMBERS = struct.Struct("QQQQQQ")  # native and aligned: other processes read whole numbers only
_HEAD = struct.Struct("QQ")  # checksum of the label, which is 0 for a free row, and its length
_LABEL_AT = _HEAD.size + _NUMBERS.size
_LABEL_BYTES = _ROW_BYTES - _LABEL_AT
_FILE_BYTES = (1 + ROWS) * _ROW_BYTES
_MOST = 1 << 60  # no number gets there: a higher one is damage
_MOST_PENDING = 4 * ROWS
_SUMS_TEXT = "the reads of each job by prefix"


class Reads(NamedTuple):
    """Reads and bytes from this machine's disks; requests to others and their bytes, and those of them to peers."""

    cached_reads: int
    cached_bytes: int
    fetched_reads: int
    fetched_bytes: int
    peer_reads: int = 0
    peer_bytes: int = 0

    def plus(self, other: Reads) -> Reads:
        return Reads(*(a + b for a, b in zip(self, other, strict=True)))


NO_READS = Reads(0, 0, 0, 0)


class JobAndPrefix(NamedTuple):
    """A job (empty: unknown) and the URL of a prefix (empty: all others)."""

    job: str
    prefix: str


OTHERS = JobAndPrefix("", "")


def job_of(environ: Mapping[str, str]) -> str:
    """The name of this process's job: `MILLRACE_JOB`, or else the id of its Ray job, or nothing."""
    return (environ.get("MILLRACE_JOB") or environ.get("RAY_JOB_ID") or "")[:64]


class Attribution:
    """The sums of a store. Thread-safe; a forked child must not use it."""

    def __init__(self, path: Path, *, job: str) -> None:
        self._job = printable(job)
        self._lock = threading.Lock()
        self._rows: dict[JobAndPrefix, int] = {}
        self._is_full = False
        self._pending: dict[JobAndPrefix, Reads] = {}
        self._descriptor = -1
        try:
            self._descriptor = _open(path)
            self._map = mmap.mmap(self._descriptor, _FILE_BYTES)
        except (OSError, StorageError) as error:
            _log.warning("%s: reads are not attributed to prefixes and jobs: %s", path, reason_of(error))
            self.abandon()
        else:
            self._free_damaged(path)

    def add(self, tallies: Iterable[Tally]) -> None:
        """Add the uses of units, now or at the next call."""
        with self._lock:
            if self._descriptor < 0:
                return
            for tally in tallies:
                with contextlib.suppress(ValueError):  # a damaged name
                    self._note(tally)
            self._flush()

    def _note(self, tally: Tally) -> None:
        name = ObjectName.unpack(tally.packed_name)
        prefix = group_of("", name.key.partition("?")[0]).strip()
        # As it is read from a row again.
        part = _part_of(_label(JobAndPrefix(self._job, printable(url_of(name.origin, prefix)))))
        # Reads for other nodes are attributed there, to the job that read the bytes.
        hits, hit_bytes = tally.hits - tally.served, tally.hit_bytes - tally.served_bytes
        misses, miss_bytes = tally.misses - tally.relayed, tally.miss_bytes - tally.relayed_bytes
        reads = Reads(hits, hit_bytes, misses, miss_bytes, tally.peer_reads, tally.peer_bytes)
        if not any(reads):
            return
        if part not in self._pending and len(self._pending) >= _MOST_PENDING:
            part = OTHERS
        self._pending[part] = self._pending.get(part, NO_READS).plus(reads)

    def _flush(self) -> None:
        """Write the pending reads, unless another process has the lock."""
        if not self._pending:
            return
        with self._locked() as is_locked:
            if not is_locked:
                return
            for part, reads in self._pending.items():
                row = 0 if part == OTHERS else self._row_of(part)
                at = row * _ROW_BYTES + _HEAD.size
                _NUMBERS.pack_into(self._map, at, *self._reads(row).plus(reads))
            self._pending = {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock of the file for a `with` block, unless another process has it. Yields whether it is held."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _row_of(self, part: JobAndPrefix) -> int:
        """The row of a part, a new one if necessary; 0 if there is no space."""
        row = self._rows.get(part)
        if row is not None and self._part(row) == part:
            return row
        if row is None and self._is_full:
            return 0
        parts = {row: self._part(row) for row in range(1, 1 + ROWS)}
        self._rows = {found: row for row, found in parts.items() if found is not None}
        row = self._rows.get(part)
        if row is None:
            row = next((number for number, found in parts.items() if found is None), 0)
            self._is_full = not row
            if row:
                self._name(row, part)
                self._rows[part] = row
        return row

    def totals(self) -> dict[JobAndPrefix, Reads]:
        """The sums of all processes, of every part that has any."""
        with self._lock:
            if self._descriptor < 0:
                return {}
            found = {part: self._reads(row) for row in range(1, 1 + ROWS) if (part := self._part(row)) is not None}
            others = self._reads(0)
            return {**found, OTHERS: others} if any(others) else found

    # --- rows -------------------------------------------------------------------------------------

    def _name(self, row: int, part: JobAndPrefix) -> None:
        label = _label(part)
        at = row * _ROW_BYTES
        _NUMBERS.pack_into(self._map, at + _HEAD.size, *NO_READS)
        self._map[at + _LABEL_AT : at + _LABEL_AT + len(label)] = label
        _HEAD.pack_into(self._map, at, _checksum(label), len(label))  # last: a row without it is free

    def _part(self, row: int) -> JobAndPrefix | None:
        at = row * _ROW_BYTES
        checksum, length = _HEAD.unpack_from(self._map, at)
        if not checksum or length > _LABEL_BYTES:
            return None
        label = self._map[at + _LABEL_AT : at + _LABEL_AT + length]
        return _part_of(label) if _checksum(label) == checksum else None

    def _reads(self, row: int) -> Reads:
        numbers = _NUMBERS.unpack_from(self._map, row * _ROW_BYTES + _HEAD.size)
        return Reads(*numbers) if max(numbers) < _MOST else NO_READS

    def _free_damaged(self, path: Path) -> None:
        """Clear damaged rows. In place, because other processes have the file mapped."""
        with self._locked() as is_locked:
            rows = [row for row in range(1 + ROWS) if self._is_damaged(row)] if is_locked else []
            for row in rows:
                self._map[row * _ROW_BYTES : (row + 1) * _ROW_BYTES] = bytes(_ROW_BYTES)
        if rows:
            detail = f"{len(rows)} of its rows did not verify; lost: {_SUMS_TEXT}"
            emit(Event(name="cache.file.recreated", subject=str(path), detail=detail))
            _log.warning("%s is repaired: %s", path, detail)

    def _is_damaged(self, row: int) -> bool:
        at = row * _ROW_BYTES
        checksum, length = _HEAD.unpack_from(self._map, at)
        if row and not checksum:
            return False  # a free row: its numbers are cleared before its use
        is_named = self._part(row) is not None if row else checksum == length == 0
        return not is_named or max(_NUMBERS.unpack_from(self._map, at + _HEAD.size)) >= _MOST

    # --- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the pending reads if the lock is free, and close the file. Idempotent."""
        with self._lock:
            if self._descriptor >= 0:
                self._flush()
                self._map.close()
            self.abandon()

    def abandon(self) -> None:
        """Close the file without a write; in a forked child, that of the parent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _label(part: JobAndPrefix) -> bytes:
    """The text of a row; a long one is cut."""
    return f"{part.job}\n{part.prefix}".encode("utf-8", "replace")[:_LABEL_BYTES]


def _part_of(label: bytes) -> JobAndPrefix:
    job, _, prefix = label.decode("utf-8", "ignore").partition("\n")
    return JobAndPrefix(job, prefix)


def _checksum(label: bytes) -> int:
    return xxhash.xxh3_64_intdigest(label) or 1


def _open(path: Path) -> int:
    """The descriptor of the file. Anything else at its path is removed. Raises `StorageError` and `OSError`."""
    try:
        return _allocated(path)
    except OSError:
        with locked_directory(path.parent, fcntl.LOCK_EX):
            make_way(path, lost=_SUMS_TEXT)
            return _allocated(path)


def _allocated(path: Path) -> int:
    descriptor = opener(str(path), os.O_RDWR | os.O_CREAT)
    try:
        # Not a hole: writing to one through a map on a full disk would kill the process.
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
