"""Which bytes of which item go into which chunk. Pure.

A chunk holds either one stretch of a large item, or several small items of one kind packed together, so that twenty
thousand biases are twenty chunks. An item always lies in consecutive chunks of its own kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.checkpoint.codec.planes import CHUNK_BYTES, Kind

PACK_BELOW_BYTES = CHUNK_BYTES // 8
"""Items shorter than this share a chunk; a slice of one then decodes at most one chunk too much."""


class Part(NamedTuple):
    """The bytes `[start, stop)` of item number `item`."""

    item: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk: its parts, laid end to end."""

    kind: Kind
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(slots=True)
class _Pack:
    """A chunk that is not full yet."""

    parts: list[Part] = field(default_factory=list)
    nbytes: int = 0


class Packer:
    """Takes items one by one, in order, and gives chunks as they become full. Not thread-safe."""

    def __init__(self) -> None:
        self._open: dict[Kind, _Pack] = {}

    def add(self, item: int, nbytes: int, kind: Kind) -> Iterable[ChunkPlan]:
        """Place an item, and give the chunks that are full now.

        Chunks of one item come out in order and without others between them.
        """
        if nbytes >= PACK_BELOW_BYTES:
            return (
                ChunkPlan(kind, (Part(item, start, min(start + CHUNK_BYTES, nbytes)),))
                for start in range(0, nbytes, CHUNK_BYTES)
            )
        if nbytes == 0:
            return ()
        pack = self._open.get(kind)
        full: Sequence[ChunkPlan] = ()
        if pack is None or pack.nbytes + nbytes > CHUNK_BYTES:
            full = () if pack is None else (ChunkPlan(kind, tuple(pack.parts)),)
            pack = self._open[kind] = _Pack()
        pack.parts.append(Part(item, 0, nbytes))
        pack.nbytes += nbytes
        return full

    def flush(self) -> Sequence[ChunkPlan]:
        """Give the chunks that are not full yet."""
        packs, self._open = self._open, {}
        return [ChunkPlan(kind, tuple(pack.parts)) for kind, pack in packs.items()]
