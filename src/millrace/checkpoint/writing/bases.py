"""Earlier checkpoints that a save is made against: their chunks, and where their bytes are read from. No torch.

Bytes come from what is near: the tensors of the save before (`MemoryBase`) or a disk (`StoredBase`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec.planes import Kind
from millrace.checkpoint.format.manifest import DataFile, Manifest
from millrace.checkpoint.format.tables import Table
from millrace.checkpoint.format.transforms import transforms_for
from millrace.checkpoint.host.garbage import collection_paused
from millrace.checkpoint.host.memory import Memory
from millrace.checkpoint.host.pipeline import run_in_order
from millrace.checkpoint.places.fetching import ChunkFetcher
from millrace.checkpoint.places.manifests import read_manifest
from millrace.checkpoint.places.storage import CheckpointStorage
from millrace.checkpoint.writing.delta import ChunkKey
from millrace.errors import BaseGoneError, MissingError

ItemKey = tuple[str, tuple[int, ...] | None]
"""An item of a checkpoint: its key, and the shard's offsets (None of an object)."""


class Base(Protocol):
    """One rank's view of an earlier checkpoint of the run. Thread-safe."""

    @property
    def directory(self) -> str:
        """Its name beside the checkpoint that is written: `step-000000000100`."""
        ...

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The files of its chunks, named as a sibling sees them (`../step-000000000100/data-...`)."""
        ...

    @property
    def chunks(self) -> Table:
        """Its chunks, and those that they build on; `base` holds rows of this table."""
        ...

    @property
    def transforms(self) -> tuple[str, ...]:
        """Descriptors of the stream extensions that its chunks went through."""
        ...

    def find(self, key: ChunkKey, kind: Kind, nbytes: int) -> int | None:
        """The row of the chunk that holds just these parts, as elements of this kind; None when there is none."""
        ...

    def read(self, row: int, key: ChunkKey) -> Buffer:
        """The decoded bytes of the chunk in `row`, found by `key`. Raises `MillraceError` when they are gone."""
        ...


class Place(NamedTuple):
    """Where an item lies: its first row, the byte inside that chunk, its length in bytes."""

    chunk: int
    start: int
    nbytes: int


class ChunkFinder:
    """Finds chunks by what they hold."""

    def __init__(self, chunks: Table, places: Mapping[ItemKey, Place]) -> None:
        self._chunks = chunks
        self._places = places
        self._ends = np.cumsum(chunks["raw_bytes"], dtype=np.int64)

    def find(self, key: ChunkKey, kind: Kind, nbytes: int) -> int | None:
        """As `Base.find`."""
        row, end = -1, -1
        for fqn, offsets, start, stop in key:
            place = self._places.get((fqn, offsets))
            if place is None or stop > place.nbytes:
                return None
            # In the bytes of all chunks laid end to end.
            before = int(self._ends[place.chunk - 1]) if place.chunk else 0
            begin = before + place.start + start
            if row < 0:
                row = int(np.searchsorted(self._ends, begin, side="right"))
                end = int(self._ends[row - 1]) if row else 0
            if begin != end:
                return None
            end = begin + stop - start
        chunks = self._chunks
        if row < 0 or end != self._ends[row] or chunks["raw_bytes"][row] != nbytes or chunks["kind"][row] != kind.code:
            return None
        return row


class Readable(Protocol):
    """The bytes of one item, for any thread."""

    def read(self, start: int, stop: int) -> Buffer: ...

    def memory(self) -> Memory | None: ...


Spans = tuple[list[int], list[int]]
"""Addresses in this process's memory, and the lengths of what lies there."""


def spans_of(parts: Iterable[tuple[Readable, int, int]]) -> Spans | None:
    """Of the bytes `[start, stop)` of each item; None unless all lie in this process's memory as they will be stored."""
    addresses, lengths = [], []
    for source, start, stop in parts:
        memory = source.memory()
        if memory is None:
            return None
        addresses.append(memory.address + start)
        lengths.append(stop - start)
    return addresses, lengths


