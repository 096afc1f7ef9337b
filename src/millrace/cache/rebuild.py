"""A new index from what the files of a store say of themselves: after a crash or reboot, or when the index was lost.

Everything with a valid checksum is entered, anything else in the store's folders is removed. That a block is entered does
not prove its bytes, since nothing was flushed: they are verified before their first use. Nothing that is found is sealed.
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

from millrace.cache import trailer
from millrace.cache.blocks import span_of
from millrace.cache.failures import disk_errors
from millrace.cache.index import Index
from millrace.cache.rebuild_segments import enter_segments
from millrace.cache.records import Entry
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.figures import size_text

_log = logging.getLogger("millrace")

_BATCH_OBJECTS = 1000
_TAIL_BYTES = 4096
_REPORT_SECONDS = 5.0

# A process may still be using the index that was lost, and make files by its generations.
_GENERATIONS_APART = 1 << 30


@dataclass(slots=True)
class Found:
    """What a rebuild found so far."""

    objects: int = 0
    nbytes: int = 0
    dropped: int = 0
    last_generation: int = 0


def rebuild(
    directory: Path,
    index: Index,
    *,
    goes_on: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Fill a new index from the files of the store in `directory`, under its set-up lock.

    `goes_on` is called every few seconds, for those who wait for the lock. Killed in the middle it is begun again by the
    next process, with another new index. Raises `StorageError`.
    """
    found = Found()
    reporter = _Reporter(directory, found, clock, goes_on)
    with disk_errors(directory):
        _enter_files(directory / "objects", index, found, reporter)
        _enter_segments(directory / "segments", index, found, reporter)
    # The clock keeps generations apart where nothing was found that tells of the earlier ones: in nanoseconds, of which none
    # makes two objects. Whoever still uses an index that was removed must not find his files' names taken by others.
    index.raise_generation(max(found.last_generation + _GENERATIONS_APART, time.time_ns()))
    index.set_built()
    reporter.finish()
    return found


def _enter_files(objects: Path, index: Index, found: Found, reporter: _Reporter) -> None:
    batch: dict[bytes, tuple[Entry, list[tuple[int, int]]]] = {}
    for path in _files(objects):
        read = _read_file(path)
        if read is None:
            found.dropped += 1
            _remove(path)
            continue
        entry, blocks = read
        found.last_generation = max(found.last_generation, entry.generation)
        if entry.object_id in batch:
            _enter(index, batch, found)
        older = index.get(entry.object_id)
        if older is not None and older.generation >= entry.generation:
            if older.generation > entry.generation:
                found.dropped += 1
                _remove(path)
            continue
        if older is not None:
            found.dropped += 1
            index.remove(entry.object_id)
            _remove(objects / trailer.file_name(older))
        batch[entry.object_id] = (entry, blocks)
        if len(batch) == _BATCH_OBJECTS:
            _enter(index, batch, found)
        reporter.tick()
    _enter(index, batch, found)


def _enter_segments(segments: Path, index: Index, found: Found, reporter: _Reporter) -> None:
    small = enter_segments(segments, index, remove=_remove, tick=reporter.tick)
    found.objects += small.objects
    found.nbytes += small.nbytes
    found.dropped += small.dropped
    found.last_generation = max(found.last_generation, small.last_generation)


def _enter(index: Index, batch: dict[bytes, tuple[Entry, list[tuple[int, int]]]], found: Found) -> None:
    nbytes = 0
    for entry, blocks in batch.values():
        for block, _ in blocks:
            start, stop = span_of(block, block + 1, entry.size, entry.block_bytes)
            nbytes += stop - start
    index.restore(list(batch.values()), used_bytes=nbytes)
    found.objects += len(batch)
    found.nbytes += nbytes
    batch.clear()


def _files(objects: Path) -> Iterator[Path]:
    """Everything in the folders of the data files, and whatever else lies where only these folders should."""
    for folder in sorted(os.scandir(objects), key=lambda found: found.name):
        if folder.is_dir(follow_symlinks=False) and len(folder.name) == 2:
            with os.scandir(folder) as files:
                for file in files:
                    yield Path(file.path)
        else:
            yield Path(folder.path)


def _read_file(path: Path) -> tuple[Entry, list[tuple[int, int]]] | None:
    """The record that a data file gives of itself, and the checksums of its blocks. None when it is no intact data file.

    An unreadable one is none either: the disk may have lost just this.
    """
    try:
        with disk_errors(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                entry = _read_footer(descriptor)
                if entry is None or f"{path.parent.name}/{path.name}" != trailer.file_name(entry):
                    return None
                start = trailer.entries_offset(entry)
                blocks = trailer.parse_blocks(entry, os.pread(descriptor, trailer.footer_offset(entry) - start, start))
            finally:
                os.close(descriptor)
    except StorageError as error:
        emit(Event(name="cache.file.lost", subject=str(path), detail=str(error)))
        return None
    return (entry._replace(present=len(blocks)), blocks) if blocks else None


def _read_footer(descriptor: int) -> Entry | None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return None
    wanted = min(_TAIL_BYTES, status.st_size)
    parsed = trailer.parse_footer(os.pread(descriptor, wanted, status.st_size - wanted), status.st_size)
    if isinstance(parsed, int):
        parsed = trailer.parse_footer(os.pread(descriptor, parsed, status.st_size - parsed), status.st_size)
    return parsed if isinstance(parsed, Entry) else None


def _remove(path: Path) -> None:
    """Remove what is no part of the store. What cannot be removed is reported, and stays: its name is never used again."""
    try:
        with disk_errors(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except StorageError as error:
        emit(Event(name="cache.disk.failed", subject=str(path), detail=str(error)))


class _Reporter:
    """Says now and then how far a long rebuild has come, and at the end what it found."""

    def __init__(self, directory: Path, found: Found, clock: Callable[[], float], goes_on: Callable[[], None]) -> None:
        self._directory = directory
        self._found = found
        self._clock = clock
        self._goes_on = goes_on
        self._next = clock() + _REPORT_SECONDS

    def tick(self) -> None:
        if self._clock() >= self._next:
            self._next = self._clock() + _REPORT_SECONDS
            self._goes_on()
            self._emit("cache.store.rebuilding")

    def finish(self) -> None:
        if self._found.objects or self._found.dropped:
            self._emit("cache.store.rebuilt")

    def _emit(self, name: str) -> None:
        found = self._found
        detail = f"{found.objects} objects found in files, {found.dropped} files dropped"
        emit(Event(name=name, subject=str(self._directory), nbytes=found.nbytes, detail=detail))
        _log.info("%s in %s: %s (%s)", name, self._directory, detail, size_text(found.nbytes))
