"""Writes one rank's items of a checkpoint, and publishes its manifest: `RankWriter`. No torch.

A save writes data files under unique names, and the manifest last. Until that atomic step the previous checkpoint is
unchanged. Its data files are removed only after it.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from millrace.checkpoint.arguments import classes, flag, mapping, path_text, real_number, thread_number
from millrace.checkpoint.codec.registry import Compression, schedule_for
from millrace.checkpoint.format.manifest import DataFile, Manifest, encode_manifest
from millrace.checkpoint.format.tables import chunk_table
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.manifests import manifest_name, read_manifest, refuse_existing, sweep
from millrace.checkpoint.storage.storage import open_storage
from millrace.checkpoint.writing.assembly import Described, Places, build_manifest, written_files
from millrace.checkpoint.writing.bases import Base, ItemKey, MemoryBase, Place, check_files
from millrace.checkpoint.writing.delta import RESTORE_LIMIT
from millrace.checkpoint.writing.packing import (
    ItemSource,
    RankData,
    SaveStats,
    StoredItem,
    StoredWrapper,
    WrapperParts,
    discard,
    stats_of,
    write_items,
)
from millrace.errors import (
    ConfigurationError,
    MillraceError,
    MissingError,
    OutcomeUnknownError,
    UsageError,
)
from millrace.events import Event, emit
from millrace.runtime.pipeline import collection_paused, default_threads


class RankWriter:
    """Writes a checkpoint to a URL or local path: `begin`, `write_sources`, `finish_save`; after an error, `abandon`.

    The arguments are those of `CheckpointWriter`. For one thread at a time. Internal: users call the methods of
    torch's protocol, on a `CheckpointWriter`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sync_files: bool = True,
        thread_count: int | None = None,
        overwrite: bool = True,
        extensions: Sequence[Any] = (),
        compression: Compression = "typed",
        target_options: Mapping[str, Any] | None = None,
        trusted_types: Sequence[type] = (),
        user_metadata: Mapping[str, Any] | None = None,
        base: Base | None = None,
        restore_limit: float = RESTORE_LIMIT,
        keep_base: bool = False,
    ) -> None:
        self._path = path_text("path", path)
        self._sync = flag("sync_files", sync_files)
        self._threads = thread_number("thread_count", thread_count) or default_threads()
        schedule_for(compression, self._threads)  # raises for an unknown name now, not during a save
        self._compression = compression
        self._transforms = Transforms(extensions)
        self._overwrite = flag("overwrite", overwrite)
        self._target_options = mapping("target_options", target_options) or {}
        self.trusted_types = classes("trusted_types", trusted_types)
        self._user_metadata = mapping("user_metadata", user_metadata) or {}
        self._save_id = uuid.uuid4().hex
        self._rank = 0
        # The rank in the manifest's name, if each rank writes its own manifest.
        self._manifest_rank: int | None = None
        self._opened: CheckpointStorage | None = None
        # Data files of the last save, until a manifest names them for certain.
        self._unconfirmed: tuple[CheckpointStorage, list[str]] | None = None
        if base is not None and not isinstance(base, Base):
            raise ConfigurationError(
                f"base={base!r:.100}", next_step="give StoredBase.open(...), or a writer's written_base()"
            )
        self._base, self._restore_limit = base, real_number("restore_limit", restore_limit, least=1)
        self._keep_base = flag("keep_base", keep_base)
        # The last save: its data, the place of each item in it, and the sources of the values.
        self._kept: tuple[RankData, dict[ItemKey, Place], dict[ItemKey, ItemSource]] | None = None
        self.stats: SaveStats | None = None

    @property
    def save_id(self) -> str:
        """The id of the current save, or else of the last one. The coordinator's id is in the manifest."""
        return self._save_id

    # --- the calls of a save, in order ------------------------------------------------------------

    def begin(self) -> None:
        """Begin a save by this rank alone, or of its part."""
        storage = self._storage()
        storage.prepare()
        if not self._overwrite:
            refuse_existing(storage, None)

    def write_sources(
        self,
        count: int,
        sources: Iterable[ItemSource],
        kept: Mapping[ItemKey, ItemSource] | None,
        wrapped: Mapping[int, WrapperParts],
    ) -> list[StoredItem | StoredWrapper]:
        """Write the sources of `count` items, and return the places of these items.

        `sources` fills `kept`, which `written_base` needs, and `wrapped` as `sources_of` does.
        """
        began = time.monotonic()
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
            found = _by_item(count, stored, wrapped)
        data = stored[0].data if stored else RankData((), chunk_table())
        self._unconfirmed = (self._storage(), [file.name for file in data.own_files])
        self.stats = stats_of(data, stored, time.monotonic() - began)
        if kept and self._keep_base:
            places = {key: Place(*place[1:]) for key, place in zip(kept, stored, strict=True)}
            self._kept = (data, places, dict(kept))
        return found

    def finish_save(self, described: Described, places: Places, replaces: str | None = None) -> None:
        """Publish the manifest, and remove the files of the checkpoint that it replaces.

        `places` are those of all items of the checkpoint, which cover its tensors (`check_cover`). `replaces` is the mark
        of a checkpoint of torch's own writer.
        """
        storage = self._storage()
        name = self._manifest_name()
        with self._discarding(places):
            previous = self._previous_files(storage)
            with collection_paused():
                manifest = build_manifest(
                    described, places, self._user_values(), save_id=self._save_id, replaces=replaces
                )
                data = encode_manifest(manifest)
            self._check_files(manifest.files)
            # An interrupt may come after the manifest is in place. Then `abandon` must not remove its files.
            self._unconfirmed = None
            self._publish(storage, name, data, manifest)
        current = {file.name for file in manifest.files}
        discard(storage, [name for name in previous if name not in current])
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

    def _user_values(self) -> Mapping[str, Any]:
        """The user metadata of the manifest, which is about to be written."""
        return self._user_metadata

    def _manifest_name(self) -> str:
        return manifest_name(self._manifest_rank)

    def _storage(self) -> CheckpointStorage:
        if self._opened is None:
            self._opened = open_storage(self._path, self._target_options, sync=self._sync)
        return self._opened

    def _check_files(self, files: Sequence[DataFile]) -> None:
        """Check that the files of other saves that this save needs exist. Raises `BaseGoneError`."""
        # Also without a base of this rank: that of another one may need them.
        if any(file.name.startswith("../") for file in files):
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
        storage.publish(name, data, replace=self._overwrite)

    @contextlib.contextmanager
    def _discarding(self, places: Places) -> Iterator[None]:
        """Remove the data files of a save that fails, unless its manifest may exist."""
        try:
            yield
        except MillraceError as error:
            if not isinstance(error, OutcomeUnknownError):
                discard(self._storage(), written_files(places))
            self._unconfirmed = None
            raise

    def _previous_files(self, storage: CheckpointStorage) -> list[str]:
        """Data files of the checkpoint that this save replaces, if its manifest can be read."""
        try:
            return [file.name for file in read_manifest(storage, self._manifest_rank).manifest.own_files]
        except MissingError:
            return []
        except MillraceError as error:
            emit(Event(name="checkpoint.previous.unreadable", subject=storage.url, detail=str(error)))
            return []


def _by_item(
    count: int, stored: Sequence[StoredItem], wrapped: Mapping[int, WrapperParts]
) -> list[StoredItem | StoredWrapper]:
    """The places by item of the plan: a wrapper tensor has several."""
    if not wrapped:
        return list(stored)
    found: list[StoredItem | StoredWrapper] = []
    places = iter(stored)
    for number in range(count):
        place, parts = next(places), wrapped.get(number)
        if parts is None:
            found.append(place)
        else:
            found.append(StoredWrapper(parts.recipe, place, tuple((*leaf, next(places)) for leaf in parts.leaves)))
    return found
