"""Writes a stream of items as data files of encoded chunks: threads encode, the caller's thread appends in order.

A chunk is stored whole, as a delta to a chunk of an earlier checkpoint, or as a reference to it (`ChunkEncoder`). The result
is one `StoredItem` for each source: its place in the `RankData` that all of them share. Does not import torch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import Array, Effort, Kind, as_bytes, checksum
from millrace.checkpoint.codec.planes import is_sparse
from millrace.checkpoint.codec.registry import ChunkCodec, Schedule, Steady
from millrace.checkpoint.format.manifest import DataFile, longest_stored
from millrace.checkpoint.format.tables import (
    MAX_BASES,
    NO_BASE,
    ChunkPlan,
    Column,
    Packer,
    Table,
    chain_costs,
    chunk_table,
    closure,
    restore_bytes,
)
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.writing.bases import Base, ItemKey
from millrace.checkpoint.writing.delta import RESTORE_LIMIT, ChunkKey, sample, worth_a_delta
from millrace.errors import CorruptCheckpointError, MillraceError, UsageError
from millrace.events import Event, emit
from millrace.origin import ObjectWriter
from millrace.runtime.memory import Memory
from millrace.runtime.pipeline import collection_paused, each_paused, keep_freed_memory, run_in_order


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
    """The figures of the result of `write_items`."""
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


# The size after which a new data file begins: object stores limit the number of parts, and so the size, of an upload.
_FILE_BYTES = 64 << 30


class ItemSource(Protocol):
    """The bytes of one item. `read` is called from several threads, for disjoint ranges."""

    @property
    def nbytes(self) -> int: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def key(self) -> ItemKey: ...

    def read(self, start: int, stop: int) -> Buffer: ...

    def memory(self) -> Memory | None:
        """The item's memory in this process, if it has the bytes that will be stored; None otherwise."""
        ...


class BytesSource:
    """The bytes of an object, as `torch.save` wrote it, or of a tensor."""

    __slots__ = ("_data", "key", "kind", "nbytes")

    key: ItemKey
    kind: Kind
    nbytes: int

    def __init__(self, key: ItemKey, kind: Kind, data: bytes | memoryview) -> None:
        self.key, self.kind, self.nbytes, self._data = key, kind, len(data), memoryview(data)

    def read(self, start: int, stop: int) -> Buffer:
        return self._data[start:stop]

    def memory(self) -> Memory | None:
        return None


