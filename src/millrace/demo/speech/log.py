"""The training log: one JSON object a line, in the run's folder, complete after every event.

Rank 0 writes it, whoever follows the run reads it. Object storage cannot append, so every event rewrites the file;
it has some ten lines an hour.

============ =======================================================================================
`start`      A worker group began: attempt, the epoch it resumes after (0: from scratch), `workers`, `parameters`.
`epoch`      An epoch ended, and its checkpoint begins: the fields of `EpochRecord` but the last.
`checkpoint` An epoch's checkpoint is complete in storage: the fields of `CheckpointRecord`. Comes while the next epoch runs.
`warning`    Something that the run outlives, but somebody should know: `text`.
`end`        Training ended: how many `epochs` it had, and the metrics.
============ =======================================================================================
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any

from millrace.demo.place import Place
from millrace.errors import RetryableError

LOG_NAME = "training.jsonl"

_RETRY_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class WorkerTimes:
    """Where one worker's time went in an epoch. Seconds are wall time and add up to the epoch's, up to small change.

    `wait_seconds` for data, `compute_seconds` for forward, backward and the exchange of gradients, `evaluate_seconds` on its
    share of the dev split and waiting for the others', `stall_seconds` until the checkpoint before was complete and for
    the copy of the state that begins this one's.
    """

    rank: int
    node: str
    clips: int
    steps: int
    wait_seconds: float
    compute_seconds: float
    evaluate_seconds: float
    stall_seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint that is complete. `seconds` from the copy until it was durable, most of it beside the training."""

    epoch: int
    kind: str
    checkpoint_bytes: int
    raw_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """What one epoch did and what it cost, over all workers.

    `clips_digest` is the same for two epochs that saw the same clips, each as often, in whatever order (`digest_of`).
    The bytes are those of the data set, over all nodes: from the origin, from the own disk of the node that read them, and
    from another node's. `seconds` are the first worker's.
    """

    epoch: int
    attempt: int
    train_loss: float
    dev_cer: float | None
    clips: int
    clips_digest: str
    steps: int
    seconds: float
    learning_rate: float
    origin_bytes: int
    cache_bytes: int
    peer_bytes: int
    workers: tuple[WorkerTimes, ...]
    checkpoint: CheckpointRecord | None = None
    """None while it is on its way, and where it never became complete."""

    @property
    def local_share(self) -> float | None:
        """The share of the bytes read that lay on the disk of the node that read them; None where nothing was read."""
        total = self.origin_bytes + self.cache_bytes + self.peer_bytes
        return self.cache_bytes / total if total else None

    @classmethod
    def of(cls, event: Mapping[str, Any], checkpoint: Mapping[str, Any] | None = None) -> EpochRecord:
        """The record in an `epoch` event, with that of its `checkpoint` event, if there is one."""
        values = {field.name: event[field.name] for field in fields(cls) if field.name not in ("workers", "checkpoint")}
        return cls(
            **values,
            workers=tuple(WorkerTimes(**worker) for worker in event["workers"]),
            checkpoint=None if checkpoint is None else _checkpoint_of(checkpoint),
        )


def _checkpoint_of(event: Mapping[str, Any]) -> CheckpointRecord:
    return CheckpointRecord(**{field.name: event[field.name] for field in fields(CheckpointRecord)})


def digest_of(names: Iterable[str]) -> int:
    """A number for a bag of names that does not depend on their order: 64-bit hashes, added up modulo 2**64.

    The digest of two bags together is the sum of both modulo 2**64 (`joined`), so every worker can make its own.
    """
    return joined(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") for name in names)


def joined(digests: Iterable[int]) -> int:
    """The digest of several bags together."""
    return sum(digests) % 2**64


class TrainingLog:
    """The log of a run, for its one writer. Not thread-safe."""

    def __init__(self, run: Place) -> None:
        self._run = run
        self.events = read_events(run)
        self.attempt = sum(event["event"] == "start" for event in self.events)
        self._unwritten = False
        self._next_try = 0.0

    def add(self, event: str, **values: Any) -> None:
        """Append an event and make it visible; while the storage is away it stays here, and goes out with the next one
        or by `write_again`."""
        self.events.append({"event": event, "time": round(time.time(), 3), "attempt": self.attempt, **values})
        self._unwritten = True
        self._try_to_write()

    def write_again(self) -> None:
        """Make visible what the storage has refused so far, if there is something and the last try is a while ago.

        For the training loop, often: until it is written, an event is lost with this process.
        """
        if self._unwritten and time.monotonic() >= self._next_try:
            self._try_to_write()

    def _try_to_write(self) -> None:
        began = time.monotonic()
        try:
            self.write()
        except RetryableError:
            # A try may itself take a minute, for which the training stands still.
            self._next_try = time.monotonic() + max(_RETRY_SECONDS, 10 * (time.monotonic() - began))

    def write(self) -> None:
        """Make all events visible. Raises what the storage raises."""
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.events)
        self._run.write(LOG_NAME, content.encode("utf-8"))
        self._unwritten = False

    def add_epoch(self, record: EpochRecord) -> None:
        """Append an `epoch` event; its checkpoint gets an event of its own."""
        self.add("epoch", **_values_of(record))

    def amend_epoch(self, record: EpochRecord) -> None:
        """Put `record` in the place of the one that this attempt gave for the same epoch; visible with the next event."""
        mine = {"event": "epoch", "epoch": record.epoch, "attempt": self.attempt}
        told = next(event for event in reversed(self.events) if mine.items() <= event.items())
        told.update(_values_of(record))

    def add_checkpoint(self, record: CheckpointRecord) -> None:
        """Append a `checkpoint` event."""
        self.add("checkpoint", **asdict(record))


def _values_of(record: EpochRecord) -> dict[str, Any]:
    """What an `epoch` event has beside what every event has."""
    return {name: value for name, value in asdict(record).items() if name not in ("attempt", "checkpoint")}


def read_events(run: Place) -> list[dict[str, Any]]:
    """All events so far; none if the run has not begun."""
    content = run.read_if_there(LOG_NAME)
    return [json.loads(line) for line in (content or b"").decode("utf-8").splitlines()]


def final_epochs(events: list[dict[str, Any]]) -> list[EpochRecord]:
    """One record an epoch, in order. Where an epoch was done again after a restart, the last one counts."""
    epochs: dict[int, dict[str, Any]] = {}
    checkpoints: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "epoch":
            epochs[event["epoch"]] = event
            checkpoints.pop(event["epoch"], None)
        elif event["event"] == "checkpoint":
            checkpoints[event["epoch"]] = event
    return [EpochRecord.of(epochs[epoch], checkpoints.get(epoch)) for epoch in sorted(epochs)]
