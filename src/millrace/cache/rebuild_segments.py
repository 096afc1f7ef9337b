"""Enters the objects of segments into a new index, from what their `.idx` files say. See `rebuild.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millrace.cache.groups import group_of
from millrace.cache.index import Index
from millrace.cache.records import Entry, SegmentRecord
from millrace.cache.segment_files import data_bytes, data_path, generations, group_in, idx_path, scan
from millrace.cache.segment_records import SegmentObject
from millrace.errors import StorageError
from millrace.events import Event, emit

_BATCH_OBJECTS = 1000


@dataclass(slots=True)
class FoundInSegments:
    """What was entered: objects and their bytes, files that were of no use, and the youngest generation."""

    objects: int = 0
    nbytes: int = 0
    dropped: int = 0
    last_generation: int = 0


def enter_segments(
    folder: Path, index: Index, *, remove: Callable[[Path], None], tick: Callable[[], None]
) -> FoundInSegments:
    """Enter every intact segment in `folder`, the oldest first, and `remove` every other file.

    Objects that have a file of their own already stay there. `tick` is called now and then.
    """
    found = FoundInSegments()
    known = set()
    for generation in generations(folder):
        files = {Path(idx_path(folder, generation)), Path(data_path(folder, generation))}
        found.last_generation = max(found.last_generation, generation)
        if _enter_segment(folder, generation, index, found, tick):
            known |= files
    for path in sorted(set(folder.iterdir()) - known):
        remove(path)
        found.dropped += 1
    return found


def _enter_segment(
    folder: Path, generation: int, index: Index, found: FoundInSegments, tick: Callable[[], None]
) -> bool:
    """Enter the objects of one segment; false when it has none, or cannot be read."""
    batch: dict[bytes, SegmentObject] = {}
    live_bytes = objects = 0
    group = None
    try:
        written_bytes = data_bytes(folder, generation)
        group = group_in(folder, generation)
        for record in scan(folder, generation):
            if group is None:  # the header is damaged
                group = group_of(record.name.origin, record.name.key)
            batch[record.object_id] = record
            if len(batch) == _BATCH_OBJECTS:
                entered, nbytes = _enter(index, generation, batch)
                objects, live_bytes = objects + entered, live_bytes + nbytes
                tick()
    except StorageError as error:
        emit(Event(name="cache.file.lost", subject=idx_path(folder, generation), detail=str(error)))
        batch.clear()
    entered, nbytes = _enter(index, generation, batch)
    objects, live_bytes = objects + entered, live_bytes + nbytes
    tick()
    if not objects:
        return False
    index.restore_segments([SegmentRecord(generation, written_bytes, live_bytes, group or "")])
    found.objects += objects
    found.nbytes += live_bytes
    return True


def _enter(index: Index, generation: int, batch: dict[bytes, SegmentObject]) -> tuple[int, int]:
    """Enter a batch and empty it; gives by how many objects and bytes the segment grew."""
    entries = []
    objects = nbytes = 0
    for record in batch.values():
        older = index.get(record.object_id)
        if older is not None and not older.place:
            continue
        if older is not None and older.place == generation:
            objects, nbytes = objects - 1, nbytes - older.size
        elif older is not None:
            index.remove(record.object_id)
        entries.append((_entry(generation, record), ()))
        objects, nbytes = objects + 1, nbytes + record.size
    index.restore(entries, used_bytes=0)
    batch.clear()
    return objects, nbytes


def _entry(generation: int, record: SegmentObject) -> Entry:
    return Entry(
        record.object_id,
        generation,
        record.size,
        max(1, record.size),
        1,
        generation,
        record.offset,
        record.checksum,
        packed_name=record.name.pack(),
    )
