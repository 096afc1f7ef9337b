"""The first open of an object by a process: what its key names now, whether it is here and where, by one look at the index.

Later opens ask nobody (`filesystem/hot.py`). The first one has questions that are answered one by one where an answer takes
more than the index, and here together, as of one moment, where none does. Figures: docs/design/0009-cold-reads.md.
"""

from __future__ import annotations

from typing import NamedTuple

from millrace.cache.belief import Belief
from millrace.cache.blocks import object_id
from millrace.cache.disk import Disk
from millrace.cache.index import Index
from millrace.cache.metadata import MetadataCache
from millrace.cache.native import NativeObject, open_entry
from millrace.cache.page_rows import Transaction
from millrace.cache.records import Entry
from millrace.cache.signals import Stamp


class FirstOpen(NamedTuple):
    """A complete object, until when its description may be believed (by `time.time`), and the numbers from before."""

    found: NativeObject
    until: float
    stamp: Stamp


def find(disk: Disk, metadata: MetadataCache, identity: str, key: str, belief: Belief) -> FirstOpen | None:
    """The memory of an object of an origin whose description is fresh in the index of `disk`, and which is completely here.

    None when any of it takes more than this: ask the long way. Raises `LostDataError` when its file is gone or cut,
    `StorageError` when the disk fails.
    """
    index = disk.store.index
    numbers = index.signals.numbers
    removals, changes = numbers[0], numbers[1]  # from before anything is looked up
    unpacked = metadata.unpacked(identity, key, changes, belief)
    if unpacked is not None:
        size, version, until = unpacked
        entry, visible = index.get_as_of(object_id(identity, key, version, size))
    else:
        entry, visible, until = _look_up(index, metadata, identity, key, changes, belief)
    if entry is None or removals > visible or changes > visible:  # in the last cases a change is just being made
        return None
    stamp = Stamp(removals, changes)
    sliced = disk.segment_maps.sealed(entry) if entry.place else None
    if sliced is not None:
        return FirstOpen(NativeObject(entry, disk, removals, *sliced, entry.offset), until, stamp)
    found = open_entry(disk, entry, stamp)
    return None if found is None else FirstOpen(found, until, stamp)


def _look_up(
    index: Index, metadata: MetadataCache, identity: str, key: str, changes: int, belief: Belief
) -> tuple[Entry | None, int, float]:
    """The record of the object that a key names, the last transaction that it is of, and until when that may be believed."""

    def look(txn: Transaction) -> tuple[Entry | None, int, float]:
        visible = txn.id()
        # A page that may be just about to change is not unpacked.
        known = metadata.known_in(txn, identity, key, belief, changes=changes if changes <= visible else None)
        if known is None:
            return None, visible, 0.0
        said, until = known
        return index.get_in(txn, object_id(identity, key, said.version, said.size)), visible, until

    return index.look(look)
