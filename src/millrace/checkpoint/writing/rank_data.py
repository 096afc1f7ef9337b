"""What one rank wrote in one save: data files, the table of its chunks, the places of its items, and figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from millrace.checkpoint.format.chains import closure, restore_bytes
from millrace.checkpoint.format.manifest import DataFile
from millrace.checkpoint.format.tables import NO_BASE, Column, Table, chunk_table
from millrace.checkpoint.writing.bases import Base
from millrace.checkpoint.writing.encoding import Encoded


@dataclass(frozen=True, slots=True)
class RankData:
    """One rank's data files, its chunks in the order of their places there, and the descriptors of the stream extensions
    that were applied to them. Picklable.

    In a save with a base, `files` include those of siblings that it refers to. The first `foreign` chunks contain no item of
    this save: they are bases of other chunks. `sparse`: whether there may be sparse deltas among the chunks.
    """

    files: tuple[DataFile, ...]
    chunks: Table
    transforms: tuple[str, ...] = ()
    foreign: int = 0
    sparse: bool = False

    @property
    def own_files(self) -> tuple[DataFile, ...]:
        """Without those of siblings."""
        return tuple(file for file in self.files if not file.name.startswith("../"))


class StoredItem(NamedTuple):
    """The place of one item of a rank: first row in `data.chunks`, byte inside that chunk, length in bytes.

    All items of a rank share one `data` object, so pickle stores it once.
    """

    data: RankData
    chunk: int
    start: int
    nbytes: int


class StoredWrapper(NamedTuple):
    """The places of a wrapper tensor: its recipe, and each of its plain tensors with key, element type and shape."""

    key: str
    recipe: StoredItem
    leaves: tuple[tuple[str, str, tuple[int, ...], StoredItem], ...]

    @property
    def data(self) -> RankData:
        return self.recipe.data

    @property
    def nbytes(self) -> int:
        return self.recipe.nbytes + sum(leaf[3].nbytes for leaf in self.leaves)


@dataclass(frozen=True, slots=True)
class WrapperParts:
    """The stored parts of a wrapper tensor: a recipe, and plain tensors with their element types and shapes."""

    recipe: str
    leaves: tuple[tuple[str, str, tuple[int, ...]], ...]


class ChunkTableBuilder:
    """Builds the chunk table of a rank, with the rows of the base's table that it needs."""

    def __init__(self, base: Base | None) -> None:
        self._base = base
        self._rows: list[tuple[int, ...]] = []
        # Own rows that are references to a chunk of the base, and those that are deltas to one, each with its row there.
        self._references: dict[int, int] = {}
        self._deltas: dict[int, int] = {}
        self._sparse = False

    def add(self, encoded: Encoded, file: int, offset: int) -> None:
        """Add the next chunk; `file` and `offset` are ignored for a reference."""
        if encoded.base is not None:
            (self._references if encoded.stored is None else self._deltas)[len(self._rows)] = encoded.base
        self._sparse |= encoded.sparse
        where = (file, offset, encoded.stored_bytes, encoded.stored_checksum)
        self._rows.append((encoded.kind.code, encoded.raw_bytes, encoded.raw_checksum, *where))

    def finish(self, files: Sequence[DataFile], transforms: tuple[str, ...]) -> RankData:
        """The data of the rank, of which `files` are the own files."""
        names = ("kind", "raw_bytes", "raw_checksum", "file", "offset", "stored_bytes", "stored_checksum")
        columns: dict[str, Any] = dict(zip(names, zip(*self._rows, strict=True), strict=True)) if self._rows else {}
        columns["base"] = [NO_BASE] * len(self._rows)
        own = chunk_table(columns)
        if self._base is None or not (self._references or self._deltas):
            return RankData(tuple(files), own, transforms)
        data = _with_base(own, files, transforms, self._base, self._references, self._deltas)
        return replace(data, sparse=self._sparse or self._base.sparse)


def _with_base(
    own: Table,
    files: Sequence[DataFile],
    transforms: tuple[str, ...],
    base: Base,
    references: Mapping[int, int],
    deltas: Mapping[int, int],
) -> RankData:
    """The own chunks after the chunks of the base that they need, and the files of both."""
    theirs = base.chunks
    at, rows = (np.fromiter(values, dtype=np.int64) for values in (references.keys(), references.values()))
    changed, bases = (np.fromiter(values, dtype=np.int64) for values in (deltas.keys(), deltas.values()))
    # A reference copies the base's row. The bases of that row are needed, the row itself is not.
    beneath = theirs["base"][rows]
    needed = closure(theirs, np.concatenate([bases, beneath[beneath != NO_BASE].astype(np.int64)]))
    foreign = len(needed)
    for name in ("file", "offset", "stored_bytes", "stored_checksum"):
        own[name][at] = theirs[name][rows]
    used = np.unique(np.concatenate([theirs["file"][needed], theirs["file"][rows]]))
    numbers = np.zeros(len(base.files), dtype=np.uint32)
    numbers[used] = np.arange(len(files), len(files) + len(used), dtype=np.uint32)
    own["file"][at] = numbers[own["file"][at]]

    def moved(rows: Column) -> Column:
        found: Column = np.where(rows == NO_BASE, NO_BASE, np.searchsorted(needed, rows)).astype(np.uint32)
        return found

    own["base"][at] = moved(beneath)
    own["base"][changed] = moved(bases)
    first = {name: theirs[name][needed] for name in own.columns}
    first["file"], first["base"] = numbers[first["file"]], moved(first["base"])
    chunks = chunk_table({name: np.concatenate([first[name], own[name]]) for name in own.columns})
    all_files = (*files, *(base.files[number] for number in used.tolist()))
    return RankData(all_files, chunks, transforms, foreign)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStats:
    """The figures of one rank's save: bytes before and after the codec, chunks, and seconds from start to end.

    `stored_bytes` are those of its own files; `restore_bytes` all that a complete restore reads, including files of earlier
    checkpoints. `chunks` are stored whole (`chunks_full`), as a difference to an earlier checkpoint (`chunks_delta`), or are
    references to one (`chunks_referenced`).
    """

    raw_bytes: int
    stored_bytes: int
    chunks: int
    seconds: float
    chunks_full: int = 0
    chunks_delta: int = 0
    chunks_referenced: int = 0
    restore_bytes: int = 0


def stats_of(data: RankData, stored: Sequence[StoredItem], seconds: float) -> SaveStats:
    """The figures of what `write_items` returned."""
    base = data.chunks["base"][data.foreign :]
    in_sibling = np.array([file.name.startswith("../") for file in data.files], dtype=bool)
    referenced = in_sibling[data.chunks["file"][data.foreign :]]
    delta = (base != NO_BASE) & ~referenced
    return SaveStats(
        raw_bytes=sum(item.nbytes for item in stored),
        stored_bytes=sum(file.size for file in data.own_files),
        chunks=len(base),
        seconds=seconds,
        chunks_full=len(base) - int(referenced.sum()) - int(delta.sum()),
        chunks_delta=int(delta.sum()),
        chunks_referenced=int(referenced.sum()),
        restore_bytes=restore_bytes(data.chunks),
    )
