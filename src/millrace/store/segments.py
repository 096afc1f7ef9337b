"""Writes segments: files that contain many small objects. `segment_maps.py` reads them.

A segment is two files in the store's `segments` directory, named by its generation: `.data` has the objects, `.idx` their
records (`segment_files.py`). An object is appended to `.data` first and recorded in `.idx` second; it is cached when the
index of the store records it. Recorded bytes are never written again, so readers need no lock.

One process at a time appends to a segment: the holder of a lock on its `.idx`. The kernel frees the lock when that process
ends, however it ends, and the next process that needs a segment for the same group continues after the last object.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple, Protocol

import xxhash
from typing_extensions import Buffer

from millrace.errors import StorageError
from millrace.runtime import forks
from millrace.runtime.failures import LostDataError, disk_errors
from millrace.runtime.locks import try_lock_byte
from millrace.store.records import ObjectName, SegmentObject, next_record, pack_segment_header, pack_segment_object
from millrace.store.segment_files import (
    data_bytes,
    data_path,
    generations,
    group_or_none,
    idx_path,
    open_file,
    unlink_files,
)

SMALL_OBJECT_BYTES = 1 << 20
"""Objects up to this size are stored in segments, larger ones in their own files."""

SEGMENT_BYTES = 64 << 20
"""The greatest length of a `.data` file."""

_IDX_BYTES = 16 << 20  # limits very small objects, so that a rebuild reads the file in one piece
_ALIGNMENT = 64  # of objects in `.data`: the preferred alignment of Arrow buffers
_MAX_OPEN = 32  # segments that one process appends to at a time, at two descriptors each
_IDLE_SECONDS = 1.5


class SegmentTable(Protocol):
    """The part of the index that records segments."""

    def new_generation(self) -> int:
        """A number that was never used for an object or segment of the store."""
        ...

    def add_segment(self, generation: int, group: str) -> None:
        """Record a new, empty segment."""
        ...


class Placed(NamedTuple):
    """The place of an appended object: the segment's generation, the offset in its `.data`, and the xxh3 of the bytes."""

    segment: int
    offset: int
    checksum: int


def appended_bytes(size: int) -> int:
    """The most bytes by which an object makes a segment longer."""
    return _data_aligned(size)


class Segments:
    """Appends small objects to the segments in `directory`.

    Thread-safe. Any number of processes append at the same time, each to its own segments. Not usable after a fork: the
    child calls `abandon`, which closes the parent's locks, and creates a new one. `on_rest` is called with a segment that
    is full or idle; it must be quick, and must not call this object.
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
        self._owner = forks.Owner()
        self._open: OrderedDict[str, _Segment] = OrderedDict()
        self._spare: dict[str, list[int]] = {}  # by group: segments with space to which this process does not append
        self._seen: set[int] = set()
        self._lock = threading.Lock()

    def append(
        self, group: str, object_id: bytes, name: ObjectName, data: Buffer, *, most_bytes: int = SEGMENT_BYTES
    ) -> Placed:
        """Append one object to a segment of `group`. Readers find it when it is in the store's index.

        A segment with other objects does not grow beyond `most_bytes`.

        Raises `DiskFullError` or `StorageError`; the bytes that were written are then never read.
        """
        if not self._owner.is_this_process:
            raise StorageError("segments: cannot be written after a fork", next_step="open the cache in this process")
        view = memoryview(data).cast("B")
        checksum = xxhash.xxh3_64_intdigest(view)
        with self._lock, disk_errors(self.directory):
            if len(view) > SEGMENT_BYTES or len(name.pack()) > _IDX_BYTES // 4:
                raise ValueError(f"a segment cannot hold {len(view)} bytes")
            while (placed := self._segment_of(group).append(object_id, name, view, checksum, most_bytes)) is None:
                full = self._open.pop(group)  # a new segment, if no other has space, accepts any object
                full.close()
                self._on_rest(full.generation)
            return placed

    def drop(self, generation: int) -> None:
        """Stop appending to a segment that was removed from the store."""
        with self._lock:
            for group, segment in list(self._open.items()):
                if segment.generation == generation:
                    self._open.pop(group).close()

    def release_idle(self) -> None:
        """Close segments that are idle for a second or two: other processes may append to them, or evict them."""
        before = time.monotonic() - _IDLE_SECONDS
        with self._lock:
            for group, segment in list(self._open.items()):
                if segment.appended < before:
                    self._close_segment(group)
                    self._on_rest(segment.generation)

    def remove(self, generation: int, unrecord: Callable[[], object]) -> bool:
        """Remove the files of a segment, after `unrecord()` removed its record. False if another process appends to it.

        Open maps stay readable. A segment to which this process appends is closed first. Anything else at the paths of its
        files is also removed, except a directory that is not empty, which is reported.
        """
        with self._lock, disk_errors(idx_path(self.directory, generation)):
            for group, segment in list(self._open.items()):
                if segment.generation == generation:
                    self._open.pop(group).close()
            descriptor = open_file(idx_path(self.directory, generation), os.O_WRONLY)
            # A file object: an interrupt cannot leave it open, and thus locked.
            with open(descriptor, "wb", buffering=0) if descriptor >= 0 else contextlib.nullcontext():
                if descriptor >= 0 and not try_lock_byte(descriptor, 0):
                    return False
                unrecord()
                unlink_files(self.directory, generation)
            return True

    def close(self) -> None:
        """Close every segment. Other processes continue to append to them."""
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """In a forked child: close the parent's locks, so that they end with the parent."""
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
                self._close_segment(next(iter(self._open)))
        self._open.move_to_end(group)
        return segment

    def _close_segment(self, group: str) -> None:
        segment = self._open.pop(group)
        segment.close()
        self._spare.setdefault(group, []).append(segment.generation)

    def _adopt(self, group: str) -> _Segment | None:
        """Open a segment of `group` with space, to which no process appends."""
        segment = self._adopt_known(group)
        if segment is None and self._find_new():
            segment = self._adopt_known(group)
        return segment

    def _adopt_known(self, group: str) -> _Segment | None:
        spare = self._spare.get(group, [])
        for generation in list(spare):
            found = _Segment.adopt(self.directory, generation)
            if found is _Refusal.BUSY:
                continue
            spare.remove(generation)
            if isinstance(found, _Segment):
                return found
        return None

    def _find_new(self) -> bool:
        """Find the segments that other processes have created since the last call; returns whether there are any."""
        new = [generation for generation in generations(self.directory) if generation not in self._seen]
        for generation in new:
            with contextlib.suppress(LostDataError):  # removed meanwhile
                if data_bytes(self.directory, generation) <= _ROOMY_BYTES:
                    group = group_or_none(self.directory, generation)
                    if group is None:
                        continue  # being created; or damaged, and then a rebuild decides
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


