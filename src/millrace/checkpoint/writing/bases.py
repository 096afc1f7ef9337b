"""Bases: earlier checkpoints that a save is made against, with their chunks and the source of their bytes. No torch.

Bytes are read from near sources only: the tensors of the save before (`MemoryBase`) or a disk (`StoredBase`).
"""

from __future__ import annotations

import abc
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import Kind, as_bytes, checksum
from millrace.checkpoint.format.manifest import DataFile, Manifest
from millrace.checkpoint.format.slices import ReadRange, coalesce
from millrace.checkpoint.format.tables import Table
from millrace.checkpoint.format.transforms import transforms_for
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.fetching import ChunkFetcher
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.writing.delta import ChunkKey
from millrace.errors import BaseGoneError, MillraceError, MissingError
from millrace.runtime.memory import Memory
from millrace.runtime.pipeline import collection_paused, run_in_order

# A check of a base reads ranges of about this size. Gaps up to the second size, which deltas do not use, are read, too.
_CHECK_BYTES, _CHECK_GAP_BYTES = 8 << 20, 64 << 10

ItemKey = tuple[str, tuple[int, ...] | None]
"""An item of a checkpoint: its key, and the shard's offsets (None for an object)."""


class Place(NamedTuple):
    """The place of an item: its first row, the byte inside that chunk, its length in bytes."""

    chunk: int
    start: int
    nbytes: int


class Base(abc.ABC):
    """One rank's view of an earlier checkpoint of the run. Thread-safe.

    `directory`: its directory next to that of the checkpoint that is written (`step-000000000100`). `files`: the files of
    its chunks, relative to a sibling (`../step-000000000100/data-...`). `chunks`: its chunks and their bases; `base`
    contains rows of this table. `transforms`: descriptors of the stream extensions that were applied to the chunks.
    `sparse`: whether there may be sparse deltas among them.
    """

    def __init__(
        self,
        directory: str,
        files: tuple[DataFile, ...],
        chunks: Table,
        transforms: tuple[str, ...],
        places: Mapping[ItemKey, Place],
        *,
        sparse: bool,
    ) -> None:
        self.directory = directory
        self.files = sibling_files(files, directory)
        self.chunks, self.transforms, self.places, self.sparse = chunks, transforms, places, sparse
        self._ends = np.cumsum(chunks["raw_bytes"], dtype=np.int64)

    def find(self, key: ChunkKey, kind: Kind, nbytes: int) -> int | None:
        """The row of the chunk with exactly these parts and elements of this kind; None if there is none."""
        row, end = -1, -1
        for fqn, offsets, start, stop in key:
            place = self.places.get((fqn, offsets))
            if place is None or stop > place.nbytes:
                return None
            # Positions count the bytes of all chunks, one after the other.
            before = int(self._ends[place.chunk - 1]) if place.chunk else 0
            begin = before + place.start + start
            if row < 0:
                row = int(np.searchsorted(self._ends, begin, side="right"))
                end = int(self._ends[row - 1]) if row else 0
            if begin != end:
                return None
            end = begin + stop - start
        chunks = self.chunks
        if row < 0 or end != self._ends[row] or chunks["raw_bytes"][row] != nbytes or chunks["kind"][row] != kind.code:
            return None
        return row

    @abc.abstractmethod
    def read(self, row: int, key: ChunkKey) -> Buffer:
        """The decoded bytes of the chunk in `row`, found by `key`. Raises `MillraceError` if they are gone."""


class Readable(Protocol):
    """The bytes of one item, for any thread."""

    def read(self, start: int, stop: int) -> Buffer: ...

    def memory(self) -> Memory | None: ...


class MemoryBase(Base):
    """This rank's last save, whose bytes are read from the saved tensors. They must not change while this is in use.

    Changes are detected: the bytes of a base must match their checksum before a delta is made against them.
    """

    def __init__(
        self,
        directory: str,
        files: tuple[DataFile, ...],
        chunks: Table,
        transforms: tuple[str, ...],
        places: Mapping[ItemKey, Place],
        sources: Mapping[ItemKey, Readable],
        *,
        sparse: bool,
    ) -> None:
        super().__init__(directory, files, chunks, transforms, places, sparse=sparse)
        self.sources = sources

    def read(self, row: int, key: ChunkKey) -> Buffer:
        pieces = [self.sources[fqn, offsets].read(start, stop) for fqn, offsets, start, stop in key]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class StoredBase(Base):
    """A checkpoint in a near storage. Every chunk is verified when it is read, and so are its bases."""

    def __init__(self, directory: str, manifest: Manifest, fetcher: ChunkFetcher) -> None:
        places = places_of(manifest)
        super().__init__(
            directory, manifest.files, manifest.chunks, manifest.transforms, places, sparse=manifest.sparse
        )
        self._fetcher = fetcher

    @classmethod
    def open(
        cls,
        storage: CheckpointStorage,
        directory: str,
        *,
        extension_registry: Any = None,
        manifest: Manifest | None = None,
    ) -> StoredBase:
        """Open the complete checkpoint in `storage`, whose directory in the run is `directory`.

        `manifest` is a known one: that of a rank's part, for example. `extension_registry` is torch's, for checkpoints with
        stream extensions. Raises `CheckpointNotFoundError`, `CorruptCheckpointError` or `UnsupportedFormatError`.
        """
        manifest = manifest or read_manifest(storage).manifest
        fetcher = ChunkFetcher(storage, manifest, 1, transforms_for(manifest.transforms, extension_registry))
        with collection_paused():
            return cls(directory, manifest, fetcher)

    def read(self, row: int, key: ChunkKey) -> Buffer:
        return self._fetcher.read_chunks([row])[row].data


