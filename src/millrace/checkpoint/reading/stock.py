"""Reads checkpoints of torch's own `FileSystemWriter` from any storage: `StockReader` for loads, `StockContents` for tools.

`stock_metadata` unpickles the metadata safely. Torch's safe loader checks stored objects before the planner receives
them. The data has no checksums, so damage can remain undetected.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import posixpath
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from millrace.checkpoint.codec.extension import extension_registry
from millrace.checkpoint.format.inventory import StoredValue, is_named
from millrace.checkpoint.format.manifest import DTYPES, Shard, TensorEntry, WrappedEntry
from millrace.checkpoint.format.transforms import transforms_for
from millrace.checkpoint.reading.contents import Box, Bytes, shard_boxes
from millrace.checkpoint.state.tensors import (
    ADMIT,
    NUMPY,
    REFUSED,
    admitted,
    bytes_of,
    check_blob,
    dtype_name,
    entries_of,
    flat_bytes,
    torch_dtype,
)
from millrace.checkpoint.state.wrappers import encode_recipe, is_wrapper, take_apart
from millrace.checkpoint.storage.base import CheckpointStorage, StoredFile
from millrace.checkpoint.storage.manifests import read_stock_metadata, stock_metadata_name
from millrace.checkpoint.storage.stock_metadata import unpickle_metadata
from millrace.checkpoint.storage.storage import LocalStorage, require_unchanged
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MillraceError,
    MissingError,
    RetryableError,
    StateMismatchError,
    UnsupportedObjectError,
)
from millrace.runtime.pipeline import run_in_order

_BUFFER_BYTES = 4 << 20
# This many bytes of a stored tensor show whether it is a plain one.
_PEEK_BYTES = 512


class _RangeReader(io.RawIOBase):
    """A seekable file over ranged reads of a storage."""

    def __init__(self, storage: CheckpointStorage, file: StoredFile) -> None:
        self._storage, self._file, self._position = storage, file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        stop = min(self._position + len(target), self._file.size)
        if stop <= self._position:
            return 0
        data = memoryview(self._storage.read(self._file, self._position, stop)).cast("B")
        target[: len(data)] = data
        self._position = stop
        return len(data)


class _StorageFileSystem(FileSystem):  # type: ignore[misc]
    """The file operations of torch's reader, on a `CheckpointStorage`."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = str(path)
        if mode != "rb" or posixpath.basename(name) != name:
            raise CorruptCheckpointError(f"the metadata of the checkpoint contains the file name {name!r:.100}")
        with io.BufferedReader(_RangeReader(self._storage, self._storage.stat(name)), _BUFFER_BYTES) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        # Every file is in the directory of the metadata, so its name is its path.
        return suffix

    def init_path(self, path: Any) -> Any:
        return path


