"""Finds complete cached objects, as memory that pyarrow reads without calling Python.

`look_up` serves the first open of an object by a process: its version, its record and its bytes, by one index transaction.
`open_entry` serves all other opens, with the record. Later opens need no lookup (`filesystem/hot.py`). Figures:
docs/design/0009-cold-reads.md.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pyarrow as pa

from millrace.cache.disk import Disk
from millrace.cache.metadata.metadata import MetadataCache
from millrace.cache.metadata.page_rows import Transaction
from millrace.cache.metadata.sources import Freshness
from millrace.cache.reading.locations import stored_object
from millrace.runtime.failures import LostDataError
from millrace.store.blocks import object_id
from millrace.store.index import Index
from millrace.store.maps import MapSlot, lost_or_failed
from millrace.store.records import Entry
from millrace.store.seals import seal_holds, slot_holds
from millrace.store.signals import Stamp

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
            if not seal_holds(entry, os.stat(path, follow_symlinks=False)):
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
        entry = disk.sealer.break_seal(sealed)
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
            if not seal_holds(entry, os.fstat(descriptor)):
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


def look_up(disk: Disk, metadata: MetadataCache, identity: str, key: str, freshness: Freshness) -> LookupResult | None:
    """The memory of a completely cached object whose description is fresh in the index of `disk`.

    None if any step needs more than this: use the slow path. Raises `LostDataError` if its file is missing or truncated,
    `StorageError` if the disk fails.
    """
    index = disk.store.index
    numbers = index.signals.numbers
    removals, changes = numbers[0], numbers[1]  # from before anything is looked up
    unpacked = metadata.unpacked(identity, key, changes, freshness)
    if unpacked is not None:
        size, version, until = unpacked
        entry, visible = index.get_as_of(object_id(identity, key, version, size))
    else:
        entry, visible, until = _look_up_in_index(index, metadata, identity, key, changes, freshness)
    if entry is None or removals > visible or changes > visible:  # in the last cases a change is in progress
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
        known = metadata.known_in(txn, identity, key, freshness, changes=changes if changes <= visible else None)
        if known is None:
            return None, visible, 0.0
        description, until = known
        return index.get_in(txn, object_id(identity, key, description.version, description.size)), visible, until

    return index.look(look)
