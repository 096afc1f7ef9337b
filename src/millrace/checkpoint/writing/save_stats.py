"""What one rank wrote in one save, in numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millrace.checkpoint.format.chains import restore_bytes
from millrace.checkpoint.format.tables import NO_BASE
from millrace.checkpoint.writing.packing import RankData, StoredItem


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStats:
    """What one rank wrote in one save: bytes before and after the codec, chunks, and seconds from first to last.

    `stored_bytes` are those of its own files; `restore_bytes` all that a read of everything needs, in files of earlier
    checkpoints as well. `chunks` are stored whole (`chunks_full`), as a difference to an earlier checkpoint
    (`chunks_delta`), or are the same as there (`chunks_referenced`).
    """

    raw_bytes: int
    stored_bytes: int
    chunks: int
    seconds: float
    chunks_full: int = 0
    chunks_delta: int = 0
    chunks_referenced: int = 0
    restore_bytes: int = 0


def stats_of(data: RankData, stored: Sequence[StoredItem], seconds: float) -> SaveStats:
    """Add up what `write_items` returned."""
    base = data.chunks["base"][data.foreign :]
    in_sibling = np.array([file.name.startswith("../") for file in data.files], dtype=bool)
    referenced = in_sibling[data.chunks["file"][data.foreign :]]
    delta = (base != NO_BASE) & ~referenced
    return SaveStats(
        raw_bytes=sum(item.nbytes for item in stored),
        stored_bytes=sum(file.size for file in data.own_files),
        chunks=len(base),
        seconds=seconds,
        chunks_full=len(base) - int(referenced.sum()) - int(delta.sum()),
        chunks_delta=int(delta.sum()),
        chunks_referenced=int(referenced.sum()),
        restore_bytes=restore_bytes(data.chunks),
    )
