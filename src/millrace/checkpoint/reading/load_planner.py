"""Plans loads as torch's `DefaultLoadPlanner` does, in a fraction of its time: `CheckpointLoadPlanner`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.nn.parameter import is_lazy

from millrace.checkpoint.state.flattening import (
    PLAIN_TENSORS,
    flatten,
    refuse_nested_objects,
    sharded_in_old_way,
    without_values,
)
from millrace.checkpoint.state.wrappers import WrapperSlot
from millrace.errors import MissingKeyError, StateMismatchError, UsageError
from millrace.figures import listed
from millrace.runtime.pipeline import collection_paused

_NAMED = 5


class CheckpointLoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """Replaces torch's `DefaultLoadPlanner`, and is several times as fast when a state dict has many tensors:
    `dcp.load(state, storage_reader=..., planner=CheckpointLoadPlanner())`.

    It has the same arguments and plans, works with every storage reader, and has the same methods to override. It reports
    all mismatches at once, before the first read: `MissingKeyError` for keys that are not in the checkpoint (without
    `allow_partial_load`), `StateMismatchError` for other shapes and kinds. An object with a key that is not text (the
    optimizer state of a parameter number, for example) is loaded to that key. Torch adds a second key of text.
    """

    way_out = "name the keys as they were saved, or pass allow_partial_load=True to leave these as they are"
    """The next step of `MissingKeyError`."""

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        # The keys of each mapping by their text. Mappings are identified by `id`.
        self._keys: dict[int, dict[str, list[Any]]] = {}
        if not self.flatten_state_dict:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        with collection_paused():
            values, paths = flatten(state_dict)
            refuse_nested_objects(values)
        empty = without_values(values)
        if empty and not torch.distributed.is_initialized():
            raise UsageError(
                "the state dict has tensors on the meta device, and there is no process group with a device for them",
                next_step="give them memory (module.to_empty(device=...)), or call init_process_group first",
            )
        # Torch replaces such tensors in the state dict itself.
        if empty or (self.flatten_sharded_tensors and sharded_in_old_way(values)):
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = values, paths
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> Any:
        if self.metadata is None:
            raise UsageError(
                "the load planner has no metadata", next_step="call set_up_planner first, as dcp.load does"
            )
        described: Mapping[str, Any] = self.metadata.state_dict_metadata
        with collection_paused():
            if self.flatten_state_dict:
                self._adapt_to_torch_2_3(described)
            _check(self.state_dict, described, self.allow_partial_load, self.way_out)
            return LoadPlan(_read_items(self.state_dict, described))

    def check_objects(self, read_items: Iterable[Any]) -> None:
        """Raise `UsageError` if the place of an object in the state cannot be set, before anything is changed."""
        for item in read_items if self.flatten_state_dict else ():
            key = item.dest_index.fqn
            place = self._place(self.mappings[key]) if item.type == LoadItemType.BYTE_IO else None
            if place is not None:
                container, last = place
                try:
                    container[last] = container[last]
                except TypeError as error:
                    raise _cannot_be_set(key, error) from error

    def load_bytes(self, read_item: Any, value: Any) -> None:
        place = self._place(self.mappings[read_item.dest_index.fqn]) if self.flatten_state_dict else None
        try:
            if place is None:
                super().load_bytes(read_item, value)
            else:
                container, key = place
                container[key] = torch.load(value, weights_only=False)
        except TypeError as error:
            raise _cannot_be_set(read_item.dest_index.fqn, error) from error

    def lookup_tensor(self, index: Any) -> Any:
        value = self.state_dict.get(index.fqn)
        if type(value) in PLAIN_TENSORS and index.offset is not None and not any(index.offset):
            return value
        if isinstance(value, WrapperSlot):
            return value
        return super().lookup_tensor(index)

    def transform_tensor(self, read_item: Any, tensor: Any) -> Any:
        if tensor.shape == read_item.lengths:
            return tensor
        return super().transform_tensor(read_item, tensor)

    def _place(self, path: Sequence[str | int]) -> tuple[Any, Any] | None:
        """The container and key at the end of a path, which has keys as text. None if the state lacks it."""
        return self._place_in(self.original_state_dict, path)

    def _place_in(self, container: Any, path: Sequence[str | int]) -> tuple[Any, Any] | None:
        part, rest = path[0], path[1:]
        keys: Sequence[Any] = (part,)
        if isinstance(container, Mapping):
            # 1 and "1" have the same text: the one that the rest of the path fits counts.
            known = self._keys.get(id(container))
            if known is None:
                known = self._keys[id(container)] = {}
                for key in container:
                    known.setdefault(str(key), []).append(key)
            keys = known.get(str(part), ())
        elif not isinstance(container, list) or not isinstance(part, int) or part >= len(container):
            return None
        if not rest:
            return (container, keys[0]) if keys else None
        for key in keys:
            found = self._place_in(container[key], rest)
            if found is not None:
                return found
        return None

    def _adapt_to_torch_2_3(self, described: Mapping[str, Any]) -> None:
        """Use the keys of torch up to 2.3 if the checkpoint contains them."""
        unknown = described.keys() - self.state_dict.keys()
        if unknown:
            values, paths = flatten(self.original_state_dict, as_torch_2_3=True)
            if not unknown.isdisjoint(values):
                self.state_dict, self.mappings = values, paths


def _cannot_be_set(key: str, error: TypeError) -> UsageError:
    return UsageError(
        f"{key!r} cannot be set in the state ({error!s:.200})", next_step="give dicts and lists, which can be changed"
    )


def _check(state: Mapping[str, Any], described: Mapping[str, Any], partial: bool, way_out: str) -> None:
    """Raise `MissingKeyError` or `StateMismatchError` with all missing or different keys."""
    missing = [] if partial else [key for key in state if key not in described]
    if missing:
        first = f", the first one is {next(iter(described))!r}" if described else ""
        raise _naming(
            missing,
            MissingKeyError(
                f"the checkpoint lacks {len(missing)} of {len(state)} keys: "
                f"{listed([repr(key) for key in missing], _NAMED)} (it has {len(described)}{first})",
                next_step=way_out,
            ),
        )
    differing = {
        key: problem for key, value in state.items() if (problem := _mismatch(value, described.get(key))) is not None
    }
    if differing:
        raise _naming(
            differing,
            StateMismatchError(
                f"the checkpoint does not fit {len(differing)} of {len(state)} keys: "
                + listed([f"{key!r} {problem}" for key, problem in differing.items()], _NAMED),
                next_step="build the state dict with the settings of the saved model",
            ),
        )


def _naming(keys: Iterable[str], error: StateMismatchError) -> StateMismatchError:
    error.keys = tuple(keys)
    return error


def _mismatch(value: Any, described: Any) -> str | None:
    if not isinstance(described, TensorStorageMetadata):
        return None
    if is_lazy(value):
        return (
            f"has shape {tuple(described.size)} in the checkpoint, and none yet in the state: run its lazy module once"
        )
    if isinstance(value, torch.Tensor):
        if value.shape == described.size:
            return None
        return f"has shape {tuple(described.size)} in the checkpoint and {tuple(value.shape)} in the state"
    if hasattr(value, "__create_chunk_list__"):
        return None
    return f"is a tensor of shape {tuple(described.size)} in the checkpoint and a {type(value).__name__} in the state"


def _read_items(state: Mapping[str, Any], described: Mapping[str, Any]) -> list[Any]:
    items: list[Any] = []
    for key, value in state.items():
        saved = described.get(key)
        if saved is None:
            continue
        if type(value) in PLAIN_TENSORS and type(saved) is TensorStorageMetadata and len(saved.chunks) == 1:
            chunk, size = saved.chunks[0], saved.size
            offsets = chunk.offsets
            if chunk.sizes == size and not any(offsets):
                if 0 not in size:
                    index = MetadataIndex(key, offsets, 0)
                    items.append(ReadItem(LoadItemType.TENSOR, index, offsets, index, offsets, size))
                continue
        # Shards, objects, and tensors saved in parts.
        items += create_default_local_load_plan({key: value}, Metadata({key: saved})).items
    return items
