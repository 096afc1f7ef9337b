"""How hard the codec tries, chunk by chunk: always the same, or as the storage's speed asks for.

Compressing is worth its time only while storage is slower than the codec. An `Adaptive` schedule measures both and gives
just so many chunks to the codec that neither waits for the other: all of them before slow storage, none before fast
storage. `typed_share` decides, and is pure.
"""

from __future__ import annotations

import threading
from typing import Literal, Protocol, get_args

from millrace.checkpoint.codec.planes import Effort
from millrace.errors import ConfigurationError

Compression = Literal["typed", "max", "adaptive", "none"]

_STEADY = {"typed": Effort.TYPED, "max": Effort.MAX, "none": Effort.RAW}
# Until something is stored raw: splitting alone is at least so many times as fast as the whole codec.
_RAW_SPEED_UP = 5.0
# A rate forgets half of what it knows after so many bytes.
_HALF_LIFE_BYTES = 64 << 20
# So many bytes are stored before the first judgement: the buffers of an upload fill at once, whatever is behind them.
_FIRST_BYTES = 80 << 20
# And so many between one judgement and the next.
_STEP_BYTES = 8 << 20
# Some chunks are compressed in any case, so that the ratio and the codec's speed stay known.
_LEAST_SHARE = 1 / 32


class Schedule(Protocol):
    """Says how to encode the next chunk. Thread-safe. Rates are in bytes and seconds."""

    def next(self) -> Effort: ...

    def encoded(self, effort: Effort, raw_bytes: int, stored_bytes: int, seconds: float) -> None:
        """One thread spent `seconds` on a chunk."""
        ...

    def stored(self, total_bytes: int, busy_seconds: float) -> None:
        """The storage has taken `total_bytes` since the beginning of a file, and was busy for so long with them."""
        ...


def schedule_for(compression: str, threads: int) -> Schedule:
    """Raises `ConfigurationError` for a name that does not exist."""
    if compression == "adaptive":
        return Adaptive(threads)
    if compression not in _STEADY:
        raise ConfigurationError(
            f"unknown compression {compression!r}", next_step=f"use one of {', '.join(get_args(Compression))}"
        )
    return Steady(_STEADY[compression])


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
    """The share of bytes to compress, 0 to 1, so that codec and storage are done at the same time.

    `sink` is what the storage takes; `typed` and `raw` what all threads together encode with and without compression, in
    bytes of the tensors; all a second. `ratio` is the size of what is compressed to what it was. With a share `f`
    a byte costs the codec `f / typed + (1 - f) / raw` and the storage `(1 - f + f * ratio) / sink`; the slower of the two
    counts, the first grows with `f`, the second falls.
    """
    surplus = 1 / sink - 1 / raw
    if surplus <= 0:
        return 0.0
    return min(1.0, surplus / (max(0.0, 1 / typed - 1 / raw) + max(0.0, 1 - ratio) / sink + 1e-30))


class _Rate:
    """Amounts over another quantity (bytes over seconds), of which old ones count less and less."""

    def __init__(self) -> None:
        self._above = self._below = 0.0

    def add(self, above: float, below: float, weight_bytes: float) -> None:
        keep = 0.5 ** (weight_bytes / _HALF_LIFE_BYTES)
        self._above = self._above * keep + above
        self._below = self._below * keep + below

    def value(self) -> float | None:
        return self._above / self._below if self._below > 0 else None


class Adaptive:
    """Watches codec and storage; compresses `typed_share` of the chunks, evenly spread. Everything at first."""

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
        """The share of chunks that is being compressed."""
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
