"""The places where one run's checkpoints lie: this node's disk, a second node's, and the origin.

A save is durable near first, and goes on to the origin from there; a restore takes every file from the nearest place that
has it intact (`layered.py`). Every place has the same layout, names and bytes, so a checkpoint is copied file by file
(`replicating.py`). The origin is the truth: where it has a checkpoint, another save of that name counts nowhere. No torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.places.layered import LayeredStorage, StoredManifest, missing_files
from millrace.checkpoint.places.storage import CheckpointStorage
from millrace.checkpoint.run.run_info import CheckpointInfo, directory_of
from millrace.checkpoint.run.run_layout import Found, Run, open_run
from millrace.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    DeniedError,
    MillraceError,
    MissingError,
    OutcomeUnknownError,
    StorageError,
)
from millrace.events import Event, emit
from millrace.origin import origin_for_url

_STEM_CHARACTERS, _HASH_CHARACTERS = 40, 16
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


# --- places ---------------------------------------------------------------------------------------


def run_directory(url: str | os.PathLike[str], target_options: Mapping[str, Any] | None = None) -> str:
    """The name of a run's directory in a place that keeps several: the run's own name, and a hash of what it lies in.

    The same for every way to write the same URL or path; different for two runs, endpoints included. No request is made.
    """
    origin, key = origin_for_url(os.fspath(url), target_options)
    if origin.identity == "file":
        key = os.path.realpath(os.path.expanduser(key))
    # Names of buckets are Amazon's own in all regions.
    identity = re.sub(r"^s3\+aws:.*", "s3+aws", origin.identity)
    key = key.strip("/")
    stem = _UNSAFE.sub("-", key.rpartition("/")[2]).strip(".-")[:_STEM_CHARACTERS] or "run"
    digest = hashlib.sha256(f"{identity}\0{key}".encode("utf-8", "surrogateescape")).hexdigest()
    return f"{stem}-{digest[:_HASH_CHARACTERS]}"


class ReplicaTier(Protocol):
    """A place near the job, other than this node's disk, that keeps copies of checkpoints: a second node's disk, say."""

    def open(self, url: str, target_options: Mapping[str, Any] | None = None) -> Run:
        """The place's own directory for the run at `url`. Makes no request. The same run gets the same directory always."""
        ...


@dataclass(frozen=True, slots=True)
class DirectoryReplica:
    """A `ReplicaTier` in any directory: this node's disk, another node's through a mount. Below it each run has one of its
    own. `sync`: whether files are forced to the disk before they count.
    """

    path: str | os.PathLike[str]
    sync: bool = True

    def __post_init__(self) -> None:
        path = os.fspath(self.path)
        if not path or "://" in path:
            raise ConfigurationError(
                f"{path!r} is no directory of this machine", next_step="give a path, as /nvme/ckpt"
            )

    def open(self, url: str, target_options: Mapping[str, Any] | None = None) -> Run:
        """Open the directory of the run at `url`; nothing is made yet."""
        path = Path(os.path.abspath(os.path.expanduser(self.path))) / run_directory(url, target_options)
        return open_run(str(path), sync=self.sync)


