"""Encodes the chunks of one save, each in the form that `chunk_forms` chooses. Thread-safe."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field

from millrace.checkpoint.codec.effort import Schedule
from millrace.checkpoint.codec.planes import Array, Kind, PlaneCodec, as_bytes, checksum
from millrace.checkpoint.format.chains import MAX_BASES, chain_costs
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.writing.bases import Base
from millrace.checkpoint.writing.chunk_forms import BaseChunk, Bytes, Chain, Form, Setting, form_of
from millrace.checkpoint.writing.delta import RESTORE_LIMIT, ChunkKey
from millrace.errors import CorruptCheckpointError, MillraceError
from millrace.events import Event, emit


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk as it will be stored. `base` is a row of the base's table: what a delta changes, or, where `stored` is None,
    the chunk that a reference stands for.
    """

    stored: Bytes | None
    kind: Kind
    raw_bytes: int
    raw_checksum: int
    stored_checksum: int = 0
    base: int | None = None


@dataclass(frozen=True, slots=True)
class FoundBase:
    """A chunk of the base: its row there, and what decides about a delta to it."""

    base: Base
    row: int
    raw_checksum: int
    chain: Chain | None
    limit: float


# Without slots: those would be shared by all threads.
@dataclass
class _Codecs(threading.local):
    """One codec a thread."""

    codec: PlaneCodec = field(default_factory=PlaneCodec)


class ChunkEncoder:
    """Encodes the chunks of one save. `restore_limit`: what a chunk's chain may cost, in sizes of the chunk alone."""

    def __init__(
        self,
        schedule: Schedule,
        transforms: Transforms,
        base: Base | None = None,
        restore_limit: float = RESTORE_LIMIT,
    ) -> None:
        self._setting = Setting(next_effort=schedule.next, transform=transforms.apply, encoded=schedule.encoded)
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
        """Whether there is a base, whose bytes can be read as far as is known."""
        return self._base is not None

    def encode(self, raw: Array, kind: Kind, key: ChunkKey | None = None) -> Encoded:
        """Encode a chunk of bytes. `key` says what it holds, where there is a base to look for it in."""
        found = None if key is None else self.find(key, kind, raw.size)
        chunk = None
        if key is not None and found is not None:
            chunk = BaseChunk(
                raw_checksum=found.raw_checksum,
                read=functools.partial(self._read, found.base, found.row, key),
                chain=found.chain,
                limit=found.limit,
            )
        form = form_of(self._codecs.codec, self._setting, raw, kind, chunk)
        return encoded(form, kind, raw.size, found)

    def find(self, key: ChunkKey, kind: Kind, nbytes: int) -> FoundBase | None:
        """The chunk of the base that holds the same, if there is one."""
        base = self._base
        row = None if base is None else base.find(key, kind, nbytes)
        if base is None or row is None:
            return None
        costs, chain = self._costs, None
        if costs is not None and int(costs.deltas[row]) < MAX_BASES:
            chain = Chain(int(costs.chain_bytes[row]), int(costs.root_bytes[row]))
        return FoundBase(base, row, int(base.chunks["raw_checksum"][row]), chain, self._limit)

    def give_up(self, base: Base, problem: str) -> None:
        """Make nothing against the base any more: what failed once may take long to fail."""
        with self._lock:
            first, self._base = self._base is not None, None
        if first:
            emit(Event(name="checkpoint.base.unreadable", subject=base.directory, detail=problem))

    def _read(self, base: Base, row: int, key: ChunkKey) -> Array | None:
        """The base's bytes; None when they are gone, and then the whole base is."""
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


def encoded(form: Form, kind: Kind, raw_bytes: int, found: FoundBase | None) -> Encoded:
    """A form with what the table of chunks says of it."""
    return Encoded(
        form.stored,
        kind,
        raw_bytes,
        form.raw_checksum,
        form.stored_checksum,
        found.row if found is not None and form.to_base else None,
    )
