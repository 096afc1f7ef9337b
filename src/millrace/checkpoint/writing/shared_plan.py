"""A save plan for another process that maps the memory of the staged state: `SharedPlan`. Its tensors are offsets there.

The training process plans, because plans need the classes of the state's values: wrapper tensors, DTensors and their
meshes, objects. The saver process needs none of them.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import OPAQUE, Kind
from millrace.checkpoint.format.layout import PACK_BELOW_BYTES
from millrace.checkpoint.format.manifest import DTYPES, DataFile
from millrace.checkpoint.format.tables import Table
from millrace.checkpoint.state.arena import Region
from millrace.checkpoint.state.flattening import Path
from millrace.checkpoint.state.tensors import dtype_name, flat_bytes, plain_memory
from millrace.checkpoint.state.wrappers import encode_recipe, inner_key, is_wrapper, take_apart
from millrace.checkpoint.writing.bases import ItemKey, MemoryBase, Place, Readable
from millrace.checkpoint.writing.packing import ItemSource
from millrace.checkpoint.writing.sources import BlobSource, WrapperParts, sources_of
from millrace.checkpoint.writing.writer import CheckpointWriter
from millrace.runtime.garbage import collection_paused
from millrace.runtime.memory import Memory

# More bytes outside of the shared memory than this are not passed on as a part of a base.
_MAX_BASE_BYTES = 16 << 20
# Types whose values every process can unpickle, and that torch's safe loader accepts.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})


class ItemIndex(NamedTuple):
    """The key and offsets (None for an object) of an item: what a manifest needs of torch's `MetadataIndex`."""

    fqn: str
    offset: tuple[int, ...] | None


class SharedItem(NamedTuple):
    """The bytes of one source: at an offset of the shared memory, or these, or (None) the next object of the save."""

    key: ItemKey
    kind: Kind
    nbytes: int
    where: int | bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """The plan of all saves of one structure. Picklable without classes of the user.

    `objects` are the write items of the values that are not tensors, whose bytes come with each save.
    """

    indices: list[ItemIndex]
    items: list[SharedItem]
    objects: list[Any]
    wrapped: dict[int, WrapperParts]
    metadata: Any


class SharedObject(NamedTuple):
    """A value that is not a tensor: as it is, if every process can unpickle it, or as `torch.save` wrote it."""

    value: Any
    serialised: bytes | None


# --- in the training process ----------------------------------------------------------------------


class RankPlan(NamedTuple):
    """This rank's items of a save: torch's planner, its plan, and the metadata of these items."""

    planner: Any
    plan: Any
    metadata: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedState:
    """A plan, and the keys on the paths to its objects in the state."""

    plan: SharedPlan
    paths: list[tuple[Any, ...]]

    @classmethod
    def of(
        cls, planned: RankPlan, state: dict[str, Any], region: Region | None, trusted_types: Sequence[type]
    ) -> PlannedState:
        """Describe the save of a staged state, whose tensors are in `region`, for another process.

        Raises as a save does for values that a checkpoint cannot store.
        """
        planner, plan, metadata = planned
        indices: list[ItemIndex] = []
        items: list[SharedItem] = []
        objects: list[Any] = []
        wrapped: dict[int, WrapperParts] = {}
        with collection_paused():
            for number, item in enumerate(plan.items):
                key = item.index.fqn
                if item.type == WriteItemType.BYTE_IO:
                    indices.append(ItemIndex(key, None))
                    objects.append(item)
                    items.append(SharedItem((key, None), OPAQUE, 0, None))
                    continue
                offset = tuple(item.index.offset or ())
                indices.append(ItemIndex(key, offset))
                value = planner.resolve_data(item)
                if is_wrapper(value):
                    wrapped[number] = _add_wrapper(items, item, value, region, trusted_types)
                else:
                    items.append(_tensor_item((key, offset), value, region))
        shared = SharedPlan(indices=indices, items=items, objects=objects, wrapped=wrapped, metadata=metadata)
        paths: list[tuple[Any, ...]] = []
        for item in objects:
            path = planner.mappings[item.index.fqn]
            keys = _keys_of(planner.state_dict[item.index.fqn], state, path)
            paths.append(path if keys is None else keys)
        return cls(plan=shared, paths=paths)

    @property
    def has_values(self) -> bool:
        """Whether the plan contains the bytes of a tensor, so that it is of no use for the next save."""
        return any(item.where and isinstance(item.where, bytes) and item.key[1] is not None for item in self.plan.items)

    def without_items(self) -> PlannedState:
        """The part that later saves need in the training process."""
        return replace(self, plan=replace(self.plan, indices=[], items=[], wrapped={}, metadata=None))

    def objects_of(self, state: Mapping[str, Any], trusted_types: Sequence[type]) -> list[SharedObject]:
        """The values of a state with this structure that are not tensors. Raises `UnsupportedObjectError`."""
        found = []
        for item, path in zip(self.plan.objects, self.paths, strict=True):
            value = _at(state, path)
            if _is_plain(value):
                found.append(SharedObject(value, None))
                continue
            (source,) = sources_of(SavePlan([item]), _Values({item.index.fqn: value}), trusted_types)
            found.append(SharedObject(None, bytes(memoryview(source.read(0, source.nbytes)))))
        return found


