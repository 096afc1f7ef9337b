"""The training loop. It knows neither Ray nor files: it gets batches, a family of models, and its place among the workers.

Every epoch it learns from each clip of its share once, hears the dev split together with the other workers, and has a
checkpoint saved beside the next epoch. It starts where the newest complete checkpoint ended, so that every process may be
killed at any time. What the loop changes from epoch to epoch (rate, random numbers) is a function of the seed and of how
far the run is: a resumed run needs nothing but the model, the optimizer and the epoch's number, however many workers it has.
The order of the clips is the feed's own. That of Ray Data begins again with a first epoch's after a resume, since Ray Data
counts the passes of an attempt and knows of no other: each epoch has every clip once, but a resumed run is no replay.

Shares differ in length. So at every step the workers say how many clips they have: one that has none left goes along with
a clip that does not count, and the gradient is the mean over all clips of the step, whoever has them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from millrace.demo.speech.batches import ClipBatch, Example, Feed, tensors_of
from millrace.demo.speech.card import CARD_NAME, model_card
from millrace.demo.speech.checkpoints import EpochCheckpoints
from millrace.demo.speech.families.protocol import Family
from millrace.demo.speech.job import KILL_MARKER, METRICS_NAME, SpeechJob
from millrace.demo.speech.log import (
    CheckpointRecord,
    EpochRecord,
    TrainingLog,
    WorkerTimes,
    digest_of,
    final_epochs,
    joined,
)
from millrace.demo.speech.patience import patiently
from millrace.demo.speech.precision import MixedPrecision
from millrace.demo.speech.workers import Workers
from millrace.errors import MillraceError, UsageError

MAX_GRADIENT_NORM = 1.0
EVALUATION_BATCH = 16
TRANSCRIPTS = 8


@dataclass
class _Stopwatch:
    """Seconds by what they were spent on."""

    spent: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Book the time since the last lap under `name`."""
        now = time.perf_counter()
        self.spent[name] = self.spent.get(name, 0.0) + now - self._since
        self._since = now

    def skip(self) -> None:
        """Book the time since the last lap under nothing."""
        self._since = time.perf_counter()


@dataclass
class _Tally:
    """What this worker did in an epoch. `losses` are those of its batches, times their clips."""

    clips: int = 0
    steps: int = 0
    own_steps: int = 0
    digest: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)

    def add(self, batch: ClipBatch, loss: torch.Tensor) -> None:
        self.clips += len(batch)
        self.own_steps += 1
        self.digest = joined((self.digest, digest_of(batch.names)))
        self.losses.append(loss.detach().float() * len(batch))

    @property
    def loss(self) -> float:
        return float(torch.stack(self.losses).sum()) if self.losses else 0.0


@dataclass(frozen=True, kw_only=True)
class _EpochShare:
    """What a worker tells the first one at an epoch's end."""

    loss: float
    digest: int
    times: WorkerTimes


