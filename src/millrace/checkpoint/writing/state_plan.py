"""Plans the save of a staged state for the saver process, in the training process: `PlannedState`."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan

from millrace.checkpoint.codec.chunks import OPAQUE
from millrace.checkpoint.format.manifest import DTYPES
from millrace.checkpoint.state.arena import Region
from millrace.checkpoint.state.flattening import Path
from millrace.checkpoint.state.tensors import dtype_name, flat_bytes, plain_memory
from millrace.checkpoint.state.wrappers import encode_recipe, inner_key, is_wrapper, take_apart
from millrace.checkpoint.writing.bases import ItemKey
from millrace.checkpoint.writing.packing import WrapperParts
from millrace.checkpoint.writing.plans import describe, key_of, sources_of
from millrace.checkpoint.writing.shared_plan import SharedItem, SharedPlan
from millrace.runtime.memory import Memory
from millrace.runtime.pipeline import collection_paused

# Plain values with the same pickle are equal bit for bit, and so `torch.save` writes the same of them.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})
_MAX_MEMBERS, _MAX_TEXT = 100, 1000


class RankPlan(NamedTuple):
    """This rank's items of a save: torch's planner, its plan, and the metadata of these items."""

    planner: Any
    plan: Any
    metadata: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedState:
    """What the saves of one structure need in the training process: the write items of the objects, and the keys on the
    paths to them in the state. For one thread at a time.
    """

    objects: list[Any]
    paths: list[tuple[Any, ...]]
    # The small plain values of the last save, as `torch.save` wrote them, by their pickles. Most are equal in every save.
    _blobs: dict[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def of(
        cls, planned: RankPlan, state: dict[str, Any], region: Region | None, trusted_types: Sequence[type]
    ) -> tuple[PlannedState, SharedPlan]:
        """Plan the save of a staged state, whose tensors are in `region`, in this process and for another one.

        Raises as a save does for values that a checkpoint cannot store.
        """
        planner, plan, metadata = planned
        keys: list[ItemKey] = []
        items: list[SharedItem] = []
        objects: list[Any] = []
        wrapped: dict[int, WrapperParts] = {}
        with collection_paused():
            for number, item in enumerate(plan.items):
                key = key_of(item)
                keys.append(key)
                if key[1] is None:
                    objects.append(item)
                    items.append(SharedItem(key, OPAQUE, 0, None))
                    continue
                value = planner.resolve_data(item)
                if is_wrapper(value):
                    wrapped[number] = _add_wrapper(items, item, value, region, trusted_types)
                else:
                    items.append(_tensor_item(key, value, region))
            described = describe(metadata, {keys[number][0] for number in wrapped})
        paths: list[tuple[Any, ...]] = []
        for item in objects:
            path = planner.mappings[item.index.fqn]
            found = _keys_of(planner.state_dict[item.index.fqn], state, path)
            paths.append(path if found is None else found)
        shared = SharedPlan(keys=keys, items=items, wrapped=wrapped, described=described)
        return cls(objects=objects, paths=paths), shared

    def objects_of(self, state: Mapping[str, Any], trusted_types: Sequence[type]) -> list[bytes]:
        """The values of a state with this structure that are not tensors, as `torch.save` writes them.

        Raises `UnsupportedObjectError`.
        """
        known = dict(self._blobs)
        self._blobs.clear()
        found = []
        for item, path in zip(self.objects, self.paths, strict=True):
            value = _at(state, path)
            plain = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if _is_small(value) else None
            data = None if plain is None else known.get(plain)
            if data is None:
                (source,) = sources_of(SavePlan([item]), _Values({item.index.fqn: value}), trusted_types)
                data = bytes(memoryview(source.read(0, source.nbytes)))
            if plain is not None:
                known[plain] = self._blobs[plain] = data
            found.append(data)
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


def _tensor_item(key: ItemKey, tensor: Any, region: Region | None) -> SharedItem:
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


def _is_small(value: Any) -> bool:
    """Whether a value consists of a few plain values, so that comparing pickles is quick and exact."""
    left = [value]
    for _ in range(_MAX_MEMBERS):
        if not left:
            return True
        member = left.pop()
        kind = type(member)
        if kind is list or kind is tuple:
            left += member[: _MAX_MEMBERS + 1]
        elif kind is dict:
            left += itertools.chain.from_iterable(itertools.islice(member.items(), _MAX_MEMBERS + 1))
        elif kind not in _ATOMS or ((kind is str or kind is bytes) and len(member) > _MAX_TEXT):
            return False
    return not left


class _Values:
    """The part of a planner that `sources_of` needs for objects."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def resolve_data(self, item: Any) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(self._values[item.index.fqn], file)
        return file