def sibling_files(files: tuple[DataFile, ...], directory: str) -> tuple[DataFile, ...]:
    """The data files of the checkpoint in `directory`, with names relative to a sibling."""
    return tuple(
        file if file.name.startswith("../") else DataFile(f"../{directory}/{file.name}", file.size) for file in files
    )


def places_of(manifest: Manifest) -> dict[ItemKey, Place]:
    """The places of all items of a checkpoint."""
    keys: list[ItemKey] = [(entry.key, shard.offsets) for entry in manifest.tensors for shard in entry.shards]
    keys += [(key, None) for key in manifest.blobs]
    items = manifest.items
    columns = (items[name].tolist() for name in ("chunk", "start", "nbytes"))
    return {key: Place(*place) for key, place in zip(keys, zip(*columns, strict=True), strict=True)}


def find_damage(storage: CheckpointStorage, base: Base, threads: int) -> str | None:
    """Find damage in the stored bytes of a base and of its own bases; None if all match their checksums.

    `storage` is the base's directory. Missing files are not reported: `check_files` finds them before a save ends.
    """
    chunks = base.chunks
    columns = (chunks[name] for name in ("file", "offset", "stored_bytes"))
    places, rows = np.unique(np.stack([each.astype(np.int64) for each in columns]), axis=1, return_index=True)
    ranges = coalesce(rows, *places, gap_bytes=_CHECK_GAP_BYTES, limit_bytes=_CHECK_BYTES)

    def check(wanted: ReadRange) -> str | None:
        file = base.files[wanted.file]
        try:
            stored = storage.stat(file.name)
            if stored.size != file.size:
                return f"{file.name} has {stored.size} bytes instead of {file.size}"
            data = as_bytes(storage.read(stored, wanted.start, wanted.stop)).data
        except MissingError:
            return None
        except MillraceError as error:
            return f"{file.name} cannot be read ({error.message})"
        for row in wanted.rows:
            start = int(chunks["offset"][row]) - wanted.start
            if checksum(data[start : start + int(chunks["stored_bytes"][row])]) != int(chunks["stored_checksum"][row]):
                return f"a chunk in {file.name} does not match its checksum"
        return None

    return next((problem for problem in run_in_order(ranges, check, threads) if problem), None)


def check_files(
    storage: CheckpointStorage, files: Sequence[DataFile], threads: int, *, versions: dict[str, str] | None = None
) -> None:
    """Check that those of `files` in siblings exist, before a manifest that names them is published.

    With `versions` the files of this checkpoint are checked, too. It maps paths in the run to the file versions that
    earlier saves saw. They must not have changed; new ones are added. Raises `BaseGoneError` if a file is missing or has
    changed.
    """
    own = storage.url.rstrip("/").rpartition("/")[2]

    def check(file: DataFile) -> None:
        try:
            stored = storage.stat(file.name)
        except MissingError as error:
            raise BaseGoneError(
                f"{file.name}, which {storage.url} builds on, was removed", next_step="save again, without a base"
            ) from error
        if stored.size != file.size:
            raise BaseGoneError(
                f"{file.name}, which {storage.url} builds on, has {stored.size} bytes instead of {file.size}",
                next_step="save again, without a base",
            )
        if versions is not None:
            path = posixpath.normpath(f"{own}/{file.name}")
            if versions.setdefault(path, stored.version) != stored.version:
                raise BaseGoneError(
                    f"{file.name}, which {storage.url} builds on, was replaced since it was saved",
                    next_step="save again, without a base",
                )

    wanted = files if versions is not None else [file for file in files if file.name.startswith("../")]
    if wanted:
        for _ in run_in_order(wanted, check, threads):
            pass
