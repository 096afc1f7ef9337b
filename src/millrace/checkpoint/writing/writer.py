"""The writing side of `torch.distributed.checkpoint`: `CheckpointWriter`.

Torch calls, in this order: `reset` (only with a checkpoint id), `storage_meta`, `set_up_storage_writer`,
`prepare_local_plan` on every rank; `prepare_global_plan` on the coordinator; `write_data` on every rank; `finish` on
the coordinator. Without collectives every rank makes all the calls, for a manifest of its own.

A save writes data files under names that no other save uses, and the manifest last; until that one atomic step the
previous checkpoint is untouched, and only after it are the previous data files removed.
"""

from __future__ import annotations

import os
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from millrace.checkpoint.codec.effort import Compression, schedule_for
from millrace.checkpoint.format.manifest import DataFile, Manifest, encode_manifest
from millrace.checkpoint.format.tables import chunk_table
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.host.garbage import collection_paused
from millrace.checkpoint.host.pipeline import default_threads
from millrace.checkpoint.places.manifests import (
    manifest_name,
    read_manifest,
    read_stock_metadata,
    refuse_existing,
    stock_mark,
    stock_metadata_name,
)
from millrace.checkpoint.places.orphans import sweep
from millrace.checkpoint.places.stock_metadata import stock_files
from millrace.checkpoint.places.storage import CheckpointStorage, can_open_storage, open_storage
from millrace.checkpoint.writing.assembly import build_manifest, written_files
from millrace.checkpoint.writing.bases import Base, ItemKey, MemoryBase, Place, check_files
from millrace.checkpoint.writing.delta import RESTORE_LIMIT
from millrace.checkpoint.writing.encoder_process import EncoderProcess
from millrace.checkpoint.writing.packing import RankData, Source, discard, write_items
from millrace.checkpoint.writing.plans import check_cover
from millrace.checkpoint.writing.save_stats import SaveStats, stats_of
from millrace.checkpoint.writing.sources import key_of, sources_of
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

_STOCK_COPY_AHEAD_BYTES = 10_000_000


