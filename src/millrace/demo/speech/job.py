"""What the driver and the workers of a run agree on. Importing it loads neither torch nor ray."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.demo.place import Place
from millrace.demo.speech.settings import SpeechSettings

METRICS_NAME = "metrics.json"
KILL_MARKER = "chaos/killed.json"

_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}

Counters = Callable[[], dict[str, int]]


def no_counters() -> dict[str, int]:
    """Counters for a file system that counts nothing."""
    return {}


def be_quiet() -> None:
    """Before transformers is imported: a training says what it does itself, and it has no use for progress bars."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, kw_only=True)
class SpeechJob:
    """What travels to the workers. `run` is where everything lands; `train_rows` is the size of the whole split.

    `counters` gives running totals of `origin_bytes`, `cache_bytes` and `peer_bytes` of the data set's file system, over
    all processes and nodes; an epoch's are the difference, so nothing that was read may be counted later.
    `checkpoint_options` may hold secrets; they travel in the pickle only.
    """

    settings: SpeechSettings
    run: Place
    train_rows: int
    counters: Counters = no_counters
    checkpoint_options: dict[str, Any] | None = field(default=None, repr=False)
