"""Copies the files of a checkpoint between storages, verified, the manifest last. No torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from millrace.checkpoint.format.manifest import MANIFEST_NAME, DataFile, Manifest
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.layered import StoredChunks, missing_files
from millrace.checkpoint.storage.manifests import StoredManifest, stat_data_file
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MillraceError,
    MissingError,
    ObjectExistsError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    RunTakenError,
    UsageError,
)
from millrace.runtime.pipeline import run_in_order

# Files are read, checked and written in pieces of this size, rounded up to the end of a chunk.
_PIECE_BYTES = 8 << 20
# Concurrent files. An upload to an object store may need 130 MB for each: parts of 16 MiB, four of them in flight.
_THREADS = 2
# In this time no other process takes a run, saves, and prunes.
_AT_ONCE_SECONDS = 0.1

Progress = Callable[[int, int], None]
"""Called with the copied bytes and the bytes of all files. Any thread may call it, one at a time. An exception ends the
copy.
"""


def copy_files(
    source: CheckpointStorage,
    target: CheckpointStorage,
    files: Collection[str],
    *,
    progress: Progress | None = None,
    stored: StoredManifest | None = None,
) -> None:
    """Copy these of the checkpoint's own data files. It needs no claim: without a manifest they are no checkpoint.

    A file of the same length at the target is skipped: storages show only complete files, and file names are unique to a
    save. So copying again after a crash copies only the missing files. Every chunk is checked against the checksum in the
    manifest of the source. After an error there is no partial file, but complete files remain. `stored` is the manifest if
    the source has it under another name: the part of one rank, for example.

    Raises `CheckpointNotFoundError` when the source has no manifest, `CorruptCheckpointError` when it is damaged, and the
    errors of the storages. Files of siblings (`../`) are not copied: copy those checkpoints first, in the order of
    `tiers.pending_uploads`. Thread-safe.
    """
    manifest = (stored or _read_manifest(source)).manifest
    wanted = _chosen(source, manifest, files)
    target.prepare()
    missing = missing_files(target, wanted)
    total = sum(file.size for file in wanted)
    meter = _Meter(progress, done=total - sum(file.size for file in missing), total=total)
    _copy_all(source, target, manifest, missing, meter)


def publish_checkpoint(source: CheckpointStorage, target: CheckpointStorage, check: Callable[[], None]) -> None:
    """Publish the manifest of the source at the target, after all ranks have copied their files.

    Every data file in it must exist at the target, including those of other ranks and siblings. `check` is called after this
    is known, and may raise. A target that has the manifest is left as it is.

    Raises `CheckpointNotFoundError` when the source has no manifest, `ObjectNotFoundError` when the target lacks files,
    `ObjectExistsError` when it contains another save, and the errors of the storages. Thread-safe.
    """
    stored = _read_manifest(source)
    target.prepare()
    # A manifest at the target implies that all files are there.
    if not _holds_manifest(target, stored):
        try:
            _require(target, dict.fromkeys(stored.manifest.files))
        except ObjectNotFoundError:
            check()  # the next owner of the run may have removed them, which is then the error
            raise
        publish_checked(target, stored.manifest, lambda: publish_manifest(target, stored), check)


def _read_manifest(source: CheckpointStorage) -> StoredManifest:
    try:
        return StoredManifest.read(source)
    except MissingError as error:
        raise CheckpointNotFoundError(
            f"{source.url}: no complete checkpoint to copy", next_step="check the name"
        ) from error


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


def _chosen(source: CheckpointStorage, manifest: Manifest, files: Collection[str]) -> list[DataFile]:
    own = list(dict.fromkeys(manifest.own_files))
    strange = sorted(set(files) - {file.name for file in own})
    if strange:
        raise UsageError(
            f"{source.url}: {strange[0]!r} is not one of its own data files",
            next_step="pass file names of its manifest, without '../'",
        )
    return [file for file in own if file.name in files]


def _require(target: CheckpointStorage, files: Collection[DataFile]) -> None:
    """Raises `ObjectNotFoundError` when files are missing."""
    lacking = missing_files(target, files)
    if lacking:
        raise ObjectNotFoundError(
            f"{target.url}: {lacking[0].name} is missing ({len(lacking)} of {len(files)} data files that others must copy)",
            next_step="copy its checkpoint first, or the files of the other nodes",
        )


# --- data files -----------------------------------------------------------------------------------


def _copy_all(
    source: CheckpointStorage,
    target: CheckpointStorage,
    manifest: Manifest,
    files: Sequence[DataFile],
    meter: _Meter,
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

    for _ in run_in_order(files, copy, min(_THREADS, max(1, len(files)))):
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


def publish_checked(
    target: CheckpointStorage, manifest: Manifest, publish: Callable[[], None], check: Callable[[], None]
) -> None:
    """Call `check`, which raises if another process has taken the run, and then `publish` for the manifest.

    This process may be stopped in between, while the next owner of the run removes files of the manifest. Then the manifest
    is removed, and the error of `check` is raised. The manifest of another save stays. Raises `OutcomeUnknownError` if it
    remains unknown whether all files are there.
    """
    began = time.monotonic()
    check()
    publish()
    if time.monotonic() - began <= _AT_ONCE_SECONDS:
        return
    try:
        check()
        return
    except MillraceError as error:
        failure = error
    # A complete checkpoint is a success, also if the run was taken, or if it is unknown who has it.
    try:
        if not missing_files(target, manifest.files):
            return
        if isinstance(failure, RunTakenError):
            _remove_manifest(target, manifest)
            raise failure
    except RunTakenError:
        raise
    except MillraceError as error:
        failure = error
    raise OutcomeUnknownError(
        f"{target.url}: unknown whether all files of the checkpoint are there ({failure.message})",
        next_step="see the steps of the run when the storage responds again, and save again",
    ) from failure


def _remove_manifest(target: CheckpointStorage, manifest: Manifest) -> None:
    """Remove a manifest, unless another save has taken its place."""
    with contextlib.suppress(MissingError):
        if StoredManifest.read(target).manifest.save_id == manifest.save_id:
            target.delete([MANIFEST_NAME])


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
