"""One chunk in the form that serves best: whole, as a delta to an earlier checkpoint's, or as a reference to it.

Threads of this process and the helper process (`encoder_main`) do the same by this function. No torch, no I/O of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from millrace.checkpoint.codec.planes import Array, Effort, Kind, PlaneCodec, checksum
from millrace.checkpoint.writing.delta import same_bytes, sample, worth_a_delta

Bytes = bytes | memoryview


class Chain(NamedTuple):
    """What it takes to restore a base: the stored bytes of its chain, and those of its root alone."""

    chain_bytes: int
    root_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseChunk:
    """An earlier chunk of the same items.

    `read` gives its bytes, verified, or None when they are gone. `chain` is None where no delta may be made to it. `limit`:
    what a restore may cost, in sizes of the chunk alone.
    """

    raw_checksum: int
    read: Callable[[], Array | None]
    chain: Chain | None
    limit: float


@dataclass(frozen=True, slots=True)
class Form:
    """A chunk as it will be stored. `stored` is None for a reference; `to_base` says that it needs the base."""

    stored: Bytes | None
    raw_checksum: int
    stored_checksum: int = 0
    to_base: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How to encode: `next_effort` is asked where a chunk is compressed, `transform` comes after the codec, and `encoded` is
    told (effort, raw bytes, stored bytes, seconds).
    """

    next_effort: Callable[[], Effort]
    transform: Callable[[bytes], bytes]
    encoded: Callable[[Effort, int, int, float], None]


def form_of(codec: PlaneCodec, setting: Setting, raw: Array, kind: Kind, base: BaseChunk | None) -> Form:
    """Encode the bytes of a chunk. Raises what reading the base and the transformation raise."""
    work = _Work(codec, setting, raw, kind, checksum(raw.data))
    if base is None:
        return work.whole(setting.next_effort())
    unchanged = base.raw_checksum == work.digest
    effort = Effort.RAW if unchanged else setting.next_effort()
    if not unchanged and effort == Effort.RAW:
        # A difference that is not compressed is as long as the chunk.
        return work.whole(effort)
    reference = base.read()
    if reference is None:
        return work.whole(setting.next_effort() if unchanged else effort)
    if unchanged and same_bytes(raw, reference):
        return Form(None, work.digest, to_base=True)
    if unchanged:
        effort = setting.next_effort()
    if base.chain is None:
        return work.whole(effort)
    return work.changed(effort, reference, base.chain, base.limit)


@dataclass(frozen=True, slots=True)
class _Work:
    codec: PlaneCodec
    setting: Setting
    raw: Array
    kind: Kind
    digest: int

    def changed(self, effort: Effort, reference: Array, chain: Chain, limit: float) -> Form:
        """Whole or as a delta, whichever a trial on a sample says."""

        def fits(delta_bytes: float, full_bytes: float) -> bool:
            return worth_a_delta(delta_bytes=delta_bytes, full_bytes=full_bytes, limit=limit, **chain._asdict())

        raw, width = self.raw, self.kind.width
        some, others = sample(raw, width), sample(reference, width)
        began = perf_counter()
        scale = raw.size / some.size
        full_bytes = scale * self._trial(some, None)
        if fits(scale * self._trial(some, others), full_bytes):
            stored = self._stored(effort, reference, began)
            # The whole decides: a sample may be wrong about it.
            if fits(len(stored), full_bytes):
                return Form(stored, self.digest, checksum(stored), to_base=True)
            began = perf_counter()
        stored = self._stored(effort, None, began)
        return Form(stored, self.digest, checksum(stored))

    def whole(self, effort: Effort) -> Form:
        stored = self._stored(effort, None, perf_counter())
        return Form(stored, self.digest, checksum(stored))

    def _trial(self, some: Array, others: Array | None) -> int:
        """How long a sample becomes."""
        # Without the greatest effort, which changes both forms by the same few per cent.
        parts = self.codec.encode(some.data, self.kind, None if others is None else others.data)
        return sum(memoryview(part).nbytes for part in parts)

    def _stored(self, effort: Effort, reference: Array | None, began: float) -> bytes:
        base = None if reference is None else reference.data
        parts = self.codec.encode(self.raw.data, self.kind, base, effort=effort)
        stored = self.setting.transform(b"".join(parts))
        self.setting.encoded(effort, self.raw.size, len(stored), perf_counter() - began)
        return stored
