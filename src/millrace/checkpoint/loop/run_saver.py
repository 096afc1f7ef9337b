"""The saves of a run, as every rank does them: what the first rank decides, the bytes, and the base of the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from millrace.checkpoint.format.manifest import DataFile, Manifest
from millrace.checkpoint.host.priority import lower_priority
from millrace.checkpoint.loop.driving import save
from millrace.checkpoint.loop.ranks import Ranks
from millrace.checkpoint.loop.save_progress import ProgressMeter
from millrace.checkpoint.loop.saving import SaveResult
from millrace.checkpoint.places.storage import CheckpointStorage
from millrace.checkpoint.run.claims import Claim
from millrace.checkpoint.run.run_info import CheckpointInfo, info_of_manifest
from millrace.checkpoint.run.run_layout import Found, Run, checkpoint_name, parse_name
from millrace.checkpoint.run.tiers import is_local_failure, say_local_failure
from millrace.checkpoint.run.timeline import next_revision, timeline
from millrace.checkpoint.state.staging import StagedState
from millrace.checkpoint.writing.bases import Base, StoredBase
from millrace.checkpoint.writing.delta import SaveRecord, choose_base
from millrace.checkpoint.writing.encoder_process import EncoderProcess
from millrace.checkpoint.writing.writer import CheckpointWriter
from millrace.errors import BaseGoneError, MillraceError, ObjectExistsError, RunTakenError, UsageError
from millrace.events import Event, emit
from millrace.origin.obstore_library import start_workers


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """What the first rank decides for all: the directory, and what it may be a delta to (None: it is a full save)."""

    name: str
    base: str | None
    is_anchor: bool
    full: str


@dataclass(frozen=True, kw_only=True)
class Written:
    """A save that is durable where it was written: its name, this rank's data files, what came of it, and whether it lies
    in the near place alone.
    """

    name: str
    own_files: tuple[str, ...]
    is_near: bool
    result: SaveResult


@dataclass(kw_only=True)
class _Kept:
    """This rank's part of the last save, for the next one to be a delta to."""

    base: Base
    staged: StagedState


class Point(NamedTuple):
    """A checkpoint by the two numbers in its name."""

    step: int
    revision: int