class Placed(NamedTuple):
    """A checkpoint as one of the places has it."""

    found: Found
    run: Run

    @property
    def name(self) -> str:
        return self.found.name

    @property
    def step(self) -> int:
        return self.found.step

    @property
    def revision(self) -> int:
        return self.found.revision

    def describe(self) -> CheckpointInfo:
        """As `Run.describe`."""
        return self.run.describe(self.found)


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """All places of one run; without `local` and `replica` only the origin. Thread-safe."""

    origin: Run
    local: Run | None = None
    replica: Run | None = None

    @property
    def places(self) -> tuple[Run, ...]:
        """The nearest first, the origin last."""
        return tuple(run for run in (self.local, self.replica, self.origin) if run is not None)

    def complete(self) -> list[Placed]:
        """The complete checkpoints of all places, each once, by step and revision; of several the farthest place's.

        A place that does not answer is passed over with an event (`checkpoint.tier.unreachable`), as long as another
        answers and has any checkpoint. Raises its error otherwise.
        """
        found: dict[str, Placed] = {}
        errors: list[MillraceError] = []
        for run in self.places:
            try:
                found.update({each.name: Placed(each, run) for each in run.scan() if each.complete})
            except MillraceError as error:
                errors.append(error)
                emit(Event(name="checkpoint.tier.unreachable", subject=run.url, detail=str(error)))
        if errors and not found:
            raise errors[-1]
        last: dict[int, int] = {}
        for each in found.values():
            last[each.step] = max(each.revision, last.get(each.step, 0))
        return [
            Placed(replace(each.found, superseded=each.revision < last[each.step]), each.run)
            for each in sorted(found.values(), key=lambda each: (each.step, each.revision))
        ]

    def save_id(self, name: str) -> str:
        """Which save a checkpoint's name stands for: that of the farthest place that has it and can be read.

        Ranks on several nodes have to agree on it before they read, each from its own places. Raises
        `CheckpointNotFoundError` or what the places raise.
        """
        if len(self.places) == 1:
            return _save_id(self.origin.checkpoint(name))
        failure: MillraceError | None = None
        for run in reversed(self.places):
            try:
                return _save_id(run.checkpoint(name))
            except MissingError:
                continue
            except MillraceError as error:
                failure = failure or error
                emit(Event(name="checkpoint.tier.unreachable", subject=run.url_of(name), detail=str(error)))
        raise failure or CheckpointNotFoundError(
            f"no complete checkpoint at {self.origin.url_of(name)}", next_step="check the name, or load another one"
        )

    def is_at_origin(self, name: str) -> bool:
        """Whether the origin has a checkpoint, and so all of it; False, too, when it does not answer (with an event)."""
        try:
            self.origin.checkpoint(name).stat(MANIFEST_NAME)
        except MissingError:
            return False
        except MillraceError as error:
            emit(Event(name="checkpoint.tier.unreachable", subject=self.origin.url_of(name), detail=str(error)))
            return False
        return True

    def lacking(self, name: str, save_id: str) -> list[str]:
        """Data files of a checkpoint that this process reaches in none of the places. Raises what the places raise.

        A near place of one of several nodes has what that node's ranks wrote, so until the origin has it all, nodes that are
        gone, and ranks that change places, take files with them. Without a manifest within reach it is the manifest's name.
        """
        places = LayeredStorage([run.checkpoint(name) for run in self.places], save_id=save_id)
        try:
            return missing_files(places.manifest(), places)
        except MissingError:
            return [MANIFEST_NAME]

    def checkpoint(self, name: str, *, save_id: str | None = None) -> CheckpointStorage:
        """Open a checkpoint for reading, each file from the nearest place. For one restore; see `LayeredStorage`."""
        if len(self.places) == 1:
            return self.origin.checkpoint(name)
        return LayeredStorage([run.checkpoint(name) for run in self.places], save_id=save_id)


def open_tiers(
    url: str | os.PathLike[str],
    *,
    local: str | os.PathLike[str] | None = None,
    replica: ReplicaTier | str | os.PathLike[str] | None = None,
    target_options: Mapping[str, Any] | None = None,
    sync: bool = True,
) -> Tiers:
    """Open the places of the run at `url`. No request is made, and nothing written. `sync` as in `open_storage`.

    Raises `ConfigurationError`, also where two places are one directory.
    """
    near = None if local is None else DirectoryReplica(local, sync).open(os.fspath(url), target_options)
    if isinstance(replica, str | os.PathLike):
        replica = DirectoryReplica(replica, sync)
    second = None if replica is None else replica.open(os.fspath(url), target_options)
    tiers = Tiers(origin=open_run(url, target_options, sync=sync), local=near, replica=second)
    urls = [run.url for run in tiers.places]
    if len(set(urls)) < len(urls):
        raise ConfigurationError(
            f"two places of the run are one directory ({', '.join(urls)})", next_step="give local= and replica= apart"
        )
    return tiers


def _save_id(storage: CheckpointStorage) -> str:
    return StoredManifest.read(storage).manifest.save_id


