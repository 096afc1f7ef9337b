"""The files of segments: their names, and how they are opened, scanned and removed.

Anything else at the path of a file counts as a missing file: links are not followed, and no open waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.runtime.failures import NO_FILE_ERRNOS, LostDataError, disk_errors
from millrace.runtime.private_files import opener, read_file
from millrace.store.records import SegmentObject, parse_segment_group, parse_segment_objects

_HEAD_BYTES = 4096

# --- names ----------------------------------------------------------------------------------------


def data_path(directory: Path, generation: int) -> str:
    """The file with the objects of a segment."""
    return f"{directory}/{generation}.data"


def idx_path(directory: Path, generation: int) -> str:
    """The file with the records of a segment."""
    return f"{directory}/{generation}.idx"


def generations(directory: Path) -> list[int]:
    """The segments in a directory, by their `.idx` files, the oldest first."""
    with disk_errors(directory), contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        return sorted(int(stem) for stem, _, suffix in (name.partition(".") for name in names) if _is_idx(stem, suffix))
    return []


def _is_idx(stem: str, suffix: str) -> bool:
    return suffix == "idx" and stem.isascii() and stem.isdigit() and stem[0] != "0"


# --- files ----------------------------------------------------------------------------------------


def data_bytes(directory: Path, generation: int) -> int:
    """The length of the `.data` file of a segment.

    Raises `LostDataError` when it is missing or not a file, and `StorageError`.
    """
    path = data_path(directory, generation)
    with disk_errors(path):
        try:
            status = os.lstat(path)
        except FileNotFoundError as error:
            raise LostDataError(f"{path}: is gone", next_step="open the object again") from error
    if not stat.S_ISREG(status.st_mode):
        raise LostDataError(f"{path}: is not a file any more", next_step="open the object again")
    return status.st_size


def scan(directory: Path, generation: int) -> Iterator[SegmentObject]:
    """Every intact record of a segment whose bytes are inside `.data`, for example after a crash.

    The bytes are not verified. Of two records of one object the later is the newer.
    """
    with disk_errors(idx_path(directory, generation)):
        written_bytes = data_bytes(directory, generation)
        records = read_file(Path(idx_path(directory, generation)))
    for record in parse_segment_objects(generation, records):
        if record.offset + record.size <= written_bytes or not record.size:
            yield record


def group_in(directory: Path, generation: int) -> str | None:
    """The group of a segment's objects; None when its header is damaged."""
    path = idx_path(directory, generation)
    with disk_errors(path), open(path, "rb", opener=opener) as file:
        head = file.read(_HEAD_BYTES)
        group = parse_segment_group(generation, head)
        if group is None and len(head) == _HEAD_BYTES:  # a very long name
            group = parse_segment_group(generation, head + file.read())
        return group


def group_or_none(directory: Path, generation: int) -> str | None:
    """As `group_in`; None also when the file is missing."""
    try:
        return group_in(directory, generation)
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOENT, *NO_FILE_ERRNOS):
            return None
        raise


def open_file(path: str, flags: int) -> int:
    """A descriptor of a segment's file; -1 when it is missing or not a file.

    Does not follow links and does not wait. Raises `OSError`.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.ENOENT, *NO_FILE_ERRNOS):
            raise
        return -1
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return -1


def unlink_files(directory: Path, generation: int) -> None:
    """Remove the files of a segment, or anything else at their paths. Raises `OSError`.

    A directory that is not empty stays, and an event is emitted.
    """
    # `.idx` last: by it the other file is found again if the process is killed in between (`Leftovers`).
    for path in (data_path(directory, generation), idx_path(directory, generation)):
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            try:
                os.rmdir(path)
            except OSError as error:
                # It may hold a user's files. The segment's name is never used again, so the directory may stay.
                emit(Event(name="cache.disk.failed", subject=path, detail=f"{path}: {error.strerror}"))
