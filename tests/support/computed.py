"""An origin of any size that holds nothing: its bytes follow from key and offset."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from typing_extensions import Buffer

from millrace.errors import ObjectChangedError, ObjectNotFoundError, UsageError
from millrace.origin import Listing, ObjectInfo

_PERIOD = 1_000_003  # prime: every block begins at another position of the pattern
_PATTERN_BYTES = (16 << 20) + _PERIOD


def _pattern() -> memoryview:
    period = np.random.default_rng(0).bytes(_PERIOD)
    return memoryview(period * (-(-_PATTERN_BYTES // _PERIOD)))[:_PATTERN_BYTES]


class ComputedOrigin:
    """Implements `millrace.origin.Readable` and `Listable` for `sizes` (bytes by key), a terabyte as well as a byte.

    A read of up to 16 MiB is a view of a shared pattern and costs no memory. Thread-safe; counts what it served.
    """

    identity = "computed"
    head_is_local = False

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)
        self._pattern = _pattern()
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.requests = 0

    def expected(self, key: str, start: int, stop: int) -> Buffer:
        """What the bytes `[start, stop)` of `key` are; not counted as read."""
        place = (start + int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big")) % _PERIOD
        if place + stop - start <= len(self._pattern):
            return self._pattern[place : place + stop - start]
        half = (start + stop) // 2
        return bytes(self.expected(key, start, half)) + bytes(self.expected(key, half, stop))

    def is_immutable(self, key: str) -> bool:
        return False

    def head(self, key: str) -> ObjectInfo:
        if key not in self._sizes:
            raise ObjectNotFoundError(f"computed://{key} does not exist", next_step="check the name")
        return ObjectInfo(key=key, size=self._sizes[key], version="1", modified=1_600_000_000.0)

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        info = self.head(key)
        if version not in (None, info.version):
            raise ObjectChangedError(f"computed://{key} has no version {version}", next_step="open it again")
        if not 0 <= start <= stop <= info.size:
            raise UsageError(f"the range [{start}, {stop}) ends past the {info.size} bytes of computed://{key}")
        with self._lock:
            self.requests += 1
            self.bytes_read += stop - start
        return self.expected(key, start, stop)

    def list_level(self, prefix: str) -> Listing:
        base = f"{prefix.rstrip('/')}/" if prefix else ""
        below = [key for key in sorted(self._sizes) if key.startswith(base)]
        prefixes = {base + key[len(base) :].split("/", 1)[0] for key in below if "/" in key[len(base) :]}
        return Listing(
            objects=[self.head(key) for key in below if "/" not in key[len(base) :]], prefixes=sorted(prefixes)
        )

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        below = [key for key in sorted(self._sizes) if key.startswith(f"{prefix.rstrip('/')}/")]
        for start in range(0, len(below), 1000):
            yield [self.head(key) for key in below[start : start + 1000]]
