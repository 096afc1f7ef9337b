"""The places that hold one run's checkpoints: this node's disk, other nodes' disks (`peers.py`), and the origin.

A save is durable near first, and is then uploaded to the origin. A restore takes every file from the nearest place that
has it intact (`layered.py`). Every place has the same layout, names and bytes, so a checkpoint is copied file by file
(`replicating.py`). The origin decides: if it has a checkpoint, another save of that name is ignored everywhere. No torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from millrace.checkpoint.arguments import ReadThroughMode, mapping, path_text
from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.run.peers import ClusterAccess, Peers
from millrace.checkpoint.run.run_info import CheckpointInfo, directory_of
from millrace.checkpoint.run.run_layout import ListedCheckpoint, Run, open_run, parse_name
from millrace.checkpoint.run.timeline import age_of, last_revisions
from millrace.checkpoint.storage.base import CheckpointStorage, has_file
from millrace.checkpoint.storage.layered import LayeredStorage, missing_files
from millrace.checkpoint.storage.manifests import StoredManifest
from millrace.checkpoint.storage.replicating import publish_manifest
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
    """The name of a run's directory in a place for several runs: the run's own name, and a hash of its full location.

    Equal for all spellings of one URL or path; different for two runs, endpoints included. Makes no request.
    """
    origin, key = origin_for_url(os.fspath(url), target_options)
    if origin.identity == "file":
        key = os.path.realpath(os.path.expanduser(key))
    # Bucket names are unique across all regions of AWS.
    identity = re.sub(r"^s3\+aws:.*", "s3+aws", origin.identity)
    key = key.strip("/")
    stem = _UNSAFE.sub("-", key.rpartition("/")[2]).strip(".-")[:_STEM_CHARACTERS] or "run"
    digest = hashlib.sha256(f"{identity}\0{key}".encode("utf-8", "surrogateescape")).hexdigest()
    return f"{stem}-{digest[:_HASH_CHARACTERS]}"


class Placed(NamedTuple):
    """A checkpoint in one of the places."""

    found: ListedCheckpoint
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
    """All places of one run; without `local` and `peers` only the origin. Thread-safe."""

    origin: Run
    local: Run | None = None
    peers: Peers | None = None

    @property
    def places(self) -> tuple[Run, ...]:
        """The nearest first, the origin last. Of the other nodes those with replicas at the last look at them."""
        near = () if self.local is None else (self.local,)
        return (*near, *(() if self.peers is None else self.peers.runs()), self.origin)

    def look(self, *, patient: bool = False) -> None:
        """Ask the other nodes for their replicas again. `patient` as in `Peers.look`."""
        if self.peers is not None:
            self.peers.look(patient=patient)

    def complete(self, *, patient: bool = False) -> list[Placed]:
        """The complete checkpoints of all places, each once, by step and revision; of copies the one in the farthest place.

        Those of an outdated history (`outdated`) are left out, with an event. A place that does not respond is skipped with
        an event (`checkpoint.tier.unreachable`). If no place has any checkpoint, the error of the last one is raised.
        `patient` as in `Peers.look`.
        """
        self.look(patient=patient)
        found: dict[str, Placed] = {}
        errors: dict[str, MillraceError] = {}
        for run in self.places:
            try:
                found.update({each.name: Placed(each, run) for each in run.scan() if each.complete})
            except MillraceError as error:
                errors[run.url] = error
        raised = errors.popitem()[1] if errors and not found else None
        for url, skipped in errors.items():
            emit(Event(name="checkpoint.tier.unreachable", subject=url, detail=str(skipped)))
        if raised is not None:
            raise raised
        for name in self.outdated(found.values()):
            emit(Event(name="checkpoint.tier.outdated", subject=found.pop(name).run.url_of(name)))
        last = last_revisions(found.values())
        return [
            Placed(replace(each.found, superseded=each.revision < last[each.step]), each.run)
            for each in sorted(found.values(), key=lambda each: (each.step, each.revision))
        ]

    def outdated(self, placed: Iterable[Placed]) -> frozenset[str]:
        """The names of those that belong to an outdated history (the function `outdated`).

        Reads the manifests that only near places have, if one of them is newer than all at the origin. One that cannot be
        read counts as current.
        """
        complete = [each for each in placed if each.found.complete]
        at_origin = [each for each in complete if each.run is self.origin]
        newest = max(map(age_of, at_origin), default=None)
        near = [each for each in complete if each.run is not self.origin]
        if newest is None or all(age_of(each) < newest for each in near):
            return frozenset()
        infos: list[CheckpointInfo] = []
        for each in near:
            try:
                infos.append(each.describe())
            except MillraceError as error:
                emit(Event(name="checkpoint.tier.unreachable", subject=each.run.url_of(each.name), detail=str(error)))
        return outdated(infos, [each.found for each in at_origin])

    def manifest(self, name: str) -> StoredManifest:
        """The manifest of the save that a checkpoint's name stands for: that at the origin, else the last one elsewhere.

        Ranks on several nodes must use the same save, each from its own places. Raises `CheckpointNotFoundError` or errors
        of the places.
        """
        failure: MillraceError | None = None
        found: list[StoredManifest] = []
        for run in reversed(self.places):
            try:
                found.append(StoredManifest.read(run.checkpoint(name)))
            except MissingError:
                continue
            except MillraceError as error:
                if len(self.places) == 1:
                    raise
                failure = failure or error
                emit(Event(name="checkpoint.tier.unreachable", subject=run.url_of(name), detail=str(error)))
            else:
                if run is self.origin:
                    break
        if found:
            return max(found, key=lambda stored: stored.manifest.created)
        raise failure or CheckpointNotFoundError(
            f"no complete checkpoint at {self.origin.url_of(name)}", next_step="check the name, or load another one"
        )

    def is_at_origin(self, name: str) -> bool:
        """Whether the origin has a checkpoint, and so all of it. If it does not respond: False, with an event."""
        try:
            return has_file(self.origin.checkpoint(name), MANIFEST_NAME)
        except MillraceError as error:
            emit(Event(name="checkpoint.tier.unreachable", subject=self.origin.url_of(name), detail=str(error)))
            return False

    def missing_files(self, name: str, save_id: str) -> list[str]:
        """Data files of a checkpoint that this process finds in none of the places; the manifest's name if that is missing.

        The disk of one of several nodes has only the files of that node's ranks. Until the origin has all files, a node that
        is gone, or ranks that run on other nodes, make files unreachable. Raises errors of the places.
        """
        places = LayeredStorage([run.checkpoint(name) for run in self.places], save_id=save_id)
        try:
            return [file.name for file in missing_files(places, places.manifest().files)]
        except MissingError:
            return [MANIFEST_NAME]

    def share(self, name: str, stored: StoredManifest) -> None:
        """Copy the files of a save that only this node's disk has to other nodes, for the ranks there. Once for each node.

        A failure is an event. This node may have other files of it than the node of the first rank, which has read the
        manifest `stored`.
        """
        if self.local is None or self.peers is None:
            return
        source = self.local.checkpoint(name)
        try:
            held = self.peers.held()
            missing = missing_files(source, stored.manifest.own_files)
            present = [file.name for file in stored.manifest.own_files if file not in missing]
            if present:
                publish_manifest(source, stored)
                files = [file for file in present if (name, file) not in held]
                self.peers.copy(source, name, files, with_manifest=True, or_here=True)
        except MillraceError as error:
            emit(Event(name="checkpoint.replica.failed", subject=source.url, detail=str(error)))

    def checkpoint(self, name: str, *, save_id: str | None = None) -> CheckpointStorage:
        """Open a checkpoint for one restore, which reads each file from the nearest place (`LayeredStorage`)."""
        if len(self.places) == 1:
            return self.origin.checkpoint(name)
        return LayeredStorage([run.checkpoint(name) for run in self.places], save_id=save_id)


def open_tiers(
    url: str | os.PathLike[str],
    *,
    local: str | os.PathLike[str] | None = None,
    replicas: int = 0,
    access: ClusterAccess | None = None,
    target_options: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    sync: bool = True,
    read_through: ReadThroughMode = "none",
) -> Tiers:
    """Open the places of the run at `url`, without a request or a write. The last three are as in `open_storage`.

    `replicas`: on how many other nodes of the cluster, which `access` leads to. Raises `ConfigurationError`.
    """
    mapping("target_options", target_options)
    place = path_text("url", url)
    directory = run_directory(place, target_options)
    near = None if local is None else open_run(_below(path_text("local", local), directory), sync=sync)
    peers = None if access is None else Peers(access, directory, count=replicas)
    origin = open_run(place, target_options, limits=limits, sync=sync, read_through=read_through)
    return Tiers(origin=origin, local=near, peers=peers)


def _below(path: str, directory: str) -> str:
    """A run's directory in a place for several runs. Raises `ConfigurationError` for a URL."""
    if not path or "://" in path:
        raise ConfigurationError(f"{path!r} is not a directory of this machine", next_step="give a path, as /nvme/ckpt")
    return os.path.join(os.path.abspath(os.path.expanduser(path)), directory)


