"""Uploads saves from this node's disk to the origin, and begins their copies to other nodes.

Of several ranks, each uploads its own files and its part. The first rank publishes the manifest when all parts are at the
origin (`parts.py`). No collective calls, except in `join_left_parts` and `recover`.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from millrace.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from millrace.checkpoint.run.parts import (
    PartRecord,
    SaveFailedElsewhere,
    join_parts,
    part_name,
    remove,
    require_files,
    stored,
)
from millrace.checkpoint.run.pruning import prune
from millrace.checkpoint.run.ranks import Member, Ranks
from millrace.checkpoint.run.replicator import Replicator
from millrace.checkpoint.run.retention import KeepLast
from millrace.checkpoint.run.run_info import info_of_manifest
from millrace.checkpoint.run.run_layout import ListedCheckpoint, Run, parse_name
from millrace.checkpoint.run.save_values import Written
from millrace.checkpoint.run.saving import PendingSave, ProgressMeter, Report, SaveResult
from millrace.checkpoint.run.tiers import Tiers, Upload, pending_uploads
from millrace.checkpoint.run.timeline import age_of
from millrace.checkpoint.storage.layered import StoredManifest
from millrace.checkpoint.storage.manifests import load_manifest
from millrace.checkpoint.storage.replicating import copy_checkpoint, publish_manifest
from millrace.checkpoint.storage.storage import CheckpointStorage
from millrace.errors import (
    BaseGoneError,
    DamagedError,
    MillraceError,
    MissingError,
    ObjectExistsError,
    RetryableError,
    RunTakenError,
    StorageError,
    UnsupportedFormatError,
)
from millrace.events import Event, emit


class TieredSave(PendingSave):
    """A save that is durable near first, and then at the origin. `near` is the first part; this object stands for both."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.near: PendingSave = self
        """Ends when the checkpoint is durable on this node's disk; of several ranks, when this rank's part is, which its
        `result` describes. The result is without the upload.
        """
        self._far: PendingSave | None = None

    def done(self) -> bool:
        return self.near.done() and (self._far is None or self._far.done())

    def result(self, timeout: float | None = None) -> SaveResult | None:
        error = self.exception(timeout)
        if error is not None:
            raise error
        last = self.near if self._far is None else self._far
        return last.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        began = time.monotonic()
        error = self.near.exception(timeout)
        if error is not None or self._far is None:
            return error
        return self._far.exception(None if timeout is None else max(0.0, timeout - (time.monotonic() - began)))

    def begin_with(self, near: PendingSave) -> TieredSave:
        """Set the first part; returns this object."""
        self.near = near
        return self

    def continue_with(self, far: PendingSave) -> None:
        """Set the second part, before the first one ends."""
        self._far = far

    def _known_error(self) -> BaseException | None:
        return self.near._known_error() or (None if self._far is None else self._far._known_error())


Join = Callable[[CheckpointStorage, str, Callable[[], None]], StoredManifest]


