"""Fetches whole objects into the cache, piece by piece, in the threads of the caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millrace.cache.node import CacheNode
from millrace.cache.reading.fetching import fetched_here
from millrace.cache.reading.reader import CachedReader
from millrace.cache.reading.threads import CALLERS_THREAD
from millrace.origin import ObjectInfo, Origin
from millrace.store.records import block_count, blocks_of, coalesce, span_of

PIECE_BLOCKS = 2
"""Blocks of one request (8 MiB): small enough for many concurrent requests to fit into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedPiece:
    """The result of a piece: bytes that this fetch got from the origin, whether all of it is cached now, and blocks that
    were cached but damaged.
    """

    fetched_bytes: int
    kept: bool
    bad_blocks: int


class Fill:
    """Fetches one object version into the cache. `fetch` may run in many threads at once; close it at the end.

    `pieces` are the runs of blocks to fetch: those that are not cached, or all of them with `verify`. `spans` are the byte
    ranges to fetch (None: everything). A piece has at most `piece_blocks`. Raises `StorageError` if no disk can be used.
    """

    def __init__(
        self,
        node: CacheNode,
        origin: Origin,
        info: ObjectInfo,
        *,
        verify: bool = False,
        spans: Iterable[tuple[int, int]] | None = None,
        piece_blocks: int = PIECE_BLOCKS,
    ) -> None:
        reader = node.open_reader(origin, info, threads=CALLERS_THREAD)
        if not isinstance(reader, CachedReader):
            raise node.unusable()
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
        self.pieces = coalesce(missing, piece_blocks)

    def nbytes(self, piece: range) -> int:
        """The number of bytes of a piece."""
        start, stop = span_of(piece.start, piece.stop, self.info.size, self._reader.block_bytes)
        return stop - start

    def fetch(self, piece: range) -> FetchedPiece:
        """Fetch a piece in this thread, or wait for the thread that fetches it. Raises the errors of `CachedReader.read`."""
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
            self._reader.release_held(wanted)
        before = fetched_here.nbytes
        self._reader.fetch(wanted)
        return FetchedPiece(
            fetched_bytes=fetched_here.nbytes - before,
            kept=not self._reader.missing(wanted),
            bad_blocks=bad,
        )

    def has_room(self, nbytes: int) -> bool:
        """Whether the disk would probably keep `nbytes` more."""
        return self._reader.has_room(nbytes)

    def close(self) -> None:
        """Close the descriptor."""
        self._reader.close()
