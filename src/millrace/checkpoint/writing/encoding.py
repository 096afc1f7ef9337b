"""Encodes the chunks of one save. Thread-safe. Reads chunks of the base, and does not import torch.

A chunk is stored whole, as a delta to a chunk of an earlier checkpoint, or as a reference to it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import perf_counter

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
        # A save reads memory that does not change before its end, or copies of it. So a chunk that is neither compressed
        # nor transformed refers to its raw bytes.
        self._raw_stays = not transforms.descriptors
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
            if reference is not None and same_bytes(raw, reference):
                return Encoded(None, kind, raw.size, digest, base=row)
            effort = self._schedule.next()
        if reference is None:
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
        full_bytes = scale * self._trial(some, kind, None)
        if fits(scale * self._trial(some, kind, others)):
            stored, sparse = self._stored(raw, kind, effort, reference, began)
            # The result for the whole chunk decides: the sample may be misleading.
            if fits(len(stored)):
                return Encoded(stored, kind, raw.size, digest, checksum(stored), row, sparse=sparse)
            began = perf_counter()
        stored, _ = self._stored(raw, kind, effort, None, began)
        return Encoded(stored, kind, raw.size, digest, checksum(stored))

    def _whole(self, raw: Array, kind: Kind, digest: int, effort: Effort) -> Encoded:
        began = perf_counter()
        if effort == Effort.RAW and self._raw_stays:
            parts = self._codec.encode(raw.data, kind, effort=Effort.RAW)
            head, rest = (memoryview(part) for part in parts)
            self._schedule.encoded(Effort.RAW, raw.size, head.nbytes + rest.nbytes, perf_counter() - began)
            return Encoded(head, kind, raw.size, digest, checksum(head, rest), rest=rest)
        stored, _ = self._stored(raw, kind, effort, None, began)
        return Encoded(stored, kind, raw.size, digest, checksum(stored))

    def _trial(self, some: Array, kind: Kind, others: Array | None) -> int:
        """The encoded size of a sample."""
        # Without the greatest effort, which makes both forms smaller by the same few per cent.
        parts = self._codec.encode(some.data, kind, None if others is None else others.data)
        return sum(memoryview(part).nbytes for part in parts)

    def _stored(
        self, raw: Array, kind: Kind, effort: Effort, reference: Array | None, began: float
    ) -> tuple[bytes, bool]:
        """The stored bytes, and whether they are a sparse delta."""
        base = None if reference is None else reference.data
        parts = self._codec.encode(raw.data, kind, base, effort=effort)
        stored = self._transforms.apply(b"".join(parts))
        self._schedule.encoded(effort, raw.size, len(stored), perf_counter() - began)
        return stored, is_sparse(memoryview(parts[0]))

    def _read(self, base: Base, row: int, key: ChunkKey) -> Array | None:
        """The base's bytes; None if they are gone. Then the whole base is not used any more."""
        try:
            reference = as_bytes(base.read(row, key))
            if checksum(reference.data) == int(base.chunks["raw_checksum"][row]):
                return reference
            problem = "its values were changed since they were saved"
        except MillraceError as error:
            problem = str(error)
        self._give_up(base, problem)
        return None

    def _give_up(self, base: Base, problem: str) -> None:
        """Stop using the base after an error: another attempt could take long to fail."""
        with self._lock:
            first, self._base = self._base is not None, None
        if first:
            emit(Event(name="checkpoint.base.unreadable", subject=base.directory, detail=problem))