class CheckpointWriter(StorageWriter, BlockingAsyncStager):  # type: ignore[misc]
    """Writes a checkpoint to a URL or local path: `dcp.save(state, storage_writer=CheckpointWriter(url))`.

    The arguments up to `serialization_format` are those of torch's `FileSystemWriter`; one that has no meaning here
    warns. Stream extensions (`_extensions`) are applied to every chunk after the codec; the reader then needs a registry
    that knows them. Others:

    - `thread_count`: threads that compress; by default one a core, up to eight.
    - `compression`: "typed" balances size and speed; "max" is smaller and slower, in saving and in loading; "adaptive"
      compresses as much as keeps up with the storage; "none" stores every byte as it is. All load alike, verified.
    - `overwrite`: when False, an existing checkpoint is an `ObjectExistsError`. When True it is replaced in one step.
    - `target_options`: for the storage, as s3fs takes them.
    - `trusted_types`: classes that objects in the state dict may have beside those that torch trusts.
    - `user_metadata`: plain values to keep with the checkpoint.
    - `base`: an earlier checkpoint in a directory beside this one. What has not changed since is referred to there, what has
      changed a little is stored as the difference; both need that directory's files from then on.
      `CheckpointManager` gives it; by hand it is `StoredBase.open` or another writer's `written_base`.
    - `restore_limit`: with a base, no chunk's differences may cost a restore more than so many times the chunk alone.
    - `keep_base`: remember the saved tensors, without copying them, for `written_base`.

    One object saves one checkpoint at a time, and any number in a row. It pickles, `target_options` included; a copy has
    no base.
    `stats` holds what this rank wrote in its last save.
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
        if thread_count is not None and thread_count < 1:
            raise ConfigurationError(f"thread_count={thread_count}", next_step="give a positive number")
        if not restore_limit >= 1:
            raise ConfigurationError(f"restore_limit={restore_limit}", next_step="give 1 or more")
        self._path = os.fspath(path)
        self._sync = sync_files
        self._threads = thread_count or default_threads()
        schedule_for(compression, self._threads)  # refuses an unknown name now, not in the middle of a save
        self._compression = compression
        self._transforms = Transforms(_extensions or ())
        self._overwrite = overwrite
        self._target_options = dict(target_options or {})
        self._trusted_types = tuple(trusted_types)
        self._user_metadata = dict(user_metadata or {})
        self._save_id, self._save_id_is_used = uuid.uuid4().hex, False
        self._rank = 0
        # The rank in the manifest's name, when each rank writes a manifest of its own.
        self._manifest_rank: int | None = None
        self._is_coordinator = True
        self._opened: CheckpointStorage | None = None
        # Data files of the last save, as long as nothing says that a manifest names them.
        self._unconfirmed: tuple[CheckpointStorage, list[str]] | None = None
        self._base, self._restore_limit = base, restore_limit
        self._keep_base = keep_base
        # Set by a manager.
        self._process: EncoderProcess | None = None
        # What the last save wrote: where it lies, each item's place in it, and the values.
        self._kept: tuple[RankData, dict[ItemKey, Place], dict[ItemKey, Source]] | None = None
        self.stats: SaveStats | None = None

    def __repr__(self) -> str:
        return f"CheckpointWriter({self._path!r})"

    def __getstate__(self) -> dict[str, Any]:
        # A copy's saves are others: torch's saving process gets a fresh copy for each.
        forgotten = dict.fromkeys(("_opened", "_unconfirmed", "_base", "_kept", "_process"))
        return {**self.__dict__, **forgotten, "_save_id_is_used": True}

    @property
    def checkpoint_id(self) -> str:
        """The URL or path that is written to."""
        return self._path

    @property
    def save_id(self) -> str:
        """Names the save that is under way, or else the last one: the coordinator's is in the manifest."""
        return self._save_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer can write to a place of this name."""
        return can_open_storage(checkpoint_id)

    # --- the calls of a save, in order ------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint, at another place when `checkpoint_id` is given."""
        if checkpoint_id:
            self._path, self._opened = os.fspath(checkpoint_id), None
        self._save_id, self._save_id_is_used = uuid.uuid4().hex, False

    def storage_meta(self) -> StorageMeta:
        # The first call of every save; `reset` comes only with a checkpoint id.
        if self._save_id_is_used:
            self._save_id, self._save_id_is_used = uuid.uuid4().hex, False
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    # Torch passes `rank` and `use_collectives` only where a parameter is called `kwargs`.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._is_coordinator:
            # Whoever finishes saves knows that the last one was not finished; other ranks cannot know.
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
            # A reader prefers the whole checkpoint's manifest, and no rank alone can say when all are done.
            try:
                refuse_existing(storage, None)
            except ObjectExistsError as error:
                raise UsageError(
                    f"a checkpoint saved with collectives lies at {storage.url}",
                    next_step="choose another place for a save without collectives",
                ) from error
        if not self._overwrite and (alone or self._is_coordinator):
            refuse_existing(storage, self._manifest_rank)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        # Nothing of this save goes into a plan: torch replays cached plans in later saves.
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        began = time.monotonic()
        self._save_id_is_used = True
        stem = f"{uuid.uuid4().hex}-{self._rank}"
        schedule = schedule_for(self._compression, self._threads)
        kept: dict[ItemKey, Source] | None = {} if self._keep_base else None
        sources = sources_of(plan, planner, self._trusted_types, kept)
        stored = write_items(
            self._storage(),
            stem,
            sources,
            self._threads,
            schedule,
            self._transforms,
            self._usable_base(),
            self._restore_limit,
            self._process,
        )
        with collection_paused():
            results = [
                WriteResult(index=item.index, size_in_bytes=place.nbytes, storage_data=place)
                for item, place in zip(plan.items, stored, strict=True)
            ]
        data = stored[0].data if stored else RankData((), chunk_table())
        self._unconfirmed = (self._storage(), [file.name for file in data.own_files])
        self.stats = stats_of(data, stored, time.monotonic() - began)
        if kept:
            places = {key_of(item): Place(*place[1:]) for item, place in zip(plan.items, stored, strict=True)}
            self._kept = (data, places, kept)
        future: Any = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        storage = self._storage()
        name = manifest_name(self._manifest_rank)
        try:
            previous = self._previous_files(storage)
            stock = self._stock_metadata(storage)
            with collection_paused():
                if self._manifest_rank is None:
                    # Of a single plan no planner asks this: it may be one rank's of a save that others do not take part in.
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
        if not self._manifest_rank:
            sweep(storage, name)

    def written_base(self, directory: str) -> MemoryBase | None:
        """What this rank has saved, as the base of a next save; None when it wrote nothing. Can be had once a save.

        `directory` is the name of the checkpoint that was saved, beside which the next one will lie. The tensors that were
        saved must stay as they are while the base is in use. Raises `UsageError` without `keep_base=True`.
        """
        if not self._keep_base:
            raise UsageError(
                "the writer did not remember what it saved", next_step="make it with CheckpointWriter(keep_base=True)"
            )
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        data, places, sources = kept
        return MemoryBase(directory, data.files, data.chunks, data.transforms, places, sources)

    # --- after a failure --------------------------------------------------------------------------

    def abandon(self, failure: BaseException | None = None) -> None:
        """Remove what this rank wrote in a save that failed: `except CheckpointException as e: writer.abandon(e)`.

        Torch does not tell a rank's writer that another rank has failed. Without this call the data files stay until a
        save into the same directory a day later. Does nothing after a save that succeeded on the coordinator, or
        when `failure` says that the manifest may have been written all the same. Never raises.
        """
        unconfirmed, self._unconfirmed, self._kept = self._unconfirmed, None, None
        failures = getattr(failure, "failures", None) or {0: (failure, None)}
        if unconfirmed and not any(isinstance(error, OutcomeUnknownError) for error, _ in failures.values()):
            discard(*unconfirmed)

    # --- inside -----------------------------------------------------------------------------------

    def _storage(self) -> CheckpointStorage:
        if self._opened is None:
            self._opened = open_storage(self._path, self._target_options, sync=self._sync)
        return self._opened

    def _check_files(self, files: Sequence[DataFile]) -> None:
        """Make sure that what others have saved and this save needs is there. Raises `BaseGoneError`."""
        check_files(self._storage(), files, self._threads)

    def _usable_base(self) -> Base | None:
        base, storage = self._base, self._storage()
        if base is None:
            return None
        own = f"../{storage.url.rstrip('/').rpartition('/')[2]}/"
        if any(file.name.startswith(own) for file in base.files):
            raise UsageError(
                f"{storage.url} cannot be replaced by what builds on its own files",
                next_step="save into another directory, or without a base",
            )
        if base.transforms != self._transforms.descriptors:
            detail = "it was saved through other stream extensions"
            emit(Event(name="checkpoint.base.unusable", subject=base.directory, detail=detail))
            return None
        return base

    def _publish(self, storage: CheckpointStorage, name: str, data: bytes, manifest: Manifest) -> None:
        """Raises `OutcomeUnknownError` where the manifest may be there in spite of the failure."""
        try:
            storage.publish(name, data, replace=self._overwrite)
        except StorageError as error:
            # A disk may fail after the rename: then the checkpoint is there, though maybe not for long.
            if _is_absent(storage, self._manifest_rank, manifest):
                raise
            raise OutcomeUnknownError(
                f"the manifest of {storage.url} may not outlive a power failure ({error.message})",
                next_step="check the disk, and save again",
            ) from error

    def _stock_metadata(self, storage: CheckpointStorage) -> bytes | None:
        """What torch's own writer saved here before; this save replaces that, too."""
        try:
            return read_stock_metadata(storage, self._manifest_rank)
        except DeniedError:
            return None

    def _discard_stock(self, storage: CheckpointStorage, stock: bytes) -> None:
        # Torch's reader would find the old state. Its metadata goes first: without it the rest is no checkpoint.
        discard(storage, [stock_metadata_name(self._manifest_rank)])
        try:
            discard(storage, stock_files(stock, storage.url))
        except MillraceError as error:
            emit(Event(name="checkpoint.discard.failed", subject=storage.url, detail=str(error)))

    def _previous_files(self, storage: CheckpointStorage) -> list[str]:
        """Data files of the checkpoint that this save replaces, as far as its manifest can be read."""
        try:
            files = read_manifest(storage, self._manifest_rank).manifest.files
        except MissingError:
            return []
        except MillraceError as error:
            emit(Event(name="checkpoint.previous.unreadable", subject=storage.url, detail=str(error)))
            return []
        return [file.name for file in files if not file.name.startswith("../")]


def _is_absent(storage: CheckpointStorage, rank: int | None, manifest: Manifest) -> bool:
    """Whether another manifest, or none, is what lies there, without doubt."""
    try:
        return read_manifest(storage, rank).manifest.save_id != manifest.save_id
    except MissingError:
        return True
    except MillraceError:
        return False
