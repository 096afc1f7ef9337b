"""The writing side of `torch.distributed.checkpoint`: `CheckpointWriter`.

Torch calls, in this order: `reset` (only with a checkpoint id), `storage_meta`, `set_up_storage_writer`,
`prepare_local_plan` on every rank; `prepare_global_plan` on the coordinator; `write_data` on every rank; `finish` on
the coordinator. Without collectives every rank makes all the calls, and writes its own manifest.

A save writes data files under unique names, and the manifest last. Until that atomic step the previous checkpoint is
unchanged. Its data files are removed only after it.
"""

from __future__ import annotations

import os
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from millrace.checkpoint.arguments import classes, flag, mapping, path_text, real_number, thread_number
from millrace.checkpoint.codec.effort import Compression, schedule_for
from millrace.checkpoint.format.manifest import DataFile, Manifest, encode_manifest
from millrace.checkpoint.format.tables import chunk_table
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.storage.manifests import (
    manifest_name,
    read_manifest,
    read_stock_metadata,
    refuse_existing,
    stock_mark,
    stock_metadata_name,
)
from millrace.checkpoint.storage.orphans import sweep
from millrace.checkpoint.storage.stock_metadata import stock_files
from millrace.checkpoint.storage.storage import CheckpointStorage, can_open_storage, open_storage
from millrace.checkpoint.writing.assembly import build_manifest, written_files
from millrace.checkpoint.writing.bases import Base, ItemKey, MemoryBase, Place, check_files
from millrace.checkpoint.writing.delta import RESTORE_LIMIT
from millrace.checkpoint.writing.packing import ItemSource, discard, write_items
from millrace.checkpoint.writing.plans import check_cover
from millrace.checkpoint.writing.rank_data import RankData, SaveStats, StoredItem, StoredWrapper, stats_of
from millrace.checkpoint.writing.sources import WrapperParts, sources_of
from millrace.errors import (
    ConfigurationError,
    DeniedError,
    MillraceError,
    MissingError,
    ObjectExistsError,
    OutcomeUnknownError,
    StorageError,
    UsageError,
)
from millrace.events import Event, emit
from millrace.runtime.garbage import collection_paused
from millrace.runtime.pipeline import default_threads

_STOCK_COPY_AHEAD_BYTES = 10_000_000


