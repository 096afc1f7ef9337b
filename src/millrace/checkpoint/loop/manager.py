"""All checkpoints of one training run behind one object: `CheckpointManager`."""

from __future__ import annotations

import functools
import math
import operator
import os
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from millrace.checkpoint.codec.effort import Compression
from millrace.checkpoint.loop.memory_budget import base_budget
from millrace.checkpoint.loop.preemption import PreemptionWatch
from millrace.checkpoint.loop.ranks import Ranks
from millrace.checkpoint.loop.restoring import restore_into
from millrace.checkpoint.loop.run_saver import RunSaver
from millrace.checkpoint.loop.save_progress import ProgressMeter
from millrace.checkpoint.loop.saving import PendingSave, SaveProgress, SaveResult, SaveRunner
from millrace.checkpoint.loop.uploading import TieredSave, Uploader
from millrace.checkpoint.places.storage import CheckpointStorage
from millrace.checkpoint.reading.reader import CheckpointReader
from millrace.checkpoint.run.pruning import PruneReport, prune
from millrace.checkpoint.run.retention import KeepAll, Policy, as_policy
from millrace.checkpoint.run.run_layout import MAX_STEP, CheckpointInfo, Found
from millrace.checkpoint.run.tiers import Placed, ReplicaTier, open_tiers
from millrace.checkpoint.run.timeline import newest_first, timeline
from millrace.checkpoint.state.staging import StagedState, StateStager
from millrace.checkpoint.writing.encoder_process import EncoderProcess
from millrace.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    DamagedError,
    MillraceError,
    MissingError,
    RetryableError,
    UsageError,
)
from millrace.events import Event, emit

_NICENESS = 10
"""Of the saving threads beside the training."""


class _RunReader(CheckpointReader):
    """A reader of a checkpoint that may lie in several places."""

    place: CheckpointStorage | None = None

    def _storage(self) -> CheckpointStorage:
        return super()._storage() if self.place is None else self.place