class _Refusal(Enum):
    """Why a segment cannot be opened: another process appends to it, or it is full or missing."""

    BUSY = auto()
    USELESS = auto()


class _Segment:
    """A segment that this process appends to. Not thread-safe."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.appended = time.monotonic()
        # Only this object closes them: closed twice, they could be another thread's.
        self._data = self._idx = -1
        self._data_end = self._idx_end = 0
        _segments.add(self)

    def _measure(self) -> None:
        # After all written bytes: the rest of a failed append is never read.
        self._data_end = _data_aligned(os.fstat(self._data).st_size)
        self._idx_end = next_record(os.fstat(self._idx).st_size)

    @classmethod
    def create(cls, directory: Path, generation: int, group: str) -> _Segment:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        segment = cls(generation)
        try:
            segment._data = os.open(data_path(directory, generation), flags, 0o600)
            segment._idx = os.open(idx_path(directory, generation), flags, 0o600)
            # Other processes ignore a segment without a header, so the lock is free.
            try_lock_byte(segment._idx, 0)
            _write_all(segment._idx, pack_segment_header(generation, group), 0)
            segment._measure()
            return segment
        except BaseException:
            segment.close()
            unlink_files(directory, generation)
            raise

    @classmethod
    def adopt(cls, directory: Path, generation: int) -> _Segment | _Refusal:
        segment = cls(generation)
        try:
            segment._idx = open_file(idx_path(directory, generation), os.O_WRONLY)
            if segment._idx >= 0:
                if not try_lock_byte(segment._idx, 0):
                    segment.close()
                    return _Refusal.BUSY
                segment._data = open_file(data_path(directory, generation), os.O_WRONLY)
            if segment._data >= 0:
                segment._measure()
                if not segment.removed() and segment._data_end <= _ROOMY_BYTES and segment._idx_end <= _ROOMY_IDX_BYTES:
                    return segment
        except BaseException:
            segment.close()
            raise
        segment.close()
        return _Refusal.USELESS

    def removed(self) -> bool:
        """Whether one of the files was unlinked."""
        return os.fstat(self._idx).st_nlink == 0 or os.fstat(self._data).st_nlink == 0

    def append(
        self, object_id: bytes, name: ObjectName, view: memoryview, checksum: int, most_bytes: int
    ) -> Placed | None:
        """Append an object, then its record. None if this segment has no space for it."""
        record = SegmentObject(object_id, self._data_end, len(view), checksum, name)
        encoded = pack_segment_object(self.generation, record)
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
            # The next record must not be hidden by a torn one. The bytes in `.data` have no record: they are overwritten, so
            # that repeated failures on a full disk do not fill it further.
            self._idx_end = next_record(os.fstat(self._idx).st_size)
            self._data_end = offset
            raise
        self._idx_end += len(encoded)
        return Placed(self.generation, offset, checksum)

    def close(self) -> None:
        """Close the descriptors, and thus release the lock. Idempotent."""
        # By no function in Python: an interrupt (Ctrl-C) comes only when a descriptor is closed.
        descriptor, self._idx = self._idx, -1
        if descriptor >= 0:
            os.close(descriptor)
        descriptor, self._data = self._data, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()  # an interrupt has lost it; locked, it could not be evicted before this process ends


# Also one that another thread of the parent was creating: its lock would not end with the parent's use.
_segments = forks.objects_reset_in_child(_Segment.close)


def _write_all(descriptor: int, data: Buffer, offset: int) -> None:
    view = memoryview(data)
    position = 0
    while position < len(view):
        position += os.pwrite(descriptor, view[position:], offset + position)


def _data_aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
