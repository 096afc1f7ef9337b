"""The registry of codecs, and the effort with which a save uses them: constant, or adapted to the speed of the storage.

To add a codec, write its module and add one line to `CODECS` (`docs/contributing/new-codec.md`). Every writer and reader
encodes and decodes chunks by `ChunkCodec`.

Compression saves time only while storage is slower than the codec. An `Adaptive` schedule measures both, and compresses the
share of chunks that keeps both busy: all chunks for slow storage, none for fast storage. `typed_share` computes this share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import MAX_CHUNK_OVERHEAD_BYTES, Codec, Effort, Kind
from millrace.checkpoint.codec.planes import PlaneCodec
from millrace.errors import ConfigurationError, CorruptCheckpointError

# In the first byte of a stored chunk: another codec than the plane codec wrote it, whose number is in bits 3 to 7.
_OTHER_CODEC, _NUMBER_SHIFT = 0x04, 3


@dataclass(frozen=True, slots=True)
class RegisteredCodec:
    """A codec and the `compression=` names that select it, each with a level below `Effort.LEVELS`."""

    make: Callable[[], Codec]
    levels: Mapping[str, int]


# The position is the number of the codec in stored chunks: append, and never remove or reorder.
CODECS: tuple[RegisteredCodec, ...] = (RegisteredCodec(PlaneCodec, {"typed": 1, "max": 2, "none": 0}),)


def efforts(codecs: tuple[RegisteredCodec, ...] = CODECS) -> dict[str, Effort]:
    """The effort of every registered `compression=` name."""
    return {
        name: Effort(number * Effort.LEVELS + level)
        for number, registered in enumerate(codecs)
        for name, level in registered.levels.items()
    }


# Codecs are not thread-safe: each thread gets its own, by a call of `__init__`.
class ChunkCodec(threading.local):
    """Encodes a chunk with the codec of its effort, and decodes the chunks of every registered codec. Thread-safe.

    Deltas are always chunks of the plane codec.
    """

    def __init__(self, codecs: tuple[RegisteredCodec, ...] = CODECS) -> None:
        self._registered = codecs
        self._planes = PlaneCodec()
        self._made: dict[int, Codec] = {}

    def encode(
        self, raw: Buffer, kind: Kind, base: Buffer | None = None, *, effort: Effort = Effort.TYPED
    ) -> list[Buffer]:
        """Return the stored chunk of `raw` in parts, as `Codec.encode`. With `base`, of the same length, it is a delta."""
        if effort <= Effort.MAX:
            return self._planes.encode(raw, kind, base, effort=effort)
        if base is not None:
            return self._planes.encode(raw, kind, base)
        parts = self._codec(effort.codec).encode(raw, kind, effort=effort)
        if sum(memoryview(part).nbytes for part in parts) + 1 > memoryview(raw).nbytes + MAX_CHUNK_OVERHEAD_BYTES:
            return self._planes.encode(raw, kind, effort=Effort.RAW)
        return [bytes([effort.codec << _NUMBER_SHIFT | _OTHER_CODEC]), *parts]

    def estimate(self, sample: Buffer, kind: Kind, base: Buffer | None = None) -> int:
        """About the length of the chunk that the plane codec makes of a short sample."""
        return self._planes.estimate(sample, kind, base)

    def decode(self, stored: Buffer, kind: Kind, out: memoryview, base: Buffer | None = None) -> None:
        """Decode `stored` into all of `out`, as `Codec.decode`. `base` holds the decoded base of a delta.

        Raises `CorruptCheckpointError` for the chunk of a codec that is not registered.
        """
        view = memoryview(stored)
        first = view[0] if view.nbytes else 0
        if not first & _OTHER_CODEC:
            self._planes.decode(stored, kind, out, base)
            return
        if base is not None:
            raise CorruptCheckpointError("a delta chunk is not a chunk of the plane codec")
        self._codec(first >> _NUMBER_SHIFT).decode(view[1:], kind, out)

    def _codec(self, number: int) -> Codec:
        known = self._made.get(number)
        if known is not None:
            return known
        if not 0 < number < len(self._registered):
            raise CorruptCheckpointError(
                f"a chunk was encoded by codec {number}, which this Millrace lacks",
                next_step="install a newer Millrace, or load another checkpoint",
            )
        return self._made.setdefault(number, self._registered[number].make())


Compression = Literal["typed", "max", "adaptive", "none"]
"""The built-in values of `compression=`. A registered codec adds its own names."""

_ADAPTIVE = "adaptive"
# Splitting into planes is at least this many times as fast as the whole codec. Used until a chunk was stored raw.
_RAW_SPEED_UP = 5.0
# The weight of a measurement halves after this many bytes.
_HALF_LIFE_BYTES = 64 << 20
# The first measurement of the storage waits for this many bytes: the buffers of an upload fill at once at any speed.
_FIRST_BYTES = 80 << 20
# Bytes between two measurements of the storage.
_STEP_BYTES = 8 << 20
# This share of chunks is always compressed, which keeps the measured ratio and codec speed up to date.
_LEAST_SHARE = 1 / 32


class Schedule(Protocol):
    """Selects the effort of each chunk. Thread-safe. Rates are in bytes and seconds."""

    def next(self) -> Effort:
        """The effort of the next chunk."""
        ...

    def encoded(self, effort: Effort, raw_bytes: int, stored_bytes: int, seconds: float) -> None:
        """Record that one thread spent `seconds` on a chunk."""
        ...

    def stored(self, total_bytes: int, busy_seconds: float) -> None:
        """Record that the storage has taken `total_bytes` of the current file in `busy_seconds`."""
        ...


def schedule_for(compression: str, threads: int) -> Schedule:
    """The schedule of a `compression=` name. Raises `ConfigurationError` for an unknown name."""
    if compression == _ADAPTIVE:
        return Adaptive(threads)
    effort = efforts().get(compression) if isinstance(compression, str) else None
    if effort is None:
        raise ConfigurationError(
            f"unknown compression {compression!r:.100}", next_step=f"use one of {', '.join([*efforts(), _ADAPTIVE])}"
        )
    return Steady(effort)


class Steady:
    """The same effort for every chunk."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort

    def next(self) -> Effort:
        return self._effort

    def encoded(self, effort: Effort, raw_bytes: int, stored_bytes: int, seconds: float) -> None:
        pass

    def stored(self, total_bytes: int, busy_seconds: float) -> None:
        pass


