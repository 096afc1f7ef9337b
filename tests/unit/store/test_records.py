import os
import random

import pytest

from millrace.store import records
from millrace.store.records import Entry, ObjectName

NAME = ObjectName("s3://", "bucket/key", "v1").pack()
PAGE = 4096


def entry_of(size: int, block_bytes: int = 1000, name: bytes = NAME) -> Entry:
    return Entry(bytes(range(16)), 7, size, block_bytes, 0, packed_name=name)


@pytest.mark.parametrize(
    ("size", "entries", "footer"),
    [(0, 0, 0), (1, PAGE, PAGE + 16), (PAGE, PAGE, PAGE + 5 * 16), (PAGE + 1, 2 * PAGE, 2 * PAGE + 5 * 16)],
)
def test_trailer_offsets_follow_the_layout(size: int, entries: int, footer: int) -> None:
    entry = entry_of(size)
    assert records.entries_offset(entry) == entries
    assert records.footer_offset(entry) == footer
    assert records.file_bytes(entry) == footer + len(records.pack_footer(entry))


@pytest.mark.parametrize("size", [0, 1, PAGE, 1 << 40])
@pytest.mark.parametrize("name", [b"", NAME, ObjectName("o" * 300, "ü" * 2000, "").pack()])
def test_footer_contains_the_record(size: int, name: bytes) -> None:
    entry = entry_of(size, 1 << 22, name)
    total = records.file_bytes(entry)
    tail = b"what lies before it" + records.pack_footer(entry)
    assert records.parse_footer(tail, total) == entry
    needed = records.parse_footer(tail[-records.FOOTER_BYTES :], total)
    if name:
        assert needed == len(records.pack_footer(entry))
        assert records.parse_footer(tail[-records.FOOTER_BYTES - len(name) :], total) == entry
    assert records.parse_footer(tail[-10:], total) == records.FOOTER_BYTES
    for other in (total - 1, total + 1, 0):
        assert records.parse_footer(tail, other) is None


def test_footer_torn_or_flipped_is_none() -> None:
    entry = entry_of(5000)
    whole, total = records.pack_footer(entry), records.file_bytes(entry)
    checked = len(NAME) + 56  # the rest is padding
    for position in range(checked):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        assert not isinstance(records.parse_footer(bytes(flipped), total), Entry)
        for torn in (
            bytes(position) + whole[position:],
            whole[:position] + bytes(len(whole) - position),
            os.urandom(position) + whole[position:],
        ):
            if torn != whole:
                assert not isinstance(records.parse_footer(torn, total), Entry)


def test_block_entries_torn_or_of_others_are_skipped() -> None:
    entry = entry_of(10_000)
    checksums = [random.Random(block).getrandbits(64) for block in range(10)]
    packed = b"".join(records.pack_block(entry, block, value) for block, value in enumerate(checksums))
    assert records.parse_blocks(entry, packed) == list(enumerate(checksums))
    assert records.parse_blocks(entry, bytes(160)) == []
    assert records.parse_blocks(entry._replace(generation=8), packed) == []
    assert records.parse_blocks(entry._replace(object_id=bytes(16)), packed) == []
    assert records.parse_blocks(entry, packed[16:] + packed[:16]) == []  # in another's place


def test_entries_torn_at_any_byte_are_skipped() -> None:
    entry = entry_of(3_000)
    packed = b"".join(records.pack_block(entry, block, 0x0102030405060708 + block) for block in range(3))
    whole = records.parse_blocks(entry, packed)
    for position in range(len(packed)):
        for torn in (packed[:position] + bytes(48 - position), bytes(position) + packed[position:]):
            found = records.parse_blocks(entry, torn)
            intact = [
                block
                for block in range(3)
                if torn[block * 16 : block * 16 + 16] == packed[block * 16 : block * 16 + 16]
            ]
            assert found == [whole[block] for block in intact]
