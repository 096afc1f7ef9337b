"""Objects of this node's disks as a server gives them out: record, descriptor and checksums, kept open for the next request.

A small range costs few system calls only if nothing has to be opened or looked up for it. What is kept is compared at each
use with the page of signals (`cache/signals.py`): when anything was removed from the store, or found to be wrong, the record
is looked at again. Files of removed objects are let go of by the housekeeping, so that the disk gets its space back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from typing_extensions import Buffer

from millrace.cache.blocks import BLOCK_BYTES
from millrace.cache.disk import Disk
from millrace.cache.failures import LostDataError, disk_errors
from millrace.cache.housekeeping import every_tick, no_more
from millrace.cache.maps import Sweeper, lost_or_failed
from millrace.cache.node import CacheNode
from millrace.cache.records import Entry
from millrace.cache.sealing import seal_holds
from millrace.cache.segment_files import data_path
from millrace.cache.small import stored_object
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.peers.answers import FilePart, OpenFile
from millrace.peers.wire import Span

# A process has 1,024 descriptors where nobody changed that, and half of them are for connections.
_MAX_OPEN = 192
_MAX_SEGMENTS = 64
_MAX_SMALL = 8192  # about a kilobyte each
_MAX_SUMS = 4096


class SegmentFiles:
    """The segments of a node that were read last, open. Thread-safe."""

    def __init__(self, *, max_open: int = _MAX_SEGMENTS) -> None:
        self._open: dict[tuple[Disk, int], OpenFile] = {}
        self._max_open = max_open
        self._lock = threading.Lock()

    def get(self, disk: Disk, segment: int) -> OpenFile:
        """The data file of a segment. Raises `LostDataError` when it is gone, `StorageError` when the disk fails."""
        file = self._open.get((disk, segment))
        if file is not None:
            return file
        path = data_path(disk.segments.directory, segment)
        with lost_or_failed(path):
            file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
        with self._lock:
            while len(self._open) >= self._max_open:
                del self._open[next(iter(self._open))]
            self._open[disk, segment] = file
        return file

    def forget(self, disk: Disk, segment: int) -> None:
        """Open a segment anew the next time."""
        with self._lock:
            self._open.pop((disk, segment), None)

    def sweep(self, disk: Disk) -> None:
        """Let go of the segments of a disk that are not there any more. Raises `StorageError`."""
        for other, segment in list(self._open):
            if other is disk and disk.store.index.segment(segment) is None:
                self.forget(disk, segment)

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._open.clear()


class StoredObject:
    """One object version of which something is on a disk. Thread-safe; what it gives stays readable after its removal.

    `removals` is the number of the store's signals up to which the record holds; None: only now. Without `believes` every
    use of a part of a block verifies the whole of it.
    """

    __slots__ = (
        "_believed",
        "_believes",
        "_file",
        "_lock",
        "_segments",
        "_sums",
        "_verified",
        "base",
        "disk",
        "entry",
        "removals",
    )

    def __init__(
        self, disk: Disk, entry: Entry, removals: int | None, *, segments: SegmentFiles, believes: bool
    ) -> None:
        self.disk = disk
        self.entry = entry
        self.removals = removals
        self.base = entry.offset if entry.place else 0
        self._segments = segments
        self._file: OpenFile | None = None  # of an object that has one of its own
        self._sums: dict[int | Span, int] = {0: entry.checksum} if entry.place else {}
        self._verified: set[int] = set() if entry.place else disk.verified.of(entry.generation)
        self._believes = believes
        self._believed = False
        self._lock = threading.Lock()

    def adopt(self, before: StoredObject) -> None:
        """Go on with the descriptor of the same file, opened under an earlier record."""
        if self.entry.place:
            self._verified = before._verified
            return
        self._file = before._file
        if self._file is not None:
            self._believed = self.entry.sealed and seal_holds(self.entry, os.fstat(self._file.descriptor))

    @property
    def is_current(self) -> bool:
        """Whether nothing was removed from the store since the record was read."""
        return self.disk.signals.numbers[0] == self.removals

    def checksum(self, block: int) -> int | None:
        """The checksum of a block; None when it is not here. Raises `StorageError`."""
        found = self._sums.get(block)
        if found is None and not self.entry.place:
            found = self.disk.store.index.checksums(self.entry, (block,))[0]
            if found is not None:
                if len(self._sums) >= _MAX_SUMS:
                    self._sums = {}
                self._sums[block] = found
        return found

    def known_sum(self, key: int | Span) -> int | None:
        """The checksum of a block, or of a part of one, by its number or its span; None when it is not in memory."""
        return self._sums.get(key)

    def learn_sum(self, part: Span, checksum: int) -> None:
        """Remember the checksum of a part of a verified block: the next time it goes out without being read."""
        if len(self._sums) >= _MAX_SUMS:
            self._sums = {0: self.entry.checksum} if self.entry.place else {}
        self._sums[part] = checksum

    def here(self, blocks: range) -> list[range]:
        """Those of `blocks` that are here, as runs. Raises `StorageError`."""
        if self.entry.complete:
            return [blocks] if blocks else []
        runs: list[range] = []
        for block, value in zip(blocks, self.disk.store.index.checksums(self.entry, blocks), strict=True):
            if value is None:
                continue
            if runs and runs[-1].stop == block:
                runs[-1] = range(runs[-1].start, block + 1)
            else:
                runs.append(range(block, block + 1))
        return runs

    def file(self) -> OpenFile:
        """The open data file. Raises `LostDataError` when it is gone or cut, `StorageError` when the disk fails."""
        file = self._file
        if file is not None:
            return file
        entry = self.entry
        if entry.place:
            return self._segments.get(self.disk, entry.place)
        with self._lock:
            if self._file is None:
                file = OpenFile(self.disk.store.open_data(entry))
                self._believed = entry.sealed and seal_holds(entry, os.fstat(file.descriptor))
                self._file = file
            return self._file

    def part(self, start: int, stop: int) -> FilePart:
        """Where a range lies, whether it is right or not. Raises as `file` does."""
        return FilePart(self.file(), self.base + start, stop - start)

    def reaches(self, stop: int) -> bool:
        """Whether the file is long enough for the object's bytes up to `stop`: nobody has cut it. Raises as `file` does."""
        return os.fstat(self.file().descriptor).st_size >= self.base + stop

    def is_verified(self, block: int) -> bool:
        """Whether the bytes of a block were found right by this process, or by whoever sealed the file."""
        return self._believes and (self._believed or block in self._verified)

    def verify(self, block: int) -> bytes | None:
        """The bytes of a block, verified now. None when they are wrong: they are then forgotten, and counted.

        Raises as `file` does.
        """
        data: bytes | None
        if self.entry.place:
            found = stored_object(self.disk, self.entry, verify=True)
            data = None if found is None else bytes(found[0])
        else:
            data = self.disk.store.read_block(self.entry, self.file().descriptor, block)
        if data is None:
            self._verified.discard(block)
            self._sums.pop(block, None)
        else:
            self._verified.add(block)
        return data

    def read(self, start: int, stop: int) -> bytes | None:
        """A range inside one verified block. None when the file is shorter. Raises as `file` does."""
        file = self.file()
        try:
            data = os.pread(file.descriptor, stop - start, self.base + start)
        except OSError as error:
            with disk_errors(self.disk.store.directory):
                raise error
        return data if len(data) == stop - start else None


