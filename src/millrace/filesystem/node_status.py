"""A node's figures: what it holds, and what it saved."""

from __future__ import annotations

import threading
import time
from typing import Any

from millrace.cache.node import CacheNode

_BELIEVED_TIMES = 50.0
_PAGE = 1000


class NodeFigures:
    """What a node holds. Thread-safe.

    There may be millions of objects: a count holds for fifty times the time that counting took.
    """

    def __init__(self, node: CacheNode) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._believed_until = 0.0
        self._counts = (0, 0)
        self._at_start = node.counters()

    def counters(self, *, settled: bool) -> dict[str, dict[str, int]]:
        """What the node counted: `now`, and `at_start` of this process. Quick, unlike the other figures; half a second when
        `settled`.
        """
        return {"now": self._node.counters(settled=settled), "at_start": self._at_start}

    def now(self) -> dict[str, Any]:
        """The figures as plain values."""
        counters = self._node.counters()
        objects, whole = self._objects()
        disks = [
            {"directory": str(directory), "used_bytes": used, "capacity_bytes": capacity}
            for directory, used, capacity in self._node.disks()
        ]
        return {
            "disks": disks,
            "used_bytes": sum(disk["used_bytes"] for disk in disks),
            "capacity_bytes": sum(disk["capacity_bytes"] for disk in disks),
            "objects": objects,
            "complete_objects": whole,
            "hit_ratio": hit_ratio(counters),
            "counters": counters,
        }

    def _objects(self) -> tuple[int, int]:
        """How many objects are here at least in part, and how many wholly."""
        with self._lock:
            began = time.monotonic()
            if began >= self._believed_until:
                self._counts = self._count()
                ended = time.monotonic()
                self._believed_until = ended + _BELIEVED_TIMES * (ended - began)
            return self._counts

    def _count(self) -> tuple[int, int]:
        objects = whole = 0
        for disk in self._node.open_disks:
            after = b""
            while page := disk.store.index.page(after, _PAGE):
                after = page[-1].object_id
                here = [entry for entry in page if entry.present]
                objects += len(here)
                whole += sum(entry.present * entry.block_bytes >= entry.size for entry in here)
        return objects, whole


def hit_ratio(counters: dict[str, int]) -> float | None:
    """The share of what was read on a machine that neither the origin nor another node had to give; None before any read."""
    read = counters["cache_bytes"] + counters["origin_bytes"] + counters["peer_bytes"]
    return counters["cache_bytes"] / read if read else None
