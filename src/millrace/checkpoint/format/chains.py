"""Chunks that build on others: what each costs to restore, and which reads a set of them needs. Pure.

In a chunk table the column `base` leads from a delta to the row that it changes, which is always an earlier one; so a chain
ends at a chunk that stands alone, its *root*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from millrace.checkpoint.format.slices import ReadRange, coalesce
from millrace.checkpoint.format.tables import NO_BASE, Column, Table
from millrace.errors import CorruptCheckpointError

MAX_BASES = 64
"""A chain has at most so many deltas: longer ones come from no writer of this format version."""


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """Of every row of a table: the stored bytes of its whole chain, those of the root alone, and the number of deltas."""

    chain_bytes: Column
    root_bytes: Column
    deltas: Column


def chain_costs(chunks: Table) -> ChainCosts:
    """Add up every chain. Raises `CorruptCheckpointError` for one of more than `MAX_BASES` deltas."""
    stored = chunks["stored_bytes"].astype(np.int64)
    chain_bytes, roots, deltas = stored.copy(), np.arange(len(chunks)), np.zeros(len(chunks), dtype=np.int64)
    rows = np.flatnonzero(chunks["base"] != NO_BASE)
    while rows.size:
        roots[rows] = chunks["base"][roots[rows]]
        chain_bytes[rows] += stored[roots[rows]]
        deltas[rows] += 1
        if deltas[rows[0]] > MAX_BASES:
            raise CorruptCheckpointError(f"a chunk ends a chain of more than {MAX_BASES} deltas")
        rows = rows[chunks["base"][roots[rows]] != NO_BASE]
    return ChainCosts(chain_bytes, stored[roots], deltas)


def closure(chunks: Table, rows: Column) -> Column:
    """`rows` and all that they build on: row numbers in increasing order, each once, so that a base precedes its deltas."""
    found = [np.unique(rows.astype(np.int64))]
    while found[-1].size:
        bases = chunks["base"][found[-1]]
        found.append(np.unique(bases[bases != NO_BASE].astype(np.int64)))
        if len(found) > MAX_BASES + 2:
            raise CorruptCheckpointError(f"a chunk ends a chain of more than {MAX_BASES} deltas")
    return np.unique(np.concatenate(found))


def chain(chunks: Table, row: int) -> list[int]:
    """The rows that decode one after the other into `row`: its root first, itself last."""
    rows = [row]
    while (base := int(chunks["base"][rows[-1]])) != NO_BASE:
        rows.append(base)
        if len(rows) > MAX_BASES + 1:
            raise CorruptCheckpointError(f"chunk {row} ends a chain of more than {MAX_BASES} deltas")
    return rows[::-1]


def restore_bytes(chunks: Table) -> int:
    """Stored bytes that reading all of these chunks takes, each that lies in a file once (rows may share one)."""
    places = np.stack([chunks["file"].astype(np.uint64), chunks["offset"]])
    _, first = np.unique(places, axis=1, return_index=True)
    return int(chunks["stored_bytes"][first].sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Rows to decode together, and the ranges that hold them and everything that they build on."""

    rows: tuple[int, ...]
    ranges: tuple[ReadRange, ...]


def plan_reads(chunks: Table, rows: Column, *, gap_bytes: int, limit_bytes: int, group_bytes: int) -> list[ReadGroup]:
    """Few ranged reads for `rows`, which are different.

    Without chains every range is a group of its own. With chains neighbours are read together, since what they build on
    lies side by side as well: a group takes about `limit_bytes` of the file that it has most of, `group_bytes` in all.
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
    """Consecutive rows with, in each group, everything that they need."""
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