# --- histories ------------------------------------------------------------------------------------


def outdated(near: Iterable[CheckpointInfo], origin: Iterable[ListedCheckpoint]) -> frozenset[str]:
    """The names of near checkpoints of a history that the run does not follow any more. Pure.

    `near` are complete checkpoints that the origin lacks, `origin` the complete ones there. A node was lost with saves that
    were not uploaded yet, and the run continued elsewhere from an older checkpoint. When the node returns, such a save may
    have the highest step, but it follows a checkpoint that is not the newest at the origin (and may have been pruned there
    since), or another save of that name, also through other near ones. Where that is unknown, it is not outdated.
    """
    complete = {found.name: found for found in origin}
    newest = max(complete.values(), key=age_of, default=None)
    if newest is None:
        return frozenset()
    by_name = {info.name: info for info in near if info.name not in complete and age_of(info) > age_of(newest)}
    data = {file.name for file in newest.files if file.name != MANIFEST_NAME}
    found: set[str] = set()
    for info in by_name.values():
        first, seen = info, {info.name}
        while first.after in by_name and first.after not in seen:
            seen.add(first.after)
            first = by_name[first.after]
        # A complete checkpoint has all of its files.
        is_other_save = first.after_file is not None and bool(data) and first.after_file not in data
        follows_newest = first.after == newest.name and not is_other_save
        point = None if first.after is None else parse_name(first.after)
        # Of those that are older than the newest one at the origin, some were pruned there.
        if point is not None and age_of(point) <= age_of(newest) and not follows_newest:
            found.add(info.name)
    return frozenset(found)


