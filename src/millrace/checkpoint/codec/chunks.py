"""What all codecs share: the limits of a chunk, its element kind, its effort, its checksum, and the `Codec` protocol.

A chunk is at most `MAX_CHUNK_BYTES` of tensor bytes. It is encoded and decoded on its own. No torch, no I/O.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import xxhash
from typing_extensions import Buffer

from millrace.errors import CorruptCheckpointError

CHUNK_BYTES = 1 << 20
"""Tensor bytes in one chunk as written. The ratio is flat from 64 KiB to 16 MiB; smaller chunks need more calls."""

MAX_CHUNK_BYTES = 8 << 20
"""No chunk of a valid checkpoint decodes to more. This limits the memory that a hostile checkpoint makes a reader
allocate.
"""

MAX_CHUNK_OVERHEAD_BYTES = 64
"""A stored chunk is at most this much longer than its content, before stream extensions."""

Array = np.ndarray[Any, Any]

_WIDTHS = (1, 2, 4, 8)
_FLOAT = 0x10

if sys.byteorder != "little":
    raise ImportError("millrace.checkpoint needs a little-endian machine")


class Effort(int):
    """How to encode a chunk, in one byte: the number of the codec times 4, plus the level of that codec.

    The plane codec has the number 0 and three levels: `RAW` stores planes as they are, `TYPED` balances size and speed,
    `MAX` makes the smallest chunks.
    """

    LEVELS: ClassVar = 4
    RAW: ClassVar[Effort]
    TYPED: ClassVar[Effort]
    MAX: ClassVar[Effort]

    @property
    def codec(self) -> int:
        """The number of the codec in the registry."""
        return self // Effort.LEVELS

    @property
    def level(self) -> int:
        return self % Effort.LEVELS


Effort.RAW, Effort.TYPED, Effort.MAX = Effort(0), Effort(1), Effort(2)


@dataclass(frozen=True, slots=True)
class Kind:
    """The element kind of a chunk: `width` bytes each (1, 2, 4 or 8), and whether the elements are floats.

    A complex number is two floats. Bools, 8-bit integers and opaque bytes are integers of width 1.
    """

    width: int
    is_float: bool

    def __post_init__(self) -> None:
        if self.width not in _WIDTHS:
            raise ValueError(f"an element has 1, 2, 4 or 8 bytes, not {self.width}")

    @property
    def code(self) -> int:
        return (self.width.bit_length() - 1) | (_FLOAT if self.is_float else 0)

    @classmethod
    def from_code(cls, code: int) -> Kind:
        """Raises `CorruptCheckpointError` for an unknown code."""
        if code & ~_FLOAT > 3:
            raise CorruptCheckpointError(f"unknown element kind {code:#x}")
        return cls(width=1 << (code & 0xF), is_float=bool(code & _FLOAT))


OPAQUE = Kind(1, False)
"""Bytes without known structure."""


class Codec(Protocol):
    """Encodes and decodes one chunk at a time. Each thread makes its own codec, so a codec may keep scratch memory.

    `docs/contributing/new-codec.md` shows how to add one.
    """

    def encode(self, raw: Buffer, kind: Kind, *, effort: Effort) -> list[Buffer]:
        """Return the stored chunk of `raw`, in parts to be written one after the other.

        `raw` holds whole elements, at most `MAX_CHUNK_BYTES`. The parts may refer to `raw`, and to scratch memory that
        the next call overwrites. The caller writes or copies them first.
        """
        ...

    def decode(self, stored: Buffer, kind: Kind, out: memoryview) -> None:
        """Decode a stored chunk into all of `out` (writable bytes, any alignment), bit for bit.

        The checksum of `stored` was verified, but `stored` may still be hostile: check every length before allocating
        memory. Raises `CorruptCheckpointError` for anything that `encode` cannot have written.
        """
        ...


def as_bytes(data: Buffer) -> Array:
    """`data` as a 1-D uint8 array on the same memory. `data` is contiguous."""
    view = memoryview(data)
    # memoryview cannot cast an empty view.
    return np.frombuffer(view.cast("B"), dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


def checksum(data: Buffer, *more: Buffer) -> int:
    """The xxh3 64-bit hash of `data`, and of `more` after it, which every checksum of the format uses."""
    if not more:
        return xxhash.xxh3_64_intdigest(as_bytes(data).data)
    running = xxhash.xxh3_64(as_bytes(data).data)
    for part in more:
        running.update(as_bytes(part).data)
    return running.intdigest()
