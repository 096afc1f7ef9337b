"""Carries out a load plan: finds the items of the plan, reads them in waves, and passes the values to the planner.

A tensor is read in place when its memory has the stored dtype and layout. Any other tensor (on a device, not contiguous, of
another dtype) is read through host memory, in waves of `_STAGING_BYTES`. Large tensors are read in pieces.
"""

from __future__ import annotations

import io
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from millrace.checkpoint.format.manifest import DTYPES, Manifest, Shard
from millrace.checkpoint.format.slices import box_runs, split_box
from millrace.checkpoint.state.tensors import (
    bytes_of,
    changing,
    check_blob,
    check_conversion,
    copy_bits,
    lacks_memory,
    overlaps_itself,
    plain_memory,
    torch_dtype,
)
from millrace.checkpoint.state.wrappers import WrapperSlot, decode_recipe, empty_leaf, is_wrapper, take_apart, type_name
from millrace.checkpoint.storage.fetching import ChunkFetcher, ItemRequest, whole_item
from millrace.errors import CorruptCheckpointError, StateMismatchError, UsageError
from millrace.runtime.pipeline import collection_paused, each_paused

_STAGING_BYTES = 128 << 20


def load_items(
    items: Sequence[Any], planner: Any, manifest: Manifest, fetcher: ChunkFetcher, trusted_types: Sequence[type]
) -> None:
    """Read the items of a load plan, and pass each value to the planner.

    Raises `CorruptCheckpointError`, `StateMismatchError`, `UnsupportedObjectError`, `UsageError`, and the errors of the
    storage.
    """
    for wave in planned_loads(items, planner, manifest, fetcher, trusted_types):
        fetcher.fetch([load.request for load in wave if load.request is not None])
        for load in wave:
            load.commit(trusted_types)


def planned_loads(
    items: Sequence[Any], planner: Any, manifest: Manifest, fetcher: ChunkFetcher, trusted_types: Sequence[type]
) -> Iterator[list[Load]]:
    """The loads of a plan, in waves with limited host memory. Reads only the recipes of wrapper tensors."""
    with collection_paused():
        index = _ItemIndex(manifest)
    recipes = _read_recipes(items, index, fetcher)
    return each_paused(_waves(items, planner, index, recipes, trusted_types))


def check_rank_has_all(items: Sequence[Any], planner: Any, metadata: Any) -> None:
    """Raise `StateMismatchError` if one rank's part of a save without collectives lacks values of a tensor to load."""
    stored: Counter[str] = Counter()
    for item in items:
        if item.type != LoadItemType.BYTE_IO:
            stored[item.dest_index.fqn] += math.prod(item.lengths)
    described = metadata.state_dict_metadata
    for key, value in getattr(planner, "state_dict", {}).items():
        if isinstance(described.get(key), TensorStorageMetadata):
            chunks = _create_chunk_list(value)
            wanted = sum(math.prod(chunk.sizes) for chunk in chunks)
            # A planner may leave a tensor out, though this part has values of it.
            is_left_out = not stored[key] and any(
                _overlap(chunk, part) for chunk in chunks for part in described[key].chunks
            )
            if stored[key] < wanted and not is_left_out:
                raise StateMismatchError(
                    f"{key!r}: this rank's part of the checkpoint has {stored[key]} of the {wanted} elements to load",
                    next_step="load with the ranks and the sharding of the save, which was made without collectives",
                )


def _overlap(one: Any, other: Any) -> bool:
    """Whether two boxes, with `offsets` and `sizes`, have an element in common."""
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(start < base + length and base < start + size for start, size, base, length in sides)


class _WrappedShard(NamedTuple):
    """A wrapper tensor or one shard of it: its box, the key of its recipe, and the keys of its plain tensors."""

    shard: Shard
    recipe: str
    leaves: tuple[str, ...]