def typed_share(*, sink: float, typed: float, raw: float, ratio: float) -> float:
    """The share of bytes to compress, 0 to 1, with which codec and storage finish at the same time.

    `sink` is the rate of the storage. `typed` and `raw` are the rates of all threads together with and without
    compression, in bytes of the tensors per second. `ratio` is the stored size of compressed bytes, divided by their raw
    size. With a share `f`, a byte costs the codec `f / typed + (1 - f) / raw` and the storage `(1 - f + f * ratio) /
    sink`. The slower one decides. The first cost grows with `f`, the second one falls.
    """
    surplus = 1 / sink - 1 / raw
    if surplus <= 0:
        return 0.0
    return min(1.0, surplus / (max(0.0, 1 / typed - 1 / raw) + max(0.0, 1 - ratio) / sink + 1e-30))


class _Rate:
    """The quotient of two sums (bytes by seconds, for example) in which older amounts have less weight."""

    def __init__(self) -> None:
        self._above = self._below = 0.0

    def add(self, above: float, below: float, weight_bytes: float) -> None:
        keep = 0.5 ** (weight_bytes / _HALF_LIFE_BYTES)
        self._above = self._above * keep + above
        self._below = self._below * keep + below

    def value(self) -> float | None:
        return self._above / self._below if self._below > 0 else None


class Adaptive:
    """Measures codec and storage, and compresses `typed_share` of the chunks, evenly spread. At first it compresses all."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._speeds = {Effort.RAW: _Rate(), Effort.TYPED: _Rate()}
        self._ratio = _Rate()
        self._sink = _Rate()
        self._seen_bytes, self._seen_seconds = 0, 0.0
        self._due = 0.0

    def next(self) -> Effort:
        with self._lock:
            self._due += self.share()
            if self._due < 1.0 - 1e-9:
                return Effort.RAW
            self._due -= 1.0
            return Effort.TYPED

    def share(self) -> float:
        """The current share of compressed chunks."""
        sink, typed, ratio = self._sink.value(), self._speeds[Effort.TYPED].value(), self._ratio.value()
        if sink is None or typed is None or ratio is None:
            return 1.0
        raw = self._speeds[Effort.RAW].value() or _RAW_SPEED_UP * typed
        share = typed_share(sink=sink, typed=self._threads * typed, raw=self._threads * raw, ratio=ratio)
        return max(_LEAST_SHARE, share)

    def encoded(self, effort: Effort, raw_bytes: int, stored_bytes: int, seconds: float) -> None:
        with self._lock:
            self._speeds[effort].add(raw_bytes, seconds, raw_bytes)
            if effort == Effort.TYPED:
                self._ratio.add(stored_bytes, raw_bytes, raw_bytes)

    def stored(self, total_bytes: int, busy_seconds: float) -> None:
        with self._lock:
            if total_bytes < self._seen_bytes:  # another file
                self._seen_bytes, self._seen_seconds = 0, 0.0
            new = total_bytes - self._seen_bytes
            if new < (_FIRST_BYTES if self._seen_bytes == 0 else _STEP_BYTES):
                return
            self._sink.add(new, busy_seconds - self._seen_seconds, new)
            self._seen_bytes, self._seen_seconds = total_bytes, busy_seconds
