"""Reads the tensors and objects of a checkpoint as plain bytes, any box of any tensor, whoever wrote the checkpoint.

For tools that go over a whole checkpoint: exports, comparisons. Training loads by `CheckpointReader`. Torch is needed only
for what torch's own writer saved.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from millrace.checkpoint.format.inventory import StoredValue, inventory
from millrace.checkpoint.format.manifest import DTYPES, Manifest, Shard, TensorEntry
from millrace.checkpoint.format.slices import Runs, box_runs, split_box
from millrace.checkpoint.format.transforms import Transforms, transforms_for
from millrace.checkpoint.host.pipeline import default_threads
from millrace.checkpoint.places.fetching import ChunkFetcher, Request
from millrace.checkpoint.places.manifests import read_newest, read_stock_metadata
from millrace.checkpoint.places.storage import CheckpointStorage, open_storage
from millrace.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError

_WAVE_BYTES = 64 << 20

Bytes = np.ndarray[Any, Any]


class Part(NamedTuple):
    """A box of a tensor, in elements per dimension; or an object, which has no dimensions and `dtype` uint8."""

    key: str
    dtype: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.lengths) * DTYPES[self.dtype][0]


class Contents(Protocol):
    """An open checkpoint. Not thread-safe, but may be used by any thread."""

    url: str
    tensors: Mapping[str, TensorEntry]
    blob_bytes: Mapping[str, int]
    """The objects by their keys, and how long each is as stored."""
    planner_data: Any
    in_pieces: bool
    """Whether a part of a large tensor is read without the rest of it."""

    def read(self, parts: Sequence[Part]) -> list[Bytes]:
        """The bytes of each part in row-major order. Raises `CorruptCheckpointError`, or what the storage raises."""
        ...

    def read_blobs(self, keys: Sequence[str]) -> list[bytes]:
        """Objects as `torch.save` wrote them. Raises as `read`."""
        ...

    def place(self, key: str) -> tuple[int, int]:
        """Sorts by where values lie: reading in this order decodes every chunk about once."""
        ...


def open_contents(
    url: str,
    target_options: Mapping[str, Any] | None = None,
    *,
    threads: int | None = None,
    trusted_types: Sequence[type] = (),
    extension_registry: Any = None,
) -> Contents:
    """Open a checkpoint of ours or of torch's own writer. Raises as `read_manifest`, and as every origin."""
    if threads is not None and threads < 1:
        raise ConfigurationError(f"threads={threads}", next_step="give a positive number")
    storage = open_storage(url, target_options)
    try:
        manifest = read_newest(storage).manifest
    except CheckpointNotFoundError:
        if importlib.util.find_spec("torch") is None or read_stock_metadata(storage) is None:
            raise
        from millrace.checkpoint.reading.stock_contents import StockContents

        return StockContents(storage, extension_registry, trusted_types)
    if manifest.transforms and extension_registry is None:
        from millrace.checkpoint.codec.extension import extension_registry as known_extensions

        extension_registry = known_extensions()
    transforms = transforms_for(manifest.transforms, extension_registry)
    return ManifestContents(storage, manifest, threads or default_threads(), transforms)


def stored_values(url: str, target_options: Mapping[str, Any] | None = None) -> list[StoredValue]:
    """Every tensor of a checkpoint in its order, then every object: how large, and how it is stored. Its data is not read.

    Raises as `describe`.
    """
    storage = open_storage(url, target_options)
    try:
        return inventory(read_newest(storage).manifest)
    except CheckpointNotFoundError:
        if importlib.util.find_spec("torch") is None or read_stock_metadata(storage) is None:
            raise
        from millrace.checkpoint.reading.stock_contents import StockContents

        return StockContents(storage, None, ()).inventory()


