"""Converts between torch and the format: element types, flat bytes of tensors, metadata. Checks stored objects."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from millrace.checkpoint.format.manifest import DTYPES, Manifest, Properties, Shard, TensorEntry
from millrace.checkpoint.state.flattening import PLAIN_TENSORS
from millrace.errors import CorruptCheckpointError, UnsupportedObjectError
from millrace.runtime import forks
from millrace.runtime.memory import Memory

# `torch.serialization.safe_globals` changes the state of the process, so only one thread at a time may use it.
_SAFE_GLOBALS_LOCK = forks.PerProcess(lambda _: threading.RLock())
_NAMES = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The refused class in the error message of torch's safe loader.
# The code in a pickle of an integer of more than 255 bytes.
_LONG_INTEGER = re.compile(rf"Unsupported operand {pickle.LONG4[0]}\b")
REFUSED = re.compile(r"GLOBAL ([\w.]{1,200})")
ADMIT = (
    "import the library that defines it, and admit the class with trusted_types=[...], or --trust on the command line"
)
"""The next step for a class that is not trusted."""
NUMPY = (
    "store numbers as value.item() and arrays as torch.from_numpy(array), or admit the parts of its pickle with "
    "torch.serialization.add_safe_globals([...])"
)
"""The same for an object of NumPy. Its pickle calls functions, which `trusted_types` does not take."""
# Members of all lists of a state dict.
_MAX_LIST_MEMBERS = 1 << 24


def _name(value: Any) -> str:
    """`torch.float32` -> `float32`, the same for layouts and memory formats."""
    return str(value).removeprefix("torch.")


def dtype_name(dtype: Any, key: str) -> str:
    """The name of a torch dtype in the manifest. Raises `UnsupportedObjectError`, naming `key`, for an unknown dtype."""
    name = _NAMES.get(dtype)
    if name is None:
        raise UnsupportedObjectError(
            f"{key!r} is a tensor of {dtype}, which a checkpoint cannot store",
            next_step="convert it to an ordinary dtype before saving",
        )
    return name


def flat_bytes(tensor: Any, key: str) -> Any:
    """The values in row-major order as a 1-D uint8 tensor on the same device. A view if possible. Raises as `dense`."""
    values = dense(tensor, key)
    return bytes_of(values if values.is_contiguous() else values.contiguous())


def part_of_bytes(values: Any, start: int, stop: int) -> Any:
    """The bytes `[start, stop)` of `flat_bytes`. Copies not much more than these bytes.

    `values` is a result of `dense`. `start` and `stop` are multiples of the element size.
    """
    if values.is_contiguous():
        return bytes_of(values)[start:stop]
    return bytes_of(_row_major(values, start // values.element_size(), stop // values.element_size()))


def _row_major(values: Any, start: int, stop: int) -> Any:
    """The elements `[start, stop)` of a tensor in row-major order, contiguous."""
    if values.dim() <= 1:
        return values.reshape(-1)[start:stop].contiguous()
    inner = values.numel() // values.shape[0]
    first, last = start // inner, -(-stop // inner)
    if inner <= stop - start:
        return values[first:last].reshape(-1)[start - first * inner : stop - first * inner].contiguous()
    rows = [
        _row_major(values[row], max(start - row * inner, 0), min(stop - row * inner, inner))
        for row in range(first, last)
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def dense(tensor: Any, key: str) -> Any:
    """The tensor as plain values, without lazy conjugation or negation. As integers if it is not contiguous.

    A view if possible. Raises `UnsupportedObjectError` for a tensor without plain values (sparse, meta, freed).
    """
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise UnsupportedObjectError(
            f"{key!r} is a {_name(tensor.layout)} tensor on {tensor.device}, which a checkpoint cannot store",
            next_step="make it a dense tensor with values before saving",
        )
    if lacks_memory(tensor):
        raise UnsupportedObjectError(
            f"{key!r} is a tensor whose memory was freed or shrunk",
            next_step="save it while it has its values",
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain._is_zerotensor():
        # A copy has memory.
        plain = plain.clone()
    return plain if plain.is_contiguous() else as_integers(plain)


def plain_memory(tensor: Any) -> Memory | None:
    """The memory of a tensor whose values are one run of bytes in this process. None for other tensors."""
    if (
        type(tensor) in PLAIN_TENSORS
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    ):
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        held_bytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        # A tensor of zeros has no memory before its first write. A freed tensor has none either.
        if not nbytes or (address and nbytes <= held_bytes):
            return Memory(address, nbytes, tensor)
    return None


def lacks_memory(tensor: Any) -> bool:
    """Whether the storage of a dense tensor is shorter than the tensor, so that an access to its values crashes the process.

    Sharded training frees parameters in this way and keeps the tensors. False for subclasses, which may store their values
    differently.
    """
    if type(tensor) not in PLAIN_TENSORS or not tensor.numel():
        return False
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() < needed)


def overlaps_itself(tensor: Any) -> bool:
    """Whether elements of a dense tensor share memory, so that it cannot hold any values."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    steps = sorted((step, length) for step, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1)
    reach, is_clear = 0, True
    for step, length in steps:
        is_clear = is_clear and step > reach
        reach += step * (length - 1)
    if is_clear:
        return False
    if not steps[0][0] or tensor.numel() > reach + 1:
        return True
    # Rare strides that interleave, with or without overlaps.
    touched = torch.zeros(reach + 1, dtype=torch.bool, device="cpu")
    touched.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(touched.sum()) < int(tensor.numel())


