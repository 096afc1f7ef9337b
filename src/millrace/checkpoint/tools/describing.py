"""What a checkpoint holds, in short, whoever wrote it. Torch is loaded only for what torch's own writer saved."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from millrace.checkpoint.places.manifests import CheckpointSummary, read_newest, read_stock_metadata, summarize
from millrace.checkpoint.places.storage import open_storage
from millrace.errors import CheckpointNotFoundError
from millrace.origin import Readable


def describe(
    url: str | os.PathLike[str],
    target_options: Mapping[str, Any] | None = None,
    *,
    origin: Readable | None = None,
) -> CheckpointSummary:
    """Read a checkpoint's manifest and say in short what it holds; its data is not read.

    Describes what torch's own writer saved, too, where torch is installed. Raises as `read_manifest`, and as every origin.
    """
    storage = open_storage(url, target_options, origin=origin)
    try:
        return summarize(storage, read_newest(storage))
    except CheckpointNotFoundError:
        if importlib.util.find_spec("torch") is None or read_stock_metadata(storage) is None:
            raise
        # Only here: torch takes a second to load.
        from millrace.checkpoint.places.stock_metadata import summarize_stock

        return summarize_stock(storage)
