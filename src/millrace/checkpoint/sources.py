"""The items of a save plan as the bytes that `packing` writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import WriteItemType
from typing_extensions import Buffer

from millrace.checkpoint.format import DTYPES, MAX_BLOB_BYTES
from millrace.checkpoint.packing import Source
from millrace.checkpoint.planes import OPAQUE, Kind, checksum
from millrace.checkpoint.tensors import check_blob, dtype_name, flat_bytes
from millrace.errors import UnsupportedObjectError, UsageError


def sources_of(plan: Any, planner: Any, trusted_types: Sequence[type]) -> Iterator[Source]:
    """One source for each item of the plan, in order; objects are serialised when their turn comes.

    Raises `UnsupportedObjectError`, naming the key, for what no checkpoint can hold.
    """
    checked: set[int] = set()
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            yield _blob_source(planner.resolve_data(item).getbuffer(), item.index.fqn, trusted_types, checked)
        else:
            yield TensorSource(planner, item)


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
    __slots__ = ("_dtype", "_flat", "_item", "_lock", "_planner", "kind", "nbytes")

    kind: Kind
    nbytes: int

    def __init__(self, planner: Any, item: Any) -> None:
        self._planner, self._item = planner, item
        self._lock = threading.Lock()
        self._flat: Any = None
        described = item.tensor_data
        self._dtype = described.properties.dtype
        itemsize, self.kind = DTYPES[dtype_name(self._dtype, item.index.fqn)]
        self.nbytes = described.chunk.sizes.numel() * itemsize

    def read(self, start: int, stop: int) -> Buffer:
        with self._lock:
            if self._flat is None:
                self._flat = self._resolve()
        flat = self._flat if stop - start == self.nbytes else self._flat[start:stop]
        values: Buffer = flat.cpu().numpy()
        return values

    def _resolve(self) -> Any:
        key = self._item.index.fqn
        tensor = self._planner.resolve_data(self._item)
        sizes = self._item.tensor_data.chunk.sizes
        if tensor.dtype != self._dtype or tensor.shape != sizes:
            raise UsageError(
                f"the planner announced {key!r} as {self._dtype} {tuple(sizes)} and gave {tensor.dtype} "
                f"{tuple(tensor.shape)}",
                next_step="make its plan say what its resolve_data returns",
            )
        return flat_bytes(tensor, key)
