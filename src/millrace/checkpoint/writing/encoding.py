"""Encodes the chunks of one save, each in the form that `chunk_forms` chooses. Thread-safe."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field

from millrace.checkpoint.codec.chunks import Array, Kind, as_bytes, checksum
from millrace.checkpoint.codec.effort import Schedule
from millrace.checkpoint.codec.registry import ChunkCodec
from millrace.checkpoint.format.chains import MAX_BASES, chain_costs
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.writing.bases import Base
from millrace.checkpoint.writing.chunk_forms import BaseChunk, Bytes, Chain, EncodeHooks, Form, form_of
from millrace.checkpoint.writing.delta import RESTORE_LIMIT, ChunkKey
from millrace.errors import CorruptCheckpointError, MillraceError
from millrace.events import Event, emit


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

    @property
    def has_base(self) -> bool:
        """Whether there is a base whose bytes could be read so far."""
        return self._base is not None

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
