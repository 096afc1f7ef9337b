"""Decisions about deltas: the base of a save, and the form of a chunk. Pure; no torch, no I/O.

A *delta* contains the difference of a chunk to the same chunk of an earlier checkpoint, its base. A *reference* names the
base's stored chunk if nothing has changed. Deltas make a checkpoint smaller and its restore more expensive, so both
decisions limit the bytes that a restore reads: by default twice the bytes of a full checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millrace.checkpoint.codec.chunks import Array

ChunkKey = tuple[tuple[str, tuple[int, ...] | None, int, int], ...]
"""The content of a chunk: for each part the key, the shard's offsets (None for an object), and its bytes `[start, stop)`."""

RESTORE_LIMIT = 2.0
"""Default maximum of the bytes that a restore reads, in sizes of a full checkpoint."""

# A delta that saves less than this is not worth a longer chain.
_WORTH = 0.95
# Size of the sample on which forms are compared, and the number of its pieces, which are spread over the chunk.
_SAMPLE_BYTES, _SAMPLE_PIECES = 16 << 10, 8
# Expected size of the first delta, as a share of a full save.
_FIRST_GUESS = 0.5
# A delta grows with the number of saves since its base like this power of it: of bf16 weights .09 after one step were .2
# after 10 and .43 after 100, of fp32 weights .5, .6 and .7. The steeper one counts.
_GROWTH = 1 / 3


# --- for a chunk ----------------------------------------------------------------------------------


def sample(data: Array, width: int) -> Array:
    """A sample of a chunk: whole elements of `width` bytes from fixed places; all of a small chunk."""
    if data.size <= 2 * _SAMPLE_BYTES:
        return data
    words = data.reshape(-1, width)
    piece = _SAMPLE_BYTES // _SAMPLE_PIECES // width
    stride = (len(words) - piece) // (_SAMPLE_PIECES - 1)
    pieces = [words[number * stride : number * stride + piece] for number in range(_SAMPLE_PIECES)]
    return np.concatenate(pieces).reshape(-1)


def worth_a_delta(*, delta_bytes: float, full_bytes: float, chain_bytes: int, root_bytes: int, limit: float) -> bool:
    """Whether to store a chunk as a delta of `delta_bytes` instead of whole in `full_bytes`.

    `chain_bytes` is the cost of restoring its base, `root_bytes` that of the chain's root. Delta and base together may cost
    `limit` times a full chunk, for which the smaller of `full_bytes` and `root_bytes` counts.
    """
    return delta_bytes <= _WORTH * full_bytes and chain_bytes + delta_bytes <= limit * min(full_bytes, root_bytes)


# --- for a save -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord:
    """One save of a run. `base` of a delta: the save before it, or the last full one (the *anchor*).

    `raw_bytes` of the state, `own_bytes` in the save's own files, `restore_bytes` that a whole restore reads. `is_refused`:
    the local disk refused the save, which is at the origin only.
    """

    directory: str
    kind: Literal["full", "delta"]
    base: Literal["previous", "anchor"] | None
    raw_bytes: int
    own_bytes: int
    restore_bytes: int
    is_refused: bool = False


def choose_base(
    history: Sequence[SaveRecord],
    *,
    full_every: int,
    previous_near: bool,
    anchor_near: bool,
    has_independent: bool = True,
    limit: float = RESTORE_LIMIT,
) -> Literal["full", "previous", "anchor"]:
    """Choose the base of the next save, by sizes that are known before it is written.

    `history` are the saves since the last full one, which is its first. `*_near`: whether the bytes of that base are near.
    `has_independent`: whether the run has a checkpoint that shares no file with `history`. Without one the save is full, so
    that damage to one file cannot make all checkpoints unreadable.

    A save is full at least every `full_every` saves (1: always), and if neither base keeps a restore within `limit` times
    the bytes of the last full save. Of two possible bases the one with the smaller delta is used.
    """
    if full_every <= 1 or not history or len(history) >= full_every or not has_independent:
        return "full"
    full_bytes = history[0].restore_bytes
    own = {"previous": _expected_bytes(history, "previous"), "anchor": _expected_bytes(history, "anchor")}
    restore = {"previous": history[-1].restore_bytes + own["previous"], "anchor": full_bytes + own["anchor"]}
    # Of a single earlier save both are the same, and the first name wins.
    near: dict[Literal["previous", "anchor"], bool] = {"previous": previous_near, "anchor": anchor_near}
    fitting = [name for name, is_near in near.items() if is_near and restore[name] <= limit * full_bytes]
    fitting = [name for name in fitting if own[name] <= _WORTH * full_bytes]
    return min(fitting, key=own.__getitem__, default="full")


def _expected_bytes(history: Sequence[SaveRecord], base: Literal["previous", "anchor"]) -> float:
    """The expected size of the next delta against this base: that of the last one, scaled by the distance of the base.

    Without a delta against this base, the last one against the other base counts; without any, a share of the full save.
    """
    deltas = [(number, record) for number, record in enumerate(history) if record.kind == "delta"]
    if not deltas:
        return _FIRST_GUESS * history[0].restore_bytes
    distances = {number: 1 if record.base == "previous" else number for number, record in deltas}
    # The first delta's base is both.
    alike = [number for number, record in deltas if record.base == base or number == 1]
    number = alike[-1] if alike else deltas[-1][0]
    wanted = 1 if base == "previous" else len(history)
    growth: float = (wanted / distances[number]) ** _GROWTH
    return history[number].own_bytes * growth
