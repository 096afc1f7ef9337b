"""Copies a checkpoint's files from one place to another, byte for byte and verified, its manifest last. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millrace.checkpoint.format.manifest import MANIFEST_NAME, DataFile, Manifest
from millrace.checkpoint.host.pipeline import run_in_order
from millrace.checkpoint.places.layered import StoredChunks, StoredManifest
from millrace.checkpoint.places.storage import CheckpointStorage
from millrace.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingError,
    ObjectExistsError,
    ObjectNotFoundError,
    UsageError,
)

# What is read, checked and written at once, to the next chunk's end.
_PIECE_BYTES = 8 << 20
# Files in flight. Each may hold some 130 MB on its way to an object store: parts of 16 MiB, four of them in flight.
_DEFAULT_THREADS = 2
# Questions whether a file is there wait for the storage only.
_STAT_THREADS = 8

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes of all files; by one thread at a time, but by any. May raise, which
ends the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What a copy did. `skipped` were there already; sizes in bytes, the manifest's included; `seconds` from first to last.

    `manifest` says whether it was published now, was there before, or was not asked for.
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
) -> CopyReport:
    """Copy the data files `files` (all of the checkpoint's own by default), then its manifest when `manifest` is True.

    A file that is at the target in its length is left as it is: storages show only whole files, and a data file's name
    is of one save, so copying again after a crash copies what is missing. Every chunk is checked on its way against the
    checksum in the source's manifest. Before the manifest is published, every data file that it names must be at the
    target, those that others copied and those of siblings included; `check` is called after that, and may raise. Any
    error is raised, and leaves no manifest and no part of a file, but the files that were whole by then.

    A rank that copies only what it wrote names its files, with `manifest=False`; the coordinator copies after all of them.

    Raises `CheckpointNotFoundError` where the source has no manifest, `CorruptCheckpointError` where it is damaged,
    `ObjectNotFoundError` where the target lacks what others should have copied, `ObjectExistsError` where another save lies
    there under this name, and what the storages raise. Files of siblings (`../`) are not copied: copy those checkpoints
    first (`tiers.pending_uploads` gives the order). Thread-safe; memory is bounded by `threads`.
    """
    if threads < 1:
        raise ConfigurationError(f"threads={threads}", next_step="give a positive number")
    began = time.monotonic()
    try:
        stored = StoredManifest.read(source)
    except MissingError as error:
        raise CheckpointNotFoundError(
            f"no complete checkpoint at {source.url} to copy", next_step="check the name"
        ) from error
    wanted = _chosen(source, stored.manifest, files)
    target.prepare()
    # Where the manifest is, everything is.
    complete = manifest and _holds_manifest(target, stored)
    found = [True] * len(wanted) if complete else _are_there(target, wanted)
    skipped = [file for file, there in zip(wanted, found, strict=True) if there]
    missing = [file for file, there in zip(wanted, found, strict=True) if not there]
    manifest_bytes = len(stored.data) if manifest else 0
    skipped_bytes = sum(file.size for file in skipped) + (manifest_bytes if complete else 0)
    copied_bytes = sum(file.size for file in missing) + (0 if complete else manifest_bytes)
    meter = _Meter(progress, done=skipped_bytes, total=skipped_bytes + copied_bytes)
    _copy_all(source, target, stored.manifest, missing, meter, threads)
    if manifest and not complete:
        copied_or_there = set(wanted)
        _require(target, [file for file in dict.fromkeys(stored.manifest.files) if file not in copied_or_there])
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
    """Adds up bytes from several threads."""

    def __init__(self, progress: Progress | None, *, done: int, total: int) -> None:
        self._progress, self._done, self._total = progress, done, total
        self._lock = threading.Lock()
        self.add(0)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)


# --- what there is to copy ------------------------------------------------------------------------


def _chosen(source: CheckpointStorage, manifest: Manifest, files: Collection[str] | None) -> list[DataFile]:
    own = [file for file in dict.fromkeys(manifest.files) if not file.name.startswith("../")]
    if files is None:
        return own
    strange = sorted(set(files) - {file.name for file in own})
    if strange:
        raise UsageError(
            f"{strange[0]!r} is no data file of {source.url}'s own",
            next_step="name files of its manifest, without '../'",
        )
    return [file for file in own if file.name in files]


def _are_there(target: CheckpointStorage, files: Sequence[DataFile]) -> list[bool]:
    """Whether each file is at the target. One of another length is not: it is no copy of ours, and gets replaced."""

    def is_there(file: DataFile) -> bool:
        try:
            return target.stat(file.name).size == file.size
        except MissingError:
            return False

    return list(run_in_order(files, is_there, _STAT_THREADS))


def _require(target: CheckpointStorage, files: Sequence[DataFile]) -> None:
    """Raises `ObjectNotFoundError` when something that others should have brought is not there."""
    lacking = [file.name for file, there in zip(files, _are_there(target, files), strict=True) if not there]
    if lacking:
        raise ObjectNotFoundError(
            f"{target.url} lacks {lacking[0]} ({len(lacking)} of {len(files)} data files that others should have copied)",
            next_step="copy the checkpoint that it belongs to first, or the other nodes' files",
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
    """Copy one file. Gives up without a word, and leaves nothing, once another thread has `failed`."""
    try:
        pinned = source.stat(file.name)
    except MissingError as error:
        raise CorruptCheckpointError(
            f"{source.url} has lost its data file {file.name}", next_step="copy another checkpoint, or save again"
        ) from error
    if pinned.size != file.size:
        raise CorruptCheckpointError(
            f"{file.name} of {source.url} has {pinned.size} bytes instead of {file.size}",
            next_step="copy another checkpoint, or save again",
        )
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
    """Cut a file where no chunk is cut: each chunk can be checked in one piece."""
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
    """Whether this very manifest lies at the target. Raises `ObjectExistsError` when another one does."""
    try:
        file = target.stat(MANIFEST_NAME)
        data = target.read(file, 0, file.size) if file.size == len(stored.data) else b""
    except MissingError:
        return False
    if memoryview(data).cast("B") == memoryview(stored.data):
        return True
    raise ObjectExistsError(
        f"another save lies at {target.url} already", next_step="remove one of both, or save under another step"
    )


def publish_manifest(target: CheckpointStorage, stored: StoredManifest) -> None:
    """Put a manifest where it is not yet, in one step. Raises `ObjectExistsError` when another save's lies there."""
    try:
        target.publish(MANIFEST_NAME, stored.data, replace=False)
    except ObjectExistsError:
        # Somebody was quicker: with the same bytes that is as good.
        if not _holds_manifest(target, stored):
            raise
