"""Blocks that could not be kept on disk, held in memory for a moment.

Without room on the disk a reader that takes 64 KiB at a time would fetch the same 4 MiB block sixty-four times. So what was
fetched and not stored stays here until newer ones push it out: bounded for the whole process, however many disks it has.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable

from typing_extensions import Buffer

from millrace.cache.flight import BlockKey

HELD_BYTES = 64 << 20


class _Memory:
    """The blocks of all `HeldBlocks` that share it, least recently used dropped first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes
        self.used = 0
        self.blocks: OrderedDict[tuple[HeldBlocks, BlockKey], bytes] = OrderedDict()
        self.lock = threading.Lock()


_shared = _Memory(HELD_BYTES)


def _after_fork() -> None:
    global _shared
    _shared = _Memory(HELD_BYTES)  # another thread of the parent may have had the lock


os.register_at_fork(after_in_child=_after_fork)


class HeldBlocks:
    """What one disk could not keep. Thread-safe. Neither sees the blocks of another, which may be of other storage.

    All disks of a process share `HELD_BYTES`; with `capacity_bytes` it has a memory of its own instead.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._memory = _shared if capacity_bytes is None else _Memory(capacity_bytes)

    def put(self, key: BlockKey, data: Buffer) -> None:
        """Hold a copy of a block (the original is part of a larger buffer, which it would keep alive)."""
        copy = bytes(data)
        memory = self._memory
        with memory.lock:
            old = memory.blocks.pop((self, key), b"")
            memory.blocks[self, key] = copy
            memory.used += len(copy) - len(old)
            while memory.used > memory.capacity:
                memory.used -= len(memory.blocks.popitem(last=False)[1])

    def get(self, object_id: bytes, blocks: Iterable[int]) -> dict[int, Buffer]:
        """Those of `blocks` that are held."""
        memory = self._memory
        if not memory.blocks:
            return {}
        found: dict[int, Buffer] = {}
        with memory.lock:
            for block in blocks:
                place = (self, (object_id, block))
                data = memory.blocks.get(place)
                if data is not None:
                    memory.blocks.move_to_end(place)
                    found[block] = data
        return found

    def drop(self, object_id: bytes, blocks: Iterable[int]) -> None:
        """Hold those of `blocks` no longer: they are to be kept on disk, where there is room again."""
        memory = self._memory
        with memory.lock:
            for block in blocks:
                memory.used -= len(memory.blocks.pop((self, (object_id, block)), b""))

    def clear(self) -> None:
        """Hold nothing any more."""
        memory = self._memory
        with memory.lock:
            for place in [place for place in memory.blocks if place[0] is self]:
                memory.used -= len(memory.blocks.pop(place))
