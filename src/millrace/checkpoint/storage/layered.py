"""Reads one checkpoint with copies in several tiers, each file from the nearest tier with an intact copy. No torch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import checksum
from millrace.checkpoint.format.manifest import MANIFEST_NAME, DataFile, Manifest
from millrace.checkpoint.storage.base import CheckpointStorage, StoredFile
from millrace.checkpoint.storage.manifests import StoredManifest, check_size
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MillraceError,
    MissingError,
    ObjectNotFoundError,
    RetryableError,
    UsageError,
)
from millrace.events import Event, emit
from millrace.origin import ObjectWriter
from millrace.runtime.pipeline import run_in_order

_STAT_THREADS = 8

Value = TypeVar("Value")


class StoredChunks:
    """The chunks of one data file by offset, to check bytes against the checksums in the manifest.

    The manifest may contain `name` several times, because each rank lists the files of a sibling.
    """

    def __init__(self, manifest: Manifest, name: str) -> None:
        chunks = manifest.chunks
        numbers = [number for number, file in enumerate(manifest.files) if file.name == name]
        rows = np.flatnonzero(np.isin(chunks["file"], numbers))
        rows = rows[np.argsort(chunks["offset"][rows], kind="stable")]
        self._rows = rows
        self.starts = chunks["offset"][rows].astype(np.int64)
        self.stops = self.starts + chunks["stored_bytes"][rows].astype(np.int64)
        self._checksums = chunks["stored_checksum"][rows]

    def first_wrong(self, start: int, data: Buffer) -> int | None:
        """The row of the first damaged chunk that is completely in `data`, the bytes of the file from `start`. Else None."""
        view = memoryview(data).cast("B")
        low = int(np.searchsorted(self.starts, start))
        high = int(np.searchsorted(self.starts, start + len(view)))
        for index in range(low, high):
            begin, end = int(self.starts[index]) - start, int(self.stops[index]) - start
            if end <= len(view) and checksum(view[begin:end]) != int(self._checksums[index]):
                return int(self._rows[index])
        return None


class _Numbered(NamedTuple):
    """A tier and its number, 0 for the nearest."""

    number: int
    storage: CheckpointStorage


@dataclass(frozen=True, slots=True)
class _ChosenManifest:
    """The selected manifest, its tier, and the size of each data file in it."""

    tier: _Numbered
    stored: StoredManifest
    sizes: dict[str, int]


class LayeredStorage:
    """Reads one checkpoint from several storages, `storages[0]` the nearest. Thread-safe; for reading only.

    The manifest is the nearest intact one. `save_id` selects the manifest of one save, and those of other saves are
    skipped. A data file is read from the nearest tier that has it in the length in the manifest. Its chunks are checked
    against their checksums, except in the last tier, where the decoder checks them. Damaged, missing and unreadable data
    is read from the next tier. It has the same bytes under the same name, because file names are unique to a save. The
    event `checkpoint.tier.damaged` reports this once per file.

    One object is for one restore. The manifest is read once, and every file is pinned in each tier to its first version.
    """

    def __init__(self, storages: Sequence[CheckpointStorage], *, save_id: str | None = None) -> None:
        if not storages:
            raise UsageError("a checkpoint without a storage", next_step="give at least one storage")
        self._tiers = [_Numbered(number, storage) for number, storage in enumerate(storages)]
        self._save_id = save_id
        self._lock = threading.Lock()
        self._found: _ChosenManifest | None = None
        self._chunks: dict[str, StoredChunks] = {}
        # Each file in each tier: its description, or the error that excludes it.
        self._seen: dict[tuple[int, str], StoredFile | MillraceError] = {}
        self._reported: set[tuple[int, str]] = set()
        self._read_bytes = [0] * len(storages)

    @property
    def url(self) -> str:
        """The URL of the farthest tier, which users pass as the URL of the checkpoint."""
        return self._tiers[-1].storage.url

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the tiers."""
        return tuple(tier.storage.url for tier in self._tiers)

    @property
    def read_bytes(self) -> tuple[int, ...]:
        """Bytes read from each tier so far, in the order of `storages`."""
        with self._lock:
            return tuple(self._read_bytes)

    def manifest(self) -> Manifest:
        """The selected manifest. Raises `CheckpointNotFoundError`, `CorruptCheckpointError`, and the errors of the
        storages.
        """
        try:
            return self._manifest().stored.manifest
        except ObjectNotFoundError as error:
            raise CheckpointNotFoundError(
                f"no complete checkpoint at {self.url}", next_step="check the name, or load an earlier checkpoint"
            ) from error

    # --- reading ----------------------------------------------------------------------------------

    def stat(self, name: str) -> StoredFile:
        """Describe a file in the nearest tier. Raises `ObjectNotFoundError` or `CorruptCheckpointError`."""
        if name == MANIFEST_NAME:
            return self._manifest().stored.file
        return _first(self._places(name), lambda tier: self._stat(tier, name), partial(self._note, name))

    def read(self, file: StoredFile, start: int, stop: int) -> Buffer:
        """Return the bytes `[start, stop)` from the nearest tier with an intact copy."""
        if file.name == MANIFEST_NAME:
            return memoryview(self._manifest().stored.data)[start:stop]

        def read(tier: _Numbered) -> Buffer:
            data = tier.storage.read(self._stat(tier, file.name), start, stop)
            if tier is not self._tiers[-1]:
                self._check(tier, file.name, start, data)
            with self._lock:
                self._read_bytes[tier.number] += stop - start
            return data

        return _first(self._places(file.name), read, partial(self._note, file.name))

    def names(self) -> Sequence[str]:
        """The names of the files in all tiers."""
        return [file.name for file in self.files()]

    def files(self) -> Sequence[StoredFile]:
        """The files in all tiers, each as in its nearest tier. A tier that cannot list is skipped."""
        found: dict[str, StoredFile] = {}
        failed = 0
        for tier in self._tiers:
            try:
                for file in tier.storage.files():
                    found.setdefault(file.name, file)
            except MillraceError:
                failed += 1
                if failed == len(self._tiers):
                    raise
        return [found[name] for name in sorted(found)]

    # --- writing is not supported ------------------------------------------------------------------

    def prepare(self) -> None:
        self._refuse()

    def open_writer(self, name: str) -> ObjectWriter:
        self._refuse()

    def publish(self, name: str, data: Buffer, *, replace: bool) -> None:
        self._refuse()

    def delete(self, names: Sequence[str]) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(f"{self.url} with several tiers can only be read", next_step="write to one of the tiers")

    # --- inside -----------------------------------------------------------------------------------

    def _manifest(self) -> _ChosenManifest:
        with self._lock:
            if self._found is None:
                self._found = self._find_manifest()
            return self._found

    def _find_manifest(self) -> _ChosenManifest:
        def read(tier: _Numbered) -> _ChosenManifest:
            stored = StoredManifest.read(tier.storage)
            if self._save_id not in (None, stored.manifest.save_id):
                raise ObjectNotFoundError(f"{tier.storage.url}: contains another save")
            return _ChosenManifest(tier, stored, {file.name: file.size for file in stored.manifest.files})

        def note(tier: _Numbered, error: MillraceError) -> None:
            if not isinstance(error, MissingError):
                _report(tier, MANIFEST_NAME, error)

        return _first(self._tiers, read, note)

    def _places(self, name: str) -> Sequence[_Numbered]:
        """The tiers that may have a file, the nearest first."""
        found = self._manifest_or_none()
        # Files that the manifest does not list count only in its own tier.
        return self._tiers if found is None or name in found.sizes else [found.tier]

    def _manifest_or_none(self) -> _ChosenManifest | None:
        """None without a complete checkpoint: then only other files can be read."""
        try:
            return self._manifest()
        except MissingError:
            return None

    def _stat(self, tier: _Numbered, name: str) -> StoredFile:
        """Describe a file in one tier, in its first version. Raises when its length differs from the manifest."""
        with self._lock:
            seen = self._seen.get((tier.number, name))
        if seen is None:
            try:
                seen = tier.storage.stat(name)
                found = self._manifest_or_none()
                if found is not None and name in found.sizes:
                    check_size(tier.storage, seen, found.sizes[name])
            except RetryableError:
                raise
            except MillraceError as error:
                seen = _without_frames(error)
            with self._lock:
                seen = self._seen.setdefault((tier.number, name), seen)
        if isinstance(seen, MillraceError):
            raise _without_frames(seen)
        return seen

    def _check(self, tier: _Numbered, name: str, start: int, data: Buffer) -> None:
        """Raises `CorruptCheckpointError` when a chunk in `data` does not match its checksum."""
        found = self._manifest_or_none()
        if found is None or name not in found.sizes:
            return
        with self._lock:
            chunks = self._chunks.get(name)
            if chunks is None:
                chunks = self._chunks[name] = StoredChunks(found.stored.manifest, name)
        row = chunks.first_wrong(start, data)
        if row is not None:
            raise CorruptCheckpointError(
                f"chunk {row} of {tier.storage.url} (in {name}) does not match its checksum",
                next_step="load another checkpoint, or restore this one",
            )

    def _note(self, name: str, tier: _Numbered, error: MillraceError) -> None:
        """Report a damaged copy once. A copy that never existed is not reported."""
        with self._lock:
            known = self._seen.get((tier.number, name))
            if isinstance(known, MissingError) and isinstance(error, MissingError):
                return
            # Exclude a file that was changed or removed. Damage excludes only the current range.
            if not isinstance(error, RetryableError | CorruptCheckpointError):
                self._seen[tier.number, name] = _without_frames(error)
            is_new = (tier.number, name) not in self._reported
            self._reported.add((tier.number, name))
        if is_new:
            _report(tier, name, error)