class Training:
    """One worker of one attempt. Every worker makes one and calls `run`.

    `device` is the worker's own, `node` names its machine in the log.
    """

    def __init__(self, job: SpeechJob, family: Family, feed: Feed, *, device: torch.device, node: str) -> None:
        settings = job.settings
        self._job, self._settings, self._family, self._feed = job, settings, family, feed
        self._device, self._node = device, node
        self._workers = Workers()
        self._log = patiently(lambda: TrainingLog(job.run)) if self._workers.is_first else None
        # The first worker alone may run what is not wrapped; and all of them do to hear a split, each its own share.
        self._bare = family.build().to(device)
        self._model = self._wrapped(self._bare)
        self._optimizer = torch.optim.AdamW(
            (parameter for parameter in self._bare.parameters() if parameter.requires_grad),
            lr=settings.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=settings.weight_decay,
        )
        self._precision = MixedPrecision(settings.precision, device)
        self._checkpoints = EpochCheckpoints(
            job.run,
            self._model,
            self._optimizer,
            self._precision,
            keep=settings.keep,
            target_options=job.checkpoint_options,
        )
        self._spare: Example | None = None
        self._seen_first: str | None = None
        self._counted: dict[str, int] | None = None  # at the end of the epoch before
        self._may_kill = True

    def _wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        if self._workers.world == 1:
            return model
        devices = [self._device] if self._device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def run(self) -> None:
        """Train from the newest checkpoint to the end, and leave the model and its figures in the run's folder."""
        restored = self._checkpoints.restore()
        done = 0 if restored is None else restored.epoch
        if self._log is not None:
            self._begin(self._log, restored)
        for epoch in range(done + 1, self._settings.epochs + 1):
            self._epoch(epoch)
        self._finish()

    def _begin(self, log: TrainingLog, restored: CheckpointRecord | None) -> None:
        epochs = [event for event in log.events if event["event"] == "epoch"]
        self._seen_first = epochs[0]["clips_digest"] if epochs else None
        known = {event["epoch"] for event in log.events if event["event"] == "checkpoint"}
        log.add(
            "start",
            resumed_after=0 if restored is None else restored.epoch,
            workers=self._workers.world,
            parameters=sum(parameter.numel() for parameter in self._bare.parameters()),
            model=self._family.describe(),
            precision=self._precision.name,
            device=device_name(self._device),
        )
        if restored is not None and restored.epoch not in known:
            # The attempt that saved it ended before it could say so.
            log.add_checkpoint(restored)
        self._tell_of_lost(log, 0 if restored is None else restored.epoch)

    @staticmethod
    def _tell_of_lost(log: TrainingLog, done: int) -> None:
        """Warn of epochs that are done but not in the log, once: the storage did not take it before their process ended."""
        known = {event["epoch"] for event in log.events if event["event"] == "epoch"}
        known.update(epoch for event in log.events for epoch in event.get("lost_epochs", ()))
        lost = [epoch for epoch in range(1, done + 1) if epoch not in known]
        if lost:
            named = ", ".join(map(str, lost))
            log.add(
                "warning",
                lost_epochs=lost,
                text=f"the figures of epoch {named} are lost; the training goes on behind them",
            )

    # --- an epoch -------------------------------------------------------------------------------------

    def _epoch(self, epoch: int) -> None:
        """Learn from every clip once, hear the dev split, tell, and begin to save."""
        before = self._counted
        if before is None and self._log is not None:
            before = self._totals(self._log, epoch)
        watch = _Stopwatch()
        seed = self._settings.seed * 100_003 + epoch * 101 + self._workers.rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # by which transformers chooses what it masks
        tally = self._learn(epoch, watch)
        lines = self._hear("dev", epoch)
        dev_cer = character_error_rate(lines) if self._workers.is_first else None
        watch.lap("evaluate")
        self._settle()
        watch.lap("stall")
        shares = self._workers.gather(
            _EpochShare(loss=tally.loss, digest=tally.digest, times=self._times(tally, watch))
        )
        # Told before the checkpoint begins: whatever dies from here on, an epoch that a run resumes after is in the log.
        told = None if self._log is None else self._tell(self._log, epoch, dev_cer, shares, tally.steps, before)
        self._workers.gather(None)  # what the first worker does alone is no standing still of the others
        watch.skip()
        # The first worker's figures are those that are kept.
        self._checkpoints.save(epoch, {} if dev_cer is None else {"dev_cer": dev_cer})
        watch.lap("stall")
        times = self._workers.gather(self._times(tally, watch))
        if self._log is not None and told is not None:
            self._log.amend_epoch(replace(told, seconds=_seconds(times[0]), workers=tuple(times)))

    def _totals(self, log: TrainingLog, epoch: int) -> dict[str, int] | None:
        """What the counters say; None, and a warning, where they cannot: a figure is not worth an attempt."""
        try:
            return self._job.counters()
        except Exception as error:  # noqa: BLE001 - they ask all nodes, and whoever gave them may have others
            reason = (
                error.message if isinstance(error, MillraceError) else f"{type(error).__name__}: {_first_line(error)}"
            )
            text = f"the bytes read in epoch {epoch} are not known, and count as none ({reason})"
            log.add("warning", epoch=epoch, text=text)
            return None

    def _times(self, tally: _Tally, watch: _Stopwatch) -> WorkerTimes:
        return WorkerTimes(
            rank=self._workers.rank,
            node=self._node,
            clips=tally.clips,
            steps=tally.own_steps,
            wait_seconds=watch.spent.get("wait", 0.0),
            compute_seconds=watch.spent.get("compute", 0.0),
            evaluate_seconds=watch.spent["evaluate"],
            stall_seconds=watch.spent["stall"],
        )

    def _learn(self, epoch: int, watch: _Stopwatch) -> _Tally:
        settings = self._settings
        tally, seen = _Tally(), 0
        self._model.train()
        batches = self._feed.batches("train", epoch=epoch, size=settings.batch_size)
        while True:
            batch = next(batches, None)
            watch.lap("wait")
            counts = self._counts(batch)
            together = sum(counts)
            if not together:
                break
            progress = (epoch - 1 + min(1.0, seen / self._job.train_rows)) / settings.epochs
            for group in self._optimizer.param_groups:
                group["lr"] = settings.learning_rate_at(progress)
            loss = self._step(batch, together)
            if batch is not None:
                tally.add(batch, loss)
            tally.steps += 1
            seen += together
            if self._log is not None:
                self._log.write_again()
            if self._may_kill and epoch == settings.kill_in_epoch and 2 * seen >= self._job.train_rows:
                # The storage is asked once, and not at every step that is left.
                self._may_kill = False
                self._kill_once(epoch)
            watch.lap("compute")
        watch.lap("compute")
        if not seen:
            raise UsageError(
                f"no clip of {settings.data_url} is usable for training",
                next_step=f"check max_seconds ({settings.max_seconds:g}) and the data set",
            )
        return tally

    def _counts(self, batch: ClipBatch | None) -> list[int]:
        """How many clips each worker has for this step, by rank; and see to it that one without has a spare one."""
        if batch is not None and (self._spare is None or len(batch.shortest.features) < len(self._spare.features)):
            self._spare = batch.shortest
        counts = self._workers.numbers(len(batch) if batch is not None else 0 if self._spare is not None else -1)
        have = [rank for rank, count in enumerate(counts) if count > 0]
        if have and min(counts) < 0:
            # A worker that has not had a clip yet, since there are so few, gets to know one.
            spare = self._workers.told_by(have[0], self._spare)
            self._spare = self._spare or spare
        return [max(0, count) for count in counts]

    def _step(self, batch: ClipBatch | None, together: int) -> torch.Tensor:
        """One step of all workers; gives the mean loss of this one's clips."""
        if batch is not None:
            tensors, clips = batch.tensors, len(batch)
        else:
            if self._spare is None:
                raise AssertionError("a worker without a clip has a spare one")
            tensors, clips = tensors_of([self._spare], self._family), 0
        with self._precision.computing():
            loss = self._family.loss(self._model, self._moved(tensors))
        # The workers' gradients are averaged as if all had as many clips.
        self._precision.step(
            loss * (clips * self._workers.world / together), self._model, self._optimizer, norm=MAX_GRADIENT_NORM
        )
        return loss

    def _moved(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}

    def _settle(self) -> None:
        """Wait for the checkpoint before this one, and tell what became of it."""
        settled = self._checkpoints.settled()
        if self._log is None or settled is None:
            return
        if isinstance(settled, MillraceError):
            self._log.add("warning", text=f"a checkpoint was not saved ({settled.message}); the training goes on")
        else:
            self._log.add_checkpoint(settled)

    def _tell(
        self,
        log: TrainingLog,
        epoch: int,
        dev_cer: float | None,
        shares: list[_EpochShare],
        steps: int,
        before: dict[str, int] | None,
    ) -> EpochRecord:
        """Put an epoch into the log; gives its record."""
        after = None if before is None else self._totals(log, epoch)
        self._counted = after  # the next epoch counts from here, so that nothing is lost between two
        if before is None or after is None:
            before = after = {}
        digest = f"{joined(share.digest for share in shares):016x}"
        clips = sum(share.times.clips for share in shares)
        record = EpochRecord(
            epoch=epoch,
            attempt=log.attempt,
            train_loss=sum(share.loss for share in shares) / clips,
            dev_cer=dev_cer,
            clips=clips,
            clips_digest=digest,
            steps=steps,
            seconds=_seconds(shares[0].times),
            learning_rate=self._optimizer.param_groups[0]["lr"],
            # Those of a node that was lost meanwhile are lost with it.
            origin_bytes=max(0, after.get("origin_bytes", 0) - before.get("origin_bytes", 0)),
            cache_bytes=max(0, after.get("cache_bytes", 0) - before.get("cache_bytes", 0)),
            peer_bytes=max(0, after.get("peer_bytes", 0) - before.get("peer_bytes", 0)),
            workers=tuple(share.times for share in shares),
        )
        log.add_epoch(record)
        if self._seen_first is None:
            self._seen_first = digest
        elif self._seen_first != digest:
            log.add("warning", epoch=epoch, text=f"epoch {epoch} did not see the same clips as the first one")
        return record

    def _kill_once(self, epoch: int) -> None:
        """End the process of the last rank as a lost machine would, without a word, if that was not done before.

        Not before the last checkpoint is complete, so that what the next attempt resumes from is no matter of luck.
        """
        if self._workers.rank != self._workers.world - 1 or self._job.run.read_if_there(KILL_MARKER) is not None:
            return
        self._checkpoints.wait()
        content = json.dumps({"epoch": epoch, "pid": os.getpid(), "time": time.time()})
        self._job.run.write(KILL_MARKER, content.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    # --- hearing --------------------------------------------------------------------------------------

    def _hear(self, split: str, epoch: int) -> list[dict[str, Any]]:
        """What the model makes of a split, on every worker: dicts of what was `said`, `heard`, and whether the speaker
        was in train."""
        self._bare.eval()
        lines: list[dict[str, Any]] = []
        for batch in self._feed.batches(split, epoch=epoch, size=EVALUATION_BATCH):
            with self._precision.computing():
                transcripts = self._family.transcribe(self._bare, self._moved(batch.tensors))
            for name, said, heard, known in zip(batch.names, batch.sentences, transcripts, batch.known, strict=True):
                lines.append({"name": name, "said": said, "heard": heard, "known_speaker": known})
        every = [line for share in self._workers.gather(lines) for line in share]
        return sorted(every, key=lambda line: (str(line["said"]), str(line["name"])))

    def _finish(self) -> None:
        """Test the model, save it, and close the log. The metrics come last: where they are, the run is complete."""
        lines = self._hear("test", self._settings.epochs)
        self._settle()
        self._checkpoints.close()
        if self._log is None:
            return
        known = [line for line in lines if line["known_speaker"]]
        held_out = [line for line in lines if not line["known_speaker"]]
        half = TRANSCRIPTS // 2
        metrics: dict[str, Any] = {
            "test_cer": character_error_rate(lines),
            "test_cer_known_speakers": character_error_rate(known),
            "test_cer_held_out_speakers": character_error_rate(held_out),
            "test_clips": len(lines),
            "test_clips_held_out": len(held_out),
            "transcripts": [*known[:half], *held_out[: TRANSCRIPTS - half]],
        }
        run, model = self._job.run, self._job.run.at("model")
        files = patiently(lambda: self._family.save(self._bare, model))
        card = model_card(self._settings, self._family, final_epochs(self._log.events), metrics)
        patiently(lambda: model.write(CARD_NAME, card.encode("utf-8")))
        metrics["model_files"] = sorted([*files, CARD_NAME])
        content = json.dumps(metrics, ensure_ascii=False, indent=2)
        patiently(lambda: run.write(METRICS_NAME, content.encode("utf-8")))
        self._log.add(
            "end",
            epochs=self._settings.epochs,
            **{name: value for name, value in metrics.items() if name.startswith("test_")},
        )
        patiently(self._log.write)


def _seconds(times: WorkerTimes) -> float:
    return times.wait_seconds + times.compute_seconds + times.evaluate_seconds + times.stall_seconds


def _first_line(error: Exception) -> str:
    # Ray's errors bring a traceback along.
    return str(error).strip().partition("\n")[0]


def device_name(device: torch.device) -> str:
    """What people call the device: the model of a GPU."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


def character_error_rate(lines: list[dict[str, Any]]) -> float | None:
    """Edits a character of what was said, over all lines together; None if there is no line."""
    import jiwer

    if not lines:
        return None
    return float(jiwer.cer([line["said"] for line in lines], [line["heard"] for line in lines]))
