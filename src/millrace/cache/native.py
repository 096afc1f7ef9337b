"""Complete objects as memory that pyarrow reads without any Python between."""

from __future__ import annotations

import os
from typing import NamedTuple

import pyarrow as pa

from millrace.cache.disk import Disk
from millrace.cache.failures import LostDataError
from millrace.cache.maps import MapSlot, lost_or_failed
from millrace.cache.records import Entry
from millrace.cache.sealing import seal_holds, slot_holds
from millrace.cache.signals import Stamp
from millrace.cache.small import stored_object

SMALL_FILE_BYTES = 1 << 20
"""Files up to this size are read whole by one `pread`, which costs less than a map that is set up and torn down."""


class NativeObject(NamedTuple):
    """All bytes of one object version, and where they are.

    `removals` is the store's number of removals as long as this holds, None when it is just being changed. `buffer` is
    all bytes; the same are at `offset` of the map in `slot`, which may be kept for the next open, when there is one.
    `buffer` itself may be a private copy, so it must not be kept.
    """

    entry: Entry
    disk: Disk
    removals: int | None
    buffer: pa.Buffer
    slot: MapSlot | None
    offset: int


def open_file(disk: Disk, entry: Entry, stamp: Stamp | None) -> NativeObject | None:
    """A sealed object with a file of its own; None when the file is not any more what the seal says.

    Raises `LostDataError` when the file is gone or shorter than it was, `StorageError` when the disk fails.
    """
    removals = None if stamp is None else stamp.removals
    path = disk.store.path(entry)
    if entry.size <= SMALL_FILE_BYTES:
        whole = _read_whole(path, entry)
        return None if whole is None else NativeObject(entry, disk, removals, whole, None, 0)
    slot = disk.maps.get(entry.generation)
    if slot is not None and not slot_holds(entry, slot):
        disk.maps.drop(entry.generation)  # made before the file was touched and sealed anew
        slot = None
    buffer = slot.buffer if slot is not None else None
    while slot is None or buffer is None:  # a map may be given up between the two steps
        with lost_or_failed(path):  # before it is mapped, too: it may be no file any more
            if not seal_holds(entry, os.stat(path, follow_symlinks=False)):
                return None
        slot = disk.maps.open(entry.generation, path, entry.size)
        if not slot_holds(entry, slot):
            disk.maps.drop(entry.generation)
            return None
        buffer = slot.buffer
    return NativeObject(entry, disk, removals, buffer, slot, 0)


def open_entry(disk: Disk, entry: Entry, stamp: Stamp | None) -> NativeObject | None:
    """An object as its record has it; None when it must be read through blocks. Raises as `open_file` does.

    `stamp` is the index's from before the record was read. An object that was never verified as a whole, or that somebody
    touched since, is verified now or in the background (`sealing.py`).
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
