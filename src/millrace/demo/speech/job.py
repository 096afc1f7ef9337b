"""What the driver and the workers of a run agree on. Importing it loads neither torch nor ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.demo.place import Place
from millrace.demo.speech.settings import SpeechSettings

METRICS_NAME = "metrics.json"
KILL_MARKER = "chaos/killed.json"

Counters = Callable[[], dict[str, int]]


def no_counters() -> dict[str, int]:
    """Counters for a file system that counts nothing."""
    return {}


@dataclass(frozen=True, kw_only=True)
class SpeechJob:
    """What travels to the workers. `run` is where everything lands; `train_rows` is the size of the whole split.

    `counters` gives running totals of `origin_bytes` and `cache_bytes` of the data set's file system, over all
    processes. `checkpoint_options` may hold secrets; they travel in the pickle only.
    """

    settings: SpeechSettings
    run: Place
    train_rows: int
    counters: Counters = no_counters
    checkpoint_options: dict[str, Any] | None = field(default=None, repr=False)
