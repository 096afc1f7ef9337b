"""Which blocks this process has verified: bytes are checked at their first use, not at every one."""

from __future__ import annotations

import threading
from collections import OrderedDict

_MAX_OBJECTS = 4096


class VerifiedBlocks:
    """The verified blocks of objects by the generation of their file. Thread-safe.

    Of more than `max_objects` the least recently opened are forgotten, and verified again by whoever opens them next.
    """

    def __init__(self, max_objects: int = _MAX_OBJECTS) -> None:
        self._blocks: OrderedDict[int, set[int]] = OrderedDict()
        self._max_objects = max_objects
        self._lock = threading.Lock()

    def of(self, generation: int) -> set[int]:
        """The set that all readers of this file share: add to it, and look into it, as you verify."""
        with self._lock:
            blocks = self._blocks.setdefault(generation, set())
            self._blocks.move_to_end(generation)
            while len(self._blocks) > self._max_objects:
                self._blocks.popitem(last=False)
        return blocks
