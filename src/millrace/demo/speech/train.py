"""The training loop that Ray Train runs in every worker process.

It reads its clips through Ray Data, saves a checkpoint every epoch and starts where the newest complete one ended, so
the process may be killed at any time. Everything that differs from epoch to epoch (rate, shuffle, random numbers) is
a function of the seed and the epoch: a resumed run needs nothing but the model, the optimizer and the epoch's number.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray.train
import ray.train.torch
import torch

from millrace.demo.speech.checkpoints import EpochCheckpoints
from millrace.demo.speech.data import collate
from millrace.demo.speech.job import KILL_MARKER, METRICS_NAME, SpeechJob
from millrace.demo.speech.log import EpochRecord, TrainingLog
from millrace.demo.speech.model import build_model, forward, save_model, transcribe
from millrace.errors import UsageError

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


def train_loop(config: dict[str, Any]) -> None:
    """Train one worker's share. `config["job"]` is a `SpeechJob`; runs inside Ray Train."""
    job: SpeechJob = config["job"]
    torch.set_num_threads(job.settings.threads_per_worker)
    context = ray.train.get_context()
    log = TrainingLog(job.run) if context.get_world_rank() == 0 else None

    model = ray.train.torch.prepare_model(build_model(job.settings))
    optimizer = torch.optim.AdamW(
        (parameter for parameter in model.parameters() if parameter.requires_grad),
        lr=job.settings.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=job.settings.weight_decay,
    )
    checkpoints = EpochCheckpoints(job.run, target_options=job.checkpoint_options)
    done = checkpoints.restore(model, optimizer)
    if log is not None:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        log.add("start", resumed_after=done, workers=context.get_world_size(), parameters=parameters)
    worker = _Worker(job, model, optimizer, checkpoints, log)
    for epoch in range(done + 1, job.settings.epochs + 1):
        worker.epoch(epoch)
    worker.finish()