class MemoryBase:
    """What this rank has just saved, from the tensors themselves: nobody may change them while this is in use.

    It is noticed when somebody does: a base's bytes have to match their checksum before anything is made against them.
    """

    def __init__(
        self,
        directory: str,
        files: tuple[DataFile, ...],
        chunks: Table,
        transforms: tuple[str, ...],
        places: Mapping[ItemKey, Place],
        sources: Mapping[ItemKey, Readable],
    ) -> None:
        self.directory = directory
        self.files = sibling_files(files, directory)
        self.chunks = chunks
        self.transforms = transforms
        self._finder = ChunkFinder(chunks, places)
        self._sources = sources

    def find(self, key: ChunkKey, kind: Kind, nbytes: int) -> int | None:
        return self._finder.find(key, kind, nbytes)

    def read(self, row: int, key: ChunkKey) -> Buffer:
        pieces = [self._sources[fqn, offsets].read(start, stop) for fqn, offsets, start, stop in key]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def spans(self, key: ChunkKey) -> Spans | None:
        """Where these parts lie in this process's memory; None where not all do."""
        return spans_of((self._sources[fqn, offsets], start, stop) for fqn, offsets, start, stop in key)


class StoredBase:
    """A checkpoint in a storage that is near. Every chunk is verified as it is read, with all that it builds on."""

    def __init__(self, directory: str, manifest: Manifest, fetcher: ChunkFetcher) -> None:
        self.directory = directory
        self.files = sibling_files(manifest.files, directory)
        self.chunks = manifest.chunks
        self.transforms = manifest.transforms
        self._finder = ChunkFinder(manifest.chunks, places_of(manifest))
        self._fetcher = fetcher

    @classmethod
    def open(cls, storage: CheckpointStorage, directory: str, *, extension_registry: Any = None) -> StoredBase:
        """The complete checkpoint in `storage`, whose own name beside others is `directory`.

        `extension_registry` is torch's, for what was saved through stream extensions. Raises `CheckpointNotFoundError`,
        `CorruptCheckpointError` or `UnsupportedFormatError`.
        """
        manifest = read_manifest(storage).manifest
        fetcher = ChunkFetcher(storage, manifest, 1, transforms_for(manifest.transforms, extension_registry))
        with collection_paused():
            return cls(directory, manifest, fetcher)

    def find(self, key: ChunkKey, kind: Kind, nbytes: int) -> int | None:
        return self._finder.find(key, kind, nbytes)

    def read(self, row: int, key: ChunkKey) -> Buffer:
        return self._fetcher.read_chunk(row)


def sibling_files(files: tuple[DataFile, ...], directory: str) -> tuple[DataFile, ...]:
    """The data files of the checkpoint in `directory`, named as one beside it sees them."""
    return tuple(
        file if file.name.startswith("../") else DataFile(f"../{directory}/{file.name}", file.size) for file in files
    )


def places_of(manifest: Manifest) -> dict[ItemKey, Place]:
    """Where each item of a checkpoint lies, whichever rank wrote it."""
    keys: list[ItemKey] = [(entry.key, shard.offsets) for entry in manifest.tensors for shard in entry.shards]
    keys += [(key, None) for key in manifest.blobs]
    items = manifest.items
    columns = (items[name].tolist() for name in ("chunk", "start", "nbytes"))
    return {key: Place(*place) for key, place in zip(keys, zip(*columns, strict=True), strict=True)}


def check_files(storage: CheckpointStorage, files: Sequence[DataFile], threads: int) -> None:
    """Make sure that those of `files` that lie in siblings are there, before something is published that needs them.

    Raises `BaseGoneError` when one is not.
    """

    def check(file: DataFile) -> None:
        try:
            size = storage.stat(file.name).size
        except MissingError as error:
            raise BaseGoneError(
                f"{file.name}, which {storage.url} builds on, was removed", next_step="save again, without a base"
            ) from error
        if size != file.size:
            raise BaseGoneError(
                f"{file.name}, which {storage.url} builds on, has {size} bytes instead of {file.size}",
                next_step="save again, without a base",
            )

    siblings = [file for file in files if file.name.startswith("../")]
    if siblings:
        for _ in run_in_order(siblings, check, threads):
            pass
