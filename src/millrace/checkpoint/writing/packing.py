"""Turns a stream of items into data files of encoded chunks: threads encode, the caller's thread appends in order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec.effort import Schedule, Steady
from millrace.checkpoint.codec.planes import Array, Effort, Kind, as_bytes
from millrace.checkpoint.format.chains import closure
from millrace.checkpoint.format.layout import ChunkPlan, Packer
from millrace.checkpoint.format.manifest import DataFile
from millrace.checkpoint.format.tables import NO_BASE, Column, Table, chunk_table
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.host.garbage import collection_paused, each_paused
from millrace.checkpoint.host.memory import Memory
from millrace.checkpoint.host.pipeline import run_in_order
from millrace.checkpoint.places.storage import CheckpointStorage
from millrace.checkpoint.writing.bases import Base, ItemKey, Spans, spans_of
from millrace.checkpoint.writing.chunk_forms import Bytes
from millrace.checkpoint.writing.delta import RESTORE_LIMIT, ChunkKey
from millrace.checkpoint.writing.encoder_process import EncoderProcess
from millrace.checkpoint.writing.encoding import ChunkEncoder, Encoded
from millrace.checkpoint.writing.offloading import Offload
from millrace.errors import MillraceError
from millrace.events import Event, emit
from millrace.origin import ObjectWriter

# A new data file is begun after this much: object stores bound the number of parts, and so the length, of an upload.
_FILE_BYTES = 64 << 30


class Source(Protocol):
    """The bytes of one item. `read` is called from several threads, for ranges that do not overlap."""

    @property
    def nbytes(self) -> int: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def key(self) -> ItemKey: ...

    def read(self, start: int, stop: int) -> Buffer: ...

    def memory(self) -> Memory | None:
        """Where all of it lies in this process's memory, as it will be stored; None where it does not."""
        ...


@dataclass(frozen=True, slots=True)
class RankData:
    """What one rank wrote: its data files, its chunks in the order in which they lie there, and the descriptors of
    the extensions that these went through. Picklable.

    Of a save that has a base, `files` are also those of siblings that it refers to. The first `foreign` chunks hold no item
    of this save: others build on them.
    """

    files: tuple[DataFile, ...]
    chunks: Table
    transforms: tuple[str, ...] = ()
    foreign: int = 0

    @property
    def own_files(self) -> tuple[DataFile, ...]:
        """Without those of siblings."""
        return tuple(file for file in self.files if not file.name.startswith("../"))


class StoredItem(NamedTuple):
    """Where one item of a rank lies: first row in `data.chunks`, byte inside that chunk, length in bytes.

    All items of a rank share one `data`, which pickle then carries once.
    """

    data: RankData
    chunk: int
    start: int
    nbytes: int