class _Worker:
    """One rank of one attempt. The first rank also evaluates, logs and saves the final model."""

    def __init__(
        self,
        job: SpeechJob,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        checkpoints: EpochCheckpoints,
        log: TrainingLog | None,
    ) -> None:
        self._job = job
        self._settings = job.settings
        self._model = model
        # The others wait for the first at the next collective call; only its own, unwrapped model may run alone.
        self._bare: torch.nn.Module = getattr(model, "module", model)
        self._optimizer = optimizer
        self._checkpoints = checkpoints
        self._log = log
        self._device = ray.train.torch.get_device()
        context = ray.train.get_context()
        self._rank, self._world = context.get_world_rank(), context.get_world_size()

    def epoch(self, epoch: int) -> None:
        """Train on every clip of this worker's share once, evaluate, save, log and report."""
        before = self._job.counters()
        watch = _Stopwatch()
        torch.manual_seed(self._settings.seed * 100_003 + epoch * 101 + self._rank)
        losses, clips = self._train(epoch, watch)
        if not losses:
            raise UsageError(
                f"no clip of {self._settings.data_url} is usable for training",
                next_step=f"check max_seconds ({self._settings.max_seconds:g}) and the data set",
            )
        loss = float(torch.stack(losses).mean())
        dev_cer = None
        if self._log is not None:
            dev_cer = character_error_rate(self._hear("dev"))
        watch.lap("evaluate")
        raw_bytes, checkpoint_bytes = self._checkpoints.save(epoch, self._model, self._optimizer)
        watch.lap("checkpoint")
        if self._log is not None:
            after = self._job.counters()
            self._log.add_epoch(
                EpochRecord(
                    epoch=epoch,
                    attempt=self._log.attempt,
                    train_loss=loss,
                    dev_cer=dev_cer,
                    clips=clips * self._world,
                    steps=len(losses),
                    seconds=sum(watch.spent.values()),
                    wait_seconds=watch.spent.get("wait", 0.0),
                    compute_seconds=watch.spent.get("compute", 0.0),
                    evaluate_seconds=watch.spent["evaluate"],
                    checkpoint_seconds=watch.spent["checkpoint"],
                    checkpoint_bytes=checkpoint_bytes,
                    raw_bytes=raw_bytes,
                    origin_bytes=after.get("origin_bytes", 0) - before.get("origin_bytes", 0),
                    cache_bytes=after.get("cache_bytes", 0) - before.get("cache_bytes", 0),
                    learning_rate=self._optimizer.param_groups[0]["lr"],
                )
            )
        ray.train.report({"epoch": epoch, "train_loss": loss, "dev_cer": dev_cer})

    def _train(self, epoch: int, watch: _Stopwatch) -> tuple[list[torch.Tensor], int]:
        settings = self._settings
        share = max(1, self._job.train_rows // self._world)
        losses: list[torch.Tensor] = []
        clips = 0
        self._model.train()
        for batch in self._batches("train", settings.batch_size):
            watch.lap("wait")
            progress = (epoch - 1 + min(1.0, clips / share)) / settings.epochs
            for group in self._optimizer.param_groups:
                group["lr"] = settings.learning_rate_at(progress)
            loss = forward(self._model, batch, device=self._device, labels=True).loss
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRADIENT_NORM)
            self._optimizer.step()
            losses.append(loss.detach())
            clips += len(batch["sentences"])
            if epoch == settings.kill_in_epoch and 2 * clips >= share:
                self._kill_once(epoch)
            watch.lap("compute")
        return losses, clips

    def _batches(self, split: str, size: int) -> Iterator[dict[str, Any]]:
        shard = ray.train.get_dataset_shard(split)
        batches: Iterator[dict[str, Any]] = iter(
            shard.iter_torch_batches(batch_size=size, collate_fn=collate, prefetch_batches=2)
        )
        return batches

    def _kill_once(self, epoch: int) -> None:
        """End the process of the last rank as a lost machine would, without a word, if that was not done before."""
        if self._rank != self._world - 1 or self._job.run.read_if_there(KILL_MARKER) is not None:
            return
        content = json.dumps({"epoch": epoch, "pid": os.getpid(), "time": time.time()})
        self._job.run.write(KILL_MARKER, content.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self, split: str) -> list[dict[str, Any]]:
        """What the model makes of a split: dicts of `said`, `heard` and whether the speaker was in train."""
        self._bare.eval()
        lines: list[dict[str, Any]] = []
        for batch in self._batches(split, EVALUATION_BATCH):
            transcripts = transcribe(self._bare, batch, device=self._device)
            for said, heard, known in zip(batch["sentences"], transcripts, batch["heard"], strict=True):
                lines.append({"said": said, "heard": heard, "known_speaker": known})
        return sorted(lines, key=lambda line: str(line["said"]))

    def finish(self) -> None:
        """Test the model, save it, and close the log. The metrics come last: where they are, the run is complete."""
        if self._log is None:
            return
        lines = self._hear("test")
        known = [line for line in lines if line["known_speaker"]]
        held_out = [line for line in lines if not line["known_speaker"]]
        files = save_model(self._bare, self._settings, self._job.run.at("model"))
        half = TRANSCRIPTS // 2
        metrics = {
            "test_cer": character_error_rate(lines),
            "test_cer_known_speakers": character_error_rate(known),
            "test_cer_held_out_speakers": character_error_rate(held_out),
            "test_clips": len(lines),
            "test_clips_held_out": len(held_out),
            "model_files": files,
            "transcripts": [*known[:half], *held_out[: TRANSCRIPTS - half]],
        }
        content = json.dumps(metrics, ensure_ascii=False, indent=2)
        self._job.run.write(METRICS_NAME, content.encode("utf-8"))
        self._log.add("end", **{name: value for name, value in metrics.items() if name.startswith("test_")})


def character_error_rate(lines: list[dict[str, Any]]) -> float | None:
    """Edits a character of what was said, over all lines together; None if there is no line."""
    import jiwer

    if not lines:
        return None
    return float(jiwer.cer([line["said"] for line in lines], [line["heard"] for line in lines]))
