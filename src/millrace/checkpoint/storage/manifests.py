"""Manifests in the directory of a checkpoint: names, reading, summaries, and the files that no manifest owns. No torch.

Such files, *orphans*, are those of killed or failed saves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.checkpoint.codec.chunks import checksum
from millrace.checkpoint.format.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    DataFile,
    Manifest,
    decode_manifest,
)
from millrace.checkpoint.storage.base import CheckpointStorage, StoredFile, has_file
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeniedError,
    MillraceError,
    MissingError,
    ObjectExistsError,
    UnsupportedFormatError,
)
from millrace.events import Event, emit
from millrace.runtime.pipeline import collection_paused

STOCK_METADATA_NAME = ".metadata"
"""The metadata file of torch's own writer."""
_MAX_STOCK_METADATA_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A summary of a checkpoint. Sizes in bytes, `created` in Unix seconds.

    `raw_bytes` is the size of all tensors and objects. `stored_bytes` is the size of the files of this checkpoint,
    including the manifest. For a checkpoint of torch's own writer, `format_version` is 0 and `created` is the time of its
    metadata.
    """

    url: str
    raw_bytes: int
    stored_bytes: int
    tensors: int
    objects: int
    created: float
    format_version: int
    user: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest and its stored bytes. Picklable."""

    file: StoredFile
    data: bytes
    manifest: Manifest

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @classmethod
    def read(cls, storage: CheckpointStorage, name: str = MANIFEST_NAME) -> StoredManifest:
        """Read the manifest, or the part of one rank with this name. Raises as `load_manifest`."""
        return load_manifest(storage, storage.stat(name))


def manifest_name(rank: int | None = None) -> str:
    """The file name of the manifest, or of the manifest of one rank of a save without collectives."""
    return MANIFEST_NAME if rank is None else f"rank-{rank}.{MANIFEST_NAME}"


def read_manifest(storage: CheckpointStorage, rank: int | None = None) -> StoredManifest:
    """Read and check a manifest.

    Raises `CheckpointNotFoundError` (with a next step that depends on the files in the directory),
    `CorruptCheckpointError`, or `UnsupportedFormatError`.
    """
    try:
        return load_manifest(storage, storage.stat(manifest_name(rank)))
    except MissingError as error:
        raise _not_found(storage, rank) from error


def load_manifest(storage: CheckpointStorage, file: StoredFile) -> StoredManifest:
    """Read and check a manifest, or the part of one rank, that was listed.

    Raises `ObjectNotFoundError` when it was removed since, else as `read_manifest`.
    """
    if file.size > MAX_MANIFEST_BYTES:
        raise CorruptCheckpointError(
            f"{storage.url}: the manifest is impossibly long ({file.size} bytes)", next_step="load another checkpoint"
        )
    data = bytes(memoryview(storage.read(file, 0, file.size)).cast("B"))
    try:
        with collection_paused():
            return StoredManifest(file, data, decode_manifest(data))
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{storage.url}: {error.message}", next_step=error.next_step) from error
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{storage.url}: {error.message}", next_step="load another checkpoint, or restore this one from a copy"
        ) from error


def stat_data_file(storage: CheckpointStorage, listed: DataFile) -> StoredFile:
    """Describe a data file of the manifest. Raises `CorruptCheckpointError` when it is missing or has another length."""
    try:
        file = storage.stat(listed.name)
    except MissingError as error:
        raise CorruptCheckpointError(
            f"{storage.url}: the data file {listed.name} is missing",
            next_step="try again if the checkpoint was being overwritten, else use another checkpoint",
        ) from error
    check_size(storage, file, listed.size)
    return file


def check_size(storage: CheckpointStorage, file: StoredFile, size: int) -> None:
    """Raise `CorruptCheckpointError` when a data file has another length than in the manifest."""
    if file.size != size:
        raise CorruptCheckpointError(
            f"{storage.url}: {file.name} has {file.size} bytes instead of {size}",
            next_step="use another checkpoint, or restore this one from a copy",
        )


def stock_metadata_name(rank: int | None = None) -> str:
    """The metadata file of torch's own writer, for the whole checkpoint or one rank."""
    return STOCK_METADATA_NAME if rank is None else f"__{rank}{STOCK_METADATA_NAME}"


def read_stock_metadata(storage: CheckpointStorage, rank: int | None = None) -> bytes | None:
    """The metadata of torch's own writer, or None. It is a pickle: load it only with `stock_metadata`."""
    try:
        file = storage.stat(stock_metadata_name(rank))
    except MissingError:
        return None
    if file.size > _MAX_STOCK_METADATA_BYTES:
        raise CorruptCheckpointError(f"{storage.url}: the metadata is impossibly long ({file.size} bytes)")
    return bytes(memoryview(storage.read(file, 0, file.size)))


def stock_mark(metadata: bytes | None) -> str | None:
    """The text in a manifest that identifies the metadata of torch's own writer that the save replaced."""
    return None if metadata is None else f"{checksum(metadata):016x}"


def read_newest(storage: CheckpointStorage, rank: int | None = None) -> StoredManifest:
    """Read and check the manifest, if it is the newest checkpoint in the directory. Raises as `read_manifest`.

    Also raises `CheckpointNotFoundError` when torch's own writer has saved to the directory later. It does not remove our
    files.
    """
    loaded = read_manifest(storage, rank)
    try:
        mark = stock_mark(read_stock_metadata(storage, rank))
    except DeniedError:
        # S3 denies access to a missing object if the client may not list. The metadata may also exist for other clients.
        return loaded
    if mark not in (None, loaded.manifest.replaces):
        raise CheckpointNotFoundError(
            f"{storage.url}: torch's own writer has saved over this checkpoint",
            next_step="load it with CheckpointReader",
        )
    return loaded


