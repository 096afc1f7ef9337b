"""Wrapper tensors: subclasses of `torch.Tensor` that store their values in inner tensors (quantized weights, for example).

They implement torch's protocol of `__tensor_flatten__` and `__tensor_unflatten__`. A checkpoint contains the innermost plain
tensors, each with its own key, and a *recipe*: an object without classes that describes how to build the wrapper. The class
is stored only by name. A reader takes the class from the load target, from `trusted_types`, or from torch's safe globals. It
never imports a class.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from millrace.checkpoint.format.manifest import MAX_RECIPE_BYTES
from millrace.checkpoint.state.flattening import PLAIN_TENSORS
from millrace.checkpoint.state.tensors import ADMIT, check_blob
from millrace.errors import CorruptCheckpointError, MillraceError, UnsupportedObjectError

# Tensors with inner tensors that a planner shards or refuses, or that stand for a plain tensor.
_NOT_WRAPPERS = (DTensor, ShardedTensor, NestedTensor, AsyncCollectiveTensor)
_MAX_DEPTH = 16


def is_wrapper(value: Any) -> bool:
    """Whether a value is a tensor that stores its values in inner tensors."""
    return (
        type(value) not in PLAIN_TENSORS
        and is_traceable_wrapper_subclass(value)
        and not isinstance(value, _NOT_WRAPPERS)
    )


def type_name(kind: type) -> str:
    """`package.module.Class`."""
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True, slots=True)
class Leaf:
    """An innermost plain tensor of a wrapper."""

    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The structure of a wrapper tensor: its class, the result of `__tensor_flatten__`, and its parts by attribute name."""

    kind: type
    size: tuple[int, ...]
    stride: tuple[int, ...]
    context: Any
    parts: Mapping[str, Wrapper | Leaf]

    def leaves(self, prefix: str) -> dict[str, Leaf]:
        """The plain tensors by key: `prefix` and the attribute names that lead to the tensor, joined by dots."""
        found: dict[str, Leaf] = {}
        for name, part in self.parts.items():
            key = f"{prefix}.{name}"
            found |= {key: part} if isinstance(part, Leaf) else part.leaves(key)
        return found

    def build(self, tensors: Mapping[str, Any], prefix: str) -> Any:
        """Build the wrapper from `tensors` with the keys of `leaves(prefix)`. Raises `UnsupportedObjectError` on failure."""
        inner = {
            name: tensors[key] if isinstance(part, Leaf) else part.build(tensors, key)
            for name, part in self.parts.items()
            for key in (f"{prefix}.{name}",)
        }
        try:
            kind: Any = self.kind
            made = kind.__tensor_unflatten__(inner, self.context, torch.Size(self.size), self.stride)
            if isinstance(made, kind) and tuple(made.shape) == self.size:
                return made
            problem = "the result has another class or shape"
        except Exception as error:  # noqa: BLE001 - foreign code may raise any exception
            problem = f"{type(error).__name__}: {error!s:.200}"
        raise UnsupportedObjectError(
            f"{prefix!r} cannot be made a {type_name(self.kind)} again ({problem})",
            next_step="use the version of its library that saved it",
        )

    def fits(self, other: Wrapper) -> bool:
        """Whether a tensor of one structure can load the parts of the other in place: only the strides may differ."""
        if (self.kind, self.size, list(self.parts)) != (other.kind, other.size, list(other.parts)):
            return False
        try:
            if not bool(self.context == other.context):
                return False
        except Exception:  # noqa: BLE001 - a foreign `==` may raise any exception; then they differ
            return False
        pairs = zip(self.parts.values(), other.parts.values(), strict=True)
        return all(
            isinstance(theirs, Leaf) if isinstance(ours, Leaf) else isinstance(theirs, Wrapper) and ours.fits(theirs)
            for ours, theirs in pairs
        )

    def kinds(self) -> set[type]:
        """Its class and the classes of its inner wrappers."""
        return {self.kind}.union(*(part.kinds() for part in self.parts.values() if isinstance(part, Wrapper)))


def take_apart(tensor: Any, key: str) -> tuple[Wrapper, dict[str, Any]]:
    """The structure of a wrapper, and its plain tensors by key. Raises `UnsupportedObjectError`, naming `key`."""
    tensors: dict[str, Any] = {}
    return _take_apart(tensor, key, tensors, key, 0), tensors


def _take_apart(tensor: Any, prefix: str, tensors: dict[str, Any], key: str, depth: int) -> Wrapper:
    kind = type(tensor)
    try:
        names, context = tensor.__tensor_flatten__()
        inner = {str(name): getattr(tensor, name) for name in names}
        size, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    except Exception as error:
        # Foreign code may raise any exception.
        raise UnsupportedObjectError(
            f"{key!r} is a {type_name(kind)}, which cannot be taken apart ({type(error).__name__}: {error!s:.200})",
            next_step="make it a plain tensor before saving",
        ) from error
    parts: dict[str, Wrapper | Leaf] = {}
    for name, value in inner.items():
        if isinstance(value, AsyncCollectiveTensor):
            value = value.trigger_wait()
        if type(value) in PLAIN_TENSORS and not value.is_nested:
            parts[name] = Leaf(tuple(value.stride()) if value.layout is torch.strided else ())
            tensors[f"{prefix}.{name}"] = value
        elif is_wrapper(value) and depth < _MAX_DEPTH:
            parts[name] = _take_apart(value, f"{prefix}.{name}", tensors, key, depth + 1)
        else:
            raise UnsupportedObjectError(
                f"{key!r} is a {type_name(kind)} with a {type(value).__name__} in it, which cannot be stored",
                next_step="make it a plain tensor before saving",
            )
    return Wrapper(kind, size, stride, context, parts)


