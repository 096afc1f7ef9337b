"""Opens the contents of a checkpoint of Millrace, of torch's own writer, or of a Hugging Face directory.

Torch is needed only for torch's own.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace.checkpoint.arguments import ReadThroughMode, thread_number
from millrace.checkpoint.format.inventory import StoredValue, inventory
from millrace.checkpoint.format.manifest import DTYPES, Manifest, TensorEntry, WrappedEntry
from millrace.checkpoint.format.slices import box_runs
from millrace.checkpoint.format.transforms import transforms_for
from millrace.checkpoint.reading.contents import Box, Bytes, Contents, shard_boxes
from millrace.checkpoint.reading.hugging_face import SafetensorsFetcher, SafetensorsFiles, read_hugging_face
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.fetching import ChunkFetcher, ItemRequest, whole_item
from millrace.checkpoint.storage.manifests import (
    CheckpointSummary,
    StoredManifest,
    read_newest,
    read_stock_metadata,
    summarize,
)
from millrace.checkpoint.storage.storage import open_storage
from millrace.errors import CheckpointNotFoundError
from millrace.origin import Readable
from millrace.runtime.pipeline import default_threads


def open_contents(
    url: str,
    target_options: Mapping[str, Any] | None = None,
    *,
    threads: int | None = None,
    trusted_types: Sequence[type] = (),
    extension_registry: Any = None,
    keys: Sequence[str] = (),
    origin: Readable | None = None,
    read_through: ReadThroughMode = "none",
) -> Contents:
    """Open a checkpoint of Millrace or of torch's own writer, or a Hugging Face directory (safetensors files).

    `keys` selects the values to read, as in `select_keys`. `origin` and `read_through` are as in `open_storage`. Raises as
    `read_manifest` and `read_hugging_face`, and the errors of the storage. Raises `UnsupportedObjectError` when torch's own
    writer saved a wrapper tensor of a class that is not trusted.
    """
    threads = thread_number("threads", threads) or default_threads()
    storage = open_storage(url, target_options, origin=origin, read_through=read_through)
    found = _find(storage, threads, keys)
    if found is None:
        from millrace.checkpoint.reading.stock import StockContents

        return StockContents(storage, extension_registry, trusted_types).with_wrappers(threads, keys)
    manifest = found.manifest
    if isinstance(found, SafetensorsFiles):
        return ManifestContents(storage, manifest, SafetensorsFetcher(storage, found, threads), has_checksums=False)
    if manifest.transforms and extension_registry is None:
        from millrace.checkpoint.codec.extension import extension_registry as known_extensions

        extension_registry = known_extensions()
    transforms = transforms_for(manifest.transforms, extension_registry)
    return ManifestContents(storage, manifest, ChunkFetcher(storage, manifest, threads, transforms))


def stored_values(url: str, target_options: Mapping[str, Any] | None = None) -> list[StoredValue]:
    """The size and storage of every tensor, in order, then of every object. Does not read data. Raises as `describe`."""
    storage = open_storage(url, target_options)
    found = _find(storage, default_threads())
    if found is not None:
        return inventory(found.manifest)
    from millrace.checkpoint.reading.stock import StockContents

    return StockContents(storage, None, ()).inventory()


def summary_of(storage: CheckpointStorage) -> CheckpointSummary:
    """The summary of a checkpoint. Does not read data. Raises as `describe`."""
    found = _find(storage, default_threads())
    if found is not None:
        return summarize(storage, found.manifest, found.nbytes if isinstance(found, StoredManifest) else 0)
    from millrace.checkpoint.storage.stock_metadata import summarize_stock

    return summarize_stock(storage)


def _find(
    storage: CheckpointStorage, threads: int, keys: Sequence[str] = ()
) -> StoredManifest | SafetensorsFiles | None:
    """The manifest, or that of a Hugging Face directory. None if torch's own writer saved the checkpoint, and torch is
    installed to read it: it takes a second to load, so it is imported only then.
    """
    try:
        return read_newest(storage)
    except CheckpointNotFoundError as missing:
        if importlib.util.find_spec("torch") is not None and read_stock_metadata(storage) is not None:
            return None
        try:
            return read_hugging_face(storage, threads, keys)
        except CheckpointNotFoundError:
            raise missing from missing.__cause__


class ManifestContents:
    """A checkpoint of Millrace, or a Hugging Face directory. The fetcher verifies its reads, unless that has no
    checksums.
    """

    in_pieces = True

    def __init__(
        self, storage: CheckpointStorage, manifest: Manifest, fetcher: ChunkFetcher, *, has_checksums: bool = True
    ) -> None:
        self.url, self.has_checksums = storage.url, has_checksums
        self.manifest = manifest
        self.tensors: Mapping[str, TensorEntry] = {entry.key: entry for entry in manifest.tensors}
        self.planner_data = manifest.planner_data
        self.wrapped: Mapping[str, WrappedEntry] = {each.tensor.key: each for each in manifest.wrapped}
        self._fetcher = fetcher
        # A tensor may have no shards, and then it has no item.
        counts = [len(entry.shards) for entry in manifest.tensors] + [1] * len(manifest.blobs)
        keys = [*self.tensors, *manifest.blobs]
        self._numbers = dict(zip(keys, itertools.accumulate(counts, initial=0), strict=False))
        self.blob_bytes: Mapping[str, int] = {
            key: int(manifest.items["nbytes"][self._numbers[key]]) for key in manifest.blobs
        }

    def item(self, key: str) -> int:
        """The number of the item with this key, or of the first item of a tensor."""
        return self._numbers[key]

    def place(self, key: str) -> tuple[int, int]:
        items, number = self.manifest.items, self._numbers[key]
        return int(items["chunk"][number]), int(items["start"][number])

    def read(self, boxes: Sequence[Box]) -> list[Bytes]:
        wholes, requests, staged = [], [], []
        for box in boxes:
            out = np.empty(box.nbytes, dtype=np.uint8)
            wholes.append(out)
            itemsize, first = DTYPES[box.dtype][0], self._numbers[box.key]
            for part in shard_boxes(box, self.tensors[box.key], self.url):
                runs = box_runs(part.shard.sizes, part.in_shard, part.lengths, itemsize)
                if runs is None:
                    continue
                if part.lengths == box.lengths:
                    requests.append(ItemRequest(first + part.number, runs, out))
                    continue
                piece = np.empty(math.prod(part.lengths) * itemsize, dtype=np.uint8)
                requests.append(ItemRequest(first + part.number, runs, piece))
                begin = part.in_box(box)
                place = tuple(slice(first, first + length) for first, length in zip(begin, part.lengths, strict=True))
                staged.append((out.reshape(*box.lengths, itemsize)[place], piece.reshape(*part.lengths, itemsize)))
        self._fetcher.fetch(requests)
        for target, piece in staged:
            target[...] = piece
        return wholes

    def read_blobs(self, keys: Sequence[str]) -> list[bytes]:
        outs = [np.empty(self.blob_bytes[key], dtype=np.uint8) for key in keys]
        self._fetcher.fetch(
            [whole_item(self._numbers[key], out) for key, out in zip(keys, outs, strict=True) if out.size]
        )
        return [out.tobytes() for out in outs]
