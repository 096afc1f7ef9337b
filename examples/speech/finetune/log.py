"""What a run records: `training.jsonl` in the run's folder, one JSON object per line, and the `Result` read from it.

========= ==============================================================================================
`start`   A group of workers began: `attempt`, `resumed_after` (the epoch of the restored checkpoint, or 0), `workers`.
`epoch`   An epoch ended, and its checkpoint begins: the fields of `Epoch`.
`kill`    `--kill-in-epoch` ended a process: `epoch`, `pid`.
`warning` Something that did not stop the run: `text`.
`end`     The run is complete.
========= ==============================================================================================
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from millrace import MillraceFileSystem
from millrace.checkpoint import CheckpointManager
from millrace.ray import location_of

from .options import Settings

LOG = "training.jsonl"
METRICS = "metrics.json"


@dataclass(frozen=True, kw_only=True)
class WorkerTimes:
    """Where the time of one worker went in an epoch, in seconds.

    `wait_seconds` for data, `compute_seconds` for steps, `evaluate_seconds` for the dev split, and `blocked_seconds` by
    the save of the checkpoint of the epoch before.
    """

    rank: int
    node: str
    clips: int
    steps: int
    wait_seconds: float
    compute_seconds: float
    evaluate_seconds: float
    blocked_seconds: float

    @property
    def seconds(self) -> float:
        """The whole epoch."""
        return self.wait_seconds + self.compute_seconds + self.evaluate_seconds + self.blocked_seconds


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch over all workers. Two epochs with the same `clips_digest` saw the same clips, in whatever order.

    The bytes are those of the data set on all nodes: from the origin, from the reading node's own disk, from another node's.
    """

    epoch: int
    attempt: int
    train_loss: float
    dev_cer: float | None
    clips: int
    clips_digest: str
    origin_bytes: int
    cache_bytes: int
    peer_bytes: int
    workers: tuple[WorkerTimes, ...]

    @property
    def seconds(self) -> float:
        """The time of the first worker."""
        return self.workers[0].seconds

    def mean_seconds(self, what: str) -> float:
        """The mean over the workers of one part of the time, such as `wait`."""
        return sum(getattr(worker, f"{what}_seconds") for worker in self.workers) / len(self.workers)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, as the checkpoint manager describes it."""

    kind: str
    stored_bytes: int
    raw_bytes: int


class TrainingLog:
    """The log of a run, for one writer. Object storage cannot append, so every event rewrites the small file."""

    def __init__(self, fs: MillraceFileSystem, run: str) -> None:
        self._fs, self._run = fs, run
        self.events = read_events(fs, run)
        self.attempt = sum(event["event"] == "start" for event in self.events)

    def add(self, event: str, **values: Any) -> None:
        """Append an event."""
        self.events.append({"event": event, "time": round(time.time(), 3), "attempt": self.attempt, **values})
        self._fs.pipe_file(f"{self._run}/{LOG}", "".join(json.dumps(line) + "\n" for line in self.events).encode())


def read_events(fs: MillraceFileSystem, run: str) -> list[dict[str, Any]]:
    """All events of a run so far."""
    content = read_if_exists(fs, f"{run}/{LOG}")
    return [json.loads(line) for line in (content or b"").decode().splitlines()]


def read_if_exists(fs: MillraceFileSystem, url: str) -> bytes | None:
    """The content of a file, or None."""
    try:
        return bytes(fs.cat_file(url))
    except FileNotFoundError:
        return None


def open_checkpoints(fs: MillraceFileSystem, settings: Settings) -> CheckpointManager:
    """The checkpoints of a run, with the endpoint and credentials of its file system."""
    url, options = location_of(fs, f"{settings.run.removeprefix('s3://')}/checkpoints")
    return CheckpointManager(url, keep=settings.keep, target_options=options)


def clips_digest(names: Iterable[str]) -> int:
    """A number for a set of names that does not depend on their order. Digests of parts can be added, modulo 2**64."""
    return sum(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") for name in names) % 2**64


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run did. `checkpoints` are those that exist, by epoch."""

    settings: Settings
    events: list[dict[str, Any]]
    epochs: list[Epoch]
    metrics: dict[str, Any]
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)

    @classmethod
    def read(cls, settings: Settings, fs: MillraceFileSystem) -> Result:
        """The result of a complete run."""
        events = read_events(fs, settings.run)
        with open_checkpoints(fs, settings) as manager:
            infos = {step: manager.metadata(step) for step in manager.steps()}
        return cls(
            settings=settings,
            events=events,
            epochs=epochs_of(events),
            metrics=json.loads(fs.cat_file(f"{settings.run}/{METRICS}")),
            checkpoints={
                step: Checkpoint(kind=info.kind or "", stored_bytes=info.stored_bytes, raw_bytes=info.raw_bytes)
                for step, info in infos.items()
            },
        )

    @property
    def kill(self) -> dict[str, Any] | None:
        """The `kill` event; None if no process was killed on purpose."""
        return next((event for event in self.events if event["event"] == "kill"), None)

    @property
    def recovery_seconds(self) -> float | None:
        """The time from the kill until new workers had restored the last checkpoint."""
        if self.kill is None:
            return None
        starts = (event["time"] for event in self.events if event["event"] == "start")
        return next((float(start - self.kill["time"]) for start in starts if start > self.kill["time"]), None)

    @property
    def restarts(self) -> int:
        """How often new workers took over."""
        return max(0, sum(event["event"] == "start" for event in self.events) - 1)

    def restart_notes(self) -> dict[int, str]:
        """What to print before an epoch that new workers began with, by epoch."""
        notes: dict[int, str] = {}
        killed = self.kill
        for event in (event for event in self.events if event["event"] == "start" and event["attempt"]):
            after = event["resumed_after"]
            how = f"resumed from the checkpoint of epoch {after}" if after else "began again: there was no checkpoint"
            if killed is not None and event["time"] > killed["time"]:
                note = f"worker killed on purpose in epoch {killed['epoch']}; {self.recovery_seconds:.0f} s later {how}"
                killed = None
            else:
                note = f"the training restarted: {how}"
            notes[after + 1] = f"{notes[after + 1]}; {note}" if after + 1 in notes else note
        return notes

    @property
    def same_clips(self) -> list[bool]:
        """For each epoch, whether it saw the same clips as the first."""
        return [epoch.clips_digest == self.epochs[0].clips_digest for epoch in self.epochs]


