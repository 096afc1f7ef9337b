"""All checkpoints of one training run behind one object: `CheckpointManager`."""

from __future__ import annotations

import json
import math
import operator
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar

from millrace.checkpoint.arguments import (
    ReadThroughMode,
    classes,
    flag,
    function,
    mapping,
    path_text,
    patterns,
    read_through_mode,
    thread_number,
    whole_number,
)
from millrace.checkpoint.codec.registry import Compression, schedule_for
from millrace.checkpoint.format.manifest import pack_value, unpack_value
from millrace.checkpoint.run.driving import plan_save, save_staged
from millrace.checkpoint.run.engine import EngineOptions, SaveEngine, failed
from millrace.checkpoint.run.parts import publish_failure
from millrace.checkpoint.run.peers import ClusterAccess
from millrace.checkpoint.run.preemption import PreemptionWatch
from millrace.checkpoint.run.pruning import PruneReport
from millrace.checkpoint.run.ranks import Ranks
from millrace.checkpoint.run.recovering import Recovery
from millrace.checkpoint.run.restoring import Restorer
from millrace.checkpoint.run.retention import KeepAll, Policy, as_policy
from millrace.checkpoint.run.run_info import CheckpointInfo
from millrace.checkpoint.run.run_layout import MAX_STEP, Run
from millrace.checkpoint.run.save_values import Member, SaveOrder, SaveRequest, Written, picklable
from millrace.checkpoint.run.saver_process import SaverProcess, SaverUnavailable, Upload, is_supported
from millrace.checkpoint.run.saving import (
    PendingSave,
    Report,
    SaveProgress,
    SaveResult,
    SaveRunner,
    refuse_in_progress,
)
from millrace.checkpoint.run.tiers import open_tiers
from millrace.checkpoint.run.timeline import timeline
from millrace.checkpoint.run.uploading import TieredSave
from millrace.checkpoint.state.staging import StagedState, StateStager
from millrace.config import absolute_path, parse_timeout, shown
from millrace.errors import ConfigurationError, MillraceError, RetryableError, SaverDiedError, UsageError
from millrace.events import Event, emit
from millrace.origin.base import part_of
from millrace.runtime import forks
from millrace.runtime.failures import reason_of

_Result = TypeVar("_Result")

_has_warned_of_save_process = False


