"""Objects on this node's disks for a server: index record, descriptor and checksums, kept open for the next request.

A small range is cheap only if nothing must be opened or looked up for it. At each use, the record is compared with the page
of signals (`store/signals.py`): after a removal from the store, or a wrong block, it is looked up again. Housekeeping closes
the files of removed objects, so that the disk space is freed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from typing_extensions import Buffer

from millrace.cache.disk import Disk
from millrace.cache.node import CacheNode
from millrace.cache.reading.locations import stored_object
from millrace.cluster.dataplane.responses import FilePart, OpenFile
from millrace.cluster.dataplane.wire import Span
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.runtime.failures import LostDataError, disk_errors
from millrace.runtime.maintenance import register_periodic, unregister
from millrace.store.maps import Sweeper, lost_or_failed
from millrace.store.records import BLOCK_BYTES, Entry
from millrace.store.segment_files import data_path
from millrace.store.signals import REMOVALS

# The default limit is 1,024 descriptors per process, and half of them are for connections.
_MAX_OPEN = 192
_MAX_SEGMENTS = 64
_MAX_SMALL = 8192  # about a kilobyte each
_MAX_SUMS = 4096


class SegmentFiles:
    """The most recently read segments of a node, open. Thread-safe."""

    def __init__(self, *, max_open: int = _MAX_SEGMENTS) -> None:
        self._open: dict[tuple[Disk, int], OpenFile] = {}
        self._max_open = max_open
        self._lock = threading.Lock()

    def get(self, disk: Disk, segment: int) -> OpenFile:
        """The data file of a segment. Raises `LostDataError` if it is gone, `StorageError` if the disk fails."""
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

    def drop(self, disk: Disk, segment: int) -> None:
        """Open a segment again the next time."""
        with self._lock:
            self._open.pop((disk, segment), None)

    def sweep(self, disk: Disk) -> None:
        """Close the removed segments of a disk. Raises `StorageError`."""
        for other, segment in list(self._open):
            if other is disk and disk.store.index.segment(segment) is None:
                self.drop(disk, segment)

    def clear(self) -> None:
        """Close all."""
        with self._lock:
            self._open.clear()


class StoredObject:
    """One object version with cached blocks on a disk. Thread-safe; its file parts stay readable after its removal.

    The record is valid while the store's signal number equals `removals` (None: only now). Without `trusts_seals`, every use
    of a part of a block verifies the whole block.
    """

    __slots__ = (
        "_file",
        "_is_sealed",
        "_lock",
        "_segments",
        "_sums",
        "_trusts_seals",
        "_verified",
        "base",
        "disk",
        "entry",
        "removals",
    )

    def __init__(
        self, disk: Disk, entry: Entry, removals: int | None, *, segments: SegmentFiles, trusts_seals: bool
    ) -> None:
        self.disk = disk
        self.entry = entry
        self.removals = removals
        self.base = entry.offset if entry.place else 0
        self._segments = segments
        self._file: OpenFile | None = None  # of a large object
        self._sums: dict[int | Span, int] = {0: entry.checksum} if entry.place else {}
        self._verified: set[int] = set() if entry.place else disk.verified.of(entry.generation)
        self._trusts_seals = trusts_seals
        self._is_sealed = False
        self._lock = threading.Lock()

    def adopt(self, before: StoredObject) -> None:
        """Use the descriptor of the same file that was opened under an earlier record."""
        if self.entry.place:
            self._verified = before._verified
            return
        self._file = before._file
        if self._file is not None:
            self._is_sealed = self.entry.seal_holds(os.fstat(self._file.descriptor))

    @property
    def is_current(self) -> bool:
        """Whether nothing was removed from the store since the record was read."""
        return self.disk.signals.numbers[REMOVALS] == self.removals

    def checksum(self, block: int) -> int | None:
        """The checksum of a block; None if it is not cached. Raises `StorageError`."""
        found = self._sums.get(block)
        if found is None and not self.entry.place:
            found = self.disk.store.index.checksums(self.entry, (block,))[0]
            if found is not None:
                if len(self._sums) >= _MAX_SUMS:
                    self._sums = {}
                self._sums[block] = found
        return found

    def known_sum(self, key: int | Span) -> int | None:
        """The checksum of a block or a part of one, by number or span; None if it is not in memory."""
        return self._sums.get(key)

    def add_sum(self, part: Span, checksum: int) -> None:
        """Store the checksum of a part of a verified block, which can then be sent without computing it again."""
        if len(self._sums) >= _MAX_SUMS:
            self._sums = {0: self.entry.checksum} if self.entry.place else {}
        self._sums[part] = checksum

    def file(self) -> OpenFile:
        """The open data file. Raises `LostDataError` if it is gone or truncated, `StorageError` if the disk fails."""
        file = self._file
        if file is not None:
            return file
        entry = self.entry
        if entry.place:
            return self._segments.get(self.disk, entry.place)
        with self._lock:
            if self._file is None:
                file = OpenFile(self.disk.store.open_data(entry))
                self._is_sealed = entry.seal_holds(os.fstat(file.descriptor))
                self._file = file
            return self._file

    def part(self, start: int, stop: int) -> FilePart:
        """The location of a range, verified or not. Raises as `file` does."""
        return FilePart(self.file(), self.base + start, stop - start)

    def reaches(self, stop: int) -> bool:
        """Whether the file is not truncated before the object's byte `stop`. Raises as `file` does."""
        return os.fstat(self.file().descriptor).st_size >= self.base + stop

    def is_verified(self, block: int) -> bool:
        """Whether this process verified a block, or the file has a valid seal."""
        return self._trusts_seals and (self._is_sealed or block in self._verified)

    def verify(self, block: int) -> bytes | None:
        """The bytes of a block, verified now. None if they are wrong: the block is then dropped and counted.

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
        """A range inside one verified block. None if the file is too short. Raises as `file` does."""
        file = self.file()
        try:
            data = os.pread(file.descriptor, stop - start, self.base + start)
        except OSError as error:
            with disk_errors(self.disk.store.directory):
                raise error
        return data if len(data) == stop - start else None


class StoredObjects:
    """The most recently requested objects of a node, open. Thread-safe; not usable after a fork."""

    def __init__(self, node: CacheNode, *, max_open: int = _MAX_OPEN, max_small: int = _MAX_SMALL) -> None:
        self._node = node
        self._open: dict[bytes, StoredObject] = {}
        self._small: dict[bytes, StoredObject] = {}
        self._segments = SegmentFiles()
        self._max_open = max_open
        self._max_small = max_small
        self._lock = threading.Lock()
        self._sweepers: dict[Disk, Sweeper] = {}
        register_periodic(self.sweep)

    def __len__(self) -> int:
        return len(self._open) + len(self._small)

    def find(self, object_id: bytes) -> StoredObject | None:
        """An object with cached blocks; None without any, or if the disk fails."""
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
            trusts_seals=self._node.options.native,
        )
        if before is not None and before.disk is disk and _is_same_place(before.entry, entry):
            stored.adopt(before)
        if not entry.cached_bytes:
            return stored  # its first blocks may be in flight: looked up again until they are cached
        disk.start_maintenance()
        kept, most = (self._small, self._max_small) if entry.place else (self._open, self._max_open)
        with self._lock:
            kept.pop(object_id, None)
            while len(kept) >= most:
                del kept[next(iter(kept))]
            kept[object_id] = stored
        return stored

    def drop(self, object_id: bytes) -> None:
        """Look an object up again the next time."""
        with self._lock:
            self._open.pop(object_id, None)
            self._small.pop(object_id, None)

    def lost(self, stored: StoredObject, error: LostDataError) -> None:
        """Drop an object whose file was removed or truncated by another program."""
        emit(Event(name="cache.file.lost", subject=str(stored.disk.store.directory), detail=str(error)))
        self.drop(stored.entry.object_id)
        try:
            if stored.entry.place:
                self._segments.drop(stored.disk, stored.entry.place)
                stored_object(stored.disk, stored.entry, verify=True)  # checks whether the whole segment is lost
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
        """The `blocks` that are neither cached nor in `memory`. Verifies those of `partial`, or all with `verify`."""
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
        """Drop removed objects, and close their files."""
        with self._lock:
            opened = list(self._open.values())
        for disk in self._node.open_disks:
            if not self._sweepers.setdefault(disk, Sweeper()).due(disk.signals.numbers[REMOVALS]):
                continue
            try:
                self._segments.sweep(disk)
                for stored in opened:
                    entry = stored.disk.store.index.get(stored.entry.object_id) if stored.disk is disk else stored.entry
                    if entry is None or entry.generation != stored.entry.generation:
                        self.drop(stored.entry.object_id)
            except StorageError as error:
                disk.report(error)

    def close(self) -> None:
        """Close the descriptors, except those that are being sent."""
        unregister(self.sweep)
        with self._lock:
            self._open.clear()
            self._small.clear()
        self._segments.clear()


def _is_same_place(one: Entry, other: Entry) -> bool:
    """Whether two records describe the same bytes of the same file."""
    return (one.generation, one.place, one.offset) == (other.generation, other.place, other.offset)
