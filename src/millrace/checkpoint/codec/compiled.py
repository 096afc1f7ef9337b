"""The loops of `splitting.py` for 16-bit values and for halved 32-bit ones, compiled by numba.

Each is one pass over memory, without the interpreter lock. They are compiled when this module is imported, for the types in
their signatures only, because a fork must not happen meanwhile (`runtime/forks.py`). They are also called then, because the
first call with a type imports modules. numba keeps the result next to this file, or in the user's cache directory. All
arrays are contiguous and aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numba
import numpy as np
from numba import int64, uint8, uint16, uint32, void
from numba.types import Array as ArrayType

from millrace.checkpoint.codec.chunks import Array

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")  # the loops would run in the interpreter

_Loop = Callable[..., None]


def _read(element: Any) -> Any:
    return ArrayType(element, 1, "C", readonly=True)


def _written(element: Any) -> Any:
    return ArrayType(element, 1, "C")


def _compiled(*types: Any) -> Callable[[_Loop], _Loop]:
    def compiled(loop: _Loop) -> _Loop:
        fast: _Loop = numba.njit(void(*types), nogil=True, cache=True)(loop)
        for arguments in product(*map(_examples, types)):
            fast(*arguments)
        return fast

    return compiled


def _examples(kind: Any) -> list[Any]:
    """A value of each type that is passed as `kind`: arrays that are only read may be writable."""
    if kind is int64:
        return [0]
    writable, readonly = np.empty(0, kind.dtype.name), np.empty(0, kind.dtype.name)
    readonly.flags.writeable = False
    return [writable] if kind.mutable else [writable, readonly]


@_compiled(_read(uint16), int64, _written(uint8), _written(uint8))
def split(words: Array, rotation: int, low: Array, high: Array) -> None:
    """As `Splitter.split`, of 16-bit values."""
    for number in range(words.size):
        word = words[number]
        turned = np.uint16((word << rotation) | (word >> (16 - rotation)))
        low[number] = np.uint8(turned)
        high[number] = np.uint8(turned >> 8)


@_compiled(_read(uint32), _written(uint16), _written(uint8), _written(uint8))
def split_halves(words: Array, halves: Array, low: Array, high: Array) -> None:
    """As `Splitter.split_halves`."""
    for number in range(words.size):
        word = words[number]
        upper = np.uint16(word >> 16)
        halves[number] = np.uint16(word)
        low[number] = np.uint8((upper << 1) | (upper >> 15))
        high[number] = np.uint8(upper >> 7)


@_compiled(_read(uint8), _read(uint8), _written(uint16), int64)
def join(low: Array, high: Array, words: Array, rotation: int) -> None:
    """As `Splitter.join`, of 16-bit values."""
    for number in range(words.size):
        turned = np.uint16(np.uint16(low[number]) | (np.uint16(high[number]) << 8))
        words[number] = np.uint16((turned >> rotation) | (turned << (16 - rotation)))


@_compiled(_read(uint16), _read(uint8), _read(uint8), _written(uint32))
def join_halves(halves: Array, low: Array, high: Array, words: Array) -> None:
    """As `Splitter.join_halves`."""
    for number in range(words.size):
        turned = np.uint16(np.uint16(low[number]) | (np.uint16(high[number]) << 8))
        upper = np.uint16((turned >> 1) | (turned << 15))
        words[number] = np.uint32(halves[number]) | (np.uint32(upper) << 16)
