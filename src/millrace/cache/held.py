"""Blocks that could not be kept on disk, held in memory for a moment.

Without room on the disk a reader that takes 64 KiB at a time would fetch the same 4 MiB block sixty-four times. So what was
fetched and not stored stays here until newer ones push it out: bounded, for the whole process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from typing_extensions import Buffer

from millrace.cache.flight import BlockKey

HELD_BYTES = 64 << 20


class HeldBlocks:
    """A bounded memory of blocks, least recently used dropped first. Thread-safe."""

    def __init__(self, capacity_bytes: int = HELD_BYTES) -> None:
        self._capacity = capacity_bytes
        self._used = 0
        self._blocks: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: BlockKey, data: Buffer) -> None:
        """Hold a copy of a block (the original is part of a larger buffer, which it would keep alive)."""
        copy = bytes(data)
        with self._lock:
            old = self._blocks.pop(key, b"")
            self._blocks[key] = copy
            self._used += len(copy) - len(old)
            while self._used > self._capacity:
                self._used -= len(self._blocks.popitem(last=False)[1])

    def get(self, object_id: bytes, blocks: Iterable[int]) -> dict[int, Buffer]:
        """Those of `blocks` that are held."""
        if not self._blocks:
            return {}
        found: dict[int, Buffer] = {}
        with self._lock:
            for block in blocks:
                data = self._blocks.get((object_id, block))
                if data is not None:
                    self._blocks.move_to_end((object_id, block))
                    found[block] = data
        return found

    def drop(self, object_id: bytes, blocks: Iterable[int]) -> None:
        """Hold those of `blocks` no longer: they are to be kept on disk, where there is room again."""
        with self._lock:
            for block in blocks:
                self._used -= len(self._blocks.pop((object_id, block), b""))
