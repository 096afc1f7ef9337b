"""What torch's own writer saved, as plain bytes and as an inventory. It has no checksums: damage can go unseen."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from millrace.checkpoint.codec.extension import extension_registry
from millrace.checkpoint.format.inventory import StoredValue
from millrace.checkpoint.format.manifest import DTYPES, TensorEntry
from millrace.checkpoint.places.storage import CheckpointStorage
from millrace.checkpoint.reading.contents import Bytes, Part, common_box
from millrace.checkpoint.reading.stock import StockReader
from millrace.checkpoint.state.tensors import bytes_of, entries_of, torch_dtype
from millrace.errors import CorruptCheckpointError


class StockContents:
    """See `Contents`. Objects that torch's safe loader refuses are `UnsupportedObjectError`."""

    in_pieces = False  # torch's reader reads all of a stored tensor for any slice of it

    def __init__(self, storage: CheckpointStorage, registry: Any, trusted_types: Sequence[type]) -> None:
        self.url = storage.url
        known = extension_registry() if registry is None else registry
        self._reader = StockReader(storage, known, trusted_types)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        entries, blobs = entries_of(self._metadata)
        self.tensors: Mapping[str, TensorEntry] = {entry.key: entry for entry in entries}
        self.planner_data = self._metadata.planner_data
        stored = self._metadata.storage_data or {}
        self._stored: dict[str, list[Any]] = {}
        for index, info in stored.items():
            self._stored.setdefault(index.fqn, []).append(info)
        self.blob_bytes: Mapping[str, int] = {
            key: sum(int(info.length) for info in self._stored.get(key, ())) for key in blobs
        }

    def place(self, key: str) -> tuple[int, int]:
        return 0, 0  # whatever the order, each tensor is read by itself

    def inventory(self) -> list[StoredValue]:
        """Every tensor, then every object. Of an object the length as stored is known, and no other."""
        return [self._value(entry.key, entry) for entry in self.tensors.values()] + [
            self._value(key, None) for key in self.blob_bytes
        ]

    def read(self, parts: Sequence[Part]) -> list[Bytes]:
        items: list[ReadItem] = []
        targets = [torch.empty(part.lengths, dtype=torch_dtype(part.dtype)) for part in parts]
        for number, part in enumerate(parts):
            covered = 0
            for shard in self.tensors[part.key].shards:
                box = common_box(part, shard)
                if box is None:
                    continue
                offsets, lengths = box
                covered += math.prod(lengths)
                items.append(
                    ReadItem(
                        type=LoadItemType.TENSOR,
                        dest_index=MetadataIndex(part.key, index=number),
                        dest_offsets=torch.Size(a - b for a, b in zip(offsets, part.offsets, strict=True)),
                        storage_index=MetadataIndex(part.key, torch.Size(shard.offsets)),
                        storage_offsets=torch.Size(a - b for a, b in zip(offsets, shard.offsets, strict=True)),
                        lengths=torch.Size(lengths),
                    )
                )
            if covered < math.prod(part.lengths):
                raise CorruptCheckpointError(
                    f"{self.url} has no values for a part of {part.key!r}", next_step="use another checkpoint"
                )
        self._read(items, _Targets(targets))
        return [bytes_of(target).numpy() for target in targets]

    def read_blobs(self, keys: Sequence[str]) -> list[bytes]:
        items = [
            ReadItem(
                type=LoadItemType.BYTE_IO,
                dest_index=MetadataIndex(key),
                dest_offsets=torch.Size((0,)),
                storage_index=MetadataIndex(key),
                storage_offsets=torch.Size((0,)),
                lengths=torch.Size((0,)),
            )
            for key in keys
        ]
        targets = _Targets([])
        self._read(items, targets)
        return [targets.blobs[key] for key in keys]

    def _read(self, items: list[ReadItem], targets: _Targets) -> None:
        missing = [item.storage_index.fqn for item in items if item.storage_index not in self._reader.storage_data]
        if missing:
            raise CorruptCheckpointError(
                f"the metadata of {self.url} does not say where {missing[0]!r} lies", next_step="use another checkpoint"
            )
        if items:
            self._reader.read_data(LoadPlan(items), targets)

    def _value(self, key: str, entry: TensorEntry | None) -> StoredValue:
        infos = self._stored.get(key, [])
        stored_bytes = sum(int(info.length) for info in infos)
        return StoredValue(
            key=key,
            dtype=None if entry is None else entry.dtype,
            shape=() if entry is None else entry.shape,
            shards=1 if entry is None else len(entry.shards),
            raw_bytes=stored_bytes if entry is None else math.prod(entry.shape) * DTYPES[entry.dtype][0],
            stored_bytes=stored_bytes,
            files=tuple(sorted({str(info.relative_path) for info in infos})),
            chunks_full=len(infos),
        )


class _Targets:
    """A load planner for `ReadItem`s whose destination has the number of a tensor in it."""

    def __init__(self, tensors: list[Any]) -> None:
        self._tensors = tensors
        self.blobs: dict[str, bytes] = {}

    def resolve_tensor(self, item: Any) -> Any:
        tensor = self._tensors[item.dest_index.index]
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        """It was filled in place."""

    def load_bytes(self, item: Any, value: io.BytesIO) -> None:
        self.blobs[item.dest_index.fqn] = value.getvalue()
