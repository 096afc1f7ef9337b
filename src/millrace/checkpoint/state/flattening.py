"""Flattens nested state dicts in one pass, by the rules of torch's own planners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful

from millrace.errors import UsageError

Path = tuple[str | int, ...]

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of whole tensors with ordinary memory. Other types may be shards, or store their values differently."""


def flatten(state: Mapping[Any, Any], *, as_torch_2_3: bool = False) -> tuple[dict[str, Any], dict[str, Path]]:
    """The leaves of a state dict and their paths, by key. A key is the parts of the path, joined by dots.

    A mapping is never a leaf. A list is a leaf if it contains no tensor and no mapping. Any other value is a leaf. In
    checkpoints of torch up to 2.3, a mapping without tensors was a leaf as well (`as_torch_2_3`).

    Raises `UsageError` when two leaves have the same key, and for a state dict that contains itself.
    """
    values: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    try:
        _flatten_into(values, paths, _members(state), (), "", as_torch_2_3)
    except RecursionError as error:
        raise nested_too_deeply() from error
    return values, paths


def state_dict_of(key: str, value: Any) -> Any:
    """The `state_dict()` of an object. Raises `UsageError`, naming `key`, if it exceeds the recursion limit."""
    try:
        return value.state_dict()
    except RecursionError as error:
        raise UsageError(
            f"{key!r} is a {type(value).__name__} whose state_dict() exceeds the recursion limit",
            next_step="correct its state_dict()",
        ) from error


def nested_too_deeply() -> UsageError:
    """The error for a state dict that exceeds the recursion limit."""
    return UsageError("the state dict is nested too deeply, or contains itself", next_step="make it flatter")


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


def refuse_nested_objects(values: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a leaf with a `state_dict()` (an optimizer, for example).

    Only the direct members of a state dict are replaced by their `state_dict()` before flattening.
    """
    kinds = {
        kind for kind in set(map(type, values.values())) if kind not in PLAIN_TENSORS and issubclass(kind, Stateful)
    }
    for key, value in values.items() if kinds else ():
        if type(value) in kinds and not isinstance(value, torch.Tensor):
            raise nested_object(key, value)


def nested_object(key: str, value: Any) -> UsageError:
    """The error for an object with a `state_dict()` that is not a direct member of the state dict."""
    return UsageError(
        f"{key!r} is a {type(value).__name__} inside another value, where its state_dict() is not used",
        next_step="make it a direct member of the state dict, as {'optimizer': optimizer}",
    )


def sharded_in_old_way(values: Mapping[str, Any]) -> bool:
    """Whether a value is a `ShardedTensor`, which may contain another one."""
    return any(issubclass(kind, ShardedTensor) for kind in set(map(type, values.values())))


def without_values(values: Mapping[str, Any]) -> bool:
    """Whether a value is a tensor on the meta device. Load planners replace it by one with memory."""
    return any(
        value.is_meta if isinstance(value, torch.Tensor) else type(value) is tuple and _meta_within(value)
        for value in values.values()
    )


def _meta_within(values: tuple[Any, ...]) -> bool:
    return any(
        member.is_meta if isinstance(member, torch.Tensor) else isinstance(member, tuple) and _meta_within(member)
        for member in values
    )
