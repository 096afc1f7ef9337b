"""The two tables of the manifest: the locations of items in chunks, and of chunks in files. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.errors import CorruptCheckpointError

NO_BASE = 0xFFFF_FFFF
"""In the column `base`: the chunk is not a delta."""

_COUNT = struct.Struct("<Q")

ITEM_COLUMNS = {"chunk": "<u4", "start": "<u4", "nbytes": "<u8"}
CHUNK_COLUMNS = {
    "kind": "u1",
    "file": "<u4",
    "base": "<u4",
    "raw_bytes": "<u4",
    "stored_bytes": "<u4",
    "offset": "<u8",
    "stored_checksum": "<u8",
    "raw_checksum": "<u8",
}

Column = np.ndarray[Any, Any]


class Table:
    """Columns of equal length, one numpy array each."""

    def __init__(self, columns: Mapping[str, str], values: Mapping[str, Any] | None = None) -> None:
        given = values or {}
        self.columns: dict[str, Column] = {
            name: np.asarray(given.get(name, ()), dtype=dtype) for name, dtype in columns.items()
        }
        if len({len(column) for column in self.columns.values()}) > 1:
            raise ValueError("the columns of a table have different lengths")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def replaced(self, **columns: Column) -> Table:
        """The same table with other values in some columns."""
        dtypes = {name: column.dtype.str for name, column in self.columns.items()}
        return Table(dtypes, {**self.columns, **columns})

    def to_bytes(self) -> bytes:
        return b"".join([_COUNT.pack(len(self)), *(column.tobytes() for column in self.columns.values())])

    @classmethod
    def from_bytes(cls, columns: Mapping[str, str], data: memoryview) -> Table:
        (count,) = _COUNT.unpack_from(data)
        widths = [np.dtype(dtype).itemsize for dtype in columns.values()]
        if _COUNT.size + count * sum(widths) != len(data):
            raise CorruptCheckpointError("the length of a table does not match its number of rows")
        values, position = {}, _COUNT.size
        for (name, dtype), width in zip(columns.items(), widths, strict=True):
            values[name] = np.frombuffer(data, dtype=dtype, count=count, offset=position)
            position += count * width
        return cls(columns, values)


def item_table(values: Mapping[str, Any] | None = None) -> Table:
    """The location of each item: its first row in the chunk table, its offset in that chunk, and its length in bytes."""
    return Table(ITEM_COLUMNS, values)


def chunk_table(values: Mapping[str, Any] | None = None) -> Table:
    """The location of each chunk (`file`, `offset`, `stored_bytes`), its content (`kind`, `raw_bytes`, and `base`, an
    earlier row, for a delta), and both checksums.
    """
    return Table(CHUNK_COLUMNS, values)
