import os
import random

import pytest

from millrace.store import records
from millrace.store.records import Entry, ObjectName

NAME = ObjectName("s3://", "bucket/key", "v1").pack()


def entry_of(size: int, block_bytes: int = 1000, name: bytes = NAME) -> Entry:
    return Entry(bytes(range(16)), 7, size, block_bytes, 0, packed_name=name)


def sidecar(entry: Entry, checksums: list[int]) -> bytes:
    return records.pack_header(entry) + b"".join(
        records.pack_block(entry, block, value) for block, value in enumerate(checksums)
    )


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 40])
@pytest.mark.parametrize("name", [b"", NAME, ObjectName("o" * 300, "ü" * 2000, "").pack()])
def test_header_contains_the_record(size: int, name: bytes) -> None:
    entry = entry_of(size, 1 << 22, name)
    header = records.pack_header(entry)
    assert len(header) == records.block_offset(entry, 0) == 64 + len(name)
    assert records.parse_sidecar(header) == (entry, [])


def test_header_torn_or_flipped_is_none() -> None:
    entry = entry_of(5000)
    whole = records.pack_header(entry)
    padding = range(56, 64)
    for position in range(len(whole)):
        if position in padding:
            continue
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        assert records.parse_sidecar(bytes(flipped)) is None
        for torn in (whole[:position], bytes(position) + whole[position:], os.urandom(position) + whole[position:]):
            assert torn == whole or records.parse_sidecar(torn) is None


def test_block_entries_torn_or_of_others_are_skipped() -> None:
    entry = entry_of(10_000)
    checksums = [random.Random(block).getrandbits(64) for block in range(10)]
    whole = sidecar(entry, checksums)
    complete = entry._replace(cached_bytes=10_000)
    assert records.parse_sidecar(whole) == (complete, list(enumerate(checksums)))
    assert records.parse_sidecar(whole + b"more") == (complete, list(enumerate(checksums)))
    header, blocks = records.pack_header(entry), whole[len(records.pack_header(entry)) :]
    assert records.parse_sidecar(header + bytes(160)) == (entry, [])
    for other in (entry._replace(generation=8), entry._replace(object_id=bytes(16))):
        assert records.parse_sidecar(records.pack_header(other) + blocks) == (other, [])
    swapped = records.parse_sidecar(header + blocks[16:32] + blocks[:16])  # in another's place
    assert swapped == (entry, [])


def test_entries_torn_at_any_byte_are_skipped() -> None:
    entry = entry_of(3_000)
    checksums = [0x0102030405060708 + block for block in range(3)]
    header, packed = records.pack_header(entry), sidecar(entry, checksums)[len(records.pack_header(entry)) :]
    for position in range(len(packed)):
        for torn in (
            packed[:position],
            packed[:position] + bytes(48 - position),
            bytes(position) + packed[position:],
        ):
            found = records.parse_sidecar(header + torn)
            intact = [
                (block, checksums[block])
                for block in range(3)
                if torn[block * 16 : block * 16 + 16] == packed[block * 16 : block * 16 + 16]
            ]
            assert found == (entry._replace(cached_bytes=1000 * len(intact)), intact)
