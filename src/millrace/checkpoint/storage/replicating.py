"""Copies the files of a checkpoint between storages, verified, the manifest last. No torch."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millrace.checkpoint.arguments import whole_number
from millrace.checkpoint.format.manifest import MANIFEST_NAME, DataFile, Manifest
from millrace.checkpoint.storage.layered import StoredChunks, StoredManifest, files_exist
from millrace.checkpoint.storage.manifests import stat_data_file
from millrace.checkpoint.storage.storage import CheckpointStorage, LocalStorage
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MillraceError,
    MissingError,
    ObjectExistsError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    StorageError,
    UsageError,
)
from millrace.runtime.pipeline import run_in_order

# Files are read, checked and written in pieces of this size, rounded up to the end of a chunk.
_PIECE_BYTES = 8 << 20
# Concurrent files. An upload to an object store may need 130 MB for each: parts of 16 MiB, four of them in flight.
_DEFAULT_THREADS = 2

Progress = Callable[[int, int], None]
"""Called with the copied bytes and the bytes of all files. Any thread may call it, one at a time. An exception ends the
copy.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The result of a copy. `skipped` files existed at the target. Sizes in bytes, with the manifest. `seconds`: total time.

    `manifest`: "published" now, "present" before, or "none" if not requested.
    """

    copied: tuple[str, ...]
    skipped: tuple[str, ...]
    copied_bytes: int
    skipped_bytes: int
    manifest: Literal["published", "present", "none"]
    seconds: float


def copy_checkpoint(
    source: CheckpointStorage,
    target: CheckpointStorage,
    files: Collection[str] | None = None,
    *,
    manifest: bool = True,
    progress: Progress | None = None,
    threads: int = _DEFAULT_THREADS,
    check: Callable[[], None] | None = None,
    stored: StoredManifest | None = None,
) -> CopyReport:
    """Copy the data files `files` (all of the checkpoint's own by default), then its manifest when `manifest` is True.

    A file of the same length at the target is skipped: storages show only complete files, and file names are unique to a
    save. So copying again after a crash copies only the missing files. Every chunk is checked against the checksum in the
    manifest of the source. Before the manifest is published, every data file in it must exist at the target, including
    those of other ranks and siblings. Then `check` is called, and may raise. After an error there is no manifest and no
    partial file, but complete files remain.

    A rank that copies only its own files passes their names and `manifest=False`. The coordinator copies after all ranks.
    `stored` is the manifest if the source has it under another name: the part of one rank, for example.

    Raises `CheckpointNotFoundError` when the source has no manifest, `CorruptCheckpointError` when it is damaged,
    `ObjectNotFoundError` when the target lacks files that others must copy, `ObjectExistsError` when the target contains
    another save, and the errors of the storages. Files of siblings (`../`) are not copied: copy those checkpoints first,
    in the order of `tiers.pending_uploads`. Thread-safe. `threads` limits the memory.
    """
    whole_number("threads", threads, least=1)
    began = time.monotonic()
    try:
        stored = stored or StoredManifest.read(source)
    except MissingError as error:
        raise CheckpointNotFoundError(
            f"{source.url}: no complete checkpoint to copy", next_step="check the name"
        ) from error
    wanted = _chosen(source, stored.manifest, files)
    target.prepare()
    # A manifest at the target implies that all files are there.
    complete = manifest and _holds_manifest(target, stored)
    found = [True] * len(wanted) if complete else files_exist(target, wanted)
    skipped = [file for file, exists in zip(wanted, found, strict=True) if exists]
    missing = [file for file, exists in zip(wanted, found, strict=True) if not exists]
    manifest_bytes = len(stored.data) if manifest else 0
    skipped_bytes = sum(file.size for file in skipped) + (manifest_bytes if complete else 0)
    copied_bytes = sum(file.size for file in missing) + (0 if complete else manifest_bytes)
    meter = _Meter(progress, done=skipped_bytes, total=skipped_bytes + copied_bytes)
    try:
        _copy_all(source, target, stored.manifest, missing, meter, threads)
    except BaseException:
        if manifest and isinstance(target, LocalStorage):  # else other ranks may be about to write there
            with contextlib.suppress(OSError):  # it has files
                os.rmdir(target.url)
        raise
    if manifest and not complete:
        own = set(wanted)
        _require(target, [file for file in dict.fromkeys(stored.manifest.files) if file not in own])
        if check is not None:
            check()
        publish_manifest(target, stored)
        meter.add(manifest_bytes)
    return CopyReport(
        copied=tuple(file.name for file in missing),
        skipped=tuple(file.name for file in skipped),
        copied_bytes=copied_bytes,
        skipped_bytes=skipped_bytes,
        manifest="none" if not manifest else "present" if complete else "published",
        seconds=time.monotonic() - began,
    )


class _Meter:
    """Counts bytes of several threads."""

    def __init__(self, progress: Progress | None, *, done: int, total: int) -> None:
        self._progress, self._done, self._total = progress, done, total
        self._lock = threading.Lock()
        self.add(0)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)


# --- selection of files ---------------------------------------------------------------------------


def _chosen(source: CheckpointStorage, manifest: Manifest, files: Collection[str] | None) -> list[DataFile]:
    own = [file for file in dict.fromkeys(manifest.files) if not file.name.startswith("../")]
    if files is None:
        return own
    strange = sorted(set(files) - {file.name for file in own})
    if strange:
        raise UsageError(
            f"{source.url}: {strange[0]!r} is not one of its own data files",
            next_step="pass file names of its manifest, without '../'",
        )
    return [file for file in own if file.name in files]


def _require(target: CheckpointStorage, files: Sequence[DataFile]) -> None:
    """Raises `ObjectNotFoundError` when files that others must copy are missing."""
    lacking = [file.name for file, exists in zip(files, files_exist(target, files), strict=True) if not exists]
    if lacking:
        raise ObjectNotFoundError(
            f"{target.url}: {lacking[0]} is missing ({len(lacking)} of {len(files)} data files that others must copy)",
            next_step="copy its checkpoint first, or the files of the other nodes",
        )


# --- data files -----------------------------------------------------------------------------------


def _copy_all(
    source: CheckpointStorage,
    target: CheckpointStorage,
    manifest: Manifest,
    files: Sequence[DataFile],
    meter: _Meter,
    threads: int,
) -> None:
    failed = threading.Event()

    def copy(file: DataFile) -> None:
        if failed.is_set():
            return
        try:
            _copy_file(source, target, file, StoredChunks(manifest, file.name), meter, failed)
        except BaseException:
            failed.set()
            raise

    for _ in run_in_order(files, copy, min(threads, max(1, len(files)))):
        pass


def _copy_file(
    source: CheckpointStorage,
    target: CheckpointStorage,
    file: DataFile,
    chunks: StoredChunks,
    meter: _Meter,
    failed: threading.Event,
) -> None:
    """Copy one file. Aborts without an error when another thread has `failed`."""
    pinned = stat_data_file(source, file)
    writer = target.open_writer(file.name)
    try:
        for start, stop in _pieces(chunks, file.size):
            data = source.read(pinned, start, stop)
            row = chunks.first_wrong(start, data)
            if row is not None:
                raise CorruptCheckpointError(
                    f"chunk {row} of {source.url} (in {file.name}) does not match its checksum and is not copied",
                    next_step="check that disk; copy another checkpoint, or save again",
                )
            if failed.is_set():
                writer.abort()
                return
            writer.write(data)
            meter.add(stop - start)
        writer.close()
    except BaseException:
        writer.abort()
        raise


def _pieces(chunks: StoredChunks, size: int) -> Iterator[tuple[int, int]]:
    """Cut a file between chunks, so that each chunk can be checked in one piece."""
    furthest = np.maximum.accumulate(chunks.stops)
    start = 0
    while start < size:
        stop = min(start + _PIECE_BYTES, size)
        while True:
            begun = int(np.searchsorted(chunks.starts, stop))
            beyond = max(stop, int(furthest[begun - 1])) if begun else stop
            if beyond == stop:
                break
            stop = beyond
        yield start, stop
        start = stop


# --- the manifest ---------------------------------------------------------------------------------


def _holds_manifest(target: CheckpointStorage, stored: StoredManifest) -> bool:
    """Whether the target contains this manifest. Raises `ObjectExistsError` when it contains another one."""
    try:
        file = target.stat(MANIFEST_NAME)
        data = target.read(file, 0, file.size) if file.size == len(stored.data) else b""
    except MissingError:
        return False
    if memoryview(data).cast("B") == memoryview(stored.data):
        return True
    raise ObjectExistsError(
        f"{target.url}: contains another save", next_step="remove one of the two, or save under another step"
    )


def publish_manifest(target: CheckpointStorage, stored: StoredManifest) -> None:
    """Publish a manifest at the target in one step.

    Raises `ObjectExistsError` when the target contains another save, and `OutcomeUnknownError` when the manifest may be
    there in spite of a failure.
    """
    try:
        target.publish(MANIFEST_NAME, stored.data, replace=False)
    except ObjectExistsError:
        # Another process published it first. The same bytes are a success.
        if not _holds_manifest(target, stored):
            raise
    except StorageError as error:
        # A disk may fail after the rename: other ranks may have seen the manifest.
        if _may_hold_manifest(target, stored):
            raise OutcomeUnknownError(
                f"{target.url}: the manifest may not survive a power failure ({error.message})",
                next_step="check the disk, and save again",
            ) from error
        raise


def _may_hold_manifest(target: CheckpointStorage, stored: StoredManifest) -> bool:
    """As `_holds_manifest`, and True where that cannot be read."""
    try:
        return _holds_manifest(target, stored)
    except ObjectExistsError:
        raise
    except MillraceError:
        return True