def missing_files(storage: CheckpointStorage, files: Iterable[DataFile]) -> list[DataFile]:
    """The data files that are missing in `storage`, or have another length there, each once.

    A node can restore a checkpoint when this is empty for its tiers. Raises the errors of the storage.
    """

    def exists(file: DataFile) -> bool:
        try:
            return storage.stat(file.name).size == file.size
        except (MissingError, CorruptCheckpointError):
            return False

    wanted = list(dict.fromkeys(files))
    found = run_in_order(wanted, exists, _STAT_THREADS)
    return [file for file, is_there in zip(wanted, found, strict=True) if not is_there]


def _report(tier: _Numbered, name: str, error: MillraceError) -> None:
    emit(Event(name="checkpoint.tier.damaged", subject=tier.storage.url, detail=f"{name}: {error.message}"))


def _without_frames(error: MillraceError) -> MillraceError:
    """A copy of an error without its traceback, which refers to the reader's frames and so to the state that it loads."""
    kept = copy.copy(error)
    kept.__cause__ = None if error.__cause__ is None else error.__cause__.with_traceback(None)
    return kept


def _first(
    tiers: Sequence[_Numbered], read: Callable[[_Numbered], Value], note: Callable[[_Numbered, MillraceError], None]
) -> Value:
    """What `read` returns for the first tier with an intact copy; `note` is called with each error before it."""
    errors: list[MillraceError] = []
    try:
        for tier in tiers:
            try:
                return read(tier)
            except MillraceError as error:
                note(tier, error)
                errors.append(error)
        raise _worst(errors)
    finally:
        # Each traceback refers to this frame, and so to the state that the caller loads: a cycle, until it is collected.
        errors.clear()


def _worst(errors: Sequence[MillraceError]) -> MillraceError:
    """The error when no tier has the data: a retryable error first, then any other error, then a missing file."""
    for error in errors:
        if isinstance(error, RetryableError):
            return error
    for error in errors:
        if not isinstance(error, MissingError):
            return error
    return errors[-1]
