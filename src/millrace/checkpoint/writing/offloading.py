"""Sends the chunks of a save that are in shared memory to the encoder process, and the others to threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from millrace.checkpoint.codec.chunks import Effort, Kind
from millrace.checkpoint.codec.effort import Schedule
from millrace.checkpoint.state.arena import regions
from millrace.checkpoint.writing.bases import MemoryBase, Spans
from millrace.checkpoint.writing.chunk_forms import Form
from millrace.checkpoint.writing.delta import ChunkKey
from millrace.checkpoint.writing.encoder_process import EncoderProcess, SharedBase, pieces_in
from millrace.checkpoint.writing.encoder_protocol import EncodeResult, ResultKind
from millrace.checkpoint.writing.encoding import CHANGED_BASE, BaseMatch, ChunkEncoder, Encoded, encoded
from millrace.runtime.pipeline import ThreadPool


class Chunk(Protocol):
    """One chunk to be encoded."""

    @property
    def kind(self) -> Kind: ...

    def key(self) -> ChunkKey: ...

    def spans(self) -> Spans | None:
        """The addresses and lengths of its pieces; None if this process's memory does not have the bytes to store."""
        ...


ChunkType = TypeVar("ChunkType", bound=Chunk)


@dataclass(slots=True)
class _Offloaded:
    """A chunk that was sent to the process."""

    ticket: int
    effort: Effort
    raw_bytes: int
    found: BaseMatch | None


class Offload:
    """Uses the encoder process in one save. For one thread."""

    def __init__(self, process: EncoderProcess, encoder: ChunkEncoder, schedule: Schedule) -> None:
        self._process, self._encoder, self._schedule = process, encoder, schedule

    def run_in_order(
        self, chunks: Iterable[ChunkType], work: Callable[[ChunkType], Encoded], threads: int
    ) -> Generator[Encoded, None, None]:
        """As `pipeline.run_in_order`; `work` runs for the chunks that the process does not encode. Each result is valid
        until the next one is requested.
        """
        pool = ThreadPool(work, threads)
        pending: deque[tuple[ChunkType, _Offloaded | None, Future[Encoded] | None]] = deque()

        def begin(chunk: ChunkType) -> tuple[ChunkType, _Offloaded | None, Future[Encoded] | None]:
            out = self._offer(chunk)
            return chunk, out, pool.submit(chunk) if out is None else None

        def end() -> Generator[Encoded, None, None]:
            chunk, out, future = pending.popleft()
            if out is None:
                yield (future or pool.submit(chunk)).result()
                return
            try:
                result = self._result(chunk, out)
                yield pool.submit(chunk).result() if result is None else result
            finally:
                self._process.release(out.ticket)

        try:
            for chunk in chunks:
                pending.append(begin(chunk))
                if len(pending) >= self._process.window:
                    yield from end()
            while pending:
                yield from end()
        finally:
            for _, _, future in pending:
                if future is not None:
                    future.cancel()
            for _, out, _ in pending:
                # The process may still read memory that is overwritten as soon as this save has ended.
                if out is not None:
                    self._process.wait(out.ticket)
                    self._process.release(out.ticket)
            pool.close()

    def _offer(self, chunk: Chunk) -> _Offloaded | None:
        """Send a chunk to the process; None if that is not possible."""
        spans = chunk.spans()
        raw = None if spans is None else pieces_in(regions(), *spans)
        if spans is None or raw is None:
            return None
        raw_bytes, found, base = sum(spans[1]), None, None
        if self._encoder.has_base:
            key = chunk.key()
            found = self._encoder.find(key, chunk.kind, raw_bytes)
            if found is not None:
                base = _shared_base(found, key)
                if base is None:
                    return None
        effort = self._schedule.next()
        ticket = self._process.submit(raw, chunk.kind, effort, base)
        return None if ticket is None else _Offloaded(ticket, effort, raw_bytes, found)

    def _result(self, chunk: Chunk, out: _Offloaded) -> Encoded | None:
        outcome = self._process.wait(out.ticket)
        if outcome is None:
            return None
        result, stored = outcome
        if result.base_changed and out.found is not None:
            self._encoder.give_up(out.found.base, CHANGED_BASE)
        for nbytes, seconds in _codec_runs(result):
            self._schedule.encoded(out.effort, out.raw_bytes, nbytes, seconds)
        form = Form(
            None if result.kind == ResultKind.REFERENCE else stored,
            result.raw_checksum,
            result.stored_checksum,
            to_base=result.kind != ResultKind.FULL,
        )
        return encoded(form, chunk.kind, out.raw_bytes, out.found)


def _codec_runs(result: EncodeResult) -> list[tuple[int, float]]:
    each = ((result.first_bytes, result.first_seconds), (result.second_bytes, result.second_seconds))
    return [(nbytes, seconds) for nbytes, seconds in each if nbytes]


def _shared_base(found: BaseMatch, key: ChunkKey) -> SharedBase | None:
    """The base's bytes in shared memory; None if they are not there."""
    spans = found.base.spans(key) if isinstance(found.base, MemoryBase) else None
    pieces = None if spans is None else pieces_in(regions(), *spans)
    if pieces is None:
        return None
    return SharedBase(pieces=pieces, raw_checksum=found.raw_checksum, chain=found.chain, limit=found.limit)
