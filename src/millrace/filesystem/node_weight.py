"""What a node can hold, as its members are told: the weight of its share."""

from __future__ import annotations

from millrace.cache.disk import Disk
from millrace.cache.node import CacheNode
from millrace.errors import StorageError

_WORTH_TELLING = 0.1
"""A change of the weight moves blocks between nodes; a smaller one than this is not worth that."""


def usable_bytes(capacity: int, used: int, free: int, min_free: int) -> int:
    """What a disk can hold: its capacity, or less where others leave less."""
    return max(0, min(capacity, used + max(0, free - min_free)))


def weight_of(node: CacheNode) -> float:
    """What all disks of a node can hold, in bytes; at least 1. A disk that fails counts nothing."""
    return float(max(1, sum(_of_disk(disk) for disk in node.open_disks)))


def _of_disk(disk: Disk) -> int:
    store = disk.store
    try:
        return usable_bytes(
            store.capacity_bytes(), store.index.used_bytes(), store.free_bytes(), store.min_free_bytes()
        )
    except StorageError as error:
        disk.report(error)
        return 0


def worth_telling(published: float, now: float) -> bool:
    """Whether a weight differs enough from what was published."""
    return abs(now - published) > _WORTH_TELLING * published
