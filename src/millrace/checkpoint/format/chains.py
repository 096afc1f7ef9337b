"""Chains of delta chunks: the cost to restore each chunk, and the reads for a set of chunks. Pure.

In a chunk table the column `base` of a delta is the row of its base, which is always an earlier row. So a chain ends at a
chunk that is not a delta, its *root*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from millrace.checkpoint.format.slices import ReadRange, coalesce
from millrace.checkpoint.format.tables import NO_BASE, Column, Table
from millrace.errors import CorruptCheckpointError

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


def restore_bytes(chunks: Table) -> int:
    """Stored bytes to read for all these chunks. Chunks that several rows share count once."""
    places = np.stack([chunks["file"].astype(np.uint64), chunks["offset"]])
    _, first = np.unique(places, axis=1, return_index=True)
    return int(chunks["stored_bytes"][first].sum(dtype=np.int64))


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
        return [ReadGroup(found.rows, (found,)) for found in _coalesced(chunks, rows, gap_bytes, limit_bytes)]
    groups = []
    for members, needed in _neighbours(chunks, np.sort(rows), limit_bytes, group_bytes):
        ranges = _coalesced(chunks, np.array(needed, dtype=np.int64), gap_bytes, limit_bytes)
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


def _coalesced(chunks: Table, rows: Column, gap_bytes: int, limit_bytes: int) -> list[ReadRange]:
    return coalesce(
        rows,
        chunks["file"][rows],
        chunks["offset"][rows],
        chunks["stored_bytes"][rows],
        gap_bytes=gap_bytes,
        limit_bytes=limit_bytes,
    )
