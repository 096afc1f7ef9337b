"""A run: one directory with a sub-directory for each of its checkpoints. Names, one listing of all, what each holds.

A checkpoint is called `step-` and twelve digits. After a restore of an earlier step `-r1`, `-r2` and so on follow
(`timeline.py`); of several of one step the highest that is complete supersedes the others. A checkpoint is complete if its
manifest is there. Small files of the run itself (claims, notes of a pruning) lie beside the directories. All else that is
there is left alone. No torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.host.pipeline import run_in_order
from millrace.checkpoint.places.manifests import load_manifest
from millrace.checkpoint.places.storage import CheckpointStorage, LocalStorage, ObjectStorage, StoredFile, open_storage
from millrace.checkpoint.run.run_info import CheckpointInfo, info_of_manifest
from millrace.checkpoint.run.timeline import next_revision
from millrace.errors import (
    ChangedError,
    CheckpointNotFoundError,
    ConfigurationError,
    DamagedError,
    MillraceError,
    MissingError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from millrace.origin import Origin, origin_for_url

__all__ = ["CheckpointInfo", "Found", "Run", "RunListing", "checkpoint_name", "open_run", "parse_name"]

MAX_STEP = 10**12 - 1
"""Steps have twelve digits, so that names sort as steps do."""
_NAME = re.compile(r"step-(\d{12})(?:-r([1-9]\d{0,8}))?", re.ASCII)
# Manifests are read over a network: waiting, not working.
_THREADS = 8


def checkpoint_name(step: int, revision: int = 0) -> str:
    """The directory of a step's checkpoint.

    Raises `ConfigurationError` for a negative number, or a step of more than twelve digits.
    """
    if not 0 <= step <= MAX_STEP or revision < 0:
        raise ConfigurationError(
            f"step {step}, revision {revision} names no checkpoint", next_step=f"give a step from 0 to {MAX_STEP}"
        )
    return f"step-{step:012d}" + (f"-r{revision}" if revision else "")


def parse_name(directory: str) -> tuple[int, int] | None:
    """Step and revision of a checkpoint's directory; None for any other name."""
    match = _NAME.fullmatch(directory)
    return (int(match[1]), int(match[2] or 0)) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint's directory as a listing saw it. `files` are those directly in it, never none."""

    name: str
    step: int
    revision: int
    complete: bool
    files: tuple[StoredFile, ...]
    manifest: StoredFile | None
    superseded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunListing:
    """A run as one listing saw it: checkpoints by step and revision, files of the run itself, and checkpoints' directories
    with nothing in them (only a file system has such; described by name, size 0, and when something last changed in them).
    """

    checkpoints: tuple[Found, ...]
    files: tuple[StoredFile, ...]
    empty: tuple[StoredFile, ...] = ()


class _Entry(NamedTuple):
    """A file of the run (`directory` is empty) or directly in a checkpoint's directory; None: that directory is empty."""

    directory: str
    file: StoredFile | None
    modified: float


class _Place(Protocol):
    """Where a run lies. Thread-safe."""

    def walk(self, prefix: str) -> Iterator[_Entry]:
        """What lies in the run under names that begin with `prefix`, in one listing. Foreign directories are passed over."""
        ...

    def open(self, directory: str) -> CheckpointStorage: ...

    def delete(self, directory: str, manifest: Sequence[str], files: Sequence[str]) -> None:
        """Remove `manifest`, durably, then `files`, then the directory if nothing is left in it."""
        ...