def _not_found(storage: CheckpointStorage, rank: int | None) -> CheckpointNotFoundError:
    """The error for a missing manifest. Its next step depends on the other files, if the storage can list them."""
    try:
        names = storage.names()
    except MillraceError:
        # A cache cannot list, and credentials may not allow it. The error is correct without the list.
        names = []
    if rank is None and any(name.endswith(f".{MANIFEST_NAME}") for name in names):
        next_step = "it was saved without collectives: load it with as many ranks as saved it"
    elif STOCK_METADATA_NAME in names:
        next_step = "torch's own writer saved it: load it with CheckpointReader"
    elif any(name.startswith("data-") for name in names):
        next_step = "its save did not finish, or it was removed: load another checkpoint"
    elif any(name.startswith("writer-") and name.endswith(".json") for name in names):  # see run/claims.py
        next_step = "this is a run: give one of its checkpoints, such as step-000000000100 in it"
    else:
        next_step = "check the name, or load another checkpoint (this one may have been removed)"
    return CheckpointNotFoundError(f"no complete checkpoint at {storage.url}", next_step=next_step)


def refuse_existing(storage: CheckpointStorage, rank: int | None) -> None:
    """Raise `ObjectExistsError` when the manifest, or the metadata of torch's own writer, exists."""
    if has_file(storage, manifest_name(rank)) or has_file(storage, stock_metadata_name(rank)):
        raise ObjectExistsError(
            f"{storage.url}: a checkpoint exists already", next_step="choose another name, or pass overwrite=True"
        )


def summarize(storage: CheckpointStorage, manifest: Manifest, nbytes: int) -> CheckpointSummary:
    """The summary of a manifest that is stored in `nbytes`."""
    return CheckpointSummary(
        url=storage.url,
        raw_bytes=int(manifest.items["nbytes"].sum()),
        stored_bytes=sum(file.size for file in manifest.own_files) + nbytes,
        tensors=len(manifest.tensors),
        objects=len(manifest.blobs),
        created=manifest.created,
        format_version=FORMAT_VERSION,
        user=manifest.user,
    )


ORPHAN_SECONDS = 24 * 3600.0
"""An orphan is removed when it is this much older than the newest manifest, and than the present. A running save has files
without a manifest, too, and an object store dates a long upload by its begin. So a save must not take longer than this.
"""

# Final and temporary names of `open_writer` and `publish`, and of the files by which ranks save together. No other file is
# ever removed.
_LEFT_BEHIND = re.compile(
    r"(?:data|part)-[0-9a-z-]{1,100}\.millrace|failed-[0-9a-z-]{1,100}\.json"
    r"|\.(?:(?:(?:data|part)-[0-9a-z-]{1,100}|(?:rank-\d+\.)?manifest)\.millrace|failed-[0-9a-z-]{1,100}\.json)\.[0-9a-f]{8}\.tmp",
    re.ASCII,
)
_RANK_MANIFEST = re.compile(rf"rank-(\d+)\.{re.escape(MANIFEST_NAME)}", re.ASCII)


def is_left_behind(name: str) -> bool:
    """Whether a file of this name can be an orphan: only our writers use such names."""
    return _LEFT_BEHIND.fullmatch(name) is not None


def rank_of_manifest(name: str) -> int | None:
    """The rank of a manifest of a save without collectives. None for other names."""
    match = _RANK_MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def old_before(published: float, now: float) -> float:
    """The time before which a file without a manifest is old. `published` is that of the newest manifest.

    It and the times of files are from the clock of the storage. That clock may have been ahead, and then set back: then
    `now`, by the clock of this process, counts. A process whose clock is behind removes such files later.
    """
    return min(published, now) - ORPHAN_SECONDS


def find_orphans(files: Iterable[StoredFile], owned: Collection[str], before: float) -> list[str]:
    """Names of the files that no manifest owns and that are from before the time `before` (`old_before`)."""
    return [
        file.name for file in files if is_left_behind(file.name) and file.name not in owned and file.modified < before
    ]


def sweep(storage: CheckpointStorage, manifest_name: str) -> None:
    """Remove the orphans in the directory, after `manifest_name` was published.

    The checkpoint is already complete, so a failure is only an event. Safe during other saves: their files are too new.
    """
    try:
        files = storage.files()
        published = next((file.modified for file in files if file.name == manifest_name), None)
        if published is None:
            return
        before = old_before(published, time.time())
        if not find_orphans(files, (), before):
            return
        # Read all manifests only when there may be orphans. An unreadable manifest owns all files.
        orphans = find_orphans(files, _owned_files(storage, files), before)
        if orphans:
            storage.delete(orphans)
            emit(Event(name="checkpoint.orphans.removed", subject=storage.url, detail=", ".join(orphans)))
    except MillraceError as error:
        emit(Event(name="checkpoint.sweep.failed", subject=storage.url, detail=str(error)))


def _owned_files(storage: CheckpointStorage, files: Iterable[StoredFile]) -> set[str]:
    owned: set[str] = set()
    for name in (file.name for file in files):
        rank = rank_of_manifest(name)
        if rank is None and name != MANIFEST_NAME:
            continue
        try:
            manifest = read_manifest(storage, rank).manifest
        except MissingError:
            continue
        owned.update(file.name for file in manifest.files)
    return owned