def _add_wrapper(
    items: list[SharedItem], item: Any, value: Any, region: Region | None, trusted_types: Sequence[type]
) -> WrapperParts:
    data = item.tensor_data
    key = inner_key(item.index.fqn, data.chunk.offsets, data.chunk.sizes, data.size)
    wrapper, leaves = take_apart(value, key)
    recipe = bytes(encode_recipe(wrapper, key, trusted_types))
    items.append(SharedItem((key, None), OPAQUE, len(recipe), recipe))
    parts = []
    for name, leaf in leaves.items():
        items.append(_tensor_item((name, (0,) * leaf.dim()), leaf, region))
        parts.append((name, dtype_name(leaf.dtype, name), tuple(leaf.shape)))
    return WrapperParts(key, tuple(parts))


def _tensor_item(key: tuple[str, tuple[int, ...]], tensor: Any, region: Region | None) -> SharedItem:
    itemsize, kind = DTYPES[dtype_name(tensor.dtype, key[0])]
    nbytes = tensor.numel() * itemsize
    memory = plain_memory(tensor)
    if memory is None or (nbytes and not _is_inside(memory, region)):
        # A tensor of a foreign class, or with other strides than the staged copies.
        return SharedItem(key, kind, nbytes, flat_bytes(tensor, key[0]).cpu().numpy().tobytes())
    if not nbytes or region is None:
        return SharedItem(key, kind, 0, b"")
    return SharedItem(key, kind, nbytes, memory.address - region.address)


def _is_inside(memory: Memory, region: Region | None) -> bool:
    if region is None:
        return False
    start = memory.address - region.address
    return start >= 0 and start + memory.nbytes <= region.nbytes


def _keys_of(leaf: Any, state: Any, path: Path) -> tuple[Any, ...] | None:
    """The keys on the path to a leaf. A path has them as texts, and a key may have the text of another one."""
    if not path:
        return () if state is leaf else None
    part = path[0]
    keys: Iterable[Any] = (part,)
    if isinstance(state, Mapping):
        others = (key for key in state if type(key) is not str and str(key) == part)
        keys = itertools.chain((part,) if part in state else (), others)
    elif not isinstance(state, list):
        return None
    for key in keys:
        found = _keys_of(leaf, state[key], path[1:])
        if found is not None:
            return (key, *found)
    return None


def _at(state: Any, keys: Iterable[Any]) -> Any:
    for key in keys:
        state = state[key]
    return state


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is list or kind is tuple:
        return _ATOMS.issuperset(map(type, value)) or all(map(_is_plain, value))
    return kind is dict and all(map(_is_plain, value)) and all(map(_is_plain, value.values()))


class _Values:
    """The part of a planner that `sources_of` needs for objects."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def resolve_data(self, item: Any) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(self._values[item.index.fqn], file)
        return file


# --- in the saver process -------------------------------------------------------------------------


class SharedSource:
    """Bytes in shared memory, or a tensor's bytes from elsewhere. They are not changed while it is in use."""

    # There may be tens of thousands of them.
    __slots__ = ("_memory", "key", "kind", "nbytes")

    key: ItemKey
    kind: Kind
    nbytes: int

    def __init__(self, key: ItemKey, kind: Kind, memory: Memory) -> None:
        self.key, self.kind, self.nbytes, self._memory = key, kind, memory.nbytes, memory

    def read(self, start: int, stop: int) -> Buffer:
        if stop - start < PACK_BELOW_BYTES and stop - start == self.nbytes:
            return self._memory.tobytes()
        return self._memory.array()[start:stop].data

    def memory(self) -> Memory | None:
        return self._memory


