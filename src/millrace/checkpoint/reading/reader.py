"""The reading side of `torch.distributed.checkpoint`: `CheckpointReader`.

Torch calls on every rank: `reset` (only with a checkpoint id), `read_metadata`, `set_up_storage_reader`,
`prepare_local_plan`, then `prepare_global_plan` on the coordinator, then `read_data`. When `read_metadata()` fails, torch
calls it again with the rank, for a save without collectives.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import StorageReader

from millrace.checkpoint.arguments import (
    ReadThroughMode,
    classes,
    mapping,
    path_text,
    read_through_mode,
    thread_number,
)
from millrace.checkpoint.codec.extension import extension_registry
from millrace.checkpoint.format.manifest import Manifest
from millrace.checkpoint.format.transforms import transforms_for
from millrace.checkpoint.reading.hugging_face import SafetensorsFetcher, SafetensorsFiles, read_hugging_face
from millrace.checkpoint.reading.loads import check_rank_has_all, load_items
from millrace.checkpoint.reading.opening import summary_of
from millrace.checkpoint.reading.stock import StockReader
from millrace.checkpoint.state.tensors import metadata_of
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.fetching import ChunkFetcher
from millrace.checkpoint.storage.manifests import CheckpointSummary, read_newest
from millrace.checkpoint.storage.storage import can_open_storage, open_storage
from millrace.errors import ChangedError, CheckpointNotFoundError, ConfigurationError, MillraceError, UsageError
from millrace.origin import Readable
from millrace.runtime.pipeline import collection_paused, default_threads


class CheckpointReader(StorageReader):  # type: ignore[misc]
    """Reads a checkpoint from a URL or local path: `dcp.load(state, storage_reader=CheckpointReader(url))`.

    Reads checkpoints of `CheckpointWriter`, verifies every byte, and raises `CorruptCheckpointError` for damage. Also reads
    checkpoints of torch's own writer and Hugging Face directories (safetensors files), which have no checksums.
    `_extension_registry` is as in `FileSystemReader`. Without it, torch's `ZStandard` and `ZstdPlanes` are registered.

    - `target_options`: for the storage, as in s3fs.
    - `origin`: read from this origin (a cache) instead. `path` is then the key in it.
    - `read_through`: read data files through the cache of the cluster (`"auto"`, `"cluster"`, `"none"`), as in
      `CheckpointManager`.
    - `trusted_types`: classes of stored objects to accept in addition to those that torch trusts. Tensor subclasses in the
      state dict are accepted without an entry.
    - `thread_count`: threads that read and decompress. Default: one per core, at most eight.

    One object serves one load at a time, and any number in succession. Its pickle contains `target_options`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        target_options: Mapping[str, Any] | None = None,
        origin: Readable | None = None,
        read_through: ReadThroughMode = "auto",
        trusted_types: Sequence[type] = (),
        thread_count: int | None = None,
    ) -> None:
        self._path = path_text("path", path)
        if _extension_registry is not None and not hasattr(_extension_registry, "from_descriptor_list"):
            raise ConfigurationError(
                f"_extension_registry={_extension_registry!r:.100}", next_step="give an ExtensionRegistry of torch"
            )
        if origin is not None and not isinstance(origin, Readable):
            raise ConfigurationError(
                f"origin={origin!r:.100}", next_step="give an origin to read from, or leave it out"
            )
        self._extension_registry = extension_registry() if _extension_registry is None else _extension_registry
        self._target_options = mapping("target_options", target_options) or {}
        self._origin = origin
        self._read_through = read_through_mode(read_through)
        self._trusted_types = classes("trusted_types", trusted_types)
        self._threads = thread_number("thread_count", thread_count) or default_threads()
        self.reset()

    def __repr__(self) -> str:
        return f"CheckpointReader({self._path!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_opened": None,
            "_loaded": None,
            "_stock": None,
            "_safetensors": None,
            "_failure": None,
            "_rank_metadata": None,
        }

    @property
    def checkpoint_id(self) -> str:
        """The URL or path of the checkpoint."""
        return self._path

    @property
    def load_id(self) -> str:
        """The id of the current load, or of the last one."""
        return self._load_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader can read from a URL or path of this form."""
        return can_open_storage(checkpoint_id)

    def summary(self) -> CheckpointSummary:
        """A summary of the checkpoint. Raises as `describe`."""
        return summary_of(self._storage())

    # --- the calls of a load, in order ------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Discard all state of the last load. `checkpoint_id` replaces the path."""
        if checkpoint_id:
            self._path = path_text("checkpoint_id", checkpoint_id)
        self._load_id = uuid.uuid4().hex
        self._opened: CheckpointStorage | None = None
        self._loaded: Manifest | None = None
        self._stock: StockReader | None = None
        self._safetensors: SafetensorsFiles | None = None
        self._failure: MillraceError | None = None
        # The save that all ranks load.
        self._common_save_id: str | None = None
        # The metadata of one rank of a save without collectives.
        self._rank_metadata: Any = None

    # Torch passes a rank only when a parameter has the name `kwargs`.
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The metadata of the checkpoint, or of one `rank` of a save without collectives.

        Raises `CheckpointNotFoundError`, `CorruptCheckpointError` or `UnsupportedFormatError`. When both calls of torch
        fail, the second one returns an object that raises the more specific error on use. Torch would replace an
        exception of the second call by one that only quotes it.
        """
        rank: int | None = kwargs.get("rank")
        if rank is not None and not isinstance(self._failure, CheckpointNotFoundError | None):
            # The files of single ranks may be from an older save.
            return _Unreadable(self._failure)
        try:
            metadata = self._read_metadata(rank)
        except MillraceError as error:
            if rank is None or self._failure is None:
                self._failure = error
                raise
            return _Unreadable(self._failure if isinstance(error, CheckpointNotFoundError) else error)
        self._rank_metadata = None if rank is None else metadata
        if self._stock is not None or self._loaded is None:
            saved = metadata.storage_meta.save_id
        else:
            saved = self._loaded.save_id
        self._common_save_id = saved if rank is None else None
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=saved, load_id=self._load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if isinstance(metadata, _Unreadable):
            metadata.fail()
        if self._stock is not None:
            self._stock.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        return replace(plan, storage_data=self._common_save_id)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Raises `ChangedError` if the ranks have read the metadata of different saves (one from a cache, for example)."""
        # A planner may have replaced the plans.
        if any(plan.storage_data not in (None, self._common_save_id) for plan in plans):
            raise ChangedError(
                f"{self.checkpoint_id} was saved again while the ranks read its manifest", next_step="load it again"
            )
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        if self._rank_metadata is not None:
            check_rank_has_all(plan.items, planner, self._rank_metadata)
        if self._stock is not None:
            return self._stock.read_data(plan, planner)
        if self._loaded is None:
            raise UsageError("read_data before read_metadata", next_step="use torch.distributed.checkpoint.load")
        manifest = self._loaded
        fetcher: ChunkFetcher
        if self._safetensors is not None:
            fetcher = SafetensorsFetcher(self._storage(), self._safetensors, self._threads)
        else:
            transforms = transforms_for(manifest.transforms, self._extension_registry)
            fetcher = ChunkFetcher(self._storage(), manifest, self._threads, transforms)
        load_items(plan.items, planner, manifest, fetcher, self._trusted_types)
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future

    # --- inside -----------------------------------------------------------------------------------

    def _storage(self) -> CheckpointStorage:
        if self._opened is None:
            self._opened = open_storage(
                self._path, self._target_options, origin=self._origin, read_through=self._read_through
            )
        return self._opened

    def _read_metadata(self, rank: int | None) -> Any:
        storage = self._storage()
        self._stock = self._safetensors = None
        try:
            self._loaded = read_newest(storage, rank).manifest
        except CheckpointNotFoundError as missing:
            stock = StockReader(storage, self._extension_registry, self._trusted_types)
            try:
                metadata = stock.read_metadata(rank=rank)
            except CheckpointNotFoundError:
                self._loaded = self._read_safetensors(storage, rank, missing)
            else:
                self._stock = stock
                return metadata
        with collection_paused():
            return metadata_of(self._loaded)

    def _read_safetensors(
        self, storage: CheckpointStorage, rank: int | None, missing: CheckpointNotFoundError
    ) -> Manifest:
        """The description of a Hugging Face directory. Raises `missing` if it is none."""
        if rank is not None:
            raise missing from missing.__cause__
        try:
            self._safetensors = read_hugging_face(storage, self._threads)
        except CheckpointNotFoundError:
            raise missing from missing.__cause__
        return self._safetensors.manifest


class _Unreadable:
    """Stands for unreadable metadata: every access raises the error of the read."""

    def __init__(self, failure: MillraceError) -> None:
        self.__dict__["_failure"] = failure

    def fail(self) -> None:
        raise self.__dict__["_failure"]

    def __getattr__(self, name: str) -> Any:
        raise self.__dict__["_failure"]

    def __setattr__(self, name: str, value: Any) -> None:
        raise self.__dict__["_failure"]
