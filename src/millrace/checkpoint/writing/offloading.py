"""Gives the chunks of a save to the encoder process as far as they lie in shared memory, the others to threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from millrace.checkpoint.codec.effort import Schedule
from millrace.checkpoint.codec.planes import Effort, Kind
from millrace.checkpoint.host.pipeline import ThreadPool
from millrace.checkpoint.state.arena import regions
from millrace.checkpoint.writing.bases import MemoryBase, Spans
from millrace.checkpoint.writing.chunk_forms import Form
from millrace.checkpoint.writing.delta import ChunkKey
from millrace.checkpoint.writing.encoder_process import EncoderProcess, SharedBase, pieces_in
from millrace.checkpoint.writing.encoder_protocol import Answer, Shape
from millrace.checkpoint.writing.encoding import CHANGED_BASE, ChunkEncoder, Encoded, FoundBase, encoded


class Chunk(Protocol):
    """One chunk to be encoded."""

    @property
    def kind(self) -> Kind: ...

    def key(self) -> ChunkKey: ...

    def spans(self) -> Spans | None:
        """The addresses and lengths of its pieces; None where it is not in this process's memory as it will be stored."""
        ...


Job = TypeVar("Job", bound=Chunk)


@dataclass(slots=True)
class _Out:
    """A chunk that the process has."""

    ticket: int
    effort: Effort
    raw_bytes: int
    found: FoundBase | None


class Offload:
    """The part of the encoder process in one save. For one thread."""

    def __init__(self, process: EncoderProcess, encoder: ChunkEncoder, schedule: Schedule) -> None:
        self._process, self._encoder, self._schedule = process, encoder, schedule

    def run_in_order(
        self, jobs: Iterable[Job], work: Callable[[Job], Encoded], threads: int
    ) -> Generator[Encoded, None, None]:
        """As `pipeline.run_in_order`, of which `work` is done where the process does not do it. What is yielded is good
        until the next one is asked for.
        """
        pool = ThreadPool(work, threads)
        pending: deque[tuple[Job, _Out | None, Future[Encoded] | None]] = deque()

        def begin(job: Job) -> tuple[Job, _Out | None, Future[Encoded] | None]:
            out = self._offer(job)
            return job, out, pool.submit(job) if out is None else None

        def end() -> Generator[Encoded, None, None]:
            job, out, future = pending.popleft()
            if out is None:
                yield (future or pool.submit(job)).result()
                return
            try:
                result = self._result(job, out)
                yield pool.submit(job).result() if result is None else result
            finally:
                self._process.release(out.ticket)

        try:
            for job in jobs:
                pending.append(begin(job))
                if len(pending) >= self._process.window:
                    yield from end()
            while pending:
                yield from end()
        finally:
            for _, _, future in pending:
                if future is not None:
                    future.cancel()
            for _, out, _ in pending:
                # What the process still reads may be overwritten as soon as this save has ended.
                if out is not None:
                    self._process.wait(out.ticket)
                    self._process.release(out.ticket)
            pool.close()

    def _offer(self, job: Chunk) -> _Out | None:
        """Give a chunk to the process, if it can be."""
        spans = job.spans()
        raw = None if spans is None else pieces_in(regions(), *spans)
        if spans is None or raw is None:
            return None
        raw_bytes, found, base = sum(spans[1]), None, None
        if self._encoder.has_base:
            key = job.key()
            found = self._encoder.find(key, job.kind, raw_bytes)
            if found is not None:
                base = _shared_base(found, key)
                if base is None:
                    return None
        effort = self._schedule.next()
        ticket = self._process.submit(raw, job.kind, effort, base)
        return None if ticket is None else _Out(ticket, effort, raw_bytes, found)

    def _result(self, job: Chunk, out: _Out) -> Encoded | None:
        result = self._process.wait(out.ticket)
        if result is None:
            return None
        answer, stored = result
        if answer.base_changed and out.found is not None:
            self._encoder.give_up(out.found.base, CHANGED_BASE)
        for nbytes, seconds in _taken(answer):
            self._schedule.encoded(out.effort, out.raw_bytes, nbytes, seconds)
        shape = answer.shape
        form = Form(
            None if shape == Shape.REFERENCE else stored,
            answer.raw_checksum,
            answer.stored_checksum,
            to_base=shape != Shape.FULL,
        )
        return encoded(form, job.kind, out.raw_bytes, out.found)


def _taken(answer: Answer) -> list[tuple[int, float]]:
    each = ((answer.first_bytes, answer.first_seconds), (answer.second_bytes, answer.second_seconds))
    return [(nbytes, seconds) for nbytes, seconds in each if nbytes]


def _shared_base(found: FoundBase, key: ChunkKey) -> SharedBase | None:
    """The base's bytes in shared memory; None where they are elsewhere."""
    spans = found.base.spans(key) if isinstance(found.base, MemoryBase) else None
    pieces = None if spans is None else pieces_in(regions(), *spans)
    if pieces is None:
        return None
    return SharedBase(pieces=pieces, raw_checksum=found.raw_checksum, chain=found.chain, limit=found.limit)
