"""Where an object version is stored, and how its bytes are read from there.

`FileLocation` and `SegmentLocation` are the two places: an object's own file, or one block in a segment. Readers and fetches
use both in the same way. A location reads, verifies and stores single blocks. It does not fetch.

A complete object is a `NativeObject`: memory that pyarrow reads without calling Python. `look_up` serves the first open of
an object by a process: its version, its record and its bytes, by one index transaction. `open_entry` serves all other
opens, with the record. Later opens need no lookup (`filesystem/opens.py`). Figures: docs/design/0009-cold-reads.md.
"""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from typing import ClassVar, NamedTuple

import pyarrow as pa
from typing_extensions import Buffer

from millrace.cache.disk import Disk
from millrace.cache.eviction.copies import Keep
from millrace.cache.eviction.usage import FindGroup, Read
from millrace.cache.metadata.metadata import MetadataCache
from millrace.cache.metadata.page_map import Freshness
from millrace.cache.metadata.pages import Transaction
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.origin import Origin
from millrace.runtime.failures import LostDataError, disk_error, disk_errors
from millrace.store.index import Index
from millrace.store.maps import MapSlot, lost_or_failed
from millrace.store.records import Entry, ObjectName, object_id, page_number, pages_of
from millrace.store.seals import slot_holds
from millrace.store.segment_files import data_bytes
from millrace.store.segments import SMALL_OBJECT_BYTES, appended_bytes
from millrace.store.signals import CHANGE_ID, Stamp


