"""The read-ahead of Parquet columns, as a value."""

import io
import struct
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.filesystem.columns import ColumnAhead

GROUPS, COLUMNS = 12, 5


def written(rows: int = 2_000, **options: object) -> tuple[bytes, list[list[tuple[int, int]]]]:
    """A Parquet file, and the ranges of its columns by row group."""
    random = np.random.default_rng(0)
    table = pa.table({f"c{number}": random.integers(0, 1 << 40, GROUPS * rows) for number in range(COLUMNS)})
    data = io.BytesIO()
    pq.write_table(table, data, row_group_size=rows, **{"use_dictionary": False, "compression": "none", **options})
    metadata = pq.read_metadata(io.BytesIO(data.getvalue()))
    chunks = []
    for group in range(GROUPS):
        row_group = metadata.row_group(group)
        columns = [row_group.column(number) for number in range(COLUMNS)]
        starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
        chunks.append(
            [(start, start + column.total_compressed_size) for start, column in zip(starts, columns, strict=True)]
        )
    return data.getvalue(), chunks


def ahead_of(data: bytes) -> ColumnAhead:
    return ColumnAhead(len(data), lambda start, stop: data[start:stop])


def test_reader_that_begins_with_the_first_group_gets_the_next_ones() -> None:
    data, chunks = written()
    ahead = ahead_of(data)
    assert ahead.after(*chunks[0][2]) == [chunks[group][2] for group in range(1, GROUPS)]  # less than 4 MiB
    for group in range(1, GROUPS):
        assert ahead.after(*chunks[group][2]) == []


def test_first_read_ahead_has_four_mebibytes_and_grows() -> None:
    data, chunks = written(rows=200_000)  # 1.6 MB a chunk
    ahead = ahead_of(data)
    assert ahead.after(*chunks[0][1]) == [chunks[1][1], chunks[2][1]]
    assert ahead.after(*chunks[1][1]) == [chunks[group][1] for group in range(3, 7)]
    assert ahead.after(*chunks[2][1]) == [chunks[group][1] for group in range(7, GROUPS)]


def test_reader_that_begins_elsewhere_gets_nothing_before_its_second_group() -> None:
    data, chunks = written()
    ahead = ahead_of(data)
    assert ahead.after(*chunks[4][0]) == []
    assert ahead.after(*chunks[4][3]) == []
    assert ahead.after(*chunks[5][0]) == [chunks[group][column] for group in range(6, GROUPS) for column in (0, 3)]


def test_reader_that_jumps_gets_nothing() -> None:
    data, chunks = written()
    ahead = ahead_of(data)
    for group in (3, 7, 5, 9):
        assert ahead.after(*chunks[group][0]) == []


def test_second_column_of_a_group_is_fetched_ahead_too() -> None:
    data, chunks = written()
    ahead = ahead_of(data)
    ahead.after(*chunks[0][0])
    assert ahead.after(*chunks[0][4]) == [chunks[group][4] for group in range(1, GROUPS)]


def test_groups_read_in_another_order_are_returned_once() -> None:
    data, chunks = written(rows=100_000)
    ahead = ahead_of(data)
    returned = [span for group in (0, 3, 1, 2, 5, 4, 6, 7, 8, 9, 10, 11) for span in ahead.after(*chunks[group][2])]
    assert len(returned) == len(set(returned))
    assert set(returned) <= {chunks[group][2] for group in range(1, GROUPS)}


def test_dictionary_pages_are_part_of_a_column() -> None:
    data, chunks = written(use_dictionary=True)
    assert ahead_of(data).after(*chunks[0][2]) == [chunks[group][2] for group in range(1, GROUPS)]


def test_footer_that_is_cached_after_the_first_read_is_used() -> None:
    data, chunks = written()
    cached_from = [len(data), len(data) - 8, 0]
    ahead = ColumnAhead(len(data), lambda start, stop: data[start:stop] if start >= cached_from[0] else None)
    assert ahead.after(*chunks[0][2]) == []
    cached_from.pop(0)  # only the length of the footer
    assert ahead.after(*chunks[0][2]) == []
    cached_from.pop(0)
    assert ahead.after(*chunks[0][2]) == [chunks[group][2] for group in range(1, GROUPS)]


def test_footer_that_is_not_cached_is_looked_for_a_few_times() -> None:
    looked: list[tuple[int, int]] = []
    ahead = ColumnAhead(10**9, lambda *span: looked.append(span))
    for _ in range(100):
        assert ahead.after(10, 20) == []
    assert len(looked) <= 5


@pytest.mark.parametrize("end", [b"", b"PAR1", bytes(4) + b"PAR1", b"\xff\xff\xff\xffPAR1", b"\x08\0\0\0PAR1", b"PARE"])
def test_object_that_is_not_parquet_gets_nothing(end: bytes) -> None:
    data = bytes(1000) + end
    assert ahead_of(data).after(10, 20) == []


def test_reader_without_pyarrow_parquet_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data, chunks = written()
    monkeypatch.delitem(sys.modules, "pyarrow.parquet")
    assert ahead_of(data).after(*chunks[0][2]) == []


def test_footer_of_other_files_leads_to_no_read_beyond_the_end() -> None:
    """A `_metadata` file has the footers of other files: offsets that are larger than it is."""
    data, chunks = written()
    footer = pq.read_metadata(io.BytesIO(data))
    written_footer = io.BytesIO()
    footer.write_metadata_file(written_footer)
    metadata = written_footer.getvalue()
    # As long as its first chunks reach, so that a read inside them is possible.
    padded = bytes(chunks[1][0][1]) + metadata
    found = ahead_of(padded).after(*chunks[0][0])
    assert all(stop <= len(padded) for _, stop in found)
    assert len(found) < GROUPS - 1


def test_damaged_footer_leads_to_no_read_before_the_beginning() -> None:
    data, chunks = written()
    offset = 2 * chunks[2][1][0]  # as Thrift writes it: twice, in groups of seven bits
    stored = bytes((offset >> shift & 127) | (128 if offset >> shift + 7 else 0) for shift in range(0, 21, 7))
    (size,) = struct.unpack("<I", data[-8:-4])
    footer = data[-8 - size : -8].replace(stored, bytes([stored[0] | 1]) + stored[1:])  # the bit of the sign
    damaged = data[: -8 - size] + footer + data[-8:]
    assert pq.read_metadata(io.BytesIO(damaged)).row_group(2).column(1).data_page_offset < 0
    assert ahead_of(damaged).after(*chunks[0][1]) == [chunks[group][1] for group in range(1, GROUPS) if group != 2]
