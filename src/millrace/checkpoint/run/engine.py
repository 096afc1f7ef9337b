"""Carries out the saves of one run: writes them, uploads them from a local disk, and prunes the run.

Runs in the training process for synchronous saves, and in the saver process for asynchronous ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.checkpoint.arguments import ReadThroughMode
from millrace.checkpoint.run.claims import ClaimState
from millrace.checkpoint.run.parts import DEFAULT_LIMIT_SECONDS
from millrace.checkpoint.run.peers import ClusterAccess, Peers
from millrace.checkpoint.run.pruning import Retention
from millrace.checkpoint.run.replicator import Replicator
from millrace.checkpoint.run.retention import Policy
from millrace.checkpoint.run.run_layout import ListedCheckpoint, Run
from millrace.checkpoint.run.run_saver import RunSaver, Write
from millrace.checkpoint.run.save_values import LastSave, Member, RunState, SaveOrder, SaveRequest, Staged, Written
from millrace.checkpoint.run.saving import ProgressMeter, Report, SaveResult
from millrace.checkpoint.run.tiers import Placed, Tiers, open_tiers
from millrace.checkpoint.run.uploading import Uploader
from millrace.config import parse_timeout, resolve_limits
from millrace.errors import MillraceError
from millrace.events import Event, emit
from millrace.origin.base import Operation, part_of
from millrace.runtime.failures import reason_of


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The arguments of a manager that its saves need. Picklable if `policy` and `target_options` are."""

    url: str
    member: Member
    local: str | None
    replicas: int
    access: ClusterAccess | None
    target_options: Mapping[str, Any] | None
    timeout: str | float | None
    policy: Policy
    local_keep: int
    full_every: int
    base_memory: int | None
    rewind: bool
    independent: bool
    read_through: ReadThroughMode
    writer_options: Mapping[str, Any]

    def open(self) -> Tiers:
        """Open the places of the run, without a request."""
        return open_tiers(
            self.url,
            local=self.local,
            replicas=self.replicas,
            access=self.access,
            target_options=self.target_options,
            limits={"timeout": self.timeout},
            read_through=self.read_through,
        )


