"""Distributes the bytes of items over chunks. Pure.

A chunk contains either a range of one large item, or several small items of one kind. So twenty thousand biases are twenty
chunks. An item is always in consecutive chunks of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.checkpoint.codec.chunks import CHUNK_BYTES, Kind

PACK_BELOW_BYTES = CHUNK_BYTES // 8
"""Items shorter than this share a chunk. So a read of such an item decodes only one chunk."""


class ItemRange(NamedTuple):
    """The bytes `[start, stop)` of item number `item`."""

    item: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk: the concatenation of its parts."""

    kind: Kind
    parts: tuple[ItemRange, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(slots=True)
class _Pack:
    """An incomplete chunk."""

    parts: list[ItemRange] = field(default_factory=list)
    nbytes: int = 0


class Packer:
    """Packs items in order, and returns full chunks. Not thread-safe."""

    def __init__(self) -> None:
        self._open: dict[Kind, _Pack] = {}

    def add(self, item: int, nbytes: int, kind: Kind) -> Iterable[ChunkPlan]:
        """Add an item, and return the full chunks. The chunks of one item are consecutive and in order."""
        if nbytes >= PACK_BELOW_BYTES:
            return (
                ChunkPlan(kind, (ItemRange(item, start, min(start + CHUNK_BYTES, nbytes)),))
                for start in range(0, nbytes, CHUNK_BYTES)
            )
        if nbytes == 0:
            return ()
        pack = self._open.get(kind)
        full: Sequence[ChunkPlan] = ()
        if pack is None or pack.nbytes + nbytes > CHUNK_BYTES:
            full = () if pack is None else (ChunkPlan(kind, tuple(pack.parts)),)
            pack = self._open[kind] = _Pack()
        pack.parts.append(ItemRange(item, 0, nbytes))
        pack.nbytes += nbytes
        return full

    def flush(self) -> Sequence[ChunkPlan]:
        """Return the incomplete chunks."""
        packs, self._open = self._open, {}
        return [ChunkPlan(kind, tuple(pack.parts)) for kind, pack in packs.items()]
