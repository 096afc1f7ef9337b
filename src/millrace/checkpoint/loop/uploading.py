"""The second half of a save into tiers: what is durable on this node's disk goes to a second place and to the origin."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from millrace.checkpoint.loop.ranks import Ranks
from millrace.checkpoint.loop.run_saver import Written
from millrace.checkpoint.loop.save_progress import ProgressMeter
from millrace.checkpoint.loop.saving import PendingSave, SaveProgress, SaveResult, SaveRunner
from millrace.checkpoint.places.layered import StoredManifest
from millrace.checkpoint.places.replicating import copy_checkpoint, publish_manifest
from millrace.checkpoint.run.pruning import prune
from millrace.checkpoint.run.retention import KeepLast
from millrace.checkpoint.run.run_layout import Run
from millrace.checkpoint.run.tiers import PendingUploads, Tiers, Upload, pending_uploads
from millrace.errors import DamagedError, MillraceError, ObjectExistsError, RetryableError, RunTakenError
from millrace.events import Event, emit


class TieredSave(PendingSave):
    """A save that is durable near first, and then at the origin. `near` is the first part; this as a whole is both."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.near: PendingSave = self
        """Ends when the checkpoint is durable on this node's disk. Its `result` is that of the saving alone."""
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

    def go_on(self, far: PendingSave) -> None:
        """The first part hands over to the second, before it ends."""
        self._far = far

    def _known_error(self) -> BaseException | None:
        return self.near._known_error() or (None if self._far is None else self._far._known_error())


@dataclass(kw_only=True)
class Uploader:
    """Brings saves from the local disk to the other places, in order, one at a time, in a thread of its own.

    Every rank has one. `check` is asked before a manifest is published (`RunTakenError`). `give_up` is called when a
    save cannot reach the origin, however often it is tried: no later one should build on it. On each node one rank sees to
    what concerns the node's disk: leftovers of an earlier process, and what stays there.
    """

    tiers: Tiers
    local: Run
    ranks: Ranks
    local_keep: int
    check: Callable[[], None]
    after: Callable[[], None]
    give_up: Callable[[], None]
    runner: SaveRunner = field(default_factory=SaveRunner)
    _is_behind: bool = True
    _sees_to_node: bool | None = None

    def submit(self, written: Written, report: Callable[[SaveProgress], None] | None) -> PendingSave:
        """Copy a save onward. Waits while an earlier one is on its way: then its saver waits, and with it the next save."""
        return self.runner.submit(written.result.step, lambda tell: self._upload(written, tell), on_progress=report)

    # --- in the thread ----------------------------------------------------------------------------

    def _upload(self, written: Written, report: Callable[[SaveProgress], None]) -> SaveResult:
        began = time.monotonic()
        progress = ProgressMeter(written.result.step, report)
        progress.begin("uploading", written.result.stored_bytes)
        name = written.name
        try:
            stored = self.ranks.agree(lambda: StoredManifest.read(self.local.checkpoint(name)))
            # Each node's disk can give the checkpoint away only with its manifest.
            self.ranks.together(lambda: publish_manifest(self.local.checkpoint(name), stored))
            self._to_replica(name, written.own_files)
            self.catch_up(name)
            self._copy(name, written.own_files, self.tiers.origin, progress.reach)
        except BaseException as error:
            self._is_behind = True
            if not isinstance(error, RetryableError):
                self.give_up()
            raise
        self._tidy(protected=())
        self.after()
        progress.begin("done", written.result.stored_bytes)
        return replace(written.result, seconds=written.result.seconds + time.monotonic() - began)

    def _copy(
        self,
        name: str,
        files: Collection[str],
        target: Run,
        reach: Callable[[int, int], None] | None = None,
    ) -> None:
        """Every rank copies its own files, and the first one the manifest when all are there."""
        source, place = self.local.checkpoint(name), target.checkpoint(name)
        self.ranks.settle(lambda: copy_checkpoint(source, place, files, manifest=False, progress=reach))
        self.ranks.agree(lambda: copy_checkpoint(source, place, (), check=self.check))

    def _to_replica(self, name: str, files: Collection[str]) -> None:
        if self.tiers.replica is None:
            return
        try:
            self._copy(name, files, self.tiers.replica)
            if self._is_first_of_node():
                prune(self.tiers.replica, KeepLast(self.local_keep))
        except MillraceError as error:
            # One copy less; the origin gets it all the same.
            emit(Event(name="checkpoint.tier.refused", subject=self.tiers.replica.url, detail=str(error)))

    def catch_up(self, newest: str = "") -> None:
        """Bring what an earlier process, or a failed upload, left on the nodes' disks alone. A collective call."""
        if not self._is_behind:
            return
        if self.ranks.count > 1:
            self._share_manifests()
        before: list[Upload] = []

        def bring() -> None:
            if self._sees_to_node:
                before.extend(upload for upload in self._lacking().uploads if upload.name != newest)
            for upload in before:
                source, target = self.local.checkpoint(upload.name), self.tiers.origin.checkpoint(upload.name)
                try:
                    copy_checkpoint(source, target, upload.files, manifest=False)
                except DamagedError as error:
                    # It stays here, and must not keep back what comes after it.
                    emit(Event(name="checkpoint.tier.left", subject=source.url, detail=str(error)))

        self._is_first_of_node()
        self.ranks.settle(bring)
        self.ranks.agree(lambda: self._publish([upload.name for upload in before if upload.manifest]))
        self._is_behind = False

    def _share_manifests(self) -> None:
        """A process that died between its save and its upload may have left the manifest on the first rank's node alone."""
        known = self.ranks.agree(
            lambda: [
                (upload.name, StoredManifest.read(self.local.checkpoint(upload.name)))
                for upload in self._lacking().uploads
                if upload.manifest
            ]
        )

        def place() -> None:
            for name, stored in known:
                storage = self.local.checkpoint(name)
                try:
                    storage.prepare()
                    publish_manifest(storage, stored)
                except ObjectExistsError as error:
                    emit(Event(name="checkpoint.tier.left", subject=storage.url, detail=str(error)))

        self.ranks.settle(place)

    def _publish(self, names: Collection[str]) -> None:
        for name in names:
            source, target = self.local.checkpoint(name), self.tiers.origin.checkpoint(name)
            try:
                copy_checkpoint(source, target, (), check=self.check)
            except RunTakenError:
                raise
            except MillraceError as error:
                # Files of a node that is no more. What comes now is newer, and needs them no longer than it says.
                emit(Event(name="checkpoint.tier.left", subject=source.url, detail=str(error)))

    def _lacking(self) -> PendingUploads:
        return pending_uploads(self.local, self.tiers.origin)

    def _tidy(self, protected: Collection[str]) -> None:
        if not self._is_first_of_node():
            return
        try:
            prune(self.local, KeepLast(self.local_keep), protected=protected)
        except MillraceError as error:
            emit(Event(name="run.prune.failed", subject=self.local.url, detail=str(error)))

    def _is_first_of_node(self) -> bool:
        """Whether this rank is the lowest that sees this node's directory. A collective call the first time."""
        if self._sees_to_node is None:
            here = (socket.gethostname(), os.path.realpath(self.local.url))
            self._sees_to_node = self.ranks.gather(here).index(here) == self.ranks.rank
        return self._sees_to_node
