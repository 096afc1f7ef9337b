"""The trailer of a data file, after the object's bytes, from which the index can be rebuilt. Pure.

Layout of a data file::

    0                                the object's bytes, with holes for missing blocks
    size, rounded up to 4 KiB        16 bytes per block: its checksum and a mark, or zeros
    then                             the packed name (origin, key, version)
    the last 64 bytes                magic, object id, generation, size, block bytes, length of name, checksum of all this

A mark is a checksum of the block's identity and of its checksum. Zeros, torn writes and entries of other files have no valid
mark. A valid mark does not prove that the bytes are right: they are verified before their first use.
"""

from __future__ import annotations

import struct

import xxhash

from millrace.store.blocks import block_count
from millrace.store.records import Entry

_MAGIC = b"MLRCobj2"
_FOOTER = struct.Struct("<8s16sQQIIQ8x")
_CHECKED_BYTES = 48  # of the footer: all before its checksum
_BLOCK = struct.Struct("<QQ")
_MARKED = struct.Struct("<16sQQQ")
_ALIGNMENT = 4096

FOOTER_BYTES = _FOOTER.size
BLOCK_ENTRY_BYTES = _BLOCK.size


def file_name(entry: Entry) -> str:
    """The path of the data file, relative to the directory of data files."""
    name = entry.object_id.hex()
    return f"{name[:2]}/{name}-{entry.generation}"


def entries_offset(entry: Entry) -> int:
    """The offset of the block entries."""
    return -(-entry.size // _ALIGNMENT) * _ALIGNMENT


def block_offset(entry: Entry, block: int) -> int:
    """The offset of the entry of a block."""
    return entries_offset(entry) + block * BLOCK_ENTRY_BYTES


def footer_offset(entry: Entry) -> int:
    """The offset of the name, which the footer follows."""
    return block_offset(entry, block_count(entry.size, entry.block_bytes))


def file_bytes(entry: Entry) -> int:
    """The size of the data file of an object."""
    return footer_offset(entry) + len(entry.packed_name) + FOOTER_BYTES


def pack_footer(entry: Entry) -> bytes:
    """The name and the footer."""
    fields = (_MAGIC, entry.object_id, entry.generation, entry.size, entry.block_bytes, len(entry.packed_name))
    unchecked = _FOOTER.pack(*fields, 0)
    return entry.packed_name + _FOOTER.pack(*fields, _footer_checksum(entry.packed_name, unchecked))


def pack_block(entry: Entry, block: int, checksum: int) -> bytes:
    """The entry of a cached block."""
    return _BLOCK.pack(checksum, _mark(entry, block, checksum))


def parse_footer(tail: bytes, total_bytes: int) -> Entry | int | None:
    """The record of an object, without blocks, from the last bytes of its file of `total_bytes`.

    None when it has no valid footer; the number of bytes that are needed when `tail` is too short.
    """
    if len(tail) < FOOTER_BYTES:
        return None if total_bytes < FOOTER_BYTES else FOOTER_BYTES
    footer = tail[-FOOTER_BYTES:]
    magic, object_id, generation, size, block_bytes, name_bytes, checksum = _FOOTER.unpack(footer)
    if magic != _MAGIC or FOOTER_BYTES + name_bytes > total_bytes:
        return None
    if len(tail) < FOOTER_BYTES + name_bytes:
        return FOOTER_BYTES + int(name_bytes)
    name = tail[len(tail) - FOOTER_BYTES - name_bytes : len(tail) - FOOTER_BYTES]
    if checksum != _footer_checksum(name, footer) or not block_bytes:
        return None
    entry = Entry(object_id, generation, size, block_bytes, 0, packed_name=name)
    return entry if file_bytes(entry) == total_bytes else None


def parse_blocks(entry: Entry, data: bytes) -> list[tuple[int, int]]:
    """(block, checksum) of every block with a valid entry, from the bytes between `entries_offset` and `footer_offset`."""
    return [
        (block, checksum)
        for block, (checksum, mark) in enumerate(_BLOCK.iter_unpack(data))
        if mark == _mark(entry, block, checksum)
    ]


def _mark(entry: Entry, block: int, checksum: int) -> int:
    return xxhash.xxh3_64_intdigest(_MARKED.pack(entry.object_id, entry.generation, block, checksum))


def _footer_checksum(name: bytes, footer: bytes) -> int:
    return xxhash.xxh3_64_intdigest(footer[:_CHECKED_BYTES] + name)
