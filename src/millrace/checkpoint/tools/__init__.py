"""Tools for existing checkpoints: describe, verify, diff, export.

Key terms:
- contents: a checkpoint as a set of tensors and objects, of Millrace's format or torch's own (`reading/contents.py`).
- damage: a chunk or file that is not as it was written.
- target: the file or directory that an export writes.

Each command of `millrace checkpoints` has a function here. Start reading in `verifying.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.checkpoint.reading.opening import summary_of
from millrace.checkpoint.storage.manifests import CheckpointSummary
from millrace.checkpoint.storage.storage import open_storage
from millrace.origin import Readable


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkProgress:
    """The progress of a tool: `done_bytes` of `total_bytes`, and the number of `problems` found so far."""

    done_bytes: int
    total_bytes: int
    problems: int = 0


def describe(
    url: str | os.PathLike[str],
    target_options: Mapping[str, Any] | None = None,
    *,
    origin: Readable | None = None,
) -> CheckpointSummary:
    """Summarise a checkpoint from its manifest; its data is not read.

    Also a Hugging Face directory, and, if torch is installed, a checkpoint of torch's own writer. Raises errors of
    `read_manifest` and of origins.
    """
    return summary_of(open_storage(url, target_options, origin=origin))
