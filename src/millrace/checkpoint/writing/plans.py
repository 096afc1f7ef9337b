"""The save plans of torch: the plans of all ranks joined on the coordinator, and the bytes of each item.

`join` and `deduplicate` give one writer to each value, with results equal to those of torch's `DefaultSavePlanner`; they are
pure, as are `describe` and `check_cover`. `sources_of` returns a source for each item of a plan, which `packing` writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType
from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import OPAQUE, Kind, checksum
from millrace.checkpoint.format.manifest import DTYPES, MAX_BLOB_BYTES
from millrace.checkpoint.format.tables import PACK_BELOW_BYTES
from millrace.checkpoint.state.flattening import PLAIN_TENSORS
from millrace.checkpoint.state.tensors import (
    bytes_of,
    check_blob,
    dense,
    dtype_name,
    entries_of,
    flat_bytes,
    part_of_bytes,
    plain_memory,
)
from millrace.checkpoint.state.wrappers import encode_recipe, inner_key, is_wrapper, take_apart, type_name
from millrace.checkpoint.writing.assembly import Described
from millrace.checkpoint.writing.bases import ItemKey
from millrace.checkpoint.writing.packing import BytesSource, ItemSource, WrapperParts
from millrace.errors import MillraceError, UnsupportedObjectError, UsageError
from millrace.runtime.memory import Memory

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


def check_kinds(plans: Sequence[Any]) -> None:
    """Raise `UsageError` if the ranks' shards of a tensor have different element types, of which a manifest has one."""
    kinds: dict[str, Any] = {}
    for plan in plans:
        for item in plan.items:
            if item.type == WriteItemType.SHARD:
                key, dtype = item.index.fqn, item.tensor_data.properties.dtype
                if kinds.setdefault(key, dtype) != dtype:
                    raise UsageError(
                        f"{key!r} is a tensor of {kinds[key]} on one rank and of {dtype} on another",
                        next_step="convert it to one element type on all ranks",
                    )


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


# --- the bytes of each item ------------------------------------------------------------------------


def sources_of(
    plan: Any,
    planner: Any,
    trusted_types: Sequence[type],
    kept: dict[ItemKey, ItemSource] | None = None,
    wrapped: dict[int, WrapperParts] | None = None,
) -> Iterator[ItemSource]:
    """One source for each item of the plan, in order. Objects are serialised when the iteration reaches them.

    A wrapper tensor has several sources: its recipe, then its plain tensors. `wrapped` receives them by the number of the
    item. `kept` receives all sources, which can be read again while the planner is at another save. Raises
    `UnsupportedObjectError`, naming the key, for values that a checkpoint cannot hold.
    """
    checked: set[int] = set()
    # Most of tens of thousands of tensors have the same type and shape.
    known: dict[Any, tuple[int, Kind]] = {}
    keep = kept is not None
    for number, item in enumerate(plan.items):
        key = item.index.fqn
        sources: Iterable[ItemSource]
        if item.type == WriteItemType.BYTE_IO:
            sources = (_blob_source(_serialised(planner, item), key, trusted_types, checked),)
        else:
            value = _value_of(planner, item)
            if value is not None and is_wrapper(value):
                parts, sources = _wrapper_sources(item, value, trusted_types, keep=keep)
                if wrapped is not None:
                    wrapped[number] = parts
            else:
                described = item.tensor_data
                dtype, sizes = described.properties.dtype, described.chunk.sizes
                shape = known.get((dtype, sizes))
                if shape is None:
                    itemsize, kind = DTYPES[dtype_name(dtype, key)]
                    shape = known[dtype, sizes] = (sizes.numel() * itemsize, kind)
                sources = (TensorSource(planner, item, *shape, keep=keep, value=value),)
        for source in sources:
            if kept is not None:
                kept[source.key] = source
            yield source


def _value_of(planner: Any, item: Any) -> Any:
    """The tensor of an item that may be a wrapper; None for a plain one, which is looked up when it is read."""
    state = getattr(planner, "state_dict", None)
    value = state.get(item.index.fqn) if isinstance(state, Mapping) else None
    return None if value is None or type(value) in PLAIN_TENSORS else planner.resolve_data(item)


def _wrapper_sources(
    item: Any, value: Any, trusted_types: Sequence[type], *, keep: bool
) -> tuple[WrapperParts, list[ItemSource]]:
    data = item.tensor_data
    if value.shape != data.chunk.sizes:
        raise _not_as_planned(item, value)
    key = inner_key(item.index.fqn, data.chunk.offsets, data.chunk.sizes, data.size)
    wrapper, leaves = take_apart(value, key)
    sources: list[ItemSource] = [BytesSource((key, None), OPAQUE, encode_recipe(wrapper, key, trusted_types))]
    parts = []
    for name, leaf in leaves.items():
        dtype = dtype_name(leaf.dtype, name)
        itemsize, kind = DTYPES[dtype]
        parts.append((name, dtype, tuple(leaf.shape)))
        sources.append(_LeafSource(name, leaf, leaf.numel() * itemsize, kind, keep=keep))
    return WrapperParts(key, tuple(parts)), sources


def key_of(item: Any) -> ItemKey:
    """The key and offsets of an item of a save plan."""
    index = item.index
    return index.fqn, None if item.type == WriteItemType.BYTE_IO else tuple(index.offset or ())