class _ItemIndex:
    """Finds the item of a shard or blob by its key and offsets."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        # With plain tuples as keys: the hash of an index is computed in Python at every lookup.
        self._numbers: dict[tuple[str, Any], tuple[int, Shard | None, str]] = {}
        self._dtypes: dict[str, Any] = {}
        number = 0
        for key, dtype, _, shards, _ in self.manifest.tensors:
            for shard in shards:
                self._numbers[key, shard.offsets] = (number, shard, dtype)
                number += 1
        for key in self.manifest.blobs:
            self._numbers[key, None] = (number, None, "uint8")
            number += 1
        self._wrapped: dict[tuple[str, Any], _WrappedShard] = {
            (entry.key, shard.offsets): _WrappedShard(shard, *each)
            for entry, parts in self.manifest.wrapped
            for shard, each in zip(entry.shards, parts, strict=True)
        }
        leaves = {key for each in self._wrapped.values() for key in each.leaves}
        self._leaves = {entry.key: entry for entry in self.manifest.tensors if entry.key in leaves} if leaves else {}

    def dtype(self, name: str) -> Any:
        known = self._dtypes.get(name)
        return known if known is not None else self._dtypes.setdefault(name, torch_dtype(name))

    def find_wrapped(self, index: Any) -> _WrappedShard | None:
        """The wrapper tensor or shard with this index. None for other values."""
        return self._wrapped.get((index.fqn, index.offset)) if self._wrapped else None

    def find_whole(self, key: str) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of a plain tensor of a wrapper."""
        entry = self._leaves[key]
        return entry.shape, self.dtype(entry.dtype)

    def blob_memory(self, number: int) -> Any:
        """New memory for the bytes of an object's item."""
        return np.empty(int(self.manifest.items["nbytes"][number]), dtype=np.uint8)

    def blob_number(self, key: str) -> int:
        return self._numbers[key, None][0]

    def find(self, index: Any) -> tuple[int, Shard | None, str]:
        try:
            return self._numbers[index.fqn, index.offset]
        except KeyError as error:
            raise UsageError(
                f"{index.fqn!r} at {index.offset} is in the load plan but not in the checkpoint",
                next_step="check the load planner",
            ) from error


class Load(Protocol):
    """A part of a plan that is read in one go. It holds `staging_bytes` of host memory until `commit`."""

    @property
    def request(self) -> ItemRequest | None: ...

    @property
    def staging_bytes(self) -> int: ...

    @property
    def is_in_place(self) -> bool:
        """Whether the request fills the memory of the value that is loaded into."""
        ...

    def check(self, trusted_types: Sequence[type]) -> None:
        """Raise the error, if any, with which `commit` would fail. The request was carried out if this is an object."""
        ...

    def commit(self, trusted_types: Sequence[type]) -> None:
        """Pass the value to the planner."""
        ...


class BlobLoad:
    """An object."""

    is_in_place = False

    def __init__(self, item: Any, planner: Any, index: _ItemIndex) -> None:
        self._item, self._planner = item, planner
        number, _, _ = index.find(item.storage_index)
        self._data = index.blob_memory(number)
        self.staging_bytes = self._data.size
        self.request = whole_item(number, self._data) if self.staging_bytes else None

    def check(self, trusted_types: Sequence[type]) -> None:
        # The stock planner unpickles without restrictions, so check the object with the safe loader first.
        check_blob(self._data.data, self._item.storage_index.fqn, trusted_types)

    def commit(self, trusted_types: Sequence[type]) -> None:
        self.check(trusted_types)
        self._planner.load_bytes(self._item, io.BytesIO(self._data.tobytes()))


class _DirectLoad(NamedTuple):
    """A tensor that is read directly into its memory. There may be tens of thousands."""

    item: Any
    planner: Any
    tensor: Any
    request: ItemRequest | None
    staging_bytes: int = 0

    @property
    def is_in_place(self) -> bool:
        return not self.staging_bytes

    def check(self, trusted_types: Sequence[type]) -> None:
        pass

    def commit(self, trusted_types: Sequence[type]) -> None:
        self.planner.commit_tensor(self.item, self.tensor)


class _StagedLoad:
    """A piece of a tensor. `commit` copies `staged` to `piece`. The last piece of a tensor passes `tensor` to the
    planner.
    """

    is_in_place = False

    def __init__(
        self, item: Any, planner: Any, tensor: Any, piece: Any, staged: Any, request: ItemRequest | None
    ) -> None:
        self._item, self._planner, self._tensor = item, planner, tensor
        self._piece, self._staged = piece, staged
        self.request = request
        self.staging_bytes = staged.numel() * staged.element_size()

    def check(self, trusted_types: Sequence[type]) -> None:
        pass

    def commit(self, trusted_types: Sequence[type]) -> None:
        try:
            copy_bits(self._staged, self._piece)
        except Exception as error:
            # Torch raises `RuntimeError`, but a tensor subclass may raise any exception.
            raise StateMismatchError(
                f"{self._item.dest_index.fqn!r}: its tensor cannot be copied into ({error!s:.200})",
                next_step=f"load into a plain tensor of {self._staged.dtype}",
            ) from error
        if self._tensor is not None:
            self._planner.commit_tensor(self._item, self._tensor)