class StockReader(FileSystemReader):  # type: ignore[misc]
    """Torch's reader on a `CheckpointStorage`, with restricted unpickling. For one load."""

    def __init__(self, storage: CheckpointStorage, registry: Any, trusted_types: Sequence[type]) -> None:
        super().__init__(storage.url, _extension_registry=registry)
        self.fs = _StorageFileSystem(storage)
        self.transforms: Any = _StorageReaderTransforms(registry)
        self._storage = storage
        self._trusted_types = trusted_types
        self._peeked: dict[str, StoredFile] = {}
        self._metadata_file: StoredFile | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Raises `CheckpointNotFoundError`, or as `unpickle_metadata`."""
        if isinstance(self._storage, LocalStorage):
            with contextlib.suppress(MissingError):
                self._metadata_file = self._storage.stat(stock_metadata_name(kwargs.get("rank")))
        data = read_stock_metadata(self._storage, kwargs.get("rank"))
        if data is None:
            raise CheckpointNotFoundError(f"{self._storage.url}: no checkpoint of torch's own writer")
        read = unpickle_metadata(data, self._storage.url)
        if getattr(read, "storage_meta", None) is None:
            read.storage_meta = StorageMeta()
        return read

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Raises `UnsupportedObjectError` for a class that is not trusted, `StateMismatchError` for a value that cannot be
        copied into the tensor or object of the planner, `CorruptCheckpointError` where torch's
        reader cannot read a file, `ChangedError` if a file was replaced during the read.
        """
        checked = _CheckedPlanner(planner, self._trusted_types)
        self.transforms = _Transforms(self.transforms.extension_registry, checked)
        local_files = self._local_files(plan)
        try:
            with admitted(self._trusted_types) if self._trusted_types else contextlib.nullcontext():
                result = super().read_data(plan, checked)
        except MillraceError:
            raise
        except Exception as error:
            raise self._failure(error, checked) from error
        for storage, file in local_files:
            require_unchanged(storage, file)
        return result

    def _local_files(self, plan: Any) -> list[tuple[LocalStorage, StoredFile]]:
        """The metadata file and the data files of a plan, if they are on a local disk. A read there has no pinned version,
        and torch stores no checksums.
        """
        storage, found = self._storage, []
        if isinstance(storage, LocalStorage):
            if self._metadata_file is not None:
                found.append((storage, self._metadata_file))
            for name in {str(self.storage_data[item.storage_index].relative_path) for item in plan.items}:
                with contextlib.suppress(MissingError, ValueError):  # hostile metadata has names that no file can have
                    found.append((storage, storage.stat(name)))
        return found

    def holds_subclass(self, info: Any) -> bool:
        """Whether a stored tensor is of a tensor subclass, by its first bytes. False when they cannot be read."""
        try:
            stored = self._peeked.get(info.relative_path)
            if stored is None:
                stored = self._peeked[info.relative_path] = self._storage.stat(info.relative_path)
            stream: Any = io.BufferedReader(_RangeReader(self._storage, stored), _PEEK_BYTES)
            head = self.transforms.transform_load_stream(
                None, info.transform_descriptors or (), self._slice_file(stream, info)
            ).read(_PEEK_BYTES)
        except RetryableError:
            raise
        except Exception:  # noqa: BLE001 - extensions raise any exception; the following read reports the error
            return False
        if len(head) < 30 or head[:4] != b"PK\x03\x04":
            return False
        # The pickle is the first member of the archive, after a header with a name and padding.
        name, extra = struct.unpack_from("<HH", head, 26)
        pickled = head[30 + name + extra :]
        return pickled.startswith(b"\x80\x02c") and not pickled.startswith(b"\x80\x02ctorch._utils\n_rebuild_tensor")

    def _failure(self, error: Exception, checked: _CheckedPlanner) -> MillraceError:
        url, item = self._storage.url, checked.item
        refused = REFUSED.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if item is not None and refused is not None:
            return UnsupportedObjectError(
                f"{item.storage_index.fqn!r} of {url} contains {refused[1]}, a class that is not trusted",
                next_step=NUMPY if refused[1].startswith("numpy.") else ADMIT,
            )
        if item is not None and checked.has_value:
            return StateMismatchError(
                f"{item.storage_index.fqn!r} of {url} cannot be copied into the value in the state dict "
                f"({type(error).__name__}: {error!s:.200})",
                next_step="build the state dict with the settings of the saved model",
            )
        return CorruptCheckpointError(
            f"{url}: torch's reader failed ({type(error).__name__})", next_step="load another checkpoint"
        )


class _Transforms(_StorageReaderTransforms):  # type: ignore[misc]
    """Records the item that torch's reader begins to read. Raises `UnsupportedFormatError` for an unknown extension."""

    def __init__(self, registry: Any, checked: _CheckedPlanner) -> None:
        super().__init__(registry)
        self._checked = checked

    def transform_load_stream(self, read_item: Any, transform_descriptors: Sequence[str], raw_stream: Any) -> Any:
        self._checked.item, self._checked.has_value = read_item, False
        try:
            return super().transform_load_stream(read_item, transform_descriptors, raw_stream)
        except ValueError:
            transforms_for(transform_descriptors, self.extension_registry)  # raises for one that is not in the registry
            raise


