"""The files of segments: their names, what lies in their folder and in them, and opening and removing them.

Whatever somebody has put in the place of a file counts as no file: links are not followed, and nothing is waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from millrace.cache.failures import NO_FILE_ERRNOS, LostDataError, disk_errors
from millrace.cache.segment_records import SegmentObject, decode_group, decode_objects
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.private_files import opener, read_file

_HEAD_BYTES = 4096


def data_path(directory: Path, generation: int) -> str:
    """The file of a segment's objects."""
    return f"{directory}/{generation}.data"


def idx_path(directory: Path, generation: int) -> str:
    """The file that says which objects lie in a segment."""
    return f"{directory}/{generation}.idx"


def generations(directory: Path) -> list[int]:
    """The segments in a folder, by their `.idx` files, the oldest first."""
    with disk_errors(directory), contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        return sorted(int(stem) for stem, _, suffix in (name.partition(".") for name in names) if _is_idx(stem, suffix))
    return []


def data_bytes(directory: Path, generation: int) -> int:
    """How long the `.data` file of a segment is.

    Raises `LostDataError` where there is none, or something else in its place, and `StorageError`.
    """
    path = data_path(directory, generation)
    with disk_errors(path):
        try:
            status = os.lstat(path)
        except FileNotFoundError as error:
            raise LostDataError(f"{path} is gone", next_step="open the object again") from error
    if not stat.S_ISREG(status.st_mode):
        raise LostDataError(f"{path} is no file any more", next_step="open the object again")
    return status.st_size


def scan(directory: Path, generation: int) -> Iterator[SegmentObject]:
    """What a segment's files still say after a crash: every intact record whose bytes lie inside `.data`.

    That the bytes are right is for the reader to verify. Of two records of one object the later is the newer.
    """
    with disk_errors(idx_path(directory, generation)):
        written_bytes = data_bytes(directory, generation)
        records = read_file(Path(idx_path(directory, generation)))
    for record in decode_objects(generation, records):
        if record.offset + record.size <= written_bytes or not record.size:
            yield record


def group_in(directory: Path, generation: int) -> str | None:
    """Whose objects lie in a segment; None when its header is damaged."""
    path = idx_path(directory, generation)
    with disk_errors(path), open(path, "rb", opener=opener) as file:
        head = file.read(_HEAD_BYTES)
        group = decode_group(generation, head)
        if group is None and len(head) == _HEAD_BYTES:  # a very long name
            group = decode_group(generation, head + file.read())
        return group


def open_file(path: str, flags: int) -> int:
    """A descriptor of a segment's file; -1 when it is gone, or something else has taken its place.

    Follows no link and waits for nobody. Raises `OSError`.
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
    """Remove the files of a segment, and what somebody has put in their place: a folder that is not empty stays, and that is
    reported. Raises `OSError`.
    """
    for path in (idx_path(directory, generation), data_path(directory, generation)):
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            try:
                os.rmdir(path)
            except OSError as error:
                # Somebody's files are in it. The segment's name is never used again, so it may stay.
                emit(Event(name="cache.disk.failed", subject=path, detail=f"{path}: {error.strerror}"))


def group_or_none(directory: Path, generation: int) -> str | None:
    """`group_in`; None also where there is no such file any more."""
    try:
        return group_in(directory, generation)
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOENT, *NO_FILE_ERRNOS):
            return None
        raise


def _is_idx(stem: str, suffix: str) -> bool:
    return suffix == "idx" and stem.isascii() and stem.isdigit() and stem[0] != "0"