@dataclass(slots=True)
class _Job:
    plan: ChunkPlan
    sources: list[Source]

    @property
    def kind(self) -> Kind:
        return self.plan.kind

    def read(self) -> Array:
        parts = zip(self.plan.parts, self.sources, strict=True)
        pieces = [source.read(start, stop) for (_, start, stop), source in parts]
        return as_bytes(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def key(self) -> ChunkKey:
        parts = zip(self.plan.parts, self.sources, strict=True)
        return tuple((*source.key, start, stop) for (_, start, stop), source in parts)

    def spans(self) -> Spans | None:
        parts = zip(self.plan.parts, self.sources, strict=True)
        return spans_of((source, start, stop) for (_, start, stop), source in parts)


class _Chunks:
    """The chunk table while it grows, and what it needs of the base's."""

    def __init__(self, base: Base | None) -> None:
        self._base = base
        self._rows: list[tuple[int, ...]] = []
        # Own rows that stand for a chunk of the base, and those that are deltas to one, each with its row there.
        self._references: dict[int, int] = {}
        self._deltas: dict[int, int] = {}

    def add(self, encoded: Encoded, file: int, offset: int) -> None:
        """The next chunk; `file` and `offset` mean nothing for a reference."""
        if encoded.base is not None:
            (self._references if encoded.stored is None else self._deltas)[len(self._rows)] = encoded.base
        stored_bytes = 0 if encoded.stored is None else len(encoded.stored)
        where = (file, offset, stored_bytes, encoded.stored_checksum)
        self._rows.append((encoded.kind.code, encoded.raw_bytes, encoded.raw_checksum, *where))

    def finish(self, files: Sequence[DataFile], transforms: tuple[str, ...]) -> RankData:
        names = ("kind", "raw_bytes", "raw_checksum", "file", "offset", "stored_bytes", "stored_checksum")
        columns: dict[str, Any] = dict(zip(names, zip(*self._rows, strict=True), strict=True)) if self._rows else {}
        columns["base"] = [NO_BASE] * len(self._rows)
        own = chunk_table(columns)
        if self._base is None or not (self._references or self._deltas):
            return RankData(tuple(files), own, transforms)
        return _with_base(own, files, transforms, self._base, self._references, self._deltas)


def _with_base(
    own: Table,
    files: Sequence[DataFile],
    transforms: tuple[str, ...],
    base: Base,
    references: Mapping[int, int],
    deltas: Mapping[int, int],
) -> RankData:
    """The own chunks after those of the base that they build on, and the files of both."""
    theirs = base.chunks
    at, rows = (np.fromiter(values, dtype=np.int64) for values in (references.keys(), references.values()))
    changed, bases = (np.fromiter(values, dtype=np.int64) for values in (deltas.keys(), deltas.values()))
    # A reference is the base's row again; what that one builds on is needed, itself it is not.
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


@dataclass(slots=True)
class _OpenFile:
    name: str
    writer: ObjectWriter
    size: int = 0
    busy_seconds: float = 0.0

    def write(self, data: Bytes) -> None:
        began = time.perf_counter()
        self.writer.write(data)
        self.busy_seconds += time.perf_counter() - began
        self.size += len(data)

    def progress(self) -> tuple[int, float]:
        """Bytes that the storage has taken, and for how long it was busy. A local disk is behind the page cache."""
        flushed: tuple[int, float] | None = getattr(self.writer, "flushed", None)
        return flushed or (self.size, self.busy_seconds)


def write_items(
    storage: CheckpointStorage,
    stem: str,
    sources: Iterable[Source],
    threads: int,
    schedule: Schedule | None = None,
    transforms: Transforms | None = None,
    base: Base | None = None,
    restore_limit: float = RESTORE_LIMIT,
    process: EncoderProcess | None = None,
) -> list[StoredItem]:
    """Write every source, in order, to data files named after `stem`; returns where each lies.

    `schedule` says how hard to compress (always `Effort.TYPED` without one); `transforms` come after the codec. What has not
    changed since `base`, or only a little, is stored as a reference or a delta to it; a chunk's chain may then cost
    `restore_limit` times what the chunk does alone. `process` encodes what lies in memory that it shares; the bytes that
    are written are the same.

    Everything is durable and visible on return. On any error nothing is left behind and the error is raised.
    """
    files: list[DataFile] = []
    current: _OpenFile | None = None
    chunks = _Chunks(base)
    places: list[tuple[int, int, int]] = []
    plan, after = schedule or Steady(Effort.TYPED), transforms or Transforms()
    encoder = ChunkEncoder(plan, after, base, restore_limit)

    def encode(job: _Job) -> Encoded:
        return encoder.encode(job.read(), job.plan.kind, None if base is None else job.key())

    jobs = each_paused(_jobs(sources, places))
    if process is not None and not after.descriptors and process.begin():
        in_order = Offload(process, encoder, plan).run_in_order(jobs, encode, threads)
    else:
        in_order = run_in_order(jobs, encode, threads)
    try:
        with contextlib.closing(in_order) as encoded_chunks:
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
                current.write(encoded.stored)
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


def discard(storage: CheckpointStorage, names: list[str]) -> None:
    """Remove data files that nothing refers to. A failure leaves them where they are, and is an event."""
    try:
        storage.delete(names)
    except MillraceError as error:
        emit(Event(name="checkpoint.discard.failed", subject=storage.url, detail=str(error)))


def _jobs(sources: Iterable[Source], places: list[tuple[int, int, int]]) -> Iterator[_Job]:
    """Lay out the sources as chunks, noting in `places` the first chunk, the byte in it, and the length of each."""
    packer = Packer()
    held: dict[int, Source] = {}
    row = 0

    def job(plan: ChunkPlan) -> _Job:
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
        return _Job(plan, used)

    for number, source in enumerate(sources):
        nbytes = source.nbytes
        places.append((0, 0, 0))
        if nbytes:
            held[number] = source
        for plan in packer.add(number, nbytes, source.kind):
            yield job(plan)
    for plan in packer.flush():
        yield job(plan)
