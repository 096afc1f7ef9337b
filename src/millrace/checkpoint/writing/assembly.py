"""Joins what the ranks wrote into one manifest. No I/O."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace._version import __version__
from millrace.checkpoint.format.manifest import DataFile, Manifest
from millrace.checkpoint.format.tables import NO_BASE, Table, chunk_table, item_table
from millrace.checkpoint.state.tensors import entries_of
from millrace.checkpoint.writing.packing import RankData, StoredItem
from millrace.errors import UsageError


def written_files(results: Sequence[Sequence[Any]]) -> list[str]:
    """The data files that the ranks have written. Those of siblings, which they may refer to, are not among them."""
    written = (result.storage_data for rank_results in results for result in rank_results)
    return sorted({file.name for stored in written for file in stored.data.own_files})


def build_manifest(
    metadata: Any,
    results: Sequence[Sequence[Any]],
    user: Mapping[str, Any],
    *,
    save_id: str,
    replaces: str | None = None,
) -> Manifest:
    """Join what all ranks wrote with what the planner says about it. Changes neither. `save_id` is of this save alone.

    Raises `UsageError` when a tensor or object of the plan was written by no rank, or ranks had different extensions.
    """
    tensors, blobs = entries_of(metadata)
    # By plain tuples: an index computes its hash anew, in Python, whenever it is looked up.
    written: dict[tuple[str, Any], StoredItem] = {}
    first_rows: dict[int, int] = {}
    ranks: list[RankData] = []
    chunk_count = 0
    for result in (result for rank_results in results for result in rank_results):
        stored: StoredItem = result.storage_data
        written[result.index.fqn, result.index.offset] = stored
        if id(stored.data) not in first_rows:
            first_rows[id(stored.data)] = chunk_count
            ranks.append(stored.data)
            chunk_count += len(stored.data.chunks)
    indices: list[tuple[str, Any]] = [(entry.key, shard.offsets) for entry in tensors for shard in entry.shards]
    indices += [(key, None) for key in blobs]
    missing = [index[0] for index in indices if index not in written]
    if missing:
        raise UsageError(
            f"no rank wrote {missing[0]!r} ({len(missing)} of {len(indices)} items are missing)",
            next_step="check the save planner",
        )
    transforms = {data.transforms for data in ranks if len(data.chunks)}
    if len(transforms) > 1:
        raise UsageError(
            "ranks wrote through different stream extensions", next_step="give the same _extensions to every rank"
        )
    items = [written[index] for index in indices]
    places = item_table(
        {
            "chunk": [item.chunk + (first_rows[id(item.data)] if item.nbytes else 0) for item in items],
            "start": [item.start for item in items],
            "nbytes": [item.nbytes for item in items],
        }
    )
    # Several ranks may refer to one file of a sibling.
    files = list(dict.fromkeys(file for data in ranks for file in data.files))
    return Manifest(
        created=time.time(),
        writer=f"millrace {__version__}",
        files=tuple(files),
        tensors=tensors,
        blobs=blobs,
        items=places,
        chunks=_join_chunks(ranks, files),
        planner_data=metadata.planner_data,
        user=user,
        save_id=save_id,
        replaces=replaces,
        transforms=next(iter(transforms), ()),
    )


def _join_chunks(ranks: Sequence[RankData], files: Sequence[DataFile]) -> Table:
    """One chunk table of all ranks', with file and row numbers moved accordingly."""
    if not ranks:
        return chunk_table()
    numbers = {file: number for number, file in enumerate(files)}
    columns = {name: [data.chunks[name] for data in ranks] for name in ranks[0].chunks.columns}
    rows = 0
    for rank, data in enumerate(ranks):
        moved = np.array([numbers[file] for file in data.files], dtype=np.uint32)
        columns["file"][rank] = moved[data.chunks["file"]]
        base = data.chunks["base"]
        columns["base"][rank] = np.where(base == NO_BASE, base, base + np.uint32(rows))
        rows += len(data.chunks)
    return chunk_table({name: np.concatenate(parts) for name, parts in columns.items()})
