"""What a server knows of who asks for what: which blocks are hot, and who was told to bring some. No I/O, bounded memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from millrace.cache.flight import BlockKey

HOT_TIMES = 8
"""A block is hot when others asked for so many times its bytes within a minute."""

LEASE_SECONDS = 5.0

_HALF_MINUTE = 30.0
_MAX_BLOCKS = 1 << 15


class Heat:
    """How much others ask for each block. Thread-safe without a lock: threads that meet may lose a count, which is no harm.

    Counts lie in two generations of half a minute each; of more blocks than there is room for the older half is forgotten.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, max_blocks: int = _MAX_BLOCKS) -> None:
        self._clock = clock
        self._max_blocks = max_blocks
        self._young: dict[BlockKey, int] = {}
        self._old: dict[BlockKey, int] = {}
        self._since = clock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def asked(self, key: BlockKey, nbytes: int, block_bytes: int) -> bool:
        """Count that `nbytes` of a block of `block_bytes` were asked for; gives whether it is hot."""
        young = self._young
        now = self._clock()
        if now - self._since >= _HALF_MINUTE or len(young) >= self._max_blocks:
            # After a pause of more than a minute both are too old.
            self._old = young if now - self._since < 2 * _HALF_MINUTE else {}
            self._young = young = {}
            self._since = now
        count = young.get(key, 0) + nbytes
        young[key] = count
        return count + self._old.get(key, 0) > HOT_TIMES * block_bytes


class Leases:
    """Who has no access to an origin lets the first asker bring a block, and has the others wait for it. Thread-safe."""

    def __init__(self, *, seconds: float = LEASE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: dict[BlockKey, float] = {}
        self._changed = threading.Condition()

    def take(self, object_id: bytes, blocks: Iterable[int]) -> bool:
        """Whether the caller is to bring these blocks; False while somebody else is to bring any of them."""
        keys = [(object_id, block) for block in blocks]
        now = self._clock()
        with self._changed:
            if any(self._until.get(key, 0.0) > now for key in keys):
                return False
            if len(self._until) >= _MAX_BLOCKS:
                self._until = {key: until for key, until in self._until.items() if until > now}
            for key in keys:
                self._until[key] = now + self._seconds
            return True

    def end(self, object_id: bytes, block: int) -> None:
        """A block was brought, or will not be."""
        with self._changed:
            self._until.pop((object_id, block), None)
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until anything has ended, `seconds` at most."""
        with self._changed:
            self._changed.wait(seconds)
