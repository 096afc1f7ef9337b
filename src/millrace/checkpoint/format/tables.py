"""The two tables of the manifest: the locations of items in chunks, and of chunks in files. Pure.

`Packer` distributes items over chunks. A chunk contains either a range of one large item, or several small items of one
kind. So twenty thousand biases are twenty chunks. An item is always in consecutive chunks of its kind.

In a chunk table the column `base` of a delta is the row of its base, which is always an earlier row. So a chain of deltas
ends at a chunk that is not a delta, its *root*.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from millrace.checkpoint.codec.chunks import CHUNK_BYTES, Kind
from millrace.checkpoint.format.slices import ReadRange, coalesce
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


PACK_BELOW_BYTES = CHUNK_BYTES // 8
"""Items shorter than this share a chunk. So a read of such an item decodes only one chunk."""


class ItemRange(NamedTuple):
    """The bytes `[start, stop)` of item number `item`."""

    item: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk: the concatenation of its parts."""

    kind: Kind
    parts: tuple[ItemRange, ...]


@dataclass(slots=True)
class _Pack:
    """An incomplete chunk."""

    parts: list[ItemRange] = field(default_factory=list)
    nbytes: int = 0


class Packer:
    """Packs items in order, and returns full chunks. Not thread-safe."""

    def __init__(self) -> None:
        self._open: dict[Kind, _Pack] = {}

    def add(self, item: int, nbytes: int, kind: Kind) -> Iterable[ChunkPlan]:
        """Add an item, and return the full chunks. The chunks of one item are consecutive and in order."""
        if nbytes >= PACK_BELOW_BYTES:
            return (
                ChunkPlan(kind, (ItemRange(item, start, min(start + CHUNK_BYTES, nbytes)),))
                for start in range(0, nbytes, CHUNK_BYTES)
            )
        if nbytes == 0:
            return ()
        pack = self._open.get(kind)
        full: Sequence[ChunkPlan] = ()
        if pack is None or pack.nbytes + nbytes > CHUNK_BYTES:
            full = () if pack is None else (ChunkPlan(kind, tuple(pack.parts)),)
            pack = self._open[kind] = _Pack()
        pack.parts.append(ItemRange(item, 0, nbytes))
        pack.nbytes += nbytes
        return full

    def flush(self) -> Sequence[ChunkPlan]:
        """Return the incomplete chunks."""
        packs, self._open = self._open, {}
        return [ChunkPlan(kind, tuple(pack.parts)) for kind, pack in packs.items()]


MAX_BASES = 64
"""The maximum number of deltas in a chain. No writer of this format version makes longer chains."""


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """For every row of a table: stored bytes of its chain, stored bytes of its root, and number of deltas in the chain."""

    chain_bytes: Column
    root_bytes: Column
    deltas: Column


def chain_costs(chunks: Table) -> ChainCosts:
    """The costs of every chain. Raises `CorruptCheckpointError` for a chain of more than `MAX_BASES` deltas."""
    stored = chunks["stored_bytes"].astype(np.int64)
    chain_bytes, roots, deltas = stored.copy(), np.arange(len(chunks)), np.zeros(len(chunks), dtype=np.int64)
    rows = np.flatnonzero(chunks["base"] != NO_BASE)
    while rows.size:
        roots[rows] = chunks["base"][roots[rows]]
        chain_bytes[rows] += stored[roots[rows]]
        deltas[rows] += 1
        if deltas[rows[0]] > MAX_BASES:
            raise CorruptCheckpointError(f"a chunk has a chain of more than {MAX_BASES} deltas")
        rows = rows[chunks["base"][roots[rows]] != NO_BASE]
    return ChainCosts(chain_bytes, stored[roots], deltas)