def _tensor_loads(item: Any, planner: Any, index: _ItemIndex) -> Iterable[Load]:
    number, shard, dtype_name = index.find(item.storage_index)
    if shard is None:
        raise UsageError(
            f"{item.storage_index.fqn!r} is an object in the checkpoint", next_step="load it into an object"
        )
    itemsize, _ = DTYPES[dtype_name]
    dtype = index.dtype(dtype_name)
    tensor, lengths = planner.resolve_tensor(item), tuple(item.lengths)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.shape != lengths:
        raise UsageError(
            f"{item.dest_index.fqn!r} has shape {tuple(tensor.shape)} instead of {lengths}, as in the plan",
            next_step="check the load planner",
        )
    memory = plain_memory(tensor) if tensor.dtype == dtype else None
    if memory is not None:
        runs = box_runs(shard.sizes, item.storage_offsets, lengths, itemsize)
        return (_DirectLoad(item, planner, tensor, None if runs is None else ItemRequest(number, runs, memory)),)
    if tensor.layout is not torch.strided:
        raise StateMismatchError(
            f"{item.dest_index.fqn!r} is a {tensor.layout} tensor, which cannot be loaded",
            next_step="load into a dense tensor",
        )
    if lacks_memory(tensor) or tensor._is_zerotensor():
        raise StateMismatchError(
            f"the memory of {item.dest_index.fqn!r} was freed or shrunk, or it never had any",
            next_step="load into a tensor with memory",
        )
    if not is_wrapper(tensor):
        _refuse_uncopyable(tensor, dtype, item.dest_index.fqn)
    return _staged_loads(item, planner, tensor, number, shard.sizes, dtype)


def _refuse_uncopyable(tensor: Any, stored: Any, key: str) -> None:
    """Raise `StateMismatchError` where a copy into the tensor would fail, or not leave the stored values in it.

    So an update fails before it changes any tensor. The class of a wrapper implements its own copy.
    """
    if overlaps_itself(tensor):
        raise StateMismatchError(
            f"{key!r}: its tensor has overlapping elements, so it cannot be copied into",
            next_step="load into a dense tensor without overlapping elements",
        )
    # Torch copies float32 into a quantized tensor, but not into a new one without its settings.
    if tensor.dtype == stored or (tensor.is_quantized and stored is torch.float32):
        return
    try:
        check_conversion(stored, tensor.dtype, tensor.device)
    except Exception as error:
        # Torch raises several types, and a warning may be an error.
        raise StateMismatchError(
            f"{key!r} is stored as {stored}, which cannot be copied into a tensor of {tensor.dtype} ({error!s:.200})",
            next_step=f"load into a tensor of {stored}",
        ) from error


def _staged_loads(
    item: Any, planner: Any, tensor: Any, number: int, sizes: Sequence[int], dtype: Any
) -> Iterator[Load]:
    # Some subclasses cannot be sliced.
    limit = sys.maxsize if is_wrapper(tensor) else _STAGING_BYTES
    pieces = list(split_box(item.lengths, dtype.itemsize, limit))
    for position, (offsets, lengths) in enumerate(pieces):
        staged = torch.empty(lengths, dtype=dtype)
        begin = [first + more for first, more in zip(item.storage_offsets, offsets, strict=True)]
        runs = box_runs(sizes, begin, lengths, dtype.itemsize)
        request = None if runs is None else ItemRequest(number, runs, bytes_of(staged).numpy())
        last = position == len(pieces) - 1
        piece = tensor
        if len(pieces) > 1:
            piece = tensor[tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))]
        yield _StagedLoad(item, planner, tensor if last else None, piece, staged, request)


