"""The bytes of a segment's `.idx` file: a header, then one record an object. Pure.

A record can be found again after any number of damaged ones: it begins at a multiple of 16 with a mark that no text
contains (0xFF is not in UTF-8), and carries a checksum of itself that is seeded with the segment's generation. Zeros, torn
writes and records of another segment have no valid checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from millrace.cache.records import ObjectName

_MARK = b"\xffMR2"
_ALIGNMENT = 16
# mark, kind, checksum of the record, object id, offset, checksum of the object, bytes of the object, bytes of the name
_FIXED = struct.Struct("<4sIQ16sQQII")
_CHECKSUM = slice(8, 16)
_HEADER, _OBJECT = 1, 2


@dataclass(frozen=True, slots=True)
class SegmentObject:
    """What a segment's `.idx` says of one object: `size` bytes from `offset` on in `.data`, with this xxh3 checksum."""

    object_id: bytes
    offset: int
    size: int
    checksum: int
    name: ObjectName


def encode_header(generation: int, group: str) -> bytes:
    """The first record of a segment: whose objects lie in it."""
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
        position += _padded(_FIXED.size + len(text))


def aligned(position: int) -> int:
    """Where the next record begins in an `.idx` file that ends at `position`."""
    return _padded(position)


def _encode(generation: int, kind: int, object_id: bytes, offset: int, checksum: int, size: int, text: bytes) -> bytes:
    fixed = _FIXED.pack(_MARK, kind, 0, object_id, offset, checksum, size, len(text))
    record = bytearray(fixed + text)
    record[_CHECKSUM] = _digest(generation, bytes(record)).to_bytes(8, "little")
    return bytes(record.ljust(_padded(len(record)), b"\0"))


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
    """Where the next record may begin; -1 when there is none."""
    while True:
        position = data.find(_MARK, position)
        if position < 0 or position % _ALIGNMENT == 0:
            return position
        position += 1


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
