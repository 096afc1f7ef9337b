"""The contents of a checkpoint as plain bytes: tensors in boxes, objects as stored. Serves exports and comparisons.

`opening.open_contents` opens a checkpoint of Millrace or of torch's own writer. Training loads with `CheckpointReader`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from millrace.checkpoint.format.manifest import DTYPES, Shard, TensorEntry, WrappedEntry
from millrace.checkpoint.format.slices import split_box
from millrace.errors import CorruptCheckpointError

_WAVE_BYTES = 64 << 20

Bytes = np.ndarray[Any, Any]


class Box(NamedTuple):
    """A box of a tensor, in elements per dimension, or a whole object: without dimensions, and with `dtype` uint8."""

    key: str
    dtype: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.lengths) * DTYPES[self.dtype][0]


class Contents(Protocol):
    """An open checkpoint. Any thread may use it, but only one at a time."""

    url: str
    tensors: Mapping[str, TensorEntry]
    blob_bytes: Mapping[str, int]
    """The stored length of each object, by key."""
    wrapped: Mapping[str, WrappedEntry]
    """Wrapper tensors by key. `tensors` contains their plain tensors, and the objects contain their recipes."""
    planner_data: Any
    in_pieces: bool
    """Whether a part of a large tensor can be read without the rest of it."""

    def read(self, boxes: Sequence[Box]) -> list[Bytes]:
        """The bytes of each box in row-major order. Raises `CorruptCheckpointError` and the errors of the storage."""
        ...

    def read_blobs(self, keys: Sequence[str]) -> list[bytes]:
        """Objects in the format of `torch.save`. Raises as `read`."""
        ...

    def place(self, key: str) -> tuple[int, int]:
        """A sort key. Reading in this order decodes every chunk about once."""
        ...


class ShardBox(NamedTuple):
    """The common box of a requested box and a stored shard, in elements of the tensor. `number` counts the shards."""

    number: int
    shard: Shard
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def in_shard(self) -> tuple[int, ...]:
        """Where the box begins in the shard."""
        return tuple(offset - first for offset, first in zip(self.offsets, self.shard.offsets, strict=True))

    def in_box(self, box: Box) -> tuple[int, ...]:
        """Where it begins in the requested box."""
        return tuple(offset - first for offset, first in zip(self.offsets, box.offsets, strict=True))


def shard_boxes(box: Box, entry: TensorEntry, url: str) -> list[ShardBox]:
    """The parts of a box in the shards that store it. Raises `CorruptCheckpointError` when shards are missing."""
    found, covered = [], 0
    for number, shard in enumerate(entry.shards):
        offsets = tuple(max(a, b) for a, b in zip(box.offsets, shard.offsets, strict=True))
        ends = (
            min(a + length, b + size)
            for a, length, b, size in zip(box.offsets, box.lengths, shard.offsets, shard.sizes, strict=True)
        )
        lengths = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        if all(length > 0 for length in lengths):
            found.append(ShardBox(number, shard, offsets, lengths))
            covered += math.prod(lengths)
    if covered < math.prod(box.lengths):
        raise CorruptCheckpointError(f"{url}: a part of {box.key!r} has no values", next_step="use another checkpoint")
    return found


def whole(entry: TensorEntry) -> Box:
    """The box that contains the whole tensor."""
    return Box(entry.key, entry.dtype, (0,) * len(entry.shape), entry.shape)


def pieces(contents: Contents, box: Box, limit_bytes: int = _WAVE_BYTES // 4) -> Iterator[Box]:
    """Cut a box into consecutive pieces in row-major order. One piece when smaller pieces would read more bytes."""
    if not contents.in_pieces:
        yield box
        return
    for offsets, lengths in split_box(box.lengths, DTYPES[box.dtype][0], limit_bytes):
        begin = tuple(first + more for first, more in zip(box.offsets, offsets, strict=True))
        yield Box(box.key, box.dtype, begin, tuple(lengths))


def stream(
    contents: Contents,
    boxes: Iterable[Box],
    wave_bytes: int = _WAVE_BYTES,
    *,
    count: Callable[[int], None] | None = None,
) -> Iterator[tuple[Box, Bytes]]:
    """Read boxes in order, one wave ahead of their use. Holds two waves in memory, or two longer boxes.

    `count` is called with the bytes of each wave after its read, in the thread of the caller. Counting each box at its use
    instead would report progress in bursts.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="millrace-contents") as pool:
        ahead: tuple[list[Box], Future[list[Bytes]]] | None = None
        try:
            for wave in _waves(boxes, wave_bytes):
                wanted = pool.submit(contents.read, wave)
                if ahead is not None:
                    ready, ahead = ahead, (wave, wanted)
                    yield from _each(*ready, count)
                    continue
                ahead = (wave, wanted)
            if ahead is not None:
                ready, ahead = ahead, None
                yield from _each(*ready, count)
        finally:
            if ahead is not None:
                ahead[1].cancel()


def _each(
    boxes: list[Box], future: Future[list[Bytes]], count: Callable[[int], None] | None
) -> Iterator[tuple[Box, Bytes]]:
    values = future.result()
    if count is not None:
        count(sum(value.size for value in values))
    values.reverse()  # frees each value after its use
    for box in boxes:
        yield box, values.pop()


def _waves(boxes: Iterable[Box], limit_bytes: int) -> Iterator[list[Box]]:
    wave: list[Box] = []
    nbytes = 0
    for box in boxes:
        if wave and nbytes + box.nbytes > limit_bytes:
            yield wave
            wave, nbytes = [], 0
        wave.append(box)
        nbytes += box.nbytes
    if wave:
        yield wave
