"""A run: one directory with a sub-directory for each of its checkpoints. Names, listings, and descriptions of checkpoints.

A checkpoint is called `step-` and twelve digits. After a restore of an earlier step `-r1`, `-r2` and so on follow
(`timeline.py`). Of several complete checkpoints of one step the highest revision supersedes the others. A checkpoint is
complete if its manifest exists. Small files of the run itself (claims, notes of a pruning) are stored next to the
directories. All other files are ignored and never removed. No torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from millrace.checkpoint.arguments import ReadThroughMode
from millrace.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from millrace.checkpoint.run.run_info import CheckpointInfo, info_of_manifest
from millrace.checkpoint.run.timeline import Point, last_revisions
from millrace.checkpoint.storage.base import CheckpointStorage, StoredFile
from millrace.checkpoint.storage.manifests import load_manifest
from millrace.checkpoint.storage.object_storage import ObjectStorage, cached_reads
from millrace.checkpoint.storage.storage import LocalStorage, open_storage
from millrace.errors import (
    ChangedError,
    CheckpointNotFoundError,
    ConfigurationError,
    DamagedError,
    DiskFullError,
    MillraceError,
    MissingError,
    StorageError,
    UnsupportedFormatError,
)
from millrace.origin import Origin, origin_for_url
from millrace.runtime import forks
from millrace.runtime.pipeline import run_in_order

MAX_STEP = 10**12 - 1
"""Steps have twelve digits, so that names sort in the order of the steps."""
_NAME = re.compile(r"step-(\d{12})(?:-r([1-9]\d{0,8}))?", re.ASCII)
_PART = re.compile(r"part-(\d+)-[0-9a-f]{32}\.millrace", re.ASCII)
# Reading manifests over a network is mostly waiting.
_THREADS = 8
_WALKS = 20


def checkpoint_name(step: int, revision: int = 0) -> str:
    """The directory of a step's checkpoint.

    Raises `ConfigurationError` for a negative number, or a step of more than twelve digits.
    """
    if not 0 <= step <= MAX_STEP or revision < 0:
        raise ConfigurationError(
            f"step {step}, revision {revision} is not valid for a checkpoint",
            next_step=f"give a step from 0 to {MAX_STEP}",
        )
    return f"step-{step:012d}" + (f"-r{revision}" if revision else "")


def parse_name(directory: str) -> Point | None:
    """Step and revision of a checkpoint's directory; None for any other name."""
    match = _NAME.fullmatch(directory)
    return Point(int(match[1]), int(match[2] or 0)) if match else None


def part_name(rank: int, save_id: str) -> str:
    """The file with the part of a rank in a save."""
    return f"part-{rank}-{save_id}.millrace"


def rank_of_part(name: str) -> int | None:
    """The rank of a part; None for other files."""
    found = _PART.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint's directory in a listing. `files` are those directly in it, at least one."""

    name: str
    step: int
    revision: int
    complete: bool
    files: tuple[StoredFile, ...]
    manifest: StoredFile | None
    superseded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunListing:
    """The listing of a run: its checkpoints by step and revision, the run's own files, and empty directories of checkpoints.

    Only a file system has empty directories. They are described by name, size 0, and the time of their last change.
    """

    checkpoints: tuple[ListedCheckpoint, ...]
    files: tuple[StoredFile, ...]
    empty: tuple[StoredFile, ...] = ()


class Entry(NamedTuple):
    """A file of the run itself (`directory` is "") or of a checkpoint's directory; `file` is None for an empty directory."""

    directory: str
    file: StoredFile | None
    modified: float


class _Place(Protocol):
    """The storage of a run. Thread-safe."""

    def walk(self, prefix: str) -> Iterator[Entry]:
        """List the entries of the run whose names begin with `prefix`, without directories of other kinds."""
        ...

    def open(self, directory: str) -> CheckpointStorage: ...

    def delete(self, directory: str, manifest: Sequence[str], files: Sequence[str]) -> None:
        """Remove `manifest`, durably, then `files`, then the directory if it is empty."""
        ...