class Run:
    """A run's directory. Thread-safe. Nothing is asked of the storage before a method needs it."""

    def __init__(self, storage: CheckpointStorage, place: _Place) -> None:
        self._storage = storage
        self._place = place
        self._lock = threading.Lock()
        # By name: the manifest that was read, by its listing, and what it said.
        self._described: dict[str, tuple[StoredFile, CheckpointInfo]] = {}

    def __repr__(self) -> str:
        return f"Run({self.url!r})"

    @property
    def url(self) -> str:
        """Names the run for people, without secrets."""
        return self._storage.url

    @property
    def storage(self) -> CheckpointStorage:
        """The run's own directory, for the small files in it."""
        return self._storage

    @property
    def is_remote(self) -> bool:
        """Whether the run lies in an object store: then what a dead process has sent may still be under way."""
        return not isinstance(self._storage, LocalStorage)

    def checkpoint(self, directory: str) -> CheckpointStorage:
        """Open a checkpoint's directory; no request is made. Shares its connections with all others of the run."""
        return self._place.open(directory)

    def url_of(self, directory: str) -> str:
        return f"{self.url.rstrip('/')}/{directory}"

    # --- what is there ----------------------------------------------------------------------------

    def scan(self) -> list[Found]:
        """Every checkpoint with any file, complete or not, by step and revision: one listing, a request for 1,000 files."""
        return list(self.look().checkpoints)

    def look(self) -> RunListing:
        """The same, with what else belongs to the run."""
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
        with self._lock:
            for gone in self._described.keys() - directories.keys():
                del self._described[gone]
        return RunListing(checkpoints=tuple(_found(directories)), files=tuple(files), empty=tuple(empty))

    def files(self, prefix: str) -> list[StoredFile]:
        """The run's own files whose names begin with `prefix`, by name; one request on an object store."""
        found = (entry.file for entry in self._place.walk(prefix) if not entry.directory and entry.file is not None)
        return sorted(found, key=lambda file: file.name)

    def new_name(self, step: int) -> str:
        """A name for a new save of `step` under which nothing lies yet, and that makes it the newest of the run."""
        checkpoints = self.scan()
        revision = next_revision(step, [found for found in checkpoints if found.complete])
        taken = [found.revision for found in checkpoints if found.step == step]
        return checkpoint_name(step, revision if revision not in taken else max(taken) + 1)

    # --- what a checkpoint holds ------------------------------------------------------------------

    def describe(self, found: Found) -> CheckpointInfo:
        """Read a checkpoint's manifest, once for each version of it; of an incomplete one, add up its files.

        Raises `CheckpointNotFoundError` when it was removed since the listing, `CorruptCheckpointError` or
        `UnsupportedFormatError` when the manifest cannot be read.
        """
        if found.manifest is None:
            return self._incomplete(found)
        with self._lock:
            known = self._described.get(found.name)
        if known is None or known[0] != found.manifest:
            known = (found.manifest, self._read(found, found.manifest))
            with self._lock:
                self._described[found.name] = known
        return replace(known[1], superseded=found.superseded)

    def describe_all(self, checkpoints: Iterable[Found]) -> dict[str, CheckpointInfo | MillraceError]:
        """The same for many at once, by name; where `describe` would raise, the error. Raises what is no fault of one
        checkpoint, such as a storage that does not answer. One that is gone by now is left out.
        """

        def work(found: Found) -> tuple[str, CheckpointInfo | MillraceError | None]:
            try:
                return found.name, self.describe(found)
            except CheckpointNotFoundError:
                return found.name, None
            except (DamagedError, UnsupportedFormatError) as error:
                return found.name, error

        described = run_in_order(checkpoints, work, _THREADS)
        return {directory: info for directory, info in described if info is not None}

    def _read(self, found: Found, manifest: StoredFile) -> CheckpointInfo:
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

    def _incomplete(self, found: Found) -> CheckpointInfo:
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
        """Remove files of a checkpoint; its manifest, when it is among them, before all others. What is gone is no error.

        A local directory in which nothing is left goes, too. Whoever calls this knows that nobody needs the files.
        """
        if parse_name(directory) is None:
            raise ConfigurationError(f"{directory!r} is no checkpoint's directory", next_step="give a name from scan()")
        manifest = [file for file in files if file == MANIFEST_NAME]
        self._place.delete(directory, manifest, [file for file in files if file != MANIFEST_NAME])


