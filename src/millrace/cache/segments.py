"""Segments: files that hold many small objects, one after the other. Here they are written; `segment_maps.py` reads them.

A segment is two files in the store's `segments` folder, named by its generation: `.data` holds the objects, `.idx` says
which (`segment_records.py`). An object is appended to `.data` first and recorded in `.idx` second; it is in the cache once
the index of the store says so. Nothing that is recorded is ever written again, so whoever reads needs no lock.

One process at a time appends to a segment: the one that holds a lock on its `.idx`. The kernel frees the lock when that
process ends, however it ends, and the next process that needs a segment for the same group goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

import xxhash
from typing_extensions import Buffer

from millrace.cache.failures import LostDataError, disk_errors
from millrace.cache.records import ObjectName
from millrace.cache.segment_files import (
    data_bytes,
    data_path,
    generations,
    group_or_none,
    idx_path,
    open_file,
    unlink_files,
)
from millrace.cache.segment_records import SegmentObject, aligned, encode_header, encode_object
from millrace.errors import StorageError

SMALL_OBJECT_BYTES = 1 << 20
"""Objects up to this size lie in segments, larger ones in a file of their own."""

SEGMENT_BYTES = 64 << 20
"""No `.data` file grows beyond this."""

_IDX_BYTES = 16 << 20  # of very many very small objects a segment holds fewer, so that a rebuild reads it in one piece
_ALIGNMENT = 64  # of objects in `.data`: what Arrow wishes of its buffers
_MAX_OPEN = 32  # segments that one process appends to at a time, at two descriptors each
_IDLE_SECONDS = 1.5


class SegmentTable(Protocol):
    """Where segments are entered: the index of the store."""

    def new_generation(self) -> int:
        """A number that no object or segment of the store has had."""
        ...

    def add_segment(self, generation: int, group: str) -> None:
        """Record a new, empty segment."""
        ...


@dataclass(frozen=True, slots=True)
class Placed:
    """Where an object was appended: the segment's generation, the offset in its `.data`, and the xxh3 of the bytes."""

    segment: int
    offset: int
    checksum: int


def appended_bytes(size: int) -> int:
    """By how much at most an object makes a segment longer."""
    return _data_aligned(size)


