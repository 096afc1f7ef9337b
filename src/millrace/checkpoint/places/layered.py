"""One checkpoint that lies in several places: read file by file from the nearest place that has it intact. No torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec.planes import checksum
from millrace.checkpoint.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, DataFile, Manifest, decode_manifest
from millrace.checkpoint.host.garbage import collection_paused
from millrace.checkpoint.host.pipeline import run_in_order
from millrace.checkpoint.places.storage import CheckpointStorage, StoredFile
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

_STAT_THREADS = 8


class StoredChunks:
    """The chunks of one data file by their place in it, to check bytes against the checksums in a manifest.

    `name` is as the manifest has it. It may be there several times: ranks list the files of a sibling each for itself.
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
        """The manifest's row of the first chunk wholly in `data`, the file's bytes from `start` on, that is damaged."""
        view = memoryview(data).cast("B")
        low = int(np.searchsorted(self.starts, start))
        high = int(np.searchsorted(self.starts, start + len(view)))
        for index in range(low, high):
            begin, end = int(self.starts[index]) - start, int(self.stops[index]) - start
            if end <= len(view) and checksum(view[begin:end]) != int(self._checksums[index]):
                return int(self._rows[index])
        return None


class _Numbered(NamedTuple):
    """A tier by its number, 0 the nearest."""

    number: int
    storage: CheckpointStorage


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A checkpoint's manifest with the bytes that it is stored as. Picklable."""

    file: StoredFile
    data: bytes
    manifest: Manifest

    @classmethod
    def read(cls, storage: CheckpointStorage) -> StoredManifest:
        """Raises `ObjectNotFoundError`, `CorruptCheckpointError`, `UnsupportedFormatError`, or what the storage raises."""
        file = storage.stat(MANIFEST_NAME)
        if file.size > MAX_MANIFEST_BYTES:
            raise CorruptCheckpointError(
                f"the manifest of {storage.url} is impossibly long ({file.size} bytes)",
                next_step="load another checkpoint",
            )
        data = bytes(memoryview(storage.read(file, 0, file.size)).cast("B"))
        try:
            with collection_paused():
                return cls(file, data, decode_manifest(data))
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"{storage.url}: {error.message}", next_step="load another checkpoint, or restore this one from a copy"
            ) from error


@dataclass(frozen=True, slots=True)
class _Found:
    """The manifest that counts, the place where it was found, and the size of each data file that it names."""

    tier: _Numbered
    stored: StoredManifest
    sizes: dict[str, int]


