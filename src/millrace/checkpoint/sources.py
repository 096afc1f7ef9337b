"""The items of a save plan as the bytes that `packing` writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import WriteItemType
from typing_extensions import Buffer

from millrace.checkpoint.format import DTYPES, MAX_BLOB_BYTES
from millrace.checkpoint.layout import PACK_BELOW_BYTES
from millrace.checkpoint.packing import Source
from millrace.checkpoint.planes import OPAQUE, Kind, checksum
from millrace.checkpoint.tensors import check_blob, dense, dtype_name, flat_bytes, part_of_bytes, plain_memory
from millrace.errors import MillraceError, UnsupportedObjectError, UsageError


def sources_of(plan: Any, planner: Any, trusted_types: Sequence[type]) -> Iterator[Source]:
    """One source for each item of the plan, in order; objects are serialised when their turn comes.

    Raises `UnsupportedObjectError`, naming the key, for what no checkpoint can hold.
    """
    checked: set[int] = set()
    # Lengths and kinds of what is alike, which most of tens of thousands of tensors are.
    known: dict[Any, tuple[int, Kind]] = {}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            yield _blob_source(_serialised(planner, item), item.index.fqn, trusted_types, checked)
            continue
        described = item.tensor_data
        dtype, sizes = described.properties.dtype, described.chunk.sizes
        shape = known.get((dtype, sizes))
        if shape is None:
            itemsize, kind = DTYPES[dtype_name(dtype, item.index.fqn)]
            shape = known[dtype, sizes] = (sizes.numel() * itemsize, kind)
        yield TensorSource(planner, item, *shape)


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
    return BlobSource(data)


class BlobSource:
    """An object as `torch.save` wrote it."""

    kind = OPAQUE

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.nbytes = len(data)

    def read(self, start: int, stop: int) -> Buffer:
        return self._data[start:stop]


class TensorSource:
    """A tensor, or one rank's part of it: looked up when its first byte is read, copied to the CPU piece by piece."""

    # There may be tens of thousands, most of them read once and in one piece.
    __slots__ = ("_item", "_lock", "_planner", "_values", "kind", "nbytes")

    kind: Kind
    nbytes: int

    def __init__(self, planner: Any, item: Any, nbytes: int, kind: Kind) -> None:
        self._planner, self._item = planner, item
        self.nbytes, self.kind = nbytes, kind
        self._lock = threading.Lock()
        self._values: Any = None

    def read(self, start: int, stop: int) -> Buffer:
        if stop - start < PACK_BELOW_BYTES and stop - start == self.nbytes:
            tensor = self._resolve()
            memory = plain_memory(tensor)
            return flat_bytes(tensor, self._item.index.fqn).cpu().numpy() if memory is None else memory.tobytes()
        with self._lock:
            if self._values is None:
                self._values = dense(self._resolve(), self._item.index.fqn)
        part: Buffer = part_of_bytes(self._values, start, stop).cpu().numpy()
        return part

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