# --- pending uploads ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """The files to copy from one directory: these data files by `copy_files`, then with `manifest` `publish_checkpoint`."""

    name: str
    files: tuple[str, ...]
    manifest: bool


def plan_uploads(
    local: Sequence[CheckpointInfo],
    local_paths: Collection[str],
    origin: Sequence[ListedCheckpoint],
) -> tuple[Upload, ...]:
    """Decide what to upload: oldest first, bases before their deltas. Pure.

    `local` are the complete checkpoints of the near place, `local_paths` all paths in it (`directory/file`), `origin` the
    directories at the origin. Only checkpoints that are newer than every complete one at the origin (by revision, then
    step, as in `timeline.py`) are uploaded, and none of an outdated history (`outdated`). Of a directory whose
    checkpoint is not uploaded, the files that an uploaded delta needs are. The files of other nodes are not in
    `local_paths`, and those nodes upload them.
    """
    complete = {found.name: age_of(found) for found in origin if found.complete}
    newest = max(complete.values(), default=None)
    abandoned = outdated(local, [found for found in origin if found.complete])
    origin_paths = {f"{found.name}/{file.name}" for found in origin for file in found.files}
    by_name = {info.name: info for info in local}
    uploads: list[Upload] = []
    for info in sorted(local, key=age_of):
        if info.name in complete or info.name in abandoned or (newest is not None and age_of(info) < newest):
            continue
        missing: dict[str, list[str]] = {info.name: []}
        for directory, file in sorted(directory_of(name, info.name) for name in info.files):
            path = f"{directory}/{file}"
            if path in local_paths and path not in origin_paths:
                missing.setdefault(directory, []).append(file)
                origin_paths.add(path)
        # A directory without a manifest has no checksums to verify copies by: then the delta stays near.
        for directory in sorted(missing.keys() & by_name.keys() - {info.name}, key=lambda name: age_of(by_name[name])):
            uploads.append(Upload(name=directory, files=tuple(missing[directory]), manifest=False))
        uploads.append(Upload(name=info.name, files=tuple(missing[info.name]), manifest=True))
    return tuple(uploads)


def pending_uploads(local: Run, origin: Run) -> tuple[Upload, ...]:
    """The uploads (`plan_uploads`) of checkpoints that a crash left near and not at the origin: one listing of each place.

    Checkpoints whose manifest cannot be read are left out. Raises errors of the places.
    """
    near = local.scan()
    described = local.describe_all([found for found in near if found.complete])
    infos = [info for info in described.values() if isinstance(info, CheckpointInfo)]
    local_paths = {f"{found.name}/{file.name}" for found in near for file in found.files}
    return plan_uploads(infos, local_paths, origin.scan())


# --- a near place that fails ----------------------------------------------------------------------


def is_local_failure(error: BaseException) -> bool:
    """Whether a save into a near place failed because of that place, so that the origin may still accept it. Pure.

    True for a full, failing, vanished or forbidden disk.
    """
    return isinstance(error, StorageError | DeniedError | MissingError | OutcomeUnknownError)


def report_local_failure(run: Run, name: str, error: MillraceError, *, warn: bool = True) -> None:
    """Report that a checkpoint is written to the origin without a near copy: an event, and with `warn` a `RuntimeWarning`.

    One warning is enough until the place works again; every save has its event.
    """
    text = f"{name} goes to the origin directly: {run.url} did not take it ({error.message})"
    emit(Event(name="checkpoint.tier.refused", subject=run.url, detail=text))
    if warn:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
