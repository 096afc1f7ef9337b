"""The training loop of one worker.

Each epoch trains on every clip of the worker's share once, transcribes the dev split together with the other workers, and
saves a checkpoint in the background. Any process may be killed at any time: new workers, in any number, restore the newest
complete checkpoint and repeat the epoch that was lost. The learning rate depends on the progress of the run only.

Shares differ in length. A worker without clips makes the step with a batch of silence that has no weight, and the gradient
is the mean over all clips of the step.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import jiwer
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from millrace import MillraceFileSystem
from millrace.checkpoint import PendingSave
from millrace.errors import RetryableError, UsageError

from .data import Batch
from .log import METRICS, Epoch, TrainingLog, WorkerTimes, clips_digest, open_checkpoints
from .models import Inputs, SpeechModel
from .options import Settings

GRADIENT_NORM = 1.0
TRANSCRIPTS = 8

Batches = Callable[[str], Iterator[Batch]]
Counters = Callable[[], dict[str, int]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker receives. `outputs` is the file system of the run's folder; `train_rows` the size of the split.

    `counters` returns running totals of the bytes that were read of the data set, on all nodes.
    """

    settings: Settings
    model: SpeechModel
    outputs: MillraceFileSystem
    train_rows: int
    counters: Counters


@dataclass
class _Share:
    """One worker's part of an epoch. `seconds` are named as in `WorkerTimes`."""

    loss: float = 0.0
    clips: int = 0
    steps: int = 0
    digest: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, what: str) -> None:
        """Add the time since the last lap to `what`."""
        now = time.perf_counter()
        self.seconds[what] += now - self._since
        self._since = now