class LayeredStorage:
    """Reads one checkpoint from several storages, `storages[0]` the nearest. Thread-safe; for reading only.

    The manifest is the nearest intact one; with `save_id` that of this save, and the manifest of another is passed over.
    Bytes of a data file come from the nearest place that has it in the length that the manifest names, and there they
    are checked against the manifest's checksums as long as a farther place is left. What is damaged, has vanished or cannot
    be read comes from the next place, which has the same bytes under the same name, since a data file's name is of one
    save; an event (`checkpoint.tier.damaged`) says so once a file. Whoever decodes the last place's bytes checks them.

    One object is for one restore: the manifest is read once, and every file pinned in each place to the version first seen.
    """

    def __init__(self, storages: Sequence[CheckpointStorage], *, save_id: str | None = None) -> None:
        if not storages:
            raise UsageError("a checkpoint without a place", next_step="give at least one storage")
        self._tiers = [_Numbered(number, storage) for number, storage in enumerate(storages)]
        self._save_id = save_id
        self._lock = threading.Lock()
        self._found: _Found | None = None
        self._chunks: dict[str, StoredChunks] = {}
        # What each place said of each file: its description, or why it is not to be used there.
        self._seen: dict[tuple[int, str], StoredFile | MillraceError] = {}
        self._said: set[tuple[int, str]] = set()
        self._read_bytes = [0] * len(storages)

    @property
    def url(self) -> str:
        """The farthest place's: it is the one that people know the checkpoint by."""
        return self._tiers[-1].storage.url

    @property
    def read_bytes(self) -> tuple[int, ...]:
        """How much each place has given so far, in bytes, in the order of `storages`."""
        with self._lock:
            return tuple(self._read_bytes)

    def manifest(self) -> Manifest:
        """The manifest that counts. Raises `CheckpointNotFoundError`, `CorruptCheckpointError` or what the places raise."""
        try:
            return self._manifest().stored.manifest
        except ObjectNotFoundError as error:
            raise CheckpointNotFoundError(
                f"no complete checkpoint at {self.url}", next_step="check the name, or load an earlier checkpoint"
            ) from error

    # --- reading ----------------------------------------------------------------------------------

    def stat(self, name: str) -> StoredFile:
        """Describe a file as the nearest place has it. Raises `ObjectNotFoundError` or `CorruptCheckpointError`."""
        if name == MANIFEST_NAME:
            return self._manifest().stored.file
        errors: list[MillraceError] = []
        for tier in self._places(name):
            try:
                return self._stat(tier, name)
            except MillraceError as error:
                self._note(tier, name, error)
                errors.append(error)
        raise _worst(errors)

    def read(self, file: StoredFile, start: int, stop: int) -> Buffer:
        """Return the bytes `[start, stop)` from the nearest place that has them intact."""
        if file.name == MANIFEST_NAME:
            return memoryview(self._manifest().stored.data)[start:stop]
        errors: list[MillraceError] = []
        for tier in self._places(file.name):
            try:
                data = tier.storage.read(self._stat(tier, file.name), start, stop)
                if tier is not self._tiers[-1]:
                    self._check(tier, file.name, start, data)
            except MillraceError as error:
                self._note(tier, file.name, error)
                errors.append(error)
                continue
            with self._lock:
                self._read_bytes[tier.number] += stop - start
            return data
        raise _worst(errors)

    def names(self) -> Sequence[str]:
        """The names in all places."""
        return [file.name for file in self.files()]

    def files(self) -> Sequence[StoredFile]:
        """The files in all places, each as the nearest describes it. A place that cannot list is passed over."""
        found: dict[str, StoredFile] = {}
        errors: list[MillraceError] = []
        for tier in self._tiers:
            try:
                for file in tier.storage.files():
                    found.setdefault(file.name, file)
            except MillraceError as error:
                errors.append(error)
        if len(errors) == len(self._tiers):
            raise errors[-1]
        return [found[name] for name in sorted(found)]

    # --- writing is for one place at a time -------------------------------------------------------

    def prepare(self) -> None:
        self._refuse()

    def open_writer(self, name: str) -> ObjectWriter:
        self._refuse()

    def publish(self, name: str, data: Buffer, *, replace: bool) -> None:
        self._refuse()

    def delete(self, names: Sequence[str]) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(f"{self.url} in several places can only be read", next_step="write to one of the places")

    # --- inside -----------------------------------------------------------------------------------

    def _manifest(self) -> _Found:
        with self._lock:
            if self._found is None:
                self._found = self._find_manifest()
            return self._found

    def _find_manifest(self) -> _Found:
        errors: list[MillraceError] = []
        for tier in self._tiers:
            try:
                stored = StoredManifest.read(tier.storage)
            except MillraceError as error:
                if not isinstance(error, MissingError):
                    _say(tier, MANIFEST_NAME, error)
                errors.append(error)
                continue
            if self._save_id not in (None, stored.manifest.save_id):
                errors.append(ObjectNotFoundError(f"{tier.storage.url} holds another save"))
                continue
            return _Found(tier, stored, {file.name: file.size for file in stored.manifest.files})
        raise _worst(errors)

    def _places(self, name: str) -> Sequence[_Numbered]:
        """Where a file may be looked for, the nearest place first."""
        found = self._manifest_or_none()
        # What lies beside a manifest and is no part of the checkpoint counts only there.
        return self._tiers if found is None or name in found.sizes else [found.tier]

    def _manifest_or_none(self) -> _Found | None:
        """None where nothing is complete: then what is asked for can only be a file beside it."""
        try:
            return self._manifest()
        except MissingError:
            return None

    def _stat(self, tier: _Numbered, name: str) -> StoredFile:
        """Describe a file in one place, as it was when it was first asked for. Raises when it is not what it should be."""
        with self._lock:
            seen = self._seen.get((tier.number, name))
        if seen is None:
            try:
                seen = tier.storage.stat(name)
                found = self._manifest_or_none()
                if found is not None and name in found.sizes:
                    wanted = found.sizes[name]
                    if seen.size != wanted:
                        raise CorruptCheckpointError(
                            f"{name} of {tier.storage.url} has {seen.size} bytes instead of {wanted}",
                            next_step="load another checkpoint, or restore this one from a copy",
                        )
            except RetryableError:
                raise
            except MillraceError as error:
                seen = error
            with self._lock:
                seen = self._seen.setdefault((tier.number, name), seen)
        if isinstance(seen, MillraceError):
            raise seen
        return seen

    def _check(self, tier: _Numbered, name: str, start: int, data: Buffer) -> None:
        """Raises `CorruptCheckpointError` when a chunk in `data` is not what the manifest says."""
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

    def _note(self, tier: _Numbered, name: str, error: MillraceError) -> None:
        """Say once that a copy is not what it should be. One that was never there is nothing to speak of."""
        with self._lock:
            known = self._seen.get((tier.number, name))
            if known is error and isinstance(error, MissingError):
                return
            # What was read here before, and is no longer what it was, is not asked for again. Damage costs its range only.
            if not isinstance(error, RetryableError | CorruptCheckpointError):
                self._seen[tier.number, name] = error
            is_new = (tier.number, name) not in self._said
            self._said.add((tier.number, name))
        if is_new:
            _say(tier, name, error)


def missing_files(manifest: Manifest, storage: CheckpointStorage) -> list[str]:
    """The data files that `manifest` names and `storage` (a `LayeredStorage`, say) lacks or has in another length.

    A node may restore a checkpoint when this is empty for its places. Raises what the storage raises when it fails.
    """

    files = list(dict.fromkeys(manifest.files))

    def is_there(file: DataFile) -> bool:
        try:
            return storage.stat(file.name).size == file.size
        except (MissingError, CorruptCheckpointError):
            return False

    there = run_in_order(files, is_there, _STAT_THREADS)
    return [file.name for file, found in zip(files, there, strict=True) if not found]


def _say(tier: _Numbered, name: str, error: MillraceError) -> None:
    emit(Event(name="checkpoint.tier.damaged", subject=tier.storage.url, detail=f"{name}: {error.message}"))


def _worst(errors: Sequence[MillraceError]) -> MillraceError:
    """What to raise when no place has it: what may be gone the next time, else what is wrong, else that it is missing."""
    for error in errors:
        if isinstance(error, RetryableError):
            return error
    for error in errors:
        if not isinstance(error, MissingError):
            return error
    return errors[-1]