def epochs_of(events: list[dict[str, Any]]) -> list[Epoch]:
    """The epochs in order. If an epoch was done again after a restart, the last record counts."""
    last = {event["epoch"]: event for event in events if event["event"] == "epoch"}
    return [
        Epoch(
            **{
                **{name: last[number][name] for name in Epoch.__dataclass_fields__},
                "workers": tuple(WorkerTimes(**worker) for worker in last[number]["workers"]),
            }
        )
        for number in sorted(last)
    ]


def line_of(event: dict[str, Any]) -> str | None:
    """One line of text for an event; None if it needs none."""
    if event["event"] == "start":
        if event["resumed_after"]:
            return f"         resumed from the checkpoint of epoch {event['resumed_after']}"
        if event["attempt"]:
            return "         began again: there was no checkpoint"
        return f"training {event['parameters'] / 1e6:.2f} M parameters on {event['workers']} worker(s)"
    if event["event"] == "kill":
        return f"         killed training process {event['pid']} on purpose in epoch {event['epoch']}"
    if event["event"] == "warning":
        return f"         {event['text']}"
    if event["event"] == "epoch":
        [epoch] = epochs_of([event])
        peers = f"  {epoch.peer_bytes / 1e6:6.2f} MB from other nodes" if epoch.peer_bytes else ""
        return (
            f"epoch {epoch.epoch:3d}  loss {epoch.train_loss:6.3f}  dev CER {percent(epoch.dev_cer):>6}  "
            f"{epoch.seconds:5.1f} s  {epoch.origin_bytes / 1e6:6.2f} MB from origin  "
            f"{epoch.cache_bytes / 1e6:6.2f} MB from cache{peers}"
        )
    return None


def percent(rate: float | None) -> str:
    """A share of 1 as a percentage, or a dash."""
    return "-" if rate is None else f"{rate:.1%}"
