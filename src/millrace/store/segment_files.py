"""The files of segments: their names, their records, and how they are opened, scanned and removed.

The `.idx` file of a segment has a header, then one record for each object. A record can be found after any number of damaged
ones: it begins at a multiple of 16 with a mark that no text contains (0xFF is not in UTF-8), and has a checksum that is
seeded with the segment's generation. Zeros, torn writes and records of another segment have no valid checksum.

Anything else at the path of a file counts as a missing file: links are not followed, and no open waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.runtime.failures import NO_FILE_ERRNOS, LostDataError, disk_errors
from millrace.runtime.private_files import opener, read_file
from millrace.store.records import ObjectName

_HEAD_BYTES = 4096

_MARK = b"\xffMR2"
_ALIGNMENT = 16
# mark, kind, checksum of the record, object id, offset, checksum of the object, bytes of the object, bytes of the name
_FIXED = struct.Struct("<4sIQ16sQQII")
_CHECKSUM = slice(8, 16)
_HEADER, _OBJECT = 1, 2


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
    for record in decode_objects(generation, records):
        if record.offset + record.size <= written_bytes or not record.size:
            yield record


def group_in(directory: Path, generation: int) -> str | None:
    """The group of a segment's objects; None when its header is damaged."""
    path = idx_path(directory, generation)
    with disk_errors(path), open(path, "rb", opener=opener) as file:
        head = file.read(_HEAD_BYTES)
        group = decode_group(generation, head)
        if group is None and len(head) == _HEAD_BYTES:  # a very long name
            group = decode_group(generation, head + file.read())
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


# --- records: pure --------------------------------------------------------------------------------


class SegmentObject(NamedTuple):
    """The record of one object in `.idx`: `size` bytes from `offset` in `.data`, with this xxh3 checksum."""

    object_id: bytes
    offset: int
    size: int
    checksum: int
    name: ObjectName


def encode_header(generation: int, group: str) -> bytes:
    """The first record of a segment, which names the group of its objects."""
    return _encode(generation, _HEADER, bytes(16), 0, 0, 0, group.encode("utf-8", "surrogatepass"))


def encode_object(generation: int, record: SegmentObject) -> bytes:
    """The record of one object in the segment of this generation; a multiple of 16 bytes."""
    return _encode(
        generation, _OBJECT, record.object_id, record.offset, record.checksum, record.size, record.name.pack()
    )


def decode_group(generation: int, data: bytes) -> str | None:
    """The group in the header of a segment; None when the header is damaged. The head of the file is enough."""
    found = _decode(generation, data, 0)
    if found is None or found[0] != _HEADER:
        return None
    return found[5].decode("utf-8", "surrogatepass")


def decode_objects(generation: int, data: bytes) -> Iterator[SegmentObject]:
    """The valid records of objects in the bytes of an `.idx` file, in the order of writing."""
    position = 0
    while position >= 0:
        found = _decode(generation, data, position)
        if found is None:
            position = _next_mark(data, position + 1)
            continue
        kind, object_id, offset, checksum, size, text = found
        if kind == _OBJECT:
            yield SegmentObject(object_id, offset, size, checksum, ObjectName.unpack(text))
        position += aligned(_FIXED.size + len(text))


def aligned(position: int) -> int:
    """The start of the next record in an `.idx` file that ends at `position`."""
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _encode(generation: int, kind: int, object_id: bytes, offset: int, checksum: int, size: int, text: bytes) -> bytes:
    fixed = _FIXED.pack(_MARK, kind, 0, object_id, offset, checksum, size, len(text))
    record = bytearray(fixed + text)
    record[_CHECKSUM] = _digest(generation, bytes(record)).to_bytes(8, "little")
    return bytes(record.ljust(aligned(len(record)), b"\0"))


def _decode(generation: int, data: bytes, position: int) -> tuple[int, bytes, int, int, int, bytes] | None:
    if position + _FIXED.size > len(data):
        return None
    mark, kind, digest, object_id, offset, checksum, size, text_bytes = _FIXED.unpack_from(data, position)
    stop = position + _FIXED.size + text_bytes
    if mark != _MARK or stop > len(data):
        return None
    record = bytearray(data[position:stop])
    record[_CHECKSUM] = bytes(8)
    if _digest(generation, bytes(record)) != digest:
        return None
    return kind, object_id, offset, checksum, size, bytes(record[_FIXED.size :])


def _digest(generation: int, record: bytes) -> int:
    return xxhash.xxh3_64_intdigest(record, seed=generation)


def _next_mark(data: bytes, position: int) -> int:
    """The position at which the next record may begin; -1 when there is none."""
    while True:
        position = data.find(_MARK, position)
        if position < 0 or position % _ALIGNMENT == 0:
            return position
        position += 1