class _CheckedPlanner:
    """A load planner that receives only objects that torch's safe loader accepts.

    `item` is the current item. `has_value`: whether its tensor was loaded.
    """

    def __init__(self, planner: Any, trusted_types: Sequence[type]) -> None:
        self._planner, self._trusted_types = planner, trusted_types
        self.item: Any = None
        self.has_value = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def resolve_tensor(self, read_item: Any) -> Any:
        self.has_value = True
        return self._planner.resolve_tensor(read_item)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        check_blob(value.getvalue(), read_item.storage_index.fqn, self._trusted_types)
        self._planner.load_bytes(read_item, value)


# --- contents as plain bytes ------------------------------------------------------------------------------


class StockContents:
    """Implements `Contents`. Objects that torch's safe loader refuses raise `UnsupportedObjectError`."""

    in_pieces = False  # torch's reader reads a whole stored tensor for any slice of it

    def __init__(self, storage: CheckpointStorage, registry: Any, trusted_types: Sequence[type]) -> None:
        self.url = storage.url
        known = extension_registry() if registry is None else registry
        self._reader, self._trusted_types = StockReader(storage, known, trusted_types), trusted_types
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
        self.wrapped: Mapping[str, WrappedEntry] = {}
        self._recipes: dict[str, bytes] = {}
        # The wrapper of each plain tensor, by key. The key and plain tensors of the wrapper that was read last.
        self._wrapper_of: dict[str, str] = {}
        self._last: tuple[str, Mapping[str, Any]] = ("", {})

    def with_wrappers(self, threads: int, patterns: Sequence[str]) -> Self:
        """Replace wrapper tensors by their plain tensors and recipes. Reads the first bytes of each tensor to find them,
        or of those that `patterns` may select.

        Raises `UnsupportedObjectError` for a class that is not trusted, if a pattern selects the tensor or there is no
        pattern. Other tensors of such classes stay as they are.
        """
        candidates = [
            key
            for key, entry in self.tensors.items()
            if len(entry.shards) == len(self._stored.get(key, ())) == 1
            and (not patterns or any(_may_name_part(key, pattern) for pattern in patterns))
        ]
        tensors: dict[str, TensorEntry] = dict(self.tensors)
        inspected = list(run_in_order(candidates, self._holds_subclass, threads))
        for key in (key for key, holds_subclass in inspected if holds_subclass):
            try:
                self._expand(key, tensors)
            except UnsupportedObjectError:
                if not patterns or any(is_named(key, pattern) for pattern in patterns):
                    raise
        self.tensors = tensors
        self.blob_bytes = {**self.blob_bytes, **{key: len(recipe) for key, recipe in self._recipes.items()}}
        return self

    def _holds_subclass(self, key: str) -> tuple[str, bool]:
        return key, self._reader.holds_subclass(self._stored[key][0])

    def _expand(self, key: str, tensors: dict[str, TensorEntry]) -> None:
        value = self._load(key)
        if not is_wrapper(value):
            return
        wrapper, leaves = take_apart(value, key)
        entries = [
            TensorEntry(name, dtype_name(leaf.dtype, name), tuple(leaf.shape), (_whole_shard(leaf.shape),))
            for name, leaf in leaves.items()
        ]
        if any(entry.key in tensors for entry in entries):
            raise UnsupportedObjectError(
                f"a part of {key!r} has the key of another value", next_step="exclude it with keys"
            )
        self._recipes[key] = bytes(encode_recipe(wrapper, key, self._trusted_types))
        self._wrapper_of.update(dict.fromkeys(leaves, key))
        self.wrapped = {**self.wrapped, key: WrappedEntry(tensors.pop(key), ((key, tuple(leaves)),))}
        tensors.update({entry.key: entry for entry in entries})

    def _load(self, key: str) -> Any:
        """A stored tensor of any class, loaded by torch."""
        size = self._metadata.state_dict_metadata[key].size
        captured, origin = _Captured(size), (0,) * len(size)
        self._read([_read_item(key, 0, origin, size, origin, origin)], _Targets([captured]))
        return captured.value

    def _leaf(self, key: str) -> Any:
        wrapper = self._wrapper_of[key]
        known, tensors = self._last  # one read: another thread may replace it
        if known != wrapper:
            tensors = take_apart(self._load(wrapper), wrapper)[1]
            self._last = (wrapper, tensors)
        return tensors[key]

    def place(self, key: str) -> tuple[int, int]:
        return 0, 0  # each tensor is read alone, so the order does not matter

    def inventory(self) -> list[StoredValue]:
        """Every tensor, then every object. Only the stored length of an object is known."""
        return [self._value(entry.key, entry) for entry in self.tensors.values()] + [
            self._value(key, None) for key in self.blob_bytes
        ]

    def read(self, boxes: Sequence[Box]) -> list[Bytes]:
        items: list[ReadItem] = []
        targets = [torch.empty(box.lengths, dtype=torch_dtype(box.dtype)) for box in boxes]
        for number, box in enumerate(boxes):
            if box.key in self._wrapper_of:
                place = tuple(slice(a, a + length) for a, length in zip(box.offsets, box.lengths, strict=True))
                bytes_of(targets[number]).copy_(flat_bytes(self._leaf(box.key)[place], box.key))
                continue
            items += [
                _read_item(box.key, number, part.shard.offsets, part.lengths, part.in_box(box), part.in_shard)
                for part in shard_boxes(box, self.tensors[box.key], self.url)
            ]
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
            if key not in self._recipes
        ]
        targets = _Targets([])
        self._read(items, targets)
        return [self._recipes.get(key) or targets.blobs[key] for key in keys]

    def _read(self, items: list[ReadItem], targets: _Targets) -> None:
        missing = [item.storage_index.fqn for item in items if item.storage_index not in self._reader.storage_data]
        if missing:
            raise CorruptCheckpointError(
                f"{self.url}: the metadata has no location for {missing[0]!r}", next_step="use another checkpoint"
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


def _may_name_part(key: str, pattern: str) -> bool:
    """Whether a pattern may select a tensor or, if it is a wrapper, one of its parts."""
    return is_named(key, pattern) or pattern.startswith(f"{key}.") or not {"*", "?", "["}.isdisjoint(pattern)


def _whole_shard(shape: Sequence[int]) -> Shard:
    return Shard((0,) * len(shape), tuple(shape))


def _read_item(
    key: str, number: int, shard: Sequence[int], lengths: Sequence[int], begin: Sequence[int], within: Sequence[int]
) -> ReadItem:
    """Read a box of a stored shard, from `within` the shard to `begin` in the target with this number."""
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(key, index=number),
        dest_offsets=torch.Size(begin),
        storage_index=MetadataIndex(key, torch.Size(shard)),
        storage_offsets=torch.Size(within),
        lengths=torch.Size(lengths),
    )


class _Captured:
    """A load target that keeps the tensor that torch's reader copies to it."""

    def __init__(self, size: Any) -> None:
        self.value: Any = None
        self._size = size

    def detach(self) -> Self:
        return self

    def size(self) -> Any:
        return self._size

    def copy_(self, tensor: Any) -> None:
        self.value = tensor


class _Targets:
    """A load planner for `ReadItem`s with the number of a target tensor in their destination."""

    def __init__(self, tensors: list[Any]) -> None:
        self._tensors = tensors
        self.blobs: dict[str, bytes] = {}

    def resolve_tensor(self, item: Any) -> Any:
        tensor = self._tensors[item.dest_index.index]
        if isinstance(tensor, _Captured):
            return tensor
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        """The tensor was filled in place."""

    def load_bytes(self, item: Any, value: io.BytesIO) -> None:
        self.blobs[item.dest_index.fqn] = value.getvalue()