class _WrapperLoad:
    """Reads the plain tensors of a wrapper tensor, and is the planner of these reads.

    It reads into the plain tensors of the target when the target has the same structure. Otherwise it reads into new
    tensors, builds a wrapper from them, and copies that as torch does.
    """

    def __init__(self, item: Any, planner: Any, stored: _WrappedShard, recipe: bytes, trusted: Sequence[type]) -> None:
        self._item, self._planner, self._stored = item, planner, stored
        key = item.dest_index.fqn
        self._target = planner.resolve_tensor(item)
        ours, tensors = take_apart(self._target, stored.recipe) if is_wrapper(self._target) else (None, {})
        self._wrapper = decode_recipe(recipe, key, trusted, ours.kinds() if ours else ())
        self._strides = self._wrapper.leaves(stored.recipe)
        if self._strides.keys() != set(stored.leaves) or self._wrapper.size != stored.shard.sizes:
            raise CorruptCheckpointError(f"the recipe of {key!r} describes another tensor than the manifest")
        whole = not any(item.storage_offsets) and tuple(item.lengths) == stored.shard.sizes
        self._in_place = whole and ours is not None and ours.fits(self._wrapper)
        self._tensors: dict[str, Any] = tensors
        self._left = len(stored.leaves)

    def loads(self, index: _ItemIndex) -> Iterator[Load]:
        items = [(key, *index.find_whole(key)) for key in self._stored.leaves]
        if any(
            self._tensors[key].shape != shape or self._tensors[key].dtype != dtype
            for key, shape, dtype in items
            if self._in_place
        ):
            self._in_place = False
        for key, shape, dtype in items:
            if not self._in_place:
                self._tensors[key] = empty_leaf(shape, dtype, self._strides[key])
            place = MetadataIndex(key, (0,) * len(shape))
            part = ReadItem(LoadItemType.TENSOR, place, place.offset, place, place.offset, torch.Size(shape))
            for load in _tensor_loads(part, self, index):
                # New tensors are held until they are copied.
                held = 0 if self._in_place else self._tensors[key].nbytes
                yield load._replace(staging_bytes=held) if isinstance(load, _DirectLoad) else load

    def resolve_tensor(self, part: Any) -> Any:
        return self._tensors[part.dest_index.fqn]

    def commit_tensor(self, part: Any, tensor: Any) -> None:
        self._left -= 1
        if self._left:
            return
        if not self._in_place:
            made = self._wrapper.build(self._tensors, self._stored.recipe)
            self._tensors = {}
            if isinstance(self._target, WrapperSlot):
                self._target.value = made
            else:
                self._copy(made)
        self._planner.commit_tensor(self._item, self._target)

    def _copy(self, made: Any) -> None:
        item = self._item
        try:
            with changing(self._target):
                self._target.detach().copy_(narrow_tensor_by_index(made, item.storage_offsets, item.lengths))
        except Exception as error:
            # The class of the target implements the copy, and may raise any exception.
            raise StateMismatchError(
                f"{item.dest_index.fqn!r} of the checkpoint is a {type_name(self._wrapper.kind)} and cannot be copied into "
                f"a {type_name(type(self._target))} ({type(error).__name__}: {error!s:.200})",
                next_step="build the model with the settings of the saved model",
            ) from error


def _read_recipes(items: Sequence[Any], index: _ItemIndex, fetcher: ChunkFetcher) -> Mapping[str, bytes]:
    """The recipes of all wrapper tensors of a plan, by key."""
    found = (index.find_wrapped(item.storage_index) for item in items if item.type != LoadItemType.BYTE_IO)
    numbers = {each.recipe: index.blob_number(each.recipe) for each in found if each is not None}
    outs = {key: index.blob_memory(number) for key, number in numbers.items()}
    fetcher.fetch([whole_item(numbers[key], out) for key, out in outs.items() if out.size])
    return {key: out.tobytes() for key, out in outs.items()}


def _waves(
    items: Sequence[Any],
    planner: Any,
    index: _ItemIndex,
    recipes: Mapping[str, bytes],
    trusted_types: Sequence[type],
) -> Iterator[list[Load]]:
    """The loads of a plan in groups with limited staging memory. A large object is a group of its own."""
    wave: list[Load] = []
    staged = 0
    for item in items:
        loads: Iterable[Load]
        if item.type == LoadItemType.BYTE_IO:
            loads = (BlobLoad(item, planner, index),)
        elif recipes and (wrapped := index.find_wrapped(item.storage_index)) is not None:
            loads = _WrapperLoad(item, planner, wrapped, recipes[wrapped.recipe], trusted_types).loads(index)
        else:
            loads = _tensor_loads(item, planner, index)
        for load in loads:
            wave.append(load)
            staged += load.staging_bytes
            if staged >= _STAGING_BYTES:
                yield wave
                wave, staged = [], 0
    if wave:
        yield wave