def save_shared(
    plan: SharedPlan,
    objects: Sequence[SharedObject],
    address: int,
    owner: Any,
    writer: CheckpointWriter,
    count: Callable[[int], None],
) -> None:
    """Save a state whose memory begins at `address`, which `owner` keeps alive.

    `count` is called with the bytes of each source when its write begins.
    """
    kept: dict[ItemKey, ItemSource] = {}

    def sources() -> Iterator[ItemSource]:
        blobs = _blobs(plan.objects, objects)
        for item in plan.items:
            source: ItemSource = next(blobs) if item.where is None else _source(item, address, owner)
            kept[source.key] = source
            count(source.nbytes)
            yield source

    try:
        writer.begin_alone()
        results = writer.write_sources(plan.indices, sources(), kept, plan.wrapped)
        writer.finish(plan.metadata, [results])
    except BaseException as error:
        writer.abandon(error)
        raise


def _blobs(items: Sequence[Any], objects: Sequence[SharedObject]) -> Iterator[ItemSource]:
    """The sources of objects, in order."""
    values = {item.index.fqn: each.value for item, each in zip(items, objects, strict=True) if each.serialised is None}
    plain = sources_of(SavePlan([item for item in items if item.index.fqn in values]), _Values(values), ())
    for item, each in zip(items, objects, strict=True):
        if each.serialised is None:
            yield next(plain)
        else:
            yield BlobSource(memoryview(each.serialised), item.index.fqn)


def _source(item: SharedItem, address: int, owner: Any) -> ItemSource:
    if isinstance(item.where, int):
        return SharedSource(item.key, item.kind, Memory(address + item.where, item.nbytes, owner))
    if item.kind == OPAQUE and item.key[1] is None:
        return BlobSource(memoryview(item.where or b""), item.key[0])
    return _BytesSource(item.key, item.kind, item.where or b"")


class _BytesSource:
    """The bytes of a tensor."""

    __slots__ = ("_data", "key", "kind", "nbytes")

    key: ItemKey
    kind: Kind
    nbytes: int

    def __init__(self, key: ItemKey, kind: Kind, data: bytes) -> None:
        self.key, self.kind, self.nbytes, self._data = key, kind, len(data), data

    def read(self, start: int, stop: int) -> Buffer:
        return memoryview(self._data)[start:stop]

    def memory(self) -> Memory | None:
        return None


# --- bases in both processes ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBase:
    """A `MemoryBase` for another process that maps the same memory."""

    directory: str
    files: tuple[DataFile, ...]
    chunks: Table
    transforms: tuple[str, ...]
    places: dict[ItemKey, Place]
    items: list[SharedItem]
    sparse: bool

    @classmethod
    def of(cls, base: MemoryBase, start: int, nbytes: int) -> SharedBase | None:
        """Describe a base whose tensors are in the `nbytes` from the address `start`; None if much of it is elsewhere."""
        items: list[SharedItem] = []
        left = _MAX_BASE_BYTES
        for key, source in base.sources.items():
            memory = source.memory()
            where = -1 if memory is None else memory.address - start
            if memory is not None and where >= 0 and where + memory.nbytes <= nbytes:
                items.append(SharedItem(key, OPAQUE, memory.nbytes, where))
                continue
            size = base.places[key].nbytes
            left -= size
            if left < 0:
                return None
            items.append(SharedItem(key, OPAQUE, size, bytes(memoryview(source.read(0, size)))))
        return cls(
            directory=base.directory,
            files=base.files,
            chunks=base.chunks,
            transforms=base.transforms,
            places=dict(base.places),
            items=items,
            sparse=base.sparse,
        )

    def base(self, address: int, owner: Any) -> MemoryBase:
        """The base in this process, where its memory begins at `address` and is kept alive by `owner`."""
        with collection_paused():
            sources: dict[ItemKey, Readable] = {item.key: _source(item, address, owner) for item in self.items}
        return MemoryBase(
            self.directory, self.files, self.chunks, self.transforms, self.places, sources, sparse=self.sparse
        )
