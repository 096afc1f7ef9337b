"""Measures how much the values of two tensors differ: bit by bit, and in double precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from millrace.checkpoint.format.manifest import DTYPES
from millrace.checkpoint.reading.contents import Bytes
from millrace.checkpoint.state.tensors import torch_dtype

# Elements that are converted to double precision at a time.
_STEP_ELEMENTS = 1 << 20
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_NOT_NUMBERS = frozenset({"bool", "float4_e2m1fn_x2"})


class Difference:
    """Adds up the differences of a tensor, piece by piece. `TensorChange` describes the figures."""

    def __init__(self, dtype: str) -> None:
        self._dtype, self._itemsize = dtype, DTYPES[dtype][0]
        self._measured = dtype not in _NOT_NUMBERS
        self.elements = self.changed = self.not_finite = 0
        self._max = self._sum = self._squares = self._norm = 0.0

    def add(self, before: Bytes, after: Bytes) -> None:
        """Add a piece: the bytes of its elements in A and in B. The same array means no difference."""
        step = _STEP_ELEMENTS * self._itemsize
        for begin in range(0, before.size, step):
            one = before[begin : begin + step]
            self._add(one, one if before is after else after[begin : begin + step])

    @property
    def max_abs(self) -> float | None:
        return self._max if self._measured else None

    @property
    def mean_abs(self) -> float | None:
        return self._sum / self.elements if self._measured and self.elements else None

    @property
    def relative_l2(self) -> float | None:
        return math.sqrt(self._squares / self._norm) if self._measured and self._norm else None

    def _add(self, before: Bytes, after: Bytes) -> None:
        self.elements += before.size // self._itemsize
        one = self._numbers(before) if self._measured else None
        if one is not None:
            self._norm += _square(one)
        if before is after or np.array_equal(before, after):
            return
        differs = self._differs(before, after)
        count = int(np.count_nonzero(differs))
        self.changed += count
        if one is None:
            return
        change = (self._numbers(after) - one).abs()
        total = float(change.sum())
        if not math.isfinite(total):
            # This includes elements that are not numbers and equal on both sides.
            change = change[torch.from_numpy(differs)]
            change = change[torch.isfinite(change)]
            self.not_finite += count - change.numel()
            total = float(change.sum())
        if change.numel():
            self._max = max(self._max, float(change.max()))
            self._sum += total
            self._squares += _square(change)

    def _differs(self, before: Bytes, after: Bytes) -> np.ndarray[Any, Any]:
        """For each element, whether any bit differs."""
        if self._itemsize == 16:
            return np.asarray((before.view(np.uint64) != after.view(np.uint64)).reshape(-1, 2).any(axis=1))
        word = _WORDS[self._itemsize]
        return np.asarray(before.view(word) != after.view(word))

    def _numbers(self, data: Bytes) -> Any:
        values = torch.from_numpy(data).view(torch_dtype(self._dtype))
        return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _square(values: Any) -> float:
    """The sum of the squares of all finite numbers."""
    norm = float(torch.linalg.vector_norm(values))
    if not math.isfinite(norm):
        norm = float(torch.linalg.vector_norm(values[torch.isfinite(values)]))
    return norm * norm


def same_objects(one: Any, other: Any) -> bool:
    """Whether two objects of a state dict have the same values. Objects that cannot be compared are different."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_objects(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_objects, one, other))
    try:
        return bool(one == other) or (one != one and other != other)
    except (TypeError, ValueError, RuntimeError):
        return False
