"""Reads checkpoints that torch's own `FileSystemWriter` wrote, from any storage that Millrace speaks to.

Their metadata is unpickled as `stock_metadata` does it, and stored objects go through torch's safe loader before the
planner sees them. Their data has no checksums: damage can go unseen.
"""

from __future__ import annotations

import contextlib
import io
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta

from millrace.checkpoint.places.manifests import read_stock_metadata
from millrace.checkpoint.places.stock_metadata import unpickle_metadata
from millrace.checkpoint.places.storage import CheckpointStorage, StoredFile
from millrace.checkpoint.state.tensors import check_blob
from millrace.errors import CheckpointNotFoundError, CorruptCheckpointError, MillraceError

_BUFFER_BYTES = 4 << 20


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