class CheckpointManager:
    """Saves, retains and restores the checkpoints of one run while the training continues.

        run = CheckpointManager("s3://bucket/run", keep=5)
        first = (run.restore(state) or 0) + 1            # the newest complete checkpoint; None in an empty run
        for step in range(first, last):
            ...
            if step % 100 == 0:
                run.save_async(step, state, metrics={"loss": loss})
        run.close()                                      # waits for saves in flight

    `state` is a dict of tensors, plain values, and objects with `state_dict` and `load_state_dict` (model, optimizer,
    scheduler, `RandomState`, `DataPosition`), as for `dcp.save`. `save_async` returns as soon as the state is copied into
    host memory; a *saver process* compresses, writes and uploads during the training. Most saves are *deltas* to the save
    before: unchanged parts are references, changed parts are stored as differences.

    - `keep`: which checkpoints stay: a number, a policy such as `KeepLast(5) | KeepEvery(1000)`, or its text
      (`"last=5,every=1000"`). None keeps all. The newest one and its bases always stay.
    - `independent`: whether the last checkpoint that shares no file with the newest one stays, too, so that a run with one
      damaged file can still be restored. Deltas begin when there is one: the second save of a run is full like the first.
    - `full_every`: at least every n-th save is full; 1: all of them. In any case a restore reads at most twice the bytes of
      a full one.
    - `local`: a directory on a disk of this node, in which each run gets its own directory. A save is durable there first
      (`save_async(...).near`), and is then uploaded to the run's URL during the training. A restore takes every file from
      the nearest place. The newest `local_keep` stay there, with their bases. A full or failing disk is skipped, with a
      warning.
    - `replicas`: on how many other nodes' disks the newest save is copied next to its upload, so that it survives the loss
      of this node. The nodes are those of the cluster that `members` names (`MILLRACE_MEMBERS`, or the Ray job). A restore
      reads them, too. A node that is full, slow or missing costs the replica, with an event, and delays no save.
    - `read_through`: whether a restore reads data files from an object store through the cache of the cluster, so that each
      byte leaves the storage once for all nodes. `"auto"`: inside a Ray job, or where `MILLRACE_MEMBERS` or `millrace.toml`
      names a cluster. `"cluster"`: a process without one gets a `ConfigurationError`. `"none"`: never.
    - `on_busy`: what `save_async` does while a save is in flight: `"wait"`, or `"skip"` the new save.
    - `on_progress`: is called with a `SaveProgress` from time to time, in a saving thread. The save continues after its
      return. It cannot call methods that wait for a save.
    - `base_memory`: bytes of host memory for the copy of the last state between saves, which deltas are made against; by
      default half of the memory that is free at the first save. A larger state is saved in full, unless the last save is
      on a disk of this node (`local=`, or a run in a local directory).
    - `rewind`: whether a save may be of a step below the newest one without a restore. Otherwise that is a `UsageError`,
      and so is the newest step if another manager saved it. After a restore the next save may be of any step. The step
      that this manager saved last may be saved again: the new checkpoint replaces the earlier one when it is complete.
    - `save_process`: has no effect, and is deprecated: asynchronous saves use a process.
    - `timeout`: a time such as `60` or `"2min"`. Every save, upload, pruning, restore and `close` ends within it, with an
      error, when the storage stops responding. A single request may take a third of it. Of several ranks, one may write
      its part of a save by so much later than the others. The default is the value of `MILLRACE_TIMEOUT` or `millrace.toml`;
      without those, each request is retried for about a minute, and other ranks are waited for half an hour.
    - `thread_count`, `compression`, `target_options`, `trusted_types`: as in `CheckpointWriter`; `thread_count` is half of
      the cores by default, and the training keeps the others.

    Where `torch.distributed` is initialised, every rank creates the manager and calls the same methods in the same order.
    One manager writes to a run at a time. A new manager takes over from a dead one, and one that lost the run gets a
    `RunTakenError` at its next save. For one thread; not for forked children.

    An error of a save in flight is raised by `result()`, or by the next call if `result()` is not called. Leaving the
    process waits for the save in flight.

    The first `save_async` starts the saver process (about 40 MB of memory for each rank), which ends with the manager and
    with this process. If it dies, its save raises `SaverDiedError`, and the next save starts another one. `save` works in
    this process, and so does `save_async`, which then returns at the end of the save, where the system lacks shared memory,
    for `memory://`, and where another process cannot start, or cannot unpickle `keep` or `target_options` (a
    `RuntimeWarning` and the event `run.saver.unavailable`).
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: int | str | Policy | None = None,
        full_every: int = 10,
        local: str | os.PathLike[str] | None = None,
        local_keep: int = 2,
        replicas: int = 0,
        read_through: ReadThroughMode = "auto",
        on_busy: Literal["wait", "skip"] = "wait",
        on_progress: Callable[[SaveProgress], None] | None = None,
        base_memory: int | None = None,
        rewind: bool = False,
        independent: bool = True,
        save_process: bool | None = None,
        thread_count: int | None = None,
        compression: Compression = "typed",
        target_options: Mapping[str, Any] | None = None,
        trusted_types: Sequence[type] = (),
        timeout: str | float | None = None,
    ) -> None:
        full_every = whole_number("full_every", full_every, least=1)
        local_keep = whole_number("local_keep", local_keep, least=1)
        replicas = whole_number("replicas", replicas, least=0)
        if replicas and local is None:
            raise ConfigurationError(
                "replicas= without local=", next_step="give local=, a directory on this node's disk"
            )
        if base_memory is not None:
            base_memory = whole_number("base_memory", base_memory, least=0)
        if not isinstance(on_busy, str) or on_busy not in ("wait", "skip"):
            raise ConfigurationError(f"on_busy={on_busy!r}", next_step="give 'wait' or 'skip'")
        function("on_progress", on_progress)
        rewind, independent = flag("rewind", rewind), flag("independent", independent)
        if save_process is not None:
            flag("save_process", save_process)
            _warn_of_save_process()
        threads = thread_number("thread_count", thread_count) or max(1, len(os.sched_getaffinity(0)) // 2)
        schedule_for(compression, threads)  # raises for an unknown name now, not at the first save
        target_options, trusted_types = (
            mapping("target_options", target_options),
            classes("trusted_types", trusted_types),
        )
        parse_timeout(timeout)  # raises for a bad one now, also where the run is in a local directory
        self._tiers = open_tiers(
            url,
            local=local,
            target_options=target_options,
            limits={"timeout": timeout},
            read_through=read_through_mode(read_through),
        )
        self._run, self._on_busy, self._on_progress = self._tiers.origin, on_busy, on_progress
        self._ranks = Ranks()
        self._member = self._member_of(self._tiers.local)
        access = _access(self._ranks) if replicas else None
        options = EngineOptions(
            url=_anywhere("url", url),
            member=self._member,
            local=None if local is None else _anywhere("local", local),
            replicas=replicas,
            access=access,
            target_options=target_options,
            timeout=timeout,
            policy=KeepAll() if keep is None else as_policy(keep),
            local_keep=local_keep,
            full_every=full_every,
            base_memory=base_memory,
            rewind=rewind,
            independent=independent,
            read_through=read_through,
            writer_options={
                "target_options": target_options,
                "trusted_types": trusted_types,
                "compression": compression,
                "thread_count": threads,
            },
        )
        if access is not None:
            self._tiers = options.open()
        self._runner, self._upload_runner = SaveRunner(), SaveRunner()
        self._damaged: set[str] = set()
        # A timeout in the environment or the file of one rank may be unusable.
        self._engine = self._ranks.run_on_all(
            lambda: SaveEngine(options=options, tiers=self._tiers, damaged=self._damaged, write=save_staged)
        )
        # None where asynchronous saves run in this process, for this reason.
        self._saver: SaverProcess | None = None
        self._without_saver = "the system or the place of the run does not allow another process"
        self._has_warned_of_waiting = False
        if is_supported(options.url):
            self._saver = SaverProcess(self._run.url, options, trusted_types, self._damaged)
        # Whether the saver, and not the engine, continues the run.
        self._is_in_saver = False
        self._stager = StateStager(shared=self._saver is not None)
        self._watch: PreemptionWatch | None = None
        self._newest_saved: int | None = None
        self._restorer = Restorer(
            tiers=self._tiers,
            ranks=self._ranks,
            reader_options={"target_options": target_options, "trusted_types": trusted_types},
            damaged=self._damaged,
            handles_node=self._member.handles_node,
        )
        self._last_save: tuple[int, float] | None = None
        self._owner = forks.Owner()
        self._closed = False

    def __repr__(self) -> str:
        return f"CheckpointManager({self._run.url!r})"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"the CheckpointManager of {self._run.url} cannot be pickled or copied",
            next_step="create one in the process that uses it",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except MillraceError:
            if exc is None:
                raise

    @property
    def url(self) -> str:
        """Names the run, without secrets."""
        return self._run.url

    # --- saving -----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        user: Mapping[str, Any] | None = None,
    ) -> SaveResult:
        """Save, and return when it is durable. Waits for a save in flight. Raises the error of any rank's save.

        Copies the state first, as `save_async` does, and then writes it in a thread of this process. With several ranks,
        every rank calls it, and returns when the first rank has published the manifest.
        """
        result = self._submit(step, state, metrics, user, waits=True, is_async=False).result()
        if result is None:
            raise AssertionError("a save that waits is not skipped")
        return result

    def save_async(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        user: Mapping[str, Any] | None = None,
    ) -> PendingSave:
        """Copy the state into host memory, and save it while the training continues.

        `metrics` are for `KeepBest` and for people; `user` are plain values to keep with the checkpoint. The state may be
        changed as soon as this returns. Raises the error of an earlier save that was not raised yet; then nothing is saved.
        """
        return self._submit(step, state, metrics, user, waits=self._on_busy == "wait", is_async=True)

    def wait(self) -> None:
        """Wait until the saves in flight are durable at the run's URL. Raises an error that was not raised yet."""
        self._drain()
        self._check(at_the_end=True)

    def close(self) -> None:
        """Wait for the saves in flight, release the run, and raise an error that was not raised yet. Idempotent."""
        if self._closed:
            return
        refuse_in_progress()
        in_flight = self._runner.busy or self._upload_runner.busy
        if not in_flight:
            self._engine.renew_operation()
        self._closed = self._engine.is_closing = True
        try:
            if self._saver is not None:
                self._saver.closing(in_flight=in_flight)
            self._drain()
            self._check(at_the_end=True)
        finally:
            if self._watch is not None:
                self._watch.close()
            self._runner.close()
            self._upload_runner.close()
            # Last: no other manager may have the run until nothing is in flight, also after an interrupt.
            if self._saver is not None and not self._saver.close():
                self._move_here()
            self._engine.close()
            self._stager.close()
            self._ranks.close()

    # --- looking ----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that can be restored, in order, without those that an earlier restore abandoned."""
        return self._ranks.run_on_first(lambda: [found.step for found in timeline(self._tiers.complete())])

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None in an empty run."""
        steps = self.steps()
        return steps[-1] if steps else None

    def metadata(self, step: int | None = None) -> CheckpointInfo:
        """Describe the checkpoint of `step` (by default the newest). Raises `CheckpointNotFoundError`."""
        wanted = None if step is None else _checked_step(step)
        return self._ranks.run_on_first(lambda: self._restorer.candidates(wanted)[0].describe())

    # --- restoring --------------------------------------------------------------------------------

    def restore(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        keys: str | Sequence[str] | None = None,
        fallback: bool = False,
    ) -> int | None:
        """Load the newest complete checkpoint (or that of `step`) into `state`. Returns its step; None in an empty run.

        Every rank calls it, with the same `step`. Tensors are loaded in place, plain values replaced, objects loaded through
        their `load_state_dict`. `keys` are patterns such as `"model.*"`: values that match none of them stay unchanged. With
        `fallback` a damaged checkpoint is skipped with a warning, and the one before it is loaded. Without, it is a
        `CorruptCheckpointError`. One that is removed while it is read is always skipped, for a newer one if there is one by
        then. After an error while reading, the state is a mix of old and new values.
        """
        self._open()
        step, fallback, chosen = self._ranks.run_on_all(lambda: _checked_restore(state, step, keys, fallback))
        _refuse_different_steps(self._ranks.gather(step), "restores")
        self._drain()
        self._engine.renew_operation()
        with part_of(self._engine.operation):
            has_parts = self._join_parts()
            if not self._restorer.make_reachable(step) and (has_parts or self._ranks.count > 1):
                self._upload_leftovers()
            candidates = self._restorer.choose(step)
            # From here on the same steps may be saved again with other states, also if this restore fails half-way.
            self._newest_saved = None
            found = self._restorer.restore(state, candidates, chosen, fallback=fallback, one_step=step is not None)
        if found is not None:
            if self._saver is not None and self._is_in_saver:
                self._saver.start_over()
            else:
                self._engine.start_over()
        return found

    # --- retention --------------------------------------------------------------------------------

    def prune(self, keep: int | str | Policy | None = None, *, dry_run: bool = False) -> PruneReport:
        """Remove the checkpoints that `keep` (by default the manager's policy) does not keep. Every rank calls this.

        Raises `UsageError` where the policy selects by a metric or a step that no checkpoint has.
        """
        self._open()
        self._drain()
        retention = self._engine.retention
        policy = retention.policy if keep is None else as_policy(keep)
        dry_run = flag("dry_run", dry_run)
        self._engine.renew_operation()
        with part_of(self._engine.operation):
            return self._ranks.run_on_first(lambda: retention.prune(policy, dry_run=dry_run, strict=True))

    # --- preemption -------------------------------------------------------------------------------

    def watch_preemption(self, signals: Sequence[int] = (signal.SIGTERM,), *, grace_seconds: float = 25.0) -> None:
        """Make `preempted` save after one of `signals`, which then end the process only after `grace_seconds`.

        Call it in the main thread, on every rank. A second signal, two seconds later or more, ends the process at once.
        """
        self._open()
        if self._watch is not None:
            self._watch.close()
        self._watch = PreemptionWatch(signals, grace_seconds=grace_seconds)

    def preempted(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> bool:
        """Whether any rank received a signal to end. Then `state` is saved as that of `step`, and durable on return.

            if run.preempted(step, state):
                break

        Call it after each step, on every rank: all ranks save the same step. If the saver process dies with that save, the
        save is repeated once without it. Raises `UsageError` before `watch_preemption`.
        """
        step = _checked_step(step)
        if self._watch is None:
            raise UsageError("no signals are watched", next_step="call watch_preemption() first")
        if not any(self._ranks.gather(self._watch.noted)):
            return False
        pending: PendingSave | None = None
        with warnings.catch_warnings():
            # As an error (-W error), a warning would prevent the last save.
            warnings.simplefilter("default", RuntimeWarning)
            for may_repeat in (True, False):
                self._runner.drain()
                # An upload may outlast the grace period. A saver that uploads saves near at the same time; a move of the run
                # waits.
                is_uploading = self._is_in_saver and self._upload_runner.busy
                votes = self._ranks.gather((self._newest_saved == step, is_uploading))
                # A save may have succeeded on some ranks only: all save again then.
                if not all(is_saved for is_saved, _ in votes):
                    self._warn_of_failures()
                    is_async = any(each for _, each in votes)
                    # After a restore that failed the step may be the newest one, with another state.
                    pending = self._submit(step, state, metrics, None, waits=True, is_async=is_async, is_last=True)
                self._drain()
                # The saver may have died with the save or its upload. No upload is in flight now, so this process saves.
                if not (may_repeat and any(self._ranks.gather(self._has_lost_saver()))):
                    break
                self._newest_saved = None
            if pending is not None:
                pending.result()
        self._watch.close()
        return True

    # --- inside -----------------------------------------------------------------------------------

    def _submit(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
        user: Mapping[str, Any] | None,
        *,
        waits: bool,
        is_async: bool,
        is_last: bool = False,
    ) -> PendingSave:
        """Check the arguments on all ranks, copy the state, and start the save in a thread. Collective.

        With `is_last`, errors of earlier saves only warn.
        """
        self._open()
        # A wrong argument of one rank is an error on all: none waits for a rank that has left.
        step, figures, notes = self._ranks.run_on_all(lambda: _checked_save(step, state, metrics, user))
        if not waits and self._ranks.run_on_first(lambda: self._runner.busy):
            return PendingSave(step, skipped=True)
        # Wait first, then copy: so there are never more than two copies of the state in memory.
        waited = self._runner.drain()
        self._ranks.run_on_first(lambda: self._engine.retention.warn_of_mistakes(step, figures, self._last_save))
        waits_for_save = is_async and self._saver is None
        if waits_for_save:
            self._ranks.run_on_first(self._warn_of_waiting)
        began = time.monotonic()
        staged = self._stage(state, is_last=is_last)
        self._engine.renew_operation()
        with part_of(self._engine.operation):
            order = self._agree(step, staged, is_async=is_async)
        request = SaveRequest(
            step=step,
            metrics=figures,
            user=notes,
            waited_seconds=waited,
            order=order if isinstance(order, SaveOrder) else None,
        )
        tiered = None if self._tiers.local is None else TieredSave(step)

        def work(report: Report) -> SaveResult:
            if isinstance(order, Exception):
                staged.release()
                if self._member.is_first:
                    emit(failed(self.url, step, order))
                raise order
            written, upload = self._noting_failure(
                request.order, lambda: self._save(request, staged, report, is_async=is_async)
            )
            self._newest_saved, self._last_save = step, (step, began)
            if tiered is not None and written.is_near:
                # This thread waits for the upload in flight, and so does the next save.
                tiered.far = self._upload_runner.submit(
                    step,
                    lambda report: self._noting_failure(request.order, lambda: upload(report)),
                    on_progress=self._on_progress,
                )
            return written.result

        def unused(error: Exception) -> None:
            staged.release()
            self._notify(request.order, error)

        with part_of(self._engine.operation):
            near = self._runner.submit(step, work, on_progress=self._on_progress, unused=unused)
        if waits_for_save:
            self._drain()
        if tiered is None:
            return near
        tiered.near = near
        return tiered

    def _agree(self, step: int, staged: StagedState, *, is_async: bool) -> SaveOrder | Exception | None:
        """Decide with the other ranks which process saves, and the plan and the order of the save. A collective call.

        Returns None for a single rank, which decides in the save, and the error of any rank, on all ranks.
        """
        if self._member.count == 1:
            return None
        reason: str | None = None if is_async else ""
        failure: Exception | None = None
        if is_async:
            try:
                if self._saver is None:
                    raise SaverUnavailable(self._without_saver)
                self._move_to_saver(self._saver, staged)
            except SaverUnavailable as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001 - raised on all ranks, whatever it is
                failure = error
        try:
            knows = self._saver is not None and reason is None and failure is None and self._saver.knows(staged)
            votes = self._ranks.gather((None if failure is None else picklable(failure), step, reason, knows))
            errors = [error for error, *_ in votes if error is not None]
            if errors:
                raise errors[0]
            _refuse_different_steps([each for _, each, *_ in votes], "saves")
            reasons = [each for *_, each, _ in votes if each is not None]
            if reasons:
                self._ranks.run_on_all(lambda: self._work_here(reasons[0]))
            if reasons or not all(known for *_, known in votes):
                staged.plan = plan_save(staged.state, self._ranks)
            saver = None if reasons else self._saver
            return self._ranks.run_on_first(lambda: (saver or self._engine).order(step))
        except Exception as error:  # noqa: BLE001 - the result of the save
            return error
        except BaseException:
            staged.release()
            raise

    def _noting_failure(self, order: SaveOrder | None, function: Callable[[], _Result]) -> _Result:
        """Call `function`. If it fails, the other ranks of the save `order` are notified, which wait for this one."""
        try:
            return function()
        except BaseException as error:  # also one of a library, such as `asyncio.CancelledError`
            self._notify(order, error)
            raise

    def _notify(self, order: SaveOrder | None, error: BaseException) -> None:
        """Notify the other ranks of a save that this one has failed."""
        if order is not None:
            publish_failure(self._run.checkpoint(order.name), self._member.rank, order.save_id, error)

    def _save(
        self, request: SaveRequest, staged: StagedState, report: Report, *, is_async: bool
    ) -> tuple[Written, Upload]:
        """Carry out a save in the saver process or in this thread."""
        if is_async and self._saver is not None:
            try:
                if request.order is None:  # else the ranks have agreed on it
                    self._move_to_saver(self._saver, staged)
            except SaverUnavailable as error:
                self._work_here(str(error))
            except BaseException:
                staged.release()
                raise
            else:
                return self._saver.save(request, staged, report if self._on_progress is not None else None)
        self._move_here()
        written = self._engine.save(request, staged, report)
        return written, lambda report: self._engine.upload(written, report)

    def _work_here(self, reason: str) -> None:
        """Save in this process: from now on if there can be no saver, for this reason."""
        self._move_here()
        if reason and self._saver is not None:
            emit(Event(name="run.saver.unavailable", subject=self.url, detail=reason))
            self._saver, self._without_saver = None, reason

    def _warn_of_waiting(self) -> None:
        if not self._has_warned_of_waiting:
            self._has_warned_of_waiting = True
            text = f"save_async() of {self.url} waits for the end of each save: {self._without_saver}"
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _member_of(self, local: Run | None) -> Member:
        """The position of this rank. A collective call."""
        ranks = self._ranks
        if local is None or ranks.count == 1:
            return Member(ranks.rank, ranks.count)
        directory = (socket.gethostname(), os.path.realpath(local.url))
        return Member(ranks.rank, ranks.count, ranks.gather(directory).index(directory) == ranks.rank)

    def _move_to_saver(self, saver: SaverProcess, staged: StagedState) -> None:
        """Let the saver continue the run. Raises `SaverUnavailable`."""
        if staged.nbytes and staged.region is None:
            raise SaverUnavailable("there is no shared memory")
        saver.start()  # or another one, after its death
        if not self._is_in_saver:
            self._upload_runner.drain()
            self._is_in_saver = True
            saver.take_state(*self._engine.give_state())

    def _move_here(self) -> None:
        if self._is_in_saver and self._saver is not None:
            self._upload_runner.drain()
            state, previous = self._saver.give_state()
            self._is_in_saver = False
            self._engine.take_state(state, previous)

    def _stage(self, state: Mapping[str, Any], *, is_last: bool) -> StagedState:
        """Copy the state. An error on one rank, or of an earlier save, is raised on all: none begins to save alone."""
        staged: list[StagedState] = []

        def stage() -> StagedState:
            if is_last:
                self._warn_of_failures()
            else:
                self._check()
            staged.append(self._stager.stage(state))
            return staged[0]

        try:
            return self._ranks.run_on_all(stage)
        except BaseException:
            for copy in staged:
                copy.release()
            raise

    def _join_parts(self) -> bool:
        """Join the parts of checkpoints that a crash left. Returns whether any rank has parts. A collective call."""
        if self._engine.uploader is None:
            return False
        try:
            return Recovery(self._engine.uploader, self._ranks).join_left_parts()
        except MillraceError as error:
            emit(Event(name="checkpoint.tier.left", subject=self.url, detail=str(error)))
            return True

    def _upload_leftovers(self) -> None:
        """Upload checkpoints that a crash left on the nodes: only the origin gives every rank all parts."""
        if self._engine.uploader is None or not self._owner.is_this_process:
            return
        # The saver has the claim, which is checked before a manifest is published, and may have saved near since.
        self._ranks.run_on_all(self._move_here)
        try:
            Recovery(self._engine.uploader, self._ranks).recover()
        except MillraceError as error:
            emit(Event(name="checkpoint.tier.left", subject=self.url, detail=str(error)))

    def _has_lost_saver(self) -> bool:
        """Whether the last save, or the last upload, has failed by the death of the saver process."""
        return any(isinstance(each.last_error, SaverDiedError) for each in (self._runner, self._upload_runner))

    def _drain(self) -> float:
        return self._runner.drain() + self._upload_runner.drain()

    def _check(self, *, at_the_end: bool = False) -> None:
        """Raise an error that was not raised yet. Before the end a failed upload only warns: the save is durable near."""
        self._runner.check()
        try:
            self._upload_runner.check()
        except RetryableError as error:
            if at_the_end:
                raise
            text = f"{self.url} did not take a checkpoint ({error.message}); it stays on the local disk until it does"
            warnings.warn(text, RuntimeWarning, stacklevel=7)

    def _warn_of_failures(self) -> None:
        """Warn of failed saves whose errors were not raised yet: there may be time for one more save."""
        while True:
            try:
                self._check()
            except Exception as error:  # noqa: BLE001 - whatever ended a save
                reason = reason_of(error)[:300]
                emit(Event(name="run.save.failed", subject=self.url, detail=reason))
                warnings.warn(f"an earlier save failed ({reason})", RuntimeWarning, stacklevel=3)
            else:
                return

    def _open(self) -> None:
        if self._closed:
            raise UsageError("the manager is closed", next_step="make another one")


def _access(ranks: Ranks) -> ClusterAccess | None:
    """This process's access to its cluster. If that does not respond to a rank, there are no replicas, with an event.

    Raises `ConfigurationError` where no cluster is named.
    """

    def find() -> ClusterAccess | None:
        try:
            return ClusterAccess.find()
        except UsageError:
            raise
        except MillraceError as error:
            emit(Event(name="checkpoint.replica.failed", subject="the cluster", detail=str(error)))
            return None

    access = ranks.run_on_all(find)
    return access if all(ranks.gather(access is not None)) else None


def _anywhere(name: str, path: str | os.PathLike[str]) -> str:
    """A path or URL that means the same in a process with another current directory."""
    text = path_text(name, path)
    return text if "://" in text else absolute_path(text)


def _warn_of_save_process() -> None:
    """Warn once in a process."""
    global _has_warned_of_save_process
    if not _has_warned_of_save_process:
        _has_warned_of_save_process = True
        text = "save_process has no effect: asynchronous saves use a process; it will be removed"
        warnings.warn(text, FutureWarning, stacklevel=3)


def _checked_step(step: int) -> int:
    # Loops count in numpy's integers and in tensors, too.
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise UsageError(f"step {shown(step)}", next_step=f"give a whole number from 0 to {MAX_STEP}")
    return number


def _refuse_different_steps(steps: Sequence[int | None], verb: Literal["saves", "restores"]) -> None:
    """Raise `UsageError` if the ranks name different steps: what they save or restore would be a mix of several states."""
    other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
    if other is not None:
        first, second = ("the newest step" if step is None else f"step {step}" for step in (steps[0], steps[other]))
        raise UsageError(
            f"rank 0 {verb} {first}, and rank {other} {second}", next_step="give the same step on every rank"
        )


def _check_state(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise UsageError(f"the state is a {type(state).__name__}", next_step="give a dict, as {'model': model}")


def _checked_save(
    step: int, state: Mapping[str, Any], metrics: Mapping[str, float] | None, user: Mapping[str, Any] | None
) -> tuple[int, dict[str, float], dict[str, Any]]:
    """The checked step, metrics and user's values of a save. Raises `UsageError`."""
    number = _checked_step(step)
    _check_state(state)
    return number, _check_metrics(metrics), _check_user(user)


def _checked_restore(
    state: Mapping[str, Any], step: int | None, keys: str | Sequence[str] | None, fallback: bool
) -> tuple[int | None, bool, list[str] | None]:
    """The checked step, `fallback` and `keys` of a restore. Raises `UsageError`."""
    _check_state(state)
    if not isinstance(state, MutableMapping):
        raise UsageError(f"the state is a {type(state).__name__}, which cannot be changed", next_step="give a dict")
    if not state:
        raise UsageError(
            "the state is empty, so nothing would be restored", next_step="give what was saved, as {'model': model}"
        )
    number = None if step is None else _checked_step(step)
    return number, flag("fallback", fallback), patterns("keys", keys)


def _check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    figures: dict[str, float] = {}
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"the metrics are a {type(metrics).__name__}", next_step="give a dict of numbers")
    for name, value in (metrics or {}).items():
        try:
            figures[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UsageError(
                f"the metric {name!r} is not a number", next_step="give numbers, and other values as user="
            ) from error
        if not math.isfinite(figures[str(name)]):
            # A NaN is reported, but the state is saved.
            emit(Event(name="run.metric.not_finite", subject=str(name), detail=str(value)))
    return figures


def _check_user(user: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the user's values: the save reads them later, when the training may have changed them."""
    if user is not None and not isinstance(user, Mapping):
        raise UsageError(f"user= is a {type(user).__name__}", next_step="give a dict of plain values")
    try:
        packed = pack_value(dict(user or {}), "user=")
        copy: dict[str, Any] = unpack_value(packed)
        deeper = packed
        for _ in range(50):  # the save and the restore encode and decode it further down the stack
            deeper = [deeper]
        try:
            json.dumps(deeper)
        except ValueError as error:
            raise UsageError("user= contains an integer with too many digits", next_step="store it as text") from error
    except RecursionError as error:
        raise UsageError("user= is nested too deeply, or contains itself", next_step="make it flatter") from error
    return copy
