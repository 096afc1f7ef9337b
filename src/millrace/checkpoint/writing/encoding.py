"""Encodes the chunks of one save. Thread-safe. Reads chunks of the base, and does not import torch.

`form_of` chooses the form of each chunk: whole, a delta to a chunk of an earlier checkpoint, or a reference to it. It is
thread-safe with one codec per thread; `ChunkEncoder` has one for each thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from millrace.checkpoint.codec.chunks import Array, Effort, Kind, as_bytes, checksum
from millrace.checkpoint.codec.planes import is_sparse
from millrace.checkpoint.codec.registry import ChunkCodec, Schedule
from millrace.checkpoint.format.tables import MAX_BASES, chain_costs
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.writing.bases import Base
from millrace.checkpoint.writing.delta import RESTORE_LIMIT, ChunkKey, same_bytes, sample, worth_a_delta
from millrace.errors import CorruptCheckpointError, MillraceError
from millrace.events import Event, emit

Bytes = bytes | memoryview


class Chain(NamedTuple):
    """The cost of restoring a base: the stored bytes of its chain, and those of its root alone."""

    chain_bytes: int
    root_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseChunk:
    """An earlier chunk of the same items.

    `read` returns its verified bytes, or None if they are gone. `chain` is None if no delta may be made to it. `limit`: the
    maximum cost of a restore, in sizes of the chunk alone.
    """

    raw_checksum: int
    read: Callable[[], Array | None]
    chain: Chain | None
    limit: float


@dataclass(frozen=True, slots=True)
class Form:
    """A chunk as it will be stored: `stored`, then `rest`, which is empty unless the hooks allow it. `stored` is None for a
    reference; `to_base`: whether it needs the base; `sparse`: whether it is a sparse delta.
    """

    stored: Bytes | None
    raw_checksum: int
    stored_checksum: int = 0
    to_base: bool = False
    rest: Bytes = b""
    sparse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeHooks:
    """Functions that the encoding calls: `next_effort` for each chunk to compress, `transform` after the codec, and
    `encoded` with effort, raw bytes, stored bytes and seconds.

    `raw_stays`: the raw bytes do not change until the form is written, and nothing transforms them. Then a chunk that is
    not compressed refers to them, without a copy.
    """

    next_effort: Callable[[], Effort]
    transform: Callable[[bytes], bytes]
    encoded: Callable[[Effort, int, int, float], None]
    raw_stays: bool = False


def form_of(codec: ChunkCodec, hooks: EncodeHooks, raw: Array, kind: Kind, base: BaseChunk | None) -> Form:
    """Encode the bytes of a chunk. Raises errors of reading the base and of the transformation."""
    work = _Work(codec, hooks, raw, kind, checksum(raw.data))
    if base is None:
        return work.whole(hooks.next_effort())
    unchanged = base.raw_checksum == work.digest
    effort = Effort.RAW if unchanged else hooks.next_effort()
    if not unchanged and effort == Effort.RAW:
        # A difference without compression is as long as the chunk.
        return work.whole(effort)
    reference = base.read()
    if reference is None:
        return work.whole(hooks.next_effort() if unchanged else effort)
    if unchanged and same_bytes(raw, reference):
        return Form(None, work.digest, to_base=True)
    if unchanged:
        effort = hooks.next_effort()
    if base.chain is None:
        return work.whole(effort)
    return work.changed(effort, reference, base.chain, base.limit)


@dataclass(frozen=True, slots=True)
class _Work:
    codec: ChunkCodec
    hooks: EncodeHooks
    raw: Array
    kind: Kind
    digest: int

    def changed(self, effort: Effort, reference: Array, chain: Chain, limit: float) -> Form:
        """Encode whole or as a delta, depending on a trial with a sample."""

        def fits(delta_bytes: float, full_bytes: float) -> bool:
            return worth_a_delta(delta_bytes=delta_bytes, full_bytes=full_bytes, limit=limit, **chain._asdict())

        raw, width = self.raw, self.kind.width
        some, others = sample(raw, width), sample(reference, width)
        began = perf_counter()
        scale = raw.size / some.size
        full_bytes = scale * self._trial(some, None)
        if fits(scale * self._trial(some, others), full_bytes):
            stored, sparse = self._stored(effort, reference, began)
            # The result for the whole chunk decides: the sample may be misleading.
            if fits(len(stored), full_bytes):
                return Form(stored, self.digest, checksum(stored), to_base=True, sparse=sparse)
            began = perf_counter()
        stored, _ = self._stored(effort, None, began)
        return Form(stored, self.digest, checksum(stored))

    def whole(self, effort: Effort) -> Form:
        if effort == Effort.RAW and self.hooks.raw_stays:
            return self._uncompressed()
        stored, _ = self._stored(effort, None, perf_counter())
        return Form(stored, self.digest, checksum(stored))

    def _uncompressed(self) -> Form:
        began = perf_counter()
        head, rest = (memoryview(part) for part in self.codec.encode(self.raw.data, self.kind, effort=Effort.RAW))
        self.hooks.encoded(Effort.RAW, self.raw.size, head.nbytes + rest.nbytes, perf_counter() - began)
        return Form(head, self.digest, checksum(head, rest), rest=rest)

    def _trial(self, some: Array, others: Array | None) -> int:
        """The encoded size of a sample."""
        # Without the greatest effort, which makes both forms smaller by the same few per cent.
        parts = self.codec.encode(some.data, self.kind, None if others is None else others.data)
        return sum(memoryview(part).nbytes for part in parts)

    def _stored(self, effort: Effort, reference: Array | None, began: float) -> tuple[bytes, bool]:
        """The stored bytes, and whether they are a sparse delta."""
        base = None if reference is None else reference.data
        parts = self.codec.encode(self.raw.data, self.kind, base, effort=effort)
        stored = self.hooks.transform(b"".join(parts))
        self.hooks.encoded(effort, self.raw.size, len(stored), perf_counter() - began)
        return stored, is_sparse(memoryview(parts[0]))


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk as it will be stored: `stored`, then `rest`. `base` is a row of the base's table: the base of a delta or,
    where `stored` is None, the chunk that a reference stands for.
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


@dataclass(frozen=True, slots=True)
class BaseMatch:
    """The chunk of the base with the same content: its row there, and the limits for a delta to it."""

    base: Base
    row: int
    raw_checksum: int
    chain: Chain | None
    limit: float


# Without slots, which all threads would share.
@dataclass
class _Codecs(threading.local):
    """One codec per thread."""

    codec: ChunkCodec = field(default_factory=ChunkCodec)


class ChunkEncoder:
    """Encodes the chunks of one save. `restore_limit`: the maximum cost of a chunk's chain, in sizes of the chunk alone."""

    def __init__(
        self,
        schedule: Schedule,
        transforms: Transforms,
        base: Base | None = None,
        restore_limit: float = RESTORE_LIMIT,
    ) -> None:
        # A save reads memory that does not change before its end, or copies of it.
        self._hooks = EncodeHooks(
            next_effort=schedule.next,
            transform=transforms.apply,
            encoded=schedule.encoded,
            raw_stays=not transforms.descriptors,
        )
        self._codecs = _Codecs()
        self._lock = threading.Lock()
        self._base = base
        self._limit = restore_limit
        self._costs = None
        if base is not None:
            try:
                self._costs = chain_costs(base.chunks)
            except CorruptCheckpointError as error:
                self.give_up(base, error.message)

    def encode(self, raw: Array, kind: Kind, key: ChunkKey | None = None) -> Encoded:
        """Encode a chunk of bytes. `key` describes its content; without it the base is not used."""
        found = None if key is None else self.find(key, kind, raw.size)
        chunk = None
        if key is not None and found is not None:
            chunk = BaseChunk(
                raw_checksum=found.raw_checksum,
                read=functools.partial(self._read, found.base, found.row, key),
                chain=found.chain,
                limit=found.limit,
            )
        form = form_of(self._codecs.codec, self._hooks, raw, kind, chunk)
        return encoded(form, kind, raw.size, found)

    def find(self, key: ChunkKey, kind: Kind, nbytes: int) -> BaseMatch | None:
        """The chunk of the base with the same content; None if there is none."""
        base = self._base
        row = None if base is None else base.find(key, kind, nbytes)
        if base is None or row is None:
            return None
        costs, chain = self._costs, None
        if costs is not None and int(costs.deltas[row]) < MAX_BASES:
            chain = Chain(int(costs.chain_bytes[row]), int(costs.root_bytes[row]))
        return BaseMatch(base, row, int(base.chunks["raw_checksum"][row]), chain, self._limit)

    def give_up(self, base: Base, problem: str) -> None:
        """Stop using the base after an error: another attempt could take long to fail."""
        with self._lock:
            first, self._base = self._base is not None, None
        if first:
            emit(Event(name="checkpoint.base.unreadable", subject=base.directory, detail=problem))

    def _read(self, base: Base, row: int, key: ChunkKey) -> Array | None:
        """The base's bytes; None if they are gone. Then the whole base is not used any more."""
        try:
            reference = as_bytes(base.read(row, key))
            if checksum(reference.data) == int(base.chunks["raw_checksum"][row]):
                return reference
            problem = CHANGED_BASE
        except MillraceError as error:
            problem = str(error)
        self.give_up(base, problem)
        return None


CHANGED_BASE = "its values were changed since they were saved"


def encoded(form: Form, kind: Kind, raw_bytes: int, found: BaseMatch | None) -> Encoded:
    """A form with its columns of the chunk table."""
    return Encoded(
        form.stored,
        kind,
        raw_bytes,
        form.raw_checksum,
        form.stored_checksum,
        found.row if found is not None and form.to_base else None,
        form.rest,
        form.sparse,
    )
