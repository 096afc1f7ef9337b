"""Blocks that could not be stored on disk, held in memory for a short time.

Without space on the disk a reader of 64 KiB at a time would fetch the same 4 MiB block sixty-four times. So blocks that were
fetched and not stored stay in memory until newer ones replace them: bounded for the whole process, over all its disks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from typing_extensions import Buffer

from millrace.runtime import forks
from millrace.runtime.flight import BlockKey

HELD_BYTES = 64 << 20


class _Memory:
    """The blocks of all `HeldBlocks` that share this memory. Drops the least recently used first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes
        self.used = 0
        self.blocks: OrderedDict[tuple[HeldBlocks, BlockKey], bytes] = OrderedDict()
        self.lock = threading.Lock()


_shared = _Memory(HELD_BYTES)


def _after_fork() -> None:
    global _shared
    _shared = _Memory(HELD_BYTES)  # another thread of the parent may have held the lock


forks.reset_in_child(_after_fork)


class HeldBlocks:
    """The blocks that one disk could not store. Thread-safe. Each disk has its own: others may belong to other storage.

    All disks of a process share `HELD_BYTES`; with `capacity_bytes` it uses its own memory instead.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._memory = _shared if capacity_bytes is None else _Memory(capacity_bytes)

    def put(self, key: BlockKey, data: Buffer) -> None:
        """Hold a copy of a block: the original would keep its larger buffer alive."""
        copy = bytes(data)
        memory = self._memory
        with memory.lock:
            old = memory.blocks.pop((self, key), b"")
            memory.blocks[self, key] = copy
            memory.used += len(copy) - len(old)
            while memory.used > memory.capacity:
                memory.used -= len(memory.blocks.popitem(last=False)[1])

    def get(self, object_id: bytes, blocks: Iterable[int]) -> dict[int, Buffer]:
        """The members of `blocks` that are held."""
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
        """Drop `blocks`: they are to be stored on disk, which has space again."""
        memory = self._memory
        with memory.lock:
            for block in blocks:
                memory.used -= len(memory.blocks.pop((self, (object_id, block)), b""))

    def clear(self) -> None:
        """Drop all blocks."""
        memory = self._memory
        with memory.lock:
            for place in [place for place in memory.blocks if place[0] is self]:
                memory.used -= len(memory.blocks.pop(place))
