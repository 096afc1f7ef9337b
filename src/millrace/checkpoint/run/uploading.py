"""Uploads saves from this node's disk to the origin, and begins their copies to other nodes."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from millrace.checkpoint.run.pruning import prune
from millrace.checkpoint.run.ranks import Ranks
from millrace.checkpoint.run.replicator import Replicator
from millrace.checkpoint.run.retention import KeepLast
from millrace.checkpoint.run.run_layout import Run
from millrace.checkpoint.run.save_values import Written
from millrace.checkpoint.run.saving import PendingSave, ProgressMeter, Report, SaveResult
from millrace.checkpoint.run.tiers import Tiers, Upload, pending_uploads
from millrace.checkpoint.storage.layered import StoredManifest
from millrace.checkpoint.storage.replicating import copy_checkpoint, publish_manifest
from millrace.errors import DamagedError, MillraceError, ObjectExistsError, RetryableError, RunTakenError
from millrace.events import Event, emit


class TieredSave(PendingSave):
    """A save that is durable near first, and then at the origin. `near` is the first part; this object stands for both."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.near: PendingSave = self
        """Ends when the checkpoint is durable on this node's disk. Its `result` is without the upload."""
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


@dataclass(kw_only=True)
class Uploader:
    """Uploads saves from the local disk to the origin, in order, and copies them to other nodes. For one thread at a time.

    Every rank has one. `check` is called before a manifest is published (`RunTakenError`). `give_up` is called when a save
    can never reach the origin: no later one should build on it. `begin` is called before each upload, `after` after it. On
    each node one rank handles the node's disk: leftovers of an earlier process, and retention there.
    """

    tiers: Tiers
    local: Run
    ranks: Ranks
    local_keep: int
    check: Callable[[], None]
    after: Callable[[], None]
    give_up: Callable[[], None]
    begin: Callable[[], None]
    replicator: Replicator | None = None
    _is_behind: bool = True
    _backlog_bytes: int = 0
    _handles_node: bool | None = None

    def close(self) -> None:
        """Wait for a copy to other nodes that is still needed, and end the others."""
        if self.replicator is not None:
            self.replicator.close()

    def fall_behind(self) -> None:
        """Look for leftovers at the next upload: another process has saved near."""
        self._is_behind = True

    def upload(self, written: Written, report: Report) -> SaveResult:
        """Upload a save, and begin its copy to other nodes. A collective call. Raises errors of the places."""
        began = time.monotonic()
        self._report_backlog(self._backlog_bytes + written.result.stored_bytes)
        self.begin()
        progress = ProgressMeter(written.result.step, report)
        progress.begin("uploading", written.result.stored_bytes)
        name = written.name
        try:
            replicator = self.replicator
            stored, is_copied = self.ranks.run_on_first(
                lambda: (
                    StoredManifest.read(self.local.checkpoint(name)),
                    replicator is not None and replicator.may_begin,
                )
            )
            # A node's disk can be the source of a copy only if the manifest is there.
            self.ranks.run_on_all(lambda: publish_manifest(self.local.checkpoint(name), stored))
            if replicator is not None and is_copied:
                replicator.begin(name, written.own_files, is_first_rank=self.ranks.is_first)
            self.catch_up(name)
            self._copy(name, written.own_files, progress.reach)
            if replicator is not None:
                replicator.uploaded(name)
        except BaseException as error:
            self._is_behind = True
            if not isinstance(error, RetryableError):
                self.give_up()
            raise
        self._report_backlog(0)  # also what earlier uploads left
        self._prune_local()
        self.after()
        progress.begin("done", written.result.stored_bytes)
        return replace(written.result, seconds=written.result.seconds + time.monotonic() - began)

    def _report_backlog(self, nbytes: int) -> None:
        """Report how many bytes of saves of this process are not at the origin yet."""
        self._backlog_bytes = nbytes
        if self.ranks.is_first:
            values = {"upload_backlog_bytes": nbytes}
            emit(Event(name="run.upload.backlog", subject=self.local.url, nbytes=nbytes, values=values))

    def _copy(
        self,
        name: str,
        files: Collection[str],
        reach: Callable[[int, int], None],
    ) -> None:
        """Every rank uploads its own files, then the first one the manifest."""
        source, place = self.local.checkpoint(name), self.tiers.origin.checkpoint(name)
        self.ranks.run_on_all(lambda: copy_checkpoint(source, place, files, manifest=False, progress=reach))
        self.ranks.run_on_first(lambda: copy_checkpoint(source, place, (), check=self.check))

    def catch_up(self, newest: str = "") -> None:
        """Upload what an earlier process, or a failed upload, left only on the nodes' disks. A collective call."""
        if not self._is_behind:
            return
        if self.ranks.count > 1:
            self._share_manifests()
        before: list[Upload] = []

        def upload_files() -> None:
            if self._handles_node:
                pending = pending_uploads(self.local, self.tiers.origin)
                # What was saved after `newest` has its own upload.
                before.extend(itertools.takewhile(lambda upload: upload.name != newest, pending))
            for upload in before:
                source, target = self.local.checkpoint(upload.name), self.tiers.origin.checkpoint(upload.name)
                try:
                    copy_checkpoint(source, target, upload.files, manifest=False)
                except DamagedError as error:
                    # It stays on this disk, and must not block later checkpoints.
                    emit(Event(name="checkpoint.tier.left", subject=source.url, detail=str(error)))

        self._is_first_of_node()
        self.ranks.run_on_all(upload_files)
        self.ranks.run_on_first(lambda: self._publish([upload.name for upload in before if upload.manifest]))
        self._is_behind = False

    def _share_manifests(self) -> None:
        """Copy manifests to all nodes: after a crash before an upload, only the first rank's node may have one."""
        known = self.ranks.run_on_first(
            lambda: [
                (upload.name, StoredManifest.read(self.local.checkpoint(upload.name)))
                for upload in pending_uploads(self.local, self.tiers.origin)
                if upload.manifest
            ]
        )

        def publish_all() -> None:
            for name, stored in known:
                storage = self.local.checkpoint(name)
                try:
                    storage.prepare()
                    publish_manifest(storage, stored)
                except ObjectExistsError as error:
                    emit(Event(name="checkpoint.tier.left", subject=storage.url, detail=str(error)))

        self.ranks.run_on_all(publish_all)

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
        if not self._is_first_of_node():
            return
        try:
            prune(self.local, KeepLast(self.local_keep), independent=False)
        except MillraceError as error:
            emit(Event(name="run.prune.failed", subject=self.local.url, detail=str(error)))

    def _is_first_of_node(self) -> bool:
        """Whether this rank is the lowest one with this node's directory. A collective call the first time."""
        if self._handles_node is None:
            directory = (socket.gethostname(), os.path.realpath(self.local.url))
            self._handles_node = self.ranks.gather(directory).index(directory) == self.ranks.rank
        return self._handles_node
