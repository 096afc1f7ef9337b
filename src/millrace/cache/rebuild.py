"""Rebuilds the index from the sidecars and segments of a store: after a crash or reboot, or if the index was lost.

Every block with a valid checksum record is entered, and other files in the store's folders are removed. An entry does
not prove the bytes, since nothing was flushed: they are verified before their first use. No file is sealed here.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from millrace.cache.eviction.usage import group_of
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.figures import size_text
from millrace.runtime.failures import disk_errors
from millrace.store import records
from millrace.store.index import Index
from millrace.store.records import Entry, SegmentObject, SegmentRecord
from millrace.store.segment_files import data_bytes, data_path, generations, group_in, idx_path, scan

_log = logging.getLogger("millrace.cache")

_BATCH_OBJECTS = 1000
_REPORT_SECONDS = 5.0

# A process may still use the lost index, and create files with its generations.
_GENERATIONS_APART = 1 << 30


@dataclass(slots=True)
class RebuildResult:
    """The entries that a rebuild found so far."""

    objects: int = 0
    nbytes: int = 0
    dropped: int = 0
    last_generation: int = 0


def rebuild(
    directory: Path,
    index: Index,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> RebuildResult:
    """Fill a new index from the files of the store in `directory`, under its set-up lock.

    If it is killed, the next process repeats it with another new index. Raises `StorageError`.
    """
    found = RebuildResult()
    reporter = _Reporter(directory, found, clock)
    with disk_errors(directory):
        _enter_files(directory / "objects", index, found, reporter)
        _enter_segments(directory / "segments", index, found, reporter)
    # The clock separates generations if no record of the earlier ones was found: in nanoseconds, and no two objects are
    # created in the same one. A process that still uses a removed index must not meet its files' names in new files.
    index.raise_generation(max(found.last_generation + _GENERATIONS_APART, time.time_ns()))
    index.set_built()
    reporter.finish()
    return found


def _enter_files(objects: Path, index: Index, found: RebuildResult, reporter: _Reporter) -> None:
    batch: dict[bytes, tuple[Entry, list[tuple[int, int]]]] = {}
    for path in _files(objects):
        if path.suffix == records.SIDECAR_SUFFIX:
            if not os.path.lexists(path.with_suffix("")):
                _remove(path)
            continue
        read = _read_file(path)
        if read is None:
            found.dropped += 1
            _remove_object(path)
            continue
        entry, blocks = read
        found.last_generation = max(found.last_generation, entry.generation)
        if entry.object_id in batch:
            _enter(index, batch, found)
        older = index.get(entry.object_id)
        if older is not None and older.generation >= entry.generation:
            if older.generation > entry.generation:
                found.dropped += 1
                _remove_object(path)
            continue
        if older is not None:
            found.dropped += 1
            index.remove(entry.object_id)
            _remove_object(objects / records.file_name(older))
        batch[entry.object_id] = (entry, blocks)
        if len(batch) == _BATCH_OBJECTS:
            _enter(index, batch, found)
        reporter.tick()
    _enter(index, batch, found)


def _enter_segments(folder: Path, index: Index, found: RebuildResult, reporter: _Reporter) -> None:
    """Enter every intact segment, the oldest first, and remove every other file.

    Objects with their own file keep it.
    """
    known = set()
    for generation in generations(folder):
        files = {Path(idx_path(folder, generation)), Path(data_path(folder, generation))}
        found.last_generation = max(found.last_generation, generation)
        if _enter_segment(folder, generation, index, found, reporter):
            known |= files
    for path in sorted(set(folder.iterdir()) - known):
        _remove(path)
        found.dropped += 1


def _enter_segment(folder: Path, generation: int, index: Index, found: RebuildResult, reporter: _Reporter) -> bool:
    """Enter the objects of one segment; False if it has none, or cannot be read."""
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
                entered, nbytes = _enter_small(index, generation, batch)
                objects, live_bytes = objects + entered, live_bytes + nbytes
                reporter.tick()
    except StorageError as error:
        emit(Event(name="cache.file.lost", subject=idx_path(folder, generation), detail=str(error)))
        batch.clear()
    entered, nbytes = _enter_small(index, generation, batch)
    objects, live_bytes = objects + entered, live_bytes + nbytes
    reporter.tick()
    if not objects:
        return False
    index.restore_segments([SegmentRecord(generation, written_bytes, live_bytes, group or "")])
    found.objects += objects
    found.nbytes += live_bytes
    return True


def _enter_small(index: Index, generation: int, batch: dict[bytes, SegmentObject]) -> tuple[int, int]:
    """Enter a batch and empty it. Returns the number of objects and bytes added to the segment."""
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
        entries.append((_segment_entry(generation, record), ()))
        objects, nbytes = objects + 1, nbytes + record.size
    index.restore(entries, used_bytes=0)
    batch.clear()
    return objects, nbytes


def _segment_entry(generation: int, record: SegmentObject) -> Entry:
    return Entry(
        record.object_id,
        generation,
        record.size,
        max(1, record.size),
        record.size,
        generation,
        record.offset,
        record.checksum,
        packed_name=record.name.pack(),
    )


def _enter(index: Index, batch: dict[bytes, tuple[Entry, list[tuple[int, int]]]], found: RebuildResult) -> None:
    nbytes = sum(entry.cached_bytes for entry, _ in batch.values())
    index.restore(list(batch.values()), used_bytes=nbytes)
    found.objects += len(batch)
    found.nbytes += nbytes
    batch.clear()


def _files(objects: Path) -> Iterator[Path]:
    """All files in the directories of the data files, and any other file next to these directories."""
    for folder in sorted(os.scandir(objects), key=lambda found: found.name):
        if folder.is_dir(follow_symlinks=False) and len(folder.name) == 2:
            with os.scandir(folder) as files:
                for file in files:
                    yield Path(file.path)
        else:
            yield Path(folder.path)


def _read_file(path: Path) -> tuple[Entry, list[tuple[int, int]]] | None:
    """The record of a data file, and the checksums of its blocks, from its sidecar. None if they are not intact.

    Also None if one cannot be read: the disk may have lost only this file.
    """
    try:
        with disk_errors(path):
            found = os.lstat(path)
            parsed = records.parse_sidecar(_read_sidecar(f"{path}{records.SIDECAR_SUFFIX}"))
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            emit(Event(name="cache.file.lost", subject=str(path), detail=str(error)))
        return None
    if parsed is None or not parsed[1] or not stat.S_ISREG(found.st_mode) or found.st_size != parsed[0].size:
        return None
    return parsed if f"{path.parent.name}/{path.name}" == records.file_name(parsed[0]) else None


def _read_sidecar(path: str) -> bytes:
    """The content of a sidecar; nothing if it is not a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def _remove_object(path: Path) -> None:
    """Remove a data file, or anything else in its place, and its sidecar."""
    _remove(path)
    _remove(path.with_name(f"{path.name}{records.SIDECAR_SUFFIX}"))


def _remove(path: Path) -> None:
    """Remove a file that is not part of the store. A failure is reported; the file's name is never used again."""
    try:
        with disk_errors(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except StorageError as error:
        emit(Event(name="cache.disk.failed", subject=str(path), detail=str(error)))


class _Reporter:
    """Reports the progress of a long rebuild, and its result at the end."""

    def __init__(self, directory: Path, found: RebuildResult, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._found = found
        self._clock = clock
        self._next = clock() + _REPORT_SECONDS

    def tick(self) -> None:
        if self._clock() >= self._next:
            self._next = self._clock() + _REPORT_SECONDS
            self._emit("cache.store.rebuilding")

    def finish(self) -> None:
        if self._found.objects or self._found.dropped:
            self._emit("cache.store.rebuilt")

    def _emit(self, name: str) -> None:
        found = self._found
        detail = f"{found.objects} objects found in files, {found.dropped} files dropped"
        emit(Event(name=name, subject=str(self._directory), nbytes=found.nbytes, detail=detail))
        _log.info("%s in %s: %s (%s)", name, self._directory, detail, size_text(found.nbytes))