class Segments:
    """Appends small objects to the segments in `directory`.

    Thread-safe; any number of processes at once, each to segments of its own. Not usable after a fork: the child calls
    `abandon`, which lets go of the parent's locks, and makes a new one. `on_rest` is told of a segment to which nothing is
    appended for the time being, because it is full or for want of objects; it must be quick, and must not come back here.
    """

    def __init__(
        self,
        directory: Path,
        table: SegmentTable,
        *,
        max_open: int = _MAX_OPEN,
        on_rest: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.directory = directory
        self._on_rest = on_rest
        self._table = table
        self._max_open = max_open
        self._pid = os.getpid()
        self._open: OrderedDict[str, _Segment] = OrderedDict()
        self._spare: dict[str, list[int]] = {}  # by group, those with room that this process does not append to
        self._seen: set[int] = set()
        self._lock = threading.Lock()

    def append(
        self, group: str, object_id: bytes, name: ObjectName, data: Buffer, *, most_bytes: int = SEGMENT_BYTES
    ) -> Placed:
        """Append one object to a segment of `group`. Nobody finds it there before it is in the store's index.

        A segment with other objects in it does not grow beyond `most_bytes`.

        Raises `DiskFullError` or `StorageError`; then nothing that was written of it can be taken for data.
        """
        if self._pid != os.getpid():
            raise StorageError("segments are not written across a fork", next_step="open the cache in this process")
        view = memoryview(data).cast("B")
        checksum = xxhash.xxh3_64_intdigest(view)
        with self._lock, disk_errors(self.directory):
            if len(view) > SEGMENT_BYTES or len(name.pack()) > _IDX_BYTES // 4:
                raise ValueError(f"{len(view)} bytes are too many for a segment")
            while (placed := self._segment_of(group).append(object_id, name, view, checksum, most_bytes)) is None:
                full = self._open.pop(group)  # the one that is made when no other has room takes anything
                full.close()
                self._on_rest(full.generation)
            return placed

    def forget(self, generation: int) -> None:
        """Append no more to a segment that was removed from the store."""
        with self._lock:
            for group, segment in list(self._open.items()):
                if segment.generation == generation:
                    self._open.pop(group).close()

    def release_idle(self) -> None:
        """Let go of segments to which nothing was appended for a second or two: others may append to them, or evict them."""
        before = time.monotonic() - _IDLE_SECONDS
        with self._lock:
            for group, segment in list(self._open.items()):
                if segment.appended < before:
                    self._let_go(group)
                    self._on_rest(segment.generation)

    def remove(self, generation: int, forget: Callable[[], object]) -> bool:
        """Remove the files of a segment, after `forget()` has taken it out of the index. False when somebody appends to it.

        Whoever has it mapped reads on. A segment to which this process appends is let go of first. What somebody has put in
        the place of its files goes, too, but for a folder that is not empty, which is reported.
        """
        with self._lock, disk_errors(idx_path(self.directory, generation)):
            for group, segment in list(self._open.items()):
                if segment.generation == generation:
                    self._open.pop(group).close()
            descriptor = open_file(idx_path(self.directory, generation), os.O_RDONLY)
            try:
                if descriptor >= 0:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                forget()
                unlink_files(self.directory, generation)
            except BlockingIOError:
                return False
            finally:
                _close(descriptor)
            return True

    def close(self) -> None:
        """Let go of every segment: other processes go on where this one stopped."""
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's locks, so that they end with the parent."""
        while self._open:
            self._open.popitem()[1].close()

    # --- finding a segment, under the lock --------------------------------------------------------

    def _segment_of(self, group: str) -> _Segment:
        segment = self._open.get(group)
        if segment is not None and segment.removed():
            self._open.pop(group).close()
            segment = None
        if segment is None:
            segment = self._adopt(group) or self._create(group)
            self._open[group] = segment
            while len(self._open) > self._max_open:
                self._let_go(next(iter(self._open)))
        self._open.move_to_end(group)
        return segment

    def _let_go(self, group: str) -> None:
        segment = self._open.pop(group)
        segment.close()
        self._spare.setdefault(group, []).append(segment.generation)

    def _adopt(self, group: str) -> _Segment | None:
        """Take over a segment of `group` that has room and that no process appends to."""
        segment = self._adopt_known(group)
        if segment is None and self._look_around():
            segment = self._adopt_known(group)
        return segment

    def _adopt_known(self, group: str) -> _Segment | None:
        spare = self._spare.get(group, [])
        for generation in list(spare):
            found = _Segment.adopt(self.directory, generation)
            if found is _Answer.BUSY:
                continue
            spare.remove(generation)
            if isinstance(found, _Segment):
                return found
        return None

    def _look_around(self) -> bool:
        """Note the segments that other processes made since the last look; gives whether there were any."""
        new = [generation for generation in generations(self.directory) if generation not in self._seen]
        for generation in new:
            with contextlib.suppress(LostDataError):  # removed meanwhile
                if data_bytes(self.directory, generation) <= _ROOMY_BYTES:
                    group = group_or_none(self.directory, generation)
                    if group is None:
                        continue  # just being made; or damaged, and then a rebuild decides
                    self._spare.setdefault(group, []).append(generation)
            self._seen.add(generation)
        return bool(new)

    def _create(self, group: str) -> _Segment:
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        segment = _Segment.create(self.directory, self._table.new_generation(), group)
        try:
            self._table.add_segment(segment.generation, group)
        except BaseException:
            segment.close()
            unlink_files(self.directory, segment.generation)
            raise
        self._seen.add(segment.generation)
        return segment


_ROOMY_BYTES = SEGMENT_BYTES - SMALL_OBJECT_BYTES
_ROOMY_IDX_BYTES = _IDX_BYTES - (64 << 10)


class _Answer(Enum):
    """Why a segment cannot be taken over: somebody appends to it, or there is no room in it or nothing left of it."""

    BUSY = auto()
    USELESS = auto()


class _Segment:
    """A segment that this process appends to. Not thread-safe."""

    def __init__(self, generation: int, data: int, idx: int) -> None:
        self.generation = generation
        self.appended = time.monotonic()
        self._data, self._idx = data, idx
        # Behind everything that was ever written: what an append that failed has left there is never looked at.
        self._data_end = _data_aligned(os.fstat(data).st_size)
        self._idx_end = aligned(os.fstat(idx).st_size)

    @classmethod
    def create(cls, directory: Path, generation: int, group: str) -> _Segment:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        data = idx = -1
        try:
            data = os.open(data_path(directory, generation), flags, 0o600)
            idx = os.open(idx_path(directory, generation), flags, 0o600)
            fcntl.flock(idx, fcntl.LOCK_EX)
            # Whoever finds no header here does not touch the files, so the moment before the lock does no harm.
            _write_all(idx, encode_header(generation, group), 0)
            return cls(generation, data, idx)
        except BaseException:
            _close(data, idx)
            unlink_files(directory, generation)
            raise

    @classmethod
    def adopt(cls, directory: Path, generation: int) -> _Segment | _Answer:
        data = idx = -1
        try:
            idx = open_file(idx_path(directory, generation), os.O_WRONLY)
            if idx >= 0:
                fcntl.flock(idx, fcntl.LOCK_EX | fcntl.LOCK_NB)
                data = open_file(data_path(directory, generation), os.O_WRONLY)
            if data >= 0:
                segment = cls(generation, data, idx)
                if not segment.removed() and segment._data_end <= _ROOMY_BYTES and segment._idx_end <= _ROOMY_IDX_BYTES:
                    return segment
        except BlockingIOError:
            _close(data, idx)
            return _Answer.BUSY
        except BaseException:
            _close(data, idx)
            raise
        _close(data, idx)
        return _Answer.USELESS

    def removed(self) -> bool:
        """Whether somebody unlinked one of the files."""
        return os.fstat(self._idx).st_nlink == 0 or os.fstat(self._data).st_nlink == 0

    def append(
        self, object_id: bytes, name: ObjectName, view: memoryview, checksum: int, most_bytes: int
    ) -> Placed | None:
        """Write an object behind the others, then its record. None when there is no room for it in this segment."""
        record = SegmentObject(object_id, self._data_end, len(view), checksum, name)
        encoded = encode_object(self.generation, record)
        most_bytes = SEGMENT_BYTES if not self._data_end else min(most_bytes, SEGMENT_BYTES)
        if self._data_end + len(view) > most_bytes or self._idx_end + len(encoded) > _IDX_BYTES:
            return None
        self.appended = time.monotonic()
        offset = self._data_end
        _write_all(self._data, view, offset)
        self._data_end = _data_aligned(offset + len(view))
        try:
            _write_all(self._idx, encoded, self._idx_end)
        except OSError:
            # The next record must not be hidden behind a torn one. The bytes in `.data` belong to no record: they are
            # written over, so that failing again and again on a full disk does not fill it further.
            self._idx_end = aligned(os.fstat(self._idx).st_size)
            self._data_end = offset
            raise
        self._idx_end += len(encoded)
        return Placed(self.generation, offset, checksum)

    def close(self) -> None:
        _close(self._data, self._idx)


def _write_all(descriptor: int, data: Buffer, offset: int) -> None:
    view = memoryview(data)
    position = 0
    while position < len(view):
        position += os.pwrite(descriptor, view[position:], offset + position)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _data_aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
