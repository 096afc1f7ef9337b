"""The effort of each chunk: constant, or adapted to the speed of the storage.

Compression saves time only while storage is slower than the codec. An `Adaptive` schedule measures both, and compresses the
share of chunks that keeps both busy: all chunks for slow storage, none for fast storage. `typed_share` computes this share.
"""

from __future__ import annotations

import threading
from typing import Literal, Protocol

from millrace.checkpoint.codec.chunks import Effort
from millrace.checkpoint.codec.registry import efforts
from millrace.errors import ConfigurationError

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
