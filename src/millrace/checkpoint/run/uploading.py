"""Uploads saves from this node's disk to the origin, and begins their copies to other nodes.

Of several ranks, each uploads its own files and its part. The first rank publishes the manifest when all parts are at the
origin (`parts.py`). No collective calls.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from millrace.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from millrace.checkpoint.run.parts import SaveFailedElsewhere, join_parts, require_files, stored
from millrace.checkpoint.run.pruning import prune
from millrace.checkpoint.run.replicator import Replicator
from millrace.checkpoint.run.retention import KeepLast
from millrace.checkpoint.run.run_layout import Run, describe_manifest, parse_name, part_name, rank_of_part
from millrace.checkpoint.run.save_values import Member, Written
from millrace.checkpoint.run.saving import PendingSave, ProgressMeter, Report, SaveResult
from millrace.checkpoint.run.tiers import Tiers, Upload, pending_uploads
from millrace.checkpoint.run.timeline import age_of
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.manifests import StoredManifest, load_manifest
from millrace.checkpoint.storage.replicating import copy_files, publish_checked, publish_checkpoint, publish_manifest
from millrace.checkpoint.writing.packing import discard
from millrace.errors import (
    BaseGoneError,
    DamagedError,
    MillraceError,
    MissingError,
    RetryableError,
    RunTakenError,
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
        self.far: PendingSave | None = None
        """The upload, which is set before the first part ends."""

    def done(self) -> bool:
        return self.near.done() and (self.far is None or self.far.done())

    def result(self, timeout: float | None = None) -> SaveResult | None:
        error = self.exception(timeout)
        if error is not None:
            raise error
        last = self.near if self.far is None else self.far
        return last.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        began = time.monotonic()
        error = self.near.exception(timeout)
        if error is not None or self.far is None:
            return error
        return self.far.exception(None if timeout is None else max(0.0, timeout - (time.monotonic() - began)))

    def _known_error(self) -> BaseException | None:
        return self.near._known_error() or (None if self.far is None else self.far._known_error())


Join = Callable[[CheckpointStorage, str, Callable[[], None]], StoredManifest]


@dataclass(kw_only=True)
class Uploader:
    """Uploads saves from the local disk to the origin, in order, and copies them to other nodes. For one thread at a time.

    Every rank has one. `check` is called before a manifest is published (`RunTakenError`). `join` completes a checkpoint at
    the origin with the other ranks, as `RunSaver.join`. `give_up` is called with the name of a save that can never reach the
    origin: no later one should build on it. `after` is called after each upload. On each node one rank handles the node's
    disk: leftovers of an earlier process, and retention there.
    """

    tiers: Tiers
    local: Run
    member: Member
    local_keep: int
    check: Callable[[], None]
    join: Join
    after: Callable[[], None]
    give_up: Callable[[str], None]
    replicator: Replicator | None = None
    is_behind: bool = True
    """Whether the next upload looks for leftovers: saves of another process, or of a failed upload."""
    _backlog_bytes: int = 0

    def close(self) -> None:
        """Wait for a copy to other nodes that is still needed, and end the others."""
        if self.replicator is not None:
            self.replicator.close()

    def upload(self, written: Written, report: Report) -> SaveResult:
        """Upload a save, and begin its copy to other nodes. Raises errors of the places, and of other ranks."""
        began = time.monotonic()
        self._report_backlog(self._backlog_bytes + written.result.stored_bytes)
        progress = ProgressMeter(written.result.step, report)
        progress.begin("uploading", written.result.stored_bytes)
        result = written.result
        try:
            if self.member.count == 1:
                source, target = self.local.checkpoint(written.name), self.tiers.origin.checkpoint(written.name)
                if self.replicator is not None:
                    self._replicate(written, StoredManifest.read(source))
                self.publish(self.copy_leftovers(written.name))
                self.is_behind = False
                copy_files(source, target, written.own_files, progress=progress.reach)
                publish_checkpoint(source, target, self.check)
            else:
                result = self._upload_part(written, progress)
            if self.replicator is not None:
                self.replicator.uploaded(written.name)
        except BaseException as error:
            self.is_behind = True
            cause = error.error if isinstance(error, SaveFailedElsewhere) else error
            if not isinstance(cause, RetryableError):
                self.give_up(written.name)
                if self.member.count > 1:
                    self._discard_near(written)
            if isinstance(error, SaveFailedElsewhere):
                raise error.error from None
            raise
        self._report_backlog(0)  # also leftovers of earlier uploads
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
        if self.replicator is None or not written.is_copied:
            return
        # Another rank may still have a copy to wait for that the first one has not. It follows the order nevertheless: the
        # first one waits for its part.
        if self.member.count > 1 or self.replicator.may_begin:
            self.replicator.begin(written.name, written.own_files, stored, is_first_rank=self.member.is_first)

    def copy_leftovers(self, newest: str) -> list[str]:
        """Upload the files that an earlier process, or a failed upload, left only on this node's disk.

        Returns the checkpoints whose manifests are to be published after that.
        """
        if not (self.is_behind and self.member.handles_node):
            return []
        pending = pending_uploads(self.local, self.tiers.origin)
        # What was saved after `newest` has its own upload.
        before: list[Upload] = list(itertools.takewhile(lambda upload: upload.name != newest, pending))
        for upload in before:
            source, target = self.local.checkpoint(upload.name), self.tiers.origin.checkpoint(upload.name)
            try:
                copy_files(source, target, upload.files)
            except DamagedError as error:
                # It stays on this disk, and must not block later checkpoints.
                emit(Event(name="checkpoint.tier.left", subject=source.url, detail=str(error)))
        return [upload.name for upload in before if upload.manifest]

    def publish(self, names: Collection[str]) -> None:
        """Publish the manifests of checkpoints, whose files are at the origin.

        Raises `RunTakenError`, and `RetryableError`: then a later upload tries again, before it publishes a newer one.
        """
        for name in names:
            source, target = self.local.checkpoint(name), self.tiers.origin.checkpoint(name)
            try:
                publish_checkpoint(source, target, self.check)
            except (RunTakenError, RetryableError):
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

    def _discard_near(self, written: Written) -> None:
        """Remove this rank's files of a save from the node's disk, unless a restore has joined its parts there."""
        near = self.local.checkpoint(written.name)
        try:
            if MANIFEST_NAME not in near.names():
                discard(near, [*written.own_files, part_name(self.member.rank, written.save_id)])
        except MillraceError as error:
            emit(Event(name="checkpoint.discard.failed", subject=near.url, detail=str(error)))

    def _upload_part(self, written: Written, progress: ProgressMeter) -> SaveResult:
        """Upload this rank's part, and complete the checkpoint with the other ranks."""
        near, far = self.local.checkpoint(written.name), self.tiers.origin.checkpoint(written.name)
        part = StoredManifest.read(near, part_name(self.member.rank, written.save_id))
        self._replicate(written, part)
        left = self.copy_leftovers(written.name)
        own = self._copy_earlier_parts(written.name)
        self._copy_part(near, far, part, written.own_files, progress)

        def publish_earlier() -> None:
            self.publish(left)
            for name in own:
                try:
                    self._join_earlier(name)
                except (BaseGoneError, DamagedError, MissingError) as error:  # it must not block later checkpoints
                    emit(Event(name="checkpoint.tier.left", subject=self.local.url_of(name), detail=str(error)))

        whole = self.join(far, written.save_id, publish_earlier)
        self.is_behind = False
        self._publish_near(near, whole)
        info = describe_manifest(far.url, whole.manifest, whole.nbytes)
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
            discard(near, [part_name(self.member.rank, whole.manifest.save_id)])
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
        copy_files(near, far, files, progress=reach, stored=part)
        # An earlier attempt may have published it.
        far.publish(part_name(self.member.rank, part.manifest.save_id), part.data, replace=True)

    def _copy_earlier_parts(self, newest: str) -> list[str]:
        """Upload own parts of checkpoints before `newest` that have no manifest yet; returns these.

        Later saves may be deltas to them. A later step is of a dead job, from before a restore to an earlier one: with a
        manifest it would be the newest checkpoint again.
        """
        if not self.is_behind:
            return []
        # An earlier save that was complete at the origin, and was pruned there, does not return.
        done = max((age_of(each) for each in self.tiers.origin.scan() if each.complete), default=(-1, -1))
        point = parse_name(newest)
        found = {
            each.name: own
            for each in sorted(self.local.scan(), key=age_of)
            if not each.complete and point is not None and done < age_of(each) < age_of(point)
            if (own := [file.name for file in each.files if rank_of_part(file.name) == self.member.rank])
        }
        for name, parts in found.items():
            near, far = self.local.checkpoint(name), self.tiers.origin.checkpoint(name)
            for part in parts:
                try:
                    self._copy_earlier_part(near, far, part)
                except (DamagedError, MissingError) as error:  # it must not block later checkpoints
                    emit(Event(name="checkpoint.tier.left", subject=near.url, detail=str(error)))
        return list(found)

    def _copy_earlier_part(self, near: CheckpointStorage, far: CheckpointStorage, name: str) -> None:
        part = StoredManifest.read(near, name)
        try:
            whole = StoredManifest.read(far)
        except MissingError:
            self._copy_part(near, far, part, [file.name for file in part.manifest.own_files])
            return
        if whole.manifest.save_id == part.manifest.save_id:
            self._publish_near(near, whole)

    def _join_earlier(self, name: str) -> None:
        """Publish the manifest of an earlier save if all its parts are at the origin by now. On the first rank."""
        far = self.tiers.origin.checkpoint(name)
        files = far.files()
        if any(file.name == MANIFEST_NAME for file in files):
            return
        by_save: dict[str, dict[str, Manifest]] = {}
        for file in files:
            if rank_of_part(file.name) is not None:
                part = load_manifest(far, file).manifest
                by_save.setdefault(part.save_id, {})[file.name] = part
        for parts in by_save.values():
            manifest = join_parts(parts.values())
            if manifest is not None:
                require_files(far, manifest)
                publish_checked(far, manifest, functools.partial(publish_manifest, far, stored(manifest)), self.check)
                discard(far, list(parts))
                return
