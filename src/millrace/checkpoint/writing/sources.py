"""The items of a save plan as the bytes that `packing` writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import WriteItemType
from typing_extensions import Buffer

from millrace.checkpoint.codec.planes import OPAQUE, Kind, checksum
from millrace.checkpoint.format.layout import PACK_BELOW_BYTES
from millrace.checkpoint.format.manifest import DTYPES, MAX_BLOB_BYTES
from millrace.checkpoint.host.memory import Memory
from millrace.checkpoint.state.tensors import check_blob, dense, dtype_name, flat_bytes, part_of_bytes, plain_memory
from millrace.checkpoint.writing.bases import ItemKey
from millrace.checkpoint.writing.packing import Source
from millrace.errors import MillraceError, UnsupportedObjectError, UsageError


def sources_of(
    plan: Any, planner: Any, trusted_types: Sequence[type], kept: dict[ItemKey, Source] | None = None
) -> Iterator[Source]:
    """One source for each item of the plan, in order; objects are serialised when their turn comes.

    With `kept` the sources are put there, and can be read again while the planner is at another save. Raises
    `UnsupportedObjectError`, naming the key, for what no checkpoint can hold.
    """
    checked: set[int] = set()
    # Lengths and kinds of what is alike, which most of tens of thousands of tensors are.
    known: dict[Any, tuple[int, Kind]] = {}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            source = _blob_source(_serialised(planner, item), item.index.fqn, trusted_types, checked)
            if kept is not None:
                kept[source.key] = source
            yield source
            continue
        described = item.tensor_data
        dtype, sizes = described.properties.dtype, described.chunk.sizes
        shape = known.get((dtype, sizes))
        if shape is None:
            itemsize, kind = DTYPES[dtype_name(dtype, item.index.fqn)]
            shape = known[dtype, sizes] = (sizes.numel() * itemsize, kind)
        tensor_source = TensorSource(planner, item, *shape, keep=kept is not None)
        if kept is not None:
            kept[tensor_source.key] = tensor_source
        yield tensor_source


def key_of(item: Any) -> ItemKey:
    """What names an item of a save plan."""
    index = item.index
    return index.fqn, None if item.type == WriteItemType.BYTE_IO else tuple(index.offset or ())


def _serialised(planner: Any, item: Any) -> memoryview:
    try:
        data: memoryview = planner.resolve_data(item).getbuffer()
    except (MillraceError, OSError, MemoryError):
        raise
    except Exception as error:
        # Pickle raises whatever the object does.
        raise UnsupportedObjectError(
            f"{item.index.fqn!r} is an object that cannot be pickled ({type(error).__name__}: {error!s:.200})",
            next_step="store tensors and plain values",
        ) from error
    return data


def _blob_source(data: memoryview, key: str, trusted_types: Sequence[type], checked: set[int]) -> Source:
    if len(data) > MAX_BLOB_BYTES:
        raise UnsupportedObjectError(
            f"{key!r} is an object of {len(data)} bytes, and no checkpoint holds one of more than {MAX_BLOB_BYTES}",
            next_step="make what is large in it a tensor",
        )
    # Equal objects (hyperparameters of many groups, say) need checking once.
    digest = checksum(data)
    if digest not in checked:
        check_blob(data, key, trusted_types)
        checked.add(digest)
    return BlobSource(data, key)


class BlobSource:
    """An object as `torch.save` wrote it."""

    kind = OPAQUE

    def __init__(self, data: memoryview, key: str) -> None:
        self._data = data
        self.nbytes = len(data)
        self.key: ItemKey = (key, None)

    def read(self, start: int, stop: int) -> Buffer:
        return self._data[start:stop]

    def memory(self) -> Memory | None:
        return None


class TensorSource:
    """A tensor, or one rank's part of it: looked up when its first byte is read, copied to the CPU piece by piece."""

    # There may be tens of thousands, most of them read once and in one piece.
    __slots__ = ("_item", "_keep", "_lock", "_planner", "_tensor", "_values", "kind", "nbytes")

    kind: Kind
    nbytes: int

    def __init__(self, planner: Any, item: Any, nbytes: int, kind: Kind, *, keep: bool = False) -> None:
        self._planner, self._item, self._keep = planner, item, keep
        self.nbytes, self.kind = nbytes, kind
        self._lock = threading.Lock()
        self._tensor: Any = None
        self._values: Any = None

    @property
    def key(self) -> ItemKey:
        return key_of(self._item)

    def read(self, start: int, stop: int) -> Buffer:
        if stop - start < PACK_BELOW_BYTES and stop - start == self.nbytes:
            tensor = self._tensor if self._tensor is not None else self._resolve()
            if self._keep:
                self._tensor = tensor
            memory = plain_memory(tensor)
            return flat_bytes(tensor, self._item.index.fqn).cpu().numpy() if memory is None else memory.tobytes()
        part: Buffer = part_of_bytes(self._dense(), start, stop).cpu().numpy()
        return part

    def memory(self) -> Memory | None:
        if self.nbytes >= PACK_BELOW_BYTES:
            return plain_memory(self._dense())
        if self._tensor is None:
            self._tensor = self._resolve()
        return plain_memory(self._tensor)

    def _dense(self) -> Any:
        with self._lock:
            if self._values is None:
                self._values = dense(self._resolve(), self._item.index.fqn)
            return self._values

    def _resolve(self) -> Any:
        tensor = self._planner.resolve_data(self._item)
        described = self._item.tensor_data
        dtype, sizes = described.properties.dtype, described.chunk.sizes
        if tensor.dtype != dtype or tensor.shape != sizes:
            raise UsageError(
                f"the planner announced {self._item.index.fqn!r} as {dtype} {tuple(sizes)} and gave {tensor.dtype} "
                f"{tuple(tensor.shape)}",
                next_step="make its plan say what its resolve_data returns",
            )
        return tensor
