"""Pure arithmetic of blocks: identity, ranges, coalescing, read-ahead. No I/O, no state outside the arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

BLOCK_BYTES = 4 << 20
"""Unit of caching and checksumming: large enough that a request's overhead is small, small enough for a footer."""

RUN_BLOCKS = 2
"""At most so many neighbouring blocks are fetched with one request (8 MiB, see docs/design/0009-cold-reads.md)."""

READ_AHEAD_BLOCKS = 16
"""A sequential reader is kept at most so far ahead of (64 MiB)."""


def object_id(origin_identity: str, key: str, version: str, size: int) -> bytes:
    """Name one version of one object by 16 bytes, equal in every process and on every node.

    The version is part of the name, so an overwritten object is a different one and two versions never share a block.
    """
    bytes_text = str(size)
    # Length-prefixed, so that no two different tuples run together into the same text. In one go: every open comes here.
    text = f"{len(origin_identity)}:{origin_identity}{len(key)}:{key}{len(version)}:{version}{len(bytes_text)}:{bytes_text}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def block_count(size: int, block_bytes: int) -> int:
    """How many blocks an object of `size` bytes has (0 for an empty one)."""
    return -(-size // block_bytes)


def blocks_of(start: int, stop: int, block_bytes: int) -> range:
    """The blocks that the byte range `[start, stop)` touches."""
    return range(start // block_bytes, -(-stop // block_bytes)) if stop > start else range(0)


def span_of(first: int, stop: int, size: int, block_bytes: int) -> tuple[int, int]:
    """The byte range `[start, stop)` of the blocks `[first, stop)` in an object of `size` bytes."""
    return first * block_bytes, min(stop * block_bytes, size)


def coalesce(blocks: Iterable[int], max_run: int) -> list[range]:
    """Group block numbers into runs of neighbours, each at most `max_run` long, in order."""
    runs: list[range] = []
    for block in sorted(set(blocks)):
        if runs and runs[-1].stop == block and len(runs[-1]) < max_run:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How far to fetch ahead of one reader, as a value: `after(start, stop)` gives the next one.

    Reads that together cover most of the bytes from where they began are a scan, in whatever order they come: column by
    column, or by several threads. Each one that carries a scan on doubles the window, up to `READ_AHEAD_BLOCKS`. Any other
    read begins anew, with the window closed, so that random reads fetch nothing that nobody asked for. A reader that is
    known to want everything starts with the whole window open (`ReadAhead(window=...)`).
    """

    base: int = 0
    frontier: int = 0
    covered: int = 0
    window: int = 0

    @property
    def scans(self) -> bool:
        """Whether the reads so far are a scan."""
        return self.window > 0

    def after(self, start: int, stop: int) -> ReadAhead:
        """The state after the bytes `[start, stop)` were read."""
        frontier = max(self.frontier, stop)
        covered = min(self.covered + stop - start, frontier - self.base)
        first = not self.covered and not self.window  # may be a look at the head of the file, no more
        if first or start < self.base or stop <= start or 2 * covered < frontier - self.base:
            return ReadAhead(base=start, frontier=stop, covered=stop - start)
        window = min(max(1, self.window * 2), READ_AHEAD_BLOCKS) if frontier > self.frontier else self.window
        return ReadAhead(self.base, frontier, covered, window)

    def wanted(self, size: int, block_bytes: int) -> range:
        """The blocks that should be on their way, none past the end of an object of `size` bytes."""
        first = -(-self.frontier // block_bytes)
        return range(first, min(first + self.window, block_count(size, block_bytes)))