def closure(chunks: Table, rows: Column) -> Column:
    """`rows` and all their bases as unique row numbers in increasing order, so that a base precedes its deltas."""
    found = [np.unique(rows.astype(np.int64))]
    while found[-1].size:
        bases = chunks["base"][found[-1]]
        found.append(np.unique(bases[bases != NO_BASE].astype(np.int64)))
        if len(found) > MAX_BASES + 2:
            raise CorruptCheckpointError(f"a chunk has a chain of more than {MAX_BASES} deltas")
    return np.unique(np.concatenate(found))


def chain(chunks: Table, row: int) -> list[int]:
    """The rows of the chain of `row` in decoding order: its root first, `row` last."""
    rows = [row]
    while (base := int(chunks["base"][rows[-1]])) != NO_BASE:
        rows.append(base)
        if len(rows) > MAX_BASES + 1:
            raise CorruptCheckpointError(f"chunk {row} has a chain of more than {MAX_BASES} deltas")
    return rows[::-1]


def restore_bytes(chunks: Table, file: Column | None = None) -> int:
    """Stored bytes to read for all these chunks. Chunks that several rows share count once. `file`: the number of each
    row's file, if the table has several numbers for one file.
    """
    file, offset = chunks["file"] if file is None else file, chunks["offset"]
    order = np.lexsort((offset, file))
    file, offset = file[order], offset[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (file[1:] != file[:-1]) | (offset[1:] != offset[:-1])
    return int(chunks["stored_bytes"][order][first].sum(dtype=np.uint64))


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Rows to decode together, and the ranges that contain them and all their bases."""

    rows: tuple[int, ...]
    ranges: tuple[ReadRange, ...]


def plan_reads(chunks: Table, rows: Column, *, gap_bytes: int, limit_bytes: int, group_bytes: int) -> list[ReadGroup]:
    """Plan few ranged reads for `rows`, which are unique.

    Without chains every range is a group. With chains, neighbours are in one group, because their bases are neighbours as
    well. A group has about `limit_bytes` in its largest file, and `group_bytes` in total.
    """
    if not (chunks["base"][rows] != NO_BASE).any():
        return [ReadGroup(found.rows, (found,)) for found in read_ranges(chunks, rows, gap_bytes, limit_bytes)]
    groups = []
    for members, needed in _neighbours(chunks, np.sort(rows), limit_bytes, group_bytes):
        ranges = read_ranges(chunks, np.array(needed, dtype=np.int64), gap_bytes, limit_bytes)
        groups.append(ReadGroup(tuple(members), tuple(ranges)))
    return groups


def _neighbours(
    chunks: Table, rows: Column, limit_bytes: int, group_bytes: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Groups of consecutive rows, each with all rows that it needs."""
    members: list[int] = []
    needed: dict[int, None] = {}
    in_file: dict[int, int] = {}
    total = 0
    for row in rows.tolist():
        new = [number for number in chain(chunks, row) if number not in needed]
        sizes = [(int(chunks["file"][number]), int(chunks["stored_bytes"][number])) for number in new]
        added = sum(size for _, size in sizes)
        full = total + added > group_bytes or any(in_file.get(file, 0) + size > limit_bytes for file, size in sizes)
        if members and full:
            yield members, list(needed)
            members, needed, in_file, total = [], {}, {}, 0
            new = chain(chunks, row)
            sizes = [(int(chunks["file"][number]), int(chunks["stored_bytes"][number])) for number in new]
            added = sum(size for _, size in sizes)
        members.append(row)
        needed.update(dict.fromkeys(new))
        total += added
        for file, size in sizes:
            in_file[file] = in_file.get(file, 0) + size
    if members:
        yield members, list(needed)


def read_ranges(chunks: Table, rows: Column, gap_bytes: int, limit_bytes: int) -> list[ReadRange]:
    """The ranges to read for the chunks of `rows`, as `coalesce`."""
    return coalesce(
        rows,
        chunks["file"][rows],
        chunks["offset"][rows],
        chunks["stored_bytes"][rows],
        gap_bytes=gap_bytes,
        limit_bytes=limit_bytes,
    )
