"""Tools for existing checkpoints: describe, verify, diff, export.

Key terms:
- contents: a checkpoint as a set of tensors and objects, of Millrace's format or torch's own (`reading/contents.py`).
- damage: a chunk or file that is not as it was written.
- target: the file or directory that an export writes.

Each command of `millrace checkpoints` has a function here. Start reading in `verifying.py`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.checkpoint.reading.hugging_face import read_hugging_face
from millrace.checkpoint.storage.manifests import (
    CheckpointSummary,
    LoadedManifest,
    read_newest,
    read_stock_metadata,
    summarize,
)
from millrace.checkpoint.storage.storage import open_storage
from millrace.errors import CheckpointNotFoundError
from millrace.origin import Readable
from millrace.runtime.pipeline import default_threads


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
    storage = open_storage(url, target_options, origin=origin)
    try:
        return summarize(storage, read_newest(storage))
    except CheckpointNotFoundError as missing:
        if importlib.util.find_spec("torch") is not None and read_stock_metadata(storage) is not None:
            # Torch takes a second to load, so it is imported only here.
            from millrace.checkpoint.storage.stock_metadata import summarize_stock

            return summarize_stock(storage)
        try:
            opened = read_hugging_face(storage, default_threads())
        except CheckpointNotFoundError:
            raise missing from missing.__cause__
        return summarize(storage, LoadedManifest(opened.manifest, 0, ""))
