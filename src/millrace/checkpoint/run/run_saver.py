"""The saves of a run on every rank: the first rank's decision, the written bytes, and the base of the next save.

Several ranks make no collective calls here. Each has the order of the save, and they meet in the storage (`parts.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from millrace.checkpoint.format.manifest import MANIFEST_NAME, DataFile, Manifest
from millrace.checkpoint.run.claims import Claim, ClaimState
from millrace.checkpoint.run.parts import PartRecord, SaveFailedElsewhere, complete
from millrace.checkpoint.run.run_info import CheckpointInfo, paths_of
from millrace.checkpoint.run.run_layout import (
    ListedCheckpoint,
    Run,
    checkpoint_name,
    describe_manifest,
    parse_name,
    part_name,
)
from millrace.checkpoint.run.save_values import LastSave, Member, RunState, SaveOrder, SaveRequest, Staged, Written
from millrace.checkpoint.run.saving import ProgressMeter, SaveResult
from millrace.checkpoint.run.tiers import is_local_failure, report_local_failure
from millrace.checkpoint.run.timeline import Point, next_revision, timeline
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.manifests import StoredManifest
from millrace.checkpoint.storage.replicating import publish_checked
from millrace.checkpoint.writing.bases import Base, StoredBase, check_files, find_damage
from millrace.checkpoint.writing.delta import SaveRecord, choose_base
from millrace.checkpoint.writing.packing import discard
from millrace.checkpoint.writing.rank_writer import RankWriter
from millrace.errors import (
    BaseGoneError,
    ChangedError,
    DiskFullError,
    MillraceError,
    ObjectExistsError,
    OutcomeUnknownError,
    RunTakenError,
    SaverDiedError,
    StorageError,
    UsageError,
)
from millrace.events import Event, emit

_MEMORY_SHARE = 0.5
_UNLIMITED = 1 << 62

Write = Callable[[Staged, RankWriter, Callable[[int], None]], None]
"""Saves a staged state with a writer, and calls its last argument with the bytes of each tensor when its write begins."""


class _RunWriter(RankWriter):
    """A writer that checks the run's claim before it publishes, and keeps a description of the published checkpoint.

    Of several ranks, each publishes its part. `is_near`: the storage is this node's own. `versions` are those of the run's
    data files in an object store, as earlier saves of this manager saw them. `replaced_base`: the directories of damaged
    checkpoints, for which this rank writes its part in full.
    """

    def __init__(
        self,
        url: str,
        storage: CheckpointStorage,
        *,
        member: Member,
        save_id: str,
        claim: Claim | None,
        is_near: bool,
        versions: dict[str, str] | None,
        replaced_base: tuple[str, ...],
        **options: Any,
    ) -> None:
        super().__init__(url, **options)
        self._opened = storage
        self._member, self._rank, self._save_id = member, member.rank, save_id
        self._claim, self.is_near, self._versions = claim, is_near, versions
        self._replaced_base = replaced_base
        self.manifest: Manifest | None = None
        self.info: CheckpointInfo | None = None
        self.own_files: tuple[str, ...] = ()

    @property
    def _is_part(self) -> bool:
        return self._member.count > 1

    def _manifest_name(self) -> str:
        return part_name(self._member.rank, self._save_id) if self._is_part else MANIFEST_NAME

    def _user_values(self) -> Mapping[str, Any]:
        if not self._is_part or self.stats is None:
            return self._user_metadata
        chunks = (self.stats.chunks_full, self.stats.chunks_delta, self.stats.chunks_referenced)
        record = PartRecord(self._member.rank, self._member.count, chunks, self._replaced_base)
        return {**self._user_metadata, "part": tuple(record)}

    def _check_files(self, files: Sequence[DataFile]) -> None:
        check_files(self._storage(), files, self._threads, versions=None if self.is_near else self._versions)

    def _publish(self, storage: CheckpointStorage, name: str, data: bytes, manifest: Manifest) -> None:
        if self._is_part:
            storage.publish(name, data, replace=True)
        else:
            publish = functools.partial(super()._publish, storage, name, data, manifest)
            if self._claim is None:
                publish()
            else:
                publish_checked(storage, manifest, publish, self._claim.check)
        self.manifest, self.info = manifest, describe_manifest(storage.url, manifest, len(data))
        self.own_files = tuple(file.name for file in manifest.own_files)


@dataclass(kw_only=True)
class RunSaver:
    """Saves staged states of a run. Every rank has one, and calls the same methods. For one thread at a time.

    `member` is this rank, and `limit` the seconds for which it waits for the others. `base_bytes`: the limit of the memory
    for the base of the next save; None: `base_budget` at the first save. `scan` lists the checkpoints of the run in all
    places. `local` is the place to write to first, if there is one. `near` is where this rank finds the stored bytes of
    earlier saves without requests to the origin: `local`, or the run itself if it is a local directory. `rewind`: whether a
    save may be of any step, also of one below the newest. `independent`: whether deltas are made only while the run has a
    checkpoint that shares no file with them. `damaged` receives the names of checkpoints that were found to be damaged.
    `make_room` prunes one of the places and returns the number of removed files; it never raises. `on_claim` is called with
    each new claim. `state` is what another saver of the run continues from.
    """

    run: Run
    member: Member
    limit: float
    full_every: int
    base_bytes: int | None
    writer_options: Mapping[str, Any]
    scan: Callable[[], list[ListedCheckpoint]]
    local: Run | None
    near: Run | None
    make_room: Callable[[Run], int]
    rewind: bool = False
    independent: bool = True
    damaged: set[str] = field(default_factory=set)
    write: Write
    on_claim: Callable[[ClaimState], None] = lambda state: None
    state: RunState = field(default_factory=RunState)
    # The name of the last save by this object, and one of its data files.
    _own_file: tuple[str, str] = ("", "")
    _claim: Claim | None = None
    _previous: LastSave | None = None
    # Of several ranks: this rank's parts of the saves in the history, by directory.
    _own_parts: dict[str, Manifest] = field(default_factory=dict)

    def save(self, request: SaveRequest, staged: Staged, progress: ProgressMeter) -> Written:
        """Write a state to the nearest place that accepts it. It is durable there on return: of a near save by several
        ranks, this rank's part.

        This object owns `staged` from now on, also after an error. A save that fails leaves no files. After a full disk it
        is retried once if `make_room` freed something. Raises `UsageError` for a step below the newest, and for the newest
        step unless this object saved it; `RunTakenError` when another manager has taken the run; errors of the save; and
        those of other ranks.
        """
        began = time.monotonic()
        try:
            is_near, order, writer = self._save(request, staged, progress)
        except BaseException as error:
            staged.release()
            # Files of other ranks may be left in the directory. The next save lists it as that of a dead one.
            self.state.is_abandoned = self.state.is_abandoned or (self.member.count > 1 and self._claim is not None)
            if isinstance(error, SaveFailedElsewhere):
                raise error.error from None
            raise
        info = writer.info
        if info is None or writer.manifest is None or writer.stats is None:
            raise AssertionError("the writer has published a manifest")
        stats = writer.stats
        chunks = (stats.chunks_full, stats.chunks_delta, stats.chunks_referenced)
        if self.member.count > 1 and not is_near:
            chunks = chunk_counts(writer.manifest)
        self._own_file = order.name, next(iter(writer.own_files), "")
        self._keep_base(order, writer, staged)
        result = SaveResult(
            step=request.step,
            url=self.run.url_of(order.name),
            kind="delta" if info.kind == "delta" else "full",
            raw_bytes=info.raw_bytes,
            stored_bytes=info.stored_bytes,
            restore_bytes=info.restore_bytes,
            staged_seconds=staged.seconds,
            waited_seconds=request.waited_seconds,
            seconds=time.monotonic() - began + staged.seconds,
            chunks_full=chunks[0],
            chunks_delta=chunks[1],
            chunks_referenced=chunks[2],
        )
        return Written(
            name=order.name,
            save_id=order.save_id,
            own_files=writer.own_files,
            is_near=is_near,
            is_copied=order.is_copied,
            result=result,
        )

    def check_claim(self) -> None:
        """Raise `RunTakenError` if another manager has taken the run. For the first rank."""
        if self._claim is not None:
            self._claim.check()

    def start_over(self) -> None:
        """After a restore: the next save may be of any step, and is full unless this object has decided on no save yet."""
        self.state.may_go_back = True
        if self.state.is_history_known:
            self._drop_history()

    def give_up(self, name: str) -> None:
        """Record that a save on the local disk will never reach the run's URL. The next save is full. From any thread."""
        self.state.given_up.add(name)
        self.state.is_next_full = True

    def give_state(self) -> tuple[RunState, LastSave | None]:
        """Hand over to another saver of this run: its state, and the last save, whose memory the other one releases."""
        claim = None if self._claim is None else self._claim.state
        state = replace(self.state, claim=claim, damaged=set(self.damaged))
        previous, self._previous, self._claim = self._previous, None, None
        return state, previous

    def take_state(self, state: RunState, previous: LastSave | None = None) -> None:
        """Continue after another saver."""
        self._drop_base()
        self._claim = None if state.claim is None else Claim.resume(self.run, state.claim)
        self.damaged.update(state.damaged)
        self.state = replace(state, given_up=state.given_up | self.state.given_up)
        self._previous = previous

    def close(self) -> None:
        """Release the memory of the last save, and the run."""
        self._drop_base()
        claim, self._claim = self._claim, None
        if claim is not None:
            if self.state.is_abandoned:
                with contextlib.suppress(MillraceError):  # else the files are removed a day later
                    claim.abandon_saves()
            claim.release()

    # --- inside -----------------------------------------------------------------------------------

    def _save(
        self, request: SaveRequest, staged: Staged, progress: ProgressMeter
    ) -> tuple[bool, SaveOrder, _RunWriter]:
        """Write one save, in a second attempt after a full disk. Returns as `_attempt`."""
        record = {"step": request.step, "full": "", "after": "", "after_file": "", "metrics": dict(request.metrics)}
        about: dict[str, Any] = {"run": record, "user": dict(request.user)}
        for is_last in (False, True):
            chosen = request.order or self.order(request.step)
            try:
                self._announce(chosen.name)
                about["run"].update(full=chosen.full, after=chosen.after or "", after_file=chosen.after_file)
                return self._attempt(chosen, staged, about, progress)
            except DiskFullError:
                if is_last or not self.make_room(self.run):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _attempt(
        self, order: SaveOrder, staged: Staged, about: dict[str, Any], progress: ProgressMeter
    ) -> tuple[bool, SaveOrder, _RunWriter]:
        """Write one save. Returns whether it is near, the order as it was carried out, and the writer."""
        try:
            return self._write_somewhere(self._without_damage(order, about), staged, about, progress)
        except BaseException as error:
            # Another manager that took the run may be about to write into a directory of this name.
            if not isinstance(error, ChangedError):
                self._remove_empty(self.run, order.name)
                is_alone = self.member.count == 1 and self.local is None and not self.run.is_remote
                if is_alone and not os.path.isdir(self.run.url_of(order.name)):
                    self.state.taken.discard(parse_name(order.name) or (0, 0))
            raise

    def _remove_empty(self, run: Run, name: str) -> None:
        """Remove the directory of a failed save, whose files are removed already. A directory with files stays.

        So does that of several ranks: another one may be about to write there.
        """
        if self.member.count > 1:
            return
        try:
            run.remove(name, [])
        except MillraceError as error:
            emit(Event(name="run.leftover.failed", subject=run.url_of(name), detail=str(error)))

    def order(self, step: int) -> SaveOrder:
        """Decide the name and the base of the next save. On the first rank. Raises as `save`."""
        try:
            return self._decide(step)
        except DiskFullError:  # the claim does not fit
            if not self.make_room(self.run):
                raise
            return self._decide(step)

    def _decide(self, step: int) -> SaveOrder:
        if not (self.rewind or self.state.may_go_back):
            self._refuse_to_go_back(step)
        complete, taken = self._known_names()
        # A save of another job that has not certainly died may become complete at any time, and must not be the newest then.
        revision = next_revision(step, [*complete, *map(Point._make, taken - set(self._dead()))])
        while (step, revision) in taken:  # by a dead save, whose files a later pruning removes
            revision += 1
        self.state.taken.add((step, revision))
        name, save_id = checkpoint_name(step, revision), uuid.uuid4().hex
        live = timeline(complete)
        after = checkpoint_name(*live[-1]) if live else None
        after_file = self._own_file[1] if self._own_file[0] == after else ""
        if self.state.is_next_full:
            self.state.is_next_full = False
            self._drop_history()
        elif live and live[-1].step >= step:
            self._drop_history()  # this save does not continue from the newest checkpoint
        elif not self.state.is_history_known:
            self.state.history, self.state.is_history_known = self._stored_history(live), True
        history = self.state.history
        kind = choose_base(
            history,
            full_every=self.full_every,
            previous_near=bool(history) and self._base(history[-1].directory) is not None,
            anchor_near=bool(history) and self._base(history[0].directory) is not None,
            has_independent=not self.independent or self._has_independent(),
        )
        order = SaveOrder(
            name=name, base=None, is_anchor=False, full=name, save_id=save_id, after=after, after_file=after_file
        )
        if kind == "full":
            return order
        is_anchor = kind == "anchor"
        base = history[0 if is_anchor else -1].directory
        return replace(order, base=base, is_anchor=is_anchor, full=history[0].directory)

    def _has_independent(self) -> bool:
        """Whether the run has a checkpoint that shares no file with the saves since the last full one.

        All checkpoints before the last full save do, because that refers to no file of another. Retention keeps one.
        """
        chain = {record.directory for record in self.state.history} | self.damaged | self.state.given_up
        return any(checkpoint_name(*point) not in chain for point in self.state.complete or ())

    def _without_damage(self, order: SaveOrder, about: dict[str, Any]) -> SaveOrder:
        """`order`, or a full save if there is damage in the stored bytes of the base."""
        problem = None if order.base is None else self._damage_of(order.base)
        return order if problem is None else self._in_full("run.base.damaged", order, problem, about)

    def _damage_of(self, directory: str) -> str | None:
        """The damage in the stored bytes of a base that this rank has near; None for none."""
        base = self._base(directory)
        if base is None or self.near is None:
            return None
        return find_damage(self.near.checkpoint(directory), base, self.writer_options["thread_count"])

    def _in_full(self, event: str, order: SaveOrder, problem: str, about: dict[str, Any]) -> SaveOrder:
        """The order of a full save instead of `order`, whose base is damaged or gone. With several ranks, of one part."""
        try:
            self._report_damage(event, order, problem)
        finally:
            self._drop_history()
        if self.member.count == 1:
            about["run"]["full"] = order.name
        return replace(order, base=None, is_anchor=False)

    def _report_damage(self, event: str, order: SaveOrder, problem: str) -> None:
        self.damaged.update(record.directory for record in self.state.history)
        state = "is damaged" if event == "run.base.damaged" else "cannot be the base of a delta"
        text = f"{self.run.url_of(order.base or '')} {state} ({problem}); {order.name} is saved in full"
        emit(Event(name=event, subject=order.name, detail=text))
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _refuse_to_go_back(self, step: int) -> None:
        """Raise `UsageError` for a lower step: the checkpoints after it would be abandoned, and pruned before all others.

        The manager that saved the newest step may save it again: a training loop saves at its end, too.
        """
        if self._claim is not None:
            found, _ = self._known_names()
        else:
            found = [Point(each.step, each.revision) for each in self.scan() if each.complete]
        live = timeline(found)
        if not live or live[-1].step < step:
            return
        if live[-1].step == step and (live[-1] == self.state.newest_own or step == self.state.attempted):
            return
        newest, url = live[-1].step, self.run.url
        raise UsageError(
            f"step {step} is already saved in {url}"
            if newest == step
            else f"step {step} is not beyond step {newest}, which {url} has already",
            next_step="restore a checkpoint first, or give another directory to a new run",
        )

    def _known_names(self) -> tuple[list[Point], set[tuple[int, int]]]:
        """Complete checkpoints, and all used names. Listed once: while the claim holds, no other process adds any."""
        if self._claim is None:
            self._claim, self.state.complete = Claim.take(self.run), None
            self.on_claim(self._claim.state)
        if self.state.is_abandoned:
            self._claim.abandon_saves()
            self.state.is_abandoned = False
        if self.state.complete is None:
            found = self.scan()
            self.state.complete = [Point(each.step, each.revision) for each in found if each.complete]
            # A pruning may remove files in the directories of dead saves at any time, also if they are empty now.
            self.state.taken = {(each.step, each.revision) for each in found}.union(self._dead())
        return self.state.complete, self.state.taken

    def _dead(self) -> list[Point]:
        """The unfinished saves of writers that have certainly died."""
        left = () if self._claim is None else self._claim.state.record.left
        return [point for name in left if (point := parse_name(name)) is not None]

    def _announce(self, name: str) -> None:
        """Record the save in the claim. If this process dies, a pruning may then remove its files at once.

        Not for a save to a local disk, which has to work while the origin does not respond.
        """
        if self._claim is None or self.local is not None:
            return
        try:
            self._claim.announce([name])
        except DiskFullError:
            if self.member.count == 1:  # nothing is stored under this name; other ranks keep the order
                self.state.taken.discard(parse_name(name) or (0, 0))
            raise

    def _stored_history(self, live: list[Point]) -> list[SaveRecord]:
        """The saves since the last full one by an earlier process, if they are all near."""
        if self.near is None or self.full_every == 1 or self.member.count > 1:
            return []
        try:
            complete = {found.name: found for found in self.near.scan() if found.complete}
            records: list[SaveRecord] = []
            for point in reversed(live):
                name = checkpoint_name(*point)
                if name not in complete:
                    return []
                info = self.near.describe(complete[name])
                records.append(_record(info, "previous"))
                if info.kind == "full":
                    return records[::-1]
        except MillraceError as error:
            emit(Event(name="run.history.unreadable", subject=self.near.url, detail=str(error)))
        return []

    def _base(self, directory: str | None) -> Base | None:
        """This rank's view of an earlier save, from memory or near storage; None if neither has it."""
        if directory is None:
            return None
        if self._previous is not None and self._previous.base.directory == directory:
            return self._previous.base
        if self.near is None or self._is_refused(directory):
            return None
        try:
            known = self._own_parts.get(directory)
            return StoredBase.open(self.near.checkpoint(directory), directory, manifest=known)
        except MillraceError as error:
            emit(Event(name="run.base.unreadable", subject=directory, detail=str(error)))
            return None

    def _is_refused(self, directory: str | None) -> bool:
        """Whether the local disk refused an earlier save, which is at the origin only."""
        return any(record.is_refused and record.directory == directory for record in self.state.history)

    def _write_somewhere(
        self, order: SaveOrder, staged: Staged, about: dict[str, Any], progress: ProgressMeter
    ) -> tuple[bool, SaveOrder, _RunWriter]:
        """Write to the local place if there is one and it works, else to the run itself. Returns as `_attempt`."""
        if self.local is not None:
            for is_last in (False, True):
                try:
                    return True, *self._write_with_base(order, staged, self.local, about, progress)
                except MillraceError as error:
                    self._remove_empty(self.local, order.name)
                    if not is_local_failure(error):
                        raise
                    if isinstance(error, DiskFullError) and not is_last and self.make_room(self.local) > 0:
                        continue
                    was_refused = bool(self.state.history) and self.state.history[-1].is_refused
                    report_local_failure(self.local, order.name, error, warn=not was_refused)
                    break
        return False, *self._write_with_base(order, staged, self.run, about, progress)

    def _write_with_base(
        self, order: SaveOrder, staged: Staged, target: Run, about: dict[str, Any], progress: ProgressMeter
    ) -> tuple[SaveOrder, _RunWriter]:
        if target is self.local and self.member.count == 1 and self._is_refused(order.base):
            # A delta would lack its base there. The base is intact, and remains that of a save to the origin. Of several
            # ranks, one alone cannot omit the base.
            order = replace(order, base=None, is_anchor=False, full=order.name)
            about = {**about, "run": {**about["run"], "full": order.name}}
        try:
            return order, self._write(order, staged, target, about, progress)
        except BaseGoneError as error:
            # Files of the base are missing or were replaced. A full save needs none of them.
            order = self._in_full("run.base.gone", order, error.message, about)
            return order, self._write(order, staged, target, about, progress)

    def _write(
        self, order: SaveOrder, staged: Staged, target: Run, about: Mapping[str, Any], progress: ProgressMeter
    ) -> _RunWriter:
        options = dict(self.writer_options)
        if target is not self.run:
            options["target_options"] = None
        storage = target.checkpoint(order.name)  # with the connections and limits of the run
        was_replaced = order.base is None and order.full != order.name
        writer = _RunWriter(
            target.url_of(order.name),
            storage,
            member=self.member,
            save_id=order.save_id,
            # Only the first rank has a claim, and publishes. A near save does not check it: its upload does.
            claim=self._claim if target is self.run else None,
            is_near=target is not self.run,
            versions=self.state.versions if self.run.is_remote else None,
            replaced_base=tuple(self.damaged) if was_replaced else (),
            overwrite=False,
            base=self._base(order.base),
            keep_base=self._fits_in_memory(staged),
            user_metadata=about,
            **options,
        )
        progress.begin("writing", staged.nbytes)
        try:
            self.write(staged, writer, progress.advance)
            own = writer.manifest, writer.info
            if self.member.count > 1 and target is self.run:
                self._await_others(storage, order, writer)
        except ObjectExistsError as error:
            if target is not self.run:
                # A disk that was away has a save of an abandoned history. The origin decides what the name stands for.
                raise StorageError(f"{storage.url}: contains another save", next_step="remove it") from error
            raise RunTakenError(
                f"another manager has just saved {order.name} into {self.run.url}",
                next_step="let one manager write to a run, and give the other one a run of its own",
            ) from error
        self._add_to_history(order, writer, *own)
        return writer

    def _await_others(self, storage: CheckpointStorage, order: SaveOrder, writer: _RunWriter) -> None:
        """Wait until the checkpoint is complete, to which this rank's part was added. `writer` describes it then."""
        try:
            stored = self.join(storage, order.save_id)
        except BaseException as error:
            # Another rank than the first leaves its files until the first one has failed for certain. A store
            # may still carry out the last request of a saver that died, which publishes the manifest.
            is_over = self.member.is_first and not isinstance(error, OutcomeUnknownError)
            if isinstance(error, SaveFailedElsewhere):
                is_uncertain = isinstance(error.error, OutcomeUnknownError | SaverDiedError)
                is_over = self.member.is_first or not is_uncertain
            if is_over:
                discard(storage, [*writer.own_files, part_name(self.member.rank, order.save_id)])
            raise
        writer.manifest, writer.info = stored.manifest, describe_manifest(storage.url, stored.manifest, stored.nbytes)

    def join(
        self, storage: CheckpointStorage, save_id: str, before: Callable[[], None] = lambda: None
    ) -> StoredManifest:
        """Complete a checkpoint together with the other ranks, as `parts.complete`."""

        def note(records: Sequence[PartRecord]) -> None:
            damaged = {name for record in records for name in record.damaged}
            if damaged:
                # One rank has no base in its part, and the others have. From the next save on all begin anew.
                self.damaged.update(damaged)
                self.state.is_next_full = True

        return complete(storage, self.member, save_id, self.limit, check=self.check_claim, before=before, note=note)

    def _fits_in_memory(self, staged: Staged) -> bool:
        """Whether there is memory to keep this state as the base of the next save."""
        if self.base_bytes is None:
            self.base_bytes = base_budget()
        return self.full_every > 1 and staged.nbytes <= self.base_bytes

    def _add_to_history(
        self, order: SaveOrder, writer: _RunWriter, own: Manifest | None, own_info: CheckpointInfo | None
    ) -> None:
        """Note a save that was written. Of several ranks, the sizes of this one's part count, since a near save has no
        others.
        """
        info = writer.info
        if info is None or own is None or own_info is None:
            raise AssertionError("the writer has published a manifest")
        record = _record(own_info, "anchor" if order.is_anchor else "previous")
        if self.member.count > 1 and order.base is not None:
            # The parts of other ranks may be deltas.
            record = replace(record, kind="delta", base="anchor" if order.is_anchor else "previous")
        record = replace(record, is_refused=self.local is not None and not writer.is_near)
        # A save without any reference or delta counts as full, even if it had a base.
        self.state.history = [record] if record.kind == "full" else [*self.state.history, record]
        if self.member.count > 1:
            self._own_parts[info.name] = own
            names = {each.directory for each in self.state.history}
            self._own_parts = {name: part for name, part in self._own_parts.items() if name in names}
        self.state.is_history_known, self.state.may_go_back = True, False
        self.state.newest_own, self.state.attempted = Point(info.step, info.revision), None
        if self.state.complete is not None:
            self.state.complete.append(self.state.newest_own)
        paths = paths_of(info)
        self.state.versions = {path: version for path, version in self.state.versions.items() if path in paths}

    def _keep_base(self, order: SaveOrder, writer: _RunWriter, staged: Staged) -> None:
        """Keep the state as the base of the next save, if there is memory for it."""
        self._drop_base()
        base = writer.written_base(order.name) if self._fits_in_memory(staged) else None
        if base is None:
            staged.release()
        else:
            self._previous = LastSave(base, staged)

    def _drop_base(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.staged.release()

    def _drop_history(self) -> None:
        """Make the next save full: it does not continue from the last saved state."""
        self._drop_base()
        self.state.history, self.state.is_history_known, self._own_parts = [], True, {}


def chunk_counts(manifest: Manifest) -> tuple[int, int, int]:
    """How many chunks of all ranks are stored whole, as deltas, and as references, by the record of `parts.join_parts`."""
    record = manifest.user.get("run")
    found = record.get("chunks", ()) if isinstance(record, Mapping) else ()
    full, delta, referenced = (*found, 0, 0, 0)[:3]
    return int(full), int(delta), int(referenced)


def _record(info: CheckpointInfo, base: Literal["previous", "anchor"]) -> SaveRecord:
    is_full = info.kind == "full"
    return SaveRecord(
        directory=info.name,
        kind="full" if is_full else "delta",
        base=None if is_full else base,
        raw_bytes=info.raw_bytes,
        own_bytes=info.stored_bytes,
        restore_bytes=info.restore_bytes,
    )


# --- memory for bases -----------------------------------------------------------------------------


def base_budget(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory for the base of the next save: half of the free memory of the machine, or of this control group.

    Returns 0 where the kernel does not report free memory.
    """
    free = _available(proc / "meminfo")
    return int(_MEMORY_SHARE * min(free, _left_in_group(proc / "self" / "cgroup", groups)))


def _available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
    return 0


def _left_in_group(membership: Path, groups: Path) -> int:
    """Free bytes in the tightest of this process's control groups (version 2). Groups without a limit do not count."""
    try:
        name = next(line[3:].strip() for line in membership.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return _UNLIMITED
    left = _UNLIMITED
    directory = groups / name.strip("/")
    for group in (directory, *directory.parents):
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                left = min(left, max(0, int(limit) - int((group / "memory.current").read_text())))
        except (OSError, ValueError):
            pass  # the root has neither file; neither do machines with control groups of version 1
        if group == groups:
            break
    return left
