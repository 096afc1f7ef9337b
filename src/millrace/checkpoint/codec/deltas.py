"""The arithmetic of delta chunks: differences of values as small numbers. Pure.

Values are read as integers that order like them. For the bits `u` of a float, this integer is `~u` when the sign bit is
set, else `u` with the sign bit set. A constant offset on both sides does not change the difference. So this module keeps
the top bit and inverts the other bits of negative numbers. The zig-zag of a difference `d` is `2 d` or `-2 d - 1`, small
for either sign.

At the learning rates of reinforcement learning, more than 99 % of the bf16 weights keep their bits in a step. A delta then
consists of the positions of the changed values. A position is stored as its distance to the one before: in bytes, of which
255 means "add 255, and continue with the next byte", or, for long distances, in such bytes for the multiples of 256 and one
more byte for the rest. Distances between independent changes are distributed geometrically, and an escape keeps this
distribution as it is. So a Huffman code of these bytes is close to the entropy of the positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from millrace.checkpoint.codec.chunks import Array
from millrace.errors import CorruptCheckpointError

# Returns scratch memory for a name, element type and number of elements.
Scratch = Callable[[str, Any, int], Array]

SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_SAMPLE = 1024
# Grouping takes as long as the rest of a delta.
_WORTH_BITS = 1.0


def difference(words: Array, base: Array, is_float: bool, out: Array, scratch: Scratch) -> None:
    """Write the zig-zag of `words - base`, modulo the width, to `out`. All arrays have one unsigned type and length."""
    signed, last = SIGNED[words.itemsize], 8 * words.itemsize - 1
    other = scratch("difference", words.dtype, words.size)
    if is_float:
        _order(words, out)
        _order(base, other)
        np.subtract(out, other, out=out)
    else:
        np.subtract(words, base, out=out)
    np.right_shift(out.view(signed), last, out=other.view(signed))
    np.add(out, out, out=out)
    np.bitwise_xor(out, other, out=out)


def apply_difference(coded: Array, base: Array, is_float: bool, scratch: Scratch) -> None:
    """The inverse of `difference`, in place: replace the zig-zag differences `coded` by the words."""
    other = scratch("difference", coded.dtype, coded.size)
    np.bitwise_and(coded, coded.dtype.type(1), out=other)
    np.negative(other, out=other)
    np.right_shift(coded, 1, out=coded)
    np.bitwise_xor(coded, other, out=coded)
    if is_float:
        _order(base, other)
        np.add(coded, other, out=coded)
        # Ordering is its own inverse.
        _mask(coded, other)
        np.bitwise_xor(coded, other, out=coded)
    else:
        np.add(coded, base, out=coded)


def by_exponent(base: Array) -> Array:
    """The order of grouped differences: by the eight bits below the sign of the base, then by position.

    A step of the same size is many units in the last place of a small value and few of a large one. So differences to
    bases of one exponent are alike, and each block that zstd codes has a table for few exponents.
    """
    order: Array = np.argsort(_exponents(base), kind="stable")
    return order


def depend_on_exponent(coded: Array, base: Array) -> bool:
    """Whether the differences `coded` are so much shorter for large values that grouping is worth its time, by a sample.

    This holds for weights, which a step changes by similar amounts; not for moments, which change in proportion.
    """
    step = max(1, coded.size // _SAMPLE)
    lengths, exponents = np.log2(coded[::step] + 1.0), _exponents(base[::step])
    is_small = exponents < exponents.mean()
    if not is_small.any():
        return False
    return float(lengths[is_small].mean() - lengths[~is_small].mean()) > _WORTH_BITS


def _exponents(values: Array) -> Array:
    """The eight bits below the sign of each value."""
    exponents = np.empty(values.size, dtype=np.uint8)
    return np.right_shift(values, 8 * values.itemsize - 9, out=exponents, casting="unsafe")


def _order(words: Array, out: Array) -> None:
    _mask(words, out)
    np.bitwise_xor(out, words, out=out)


def _mask(words: Array, out: Array) -> None:
    """All bits but the top one where that is set, else none."""
    signed = SIGNED[words.itemsize]
    np.right_shift(words.view(signed), 8 * words.itemsize - 1, out=out.view(signed))
    np.right_shift(out, 1, out=out)


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