def as_integers(tensor: Any) -> Any:
    """The same memory as integers of the same width, because torch cannot copy every dtype. Complex128 is unchanged."""
    dtype = _INTEGERS.get(tensor.element_size())
    return tensor if dtype is None else tensor.view(dtype)


def bytes_of(tensor: Any) -> Any:
    """The memory of a contiguous tensor as a 1-D uint8 tensor."""
    # Not `reshape`: a tensor of one element is contiguous with any strides, and a view of bytes depends on them.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copy_bits(source: Any, target: Any) -> None:
    """Copy a plain tensor to another one of equal shape, on any device and with any layout. Converts to its dtype."""
    with changing(target):
        if is_traceable_wrapper_subclass(target):
            # Its class implements the copy.
            target.copy_(source)
        elif source.dtype == target.dtype and not target.is_conj() and not target.is_neg():
            as_integers(target).copy_(as_integers(source))
        else:
            target.copy_(source)


def changing(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """In this context, torch allows changes of the tensor, also if it was made in inference mode."""
    context: contextlib.AbstractContextManager[Any] = torch.no_grad()
    if torch.is_inference(tensor):
        context = torch.inference_mode()
    return context


@functools.cache
def check_conversion(stored: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    """Raise the exception with which torch refuses to copy elements of one dtype into a tensor of another."""
    # A failure is not cached.
    copy_bits(torch.empty(1, dtype=stored, device="cpu"), torch.empty(1, dtype=dtype, device=device))


@contextlib.contextmanager
def admitted(trusted_types: Sequence[type]) -> Iterator[None]:
    """In this context, torch's safe loader also accepts `trusted_types`."""
    with _SAFE_GLOBALS_LOCK.get():
        # The end of torch's context removes all given classes, so pass only new ones.
        known = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([kind for kind in trusted_types if kind not in known]):
            yield


def check_blob(data: bytes | memoryview, key: str, trusted_types: Sequence[type]) -> Any:
    """Load an object with torch's safe loader, which does not execute foreign code, and return it.

    Raises `UnsupportedObjectError`, naming `key`, when the safe loader refuses the object.
    """
    try:
        with admitted(trusted_types):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        if _LONG_INTEGER.search(str(error)):
            raise UnsupportedObjectError(
                f"{key!r} contains an integer of more than 2039 bits, which torch's safe loader refuses",
                next_step="store it as text",
            ) from error
        refused = REFUSED.search(str(error))
        raise UnsupportedObjectError(
            f"{key!r} is an object that torch's safe loader refuses"
            + (f" (it contains {refused[1]})" if refused else ""),
            next_step=NUMPY
            if refused and refused[1].startswith("numpy.")
            else "store tensors and plain values, or admit its class with trusted_types=[...]",
        ) from error


def entries_of(metadata: Any, wrapped: Collection[str] = ()) -> tuple[tuple[TensorEntry, ...], tuple[str, ...]]:
    """The tensors and blobs of the manifest for the `Metadata` of a planner, which is not changed.

    Tensors with a key in `wrapped` may have any element type, because only their parts are stored.
    """
    tensors, blobs = [], []
    # There may be tens of thousands of tensors. Most differ only in their keys, so they share one description.
    known: dict[Any, Properties] = {}
    wholes: dict[Any, tuple[tuple[int, ...], tuple[Shard, ...]]] = {}
    for key, value in metadata.state_dict_metadata.items():
        if isinstance(value, BytesStorageMetadata):
            blobs.append(key)
            continue
        given = value.properties
        kind = (given.layout, given.requires_grad, given.memory_format, given.pin_memory)
        properties = known.get(kind)
        if properties is None:
            properties = known[kind] = _properties(given)
        size, chunks = value.size, value.chunks
        if len(chunks) == 1 and chunks[0].sizes == size and not any(chunks[0].offsets):
            shape, shards = wholes.get(size) or wholes.setdefault(size, _whole(size))
        else:
            shape = tuple(size)
            shards = tuple(Shard(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)
        dtype = _name(given.dtype) if key in wrapped else dtype_name(given.dtype, key)
        tensors.append(TensorEntry(key, dtype, shape, shards, properties))
    return tuple(tensors), tuple(blobs)


def _properties(given: Any) -> Properties:
    return Properties(
        layout=_name(given.layout),
        requires_grad=bool(given.requires_grad),
        memory_format=_name(given.memory_format),
        pin_memory=bool(given.pin_memory),
    )


def _whole(size: Any) -> tuple[tuple[int, ...], tuple[Shard, ...]]:
    shape = tuple(size)
    return shape, (Shard((0,) * len(shape), shape),)


class WrapperMetadata(TensorStorageMetadata):  # type: ignore[misc]
    """Describes a tensor that was saved as a wrapper tensor."""


def metadata_of(manifest: Manifest) -> Any:
    """The `Metadata` for a load planner. Raises `CorruptCheckpointError` for content that no save planner can have
    written.
    """
    _check_paths(manifest.planner_data)
    described: dict[str, Any] = {}
    # Equal tensors share one description, as in `entries_of`.
    known: dict[Any, Any] = {}
    sizes: dict[Any, Any] = {}
    boxes: dict[Shard, Any] = {}
    # Planners handle a wrapper as one tensor.
    parts = {key for each in manifest.wrapped for key in each.part_keys}
    plain = [entry for entry in manifest.tensors if entry.key not in parts] if parts else manifest.tensors
    wrapped = [each.tensor for each in manifest.wrapped]
    for kind, entries in ((TensorStorageMetadata, plain), (WrapperMetadata, wrapped)):
        for key, dtype, shape, shards, properties in entries:
            described[key] = kind(
                known.get((dtype, properties))
                or known.setdefault((dtype, properties), _torch_properties(dtype, properties)),
                sizes.get(shape) or sizes.setdefault(shape, torch.Size(shape)),
                [
                    boxes.get(box)
                    or boxes.setdefault(box, ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1])))
                    for box in shards
                ],
            )
    for key in manifest.blobs:
        if key not in parts:
            described[key] = BytesStorageMetadata()
    return Metadata(state_dict_metadata=described, planner_data=manifest.planner_data)


