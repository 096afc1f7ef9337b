"""Positions of the few values that changed since the base, as small numbers. Pure.

At the learning rates of reinforcement learning, more than 99 % of the bf16 weights keep their bits in a step. A delta then
consists of positions. A position is stored as its distance to the one before: in bytes, of which 255 means "add 255, and
continue with the next byte", or, for long distances, in such bytes for the multiples of 256 and one more byte for the rest.
Distances between independent changes are distributed geometrically, and an escape keeps this distribution as it is. So a
Huffman code of these bytes is close to the entropy of the positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from millrace.checkpoint.codec.chunks import Array
from millrace.errors import CorruptCheckpointError

_ESCAPE = 255
# From this mean distance on, the lower byte of a distance is close to noise and is stored on its own.
_LONG_DISTANCE = 400


class Distances(NamedTuple):
    """Ascending positions as `number` distances, in the bytes `escaped`. `low`, if not None, has their lowest bytes."""

    number: int
    escaped: Array
    low: Array | None


def encode_distances(positions: Array) -> Distances:
    """Encode ascending positions."""
    distances = np.diff(positions, prepend=-1) - 1
    low = None
    if positions.size and int(positions[-1]) > _LONG_DISTANCE * positions.size:
        low = distances.astype(np.uint8)
        distances = distances >> 8
    escapes = distances // _ESCAPE
    ends = np.cumsum(escapes + 1)
    escaped = np.full(int(ends[-1]) if positions.size else 0, _ESCAPE, dtype=np.uint8)
    escaped[ends - 1] = distances - _ESCAPE * escapes
    return Distances(positions.size, escaped, low)


def most_bytes(number: int, elements: int) -> int:
    """The maximum length of `escaped` for this number of positions below `elements`."""
    return number + elements // _ESCAPE


def decode_distances(coded: Distances, elements: int) -> Array:
    """The positions, all below `elements`. Raises `CorruptCheckpointError` for others."""
    ends = np.flatnonzero(coded.escaped != _ESCAPE)
    if len(ends) != coded.number or (coded.number and ends[-1] != len(coded.escaped) - 1):
        raise CorruptCheckpointError("the positions of a sparse chunk are malformed")
    distances = _ESCAPE * (np.diff(ends, prepend=-1) - 1) + coded.escaped[ends]
    if coded.low is not None:
        distances = (distances << 8) + coded.low
    positions: Array = np.cumsum(distances + 1) - 1
    if coded.number and int(positions[-1]) >= elements:
        raise CorruptCheckpointError("a position of a sparse chunk is outside of the chunk")
    return positions
