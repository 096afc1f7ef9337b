"""The registry of codecs, and `ChunkCodec`, which every writer and reader uses to encode and decode chunks.

To add a codec, write its module and add one line to `CODECS` (`docs/contributing/new-codec.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import MAX_CHUNK_OVERHEAD_BYTES, Codec, Effort, Kind
from millrace.checkpoint.codec.planes import PlaneCodec
from millrace.errors import CorruptCheckpointError

# In the first byte of a stored chunk: another codec than the plane codec wrote it, whose number is in bits 3 to 7.
_OTHER_CODEC, _NUMBER_SHIFT = 0x04, 3


@dataclass(frozen=True, slots=True)
class RegisteredCodec:
    """A codec and the `compression=` names that select it, each with a level below `Effort.LEVELS`."""

    make: Callable[[], Codec]
    levels: Mapping[str, int]


# The position is the number of the codec in stored chunks: append, and never remove or reorder.
CODECS: tuple[RegisteredCodec, ...] = (RegisteredCodec(PlaneCodec, {"typed": 1, "max": 2, "none": 0}),)


def efforts(codecs: tuple[RegisteredCodec, ...] = CODECS) -> dict[str, Effort]:
    """The effort of every registered `compression=` name."""
    return {
        name: Effort(number * Effort.LEVELS + level)
        for number, registered in enumerate(codecs)
        for name, level in registered.levels.items()
    }


class ChunkCodec:
    """Encodes a chunk with the codec of its effort, and decodes the chunks of every registered codec. One object a thread.

    Deltas are always chunks of the plane codec.
    """

    def __init__(self, codecs: tuple[RegisteredCodec, ...] = CODECS) -> None:
        self._registered = codecs
        self._planes = PlaneCodec()
        self._made: dict[int, Codec] = {}

    def encode(
        self, raw: Buffer, kind: Kind, base: Buffer | None = None, *, effort: Effort = Effort.TYPED
    ) -> list[Buffer]:
        """Return the stored chunk of `raw` in parts, as `Codec.encode`. With `base`, of the same length, it is a delta."""
        if effort <= Effort.MAX:
            return self._planes.encode(raw, kind, base, effort=effort)
        if base is not None:
            return self._planes.encode(raw, kind, base)
        parts = self._codec(effort.codec).encode(raw, kind, effort=effort)
        if sum(memoryview(part).nbytes for part in parts) + 1 > memoryview(raw).nbytes + MAX_CHUNK_OVERHEAD_BYTES:
            return self._planes.encode(raw, kind, effort=Effort.RAW)
        return [bytes([effort.codec << _NUMBER_SHIFT | _OTHER_CODEC]), *parts]

    def decode(self, stored: Buffer, kind: Kind, out: memoryview, base: Buffer | None = None) -> None:
        """Decode `stored` into all of `out`, as `Codec.decode`. `base` holds the decoded base of a delta.

        Raises `CorruptCheckpointError` for the chunk of a codec that is not registered.
        """
        view = memoryview(stored)
        first = view[0] if view.nbytes else 0
        if not first & _OTHER_CODEC:
            self._planes.decode(stored, kind, out, base)
            return
        if base is not None:
            raise CorruptCheckpointError("a delta chunk is not a chunk of the plane codec")
        self._codec(first >> _NUMBER_SHIFT).decode(view[1:], kind, out)

    def _codec(self, number: int) -> Codec:
        known = self._made.get(number)
        if known is not None:
            return known
        if not 0 < number < len(self._registered):
            raise CorruptCheckpointError(
                f"a chunk was encoded by codec {number}, which this Millrace lacks",
                next_step="install a newer Millrace, or load another checkpoint",
            )
        return self._made.setdefault(number, self._registered[number].make())
