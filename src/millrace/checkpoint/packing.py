"""Turns a stream of items into data files of encoded chunks: threads encode, the caller's thread appends in order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from typing_extensions import Buffer

from millrace.checkpoint.effort import Schedule, Steady
from millrace.checkpoint.format import DataFile
from millrace.checkpoint.garbage import collection_paused, each_paused
from millrace.checkpoint.layout import ChunkPlan, Packer
from millrace.checkpoint.pipeline import run_in_order
from millrace.checkpoint.planes import Effort, Kind, PlaneCodec, as_bytes, checksum
from millrace.checkpoint.storage import CheckpointStorage
from millrace.checkpoint.tables import NO_BASE, Table, chunk_table
from millrace.checkpoint.transforms import Transforms
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

    def read(self, start: int, stop: int) -> Buffer: ...


@dataclass(frozen=True, slots=True)
class RankData:
    """What one rank wrote: its data files, the chunks in them in the order in which they lie there, and the descriptors of
    the extensions that these went through. Picklable.
    """

    files: tuple[DataFile, ...]
    chunks: Table
    transforms: tuple[str, ...] = ()


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


@dataclass(slots=True)
class _Encoded:
    stored: bytes
    row: dict[str, int]


@dataclass(slots=True)
class _OpenFile:
    name: str
    writer: ObjectWriter
    size: int = 0
    busy_seconds: float = 0.0

    def write(self, data: bytes) -> None:
        began = time.perf_counter()
        self.writer.write(data)
        self.busy_seconds += time.perf_counter() - began
        self.size += len(data)

    def progress(self) -> tuple[int, float]:
        """Bytes that the storage has taken, and for how long it was busy. A local disk is behind the page cache."""
        flushed: tuple[int, float] | None = getattr(self.writer, "flushed", None)
        return flushed or (self.size, self.busy_seconds)


# Without slots: those would be shared by all threads.
@dataclass
class _Codecs(threading.local):
    """One codec a thread."""

    codec: PlaneCodec = field(default_factory=PlaneCodec)


def write_items(
    storage: CheckpointStorage,
    stem: str,
    sources: Iterable[Source],
    threads: int,
    schedule: Schedule | None = None,
    transforms: Transforms | None = None,
) -> list[StoredItem]:
    """Write every source, in order, to data files named after `stem`; returns where each lies.

    `schedule` says how hard to compress (always `Effort.TYPED` without one); `transforms` come after the codec.

    Everything is durable and visible on return. On any error nothing is left behind and the error is raised.
    """
    files: list[DataFile] = []
    current: _OpenFile | None = None
    rows: list[dict[str, int]] = []
    places: list[tuple[int, int, int]] = []
    codecs = _Codecs()
    plan, after = schedule or Steady(Effort.TYPED), transforms or Transforms()

    def encode(job: _Job) -> _Encoded:
        return _encode(job, codecs.codec, plan, after)

    try:
        with contextlib.closing(run_in_order(each_paused(_jobs(sources, places)), encode, threads)) as encoded_chunks:
            for encoded in encoded_chunks:
                if current is None or current.size >= _FILE_BYTES:
                    if current is not None:
                        current.writer.close()
                        files.append(DataFile(current.name, current.size))
                    name = f"data-{stem}-{len(files)}.millrace"
                    current = _OpenFile(name, storage.open_writer(name))
                rows.append({**encoded.row, "file": len(files), "offset": current.size})
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
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
    data = RankData(tuple(files), chunk_table(columns), after.descriptors)
    with collection_paused():
        return [StoredItem(data, *place) for place in places]


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


def _encode(job: _Job, codec: PlaneCodec, schedule: Schedule, transforms: Transforms) -> _Encoded:
    pieces = [source.read(start, stop) for (_, start, stop), source in zip(job.plan.parts, job.sources, strict=True)]
    raw = as_bytes(pieces[0] if len(pieces) == 1 else b"".join(pieces)).data
    kind = job.plan.kind
    effort, began = schedule.next(), time.perf_counter()
    stored = transforms.apply(b"".join(codec.encode(raw, kind, effort=effort)))
    schedule.encoded(effort, len(raw), len(stored), time.perf_counter() - began)
    row = {
        "kind": kind.code,
        "base": NO_BASE,
        "raw_bytes": len(raw),
        "stored_bytes": len(stored),
        "stored_checksum": checksum(stored),
        "raw_checksum": checksum(raw),
    }
    return _Encoded(stored, row)
