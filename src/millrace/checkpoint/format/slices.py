"""Slices of stored shards: the bytes of a box, and how to combine them. Pure.

A shard is stored in row-major order. A box of it consists of equally long *runs* of consecutive bytes, in increasing
order. The concatenation of the runs is the box in row-major order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Shorter runs are gathered with one index array instead of one copy each.
_SHORT_RUN_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a box: `count` runs of `nbytes` each. The first one begins at byte `first` of the shard.

    Run `r` begins at the row-major multi-index of `r` in `outer`, with `strides` in bytes.
    """

    first: int
    nbytes: int
    outer: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.outer) if self.outer else 1

    @property
    def end(self) -> int:
        """The byte after the last run, counted from the beginning of the shard."""
        if not self.outer:
            return self.first + self.nbytes
        return self.start(self.count - 1) + self.nbytes

    def start(self, number: int) -> int:
        """The first byte of a run, counted from the beginning of the shard."""
        position = self.first
        for length, stride in zip(reversed(self.outer), reversed(self.strides), strict=True):
            number, index = divmod(number, length)
            position += index * stride
        return position

    def starts(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        """`start` of the runs `[begin, end)`."""
        indices = np.unravel_index(np.arange(begin, end), self.outer) if self.outer else ()
        positions = np.full(end - begin, self.first, dtype=np.int64)
        for index, stride in zip(indices, self.strides, strict=True):
            positions += index * stride
        return positions

    def overlapping(self, begin: int, end: int) -> tuple[int, int]:
        """The runs `[low, high)` that have bytes in `[begin, end)` of the shard."""
        return self._first_ending_after(begin), self._first_starting_at(end)

    def _first_ending_after(self, position: int) -> int:
        return self._first_starting_at(position - self.nbytes + 1)

    def _first_starting_at(self, position: int) -> int:
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self.start(middle) >= position:
                high = middle
            else:
                low = middle + 1
        return low


def box_runs(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int) -> Runs | None:
    """The runs of the box `[offsets, offsets + lengths)` of a shard of `sizes`; None for an empty box.

    Raises `ValueError` for a box that is not inside the shard.
    """
    if tuple(sizes) == tuple(lengths) and not any(offsets) and len(offsets) == len(sizes):
        nbytes = itemsize * math.prod(sizes)
        return _all_of(nbytes) if nbytes else None
    boxes = list(zip(sizes, offsets, lengths, strict=True))
    if any(offset < 0 or length < 0 or offset + length > size for size, offset, length in boxes):
        raise ValueError(f"a slice at {tuple(offsets)} of {tuple(lengths)} is not inside {tuple(sizes)}")
    if 0 in lengths:
        return None
    strides = [itemsize * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    # Whole trailing dimensions and the first partial one before them are consecutive.
    dim = len(sizes)
    nbytes = itemsize
    while dim > 0:
        dim -= 1
        nbytes *= lengths[dim]
        if lengths[dim] != sizes[dim]:
            break
    return Runs(first, nbytes, tuple(lengths[:dim]), tuple(strides[:dim]))


@functools.lru_cache(maxsize=1024)
def _all_of(nbytes: int) -> Runs:
    return Runs(0, nbytes, (), ())


def split_box(lengths: Sequence[int], itemsize: int, limit_bytes: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a box into boxes of at most `limit_bytes` (or one element), in row-major order: offsets in it, and lengths.

    Cuts along the first possible dimension, so that the pieces are consecutive.
    """
    total = itemsize * math.prod(lengths)
    dim = next((dim for dim, length in enumerate(lengths) if length > 1), None)
    if total <= limit_bytes or dim is None:
        yield [0] * len(lengths), list(lengths)
        return
    step = max(1, lengths[dim] * limit_bytes // total)
    for begin in range(0, lengths[dim], step):
        piece = list(lengths)
        piece[dim] = min(step, lengths[dim] - begin)
        for offsets, sizes in split_box(piece, itemsize, limit_bytes):
            offsets[dim] += begin
            yield offsets, sizes


def scatter_chunk(runs: Runs, chunk: np.ndarray[Any, Any], begin: int, out: np.ndarray[Any, Any]) -> None:
    """Copy the bytes of a box that are in a chunk to `out`, which holds the box in row-major order.

    `chunk` contains the bytes of the shard from `begin`, which is negative when other items precede it in the chunk.
    """
    end = begin + chunk.size
    low, high = runs.overlapping(begin, end)
    if low >= high:
        return
    whole_low, whole_high = low, high
    for number in dict.fromkeys((low, high - 1)):
        start = runs.start(number)
        if start < begin or start + runs.nbytes > end:
            taken, stop = max(start, begin), min(start + runs.nbytes, end)
            target = number * runs.nbytes + taken - start
            out[target : target + stop - taken] = chunk[taken - begin : stop - begin]
            whole_low, whole_high = (low + 1, whole_high) if number == low else (whole_low, high - 1)
    if whole_low >= whole_high:
        return
    starts = runs.starts(whole_low, whole_high) - begin
    wanted = out[whole_low * runs.nbytes : whole_high * runs.nbytes]
    if runs.nbytes < _SHORT_RUN_BYTES:
        # Gather with the widest possible type: the cost is per element, not per byte.
        width = math.gcd(8, runs.nbytes, chunk.size - chunk.size % 8, *(int(stride) for stride in runs.strides))
        width = math.gcd(width, int(starts[0]))
        words = chunk[: chunk.size - chunk.size % width].view(f"u{width}")
        indices = (starts // width)[:, None] + np.arange(runs.nbytes // width)
        wanted.reshape(-1, width).view(f"u{width}")[...] = words[indices].reshape(-1, 1)
    else:
        for number, start in enumerate(starts.tolist()):
            wanted[number * runs.nbytes : (number + 1) * runs.nbytes] = chunk[start : start + runs.nbytes]


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Bytes `[start, stop)` of one file with the chunks of `rows`, in order of their offsets."""

    file: int
    start: int
    stop: int
    rows: tuple[int, ...]


def coalesce(
    rows: np.ndarray[Any, Any],
    files: np.ndarray[Any, Any],
    offsets: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any],
    *,
    gap_bytes: int,
    limit_bytes: int,
) -> list[ReadRange]:
    """Join chunks into ranges to read, across gaps of at most `gap_bytes`, with at most `limit_bytes` per range.

    The arrays are parallel, in any order. A chunk longer than the limit is a separate range.
    """
    ranges: list[ReadRange] = []
    members: list[int] = []
    file = start = stop = -1
    order = np.lexsort((offsets, files))
    for row, its_file, offset, length in zip(
        rows[order].tolist(), files[order].tolist(), offsets[order].tolist(), lengths[order].tolist(), strict=True
    ):
        end = offset + length
        if members and its_file == file and offset - stop <= gap_bytes and max(end, stop) - start <= limit_bytes:
            members.append(row)
            stop = max(stop, end)
            continue
        if members:
            ranges.append(ReadRange(file, start, stop, tuple(members)))
        file, start, stop, members = its_file, offset, end, [row]
    if members:
        ranges.append(ReadRange(file, start, stop, tuple(members)))
    return ranges
