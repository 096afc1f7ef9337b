"""Arithmetic of blocks: identity, ranges, coalescing, read-ahead, and the owner among disks or members. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

BLOCK_BYTES = 4 << 20
"""Unit of caching and checksumming: large enough that a request's overhead is small, small enough for a footer."""

RUN_BLOCKS = 2
"""The most neighbouring blocks that one request fetches (8 MiB, see docs/design/0009-cold-reads.md)."""

READ_AHEAD_BLOCKS = 16
"""The longest read-ahead of a sequential reader (64 MiB)."""

_BITS = 52  # so that every hash is a float between 0 and 1, both excluded


def object_id(origin_identity: str, key: str, version: str, size: int) -> bytes:
    """The id of one version of one object: 16 bytes, equal in every process and on every node.

    The version is part of the name, so an overwritten object is a different one and two versions never share a block.
    """
    bytes_text = str(size)
    # Length-prefixed, so that two different tuples never make the same text. One expression: every open calls this.
    text = f"{len(origin_identity)}:{origin_identity}{len(key)}:{key}{len(version)}:{version}{len(bytes_text)}:{bytes_text}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def block_count(size: int, block_bytes: int) -> int:
    """The number of blocks of an object of `size` bytes (0 for an empty one)."""
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
    """The read-ahead of one reader, as a value: `after(start, stop)` returns the next one.

    Reads that together cover most of the bytes since they began are a scan, in any order: column by column, or by several
    threads. Each read that continues a scan doubles the window, up to `READ_AHEAD_BLOCKS`. Any other read begins again with
    the window closed, so random reads fetch nothing in advance. A reader that will read everything starts with the whole
    window open (`ReadAhead(window=...)`).
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
        first = not self.covered and not self.window  # may be a read of the file's head only
        if first or start < self.base or stop <= start or 2 * covered < frontier - self.base:
            return ReadAhead(base=start, frontier=stop, covered=stop - start)
        window = min(max(1, self.window * 2), READ_AHEAD_BLOCKS) if frontier > self.frontier else self.window
        return ReadAhead(self.base, frontier, covered, window)

    def wanted(self, size: int, block_bytes: int) -> range:
        """The blocks to fetch ahead, none past the end of an object of `size` bytes."""
        first = -(-self.frontier // block_bytes)
        return range(first, min(first + self.window, block_count(size, block_bytes)))


def owners(key: bytes, nodes: Iterable[tuple[str, float]]) -> list[str]:
    """The ids of `nodes`, each an (id, weight above 0), in the order in which they own `key`: weighted rendezvous hashing.

    The order depends only on the key, the ids and the weights. When the first node leaves, the second is the owner: a join
    or leave moves only that node's share. The score is that of Schindelhauer and Schomaker, "Weighted Distributed Hash
    Tables" (SPAA 2005); rendezvous hashing is Thaler and Ravishankar's (1998).
    """
    return [node for _, node in sorted((-_score(key, node, weight), node) for node, weight in nodes)]


def _score(key: bytes, node: str, weight: float) -> float:
    seed = xxhash.xxh3_64_intdigest(node.encode("utf-8", "surrogatepass"))
    uniform = ((xxhash.xxh3_64_intdigest(key, seed) >> (64 - _BITS)) + 0.5) / (1 << _BITS)
    return -weight / math.log(uniform)