# --- recipes ----------------------------------------------------------------------------------------------


def encode_recipe(wrapper: Wrapper, key: str, trusted_types: Sequence[type]) -> memoryview:
    """The recipe in the format of `torch.save`. Raises `UnsupportedObjectError` if the safe loader refuses its context."""
    file = io.BytesIO()
    try:
        torch.save(_plain(wrapper), file)
    except Exception as error:
        # The object may raise any exception.
        raise UnsupportedObjectError(
            f"{key!r} is a {type_name(wrapper.kind)} whose settings cannot be pickled "
            f"({type(error).__name__}: {error!s:.200})",
            next_step="make it a plain tensor before saving",
        ) from error
    data = file.getbuffer()
    if len(data) > MAX_RECIPE_BYTES:
        raise UnsupportedObjectError(
            f"{key!r} is a {type_name(wrapper.kind)} with settings of {len(data)} bytes; the limit is {MAX_RECIPE_BYTES}",
            next_step="store large settings as inner tensors",
        )
    check_blob(data, key, trusted_types)
    return data


def decode_recipe(data: bytes | memoryview, key: str, trusted_types: Sequence[type], kinds: Iterable[type]) -> Wrapper:
    """The inverse of `encode_recipe`. Accepts classes of `kinds` (the load target), `trusted_types`, and torch's safe
    globals.

    Raises `UnsupportedObjectError` for other classes, `CorruptCheckpointError` for a malformed recipe.
    """
    known: dict[str, type] = {}
    for each in (*torch.serialization.get_safe_globals(), *trusted_types, *kinds):
        kind = each[0] if isinstance(each, tuple) else each
        if isinstance(kind, type) and issubclass(kind, torch.Tensor):
            known[type_name(kind)] = kind
    recipe = check_blob(data, key, [*trusted_types, *kinds])
    try:
        return _wrapper(recipe, known, key, 0)
    except MillraceError:
        raise
    except Exception as error:
        # The recipe may contain any value that the safe loader accepts.
        raise CorruptCheckpointError(f"the recipe of {key!r} is malformed ({type(error).__name__})") from error


def _plain(part: Wrapper | Leaf) -> dict[str, Any]:
    if isinstance(part, Leaf):
        return {"stride": part.stride}
    return {
        "type": type_name(part.kind),
        "size": part.size,
        "stride": part.stride,
        "context": part.context,
        "parts": {name: _plain(each) for name, each in part.parts.items()},
    }


def _wrapper(recipe: Any, known: Mapping[str, type], key: str, depth: int) -> Wrapper:
    name = str(recipe["type"])
    kind = known.get(name)
    if kind is None or depth > _MAX_DEPTH or not hasattr(kind, "__tensor_unflatten__"):
        raise UnsupportedObjectError(
            f"{key!r} is a {name:.200}, a class that is not trusted",
            next_step=ADMIT,
        )
    return Wrapper(
        kind,
        tuple(map(int, recipe["size"])),
        tuple(map(int, recipe["stride"])),
        recipe["context"],
        {
            str(name): _wrapper(part, known, key, depth + 1)
            if "type" in part
            else Leaf(tuple(map(int, part["stride"])))
            for name, part in recipe["parts"].items()
        },
    )


def empty_leaf(shape: Sequence[int], dtype: Any, leaf: Leaf) -> Any:
    """A new plain tensor, with the strides of `leaf` if they are a permutation of dense ones."""
    if len(leaf.stride) == len(shape):
        order = sorted(range(len(shape)), key=lambda dim: -leaf.stride[dim])
        dense = torch.empty([shape[dim] for dim in order], dtype=dtype)
        tensor = dense.permute([order.index(dim) for dim in range(len(shape))])
        if tensor.stride() == leaf.stride:
            return tensor
    return torch.empty(tuple(shape), dtype=dtype)


# --- in a plan --------------------------------------------------------------------------------------------


def inner_key(key: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """The prefix of the keys of recipe and parts: the key of the wrapper, with offsets for one of several shards."""
    if tuple(sizes) == tuple(shape) or not math.prod(shape):
        return key
    return f"{key}.[{','.join(map(str, offsets))}]"


class WrapperSlot:
    """A placeholder in a state dict for a wrapper tensor that the reader builds. `value` is that tensor after the read."""

    def __init__(self, size: Any) -> None:
        self.shape = torch.Size(size)
        self.value: Any = None

    def __create_chunk_list__(self) -> list[Any]:
        return [ChunkStorageMetadata(torch.Size([0] * len(self.shape)), self.shape)]