def open_run(url: str | os.PathLike[str], target_options: Mapping[str, Any] | None = None, *, sync: bool = True) -> Run:
    """Open the run that lies, or will lie, in a directory: a URL or local path. No request is made.

    `sync`: whether local files are forced to the disk. Raises `ConfigurationError` as `open_storage` does.
    """
    storage = open_storage(url, target_options, sync=sync)
    if isinstance(storage, LocalStorage):
        return Run(storage, _LocalPlace(storage, sync))
    origin, key = origin_for_url(os.fspath(url), target_options)
    return Run(storage, _ObjectPlace(storage.url, origin, key.strip("/")))


def _found(directories: Mapping[str, Sequence[StoredFile]]) -> Iterator[Found]:
    parsed = {directory: at for directory in directories if (at := parse_name(directory)) is not None}
    manifests = {
        directory: next((file for file in directories[directory] if file.name == MANIFEST_NAME), None)
        for directory in parsed
    }
    highest: dict[int, int] = {}
    for directory, (step, revision) in parsed.items():
        if manifests[directory] is not None:
            highest[step] = max(revision, highest.get(step, 0))
    for directory, (step, revision) in sorted(parsed.items(), key=lambda item: item[1]):
        manifest = manifests[directory]
        yield Found(
            name=directory,
            step=step,
            revision=revision,
            complete=manifest is not None,
            files=tuple(sorted(directories[directory], key=lambda file: file.name)),
            manifest=manifest,
            superseded=manifest is not None and revision < highest[step],
        )


# --- object store ---------------------------------------------------------------------------------


class _ObjectPlace:
    """A prefix of an object store. Its listing has no directories of its own, so it goes through foreign ones as well."""

    def __init__(self, url: str, origin: Origin, key: str) -> None:
        self._url, self._origin, self._key = url, origin, key

    def walk(self, prefix: str) -> Iterator[_Entry]:
        base = f"{self._key}/"
        try:
            for page in self._origin.list_pages(self._key, after=base + prefix if prefix else ""):
                for info in page.objects:
                    path = info.key.removeprefix(base)
                    if not path.startswith(prefix):
                        return
                    directory, _, file = path.rpartition("/")
                    if file and (not directory or parse_name(directory)):
                        yield _Entry(directory, StoredFile(file, info.size, info.version, info.modified), info.modified)
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(f"{self._url}: {error.message}", next_step=error.next_step) from error

    def open(self, directory: str) -> CheckpointStorage:
        return ObjectStorage(f"{self._url}/{directory}", self._origin, f"{self._key}/{directory}")

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

    def walk(self, prefix: str) -> Iterator[_Entry]:
        for directory in self._storage.directories():
            if not directory.name.startswith(prefix) or parse_name(directory.name) is None:
                continue
            files = self._open(directory.name).files()
            for file in files:
                yield _Entry(directory.name, file, file.modified)
            if not files:
                yield _Entry(directory.name, None, directory.modified)
        for name in self._storage.names():
            if name.startswith(prefix):
                with contextlib.suppress(ObjectNotFoundError):  # removed since it was listed
                    file = self._storage.stat(name)
                    yield _Entry("", file, file.modified)

    def open(self, directory: str) -> CheckpointStorage:
        return self._open(directory)

    def delete(self, directory: str, manifest: Sequence[str], files: Sequence[str]) -> None:
        storage = self._open(directory)
        storage.delete(manifest)
        if manifest and self._sync:
            # After a power failure there must be no manifest of which the files are gone.
            storage.sync_names()
        storage.delete(files)
        with contextlib.suppress(OSError):  # not empty: somebody else's files, or some that others need
            os.rmdir(storage.url)

    def _open(self, directory: str) -> LocalStorage:
        return LocalStorage(os.path.join(self._storage.url, directory), sync=self._sync)
