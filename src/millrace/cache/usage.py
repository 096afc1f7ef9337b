"""Who was read how often: noted in the hot path for a few dozen nanoseconds, added up later.

Eviction and the counters both want to know of every open; neither may cost the open anything. So an open only appends to
a queue, and the process's housekeeping adds up what is in it twice a second.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

from millrace.cache.records import Entry

_MAX_PENDING = 1 << 18  # half a second of opening at the highest rate that one process reaches
_MAX_OBJECTS = 1 << 18


class Use:
    """What is noted: the record of an object that was opened. Told apart by identity: note the same one again if you can."""

    __slots__ = ("entry",)

    def __init__(self, entry: Entry) -> None:
        self.entry = entry


class UsageLog:
    """The uses of objects by this process since the last `drain`. Thread-safe; no I/O.

    `touched(use)` notes that all of an object was given out, and takes no lock. `opened(entry)` notes an open of which the
    bytes are counted elsewhere. `on_settled(uses, nbytes)` hears what `touched` noted, each use once.
    Bounded: of more than 262,144 uses between two settlings the oldest are lost, and no more objects than that are told
    apart between two drains (uses of others are counted, but not handed out).
    """

    def __init__(
        self,
        on_settled: Callable[[int, int], None] = lambda uses, nbytes: None,
        *,
        max_pending: int = _MAX_PENDING,
        max_objects: int = _MAX_OBJECTS,
    ) -> None:
        self._pending: deque[Use] = deque(maxlen=max_pending)
        self._totals: dict[bytes, tuple[int, int]] = {}
        self._on_settled = on_settled
        self._max_objects = max_objects
        self._lock = threading.Lock()
        self.touched: Callable[[Use], None] = self._pending.append

    def opened(self, entry: Entry) -> None:
        """Note an open of which nobody knows yet how much it will read."""
        with self._lock:
            self._add(entry.object_id, 1, 0)

    def settle(self) -> None:
        """Add up what was noted so far."""
        with self._lock:
            self._settle()

    def drain(self) -> dict[bytes, tuple[int, int]]:
        """Object id -> (uses, bytes) since the last drain."""
        with self._lock:
            self._settle()
            totals, self._totals = self._totals, {}
        return totals

    def _settle(self) -> None:
        pending = self._pending
        # Others append meanwhile: what is here now is taken, no more.
        counted = Counter([pending.popleft() for _ in range(len(pending))])
        uses = nbytes = 0
        for use, count in counted.items():
            entry = use.entry
            uses += count
            nbytes += count * entry.size
            self._add(entry.object_id, count, count * entry.size)
        if uses:
            self._on_settled(uses, nbytes)

    def _add(self, object_id: bytes, uses: int, nbytes: int) -> None:
        before = self._totals.get(object_id)
        if before is not None:
            self._totals[object_id] = (before[0] + uses, before[1] + nbytes)
        elif len(self._totals) < self._max_objects:
            self._totals[object_id] = (uses, nbytes)
