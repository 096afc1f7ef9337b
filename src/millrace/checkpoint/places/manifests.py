"""Manifests in a checkpoint's directory: their names, reading them, and what they say in short. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.checkpoint.codec.planes import checksum
from millrace.checkpoint.format.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    decode_manifest,
)
from millrace.checkpoint.host.garbage import collection_paused
from millrace.checkpoint.places.storage import CheckpointStorage, StoredFile
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeniedError,
    MillraceError,
    MissingError,
    ObjectExistsError,
    UnsupportedFormatError,
)

STOCK_METADATA_NAME = ".metadata"
"""What torch's own writer calls its metadata."""
_MAX_STOCK_METADATA_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A checkpoint in short. Sizes in bytes; `created` in Unix seconds.

    `raw_bytes` counts the values of every tensor and object; `stored_bytes` the checkpoint's own files, manifest
    included. Of a checkpoint of torch's own writer `format_version` is 0, and `created` is when its metadata was written.
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
class LoadedManifest:
    """A manifest with its stored length in bytes and the version of its file, which changes with every save."""

    manifest: Manifest
    nbytes: int
    version: str


def manifest_name(rank: int | None = None) -> str:
    """The checkpoint's manifest, or that of one rank of a save without collectives."""
    return MANIFEST_NAME if rank is None else f"rank-{rank}.{MANIFEST_NAME}"


def read_manifest(storage: CheckpointStorage, rank: int | None = None) -> LoadedManifest:
    """Read and check a manifest.

    Raises `CheckpointNotFoundError` (naming what lies there instead, where that is known), `CorruptCheckpointError`,
    or `UnsupportedFormatError`.
    """
    try:
        file = storage.stat(manifest_name(rank))
        return load_manifest(storage, file)
    except MissingError as error:
        raise _nothing_complete(storage, rank) from error


def load_manifest(storage: CheckpointStorage, file: StoredFile) -> LoadedManifest:
    """The same for a manifest that was listed. Raises `ObjectNotFoundError` when it was removed since."""
    if file.size > MAX_MANIFEST_BYTES:
        raise CorruptCheckpointError(f"the manifest of {storage.url} is impossibly long ({file.size} bytes)")
    data = storage.read(file, 0, file.size)
    try:
        with collection_paused():
            return LoadedManifest(decode_manifest(data), file.size, file.version)
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{storage.url}: {error.message}", next_step=error.next_step) from error
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{storage.url}: {error.message}", next_step="load another checkpoint, or restore this one from a copy"
        ) from error


def stock_metadata_name(rank: int | None = None) -> str:
    """What torch's own writer calls its metadata, of the whole checkpoint or of one rank."""
    return STOCK_METADATA_NAME if rank is None else f"__{rank}{STOCK_METADATA_NAME}"


def read_stock_metadata(storage: CheckpointStorage, rank: int | None = None) -> bytes | None:
    """The metadata that torch's own writer left there, as it is (a pickle: not to be loaded just so), or None."""
    try:
        file = storage.stat(stock_metadata_name(rank))
    except MissingError:
        return None
    if file.size > _MAX_STOCK_METADATA_BYTES:
        raise CorruptCheckpointError(f"the metadata of {storage.url} is impossibly long ({file.size} bytes)")
    return bytes(memoryview(storage.read(file, 0, file.size)))


def stock_mark(metadata: bytes | None) -> str | None:
    """How a manifest names the metadata of torch's that it replaces."""
    return None if metadata is None else f"{checksum(metadata):016x}"


def read_newest(storage: CheckpointStorage, rank: int | None = None) -> LoadedManifest:
    """`read_manifest`, which must be of the newest checkpoint in this directory.

    Raises `CheckpointNotFoundError` also where torch's own writer has saved over it: it leaves our files where they are.
    """
    loaded = read_manifest(storage, rank)
    try:
        mark = stock_mark(read_stock_metadata(storage, rank))
    except DeniedError:
        # S3's answer for what is not there, too, to whoever may not list. Others may read it, but we may not.
        return loaded
    if mark not in (None, loaded.manifest.replaces):
        raise CheckpointNotFoundError(
            f"torch's own writer has saved over the checkpoint at {storage.url}",
            next_step="load it with CheckpointReader",
        )
    return loaded


def _nothing_complete(storage: CheckpointStorage, rank: int | None) -> CheckpointNotFoundError:
    """Say what lies in place of the manifest, where the storage can tell."""
    try:
        names = storage.names()
    except MillraceError:
        # A cache cannot list, and credentials may not suffice to; the answer is right without it.
        names = []
    if rank is None and any(name.endswith(f".{MANIFEST_NAME}") for name in names):
        next_step = "it was saved without collectives: load it with as many ranks as saved it"
    elif STOCK_METADATA_NAME in names:
        next_step = "torch's own writer saved this one: CheckpointReader loads it, and knows no more about it"
    elif any(name.startswith("data-") for name in names):
        next_step = "its save did not finish, or it was removed since: load another checkpoint"
    else:
        next_step = "check the name, or load another checkpoint (this one may have been removed)"
    return CheckpointNotFoundError(f"no complete checkpoint at {storage.url}", next_step=next_step)


def refuse_existing(storage: CheckpointStorage, rank: int | None) -> None:
    """Raise `ObjectExistsError` when a manifest (or torch's metadata) of this name exists, whatever is in it."""
    for name in (manifest_name(rank), stock_metadata_name(rank)):
        with contextlib.suppress(MissingError):
            storage.stat(name)
            raise ObjectExistsError(
                f"a checkpoint exists already at {storage.url}", next_step="choose another name, or pass overwrite=True"
            )


def summarize(storage: CheckpointStorage, loaded: LoadedManifest) -> CheckpointSummary:
    """Add up a manifest."""
    manifest = loaded.manifest
    own_bytes = sum(file.size for file in manifest.files if not file.name.startswith("../"))
    return CheckpointSummary(
        url=storage.url,
        raw_bytes=int(manifest.items["nbytes"].sum()),
        stored_bytes=own_bytes + loaded.nbytes,
        tensors=len(manifest.tensors),
        objects=len(manifest.blobs),
        created=manifest.created,
        format_version=FORMAT_VERSION,
        user=manifest.user,
    )
