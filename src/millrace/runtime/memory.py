"""Copies between bytes and memory at an address: half a microsecond each, where a numpy view of a tensor takes four.

Tens of thousands of small tensors need one copy each. The copies keep the interpreter's lock: a release for a few hundred
bytes makes threads wait for one another. The caller keeps the owner of an address alive, and passes the right length. Does
not import torch.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

_copy = ctypes.PyDLL(None).memmove
_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy.restype = None


class Memory(NamedTuple):
    """`nbytes` of writable memory at `address`, which `owner` keeps alive."""

    address: int
    nbytes: int
    owner: Any

    def fill(self, source: int, nbytes: int) -> None:
        """Fill the memory with `nbytes` from the address `source`."""
        if nbytes != self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fill {self.nbytes}")
        _copy(self.address, source, nbytes)

    def array(self) -> np.ndarray[Any, Any]:
        """The memory as a writable uint8 array, valid while the owner is alive."""
        if not self.nbytes:
            return np.empty(0, dtype=np.uint8)
        return np.frombuffer(memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)), dtype=np.uint8)

    def tobytes(self) -> bytes:
        """A copy."""
        return ctypes.string_at(self.address, self.nbytes)
