"""The training log: one JSON object a line, in the run's folder, complete after every event.

Rank 0 writes it, whoever follows the run reads it. Object storage cannot append, so every event rewrites the file;
it has some ten lines an hour.

=========== ========================================================================================
`start`     A worker group began: attempt, the epoch it resumes after (0: from scratch), the machine.
`epoch`     An epoch ended and its checkpoint is complete: the fields of `EpochRecord`.
`end`       Training ended: the metrics.
=========== ========================================================================================
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

from millrace.demo.place import Place

LOG_NAME = "training.jsonl"


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """What one epoch did and what it cost. Seconds are wall time and add up to `seconds`, up to small change."""

    epoch: int
    attempt: int
    train_loss: float
    dev_cer: float | None
    clips: int
    steps: int
    seconds: float
    wait_seconds: float
    compute_seconds: float
    evaluate_seconds: float
    checkpoint_seconds: float
    checkpoint_bytes: int
    raw_bytes: int
    origin_bytes: int
    cache_bytes: int
    learning_rate: float

    @classmethod
    def of(cls, event: dict[str, Any]) -> EpochRecord:
        """The record in an `epoch` event."""
        return cls(**{field.name: event[field.name] for field in fields(cls)})


class TrainingLog:
    """The log of a run, for its one writer. Not thread-safe."""

    def __init__(self, run: Place) -> None:
        self._run = run
        self.events = read_events(run)
        self.attempt = sum(event["event"] == "start" for event in self.events)

    def add(self, event: str, **values: Any) -> None:
        """Append an event and make it visible."""
        self.events.append({"event": event, "time": round(time.time(), 3), "attempt": self.attempt, **values})
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.events)
        self._run.write(LOG_NAME, content.encode("utf-8"))

    def add_epoch(self, record: EpochRecord) -> None:
        """Append an `epoch` event."""
        self.add("epoch", **{name: value for name, value in asdict(record).items() if name != "attempt"})


def read_events(run: Place) -> list[dict[str, Any]]:
    """All events so far; none if the run has not begun."""
    content = run.read_if_there(LOG_NAME)
    return [json.loads(line) for line in (content or b"").decode("utf-8").splitlines()]


def final_epochs(events: list[dict[str, Any]]) -> list[EpochRecord]:
    """One record an epoch, in order. Where an epoch was done again after a restart, the last one counts."""
    records = {event["epoch"]: EpochRecord.of(event) for event in events if event["event"] == "epoch"}
    return [records[epoch] for epoch in sorted(records)]