class Run:
    """A run's directory. Thread-safe. Makes no request before a method needs one."""

    def __init__(self, storage: CheckpointStorage, place: _Place) -> None:
        self.storage = storage
        """The run's own directory, for the small files in it."""
        self._place = place
        self._lock = forks.PerProcess(lambda _: threading.Lock())
        # By name: the listed manifest that was read, and its description.
        self._described: dict[str, tuple[StoredFile, CheckpointInfo]] = {}

    def __repr__(self) -> str:
        return f"Run({self.url!r})"

    @property
    def url(self) -> str:
        """The run's URL for messages, without secrets."""
        return self.storage.url

    @property
    def is_remote(self) -> bool:
        """Whether the run is in an object store, where requests of a dead process may still be in progress."""
        return not isinstance(self.storage, LocalStorage)

    def checkpoint(self, directory: str) -> CheckpointStorage:
        """Open a checkpoint's directory without a request. All directories of the run share connections."""
        return self._place.open(directory)

    def url_of(self, directory: str) -> str:
        """The URL of a checkpoint's directory."""
        return f"{self.url.rstrip('/')}/{directory}"

    # --- listing ----------------------------------------------------------------------------------

    def scan(self) -> list[ListedCheckpoint]:
        """Every checkpoint with any file, complete or not, by step and revision: one listing, a request per 1,000 files."""
        return list(self.look().checkpoints)

    def look(self) -> RunListing:
        """As `scan`, with the run's own files and empty directories."""
        files: list[StoredFile] = []
        empty: list[StoredFile] = []
        directories: dict[str, list[StoredFile]] = {}
        for entry in self._place.walk(""):
            if entry.file is None:
                empty.append(StoredFile(entry.directory, 0, "", entry.modified))
            elif entry.directory:
                directories.setdefault(entry.directory, []).append(entry.file)
            else:
                files.append(entry.file)
        with self._lock.get():
            for gone in self._described.keys() - directories.keys():
                del self._described[gone]
        return RunListing(checkpoints=tuple(_found(directories)), files=tuple(files), empty=tuple(empty))

    def files(self, prefix: str) -> list[StoredFile]:
        """The run's own files whose names begin with `prefix`, by name; one request on an object store."""
        found = (entry.file for entry in self._place.walk(prefix) if not entry.directory and entry.file is not None)
        return sorted(found, key=lambda file: file.name)

    # --- describing -------------------------------------------------------------------------------

    def describe(self, found: ListedCheckpoint) -> CheckpointInfo:
        """Describe a checkpoint by its manifest, which is read once per version; an incomplete one by its files.

        Raises `CheckpointNotFoundError` if it was removed since the listing, `CorruptCheckpointError` or
        `UnsupportedFormatError` if the manifest cannot be read.
        """
        if found.manifest is None:
            return self._incomplete(found)
        with self._lock.get():
            known = self._described.get(found.name)
        if known is None or known[0] != found.manifest:
            known = (found.manifest, self._read(found, found.manifest))
            with self._lock.get():
                self._described[found.name] = known
        return replace(known[1], superseded=found.superseded)

    def describe_all(self, checkpoints: Iterable[ListedCheckpoint]) -> dict[str, CheckpointInfo | MillraceError]:
        """Describe many checkpoints in parallel: descriptions by name, or the errors of unreadable manifests.

        Checkpoints that were removed since the listing are left out. A file that a local disk cannot read is an error of its
        checkpoint. Raises errors that concern no single checkpoint, such as a storage that does not respond.
        """

        def work(found: ListedCheckpoint) -> tuple[str, CheckpointInfo | MillraceError | None]:
            try:
                return found.name, self.describe(found)
            except CheckpointNotFoundError:
                return found.name, None
            except DiskFullError:
                raise
            except (DamagedError, UnsupportedFormatError, StorageError) as error:
                return found.name, error

        described = run_in_order(checkpoints, work, _THREADS)
        return {directory: info for directory, info in described if info is not None}

    def _read(self, found: ListedCheckpoint, manifest: StoredFile) -> CheckpointInfo:
        storage = self.checkpoint(found.name)
        try:
            loaded = load_manifest(storage, manifest)
        except (MissingError, ChangedError) as error:
            raise CheckpointNotFoundError(
                f"{storage.url} was removed or replaced while it was read", next_step="look again, or use another one"
            ) from error
        return info_of_manifest(
            loaded.manifest,
            loaded.nbytes,
            name=found.name,
            url=self.url_of(found.name),
            step=found.step,
            revision=found.revision,
            published=manifest.modified,
        )

    def _incomplete(self, found: ListedCheckpoint) -> CheckpointInfo:
        newest = max(file.modified for file in found.files)
        return CheckpointInfo(
            name=found.name,
            url=self.url_of(found.name),
            step=found.step,
            revision=found.revision,
            complete=False,
            created=newest,
            raw_bytes=0,
            stored_bytes=sum(file.size for file in found.files),
            restore_bytes=0,
            kind=None,
            published=newest,
        )

    # --- removing ---------------------------------------------------------------------------------

    def remove(self, directory: str, files: Sequence[str]) -> None:
        """Remove files of a checkpoint, its manifest first if it is among them. Missing files are not an error.

        An empty local directory is removed, too. The caller makes sure that no checkpoint needs the files.
        """
        if parse_name(directory) is None:
            raise ConfigurationError(
                f"{directory!r} is not a checkpoint's directory", next_step="give a name from scan()"
            )
        manifest = [file for file in files if file == MANIFEST_NAME]
        self._place.delete(directory, manifest, [file for file in files if file != MANIFEST_NAME])


def open_run(
    url: str | os.PathLike[str],
    target_options: Mapping[str, Any] | None = None,
    *,
    limits: Mapping[str, Any] | None = None,
    sync: bool = True,
    read_through: ReadThroughMode = "none",
) -> Run:
    """Open the run in a directory (a URL or local path), which need not exist yet. Makes no request.

    `limits`, `sync`, `read_through` and the errors are those of `open_storage`.
    """
    storage = open_storage(url, target_options, limits=limits, sync=sync, read_through=read_through)
    if isinstance(storage, LocalStorage):
        return Run(storage, _LocalPlace(storage, sync))
    origin, key = origin_for_url(os.fspath(url), target_options, limits)
    return Run(storage, _ObjectPlace(storage.url, origin, key.strip("/"), read_through))


