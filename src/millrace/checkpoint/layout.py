"""Which bytes of which item go into which chunk. Pure.

A chunk holds either one stretch of a large item, or several small items of one kind packed together, so that twenty
thousand biases are twenty chunks. An item always lies in consecutive chunks of its own kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millrace.checkpoint.planes import CHUNK_BYTES, Kind

PACK_BELOW_BYTES = CHUNK_BYTES // 8
"""Items shorter than this share a chunk; a slice of one then decodes at most one chunk too much."""


@dataclass(frozen=True, slots=True)
class Part:
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


class Packer:
    """Takes items one by one, in order, and gives chunks as they become full. Not thread-safe."""

    def __init__(self) -> None:
        self._open: dict[Kind, list[Part]] = {}
        self._open_bytes: dict[Kind, int] = {}

    def add(self, item: int, nbytes: int, kind: Kind) -> Iterator[ChunkPlan]:
        """Place an item. Chunks of one item come out in order and without others between them."""
        if nbytes >= PACK_BELOW_BYTES:
            for start in range(0, nbytes, CHUNK_BYTES):
                yield ChunkPlan(kind, (Part(item, start, min(start + CHUNK_BYTES, nbytes)),))
        elif nbytes > 0:
            if self._open_bytes.get(kind, 0) + nbytes > CHUNK_BYTES:
                yield self._close(kind)
            self._open.setdefault(kind, []).append(Part(item, 0, nbytes))
            self._open_bytes[kind] = self._open_bytes.get(kind, 0) + nbytes

    def flush(self) -> Iterator[ChunkPlan]:
        """Give the chunks that are not full yet."""
        for kind in list(self._open):
            yield self._close(kind)

    def _close(self, kind: Kind) -> ChunkPlan:
        del self._open_bytes[kind]
        return ChunkPlan(kind, tuple(self._open.pop(kind)))