class Training:
    """One worker of one attempt. Every worker creates one and calls `run`. `batches(split)` is the worker's own share."""

    def __init__(self, job: Job, batches: Batches, *, device: torch.device, node: str) -> None:
        self._job, self._settings, self._batches = job, job.settings, batches
        self._device, self._node = device, node
        torch.set_num_threads(self._settings.cpus)
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        # Counts and transcripts travel between CPUs; the default group may be one of GPUs.
        self._group: Any = dist.new_group(backend="gloo") if distributed else None
        self._world = dist.get_world_size() if distributed else 1
        self._rank = dist.get_rank() if distributed else 0
        self._bare = job.model.build().train().to(device)
        on_gpu = [device] if device.type == "cuda" else None
        self._net = DistributedDataParallel(self._bare, device_ids=on_gpu) if distributed else self._bare
        self._optimizer = torch.optim.AdamW(
            (parameter for parameter in self._bare.parameters() if parameter.requires_grad),
            lr=self._settings.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=self._settings.weight_decay,
        )
        self._dtype = _dtype(self._settings.precision, device)
        # Its scale is not saved: after a restart it adapts again within some steps.
        self._scaler = torch.amp.GradScaler(device.type, enabled=self._dtype == torch.float16)
        self._spare = job.model.spare_batch()
        self._manager = open_checkpoints(job.outputs, self._settings)
        self._pending: PendingSave | None = None
        self._blocked_seconds = 0.0
        self._read = dict.fromkeys(("origin_bytes", "cache_bytes", "peer_bytes"), 0)
        self._log = TrainingLog(job.outputs, self._settings.run) if self._rank == 0 else None

    def run(self) -> None:
        """Train from the newest checkpoint to the last epoch; then test the model and store it."""
        with self._manager:
            # No prefix of DDP and no positions of parameters: any number of workers can restore it.
            self._state = {"model": self._bare, "optimizer": self._optimizer}
            done = self._manager.restore(self._state, fallback=True) or 0
            if self._log is not None:
                self._log.add(
                    "start",
                    resumed_after=done,
                    workers=self._world,
                    parameters=sum(parameter.numel() for parameter in self._bare.parameters()),
                    device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU",
                    precision=str(self._dtype or torch.float32).removeprefix("torch."),
                )
                self._count_bytes()
            for epoch in range(done + 1, self._settings.epochs + 1):
                self._epoch(epoch)
            self._finish()

    # --- one epoch ------------------------------------------------------------------------------------

    def _epoch(self, epoch: int) -> None:
        share = _Share()
        share.seconds["blocked"] = self._blocked_seconds
        seed = self._settings.seed * 100_003 + epoch * 101 + self._rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # transformers draws its masks from it
        self._learn(epoch, share)
        dev_cer = character_error_rate(self._transcripts("dev"))
        share.lap("evaluate")
        self._wait_for_save()
        share.lap("blocked")
        self._record(epoch, dev_cer, share)
        began = time.perf_counter()
        self._pending = self._manager.save_async(
            epoch, self._state, {"dev_cer": dev_cer} if dev_cer is not None else {}
        )
        self._blocked_seconds = time.perf_counter() - began

    def _learn(self, epoch: int, share: _Share) -> None:
        """Train on every clip of this worker's share once."""
        settings, seen, losses = self._settings, 0, []
        self._net.train()
        batches = self._batches("train")
        while True:
            batch = next(batches, None)
            share.lap("wait")
            clips = len(batch.names) if batch is not None else 0
            step_clips = self._sum(clips)  # of all workers
            if step_clips == 0:
                break
            progress = (epoch - 1 + min(1.0, seen / self._job.train_rows)) / settings.epochs
            for group in self._optimizer.param_groups:
                group["lr"] = settings.learning_rate_at(progress)
            loss = self._step(self._spare if batch is None else batch.inputs, clips * self._world / step_clips)
            if batch is not None:
                losses.append(loss * clips)
                share.clips += clips
                share.steps += 1
                share.digest += clips_digest(batch.names)
            seen += step_clips
            if epoch == settings.kill_in_epoch and 2 * seen >= self._job.train_rows:
                self._kill_once(epoch)
            share.lap("compute")
        share.loss = float(torch.stack(losses).sum()) if losses else 0.0
        share.lap("compute")
        if not seen:
            raise UsageError(f"{settings.data}: no usable clip in train.tsv", next_step="check --max-seconds")

    def _step(self, inputs: Inputs, weight: float) -> torch.Tensor:
        """One step of the optimizer; returns the mean loss of this worker's clips. DDP averages over the workers."""
        inputs = self._on_device(inputs)
        with self._computing():
            loss = self._job.model.loss(self._net, inputs)
        self._optimizer.zero_grad()
        self._scaler.scale(loss * weight).backward()
        self._scaler.unscale_(self._optimizer)
        torch.nn.utils.clip_grad_norm_(self._bare.parameters(), GRADIENT_NORM)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.detach().float()

    def _record(self, epoch: int, dev_cer: float | None, share: _Share) -> None:
        """Write the epoch into the log. It is there before its checkpoint exists."""
        shares = self._gather((share.loss, share.digest, self._times(share)))
        if self._log is None:
            return
        times = [times for _, _, times in shares]
        clips = sum(worker.clips for worker in times)
        record = Epoch(
            epoch=epoch,
            attempt=self._log.attempt,
            train_loss=sum(loss for loss, _, _ in shares) / clips,
            dev_cer=dev_cer,
            clips=clips,
            clips_digest=f"{sum(digest for _, digest, _ in shares) % 2**64:016x}",
            workers=tuple(times),
            **self._count_bytes(),
        )
        self._log.add("epoch", **asdict(record))

    def _times(self, share: _Share) -> WorkerTimes:
        seconds = {f"{what}_seconds": share.seconds[what] for what in ("wait", "compute", "evaluate", "blocked")}
        return WorkerTimes(rank=self._rank, node=self._node, clips=share.clips, steps=share.steps, **seconds)

    def _count_bytes(self) -> dict[str, int]:
        """The bytes that were read of the data set since the last call."""
        before = self._read
        try:
            now = self._job.counters()
        except Exception as error:  # noqa: BLE001 - a figure that cannot be had must not end the training
            if self._log is not None:
                self._log.add("warning", text=f"bytes read are unknown and count in the next epoch ({error})")
            return dict.fromkeys(before, 0)
        self._read = {name: now[name] for name in before}
        return {name: max(0, self._read[name] - before[name]) for name in before}

    def _wait_for_save(self) -> None:
        """Wait until the checkpoint before is complete. If the storage was away, the run continues without it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        error = pending.exception()
        if isinstance(error, RetryableError):
            if self._log is not None:
                self._log.add("warning", text=f"the checkpoint of epoch {pending.step} was not saved ({error.message})")
        elif error is not None:
            raise error

    def _kill_once(self, epoch: int) -> None:
        """Kill the first worker's process without warning, once per run, after its last checkpoint is complete."""
        if self._log is None or any(event["event"] == "kill" for event in self._log.events):
            return
        if self._pending is not None:
            self._pending.exception()
        self._log.add("kill", epoch=epoch, pid=os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)

    # --- evaluation -----------------------------------------------------------------------------------

    def _transcripts(self, split: str) -> list[dict[str, Any]]:
        """What the model writes for each clip of a split (`name`, `said`, `heard`, `known_speaker`), of all workers."""
        self._bare.eval()
        lines: list[dict[str, Any]] = []
        for batch in self._batches(split):
            with self._computing():
                texts = self._job.model.transcribe(self._bare, self._on_device(batch.inputs))
            for name, said, heard, known in zip(batch.names, batch.sentences, texts, batch.known, strict=True):
                lines.append({"name": name, "said": said, "heard": heard, "known_speaker": known})
        every = [line for share in self._gather(lines) for line in share]
        return sorted(every, key=lambda line: str(line["name"]))

    def _finish(self) -> None:
        """Test the model and store it. The `end` event comes last: with it the run is complete."""
        lines = self._transcripts("test")
        self._wait_for_save()
        if self._log is None:
            return
        known = [line for line in lines if line["known_speaker"]]
        new = [line for line in lines if not line["known_speaker"]]
        metrics = {
            "test_cer": character_error_rate(lines),
            "test_cer_known_speakers": character_error_rate(known),
            "test_cer_held_out_speakers": character_error_rate(new),
            "test_clips": len(lines),
            "test_clips_held_out": len(new),
            "epochs": self._settings.epochs,
            "transcripts": [*known[: TRANSCRIPTS // 2], *new[: TRANSCRIPTS // 2]],
        }
        self._job.model.save(self._bare, self._job.outputs, f"{self._settings.run}/model")
        content = json.dumps(metrics, ensure_ascii=False, indent=2).encode()
        self._job.outputs.pipe_file(f"{self._settings.run}/{METRICS}", content)
        self._log.add("end", **{name: value for name, value in metrics.items() if name != "transcripts"})

    # --- helpers --------------------------------------------------------------------------------------

    def _computing(self) -> Any:
        """Around a forward pass: mixed precision if the run uses it."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, dtype=self._dtype)

    def _on_device(self, inputs: Inputs) -> Inputs:
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in inputs.items()}

    def _sum(self, number: int) -> int:
        """The sum of every worker's number."""
        if self._group is None:
            return number
        total = torch.tensor([number])
        dist.all_reduce(total, group=self._group)
        return int(total)

    def _gather(self, value: Any) -> list[Any]:
        """Every worker's value, by rank."""
        values: list[Any] = [value] * self._world
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values


def _dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The type of mixed precision; None: compute in float32."""
    if precision == "auto" and device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def character_error_rate(lines: list[dict[str, Any]]) -> float | None:
    """Edits per character over all lines together; None if there are no lines."""
    if not lines:
        return None
    return float(jiwer.cer([line["said"] for line in lines], [line["heard"] for line in lines]))
