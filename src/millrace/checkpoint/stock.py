"""Reads checkpoints that torch's own `FileSystemWriter` wrote, from any storage that Millrace speaks to.

Their metadata is a pickle. It is unpickled with nothing but the classes that torch puts there, and stored objects go
through torch's safe loader before the planner sees them. Their data has no checksums: damage can go unseen.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import pickle
import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta

from millrace.checkpoint.manifests import STOCK_METADATA_NAME, CheckpointSummary, read_stock_metadata
from millrace.checkpoint.storage import CheckpointStorage, StoredFile
from millrace.checkpoint.tensors import check_blob
from millrace.errors import CheckpointNotFoundError, CorruptCheckpointError, MillraceError, UnsupportedObjectError

_BUFFER_BYTES = 4 << 20
# What torch's writer calls its data files; others that metadata names are not ours to remove.
_FILE_NAME = re.compile(r"__\d+_\d+\.distcp", re.ASCII)

_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (kind.__module__, kind.__qualname__): kind
        for kind in (
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata.TensorProperties,
            metadata.TensorStorageMetadata,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
            torch.Size,
        )
    },
    # Paths of any platform or Python version: only their text matters.
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath")
    },
    ("torch.serialization", "_get_layout"): lambda name: getattr(torch, str(name).removeprefix("torch.")),
    ("collections", "OrderedDict"): dict,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _CLASSES.get((module, name))
        if known is not None:
            return known
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.memory_format):
            return value
        raise UnsupportedObjectError(
            f"the checkpoint's metadata asks for {module}.{name}, which torch does not put there",
            next_step="load it with torch's own reader if you trust where it comes from",
        )


def unpickle_metadata(data: bytes, url: str) -> Any:
    """Torch's `Metadata`, without running anything else.

    Raises `CorruptCheckpointError`, or `UnsupportedObjectError` for metadata with foreign classes in it.
    """
    try:
        read = _MetadataUnpickler(io.BytesIO(data)).load()
    except MillraceError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"the metadata of {url} cannot be read", next_step="load another checkpoint"
        ) from error
    if not isinstance(read, metadata.Metadata) or not isinstance(read.state_dict_metadata, dict):
        raise CorruptCheckpointError(f"the metadata of {url} is something else", next_step="load another checkpoint")
    return read


def stock_files(data: bytes, url: str) -> list[str]:
    """The data files that torch's metadata names in its own directory. Raises as `unpickle_metadata`."""
    stored = unpickle_metadata(data, url).storage_data or {}
    return sorted({info.relative_path for info in stored.values() if _FILE_NAME.fullmatch(str(info.relative_path))})


def summarize_stock(storage: CheckpointStorage) -> CheckpointSummary:
    """What torch's metadata says in short; an object counts with its stored length. Raises as `unpickle_metadata`."""
    file = storage.stat(STOCK_METADATA_NAME)
    read = unpickle_metadata(bytes(memoryview(storage.read(file, 0, file.size))), storage.url)
    tensors = [
        value for value in read.state_dict_metadata.values() if isinstance(value, metadata.TensorStorageMetadata)
    ]
    lengths = {index: int(info.length) for index, info in (read.storage_data or {}).items()}
    objects = [
        key for key, value in read.state_dict_metadata.items() if isinstance(value, metadata.BytesStorageMetadata)
    ]
    return CheckpointSummary(
        url=storage.url,
        raw_bytes=sum(value.size.numel() * value.properties.dtype.itemsize for value in tensors)
        + sum(lengths.get(metadata.MetadataIndex(key), 0) for key in objects),
        stored_bytes=sum(lengths.values()) + file.size,
        tensors=len(tensors),
        objects=len(objects),
        created=file.modified,
        format_version=0,
        user={},
    )


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
    """The few file operations that torch's reader makes, over a `CheckpointStorage`."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = str(path)
        if mode != "rb" or posixpath.basename(name) != name:
            raise CorruptCheckpointError(f"the checkpoint's metadata names the file {name!r:.100}")
        with io.BufferedReader(_RangeReader(self._storage, self._storage.stat(name)), _BUFFER_BYTES) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        # Every file lies beside the metadata, so its name is its path.
        return suffix

    def init_path(self, path: Any) -> Any:
        return path


class StockReader(FileSystemReader):  # type: ignore[misc]
    """Torch's reader on our storage, without unrestricted unpickling. For one load."""

    def __init__(self, storage: CheckpointStorage, registry: Any, trusted_types: Sequence[type]) -> None:
        super().__init__(storage.url, _extension_registry=registry)
        self.fs = _StorageFileSystem(storage)
        self._storage = storage
        self._trusted_types = trusted_types

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Raises `CheckpointNotFoundError`, or as `unpickle_metadata`."""
        data = read_stock_metadata(self._storage, kwargs.get("rank"))
        if data is None:
            raise CheckpointNotFoundError(f"no checkpoint of torch's own writer at {self._storage.url}")
        read = unpickle_metadata(data, self._storage.url)
        if getattr(read, "storage_meta", None) is None:
            read.storage_meta = StorageMeta()
        return read

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Raises `CorruptCheckpointError` where torch's reader cannot make sense of a file."""
        try:
            return super().read_data(plan, _CheckedPlanner(planner, self._trusted_types))
        except MillraceError:
            raise
        except Exception as error:
            raise CorruptCheckpointError(
                f"torch's reader failed on {self._storage.url} ({type(error).__name__})",
                next_step="load another checkpoint",
            ) from error


class _CheckedPlanner:
    """A load planner that sees only objects that torch's safe loader accepts."""

    def __init__(self, planner: Any, trusted_types: Sequence[type]) -> None:
        self._planner, self._trusted_types = planner, trusted_types

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        check_blob(value.getvalue(), read_item.storage_index.fqn, self._trusted_types)
        self._planner.load_bytes(read_item, value)
