"""The writing side of `torch.distributed.checkpoint`: `CheckpointWriter`.

Torch calls, in this order: `reset` (only with a checkpoint id), `storage_meta`, `set_up_storage_writer`,
`prepare_local_plan` on every rank; `prepare_global_plan` on the coordinator; `write_data` on every rank; `finish` on
the coordinator. Without collectives every rank makes all the calls, and writes its own manifest.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from millrace.checkpoint.arguments import path_text
from millrace.checkpoint.codec.registry import Compression
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.manifests import (
    read_stock_metadata,
    refuse_existing,
    stock_mark,
    stock_metadata_name,
)
from millrace.checkpoint.storage.stock_metadata import stock_files
from millrace.checkpoint.storage.storage import can_open_storage
from millrace.checkpoint.writing.bases import Base, ItemKey
from millrace.checkpoint.writing.delta import RESTORE_LIMIT
from millrace.checkpoint.writing.packing import ItemSource, StoredWrapper, WrapperParts, discard
from millrace.checkpoint.writing.plans import check_cover, check_kinds, describe, sources_of
from millrace.checkpoint.writing.rank_writer import RankWriter
from millrace.errors import DeniedError, MillraceError, ObjectExistsError, UsageError
from millrace.events import Event, emit
from millrace.runtime.pipeline import collection_paused

_STOCK_COPY_AHEAD_BYTES = 10_000_000


class CheckpointWriter(RankWriter, StorageWriter, BlockingAsyncStager):  # type: ignore[misc]
    """Writes a checkpoint to a URL or local path: `dcp.save(state, storage_writer=CheckpointWriter(url))`.

    The arguments up to `serialization_format` are those of torch's `FileSystemWriter`; those without an effect here warn.
    Stream extensions (`_extensions`) are applied to every chunk after the codec; the reader then needs a registry with them.
    Other arguments:

    - `thread_count`: threads that compress; by default one per core, up to eight.
    - `compression`: "typed" balances size and speed; "max" is smaller and slower, in saving and in loading; "adaptive"
      compresses as much as the speed of the storage allows; "none" does not compress. All are verified when loaded.
    - `overwrite`: when False, an existing checkpoint is an `ObjectExistsError`. When True it is replaced in one step.
    - `target_options`: for the storage, as s3fs takes them.
    - `trusted_types`: additional classes that objects and the settings of tensor subclasses may have.
    - `user_metadata`: plain values to keep with the checkpoint.
    - `base`: an earlier checkpoint in a sibling directory. Unchanged chunks are references to it, and chunks that changed a
      little are stored as differences. Both need that directory's files from then on. `CheckpointManager` passes a base;
      otherwise use `StoredBase.open` or another writer's `written_base`.
    - `restore_limit`: with a base, the maximum cost of restoring a chunk with its bases, in sizes of the chunk alone.
    - `keep_base`: keep references to the saved tensors, without copying them, for `written_base`.

    One object saves one checkpoint at a time, and any number in sequence. It pickles, `target_options` included; a copy has
    no base. `stats` contains the figures of this rank's last save.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = _STOCK_COPY_AHEAD_BYTES,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = SerializationFormat.TORCH_SAVE,
        *,
        compression: Compression = "typed",
        target_options: Mapping[str, Any] | None = None,
        trusted_types: Sequence[type] = (),
        user_metadata: Mapping[str, Any] | None = None,
        base: Base | None = None,
        restore_limit: float = RESTORE_LIMIT,
        keep_base: bool = False,
    ) -> None:
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        meaningless = {
            "single_file_per_rank": not single_file_per_rank,
            "per_thread_copy_ahead": per_thread_copy_ahead != _STOCK_COPY_AHEAD_BYTES,
            "serialization_format": serialization_format != SerializationFormat.TORCH_SAVE,
        }
        for name in (name for name, given in meaningless.items() if given):
            warnings.warn(f"{name} has no effect in Millrace's checkpoint format", stacklevel=2)
        super().__init__(
            path,
            sync_files=sync_files,
            thread_count=thread_count,
            overwrite=overwrite,
            extensions=() if _extensions is None else _extensions,
            compression=compression,
            target_options=target_options,
            trusted_types=trusted_types,
            user_metadata=user_metadata,
            base=base,
            restore_limit=restore_limit,
            keep_base=keep_base,
        )
        self._save_id_is_used = False
        self._is_coordinator = True

    def __repr__(self) -> str:
        return f"CheckpointWriter({self._path!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Torch's saving process gets a copy of the writer for each save, which must not continue another save.
        dropped = dict.fromkeys(("_opened", "_unconfirmed", "_base", "_kept"))
        return {**self.__dict__, **dropped, "_save_id_is_used": True}

    @property
    def checkpoint_id(self) -> str:
        """The URL or path that is written to."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer can write to this URL or path."""
        return can_open_storage(checkpoint_id)

    # --- the calls of a save, in order ------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint, at `checkpoint_id` if that is given."""
        if checkpoint_id:
            self._path, self._opened = path_text("checkpoint_id", checkpoint_id), None
        self._save_id, self._save_id_is_used = uuid.uuid4().hex, False

    def storage_meta(self) -> StorageMeta:
        # The first call of every save; `reset` comes only with a checkpoint id.
        if self._save_id_is_used:
            self._save_id, self._save_id_is_used = uuid.uuid4().hex, False
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    # Torch passes `rank` and `use_collectives` only where a parameter is called `kwargs`.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._is_coordinator:
            # The coordinator finishes saves, so only it can detect that the last one was not finished.
            self.abandon()
        self._unconfirmed = self._kept = None
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank", 0)
        self._manifest_rank = None if kwargs.get("use_collectives", True) else self._rank
        self.stats = None

    def prepare_local_plan(self, plan: Any) -> Any:
        storage = self._storage()
        storage.prepare()
        alone = self._manifest_rank is not None
        if alone:
            # A reader prefers the manifest of the whole checkpoint, which a single rank cannot replace.
            try:
                refuse_existing(storage, None)
            except ObjectExistsError as error:
                raise UsageError(
                    f"{storage.url} has a checkpoint that was saved with collectives",
                    next_step="choose another place for a save without collectives",
                ) from error
        if not self._overwrite and (alone or self._is_coordinator):
            refuse_existing(storage, self._manifest_rank)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        check_kinds(plans)
        # Nothing of this save goes into a plan: torch replays cached plans in later saves.
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        kept: dict[ItemKey, ItemSource] | None = {} if self._keep_base else None
        wrapped: dict[int, WrapperParts] = {}
        sources = sources_of(plan, planner, self.trusted_types, kept, wrapped)
        self._save_id_is_used = True
        places = self.write_sources(len(plan.items), sources, kept, wrapped)
        with collection_paused():
            results = [
                WriteResult(index=item.index, size_in_bytes=place.nbytes, storage_data=place)
                for item, place in zip(plan.items, places, strict=True)
            ]
        future: Any = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        # Keys are plain tuples: an index computes its hash again, in Python, at each lookup.
        places = [((each.index.fqn, each.index.offset), each.storage_data) for rank in results for each in rank]
        with self._discarding(places):
            stock = self._stock_metadata(self._storage())
            with collection_paused():
                if self._manifest_rank is None:
                    # Planners do not check a single plan: it may be that of one rank in a save without collectives.
                    check_cover(metadata, complete=True)
                wrappers = {key for (key, _), place in places if isinstance(place, StoredWrapper)}
                described = describe(metadata, wrappers)
        self.finish_save(described, places, stock_mark(stock))
        if stock is not None:
            self._discard_stock(self._storage(), stock)

    # --- inside -----------------------------------------------------------------------------------

    def _stock_metadata(self, storage: CheckpointStorage) -> bytes | None:
        """The metadata of an earlier checkpoint of torch's own writer here, which this save replaces, too."""
        try:
            return read_stock_metadata(storage, self._manifest_rank)
        except DeniedError:
            return None

    def _discard_stock(self, storage: CheckpointStorage, stock: bytes) -> None:
        # Torch's reader would find the old state. Its metadata is removed first: without it the rest is not a checkpoint.
        discard(storage, [stock_metadata_name(self._manifest_rank)])
        try:
            discard(storage, stock_files(stock, storage.url))
        except MillraceError as error:
            emit(Event(name="checkpoint.discard.failed", subject=storage.url, detail=str(error)))
