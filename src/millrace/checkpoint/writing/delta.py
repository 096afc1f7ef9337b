"""Decisions about deltas: for a save which base, for a chunk which form. Pure; no torch, no I/O.

A *delta* holds the difference of a chunk to the same chunk of an earlier checkpoint, its base; a *reference* names the
base's stored chunk, when nothing has changed. Deltas make a checkpoint smaller and its restore dearer, so both decisions
bound what a restore reads: twice the bytes of a full checkpoint, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millrace.checkpoint.codec.planes import Array

ChunkKey = tuple[tuple[str, tuple[int, ...] | None, int, int], ...]
"""What a chunk holds: for each part the key, the shard's offsets (None of an object), and its bytes `[start, stop)`."""

RESTORE_LIMIT = 2.0
"""By default a restore reads at most so many times the bytes of a full checkpoint."""

# A delta that saves less than this is not worth a longer chain.
_WORTH = 0.95
# Forms are compared on so many bytes of a chunk, in pieces from all over it.
_SAMPLE_BYTES, _SAMPLE_PIECES = 16 << 10, 8
# Before anything was measured, a delta is expected to be this share of a full save.
_FIRST_GUESS = 0.5
# A delta grows with the number of saves since its base like this power of it: of bf16 weights .09 after one step were .2
# after 10 and .43 after 100, of fp32 weights .5, .6 and .7. The steeper one counts.
_GROWTH = 1 / 3


# --- for a chunk ----------------------------------------------------------------------------------


def sample(data: Array, width: int) -> Array:
    """Some of the bytes of a chunk, whole elements of `width` bytes, always from the same places; all of a small one."""
    if data.size <= 2 * _SAMPLE_BYTES:
        return data
    words = data.reshape(-1, width)
    piece = _SAMPLE_BYTES // _SAMPLE_PIECES // width
    stride = (len(words) - piece) // (_SAMPLE_PIECES - 1)
    pieces = [words[number * stride : number * stride + piece] for number in range(_SAMPLE_PIECES)]
    return np.concatenate(pieces).reshape(-1)


def same_bytes(one: Array, other: Array) -> bool:
    """Whether two chunks are equal bit for bit."""
    return bool(np.array_equal(one, other))


def worth_a_delta(*, delta_bytes: float, full_bytes: float, chain_bytes: int, root_bytes: int, limit: float) -> bool:
    """Whether a chunk is better stored as a delta of `delta_bytes` than whole in `full_bytes`.

    `chain_bytes` is what its base costs to restore, `root_bytes` what the chain's root does. Delta and base together may
    cost `limit` times a full chunk, which is as long as it will be or as the root was, whichever is less.
    """
    return delta_bytes <= _WORTH * full_bytes and chain_bytes + delta_bytes <= limit * min(full_bytes, root_bytes)


# --- for a save -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord:
    """One save of a run. `base`: what a delta was made against, the save before it or the last full one (the *anchor*).

    `raw_bytes` of the state, `own_bytes` in the save's own files, `restore_bytes` that a whole restore reads.
    """

    directory: str
    kind: Literal["full", "delta"]
    base: Literal["previous", "anchor"] | None
    raw_bytes: int
    own_bytes: int
    restore_bytes: int


def choose_base(
    history: Sequence[SaveRecord],
    *,
    full_every: int,
    previous_here: bool,
    anchor_here: bool,
    limit: float = RESTORE_LIMIT,
) -> Literal["full", "previous", "anchor"]:
    """What the next save is made against, by sizes that are known before it is written.

    `history` are the saves since the last full one, which is its first; `*_here`: whether the bytes of that base are near.
    Full is every `full_every`-th save at least (1: every one), and whatever neither base keeps within `limit` times
    the bytes of the last full save. Of two that do, the one with the smaller delta.
    """
    if full_every <= 1 or not history or len(history) >= full_every:
        return "full"
    full_bytes = history[0].restore_bytes
    own = {"previous": _expected_bytes(history, "previous"), "anchor": _expected_bytes(history, "anchor")}
    restore = {"previous": history[-1].restore_bytes + own["previous"], "anchor": full_bytes + own["anchor"]}
    # Of a single earlier save both are the same, and the first name wins.
    here: dict[Literal["previous", "anchor"], bool] = {"previous": previous_here, "anchor": anchor_here}
    fitting = [name for name, is_here in here.items() if is_here and restore[name] <= limit * full_bytes]
    fitting = [name for name in fitting if own[name] <= _WORTH * full_bytes]
    return min(fitting, key=own.__getitem__, default="full")


def _expected_bytes(history: Sequence[SaveRecord], base: Literal["previous", "anchor"]) -> float:
    """Of the next delta against this base: as long as the last one, grown by how much farther the base is.

    One against the other base will do where there is none, and a share of the full save where there is no delta at all.
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