class CheckpointWriter(StorageWriter, BlockingAsyncStager):  # type: ignore[misc]
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
        self._path = path_text("path", path)
        self._sync = flag("sync_files", sync_files)
        self._threads = thread_number("thread_count", thread_count) or default_threads()
        schedule_for(compression, self._threads)  # raises for an unknown name now, not during a save
        self._compression = compression
        self._transforms = Transforms(() if _extensions is None else _extensions)
        self._overwrite = flag("overwrite", overwrite)
        self._target_options = mapping("target_options", target_options) or {}
        self._trusted_types = classes("trusted_types", trusted_types)
        self._user_metadata = mapping("user_metadata", user_metadata) or {}
        self._save_id, self._save_id_is_used = uuid.uuid4().hex, False
        self._rank = 0
        # The rank in the manifest's name, if each rank writes its own manifest.
        self._manifest_rank: int | None = None
        self._is_coordinator = True
        self._opened: CheckpointStorage | None = None
        # Data files of the last save, until a manifest names them for certain.
        self._unconfirmed: tuple[CheckpointStorage, list[str]] | None = None
        if base is not None and not all(hasattr(base, name) for name in ("find", "read", "chunks", "files")):
            raise ConfigurationError(
                f"base={base!r:.100}", next_step="give StoredBase.open(...), or a writer's written_base()"
            )
        self._base, self._restore_limit = base, real_number("restore_limit", restore_limit, least=1)
        self._keep_base = flag("keep_base", keep_base)
        # The last save: its data, the place of each item in it, and the sources of the values.
        self._kept: tuple[RankData, dict[ItemKey, Place], dict[ItemKey, ItemSource]] | None = None
        self.stats: SaveStats | None = None

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

    @property
    def save_id(self) -> str:
        """The id of the current save, or else of the last one. The coordinator's id is in the manifest."""
        return self._save_id

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

    def begin_alone(self) -> None:
        """The calls before `write_data` or `write_sources` in a save without collective calls of torch."""
        self.storage_meta()
        self.set_up_storage_writer(True, rank=self._rank)
        self.prepare_local_plan(None)

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
        # Nothing of this save goes into a plan: torch replays cached plans in later saves.
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        kept: dict[ItemKey, ItemSource] | None = {} if self._keep_base else None
        wrapped: dict[int, WrapperParts] = {}
        sources = sources_of(plan, planner, self._trusted_types, kept, wrapped)
        future: Any = torch.futures.Future()
        future.set_result(self.write_sources([item.index for item in plan.items], sources, kept, wrapped))
        return future

    def write_sources(
        self,
        indices: Sequence[Any],
        sources: Iterable[ItemSource],
        kept: Mapping[ItemKey, ItemSource] | None,
        wrapped: Mapping[int, WrapperParts],
    ) -> list[Any]:
        """Write the sources of the items with these indices; returns torch's results for `finish`.

        `sources` fills `kept`, which `written_base` needs, and `wrapped` as `sources_of` does.
        """
        began = time.monotonic()
        self._save_id_is_used = True
        stem = f"{uuid.uuid4().hex}-{self._rank}"
        schedule = schedule_for(self._compression, self._threads)
        stored = write_items(
            self._storage(),
            stem,
            sources,
            self._threads,
            schedule,
            self._transforms,
            self._usable_base(),
            self._restore_limit,
        )
        with collection_paused():
            results = [
                WriteResult(index=index, size_in_bytes=place.nbytes, storage_data=place)
                for index, place in zip(indices, _by_item(len(indices), stored, wrapped), strict=True)
            ]
        data = stored[0].data if stored else RankData((), chunk_table())
        self._unconfirmed = (self._storage(), [file.name for file in data.own_files])
        self.stats = stats_of(data, stored, time.monotonic() - began)
        if kept and self._keep_base:
            places = {key: Place(*place[1:]) for key, place in zip(kept, stored, strict=True)}
            self._kept = (data, places, dict(kept))
        return results

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        storage = self._storage()
        name = self._manifest_name()
        try:
            previous = self._previous_files(storage)
            stock = self._stock_metadata(storage)
            with collection_paused():
                if self._manifest_rank is None and not self._is_part:
                    # Planners do not check a single plan: it may be that of one rank in a save without collectives.
                    check_cover(metadata, complete=True)
                manifest = build_manifest(
                    metadata, results, self._user_metadata, save_id=self._save_id, replaces=stock_mark(stock)
                )
                data = encode_manifest(manifest)
            self._check_files(manifest.files)
            self._publish(storage, name, data, manifest)
        except MillraceError as error:
            if not isinstance(error, OutcomeUnknownError):
                discard(storage, written_files(results))
            self._unconfirmed = None
            raise
        self._unconfirmed = None
        current = {file.name for file in manifest.files}
        discard(storage, [name for name in previous if name not in current])
        if stock is not None:
            self._discard_stock(storage, stock)
        if not self._manifest_rank and not self._is_part:
            sweep(storage, name)

    def written_base(self, directory: str) -> MemoryBase | None:
        """This rank's last save as the base of the next one; None if it wrote nothing. Available once per save.

        `directory` is the name of the saved checkpoint's directory, next to that of the next one. The saved tensors must not
        change while the base is in use. Raises `UsageError` without `keep_base=True`.
        """
        if not self._keep_base:
            raise UsageError(
                "the writer did not keep the saved tensors", next_step="create it with CheckpointWriter(keep_base=True)"
            )
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        data, places, sources = kept
        return MemoryBase(directory, data.files, data.chunks, data.transforms, places, sources, sparse=data.sparse)

    # --- after a failure --------------------------------------------------------------------------

    def abandon(self, failure: BaseException | None = None) -> None:
        """Remove this rank's files of a failed save: `except CheckpointException as e: writer.abandon(e)`.

        Torch does not report the failure of another rank to a rank's writer. Without this call the data files stay until a
        save into the same directory a day later. Does nothing after a save that succeeded on the coordinator, or if
        `failure` means that the manifest may have been written. Never raises.
        """
        unconfirmed, self._unconfirmed, self._kept = self._unconfirmed, None, None
        failures = getattr(failure, "failures", None) or {0: (failure, None)}
        if unconfirmed and not any(isinstance(error, OutcomeUnknownError) for error, _ in failures.values()):
            discard(*unconfirmed)

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _is_part(self) -> bool:
        """Whether the manifest is that of one rank, and is joined with those of the others."""
        return False

    def _manifest_name(self) -> str:
        return manifest_name(self._manifest_rank)

    def _storage(self) -> CheckpointStorage:
        if self._opened is None:
            self._opened = open_storage(self._path, self._target_options, sync=self._sync)
        return self._opened

    def _check_files(self, files: Sequence[DataFile]) -> None:
        """Check that the files of other saves that this save needs exist. Raises `BaseGoneError`."""
        check_files(self._storage(), files, self._threads)

    def _usable_base(self) -> Base | None:
        base, storage = self._base, self._storage()
        if base is None:
            return None
        own = f"../{storage.url.rstrip('/').rpartition('/')[2]}/"
        if any(file.name.startswith(own) for file in base.files):
            raise UsageError(
                f"{storage.url} cannot be replaced by a save that is based on its files",
                next_step="save into another directory, or without a base",
            )
        if base.transforms != self._transforms.descriptors:
            detail = "it was saved with other stream extensions"
            emit(Event(name="checkpoint.base.unusable", subject=base.directory, detail=detail))
            return None
        return base

    def _publish(self, storage: CheckpointStorage, name: str, data: bytes, manifest: Manifest) -> None:
        """Publish the manifest. Raises `OutcomeUnknownError` if it may exist in spite of a failure."""
        try:
            storage.publish(name, data, replace=self._overwrite)
        except StorageError as error:
            # A disk may fail after the rename. Then the checkpoint exists, but may not survive a power failure.
            if _is_absent(storage, self._manifest_rank, manifest):
                raise
            raise OutcomeUnknownError(
                f"the manifest of {storage.url} may not survive a power failure ({error.message})",
                next_step="check the disk, and save again",
            ) from error

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

    def _previous_files(self, storage: CheckpointStorage) -> list[str]:
        """Data files of the checkpoint that this save replaces, if its manifest can be read."""
        try:
            files = read_manifest(storage, self._manifest_rank).manifest.files
        except MissingError:
            return []
        except MillraceError as error:
            emit(Event(name="checkpoint.previous.unreadable", subject=storage.url, detail=str(error)))
            return []
        return [file.name for file in files if not file.name.startswith("../")]


def _by_item(
    count: int, stored: Sequence[StoredItem], wrapped: Mapping[int, WrapperParts]
) -> Iterable[StoredItem | StoredWrapper]:
    """The places by item of the plan: a wrapper tensor has several."""
    if not wrapped:
        return stored
    found: list[StoredItem | StoredWrapper] = []
    places = iter(stored)
    for number in range(count):
        place, parts = next(places), wrapped.get(number)
        if parts is None:
            found.append(place)
        else:
            found.append(StoredWrapper(parts.recipe, place, tuple((*leaf, next(places)) for leaf in parts.leaves)))
    return found


def _is_absent(storage: CheckpointStorage, rank: int | None, manifest: Manifest) -> bool:
    """Whether there is certainly another manifest, or none."""
    try:
        return read_manifest(storage, rank).manifest.save_id != manifest.save_id
    except MissingError:
        return True
    except MillraceError:
        return False