def _serialised(planner: Any, item: Any) -> memoryview:
    try:
        data: memoryview = planner.resolve_data(item).getbuffer()
    except (MillraceError, OSError, MemoryError):
        raise
    except Exception as error:
        # Pickle raises whatever the object raises.
        raise UnsupportedObjectError(
            f"{item.index.fqn!r} is an object that cannot be pickled ({type(error).__name__}: {error!s:.200})",
            next_step="store tensors and plain values",
        ) from error
    return data


def _blob_source(data: memoryview, key: str, trusted_types: Sequence[type], checked: set[int]) -> ItemSource:
    if len(data) > MAX_BLOB_BYTES:
        raise UnsupportedObjectError(
            f"{key!r} is an object of {len(data)} bytes, and the maximum is {MAX_BLOB_BYTES}",
            next_step="make its large values tensors",
        )
    # Equal objects, such as the hyperparameters of many groups, are checked once.
    digest = checksum(data)
    if digest not in checked:
        check_blob(data, key, trusted_types)
        checked.add(digest)
    return BytesSource((key, None), OPAQUE, data)


class TensorSource:
    """A tensor, or one rank's part of it. It is looked up when its first byte is read, and copied to the CPU in pieces.

    `value` is the tensor if it was looked up before.
    """

    # There may be tens of thousands of them. Most are read once and in one piece.
    __slots__ = ("_flat", "_item", "_keep", "_lock", "_planner", "_tensor", "_value", "_values", "kind", "nbytes")

    kind: Kind
    nbytes: int

    def __init__(
        self, planner: Any, item: Any, nbytes: int, kind: Kind, *, keep: bool = False, value: Any = None
    ) -> None:
        self._planner, self._item, self._keep, self._value = planner, item, keep, value
        self.nbytes, self.kind = nbytes, kind
        self._lock = threading.Lock()
        self._tensor: Any = None
        self._values: Any = None
        # The bytes of `_values`, if they are one run in this process's memory.
        self._flat: Any = None

    @property
    def key(self) -> ItemKey:
        return key_of(self._item)

    def read(self, start: int, stop: int) -> Buffer:
        if stop - start < PACK_BELOW_BYTES and stop - start == self.nbytes:
            tensor = self._tensor if self._tensor is not None else self._resolve()
            if self._keep:
                self._tensor = tensor
            memory = plain_memory(tensor)
            if memory is not None:
                return memory.tobytes()
            with self._named(tensor):
                return flat_bytes(tensor, self.key[0]).cpu().numpy()  # type: ignore[no-any-return]
        values = self._dense()
        if self._flat is not None:
            # Views of the tensor would take longer than the checksum of a chunk.
            return self._flat[start:stop]  # type: ignore[no-any-return]
        with self._named(values):
            return part_of_bytes(values, start, stop).cpu().numpy()  # type: ignore[no-any-return]

    def memory(self) -> Memory | None:
        if self.nbytes >= PACK_BELOW_BYTES:
            return plain_memory(self._dense())
        if self._tensor is None:
            self._tensor = self._resolve()
        return plain_memory(self._tensor)

    def _dense(self) -> Any:
        with self._lock:
            if self._values is None:
                tensor = self._resolve()
                with self._named(tensor):
                    values = dense(tensor, self.key[0])
                    if values.is_cpu and values.is_contiguous():
                        self._flat = bytes_of(values).numpy()
                self._values = values
            return self._values

    def _resolve(self) -> Any:
        tensor = self._planner.resolve_data(self._item) if self._value is None else self._value
        described = self._item.tensor_data
        if tensor.dtype != described.properties.dtype or tensor.shape != described.chunk.sizes:
            raise _not_as_planned(self._item, tensor)
        return tensor

    @contextlib.contextmanager
    def _named(self, tensor: Any) -> Iterator[None]:
        """Turn errors of a tensor subclass into an error that names the key."""
        try:
            yield
        except (MillraceError, MemoryError):
            raise
        except Exception as error:
            if type(tensor) in PLAIN_TENSORS:
                raise
            raise UnsupportedObjectError(
                f"{self.key[0]!r} is a {type_name(type(tensor))}, whose values cannot be read "
                f"({type(error).__name__}: {error!s:.200})",
                next_step="make it a plain tensor before saving, or give its class __tensor_flatten__",
            ) from error


class _LeafSource(TensorSource):
    """A plain tensor inside a wrapper tensor."""

    __slots__ = ("_name",)

    def __init__(self, name: str, tensor: Any, nbytes: int, kind: Kind, *, keep: bool) -> None:
        super().__init__(None, None, nbytes, kind, keep=keep, value=tensor)
        self._name = name

    @property
    def key(self) -> ItemKey:
        return self._name, (0,) * self._value.dim()

    def _resolve(self) -> Any:
        return self._value


def _not_as_planned(item: Any, tensor: Any) -> UsageError:
    described = item.tensor_data
    return UsageError(
        f"the planner described {item.index.fqn!r} as {described.properties.dtype} {tuple(described.chunk.sizes)}, but "
        f"returned {tensor.dtype} {tuple(tensor.shape)}",
        next_step="make its plan match the results of its resolve_data",
    )
