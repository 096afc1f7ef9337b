"""Splits values into byte planes, rotated so that the exponent of a float is one byte, and joins them again. No torch.

numpy needs five to eight passes over memory. The loops of `compiled.py`, with the optional library numba, need one. Loading
them takes .4 s of CPU and 120 MB of memory, and they save as much time in some 4 GB. So a process loads them once it has
coded that much. Both return the same bytes.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np

from millrace.checkpoint.codec.chunks import CHUNK_BYTES, Array
from millrace.checkpoint.codec.deltas import SIGNED
from millrace.runtime.forks import importing, is_installed

_log = logging.getLogger("millrace.checkpoint")

COMPILED_FROM_BYTES = 4 << 30
"""Bytes of values that a process codes with numpy before it loads the compiled loops."""


class Scratch:
    """Memory that is kept between calls, so that its pages are mapped once. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def array(self, name: str, dtype: Any, count: int) -> Array:
        """The memory of this name, as `count` elements. The next call with the name returns the same memory."""
        needed = count * np.dtype(dtype).itemsize
        held = self._held.get(name)
        if held is None or held.size < needed:
            held = self._held[name] = np.empty(max(needed, CHUNK_BYTES), dtype=np.uint8)
        return held[:needed].view(dtype)


class Loops:
    """The compiled loops of this process, which are loaded once it has coded `from_bytes`. Thread-safe."""

    def __init__(self, from_bytes: int = COMPILED_FROM_BYTES) -> None:
        self._module: Any = None
        self._left_bytes = from_bytes
        self._loading = threading.Lock()  # never released: they are loaded once

    def for_values(self, words: Array) -> Any:
        """The module of the loops, for values that it can code; None without it."""
        if self._module is None:
            self._left_bytes -= words.nbytes
            if self._left_bytes > 0 or not self.load():
                return None
        return self._module if words.flags.aligned else None

    def load(self) -> bool:
        """Load the loops, at the first call. Returns whether they are in use. Other threads do not wait for that."""
        if self._loading.acquire(blocking=False) and is_installed("numba"):
            try:
                with importing():
                    from millrace.checkpoint.codec import compiled
                self._module = compiled
            except Exception as error:  # noqa: BLE001 - numba refuses some versions of numpy, and needs a place for its cache
                _log.warning("numba is installed, but cannot be used: %s; planes are split by numpy", error)
        return self._module is not None


loops = Loops()
"""The loops of this process."""


class Splitter:
    """Splits and joins the planes of unsigned values. Not thread-safe: the next call overwrites the results."""

    def __init__(self, scratch: Scratch) -> None:
        self._array = scratch.array

    def split(self, words: Array, rotation: int) -> list[Array]:
        """The byte planes of `words`, lowest byte first. Each value is rotated left by `rotation` bits before."""
        if words.itemsize == 2 and (compiled := loops.for_values(words)) is not None:
            planes = self._planes(words)
            compiled.split(words, rotation, *planes)
            return planes
        return self._split(words, rotation)

    def _planes(self, words: Array, width: int = 2) -> list[Array]:
        return list(self._array("planes", np.uint8, width * words.size).reshape(width, words.size))

    def _split(self, words: Array, rotation: int) -> list[Array]:
        """`split` by numpy."""
        # Numpy narrows several times as fast as it copies with a stride. Each step works on the whole chunk: in blocks that
        # fit a smaller cache, threads would wait longer for the interpreter lock than for memory.
        width = words.itemsize
        planes = self._planes(words, width)
        for number in range(1, width):
            np.right_shift(words, 8 * number - rotation, out=planes[number], casting="unsafe")
        lowest = planes[0]
        np.copyto(lowest, words, casting="unsafe")
        if rotation:
            high = self._array("narrow", np.uint8, words.size)
            if rotation == 1:  # adding and comparing bytes is much faster than shifting them
                np.add(lowest, lowest, out=lowest)
                np.less(words.view(SIGNED[width]), 0, out=high.view(np.bool_))
            else:
                np.left_shift(lowest, rotation, out=lowest)
                np.right_shift(words, 8 * width - rotation, out=high, casting="unsafe")
            np.bitwise_or(lowest, high, out=lowest)
        return planes

    def split_halves(self, words: Array) -> tuple[Array, list[Array]]:
        """The lower halves of 32-bit values, and the planes of the upper ones, rotated by one bit."""
        low = self._array("low", np.uint16, words.size)
        if (compiled := loops.for_values(words)) is not None:
            planes = self._planes(words)
            compiled.split_halves(words, low, *planes)
            return low, planes
        high = self._array("high", np.uint16, words.size)
        np.copyto(low, words, casting="unsafe")
        np.right_shift(words, 16, out=high, casting="unsafe")
        return low, self._split(high, 1)

    def join(self, planes: list[Array], words: Array, rotation: int) -> None:
        """The inverse of `split`, into `words`."""
        if words.itemsize == 2 and (compiled := loops.for_values(words)) is not None:
            compiled.join(*map(np.ascontiguousarray, planes), words, rotation)
        else:
            self._join(planes, words, rotation)

    def _join(self, planes: list[Array], words: Array, rotation: int) -> None:
        """`join` by numpy."""
        if words.itemsize == 8 and rotation:
            self._join_wide(planes, words, rotation)
        else:
            np.copyto(words, planes[-1])
            for plane in reversed(planes[:-1]):
                _shift_left(words, 8, words)
                np.bitwise_or(words, plane, out=words)
            if rotation:
                high = self._array("wide", words.dtype, words.size)
                _shift_left(words, 8 * words.itemsize - rotation, high)
                np.right_shift(words, rotation, out=words)
                np.bitwise_or(words, high, out=words)

    def join_halves(self, low: Array, planes: list[Array], words: Array) -> None:
        """The inverse of `split_halves`, into `words`. `low` is bytes."""
        halves = np.ascontiguousarray(low).view(np.uint16)
        if (compiled := loops.for_values(words)) is not None:
            if not halves.flags.aligned:
                halves = self._copied(halves)
            compiled.join_halves(halves, *map(np.ascontiguousarray, planes), words)
            return
        high = self._array("high", np.uint16, words.size)
        self._join(planes, high, 1)
        np.copyto(words, high)
        np.left_shift(words, 16, out=words)
        np.bitwise_or(words, halves, out=words)

    def _copied(self, halves: Array) -> Array:
        copy = self._array("low", np.uint16, halves.size)
        np.copyto(copy, halves)
        return copy

    def _join_wide(self, planes: list[Array], words: Array, rotation: int) -> None:
        """`join` by quarters of a value. Each quarter needs its two planes and a few bits of the next one."""
        quarters = words.view(np.uint16).reshape(-1, 4)
        one, other = (self._array(name, np.uint16, words.size) for name in ("one", "other"))
        narrow = self._array("narrow", np.uint8, words.size)
        for number in range(4):
            low, high, following = planes[2 * number], planes[2 * number + 1], planes[(2 * number + 2) % 8]
            np.left_shift(high, 8 - rotation, out=one, dtype=np.uint16)
            np.right_shift(low, rotation, out=narrow)
            np.bitwise_or(one, narrow, out=one)
            np.left_shift(following, 16 - rotation, out=other, dtype=np.uint16)
            np.bitwise_or(one, other, out=quarters[:, number])


def _shift_left(words: Array, bits: int, out: Array) -> None:
    if words.itemsize == 2:
        # Numpy multiplies 16-bit numbers 1.4 times as fast as it shifts them, and the product wraps.
        np.multiply(words, 1 << bits, out=out)
    else:
        np.left_shift(words, bits, out=out)