class FileLocation:
    """An object with a data file of its own, opened for reading and writing. Thread-safe. Methods raise `StorageError`."""

    open_descriptors: ClassVar[set[int]] = set()
    """The descriptors of all open readers of the process. Adding and removing are atomic for threads, which a count is not.
    `close` may run in `__del__`, where no lock can be taken.
    """

    descriptor = -1  # `__del__` may follow an interrupt before the first one is set
    _original: FileLocation | None = None

    def __init__(self, disk: Disk, entry: Entry) -> None:
        self.disk = disk
        self.entry = entry
        self.removed = False
        """The object was removed from the store since it was opened, and no block can be stored any more."""
        self.descriptor = disk.store.open_data(entry)
        FileLocation.open_descriptors.add(self.descriptor)
        self.verified = disk.verified.of(entry.generation)
        """The blocks that this process has verified; shared by all readers of the file."""
        self.is_sealed = self._seal_holds()
        """The whole file was verified and has not been touched since."""

    def missing(self, blocks: Sequence[int]) -> list[int]:
        """The members of `blocks` that are not cached."""
        return self.disk.store.missing(self.entry, blocks)

    def read_block(self, block: int) -> Buffer | None:
        """One cached block, verified. None when it is missing or damaged; a damaged block is removed and reported."""
        data = self.disk.store.read_block(self.entry, self.descriptor, block)
        if data is None:
            self.verified.discard(block)
        else:
            self.verified.add(block)
        return data

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The byte ranges of whole pages to fetch so that `[start, stop)` is cached."""
        return self.disk.store.gaps(self.entry, start, stop)

    def read_pages(self, start: int, stop: int, *, verify: bool = False) -> bytes | None:
        """A range inside one block that is not complete; None when any of its pages is missing or wrong.

        The pages are verified at their first use in this process, or now with `verify`.
        """
        entry, block = self.entry, start // self.entry.block_bytes
        known: Container[int] = () if verify else self.verified
        data = self.disk.store.read_pages(entry, self.descriptor, start, stop, verified=known)
        if data is not None:
            pages = pages_of(entry, block, start, stop, touched=True)
            self.verified.update(page_number(entry, block, page) for page in pages)
        return data

    def are_verified(self, blocks: Sequence[int]) -> bool:
        """Whether these blocks can be read without a checksum."""
        return self.is_sealed or self.verified.issuperset(blocks)

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)` of the file without verification; shorter when the file was truncated."""
        with disk_errors(self.disk.store.path(self.entry)):
            return os.pread(self.descriptor, stop - start, start)

    def stored_bytes(self, nbytes: int) -> int:
        """The disk space that `nbytes` of the object take."""
        return nbytes

    def store_block(self, block: int, data: Buffer, keep: Keep, group: FindGroup) -> bool:
        """Store one block. Returns False when the object was removed in the meantime."""
        if not self._stored(self.disk.store.write_block(self.entry, self.descriptor, block, data), keep, group):
            return False
        self.verified.add(block)
        return True

    def store_pages(self, start: int, data: Buffer, keep: Keep, group: FindGroup) -> bool:
        """Store the whole pages from `start` on. Returns as `store_block`."""
        return self._stored(self.disk.store.write_pages(self.entry, self.descriptor, start, data), keep, group)

    def _stored(self, entry: Entry | None, keep: Keep, group: FindGroup) -> bool:
        if entry is None:
            (self._original or self).removed = True
            return False
        self.disk.usage.note(Read(entry, 0, hit=False, kept=True, group=group, copy=keep is not Keep.OWNED))
        if entry.complete and not entry.sealed:
            self.disk.sealer.start(entry)
        return True

    def duplicate(self) -> FileLocation | None:
        """The same location for a fetch that may outlive the reader. None when no file descriptor is left."""
        path = self.disk.store.path(self.entry)
        # Opening the name again could create a new file where this one was removed.
        try:
            descriptor = os.dup(self.descriptor)
        except OSError as error:
            self.disk.report(disk_error(error, path), path)
            return None
        copy = FileLocation.__new__(FileLocation)
        copy.disk, copy.entry, copy.removed, copy.descriptor = self.disk, self.entry, False, descriptor
        copy.verified, copy.is_sealed, copy._original = self.verified, self.is_sealed, self
        return copy

    def report(self, error: StorageError) -> None:
        """Report a disk error that does not fail the read."""
        self.disk.report(error, self.disk.store.path(self.entry))

    def close(self) -> None:
        """Close the file descriptor. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            if self._original is None:
                FileLocation.open_descriptors.discard(descriptor)  # first: once closed, it may be another reader's
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def _seal_holds(self) -> bool:
        entry = self.entry
        if not entry.sealed:
            return False
        if entry.seal_holds(os.fstat(self.descriptor)):
            return True
        self.entry = self.disk.sealer.check_seal(entry)
        return self.entry.sealed


class SegmentLocation:
    """A small object, which is one block in a segment. It has no descriptor. Methods as of `FileLocation`."""

    removed = False

    def __init__(self, disk: Disk, object_id: bytes, size: int, name: ObjectName) -> None:
        self.disk = disk
        self._object_id = object_id
        self._size = size
        self._name = name

    @property
    def entry(self) -> Entry:
        """A record with only the fields that need no lookup."""
        return Entry(self._object_id, 0, self._size, max(1, self._size), 0, packed_name=self._name.pack())

    def missing(self, blocks: Sequence[int]) -> list[int]:
        return [] if self._stored_entry() is not None else list(blocks)

    def read_block(self, block: int) -> Buffer | None:
        found = self.read_whole(verify=True)
        return None if found is None else found[1]

    def read_whole(self, *, verify: bool) -> tuple[Entry, Buffer] | None:
        """The record and all bytes of the object; verified now, or with `verify=False` once per process."""
        entry = self._stored_entry()
        found = None if entry is None else stored_object(self.disk, entry, verify=verify)
        return None if entry is None or found is None else (entry, found[0])

    def stored_bytes(self, nbytes: int) -> int:
        return appended_bytes(nbytes)

    def store_block(self, block: int, data: Buffer, keep: Keep, group: FindGroup) -> bool:
        disk, name, object_id, size = self.disk, self._name, self._object_id, self._size
        for _ in range(2):
            segment_group = disk.segment_group(name, group(), keep)
            placed = disk.segments.append(segment_group, object_id, name, data, most_bytes=disk.segment_bytes(name))
            entry = disk.store.index.add_small(
                object_id, size, name, segment=placed.segment, offset=placed.offset, checksum=placed.checksum
            )
            if entry is not None:
                disk.usage.note(Read(entry, 0, hit=False, kept=True, group=group))
                return True
            disk.segments.drop(placed.segment)  # the segment was removed in the meantime
        return False

    def duplicate(self) -> SegmentLocation:
        return self

    def report(self, error: StorageError) -> None:
        self.disk.report(error)

    def close(self) -> None:
        """Nothing to close."""

    def _stored_entry(self) -> Entry | None:
        entry = self.disk.store.index.get(self._object_id)
        return entry if entry is not None and entry.place else None


Location = FileLocation | SegmentLocation


def belongs_in_segment(size: int, entry: Entry | None) -> bool:
    """Whether an object is stored in a segment. An object that already has a file of its own stays there."""
    return size <= SMALL_OBJECT_BYTES and (entry is None or entry.place != 0)


def stored_object(disk: Disk, entry: Entry, *, verify: bool = False) -> tuple[Buffer, MapSlot | None] | None:
    """The bytes of an object in a segment, and the slot of the map that they are part of; without a slot they are a copy.

    They are verified at the first read in this process while their segment is not sealed, or always with `verify`. None if
    they are damaged or missing: the object is then removed, counted and reported. Raises `StorageError` if the disk fails.
    """
    found: tuple[Buffer, MapSlot | None] | None
    try:
        if verify:
            data = disk.segment_maps.read(entry)
            found = None if data is None else (data, None)
        else:
            found = disk.segment_maps.get(entry)
    except LostDataError as error:
        if disk.store.index.get(entry.object_id) != entry:
            return None  # evicted since its record was read
        emit(Event(name="cache.file.lost", subject=str(disk.store.directory), detail=str(error)))
        _remove_lost(disk, entry)
        return None
    if found is None:
        disk.drop_wrong(entry)
    return found


def _remove_lost(disk: Disk, entry: Entry) -> None:
    """Remove an object whose segment was truncated, or all objects of a segment that was removed or replaced."""
    try:
        data_bytes(disk.segments.directory, entry.place)
    except LostDataError:
        disk.store.index.remove_segment(entry.place)
    else:
        disk.store.index.remove(entry.object_id)
    disk.segment_maps.drop(entry.place)


# --- complete objects -------------------------------------------------------------------------------

SMALL_FILE_BYTES = 1 << 20
"""Files up to this size are read whole by one `pread`, which costs less than creating and removing a map."""


class NativeObject(NamedTuple):
    """All bytes of one object version, and their location.

    `removals` is the store's number of removals while this is valid; None during a change. `buffer` is
    all bytes; they are also at `offset` of the map in `slot`, if there is one, which may be kept for the next open.
    `buffer` itself may be a private copy, so it must not be kept.
    """

    entry: Entry
    disk: Disk
    removals: int | None
    buffer: pa.Buffer
    slot: MapSlot | None
    offset: int


def open_file(disk: Disk, entry: Entry, stamp: Stamp | None) -> NativeObject | None:
    """A sealed object with its own file; None if the file no longer matches its seal.

    Raises `LostDataError` if the file is missing or shorter than before, `StorageError` if the disk fails.
    """
    removals = None if stamp is None else stamp.removals
    path = disk.store.path(entry)
    if entry.size <= SMALL_FILE_BYTES:
        whole = _read_whole(path, entry)
        return None if whole is None else NativeObject(entry, disk, removals, whole, None, 0)
    slot = disk.maps.get(entry.generation)
    if slot is not None and not slot_holds(entry, slot):
        disk.maps.drop(entry.generation)  # created before the file was modified and sealed again
        slot = None
    buffer = slot.buffer if slot is not None else None
    while slot is None or buffer is None:  # a map may be released between the two steps
        with lost_or_failed(path):  # also before it is mapped: it may no longer be a file
            if not entry.seal_holds(os.stat(path, follow_symlinks=False)):
                return None
        slot = disk.maps.open(entry.generation, path, entry.size)
        if not slot_holds(entry, slot):
            disk.maps.drop(entry.generation)
            return None
        buffer = slot.buffer
    return NativeObject(entry, disk, removals, buffer, slot, 0)


def open_entry(disk: Disk, entry: Entry, stamp: Stamp | None) -> NativeObject | None:
    """A complete object by its record; None if it must be read through blocks. Raises the errors of `open_file`.

    `stamp` is the index's from before the record was read. An object that was never verified as a whole, or
    was modified since, is verified now or in the background (`store/seals.py`).
    """
    if not entry.complete:
        return None
    if entry.place:
        return _open_in_segment(disk, entry, stamp)
    for _ in range(2):
        sealed = disk.sealer.sealed(entry)
        if sealed is None:
            return None
        found = open_file(disk, sealed, stamp)
        if found is not None:
            return found
        entry = disk.sealer.check_seal(sealed)
    return None


def _open_in_segment(disk: Disk, entry: Entry, stamp: Stamp | None) -> NativeObject | None:
    stored = stored_object(disk, entry)
    if stored is None:
        return None
    data, slot = stored
    if slot is None:
        slot = disk.segment_maps.slot_for_later(entry)
    return NativeObject(entry, disk, None if stamp is None else stamp.removals, data, slot, entry.offset)


def _read_whole(path: str, entry: Entry) -> pa.Buffer | None:
    size = entry.size
    with lost_or_failed(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not entry.seal_holds(os.fstat(descriptor)):
                return None
            data = os.pread(descriptor, size, 0)
        finally:
            os.close(descriptor)
    if len(data) != size:
        raise LostDataError(f"{path} is shorter than it was", next_step="open the object again")
    return pa.py_buffer(data)


# --- the first open of an object by a process -------------------------------------------------------------


class LookupResult(NamedTuple):
    """A complete object, the time (`time.time`) from which its description is stale, and the index version from before."""

    found: NativeObject
    until: float
    stamp: Stamp


def look_up(disk: Disk, metadata: MetadataCache, origin: Origin, key: str) -> LookupResult | None:
    """The memory of a completely cached object whose description is fresh in the index of `disk`.

    None if any step needs more than this: use the slow path. Raises `LostDataError` if its file is missing or truncated,
    `StorageError` if the disk fails.
    """
    index = disk.store.index
    numbers = index.signals.numbers
    removals, changes = numbers[0], numbers[1]  # from before anything is looked up, also what is fresh
    identity, freshness = origin.identity, metadata.freshness_of(origin, key)
    unpacked = metadata.unpacked(identity, key, changes, freshness)
    if unpacked is not None:
        size, version, until = unpacked
        entry, visible = index.get_as_of(object_id(identity, key, version, size))
    else:
        entry, visible, until = _look_up_in_index(index, metadata, identity, key, changes, freshness)
    if (
        entry is None or removals > visible or changes & CHANGE_ID > visible
    ):  # in the last cases a change is in progress
        return None
    stamp = Stamp(removals, changes)
    sliced = disk.segment_maps.sealed(entry) if entry.place else None
    if sliced is not None:
        return LookupResult(NativeObject(entry, disk, removals, *sliced, entry.offset), until, stamp)
    found = open_entry(disk, entry, stamp)
    return None if found is None else LookupResult(found, until, stamp)


def _look_up_in_index(
    index: Index, metadata: MetadataCache, identity: str, key: str, changes: int, freshness: Freshness
) -> tuple[Entry | None, int, float]:
    """The record of the object that a key names, its last transaction, and the time from which its description is stale."""

    def look(txn: Transaction) -> tuple[Entry | None, int, float]:
        visible = txn.id()
        # A page that may be about to change is not unpacked.
        is_settled = changes & CHANGE_ID <= visible
        known = metadata.known_in(txn, identity, key, freshness, changes=changes if is_settled else None)
        if known is None:
            return None, visible, 0.0
        description, until = known
        return index.get_in(txn, object_id(identity, key, description.version, description.size)), visible, until

    return index.look(look)