def describe_manifest(url: str, manifest: Manifest, nbytes: int) -> CheckpointInfo:
    """Describe a manifest of `nbytes` that was published in the checkpoint's directory `url`."""
    directory = url.rstrip("/").rpartition("/")[2]
    step, revision = parse_name(directory) or (0, 0)
    return info_of_manifest(
        manifest, nbytes, name=directory, url=url, step=step, revision=revision, published=manifest.created
    )


def _found(directories: Mapping[str, Sequence[StoredFile]]) -> Iterator[ListedCheckpoint]:
    parsed = {directory: point for directory in directories if (point := parse_name(directory)) is not None}
    manifests = {
        directory: next((file for file in directories[directory] if file.name == MANIFEST_NAME), None)
        for directory in parsed
    }
    last = last_revisions(point for directory, point in parsed.items() if manifests[directory] is not None)
    for directory, (step, revision) in sorted(parsed.items(), key=lambda item: item[1]):
        manifest = manifests[directory]
        yield ListedCheckpoint(
            name=directory,
            step=step,
            revision=revision,
            complete=manifest is not None,
            files=tuple(sorted(directories[directory], key=lambda file: file.name)),
            manifest=manifest,
            superseded=manifest is not None and revision < last[step],
        )


# --- object store ---------------------------------------------------------------------------------


class _ObjectPlace:
    """A prefix of an object store. A listing has no directories, so it includes files that do not belong to the run."""

    def __init__(self, url: str, origin: Origin, key: str, read_through: ReadThroughMode = "none") -> None:
        self._url, self._origin, self._key, self._read_through = url, origin, key, read_through

    def walk(self, prefix: str) -> Iterator[Entry]:
        base = f"{self._key}/"
        for page in self._origin.list_pages(self._key, after=base + prefix if prefix else ""):
            for info in page.objects:
                path = info.key.removeprefix(base)
                if not path.startswith(prefix):
                    return
                directory, _, file = path.rpartition("/")
                if file and (not directory or parse_name(directory)):
                    yield Entry(directory, StoredFile(file, info.size, info.version, info.modified), info.modified)

    def open(self, directory: str) -> CheckpointStorage:
        # Each has its own, because it keeps files open, also those that the cache has evicted.
        cached = cached_reads(self._origin, self._read_through)
        return ObjectStorage(f"{self._url}/{directory}", self._origin, f"{self._key}/{directory}", cached)

    def delete(self, directory: str, manifest: Sequence[str], files: Sequence[str]) -> None:
        storage = self.open(directory)
        for names in (manifest, files):
            if names:
                storage.delete(names)


# --- local directory ------------------------------------------------------------------------------


class _LocalPlace:
    """A directory of a local or mounted file system."""

    def __init__(self, storage: LocalStorage, sync: bool) -> None:
        self._storage, self._sync = storage, sync

    def walk(self, prefix: str) -> Iterator[Entry]:
        for _ in range(_WALKS):
            directories = self._directories(prefix)
            files = {name: self.open(name).files() for name in directories}
            if not self._has_newer(prefix, files):
                break
        else:
            raise ChangedError(
                f"{self._storage.url}: checkpoints are saved faster than they can be listed", next_step="try again"
            )
        for name, directory in directories.items():
            yield from (Entry(name, file, file.modified) for file in files[name])
            if not files[name]:
                yield Entry(name, None, directory.modified)
        for file in self._storage.files():
            if file.name.startswith(prefix):
                yield Entry("", file, file.modified)

    def _directories(self, prefix: str) -> dict[str, StoredFile]:
        return {
            directory.name: directory
            for directory in self._storage.directories()
            if directory.name.startswith(prefix) and parse_name(directory.name) is not None
        }

    def _has_newer(self, prefix: str, listed: Mapping[str, Sequence[StoredFile]]) -> bool:
        """Whether there may be a newer checkpoint: meanwhile a directory was created, or a save has become complete.

        Directories are not listed at one moment. All checkpoints that were complete at first may be removed before their
        files are listed, and then the run would seem to be empty.
        """
        if prefix and not listed:  # of the run's own files, such as claims, which each save lists
            return False
        if self._directories(prefix).keys() - listed.keys():
            return True
        unfinished = [name for name, files in listed.items() if all(file.name != MANIFEST_NAME for file in files)]
        return any(MANIFEST_NAME in self.open(name).names() for name in unfinished)

    def open(self, directory: str) -> LocalStorage:
        return LocalStorage(os.path.join(self._storage.url, directory), sync=self._sync)

    def delete(self, directory: str, manifest: Sequence[str], files: Sequence[str]) -> None:
        storage = self.open(directory)
        storage.delete(manifest)
        if manifest and self._sync:
            # After a power failure there must not be a manifest whose files are gone.
            storage.sync_names()
        storage.delete(files)
        with contextlib.suppress(OSError):  # not empty: foreign files, or files that other checkpoints need
            os.rmdir(storage.url)
