"""Joins what the ranks wrote into one manifest. No I/O."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace._version import __version__
from millrace.checkpoint.format import Manifest
from millrace.checkpoint.packing import RankData, StoredItem
from millrace.checkpoint.tables import NO_BASE, Table, chunk_table, item_table
from millrace.checkpoint.tensors import entries_of
from millrace.errors import UsageError


def written_files(results: Sequence[Sequence[Any]]) -> list[str]:
    """The data files of all ranks."""
    written = (result.storage_data for rank_results in results for result in rank_results)
    return sorted({file.name for stored in written for file in stored.data.files})


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
    bases: dict[int, int] = {}
    ranks: list[RankData] = []
    chunk_count = 0
    for result in (result for rank_results in results for result in rank_results):
        stored: StoredItem = result.storage_data
        written[result.index.fqn, result.index.offset] = stored
        if id(stored.data) not in bases:
            bases[id(stored.data)] = chunk_count
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
            "chunk": [item.chunk + (bases[id(item.data)] if item.nbytes else 0) for item in items],
            "start": [item.start for item in items],
            "nbytes": [item.nbytes for item in items],
        }
    )
    return Manifest(
        created=time.time(),
        writer=f"millrace {__version__}",
        files=tuple(file for data in ranks for file in data.files),
        tensors=tensors,
        blobs=blobs,
        items=places,
        chunks=_join_chunks(ranks),
        planner_data=metadata.planner_data,
        user=user,
        save_id=save_id,
        replaces=replaces,
        transforms=next(iter(transforms), ()),
    )


def _join_chunks(ranks: Sequence[RankData]) -> Table:
    """One chunk table of all ranks', with file and row numbers moved accordingly."""
    if not ranks:
        return chunk_table()
    columns = {name: [data.chunks[name] for data in ranks] for name in ranks[0].chunks.columns}
    files = rows = 0
    for number, data in enumerate(ranks):
        columns["file"][number] = data.chunks["file"] + np.uint32(files)
        base = data.chunks["base"]
        columns["base"][number] = np.where(base == NO_BASE, base, base + np.uint32(rows))
        files += len(data.files)
        rows += len(data.chunks)
    return chunk_table({name: np.concatenate(parts) for name, parts in columns.items()})
