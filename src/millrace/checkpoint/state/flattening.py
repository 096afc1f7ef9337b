"""A nested state dict as one flat one, by the rules of torch's own planners: in one pass, and cheap for each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from millrace.errors import UsageError

Path = tuple[str | int, ...]

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that one process has all of. Another type may be a shard, or hold its values in its own way."""


def flatten(state: Mapping[Any, Any], *, as_torch_2_3: bool = False) -> tuple[dict[str, Any], dict[str, Path]]:
    """The leaves of a state dict and the path to each, by their keys: the path's parts joined by dots.

    A mapping is never a leaf, a list only when no tensor or mapping lies in it; everything else is one. Torch up to 2.3
    also took a mapping without a tensor in it for a leaf; checkpoints of that time need it.

    Raises `UsageError` when two leaves come to the same key, or when there is no end to the nesting.
    """
    values: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    try:
        _flatten_into(values, paths, _members(state), (), "", as_torch_2_3)
    except RecursionError as error:
        raise UsageError(
            "the state dict is nested too deeply, or contains itself", next_step="make it flatter"
        ) from error
    return values, paths


def _flatten_into(
    values: dict[str, Any],
    paths: dict[str, Path],
    members: Iterable[tuple[str | int, Any]],
    path: Path,
    prefix: str,
    as_torch_2_3: bool,
) -> None:
    for part, value in members:
        key = f"{prefix}{part}"
        if type(value) not in PLAIN_TENSORS and not _is_leaf(value, as_torch_2_3):
            _flatten_into(values, paths, _members(value), (*path, part), f"{key}.", as_torch_2_3)
            continue
        if key in values:
            raise UsageError(
                f"two values of the state dict have the flattened key {key!r}", next_step="rename one of them"
            )
        values[key] = value
        paths[key] = (*path, part)


def _members(container: Any) -> Iterable[tuple[str | int, Any]]:
    if isinstance(container, Mapping):
        return zip(map(str, container), container.values(), strict=True)
    return enumerate(container)


def _is_leaf(value: Any, as_torch_2_3: bool) -> bool:
    if isinstance(value, Mapping):
        if not as_torch_2_3:
            return False
        members: Iterable[Any] = value.values()
    elif isinstance(value, list):
        members = value
    else:
        return True
    return not any(
        isinstance(member, torch.Tensor) or (isinstance(member, Mapping | list) and not _is_leaf(member, as_torch_2_3))
        for member in members
    )


def sharded_in_old_way(values: Mapping[str, Any]) -> bool:
    """Whether some of the values are of torch's older kind of sharded tensor, which may lie in one another."""
    return any(issubclass(kind, ShardedTensor) for kind in set(map(type, values.values())))


def without_values(values: Mapping[str, Any]) -> bool:
    """Whether some of the values are tensors on the meta device, which load planners give memory first."""
    return any(
        value.is_meta if isinstance(value, torch.Tensor) else type(value) is tuple and _meta_within(value)
        for value in values.values()
    )


def _meta_within(values: tuple[Any, ...]) -> bool:
    return any(
        member.is_meta if isinstance(member, torch.Tensor) else isinstance(member, tuple) and _meta_within(member)
        for member in values
    )
