"""Joins the save plans of all ranks on the coordinator: one writer for each value, and the metadata of the checkpoint.

The results are equal to those of torch's `DefaultSavePlanner`. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from millrace.checkpoint.state.tensors import entries_of
from millrace.checkpoint.writing.assembly import Described
from millrace.errors import UsageError

# An error names at most this many problems.
_PROBLEMS_NAMED = 3


def deduplicate(plans: Sequence[Any], *, to_lowest_rank: bool) -> list[Any]:
    """The plans with each item on one rank only: the lowest rank that has it, or the one with the fewest bytes so far."""
    if len(plans) == 1:
        return list(plans)
    # Keys are plain tuples: an index computes its hash again, in Python, at each lookup.
    ranks: dict[tuple[Any, Any], set[int]] = {}
    items: dict[tuple[Any, Any], Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key = (item.index.fqn, item.index.offset)
            ranks.setdefault(key, set()).add(rank)
            items[key] = item
    planned_bytes = [0] * len(plans)
    chosen: dict[tuple[Any, Any], int] = {}
    for key, holders in ranks.items():
        rank = min(holders) if to_lowest_rank else min(holders, key=planned_bytes.__getitem__)
        # As torch counts: a shard with the bytes of its whole tensor, an object as one byte.
        planned_bytes[rank] += items[key].tensor_storage_size() or 1
        chosen[key] = rank
    return [
        dataclasses.replace(
            plan, items=[item for item in plan.items if chosen[item.index.fqn, item.index.offset] == rank]
        )
        for rank, plan in enumerate(plans)
    ]


def join(plans: Sequence[Any]) -> tuple[list[Any], Any]:
    """The plans with each item's number among the chunks of its tensor, and the `Metadata` of all of them.

    Raises `UsageError` for a key that is a shard on one rank and something else on another.
    """
    described: dict[str, Any] = {}
    joined = []
    for plan in plans:
        items = []
        for item in plan.items:
            key, data = item.index.fqn, item.tensor_data
            known = described.get(key)
            if known is not None and (item.type != WriteItemType.SHARD or isinstance(known, BytesStorageMetadata)):
                raise UsageError(
                    f"{key!r} is not the same kind of value on every rank",
                    next_step="give every rank a shard of it, or the same whole value",
                )
            if item.type == WriteItemType.BYTE_IO:
                described[key] = BytesStorageMetadata()
                items.append(item)
                continue
            if known is None:
                known = described[key] = TensorStorageMetadata(data.properties, data.size, [])
            place = len(known.chunks)
            if item.index.index != place:
                item = dataclasses.replace(item, index=MetadataIndex(key, item.index.offset, place))
            items.append(item)
            known.chunks.append(data.chunk)
        joined.append(dataclasses.replace(plan, items=items))
    return joined, Metadata(described)


def describe(metadata: Any, wrappers: Collection[str]) -> Described:
    """What a manifest needs of the `Metadata` of a plan. `wrappers` are the keys of wrapper tensors."""
    return Described(*entries_of(metadata, wrappers), metadata.planner_data)


def check_cover(metadata: Any, *, complete: bool) -> None:
    """Raise `UsageError` if chunks of a tensor exceed it or overlap, or, with `complete`, do not cover it."""
    problems = [
        problem
        for key, described in metadata.state_dict_metadata.items()
        if not (isinstance(described, BytesStorageMetadata) or _is_whole(described))
        for problem in _problems(key, tuple(described.size), described.chunks, complete)
    ]
    if problems:
        more = f" ({len(problems) - _PROBLEMS_NAMED} more)" if len(problems) > _PROBLEMS_NAMED else ""
        raise UsageError(
            f"the ranks' parts do not make whole tensors: {'; '.join(problems[:_PROBLEMS_NAMED])}{more}",
            next_step="check how the state dict is sharded, and save it on all ranks together (without no_dist)",
        )


def _is_whole(described: Any) -> bool:
    chunks = described.chunks
    return len(chunks) == 1 and chunks[0].sizes == described.size and not any(chunks[0].offsets)


def _problems(key: str, size: tuple[int, ...], chunks: Sequence[Any], complete: bool) -> Iterator[str]:
    if not size:
        return
    for chunk in chunks:
        if any(
            offset < 0 or length < 0 or offset + length > whole
            for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        ):
            yield f"{_box(chunk)} of {key!r} is outside its shape {size}"
    for one, other in _overlapping(size, chunks):
        yield f"{_box(one)} and {_box(other)} of {key!r} overlap"
    volume = sum(math.prod(chunk.sizes) for chunk in chunks)
    if complete and volume != math.prod(size):
        yield f"{key!r} has {math.prod(size)} elements, and its parts have {volume}"


def _box(chunk: Any) -> str:
    return f"the part {tuple(chunk.sizes)} at {tuple(chunk.offsets)}"


def _overlapping(
    size: tuple[int, ...], chunks: Sequence[ChunkStorageMetadata]
) -> Iterator[tuple[ChunkStorageMetadata, ChunkStorageMetadata]]:
    """Pairs of boxes that share an element, by a sweep along the longest dimension."""
    along = max(range(len(size)), key=size.__getitem__)
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        active = [other for other in active if other.offsets[along] + other.sizes[along] > chunk.offsets[along]]
        for other in active:
            if all(
                max(first, second) < min(first + length, second + width)
                for first, length, second, width in zip(
                    chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True
                )
            ):
                yield other, chunk
        active.append(chunk)