@dataclass(slots=True)
class _PlannedChunk:
    """A chunk to be encoded: its plan, and the source of each of its parts."""

    plan: ChunkPlan
    sources: list[ItemSource]

    def read(self) -> Array:
        parts = zip(self.plan.parts, self.sources, strict=True)
        pieces = [source.read(start, stop) for (_, start, stop), source in parts]
        return as_bytes(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def key(self) -> ChunkKey:
        parts = zip(self.plan.parts, self.sources, strict=True)
        return tuple((*source.key, start, stop) for (_, start, stop), source in parts)


@dataclass(slots=True)
class _OpenFile:
    name: str
    writer: ObjectWriter
    size: int = 0
    busy_seconds: float = 0.0

    def write(self, *parts: Bytes) -> None:
        began = time.perf_counter()
        for data in parts:
            if data:
                self.writer.write(data)
                self.size += len(data)
        self.busy_seconds += time.perf_counter() - began

    def progress(self) -> tuple[int, float]:
        """Bytes that the storage has accepted, and its busy seconds. A local disk works in a thread."""
        written: tuple[int, float] | None = getattr(self.writer, "written", None)
        return written or (self.size, self.busy_seconds)


def write_items(
    storage: CheckpointStorage,
    stem: str,
    sources: Iterable[ItemSource],
    threads: int,
    schedule: Schedule | None = None,
    transforms: Transforms | None = None,
    base: Base | None = None,
    restore_limit: float = RESTORE_LIMIT,
) -> list[StoredItem]:
    """Write every source, in order, to data files named after `stem`; returns the place of each.

    `schedule` chooses the compression effort (`Effort.TYPED` without one); `transforms` are applied after the codec. Chunks
    that are unchanged since `base`, or changed a little, are stored as references or deltas to it. To restore such a chunk
    may then cost `restore_limit` times the bytes of the chunk alone.

    Everything is durable and visible on return. After an error no file is left.
    """
    files: list[DataFile] = []
    current: _OpenFile | None = None
    chunks = ChunkTableBuilder(base)
    places: list[tuple[int, int, int]] = []
    plan, after = schedule or Steady(Effort.TYPED), transforms or Transforms()
    encoder = ChunkEncoder(plan, after, base, restore_limit)

    def encode(chunk: _PlannedChunk) -> Encoded:
        return encoder.encode(chunk.read(), chunk.plan.kind, None if base is None else chunk.key())

    planned = each_paused(_planned_chunks(sources, places))
    keep_freed_memory()  # each encoded chunk is a new block: with new pages, a save took a fifth more CPU time
    try:
        with contextlib.closing(run_in_order(planned, encode, threads)) as encoded_chunks:
            for encoded in encoded_chunks:
                if encoded.stored is None:
                    chunks.add(encoded, 0, 0)
                    continue
                if current is None or current.size >= _FILE_BYTES:
                    if current is not None:
                        current.writer.close()
                        files.append(DataFile(current.name, current.size))
                    name = f"data-{stem}-{len(files)}.millrace"
                    current = _OpenFile(name, storage.open_writer(name))
                chunks.add(encoded, len(files), current.size)
                current.write(encoded.stored, encoded.rest)
                plan.stored(*current.progress())
        if current is not None:
            current.writer.close()
            files.append(DataFile(current.name, current.size))
    except BaseException:
        if current is not None:
            current.writer.abort()
        discard(storage, [file.name for file in files])
        raise
    data = chunks.finish(files, after.descriptors)
    with collection_paused():
        return [StoredItem(data, row + data.foreign if nbytes else 0, start, nbytes) for row, start, nbytes in places]


def discard(storage: CheckpointStorage, names: Sequence[str]) -> None:
    """Remove files that are not needed any more. A failure leaves them in place, and is an event."""
    try:
        storage.delete(names)
    except MillraceError as error:
        emit(Event(name="checkpoint.discard.failed", subject=storage.url, detail=str(error)))


def _planned_chunks(sources: Iterable[ItemSource], places: list[tuple[int, int, int]]) -> Iterator[_PlannedChunk]:
    """Lay out the sources as chunks. `places` receives the first chunk of each source, the byte in it, and the length."""
    packer = Packer()
    held: dict[int, ItemSource] = {}
    row = 0

    def chunk(plan: ChunkPlan) -> _PlannedChunk:
        nonlocal row
        position = 0
        used = []
        for item, start, stop in plan.parts:
            source = held[item]
            used.append(source)
            if start == 0:
                places[item] = (row, position, source.nbytes)
            if stop == source.nbytes:
                del held[item]
            position += stop - start
        row += 1
        return _PlannedChunk(plan, used)

    for number, source in enumerate(sources):
        nbytes = source.nbytes
        places.append((0, 0, 0))
        if nbytes:
            held[number] = source
        for plan in packer.add(number, nbytes, source.kind):
            yield chunk(plan)
    for plan in packer.flush():
        yield chunk(plan)


# --- encoding a chunk -----------------------------------------------------------------------------------

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk as it will be stored: `stored`, then `rest`. `base` is a row of the base's table: the base of a delta or,
    where `stored` is None, the chunk that a reference stands for. `sparse`: whether it is a sparse delta.
    """

    stored: Bytes | None
    kind: Kind
    raw_bytes: int
    raw_checksum: int
    stored_checksum: int = 0
    base: int | None = None
    rest: Bytes = b""
    sparse: bool = False

    @property
    def stored_bytes(self) -> int:
        return 0 if self.stored is None else len(self.stored) + len(self.rest)


class ChunkEncoder:
    """Encodes the chunks of one save. `restore_limit`: the maximum cost of a chunk's chain, in sizes of the chunk alone."""

    def __init__(
        self,
        schedule: Schedule,
        transforms: Transforms,
        base: Base | None = None,
        restore_limit: float = RESTORE_LIMIT,
    ) -> None:
        self._schedule = schedule
        self._transforms = transforms
        self._codec = ChunkCodec()
        self._lock = threading.Lock()
        self._base = base
        self._limit = restore_limit
        self._costs = None
        if base is not None:
            try:
                self._costs = chain_costs(base.chunks)
            except CorruptCheckpointError as error:
                self._give_up(base, error.message)

    def encode(self, raw: Array, kind: Kind, key: ChunkKey | None = None) -> Encoded:
        """Encode a chunk of bytes. `key` describes its content; without it the base is not used.

        Raises errors of the transformation.
        """
        digest = checksum(raw.data)
        base = self._base
        row = None if base is None or key is None else base.find(key, kind, raw.size)
        if base is None or key is None or row is None:
            return self._whole(raw, kind, digest, self._schedule.next())
        unchanged = int(base.chunks["raw_checksum"][row]) == digest
        effort = Effort.RAW if unchanged else self._schedule.next()
        if not unchanged and effort == Effort.RAW:
            # A difference without compression is as long as the chunk.
            return self._whole(raw, kind, digest, effort)
        reference = self._read(base, row, key)
        if unchanged:
            # Then the base has the checksum of the chunk, too.
            if reference is not None and np.array_equal(raw, reference):
                return Encoded(None, kind, raw.size, digest, base=row)
            effort = self._schedule.next()
        if reference is None or not self._is_verified(base, row, reference):
            return self._whole(raw, kind, digest, effort)
        return self._changed(raw, kind, digest, effort, reference, row)

    def _changed(self, raw: Array, kind: Kind, digest: int, effort: Effort, reference: Array, row: int) -> Encoded:
        """Encode whole or as a delta to the base's `row` with the bytes `reference`, depending on a trial with a sample."""
        costs = self._costs
        if costs is None or int(costs.deltas[row]) >= MAX_BASES:
            return self._whole(raw, kind, digest, effort)
        chain_bytes, root_bytes = int(costs.chain_bytes[row]), int(costs.root_bytes[row])

        def fits(delta_bytes: float) -> bool:
            return worth_a_delta(
                delta_bytes=delta_bytes,
                full_bytes=full_bytes,
                chain_bytes=chain_bytes,
                root_bytes=root_bytes,
                limit=self._limit,
            )

        some, others = sample(raw, kind.width), sample(reference, kind.width)
        began = perf_counter()
        scale = raw.size / some.size
        full_bytes = scale * self._trial(some, kind, None, is_whole=some is raw)
        if fits(scale * self._trial(some, kind, others, is_whole=some is raw)):
            stored, sparse = self._stored(raw, kind, effort, reference, began)
            # The result for the whole chunk decides: the sample may be misleading.
            if fits(len(stored)):
                return Encoded(stored, kind, raw.size, digest, checksum(stored), row, sparse=sparse)
            began = perf_counter()
        stored, _ = self._stored(raw, kind, effort, None, began)
        return Encoded(stored, kind, raw.size, digest, checksum(stored))

    def _whole(self, raw: Array, kind: Kind, digest: int, effort: Effort) -> Encoded:
        began = perf_counter()
        # A save reads memory that does not change before its end, or copies of it. So a chunk that is neither compressed
        # nor transformed refers to its raw bytes.
        if effort == Effort.RAW and not self._transforms.descriptors:
            parts = self._codec.encode(raw.data, kind, effort=Effort.RAW)
            head, rest = (memoryview(part) for part in parts)
            self._schedule.encoded(Effort.RAW, raw.size, head.nbytes + rest.nbytes, perf_counter() - began)
            return Encoded(head, kind, raw.size, digest, checksum(head, rest), rest=rest)
        stored, _ = self._stored(raw, kind, effort, None, began)
        return Encoded(stored, kind, raw.size, digest, checksum(stored))

    def _trial(self, some: Array, kind: Kind, others: Array | None, *, is_whole: bool) -> int:
        """The encoded size of a whole chunk, or about that of a sample."""
        base = None if others is None else others.data
        if not is_whole:
            return self._codec.estimate(some.data, kind, base)
        # Without the greatest effort, which makes both forms smaller by the same few per cent.
        return sum(memoryview(part).nbytes for part in self._codec.encode(some.data, kind, base))

    def _stored(
        self, raw: Array, kind: Kind, effort: Effort, reference: Array | None, began: float
    ) -> tuple[bytes, bool]:
        """The stored bytes, and whether they are a sparse delta."""
        base = None if reference is None else reference.data
        parts = self._codec.encode(raw.data, kind, base, effort=effort)
        stored = b"".join(parts)
        if extensions := self._transforms.descriptors:
            stored = self._transforms.apply(stored)
            if len(stored) > longest_stored(raw.size, is_extended=True):
                raise UsageError(
                    f"{', '.join(extensions)} made {len(stored)} bytes of a chunk of {raw.size}, more than readers accept",
                    next_step="use an extension that adds at most an eighth (no base64, for example)",
                )
        self._schedule.encoded(effort, raw.size, len(stored), perf_counter() - began)
        return stored, is_sparse(memoryview(parts[0]))

    def _read(self, base: Base, row: int, key: ChunkKey) -> Array | None:
        """The base's bytes; None if they are gone. Then the whole base is not used any more."""
        try:
            return as_bytes(base.read(row, key))
        except MillraceError as error:
            self._give_up(base, str(error))
            return None

    def _is_verified(self, base: Base, row: int, reference: Array) -> bool:
        """Whether the base's bytes have their checksum. If not, the whole base is not used any more."""
        if checksum(reference.data) == int(base.chunks["raw_checksum"][row]):
            return True
        self._give_up(base, "its values were changed since they were saved")
        return False

    def _give_up(self, base: Base, problem: str) -> None:
        """Stop using the base after an error: another attempt could take long to fail."""
        with self._lock:
            first, self._base = self._base is not None, None
        if first:
            emit(Event(name="checkpoint.base.unreadable", subject=base.directory, detail=problem))
