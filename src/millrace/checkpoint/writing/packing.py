"""Writes a stream of items as data files of encoded chunks: threads encode, the caller's thread appends in order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import Array, Effort, Kind, as_bytes
from millrace.checkpoint.codec.effort import Schedule, Steady
from millrace.checkpoint.format.layout import ChunkPlan, Packer
from millrace.checkpoint.format.manifest import DataFile
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.storage.storage import CheckpointStorage
from millrace.checkpoint.writing.bases import Base, ItemKey
from millrace.checkpoint.writing.chunk_forms import Bytes
from millrace.checkpoint.writing.delta import RESTORE_LIMIT, ChunkKey
from millrace.checkpoint.writing.encoding import ChunkEncoder, Encoded
from millrace.checkpoint.writing.rank_data import ChunkTableBuilder, StoredItem
from millrace.errors import MillraceError
from millrace.events import Event, emit
from millrace.origin import ObjectWriter
from millrace.runtime.garbage import collection_paused, each_paused
from millrace.runtime.memory import Memory
from millrace.runtime.pipeline import run_in_order

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
        """Bytes that the storage has accepted, and its busy seconds. A local disk lags behind the page cache."""
        flushed: tuple[int, float] | None = getattr(self.writer, "flushed", None)
        return flushed or (self.size, self.busy_seconds)


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


def discard(storage: CheckpointStorage, names: list[str]) -> None:
    """Remove data files that no manifest names. A failure leaves them in place, and is an event."""
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