class StoredObjects:
    """The objects of a node that were asked for last, open. Thread-safe; not usable after a fork."""

    def __init__(self, node: CacheNode, *, max_open: int = _MAX_OPEN, max_small: int = _MAX_SMALL) -> None:
        self._node = node
        self._open: dict[bytes, StoredObject] = {}
        self._small: dict[bytes, StoredObject] = {}
        self._segments = SegmentFiles()
        self._max_open = max_open
        self._max_small = max_small
        self._lock = threading.Lock()
        self._sweepers: dict[Disk, Sweeper] = {}
        every_tick(self.sweep)

    def __len__(self) -> int:
        return len(self._open) + len(self._small)

    def find(self, object_id: bytes) -> StoredObject | None:
        """An object of which something is here; None when nothing is, or the disk cannot tell."""
        stored = self._small.get(object_id) or self._open.get(object_id)
        if stored is not None and stored.is_current and not stored.disk.failed:
            return stored
        return self._look_up(object_id, stored)

    def _look_up(self, object_id: bytes, before: StoredObject | None) -> StoredObject | None:
        disk = self._node.disk_of(object_id)
        if disk is None:
            return None
        try:
            stamp = disk.store.index.stamp()
            entry = disk.store.index.get(object_id)
        except StorageError as error:
            disk.report(error)
            return None
        usable = entry is not None and (entry.place or entry.block_bytes == BLOCK_BYTES or entry.size == 0)
        if entry is None or not usable:
            self.drop(object_id)
            return None
        stored = StoredObject(
            disk,
            entry,
            None if stamp is None else stamp.removals,
            segments=self._segments,
            believes=self._node.options.native,
        )
        if before is not None and before.disk is disk and _is_same_place(before.entry, entry):
            stored.adopt(before)
        if not entry.present:
            return stored  # something may be on its way: looked up anew until it is here
        disk.keep_house()
        kept, most = (self._small, self._max_small) if entry.place else (self._open, self._max_open)
        with self._lock:
            kept.pop(object_id, None)
            while len(kept) >= most:
                del kept[next(iter(kept))]
            kept[object_id] = stored
        return stored

    def drop(self, object_id: bytes) -> None:
        """Look an object up anew the next time."""
        with self._lock:
            self._open.pop(object_id, None)
            self._small.pop(object_id, None)

    def lost(self, stored: StoredObject, error: LostDataError) -> None:
        """Forget an object whose file somebody removed or cut."""
        emit(Event(name="cache.file.lost", subject=str(stored.disk.store.directory), detail=str(error)))
        self.drop(stored.entry.object_id)
        try:
            if stored.entry.place:
                self._segments.forget(stored.disk, stored.entry.place)
                stored_object(stored.disk, stored.entry, verify=True)  # finds out whether all of the segment is lost
            else:
                stored.disk.remove(stored.entry.object_id)
        except StorageError as failure:
            stored.disk.report(failure)

    def missing(
        self,
        stored: StoredObject | None,
        blocks: Iterable[int],
        partial: set[int],
        *,
        verify: bool,
        memory: dict[int, Buffer],
    ) -> list[int]:
        """Those of `blocks` that are neither here nor in `memory`, after those in `partial`, or all with `verify`, were
        verified once.
        """
        wanted = [block for block in blocks if block not in memory]
        if stored is None:
            return wanted
        missing: list[int] = []
        try:
            for block in wanted:
                if stored.checksum(block) is None:
                    missing.append(block)
                    continue
                in_doubt = verify or (block in partial and not stored.is_verified(block))
                in_doubt = in_doubt or not stored.reaches(min((block + 1) * BLOCK_BYTES, stored.entry.size))
                if in_doubt and stored.verify(block) is None:
                    missing.append(block)
        except LostDataError as error:
            self.lost(stored, error)
            return wanted
        except StorageError as error:
            stored.disk.report(error)
            return wanted
        return missing

    def sweep(self) -> None:
        """Let go of objects that are not here any more, and of their files."""
        with self._lock:
            opened = list(self._open.values())
        for disk in self._node.open_disks:
            if not self._sweeper(disk).due(disk.signals.removals):
                continue
            try:
                self._segments.sweep(disk)
                for stored in opened:
                    entry = stored.disk.store.index.get(stored.entry.object_id) if stored.disk is disk else stored.entry
                    if entry is None or entry.generation != stored.entry.generation:
                        self.drop(stored.entry.object_id)
            except StorageError as error:
                disk.report(error)

    def _sweeper(self, disk: Disk) -> Sweeper:
        return self._sweepers.setdefault(disk, Sweeper())

    def close(self) -> None:
        """Give the descriptors back, but for those that are being sent."""
        no_more(self.sweep)
        with self._lock:
            self._open.clear()
            self._small.clear()
        self._segments.clear()


def _is_same_place(one: Entry, other: Entry) -> bool:
    """Whether two records are of the same bytes of the same file."""
    return (one.generation, one.place, one.offset) == (other.generation, other.place, other.offset)