@dataclass(kw_only=True)
class SaveEngine:
    """Saves the states of a run. Every rank has one, and calls the same methods in the same order.

    `save` and `upload` are each for one thread at a time, and make no collective calls. `damaged` receives the names of
    damaged checkpoints. `write` and `on_claim` are those of `RunSaver`.
    """

    options: EngineOptions
    tiers: Tiers
    damaged: set[str]
    write: Write
    on_claim: Callable[[ClaimState], None] = lambda state: None
    operation: Operation = field(default_factory=Operation)
    is_closing: bool = False
    """Whether no further operation may begin a new period of the timeout."""
    retention: Retention = field(init=False)
    uploader: Uploader | None = field(init=False, default=None)
    _saver: RunSaver = field(init=False)

    def __post_init__(self) -> None:
        options, tiers = self.options, self.tiers
        self.retention = Retention(
            run=tiers.origin,
            policy=options.policy,
            local_keep=options.local_keep,
            independent=options.independent,
            damaged=self.damaged,
        )
        self._saver = RunSaver(
            run=tiers.origin,
            member=options.member,
            limit=resolve_limits({"timeout": options.timeout}).timeout_seconds or DEFAULT_LIMIT_SECONDS,
            full_every=options.full_every,
            base_bytes=options.base_memory,
            writer_options=options.writer_options,
            scan=self._scan,
            local=tiers.local,
            near=tiers.local or (None if tiers.origin.is_remote else tiers.origin),
            make_room=self.retention.make_room,
            rewind=options.rewind,
            independent=options.independent,
            damaged=self.damaged,
            write=self.write,
            on_claim=self.on_claim,
        )
        if tiers.local is not None:
            self.uploader = Uploader(
                tiers=tiers,
                local=tiers.local,
                member=options.member,
                local_keep=options.local_keep,
                check=self._saver.check_claim,
                join=self._saver.join,
                after=self._prune,
                give_up=self._saver.give_up,
                replicator=None if tiers.peers is None else self._replicator(tiers.peers, tiers.local),
            )

    def order(self, step: int) -> SaveOrder:
        """Decide the name and the base of the next save, on the first of several ranks. Raises as `RunSaver.order`."""
        order = self._saver.order(step)
        replicator = None if self.uploader is None else self.uploader.replicator
        return replace(order, is_copied=replicator is not None and replicator.may_begin)

    def save(self, request: SaveRequest, staged: Staged, report: Report) -> Written:
        """Save a state, which this object owns from now on. It is durable at least near on return.

        A save that is not near is complete: the run was pruned. Raises as `RunSaver.save`.
        """
        progress = ProgressMeter(request.step, report)
        try:
            written = self._saver.save(request, staged, progress)
        except Exception as error:
            self.retention.is_tidy = False
            if self.options.member.is_first:
                emit(failed(self.tiers.origin.url, request.step, error))
            raise
        if self.options.member.is_first:
            emit(_saved(self.tiers.origin.url, written.result))
        if not (written.is_near and self.uploader is not None):
            self._prune()
            progress.begin("done", written.result.stored_bytes)
        return written

    def upload(self, written: Written, report: Report) -> SaveResult:
        """Upload a save that is near, and prune. Raises errors of the places."""
        if self.uploader is None:
            raise AssertionError("without a local place there is nothing to upload")
        self.renew_operation()
        return self.uploader.upload(written, report)

    def renew_operation(self) -> None:
        """Allow requests to the origin again after an operation that ended by its timeout, unless this is closing."""
        if not self.is_closing:
            self.operation.ended_by = None

    def start_over(self) -> None:
        """As `RunSaver.start_over`."""
        self._saver.start_over()

    def give_state(self) -> tuple[RunState, LastSave | None]:
        """As `RunSaver.give_state`."""
        return self._saver.give_state()

    def take_state(self, state: RunState, previous: LastSave | None) -> None:
        """As `RunSaver.take_state`."""
        self._saver.take_state(state, previous)
        if self.uploader is not None:
            self.uploader.is_behind = True  # the other saver has saved near

    def close(self) -> None:
        """Release the run and the memory of the last save."""
        if self.uploader is not None:
            self.uploader.close()
        with part_of(self.operation):
            self._saver.close()

    # --- inside -----------------------------------------------------------------------------------

    def _replicator(self, peers: Peers, local: Run) -> Replicator:
        return Replicator(
            peers,
            local=local,
            origin=self.tiers.origin,
            check_claim=self._saver.check_claim,
            end_seconds=parse_timeout(self.options.timeout),
        )

    def _prune(self) -> None:
        if self.options.member.is_first:
            self.retention.prune_after_save()

    def _scan(self) -> list[ListedCheckpoint]:
        """The checkpoints in all places, complete or not, each once. Those of an outdated history count as incomplete.

        A near place that cannot be listed is skipped with an event, as in `Tiers.complete`: the save goes to the origin.
        """
        self.tiers.look()
        *near, origin = self.tiers.places
        placed: dict[str, Placed] = {}
        for run in near:
            try:
                placed.update({each.name: Placed(each, run) for each in run.scan()})
            except MillraceError as error:
                emit(Event(name="checkpoint.tier.unreachable", subject=run.url, detail=str(error)))
        at_origin = {
            each.name: Placed(each, origin) for each in origin.scan() if each.complete or each.name not in placed
        }
        placed.update(at_origin)
        outdated = self.tiers.outdated(placed.values())
        return [
            replace(each.found, complete=False) if each.name in outdated else each.found for each in placed.values()
        ]


def failed(url: str, step: int, error: Exception) -> Event:
    """The event of a save that failed."""
    text = f"step {step}: {reason_of(error):.300}"
    return Event(name="run.save.ended", subject=url, detail=text, values={"save_failures": 1, "step": step})


def _saved(url: str, result: SaveResult) -> Event:
    """The event of a save that is durable; its values are named as the metrics of the store."""
    blocked = result.waited_seconds + result.staged_seconds
    return Event(
        name="run.saved",
        subject=url,
        nbytes=result.stored_bytes,
        detail=f"step {result.step}, {result.kind}, in {result.seconds:.2f} s; it blocked the training for {blocked:.2f} s",
        values={
            "step": result.step,
            f"{result.kind}_saves": 1,
            "save_raw_bytes": result.raw_bytes,
            "save_bytes": result.stored_bytes,
            "save_seconds": result.seconds,
            "blocked_seconds": blocked,
        },
    )