class CheckpointManager:
    """The checkpoints of one run: saves beside the training, what is kept of them, and the way back.

        run = CheckpointManager("s3://bucket/run", keep=5)
        first = (run.restore(state) or 0) + 1            # the newest complete checkpoint; None on an empty run
        for step in range(first, last):
            ...
            if step % 100 == 0:
                run.save_async(step, state, metrics={"loss": loss})
        run.close()                                      # waits for what is in flight

    `state` is a dict of tensors, plain values, and objects with `state_dict` and `load_state_dict` (model, optimizer,
    scheduler, `RandomState`, `DataPosition`), as for `dcp.save`. `save_async` returns as soon as the state is copied into
    host memory; compression and upload run beside the training. Most saves are *deltas* to the save before: unchanged parts
    are referred to, changed ones stored as differences.

    - `keep`: how many, or which, checkpoints stay: a number, a policy such as `KeepLast(5) | KeepEvery(1000)`, or its text
      (`"last=5,every=1000"`). None keeps all. The newest one always stays, with all that it is a delta to.
    - `full_every`: at least every so many saves one is full; 1: all of them. A restore reads at most twice the bytes of a
      full one in any case.
    - `local`: a directory on a disk of this node, in which each run gets a directory of its own. A save is durable there
      first (`save_async(...).near`) and then goes to the run's URL beside the training; a restore takes every file from the
      nearest place. The newest `local_keep` stay there, with what they need. A disk that is full or fails is passed over,
      with a warning. `replica`: a directory of the same kind on a second node's disk, as far as this node can write to it.
    - `on_busy`: what `save_async` does while a save is in flight: `"wait"`, or `"skip"` the new one.
    - `on_progress`: gets a `SaveProgress` now and then, in the saving thread.
    - `base_memory`: bytes of host memory that the copy of the last state may take between saves, for deltas to be made
      against; by default half of what is free at the first save. A state that does not fit is saved in full, unless the last
      save lies on a disk of this node (`local=`, or a run in a local directory).
    - `rewind`: whether the first save may be of a step that is not beyond the newest one, though nothing was restored.
    - `save_process`: whether a process of its own compresses, where that works (Linux), instead of threads, which take the
      interpreter's lock from the training; they take over what it cannot do, and everything when it fails.
    - `thread_count`, `compression`, `target_options`, `trusted_types`: as `CheckpointWriter`; `thread_count` is half of the
      cores by default, so that the training keeps the others.

    Where `torch.distributed` is initialised, every rank makes the manager and calls the same methods in the same order.
    One manager writes to a run at a time: the next one takes over from a dead one, and a forgotten one gets a
    `RunTakenError` at its next save. For one thread; not for forked children.

    An error of a save in flight is raised by `result()` or, if nobody asks, by the next call. Leaving the process waits for
    the save in flight.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: int | str | Policy | None = None,
        full_every: int = 10,
        local: str | os.PathLike[str] | None = None,
        local_keep: int = 2,
        replica: ReplicaTier | str | os.PathLike[str] | None = None,
        on_busy: Literal["wait", "skip"] = "wait",
        on_progress: Callable[[SaveProgress], None] | None = None,
        base_memory: int | None = None,
        rewind: bool = False,
        save_process: bool = False,
        thread_count: int | None = None,
        compression: Compression = "typed",
        target_options: Mapping[str, Any] | None = None,
        trusted_types: Sequence[type] = (),
    ) -> None:
        if isinstance(full_every, bool) or not isinstance(full_every, int) or full_every < 1:
            raise ConfigurationError(f"full_every={full_every!r}", next_step="give a whole number from 1 up")
        if on_busy not in ("wait", "skip"):
            raise ConfigurationError(f"on_busy={on_busy!r}", next_step="give 'wait' or 'skip'")
        if isinstance(local_keep, bool) or not isinstance(local_keep, int) or local_keep < 1:
            raise ConfigurationError(f"local_keep={local_keep!r}", next_step="give a whole number from 1 up")
        self._tiers = open_tiers(url, local=local, replica=replica, target_options=target_options)
        self._run, self._local_keep = self._tiers.origin, local_keep
        self._policy = KeepAll() if keep is None else as_policy(keep)
        self._full_every, self._on_busy, self._base_memory = full_every, on_busy, base_memory
        self._reader_options: dict[str, Any] = {"target_options": target_options, "trusted_types": trusted_types}
        self._writer_options = {
            "target_options": target_options,
            "trusted_types": trusted_types,
            "compression": compression,
            "thread_count": thread_count or max(1, len(os.sched_getaffinity(0)) // 2),
        }
        self._on_progress = on_progress
        self._niceness = _NICENESS
        threads = thread_count or max(1, len(os.sched_getaffinity(0)) // 2)
        self._process = EncoderProcess(threads) if save_process else None
        self._stager = StateStager(shared=save_process)
        self._runner = SaveRunner(on_busy=on_busy)
        self._control = Ranks()
        self._saving = Ranks()
        self._uploader = self._new_uploader() if self._tiers.local is not None else None
        self._saver: RunSaver | None = None
        self._watch: PreemptionWatch | None = None
        self._newest_saved: int | None = None
        self._is_tidy = False
        self._may_go_back = rewind
        self._closed = False

    def __repr__(self) -> str:
        return f"CheckpointManager({self._run.url!r})"

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
        """Save, and return when it is durable. Waits for a save in flight. Raises what any rank's save raises."""
        result = self._submit(step, state, metrics, user, waits=True).result()
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
        """Copy the state into host memory, and save it beside the training.

        `metrics` are for `KeepBest` and for people; `user` are plain values to keep with the checkpoint. The state may be
        changed as soon as this returns. Raises the error of an earlier save that nobody has seen yet; nothing is saved then.
        """
        return self._submit(step, state, metrics, user, waits=self._on_busy == "wait")

    def wait(self) -> None:
        """Wait for what is in flight, until it is durable at the run's URL. Raises an error that nobody has seen."""
        self._drain()
        self._check(at_the_end=True)

    def close(self) -> None:
        """Wait for the save in flight, give the run free, and raise an error that nobody has seen. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._drain()
            self._check(at_the_end=True)
        finally:
            if self._watch is not None:
                self._watch.close()
            self._runner.close()
            if self._process is not None:
                self._process.close()
            if self._uploader is not None:
                self._uploader.runner.close()
                self._uploader.ranks.close()
            # Last: until nothing is in flight, also after an interrupt, nobody else may have the run.
            if self._saver is not None:
                self._saver.close()
            self._stager.close()
            self._control.close()
            self._saving.close()

    # --- looking ----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that can be restored, in order; not those of a future that was given up by an earlier restore."""
        return self._control.agree(lambda: [found.step for found in timeline(self._tiers.complete())])

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None in an empty run."""
        steps = self.steps()
        return steps[-1] if steps else None

    def metadata(self, step: int | None = None) -> CheckpointInfo:
        """What is known of a checkpoint (the newest one by default). Raises `CheckpointNotFoundError`."""
        return self._control.agree(lambda: self._candidates(step)[0].describe())

    # --- restoring --------------------------------------------------------------------------------

    def restore(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        keys: str | Sequence[str] | None = None,
        fallback: bool = False,
    ) -> int | None:
        """Load the newest complete checkpoint (or that of `step`) into `state`; gives its step, or None in an empty run.

        Tensors are loaded in place, plain values replaced, objects given to their `load_state_dict`. `keys` are patterns
        such as `"model.*"`: what they do not match stays as it is. With `fallback` a damaged checkpoint is passed over
        for the one before it, with a warning that says so; without, it is a `CorruptCheckpointError`. One that is removed
        while it is read is passed over in any case. After an error in reading the state is neither old nor new.
        """
        self._open()
        _check_state(state)
        self._drain()
        patterns = [keys] if isinstance(keys, str) else keys
        self._gather_up()
        candidates = self._control.agree(lambda: self._names(step))
        # From here on the same steps may be done again, with other states; also when this fails half-way.
        self._newest_saved = None
        failure: MillraceError | None = None
        for name, found_step in candidates:
            try:
                self._load(name, state, patterns)
            except (DamagedError, MissingError) as error:
                gone = isinstance(error, CheckpointNotFoundError) or self._control.agree(
                    functools.partial(self._is_gone, name)
                )
                if step is not None or not (fallback or gone):
                    raise _with_way_out(error, fallback, step) from error
                failure = error
                self._say(f"{name} of {self.url} cannot be restored ({error.message}); trying the one before it")
                continue
            self._may_go_back = True
            if self._saver is not None:
                self._saver.forget()
            return found_step
        if failure is not None:
            raise failure
        return None

    # --- what is kept -----------------------------------------------------------------------------

    def prune(self, keep: int | str | Policy | None = None, *, dry_run: bool = False) -> PruneReport:
        """Remove what `keep` (by default the manager's policy) does not keep. On all ranks alike; the first one acts."""
        self._open()
        self._drain()
        policy = self._policy if keep is None else as_policy(keep)
        return self._control.agree(lambda: prune(self._run, policy, dry_run=dry_run))

    # --- preemption -------------------------------------------------------------------------------

    def watch_preemption(self, signals: Sequence[int] = (signal.SIGTERM,), *, grace_seconds: float = 25.0) -> None:
        """From now on `signals` make `preempted` save, and do not end the process before `grace_seconds` are over.

        Call it in the main thread, on every rank. A second signal ends the process at once.
        """
        self._open()
        if self._watch is not None:
            self._watch.close()
        self._watch = PreemptionWatch(signals, grace_seconds=grace_seconds)

    def preempted(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> bool:
        """To be asked after each step: whether the job has been told to end. Then `state` is durable, as that of `step`.

            if run.preempted(step, state):
                break

        The ranks agree, so that all of them save the same step, whichever was told. Raises `UsageError` before
        `watch_preemption`.
        """
        if self._watch is None:
            raise UsageError("nobody watches for signals", next_step="call watch_preemption() first")
        if not any(self._control.gather(self._watch.noted)):
            return False
        self._drain()
        if self._newest_saved != step:
            self._say_failures()
            self.save(step, state, metrics)
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
    ) -> PendingSave:
        self._open()
        step = _checked_step(step)
        _check_state(state)
        if not waits and self._control.agree(lambda: self._runner.busy):
            return PendingSave.skip(step)
        # First the wait, then the copy: two copies of the state in memory are enough.
        waited = self._runner.drain()
        figures = self._control.together(lambda: _check_metrics(metrics))
        staged = self._stage(state)
        if self._saver is None:
            self._saver = self._new_saver()
        saver = self._saver

        tiered = None if self._uploader is None else TieredSave(step)

        def work(report: Callable[[SaveProgress], None]) -> SaveResult:
            progress = ProgressMeter(step, report)
            written = saver.save(
                step,
                staged,
                metrics=figures,
                user=user or {},
                waited_seconds=waited,
                progress=progress,
            )
            self._newest_saved = step
            if tiered is not None and self._uploader is not None and written.is_near:
                tiered.go_on(self._uploader.submit(written, self._on_progress))
            else:
                self._prune_after_save()
                progress.begin("done", written.result.stored_bytes)
            return written.result

        near = self._runner.submit(step, work, on_progress=self._on_progress)
        if tiered is None:
            return near
        tiered.near = near
        return tiered

    def _stage(self, state: Mapping[str, Any]) -> StagedState:
        """Copy the state. What fails on one rank, or has failed before, is raised on all: none begins to save alone."""
        staged: list[StagedState] = []
        failure: Exception | None = None
        try:
            self._check()
            staged.append(self._stager.stage(state))
        except Exception as error:  # noqa: BLE001 - whatever an object's `state_dict` raises
            failure = error
        try:
            self._control.share(failure)
        except BaseException:
            for copy in staged:
                copy.release()
            raise
        return staged[0]

    def _new_saver(self) -> RunSaver:
        return RunSaver(
            run=self._run,
            ranks=self._saving,
            full_every=self._full_every,
            base_bytes=base_budget() if self._base_memory is None else self._base_memory,
            writer_options=self._writer_options,
            scan=self._scan,
            local=self._tiers.local,
            near=self._tiers.local or (None if self._run.is_remote else self._run),
            niceness=self._niceness,
            may_go_back=self._may_go_back,
            process=self._process,
        )

    def _new_uploader(self) -> Uploader:
        if self._tiers.local is None:
            raise AssertionError("without a local place there is nothing to upload")
        return Uploader(
            tiers=self._tiers,
            local=self._tiers.local,
            ranks=Ranks(),
            local_keep=self._local_keep,
            check=lambda: self._saver.check_claim() if self._saver is not None else None,
            after=self._prune_after_save,
            give_up=lambda: self._saver.build_on_nothing() if self._saver is not None else None,
        )

    def _prune_after_save(self) -> None:
        if not self._saving.is_first:
            return
        try:
            # Where all are kept only what dead saves have left can go, and one look for that is enough.
            keeps_all = isinstance(self._policy, KeepAll)
            if not keeps_all or not (self._is_tidy or all(found.complete for found in self._run.scan())):
                prune(self._run, self._policy)
            self._is_tidy = True
        except MillraceError as error:
            # The state is safe; what should have gone goes with the next save.
            emit(Event(name="run.prune.failed", subject=self.url, detail=str(error)))

    def _scan(self) -> list[Found]:
        """The checkpoints in all places, complete or not, each once."""
        found = {each.name: each for run in self._tiers.places[:-1] for each in run.scan()}
        found.update({each.name: each for each in self._run.scan() if each.complete or each.name not in found})
        return list(found.values())

    def _candidates(self, step: int | None) -> list[Placed]:
        """Complete checkpoints in the order in which they are to be tried. Raises `CheckpointNotFoundError`."""
        complete = self._tiers.complete()
        found = [each for each in newest_first(complete) if step is None or each.step == step]
        if not found and step is None:
            raise CheckpointNotFoundError(f"no complete checkpoint in {self.url}", next_step="save one first")
        if not found:
            there = ", ".join(str(each.step) for each in timeline(complete)[-5:]) or "none"
            raise CheckpointNotFoundError(
                f"no complete checkpoint of step {step} in {self.url}", next_step=f"the last ones there are: {there}"
            )
        return found

    def _names(self, step: int | None) -> list[tuple[str, int]]:
        if step is None and not self._tiers.complete():
            return []
        return [(each.name, each.step) for each in self._candidates(step)]

    def _load(self, name: str, state: dict[str, Any], patterns: Sequence[str] | None) -> None:
        saved = self._control.agree(lambda: self._tiers.save_id(name))
        if self._is_split() and not self._control.agree(lambda: self._tiers.is_at_origin(name)):
            lacking = [names for names in self._control.settle(lambda: self._tiers.lacking(name, saved)) if names]
            if lacking:
                raise CheckpointNotFoundError(
                    f"{name} of {self.url} is on disks of several nodes, of which some are not here: "
                    f"{lacking[0][0]} is missing",
                    next_step="restore another step, or start with the same nodes",
                )
        reader = _RunReader(self._run.url_of(name), **self._reader_options)
        reader.place = self._tiers.checkpoint(name, save_id=saved)
        restore_into(state, reader, self._control, keys=patterns)

    def _is_split(self) -> bool:
        """Whether a checkpoint that is not at the origin may be in parts on several nodes."""
        return self._tiers.local is not None and self._control.count > 1

    def _gather_up(self) -> None:
        """Bring to the origin what a crash left in parts on several nodes: only there every rank finds all of it."""
        if self._uploader is None or not self._is_split():
            return
        try:
            self._uploader.catch_up()
        except MillraceError as error:
            emit(Event(name="checkpoint.tier.left", subject=self.url, detail=str(error)))

    def _is_gone(self, name: str) -> bool:
        return all(each.name != name for each in self._tiers.complete())

    def _drain(self) -> float:
        waited = self._runner.drain()
        if self._uploader is not None:
            waited += self._uploader.runner.drain()
        return waited

    def _check(self, *, at_the_end: bool = False) -> None:
        """Raise an error that nobody has seen. What is safe near is no reason to end a training, only to say so."""
        self._runner.check()
        if self._uploader is None:
            return
        try:
            self._uploader.runner.check()
        except RetryableError as error:
            if at_the_end:
                raise
            text = f"{self.url} did not take a checkpoint ({error.message}); it stays on the local disk until it does"
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _say_failures(self) -> None:
        """Warn of failed saves that nobody has seen, instead of raising: there may be time for one more save."""
        while True:
            try:
                self._check()
            except Exception as error:  # noqa: BLE001 - whatever ended a save
                text = f"an earlier save failed ({type(error).__name__}: {error!s:.300})"
                emit(Event(name="run.save.failed", subject=self.url, detail=text))
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            else:
                return

    def _say(self, text: str) -> None:
        emit(Event(name="run.restore.fallback", subject=self.url, detail=text))
        if self._control.is_first:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _open(self) -> None:
        if self._closed:
            raise UsageError("the manager is closed", next_step="make another one")


def _checked_step(step: int) -> int:
    # Loops count in numpy's integers and in tensors, too.
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise UsageError(f"step {step!r}", next_step=f"give a whole number from 0 to {MAX_STEP}")
    return number


def _check_state(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise UsageError(f"the state is a {type(state).__name__}", next_step="give a dict, as {'model': model}")


def _check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    figures: dict[str, float] = {}
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"the metrics are a {type(metrics).__name__}", next_step="give a dict of numbers")
    for name, value in (metrics or {}).items():
        try:
            figures[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UsageError(
                f"the metric {name!r} is no number", next_step="give numbers, the rest as user="
            ) from error
        if not math.isfinite(figures[str(name)]):
            # A loss that is no number any more is worth knowing, and no reason to lose the state.
            emit(Event(name="run.metric.not_finite", subject=str(name), detail=str(value)))
    return figures


def _with_way_out(error: MillraceError, fallback: bool, step: int | None) -> MillraceError:
    if fallback or step is not None:
        return error
    return type(error)(error.message, next_step="restore(state, fallback=True) takes the one before it")
