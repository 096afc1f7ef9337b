"""Positions of the few values that changed since the base, as small numbers. Pure.

At the learning rates of reinforcement learning, more than 99 % of the bf16 weights keep their bits in a step. A delta then
consists of positions. A position is stored as its distance to the one before: in bytes, of which 255 means "add 255, and
continue with the next byte", or, for long distances, in such bytes for the multiples of 256 and one more byte for the rest.

A step is about as large for all weights, but the spacing of floats is proportional to their size. So a smaller weight
changes more often: twice as often for each exponent. The elements are divided into up to four *classes* by the exponents in
the base. Each class has its own list of positions, counted in its elements, with a code that suits its density.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from millrace.checkpoint.codec.chunks import Array
from millrace.errors import CorruptCheckpointError

MAX_CLASSES = 4
_ESCAPE = 255
# From this mean distance on, the lower byte of a distance is close to noise and is stored on its own.
_LONG_DISTANCE = 400
# A block of the ranking. Four counters of 16 bits share a word.
_BLOCK = 32 << 10
_LANE_BITS = 16
# Another list of positions costs about this many bytes, for its header and its Huffman codes.
_LIST_BYTES = 60
# Every n-th element of the base is counted to choose the classes.
_SAMPLE_STEP = 16
# Candidates for the classes: the first limit, relative to the most frequent exponent, and the exponents in a class.
_CANDIDATES = tuple((first, step) for first in (1, 0, -1) for step in (1, 2))


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


def most_bytes(count: int, elements: int) -> int:
    """The maximum length of `escaped` for `count` positions below `elements`."""
    return count + elements // _ESCAPE


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


# --- classes --------------------------------------------------------------------------------------


def exponents(base: Array) -> Array:
    """The eight bits below the sign of each element."""
    return np.right_shift(base, 8 * base.itemsize - 9).astype(np.uint8)


def choose_limits(of_base: Array, index: Array) -> list[int]:
    """The descending limits of the classes that make the positions smallest, by an estimate. Empty for a single class.

    `of_base` are the exponents of all elements, `index` the changed ones.
    """
    # From the largest exponent down, as the classes are.
    every = np.cumsum(np.bincount(of_base[::_SAMPLE_STEP], minlength=256)[::-1]) * _SAMPLE_STEP
    changed = np.cumsum(np.bincount(of_base[index], minlength=256)[::-1])
    common = 255 - int(np.argmax(np.diff(every, prepend=0)))
    best, limits = _bytes(every, changed, []), list[int]()
    for first, step in _CANDIDATES:
        tried = [common + first - number * step for number in range(MAX_CLASSES - 1)]
        tried = [limit for limit in tried if 0 < limit < 256]
        size = _bytes(every, changed, tried) + _LIST_BYTES * len(tried)
        if size < best:
            best, limits = size, tried
    return limits


def _bytes(every: Array, changed: Array, limits: list[int]) -> float:
    """The entropy of the positions in these classes, in bytes. The arrays are cumulative counts by descending exponent."""
    ends = [255 - limit for limit in limits] + [255]
    totals = np.diff(every[ends], prepend=0).astype(np.float64)
    counts = np.diff(changed[ends], prepend=0).astype(np.float64)
    totals = np.maximum(totals, counts) + 1e-9
    share = np.clip(counts / totals, 1e-9, 1 - 1e-9)
    return float((totals * -(share * np.log2(share) + (1 - share) * np.log2(1 - share))).sum() / 8)


def classes(limits: list[int]) -> Array:
    """The class of each exponent: 0 for those from the first limit on, 1 for those from the second on, and so on."""
    every = np.arange(256)
    return sum((every < limit for limit in limits), start=np.zeros(256, dtype=np.uint8)).astype(np.uint8)


def rank(of_base: Array, table: Array, index: Array) -> list[tuple[Array, Array]]:
    """For each class its changed elements (places in `index`), and their positions among the elements of the class."""
    lanes = np.uint64(1) << (_LANE_BITS * np.arange(MAX_CLASSES, dtype=np.uint64))
    one = lanes[table]
    own = table[of_base[index]]
    ranks = np.empty(index.size, dtype=np.int64)
    before = np.zeros(MAX_CLASSES, dtype=np.int64)
    bounds = np.searchsorted(index, np.arange(0, of_base.size + _BLOCK, _BLOCK))
    for number, start in enumerate(range(0, of_base.size, _BLOCK)):
        counts = np.cumsum(one[of_base[start : start + _BLOCK]])
        part = slice(bounds[number], bounds[number + 1])
        lane = own[part]
        inside = counts[index[part] - start] >> (_LANE_BITS * lane.astype(np.uint64))
        ranks[part] = before[lane] + (inside & np.uint64(0xFFFF)).astype(np.int64) - 1
        before += ((counts[-1] >> (_LANE_BITS * np.arange(MAX_CLASSES, dtype=np.uint64))) & np.uint64(0xFFFF)).astype(
            np.int64
        )
    members = [np.flatnonzero(own == number) for number in range(int(table.max()) + 1)]
    return [(places, ranks[places]) for places in members]


def members_of(of_base: Array, table: Array, number: int) -> Array:
    """The elements of a class, in order."""
    found: Array = np.flatnonzero(table[of_base] == number)
    return found
