"""Joins the data of all ranks into one manifest. No I/O."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from millrace._version import __version__
from millrace.checkpoint.format.manifest import DataFile, Manifest, Shard, TensorEntry, WrappedEntry
from millrace.checkpoint.format.tables import NO_BASE, Table, chunk_table, item_table
from millrace.checkpoint.writing.packing import RankData, StoredItem, StoredWrapper
from millrace.errors import UnsupportedObjectError, UsageError


class Described(NamedTuple):
    """The content of a checkpoint by its plan: its tensors, the keys of its objects, and the values of the planner."""

    tensors: tuple[TensorEntry, ...]
    blobs: tuple[str, ...]
    planner_data: Any


Places = Sequence[tuple[tuple[str, Any], StoredItem | StoredWrapper]]
"""The place of each item, with its key and offsets (None for an object)."""


def written_files(places: Places) -> list[str]:
    """The data files that the ranks have written, without those of siblings that they refer to."""
    return sorted({file.name for _, place in places for file in place.data.own_files})


def build_manifest(
    described: Described, places: Places, user: Mapping[str, Any], *, save_id: str, replaces: str | None = None
) -> Manifest:
    """Join the places of all items with the entries of a plan, without changing either. `save_id` is unique to this save.

    Raises `UsageError` if no rank wrote a tensor or object of the plan, or if ranks had different extensions.
    """
    # Of an item that two ranks wrote, the last one counts.
    written = dict(places)
    first_rows: dict[int, int] = {}
    ranks: list[RankData] = []
    chunk_count = 0
    for _, place in places:
        if id(place.data) not in first_rows:
            first_rows[id(place.data)] = chunk_count
            ranks.append(place.data)
            chunk_count += len(place.data.chunks)
    tensors, blobs, planner_data = described
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
        raise UsageError("ranks used different stream extensions", next_step="give the same _extensions to every rank")
    tensors, blobs, wrapped, items = _unwrapped(tensors, blobs, [written[index] for index in indices])
    table = item_table(
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
        items=table,
        chunks=_join_chunks(ranks, files),
        planner_data=planner_data,
        user=user,
        save_id=save_id,
        replaces=replaces,
        transforms=next(iter(transforms), ()),
        wrapped=wrapped,
        sparse=any(data.sparse for data in ranks),
    )


def join_manifests(parts: Sequence[Manifest], user: Mapping[str, Any]) -> Manifest:
    """Join the manifests of all ranks of one save, in the order of the ranks, each of which describes its own items.

    The result depends on the arguments only, so every process that joins the same parts gets the same bytes. Raises
    `UsageError` if the parts do not make whole tensors, or differ in the description of one.
    """
    tensors: dict[str, TensorEntry] = {}
    wrapped: dict[str, WrappedEntry] = {}
    # Rows of the joined item table by key: the ranks' tables one after the other.
    rows: dict[str, list[int]] = {}
    blobs: dict[str, int] = {}
    planner_data: dict[Any, Any] = {}
    columns: dict[str, list[Any]] = {"chunk": [], "start": [], "nbytes": []}
    first_item = first_chunk = 0
    for part in parts:
        row = first_item
        for entry in part.tensors:
            known = tensors.get(entry.key)
            tensors[entry.key] = entry if known is None else _with_shards(known, entry)
            rows.setdefault(entry.key, []).extend(range(row, row + len(entry.shards)))
            row += len(entry.shards)
        for key in part.blobs:
            if blobs.setdefault(key, row) != row:
                raise UsageError(f"two ranks wrote {key!r}", next_step="check the save planner")
            row += 1
        for each in part.wrapped:
            before = wrapped.get(each.tensor.key)
            if before is not None:
                each = WrappedEntry(_with_shards(before.tensor, each.tensor), (*before.parts, *each.parts))
            wrapped[each.tensor.key] = each
        # As in a plan: if ranks have different paths for a key, that of the lowest rank counts.
        planner_data = {**(part.planner_data or {}), **planner_data}
        used = part.items["nbytes"] > 0
        columns["chunk"].append(np.where(used, part.items["chunk"] + np.uint32(first_chunk), part.items["chunk"]))
        columns["start"].append(part.items["start"])
        columns["nbytes"].append(part.items["nbytes"])
        first_item, first_chunk = row, first_chunk + len(part.chunks)
    both = tensors.keys() & (blobs.keys() | wrapped.keys())
    lacking = [
        entry.key
        for entry in (*tensors.values(), *(each.tensor for each in wrapped.values()))
        if sum(math.prod(shard.sizes) for shard in entry.shards) != math.prod(entry.shape)
    ]
    if both or lacking:
        raise UsageError(
            f"the ranks' parts do not make {(*sorted(both), *lacking)[0]!r} whole",
            next_step="save the same state on all ranks together",
        )
    transforms = {part.transforms for part in parts if len(part.chunks)}
    if len(transforms) > 1:
        raise UsageError("ranks used different stream extensions", next_step="give the same _extensions to every rank")
    order = [row for key in tensors for row in rows[key]] + list(blobs.values())
    items = {name: np.concatenate(each)[order] for name, each in columns.items()}
    files = list(dict.fromkeys(file for part in parts for file in part.files))
    return replace(
        parts[0],
        files=tuple(files),
        sparse=any(part.sparse for part in parts),
        tensors=tuple(tensors.values()),
        blobs=tuple(blobs),
        items=item_table(items),
        chunks=_join_chunks(parts, files),
        planner_data=planner_data,
        user=user,
        transforms=next(iter(transforms), ()),
        wrapped=tuple(wrapped.values()),
    )


def _with_shards(one: TensorEntry, other: TensorEntry) -> TensorEntry:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        raise UsageError(
            f"{one.key!r} is not the same kind of tensor on every rank", next_step="give every rank a shard of it"
        )
    return one._replace(shards=(*one.shards, *other.shards))


def _unwrapped(
    tensors: Sequence[TensorEntry], blobs: Sequence[str], stored: Sequence[StoredItem | StoredWrapper]
) -> tuple[tuple[TensorEntry, ...], tuple[str, ...], tuple[WrappedEntry, ...], list[StoredItem]]:
    """The entries of the manifest: plain tensors and objects, wrapper tensors, and the items of the former in order.

    Raises `UsageError` for a key that is a wrapper on some ranks only, and `UnsupportedObjectError` if a part of a wrapper
    has the key of another value.
    """
    plain: list[TensorEntry] = []
    wrapped: list[WrappedEntry] = []
    items: list[StoredItem] = []
    recipes: dict[str, StoredItem] = {}
    places = iter(stored)
    for entry in tensors:
        shards = [next(places) for _ in entry.shards]
        wrappers = [each for each in shards if isinstance(each, StoredWrapper)]
        if not wrappers:
            plain.append(entry)
            items += [each for each in shards if isinstance(each, StoredItem)]
            continue
        if len(wrappers) < len(shards):
            raise UsageError(
                f"{entry.key!r} is not the same kind of tensor on every rank", next_step="give every rank a shard of it"
            )
        for wrapper in wrappers:
            recipes[wrapper.key] = wrapper.recipe
            for key, dtype, shape, place in wrapper.leaves:
                plain.append(TensorEntry(key, dtype, shape, (Shard((0,) * len(shape), shape),)))
                items.append(place)
        parts = tuple((wrapper.key, tuple(leaf[0] for leaf in wrapper.leaves)) for wrapper in wrappers)
        wrapped.append(WrappedEntry(entry, parts))
    items += [each for each in places if isinstance(each, StoredItem)]
    items += recipes.values()
    keys = Counter([*(entry.key for entry in plain), *blobs, *recipes]) if wrapped else Counter[str]()
    repeated = [key for key, count in keys.items() if count > 1]
    if repeated:
        raise UnsupportedObjectError(
            f"{repeated[0]!r} is the key of a value, and of a part of a wrapper tensor", next_step="rename the value"
        )
    return tuple(plain), (*blobs, *recipes), tuple(wrapped), items


def _join_chunks(ranks: Sequence[RankData | Manifest], files: Sequence[DataFile]) -> Table:
    """The chunk tables of all ranks as one table, with adjusted file and row numbers."""
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
