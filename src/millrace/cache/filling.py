"""Brings whole objects into the cache, piece by piece, in the threads of whoever wants them there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millrace.cache.blocks import block_count, blocks_of, coalesce, span_of
from millrace.cache.node import CacheNode
from millrace.cache.reader import BlockReader
from millrace.cache.small import SmallReader
from millrace.cache.threads import CALLERS_THREAD
from millrace.errors import StorageError
from millrace.origin import ObjectInfo, Origin

PIECE_BLOCKS = 2
"""Blocks that are asked for with one request (8 MiB): few enough bytes for many requests at a time to fit into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedPiece:
    """What became of a piece: bytes that came from the origin, whether all of it is in the cache now, and blocks of it that
    were there but wrong.
    """

    fetched_bytes: int
    kept: bool
    bad_blocks: int


class Fill:
    """One object version on its way into the cache. `fetch` may run in many threads at once; close it at the end.

    `pieces` are the runs of blocks to fetch: those that are not here, or all of them with `verify`. `spans` are the byte
    ranges that are wanted (None: everything). Raises `StorageError` when no disk can be used.
    """

    def __init__(
        self,
        node: CacheNode,
        origin: Origin,
        info: ObjectInfo,
        *,
        verify: bool = False,
        spans: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        reader = node.open_reader(origin, info, threads=CALLERS_THREAD)
        if not isinstance(reader, BlockReader | SmallReader):
            raise StorageError("no cache directory can be used", next_step="'millrace doctor' says why")
        self.info = info
        self.directory = str(reader.directory)
        self._reader = reader
        self._verify = verify
        every: Sequence[int] = range(block_count(info.size, reader.block_bytes))
        if spans is not None:
            every = sorted({block for start, stop in spans for block in blocks_of(start, stop, reader.block_bytes)})
        try:
            missing = every if verify else reader.missing(every)
        except BaseException:
            reader.close()
            raise
        self.pieces = coalesce(missing, PIECE_BLOCKS)

    def nbytes(self, piece: range) -> int:
        """Bytes of a piece."""
        start, stop = span_of(piece.start, piece.stop, self.info.size, self._reader.block_bytes)
        return stop - start

    def fetch(self, piece: range) -> FetchedPiece:
        """Bring a piece here, in this thread, or wait until somebody else has. Raises what `ObjectReader.read` raises."""
        wanted = list(piece)
        bad = 0
        if self._verify:
            here = set(wanted) - set(self._reader.missing(wanted))
            sound = {block for block in here if self._reader.is_sound(block)}
            bad = len(here) - len(sound)
            wanted = [block for block in wanted if block not in sound]
        if not wanted:
            return FetchedPiece(fetched_bytes=0, kept=True, bad_blocks=0)
        if self._reader.has_room(self.nbytes(piece)):
            self._reader.let_go(wanted)
        self._reader.fetch(wanted)
        return FetchedPiece(
            fetched_bytes=sum(self.nbytes(range(block, block + 1)) for block in wanted),
            kept=not self._reader.missing(wanted),
            bad_blocks=bad,
        )

    def has_room(self, nbytes: int) -> bool:
        """Whether the disk would keep `nbytes` more, as far as can be told before."""
        return self._reader.has_room(nbytes)

    def close(self) -> None:
        """Give the descriptor back."""
        self._reader.close()