# --- what the origin still lacks ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What to copy of one directory: these data files, and with `manifest` the manifest after them.

    `copy_checkpoint(local.checkpoint(name), origin.checkpoint(name), files, manifest=manifest)` does it.
    """

    name: str
    files: tuple[str, ...]
    manifest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingUploads:
    """What a crash left near and not at the origin. `uploads` in the order in which to make them, oldest first, what a
    delta needs before it. `left` are complete checkpoints that are not to be uploaded: a newer one is at the origin
    already, or nobody wants to keep them. `unreadable`: those of which the manifest cannot be read, and why.
    """

    uploads: tuple[Upload, ...] = ()
    left: tuple[str, ...] = ()
    unreadable: Mapping[str, MillraceError]

    @property
    def names(self) -> frozenset[str]:
        """The directories that must stay near until they are uploaded."""
        return frozenset(upload.name for upload in self.uploads)


def plan_uploads(
    local: Sequence[CheckpointInfo],
    here: Collection[str],
    origin: Sequence[Found],
    *,
    keep: Collection[str] | None = None,
) -> tuple[tuple[Upload, ...], tuple[str, ...]]:
    """Decide what to upload, and what to leave: `PendingUploads.uploads` and `.left`. Pure.

    `local` are the complete checkpoints of the near place, `here` all paths in it (`directory/file`), `origin` the
    directories there. Only what is newer than anything complete at the origin (by revision, then step, as in
    `timeline.py`) is uploaded: the rest is of a history that went on elsewhere. `keep` limits it to these names. Of a
    directory whose checkpoint is not wanted the files go that a wanted delta names. On one of several nodes the files of
    others are not here, and left to them.
    """
    complete = {found.name for found in origin if found.complete}
    newest = max(((found.revision, found.step) for found in origin if found.complete), default=None)
    there = {f"{found.name}/{file.name}" for found in origin for file in found.files}
    by_name = {info.name: info for info in local}
    uploads: list[Upload] = []
    left: list[str] = []
    for info in sorted(local, key=_age):
        if info.name in complete:
            continue
        if (newest is not None and _age(info) < newest) or (keep is not None and info.name not in keep):
            left.append(info.name)
            continue
        lacking: dict[str, list[str]] = {info.name: []}
        for directory, file in sorted(directory_of(name, info.name) for name in info.files):
            path = f"{directory}/{file}"
            if path in here and path not in there:
                lacking.setdefault(directory, []).append(file)
                there.add(path)
        # A directory without a manifest has no checksums to copy by: then the delta stays near.
        for directory in sorted(lacking.keys() & by_name.keys() - {info.name}, key=lambda name: _age(by_name[name])):
            uploads.append(Upload(name=directory, files=tuple(lacking[directory]), manifest=False))
        uploads.append(Upload(name=info.name, files=tuple(lacking[info.name]), manifest=True))
    return tuple(uploads), tuple(left)


def pending_uploads(local: Run, origin: Run, *, keep: Collection[str] | None = None) -> PendingUploads:
    """Look what an earlier process saved near and did not bring to the origin: one listing of each.

    `keep`: names of the checkpoints that are wanted there; all by default. Raises what the places raise.
    """
    near = local.scan()
    described = local.describe_all([found for found in near if found.complete])
    infos = [info for info in described.values() if isinstance(info, CheckpointInfo)]
    here = {f"{found.name}/{file.name}" for found in near for file in found.files}
    uploads, left = plan_uploads(infos, here, origin.scan(), keep=keep)
    return PendingUploads(
        uploads=uploads,
        left=left,
        unreadable={name: error for name, error in described.items() if isinstance(error, MillraceError)},
    )


def _age(info: CheckpointInfo) -> tuple[int, int]:
    return info.revision, info.step


# --- a near place that fails ----------------------------------------------------------------------


def is_local_failure(error: BaseException) -> bool:
    """Whether a save into a near place failed because of that place, so that the origin may still take it.

    True for a full, failing, vanished or forbidden disk. Takes torch's `CheckpointException` too: then every rank's
    failure must be of that kind. Pure, so ranks that see the same error decide alike.
    """
    failures = getattr(error, "failures", None)
    causes = [failure[0] for failure in failures.values()] if isinstance(failures, Mapping) else [error]
    kinds = (StorageError, DeniedError, MissingError, OutcomeUnknownError)
    return bool(causes) and all(isinstance(cause, kinds) for cause in causes)


def say_local_failure(run: Run, name: str, error: BaseException) -> None:
    """Say that a checkpoint goes to the origin without a near copy: an event and a `RuntimeWarning`."""
    reason = error.message if isinstance(error, MillraceError) else str(error)
    text = f"{name} goes to the origin directly: {run.url} did not take it ({reason})"
    emit(Event(name="checkpoint.tier.refused", subject=run.url, detail=text))
    warnings.warn(text, RuntimeWarning, stacklevel=3)