@dataclass(kw_only=True)
class Uploader:
    """Uploads saves from the local disk to the origin, in order, and copies them to other nodes. For one thread at a time.

    Every rank has one. `check` is called before a manifest is published (`RunTakenError`). `join` completes a checkpoint
    at the origin with the other ranks, as `RunSaver.join`. `give_up` is called when a save can never reach the origin: no
    later one should build on it. `begin` is called before each upload, `after` after it. On each node one rank handles the
    node's disk: leftovers of an earlier process, and retention there.
    """

    tiers: Tiers
    local: Run
    member: Member
    local_keep: int
    check: Callable[[], None]
    join: Join
    after: Callable[[], None]
    give_up: Callable[[], None]
    begin: Callable[[], None]
    replicator: Replicator | None = None
    _is_behind: bool = True
    _backlog_bytes: int = 0

    def close(self) -> None:
        """Wait for a copy to other nodes that is still needed, and end the others."""
        if self.replicator is not None:
            self.replicator.close()

    def fall_behind(self) -> None:
        """Look for leftovers at the next upload: another process has saved near."""
        self._is_behind = True

    def upload(self, written: Written, report: Report) -> SaveResult:
        """Upload a save, and begin its copy to other nodes. Raises errors of the places, and of other ranks."""
        began = time.monotonic()
        self._report_backlog(self._backlog_bytes + written.result.stored_bytes)
        self.begin()
        progress = ProgressMeter(written.result.step, report)
        progress.begin("uploading", written.result.stored_bytes)
        result = written.result
        try:
            if self.member.count == 1:
                source, target = self.local.checkpoint(written.name), self.tiers.origin.checkpoint(written.name)
                if self.replicator is not None:
                    self._replicate(written, StoredManifest.read(source))
                self._publish(self._copy_leftovers(written.name))
                self._is_behind = False
                copy_checkpoint(source, target, written.own_files, manifest=False, progress=progress.reach)
                copy_checkpoint(source, target, (), check=self.check)
            else:
                result = self._upload_part(written, progress)
            if self.replicator is not None:
                self.replicator.uploaded(written.name)
        except BaseException as error:
            self._is_behind = True
            cause = error.error if isinstance(error, SaveFailedElsewhere) else error
            if not isinstance(cause, RetryableError):
                self.give_up()
                if self.member.count > 1:
                    remove(self.local.checkpoint(written.name), [*written.own_files, part_name(self.member.rank)])
            if isinstance(error, SaveFailedElsewhere):
                raise error.error from None
            raise
        self._report_backlog(0)  # also what earlier uploads left
        self._prune_local()
        self.after()
        progress.begin("done", written.result.stored_bytes)
        return replace(result, seconds=written.result.seconds + time.monotonic() - began)

    # --- of one rank, and of a node ---------------------------------------------------------------

    def _report_backlog(self, nbytes: int) -> None:
        """Report how many bytes of saves of this process are not at the origin yet."""
        self._backlog_bytes = nbytes
        if self.member.is_first:
            values = {"upload_backlog_bytes": nbytes}
            emit(Event(name="run.upload.backlog", subject=self.local.url, nbytes=nbytes, values=values))

    def _replicate(self, written: Written, stored: StoredManifest) -> None:
        """Begin the copy of this rank's files, which `stored` describes, to other nodes."""
        if self.replicator is not None and written.is_copied:
            self.replicator.begin(written.name, written.own_files, stored, is_first_rank=self.member.is_first)

    def _copy_leftovers(self, newest: str) -> list[str]:
        """Upload the files of what an earlier process, or a failed upload, left only on this node's disk.

        Returns the checkpoints whose manifests are to be published after that.
        """
        if not (self._is_behind and self.member.handles_node):
            return []
        pending = pending_uploads(self.local, self.tiers.origin)
        # What was saved after `newest` has its own upload.
        before: list[Upload] = list(itertools.takewhile(lambda upload: upload.name != newest, pending))
        for upload in before:
            source, target = self.local.checkpoint(upload.name), self.tiers.origin.checkpoint(upload.name)
            try:
                copy_checkpoint(source, target, upload.files, manifest=False)
            except DamagedError as error:
                # It stays on this disk, and must not block later checkpoints.
                emit(Event(name="checkpoint.tier.left", subject=source.url, detail=str(error)))
        return [upload.name for upload in before if upload.manifest]

    def _publish(self, names: Collection[str]) -> None:
        for name in names:
            source, target = self.local.checkpoint(name), self.tiers.origin.checkpoint(name)
            try:
                copy_checkpoint(source, target, (), check=self.check)
            except RunTakenError:
                raise
            except MillraceError as error:
                # Files of a node that is gone. Later saves do not need this manifest.
                emit(Event(name="checkpoint.tier.left", subject=source.url, detail=str(error)))

    def _prune_local(self) -> None:
        if not self.member.handles_node:
            return
        try:
            prune(self.local, KeepLast(self.local_keep), independent=False)
        except MillraceError as error:
            emit(Event(name="run.prune.failed", subject=self.local.url, detail=str(error)))

    # --- of several ranks -------------------------------------------------------------------------

    def _upload_part(self, written: Written, progress: ProgressMeter) -> SaveResult:
        """Upload this rank's part, and complete the checkpoint with the other ranks."""
        near, far = self.local.checkpoint(written.name), self.tiers.origin.checkpoint(written.name)
        part = StoredManifest.read(near, part_name(self.member.rank))
        self._replicate(written, part)
        left = self._copy_leftovers(written.name)
        own = self._copy_earlier_parts(written.name)
        self._copy_part(near, far, part, written.own_files, progress)

        def publish_earlier() -> None:
            self._publish(left)
            for found in own:
                try:
                    self._join_earlier(found)
                except (BaseGoneError, DamagedError, MissingError) as error:  # it must not block later checkpoints
                    emit(Event(name="checkpoint.tier.left", subject=self.local.url_of(found.name), detail=str(error)))

        whole = self.join(far, written.save_id, publish_earlier)
        self._is_behind = False
        self._publish_near(near, whole)
        info = info_of_manifest(
            whole.manifest, len(whole.data), name=written.name, url="", step=0, revision=0, published=0.0
        )
        full, delta, referenced = whole.manifest.user["run"]["chunks"]
        return replace(
            written.result,
            kind="delta" if info.kind == "delta" else "full",
            raw_bytes=info.raw_bytes,
            stored_bytes=info.stored_bytes,
            restore_bytes=info.restore_bytes,
            chunks_full=full,
            chunks_delta=delta,
            chunks_referenced=referenced,
        )

    def _publish_near(self, near: CheckpointStorage, whole: StoredManifest) -> None:
        """Replace this rank's part by the manifest: from now on this node's disk can be the source of a copy."""
        try:
            publish_manifest(near, whole)
            remove(near, [part_name(self.member.rank)])
        except MillraceError as error:
            # The origin has the checkpoint.
            emit(Event(name="checkpoint.tier.refused", subject=near.url, detail=str(error)))

    def _copy_part(
        self,
        near: CheckpointStorage,
        far: CheckpointStorage,
        part: StoredManifest,
        files: Collection[str],
        progress: ProgressMeter | None = None,
    ) -> None:
        reach = None if progress is None else progress.reach
        copy_checkpoint(near, far, files, manifest=False, progress=reach, stored=part)
        # An earlier attempt may have published it.
        far.publish(part_name(self.member.rank), part.data, replace=True)

    def _copy_earlier_parts(self, newest: str) -> list[ListedCheckpoint]:
        """Upload own parts that have no manifest yet. Later saves may be deltas to them."""
        if not self._is_behind:
            return []
        name = part_name(self.member.rank)
        # An earlier save that was complete at the origin, and was pruned there, does not return.
        done = max((age_of(each) for each in self.tiers.origin.scan() if each.complete), default=(-1, -1))
        found = [
            each
            for each in self.local.scan()
            if not each.complete and age_of(each) > done and name in {file.name for file in each.files}
        ]
        for each in itertools.takewhile(lambda each: each.name != newest, found):
            near, far = self.local.checkpoint(each.name), self.tiers.origin.checkpoint(each.name)
            try:
                self._copy_earlier_part(near, far, name)
            except (DamagedError, MissingError) as error:  # it must not block later checkpoints
                emit(Event(name="checkpoint.tier.left", subject=near.url, detail=str(error)))
        return [each for each in found if each.name != newest]

    def _copy_earlier_part(self, near: CheckpointStorage, far: CheckpointStorage, name: str) -> None:
        part = StoredManifest.read(near, name)
        try:
            whole = StoredManifest.read(far)
        except MissingError:
            own = [file.name for file in part.manifest.files if not file.name.startswith("../")]
            self._copy_part(near, far, part, own)
            return
        if whole.manifest.save_id == part.manifest.save_id:
            self._publish_near(near, whole)

    def _join_earlier(self, found: ListedCheckpoint) -> None:
        """Publish the manifest of an earlier save if all its parts are at the origin by now. On the first rank."""
        far = self.tiers.origin.checkpoint(found.name)
        files = {file.name: file for file in far.files()}
        parts = [load_manifest(far, files[name]).manifest for name in files if name.startswith("part-")]
        if MANIFEST_NAME in files or len({part.save_id for part in parts}) != 1:
            return
        manifest = join_parts(parts)
        if manifest is None:
            return
        require_files(far, manifest)
        self.check()
        publish_manifest(far, stored(manifest))
        remove(far, [name for name in files if name.startswith("part-")])

    # --- after a crash ----------------------------------------------------------------------------

    def join_left_parts(self, ranks: Ranks) -> bool:
        """Complete, on the nodes' disks, what a crash left in parts there and on other nodes. Needs no origin.

        Returns whether any rank has parts. A collective call in the caller's thread. Raises errors of the disks.
        """
        gathered = ranks.gather(ranks.run_on_all(self._near_parts))
        known = ranks.run_on_first(lambda: self._joined(gathered))
        self._publish_on_all(ranks, known)
        return bool(known) or any(gathered)

    def recover(self, ranks: Ranks) -> None:
        """Upload what a crash left on the nodes' disks. A collective call in the caller's thread.

        Raises errors of the places.
        """
        self._publish_on_all(ranks, self._pending_on_nodes(ranks))
        names = ranks.run_on_all(lambda: self._copy_leftovers(""))
        ranks.run_on_first(lambda: self._publish(names))
        self._is_behind = False

    def _pending_on_nodes(self, ranks: Ranks) -> list[tuple[str, StoredManifest]]:
        """The complete checkpoints of any node that the origin lacks. Of several of one name the last counts."""

        def pending() -> dict[str, StoredManifest]:
            uploads = pending_uploads(self.local, self.tiers.origin) if self.member.handles_node else ()
            names = [upload.name for upload in uploads if upload.manifest]
            return {name: StoredManifest.read(self.local.checkpoint(name)) for name in names}

        own = ranks.run_on_all(pending)
        created = ranks.gather({name: each.manifest.created for name, each in own.items()})
        # Several nodes may have a manifest. One of them sends it.
        senders = {
            name: max(range(ranks.count), key=lambda rank: created[rank].get(name, -math.inf))
            for name in itertools.chain(*created)
        }
        sent = [(name, each) for name, each in own.items() if senders[name] == ranks.rank]
        return list(itertools.chain(*ranks.gather(sent)))

    def _publish_on_all(self, ranks: Ranks, known: Collection[tuple[str, StoredManifest]]) -> None:
        """Publish the manifests of checkpoints on all nodes' disks, in place of the parts there."""

        def publish_all() -> None:
            for name, manifest in known:
                storage = self.local.checkpoint(name)
                try:
                    storage.prepare()
                    publish_manifest(storage, manifest)
                    remove(storage, [part_name(self.member.rank)])
                except ObjectExistsError as error:
                    emit(Event(name="checkpoint.tier.left", subject=storage.url, detail=str(error)))

        ranks.run_on_all(publish_all)

    def _near_parts(self) -> list[tuple[str, Manifest]]:
        """The parts on this node's disk, with the names of their checkpoints."""
        return _parts_in(self.local) if self.member.handles_node else []

    def _joined(self, gathered: Collection[list[tuple[str, Manifest]]]) -> list[tuple[str, StoredManifest]]:
        """The manifests of checkpoints of which all parts exist on the nodes' disks, or whose manifest another node has."""
        near = {(name, part.save_id) for parts in gathered for name, part in parts}
        by_save: dict[tuple[str, str], list[Manifest]] = {}
        for name, part in itertools.chain(*gathered, self._parts_elsewhere()):
            by_save.setdefault((name, part.save_id), []).append(part)
        found: list[tuple[str, StoredManifest]] = []
        incomplete: list[tuple[str, list[Manifest]]] = []
        for (name, save_id), parts in by_save.items():
            manifest = join_parts(parts)
            whole = self._manifest_elsewhere(name, save_id) if manifest is None else stored(manifest)
            if whole is None:
                incomplete.append((name, parts))
            elif manifest is not None or (name, save_id) in near:
                found.append((name, whole))
        if incomplete:
            newest = max((age_of(each) for each in self.tiers.complete()), default=(-1, -1))
            joined = max(
                (age_of(point) for name, _ in found if (point := parse_name(name)) is not None), default=newest
            )
            for name, parts in incomplete:
                point = parse_name(name)
                if point is not None and age_of(point) > max(newest, joined):
                    self._report_missing(name, parts)
        return found

    def _parts_elsewhere(self) -> list[tuple[str, Manifest]]:
        """The parts that other nodes have."""
        self.tiers.look()
        found: list[tuple[str, Manifest]] = []
        for run in () if self.tiers.peers is None else self.tiers.peers.runs():
            try:
                found += _parts_in(run)
            except MillraceError as error:
                emit(Event(name="checkpoint.tier.unreachable", subject=run.url, detail=str(error)))
        return found

    def _manifest_elsewhere(self, name: str, save_id: str) -> StoredManifest | None:
        """The manifest of a save on another node."""
        for run in () if self.tiers.peers is None else self.tiers.peers.runs():
            try:
                whole = StoredManifest.read(run.checkpoint(name))
            except MissingError:
                continue
            except MillraceError as error:
                emit(Event(name="checkpoint.tier.unreachable", subject=run.url_of(name), detail=str(error)))
            else:
                if whole.manifest.save_id == save_id:
                    return whole
        return None

    def _report_missing(self, name: str, parts: Collection[Manifest]) -> None:
        records = [record for part in parts if (record := PartRecord.of(part)) is not None]
        missing = {rank for record in records for rank in range(record.world)} - {record.rank for record in records}
        text = (
            f"{self.tiers.origin.url_of(name)} is on disks of several nodes, and the parts of these ranks are missing: "
            f"{', '.join(map(str, sorted(missing)))}; start with the same nodes to restore it"
        )
        emit(Event(name="checkpoint.tier.left", subject=self.local.url_of(name), detail=text))
        warnings.warn(text, RuntimeWarning, stacklevel=6)


def _parts_in(run: Run) -> list[tuple[str, Manifest]]:
    """The parts of checkpoints without a manifest in a place, by name. An unreadable one is an event."""
    parts: list[tuple[str, Manifest]] = []
    for found in run.scan():
        storage = run.checkpoint(found.name)
        for file in found.files:
            if not found.complete and file.name.startswith("part-"):
                try:
                    parts.append((found.name, load_manifest(storage, file).manifest))
                except (DamagedError, MissingError, StorageError, UnsupportedFormatError) as error:
                    # It must not hide the parts of other saves.
                    emit(Event(name="checkpoint.tier.left", subject=storage.url, detail=f"{file.name}: {error}"))
    return parts