class _RunWriter(CheckpointWriter):
    """A writer that asks the run's claim before it publishes, and remembers what it has published."""

    claim: Claim | None = None
    info: CheckpointInfo | None = None
    own_files: tuple[str, ...] = ()
    is_near: bool = False
    """The place is this node's own: the first rank does not see there what other nodes have written."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        future = super().write_data(plan, planner)
        if self._unconfirmed is not None:
            self.own_files = tuple(self._unconfirmed[1])
        if self.is_near:
            for result in future.value()[:1]:  # all share one description of what this rank names
                super()._check_files(result.storage_data.data.files)
        return future

    def _check_files(self, files: Sequence[DataFile]) -> None:
        if not self.is_near:
            super()._check_files(files)

    def _publish(self, storage: CheckpointStorage, name: str, data: bytes, manifest: Manifest) -> None:
        if self.claim is not None:
            self.claim.check()
        super()._publish(storage, name, data, manifest)
        directory = storage.url.rstrip("/").rpartition("/")[2]
        step, revision = parse_name(directory) or (0, 0)
        self.info = info_of_manifest(
            manifest,
            len(data),
            name=directory,
            url=storage.url,
            step=step,
            revision=revision,
            published=manifest.created,
        )


@dataclass(kw_only=True)
class RunSaver:
    """Saves staged states of a run. Used by one thread at a time; every rank has one, and calls it alike.

    `scan` lists the checkpoints of the run in all places. `local` is the place to write to first, if there is one. `near`
    is where this rank finds the stored bytes of earlier saves without asking the origin: the same, or the run itself when
    it is a local directory. `may_go_back`: whether the first save may be of a step that is not beyond the newest.
    """

    run: Run
    ranks: Ranks
    full_every: int
    base_bytes: int
    writer_options: Mapping[str, Any]
    scan: Callable[[], list[Found]]
    local: Run | None
    near: Run | None
    niceness: int = 0
    may_go_back: bool = False
    process: EncoderProcess | None = None
    # Every save since the last full one; on the first rank.
    _history: list[SaveRecord] = field(default_factory=list)
    _is_history_known: bool = False
    _complete: list[Point] = field(default_factory=list)
    _taken: set[tuple[int, int]] = field(default_factory=set)
    _claim: Claim | None = None
    _previous: _Kept | None = None
    _is_next_full: bool = False

    def save(
        self,
        step: int,
        staged: StagedState,
        *,
        metrics: Mapping[str, float],
        user: Mapping[str, Any],
        waited_seconds: float,
        progress: ProgressMeter,
    ) -> Written:
        """Write a state to the nearest place that takes it; durable there on return.

        `staged` is kept or released by this object from now on, whatever happens. Raises `RunTakenError` when another
        manager has taken the run, and whatever a save raises.
        """
        began = time.monotonic()
        if self.run.is_remote:
            start_workers()  # which others read by, too
        lower_priority(self.niceness)
        try:
            order = self.ranks.agree(lambda: self._order(step))
            about = {
                "run": {"step": step, "full": order.full, "metrics": dict(metrics)},
                "user": dict(user),
            }
            order, writer, is_near = self._write_somewhere(order, staged, about, progress)
            counts = self.ranks.gather(writer.stats)
            info = self.ranks.agree(lambda: writer.info)
            if info is None:
                raise AssertionError("the first rank has published the manifest")
        except BaseException:
            staged.release()
            raise
        self._remember(order, info)
        self._keep(order, writer, staged)
        stats = [each for each in counts if each is not None]
        result = SaveResult(
            step=step,
            url=self.run.url_of(order.name),
            kind="delta" if info.kind == "delta" else "full",
            raw_bytes=info.raw_bytes,
            stored_bytes=info.stored_bytes,
            restore_bytes=info.restore_bytes,
            staged_seconds=staged.seconds,
            waited_seconds=waited_seconds,
            seconds=time.monotonic() - began + staged.seconds,
            chunks_full=sum(each.chunks_full for each in stats),
            chunks_delta=sum(each.chunks_delta for each in stats),
            chunks_referenced=sum(each.chunks_referenced for each in stats),
        )
        return Written(name=order.name, own_files=writer.own_files, is_near=is_near, result=result)

    def check_claim(self) -> None:
        """Raise `RunTakenError` when the run is no longer this manager's. For the first rank."""
        if self._claim is not None:
            self._claim.check()

    def forget(self) -> None:
        """The next save is a full one: the training goes on from another state than the last that was saved."""
        self._drop()
        self._history, self._is_history_known = [], True

    def build_on_nothing(self) -> None:
        """As `forget`, from any thread: what a delta would need does not reach the run's URL."""
        self._is_next_full = True

    def close(self) -> None:
        """Forget what is kept for deltas, and give the run free."""
        self._drop()
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    # --- inside -----------------------------------------------------------------------------------

    def _order(self, step: int) -> SaveOrder:
        if self._claim is None and not self.may_go_back:
            self._refuse_to_go_back(step)
        complete, taken = self._known_names()
        revision = next_revision(step, complete)
        while (step, revision) in taken:  # by a dead save, whose files go with a later pruning
            revision += 1
        self._taken.add((step, revision))
        name = checkpoint_name(step, revision)
        self._announce(name)
        live = timeline(complete)
        if self._is_next_full:
            self._is_next_full = False
            self.forget()
        elif live and live[-1].step >= step:
            self.forget()  # what this goes on from is not the newest one
        elif not self._is_history_known:
            self._history, self._is_history_known = self._stored_history(live), True
        history = self._history
        kind = choose_base(
            history,
            full_every=self.full_every,
            previous_here=bool(history) and self._base(history[-1].directory) is not None,
            anchor_here=bool(history) and self._base(history[0].directory) is not None,
        )
        if kind == "full":
            return SaveOrder(name=name, base=None, is_anchor=False, full=name)
        is_anchor = kind == "anchor"
        base = history[0 if is_anchor else -1].directory
        return SaveOrder(name=name, base=base, is_anchor=is_anchor, full=history[0].directory)

    def _refuse_to_go_back(self, step: int) -> None:
        """A job that begins anew where another one left off would make that one's checkpoints those of a given-up future."""
        live = timeline(each for each in self.scan() if each.complete)
        if live and live[-1].step >= step:
            raise UsageError(
                f"step {step} is not beyond step {live[-1].step}, which {self.run.url} has already",
                next_step="restore a checkpoint first, or give another directory to a run that begins anew",
            )

    def _known_names(self) -> tuple[list[Point], set[tuple[int, int]]]:
        """Complete checkpoints, and all names there are. Listed once: while the claim holds nobody else adds any."""
        if self._claim is None:
            self._claim = Claim.take(self.run)
            found = self.scan()
            self._complete = [Point(each.step, each.revision) for each in found if each.complete]
            self._taken = {(each.step, each.revision) for each in found}
        return self._complete, self._taken

    def _announce(self, name: str) -> None:
        """Say what is being saved: should this process die, a pruning knows at once that nobody writes there any more.

        Not where the save goes to a disk first: that has to work while the origin is silent.
        """
        if self._claim is not None and self.local is None:
            self._claim.announce([name])

    def _stored_history(self, live: list[Point]) -> list[SaveRecord]:
        """The saves since the last full one, as an earlier process left them where it is near."""
        if self.near is None or self.full_every == 1:
            return []
        try:
            there = {found.name: found for found in self.near.scan() if found.complete}
            records: list[SaveRecord] = []
            for point in reversed(live):
                name = checkpoint_name(*point)
                if name not in there:
                    return []
                info = self.near.describe(there[name])
                records.append(_record(info, "previous"))
                if info.kind == "full":
                    return records[::-1]
        except MillraceError as error:
            emit(Event(name="run.history.unreadable", subject=self.near.url, detail=str(error)))
        return []

    def _base(self, directory: str | None) -> Base | None:
        """This rank's view of an earlier save, from memory or from near storage; None where it is neither."""
        if directory is None:
            return None
        if self._previous is not None and self._previous.base.directory == directory:
            return self._previous.base
        if self.near is None:
            return None
        try:
            return StoredBase.open(self.near.checkpoint(directory), directory)
        except MillraceError as error:
            emit(Event(name="run.base.unreadable", subject=directory, detail=str(error)))
            return None

    def _write_somewhere(
        self, order: SaveOrder, staged: StagedState, about: dict[str, Any], progress: ProgressMeter
    ) -> tuple[SaveOrder, _RunWriter, bool]:
        """Write near, where there is such a place and it takes it, else to the run itself. Says what, and whether near."""
        if self.local is not None:
            try:
                return *self._write_with_base(order, staged, self.local, about, progress), True
            except MillraceError as error:
                if isinstance(error, RunTakenError) or not is_local_failure(error):
                    raise
                say_local_failure(self.local, order.name, error)
        return *self._write_with_base(order, staged, self.run, about, progress), False

    def _write_with_base(
        self, order: SaveOrder, staged: StagedState, target: Run, about: dict[str, Any], progress: ProgressMeter
    ) -> tuple[SaveOrder, _RunWriter]:
        try:
            return order, self._write(order, staged, target, about, progress)
        except BaseGoneError as error:
            # What this was made against is not there, or not any more. In full it needs nobody.
            emit(Event(name="run.base.gone", subject=order.name, detail=str(error)))
            order = SaveOrder(name=order.name, base=None, is_anchor=False, full=order.name)
            about["run"]["full"] = order.name
            return order, self._write(order, staged, target, about, progress)

    def _write(
        self, order: SaveOrder, staged: StagedState, target: Run, about: Mapping[str, Any], progress: ProgressMeter
    ) -> _RunWriter:
        options = dict(self.writer_options)
        if target is not self.run:
            options["target_options"] = None
        writer = _RunWriter(
            target.url_of(order.name),
            overwrite=False,
            base=self._base(order.base),
            keep_base=self._keeps(staged),
            user_metadata=about,
            **options,
        )
        # The first rank has it, and publishes. A near save asks nobody: its upload does.
        writer.claim = self._claim if target is self.run else None
        writer.is_near = target is not self.run
        writer._process = self.process
        progress.begin("writing", staged.nbytes)
        try:
            save(staged.state, writer, self.ranks, count=progress.advance)
        except ObjectExistsError as error:
            raise RunTakenError(
                f"another manager has just saved {order.name} into {self.run.url}",
                next_step="let one manager write to a run, and give the other one a run of its own",
            ) from error
        return writer

    def _keeps(self, staged: StagedState) -> bool:
        """Whether there is memory to keep this state until the next save."""
        return self.full_every > 1 and staged.nbytes <= self.base_bytes

    def _remember(self, order: SaveOrder, info: CheckpointInfo) -> None:
        record = _record(info, "anchor" if order.is_anchor else "previous")
        self._history = [record] if order.base is None else [*self._history, record]
        self._is_history_known = True
        self._complete.append(Point(info.step, info.revision))

    def _keep(self, order: SaveOrder, writer: _RunWriter, staged: StagedState) -> None:
        """Keep what the next save may be a delta to, as far as there is memory for it."""
        self._drop()
        base = writer.written_base(order.name) if self._keeps(staged) else None
        if base is None:
            staged.release()
        else:
            self._previous = _Kept(base=base, staged=staged)

    def _drop(self) -> None:
        kept, self._previous = self._previous, None
        if kept is not None:
            kept.staged.release()


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