class ManifestContents:
    """A checkpoint of ours: every byte that is read is verified."""

    in_pieces = True

    def __init__(self, storage: CheckpointStorage, manifest: Manifest, threads: int, transforms: Transforms) -> None:
        self.url = storage.url
        self.manifest = manifest
        self.tensors: Mapping[str, TensorEntry] = {entry.key: entry for entry in manifest.tensors}
        self.planner_data = manifest.planner_data
        self._fetcher = ChunkFetcher(storage, manifest, threads, transforms)
        self._numbers: dict[str, int] = {}
        number = 0
        for entry in manifest.tensors:
            self._numbers[entry.key] = number
            number += len(entry.shards)
        blob_bytes: dict[str, int] = {}
        for key in manifest.blobs:
            self._numbers[key] = number
            blob_bytes[key] = int(manifest.items["nbytes"][number])
            number += 1
        self.blob_bytes: Mapping[str, int] = blob_bytes

    def item(self, key: str) -> int:
        """The number of the key's item; of a tensor's first one."""
        return self._numbers[key]

    def place(self, key: str) -> tuple[int, int]:
        items, number = self.manifest.items, self._numbers[key]
        return int(items["chunk"][number]), int(items["start"][number])

    def read(self, parts: Sequence[Part]) -> list[Bytes]:
        wholes, requests, staged = [], [], []
        for part in parts:
            out = np.empty(part.nbytes, dtype=np.uint8)
            wholes.append(out)
            entry, itemsize, covered = self.tensors[part.key], DTYPES[part.dtype][0], 0
            for number, shard in enumerate(entry.shards, self._numbers[part.key]):
                box = common_box(part, shard)
                if box is None:
                    continue
                offsets, lengths = box
                covered += math.prod(lengths)
                within = [offset - first for offset, first in zip(offsets, shard.offsets, strict=True)]
                runs = box_runs(shard.sizes, within, lengths, itemsize)
                if runs is None:
                    continue
                if lengths == part.lengths:
                    requests.append(Request(number, runs, out))
                    continue
                piece = np.empty(math.prod(lengths) * itemsize, dtype=np.uint8)
                requests.append(Request(number, runs, piece))
                staged.append((part, out, offsets, lengths, piece))
            if covered < math.prod(part.lengths):
                raise CorruptCheckpointError(
                    f"{self.url} has no values for a part of {part.key!r}", next_step="use another checkpoint"
                )
        self._fetcher.fetch(requests)
        for part, out, offsets, lengths, piece in staged:
            itemsize = DTYPES[part.dtype][0]
            begin = [offset - first for offset, first in zip(offsets, part.offsets, strict=True)]
            place = tuple(slice(first, first + length) for first, length in zip(begin, lengths, strict=True))
            out.reshape(*part.lengths, itemsize)[place] = piece.reshape(*lengths, itemsize)
        return wholes

    def read_blobs(self, keys: Sequence[str]) -> list[bytes]:
        outs = [np.empty(self.blob_bytes[key], dtype=np.uint8) for key in keys]
        self._fetcher.fetch(
            [
                Request(self._numbers[key], Runs(0, out.size, (), ()), out)
                for key, out in zip(keys, outs, strict=True)
                if out.size
            ]
        )
        return [out.tobytes() for out in outs]


def common_box(part: Part, shard: Shard) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The box that a part and a shard have in common."""
    offsets = tuple(max(a, b) for a, b in zip(part.offsets, shard.offsets, strict=True))
    ends = tuple(
        min(a + length, b + size)
        for a, length, b, size in zip(part.offsets, part.lengths, shard.offsets, shard.sizes, strict=True)
    )
    lengths = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return None if any(length <= 0 for length in lengths) else (offsets, lengths)


# --- going over all of it -------------------------------------------------------------------------------


def whole(entry: TensorEntry) -> Part:
    """All of a tensor."""
    return Part(entry.key, entry.dtype, (0,) * len(entry.shape), entry.shape)


def pieces(contents: Contents, part: Part, limit_bytes: int = _WAVE_BYTES // 4) -> Iterator[Part]:
    """A part in pieces that lie one after the other in row-major order; in one where that would cost more reading."""
    if not contents.in_pieces:
        yield part
        return
    for offsets, lengths in split_box(part.lengths, DTYPES[part.dtype][0], limit_bytes):
        begin = tuple(first + more for first, more in zip(part.offsets, offsets, strict=True))
        yield Part(part.key, part.dtype, begin, tuple(lengths))


def stream(contents: Contents, parts: Iterable[Part], wave_bytes: int = _WAVE_BYTES) -> Iterator[tuple[Part, Bytes]]:
    """Read parts in order, one wave ahead of whoever uses them. Holds two waves, or two parts that are longer than that."""
    with ThreadPoolExecutor(1, thread_name_prefix="millrace-contents") as pool:
        ahead: tuple[list[Part], Future[list[Bytes]]] | None = None
        try:
            for wave in _waves(parts, wave_bytes):
                wanted = pool.submit(contents.read, wave)
                if ahead is not None:
                    ready, ahead = ahead, (wave, wanted)
                    yield from _each(*ready)
                    continue
                ahead = (wave, wanted)
            if ahead is not None:
                ready, ahead = ahead, None
                yield from _each(*ready)
        finally:
            if ahead is not None:
                ahead[1].cancel()


def _each(parts: list[Part], future: Future[list[Bytes]]) -> Iterator[tuple[Part, Bytes]]:
    values = future.result()
    values.reverse()  # each can go when it was used
    for part in parts:
        yield part, values.pop()


def _waves(parts: Iterable[Part], limit_bytes: int) -> Iterator[list[Part]]:
    wave: list[Part] = []
    nbytes = 0
    for part in parts:
        if wave and nbytes + part.nbytes > limit_bytes:
            yield wave
            wave, nbytes = [], 0
        wave.append(part)
        nbytes += part.nbytes
    if wave:
        yield wave