def _torch_properties(dtype: str, properties: Properties) -> Any:
    return TensorProperties(
        dtype=torch_dtype(dtype),
        layout=_attribute(properties.layout, torch.layout),
        requires_grad=properties.requires_grad,
        memory_format=_attribute(properties.memory_format, torch.memory_format),
        pin_memory=properties.pin_memory,
    )


def _check_paths(planner_data: Any) -> None:
    """Check the paths along which torch rebuilds a state dict. Torch fills lists up to any index in a path."""
    if not isinstance(planner_data, dict):
        return
    # Containers are numbered. Storing the path of each would need quadratic memory for a long path.
    containers: dict[tuple[int, Any], int] = {}
    lengths: dict[int, int] = {}
    try:
        for path in planner_data.values():
            if not isinstance(path, tuple) or int not in map(type, path):
                continue
            container = 0
            for part in path:
                if type(part) is int:
                    if part < 0:
                        raise CorruptCheckpointError("the planner data of the manifest has a negative index")
                    lengths[container] = max(part, lengths.get(container, 0))
                container = containers.setdefault((container, part), len(containers) + 1)
    except TypeError as error:
        raise CorruptCheckpointError("the planner data of the manifest has an invalid path") from error
    if sum(lengths.values()) > _MAX_LIST_MEMBERS:
        raise CorruptCheckpointError("the planner data of the manifest has impossibly long lists")


def torch_dtype(name: str) -> Any:
    """The torch dtype with this name. Raises `UnsupportedObjectError` when this version of torch lacks it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedObjectError(
            f"the checkpoint contains tensors of {name}, which torch {torch.__version__} lacks",
            next_step="install a newer torch",
        )
    return dtype


def _attribute(name: str, kind: type) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise CorruptCheckpointError(f"torch has no {kind.__name__} named {name!r:.40}")
    return value
