"""Between torch's objects and the manifest's: element types, flat bytes of a tensor, metadata, safe blobs."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from millrace.checkpoint.format.manifest import DTYPES, Manifest, Properties, Shard, TensorEntry
from millrace.checkpoint.host.memory import Memory
from millrace.checkpoint.state.flattening import PLAIN_TENSORS
from millrace.errors import CorruptCheckpointError, UnsupportedObjectError

# `torch.serialization.safe_globals` changes state of the whole process; two threads must not undo each other's.
_SAFE_GLOBALS_LOCK = threading.Lock()
_NAMES = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# How torch's safe loader names what it does not admit.
_REFUSED = re.compile(r"GLOBAL ([\w.]{1,200})")
# In all lists of a state dict together.
_MAX_LIST_MEMBERS = 1 << 24


def _name(value: Any) -> str:
    """`torch.float32` -> `float32`; layouts and memory formats likewise."""
    return str(value).removeprefix("torch.")


def dtype_name(dtype: Any, key: str) -> str:
    """The manifest's name of a torch dtype. Raises `UnsupportedObjectError`, naming `key`."""
    name = _NAMES.get(dtype)
    if name is None:
        raise UnsupportedObjectError(
            f"{key!r} is a tensor of {dtype}, which a checkpoint cannot hold",
            next_step="convert it to an ordinary dtype before saving",
        )
    return name


def flat_bytes(tensor: Any, key: str) -> Any:
    """The tensor's values in row-major order as a 1-D uint8 tensor on its own device; a view where that is possible.

    Raises as `dense`.
    """
    values = dense(tensor, key)
    return bytes_of(values if values.is_contiguous() else values.contiguous())


def part_of_bytes(values: Any, start: int, stop: int) -> Any:
    """The bytes `[start, stop)` of `flat_bytes`, of which whatever has to be copied is not much more than them.

    `values` come from `dense`; `start` and `stop` are at whole elements.
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
    """The tensor as plain values, not conjugated or negated lazily; integers where it is not contiguous.

    A view where that is possible. Raises `UnsupportedObjectError` for a tensor without plain values (sparse, meta, freed).
    """
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise UnsupportedObjectError(
            f"{key!r} is a {_name(tensor.layout)} tensor on {tensor.device}, which a checkpoint cannot hold",
            next_step="make it a dense tensor with values before saving",
        )
    if lacks_memory(tensor):
        raise UnsupportedObjectError(
            f"{key!r} is a tensor whose memory was freed or shrunk",
            next_step="save it while it has its values",
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain._is_zerotensor():
        # It has no memory before it is copied.
        plain = plain.clone()
    return plain if plain.is_contiguous() else as_integers(plain)


def plain_memory(tensor: Any) -> Memory | None:
    """The memory of a tensor that has its values in this process's memory, one after the other; None for another."""
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
        # A tensor of zeros that nobody has written to may have no memory yet, and one that was freed none any more.
        if not nbytes or (address and nbytes <= held_bytes):
            return Memory(address, nbytes, tensor)
    return None


def lacks_memory(tensor: Any) -> bool:
    """Whether a dense tensor's storage is shorter than the tensor says, so that touching its values harms the process.

    Sharded training frees parameters so, and leaves the tensors. Subclasses may hold their values in another way.
    """
    if type(tensor) not in PLAIN_TENSORS or not tensor.numel():
        return False
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() < needed)


def as_integers(tensor: Any) -> Any:
    """The same memory with integers of the same width in it: torch cannot copy every dtype. Complex128 stays itself."""
    dtype = _INTEGERS.get(tensor.element_size())
    return tensor if dtype is None else tensor.view(dtype)


def bytes_of(tensor: Any) -> Any:
    """The memory of a contiguous tensor as a 1-D uint8 tensor."""
    # Not `reshape`: a tensor of one element counts as contiguous whatever its strides are, and a view of bytes minds them.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copy_bits(source: Any, target: Any) -> None:
    """Copy a plain tensor to another one of equal shape, wherever and however that lies; converts to its dtype."""
    if source.dtype == target.dtype and not target.is_conj() and not target.is_neg():
        as_integers(target).copy_(as_integers(source))
    else:
        target.copy_(source)


def check_blob(data: bytes | memoryview, key: str, trusted_types: Sequence[type]) -> Any:
    """Make sure that `torch.load` reads `data` without running foreign code, and return what it reads.

    Raises `UnsupportedObjectError`, naming `key`, when the safe loader refuses it.
    """
    try:
        with _SAFE_GLOBALS_LOCK, torch.serialization.safe_globals(list(trusted_types)):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        refused = _REFUSED.search(str(error))
        raise UnsupportedObjectError(
            f"{key!r} is an object that torch's safe loader refuses"
            + (f" (it has {refused[1]} in it)" if refused else ""),
            next_step="store tensors and plain values, or admit its class with trusted_types=[...]",
        ) from error


def entries_of(metadata: Any) -> tuple[tuple[TensorEntry, ...], tuple[str, ...]]:
    """The manifest's tensors and blobs for a planner's `Metadata`, which is left as it is."""
    tensors, blobs = [], []
    # Most of tens of thousands of tensors are alike in all but their keys, and so are described by the same objects.
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
        tensors.append(TensorEntry(key, dtype_name(given.dtype, key), shape, shards, properties))
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


def metadata_of(manifest: Manifest) -> Any:
    """The `Metadata` that a load planner works with. Raises `CorruptCheckpointError` for what no planner has saved."""
    _check_paths(manifest.planner_data)
    described: dict[str, Any] = {}
    # The same descriptions for all tensors that are alike, as `entries_of` does.
    known: dict[Any, Any] = {}
    sizes: dict[Any, Any] = {}
    boxes: dict[Shard, Any] = {}
    for key, dtype, shape, shards, properties in manifest.tensors:
        described[key] = TensorStorageMetadata(
            known.get((dtype, properties))
            or known.setdefault((dtype, properties), _torch_properties(dtype, properties)),
            sizes.get(shape) or sizes.setdefault(shape, torch.Size(shape)),
            [
                boxes.get(box) or boxes.setdefault(box, ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1])))
                for box in shards
            ],
        )
    for key in manifest.blobs:
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
    """Torch rebuilds a state dict along these paths and fills lists up to any index that it finds in one."""
    if not isinstance(planner_data, dict):
        return
    # Containers are numbered: keeping the path to each would take the square of a long path.
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
                        raise CorruptCheckpointError("the manifest's planner data counts backwards")
                    lengths[container] = max(part, lengths.get(container, 0))
                container = containers.setdefault((container, part), len(containers) + 1)
    except TypeError as error:
        raise CorruptCheckpointError("the manifest's planner data has paths that are none") from error
    if sum(lengths.values()) > _MAX_LIST_MEMBERS:
        raise CorruptCheckpointError("the manifest's planner data speaks of impossibly long lists")


def torch_dtype(name: str) -> Any:
    """Raises `UnsupportedObjectError` when this torch does not know a dtype that the format does."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedObjectError(
            f"the checkpoint holds tensors of {name}, which torch {torch.__version__} lacks",
            next_step="install a newer torch",
        )
    return dtype


def _attribute(name: str, kind: type) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise CorruptCheckpointError(f"torch has no {kind.__name__} named {name!r:.40}")
    return value
