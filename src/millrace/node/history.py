"""What a node keeps in memory for the status page: its throughput in the last ten minutes, and its recent events."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from millrace.errors import printable, without_queries
from millrace.event_log import EVENTS, detail_of, level_of
from millrace.events import Event, add_hook
from millrace.figures import growth
from millrace.runtime import forks
from millrace.runtime.maintenance import register_periodic, unregister

SAMPLE_SECONDS = 2.0
MOST_SAMPLES = 301
"""Ten minutes, and the sample before them."""
MOST_EVENTS = 100

_QUIET_LEVEL, _INFO_LEVEL = 10, 20  # DEBUG: for example every eviction


def tiers(counters: Mapping[str, int]) -> dict[str, int]:
    """The bytes that were read from each tier, as in `millrace_read_bytes_total`; `relayed` of them were for other nodes."""
    mapped = counters.get("mapped_bytes", 0)
    return {
        "mapped": mapped,
        "disk": max(0, counters.get("cache_bytes", 0) - mapped),
        "peer": counters.get("peer_bytes", 0),
        "origin": counters.get("origin_bytes", 0),
        "relayed": counters.get("relayed_bytes", 0),
    }


class History:
    """The bytes read from each tier, sampled every two seconds from `start` until `close`. Thread-safe."""

    def __init__(self, counters: Callable[[], Mapping[str, int]], clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, dict[str, int]]] = deque(maxlen=MOST_SAMPLES)

    def start(self) -> None:
        """Take samples from now on."""
        self.sample()
        register_periodic(self.sample)

    def close(self) -> None:
        """Take no more samples. Idempotent."""
        unregister(self.sample)

    def sample(self) -> float:
        """Take one; returns the seconds until the next one."""
        sample = self._clock(), tiers(self._counters())
        with self._lock:
            self._samples.append(sample)
        return SAMPLE_SECONDS

    def rates(self) -> dict[str, list[int]]:
        """The bytes per second of each tier between two samples, the oldest first."""
        series: dict[str, list[int]] = {name: [] for name in tiers({})}
        with self._lock:
            samples = list(self._samples)
        for (began, before), (ended, now) in pairwise(samples):
            for name, nbytes in growth(before, now).items():
                series[name].append(round(nbytes / (ended - began)) if ended > began else 0)
        return series


@dataclass(slots=True)
class RecentEvent:
    """An event in plain words; `count` of the same subject were the same, the last one at `time` (Unix seconds)."""

    time: float
    name: str
    is_warning: bool
    subject: str
    text: str
    detail: str
    count: int = 1


class RecentEvents:
    """The last hundred events of this process above DEBUG, until `close`. Thread-safe. Repeated ones are one entry."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._owner = forks.Owner()
        self._lock = threading.Lock()
        self._events: dict[tuple[str, str], RecentEvent] = {}
        self.close: Callable[[], None] = add_hook(self.add)

    def add(self, event: Event) -> None:
        """The hook."""
        declared = EVENTS.get(event.name)
        if declared is None or declared.level == _QUIET_LEVEL or not self._owner.is_this_process:
            return
        recent = RecentEvent(
            time=self._clock(),
            name=event.name,
            is_warning=level_of(event) > _INFO_LEVEL,
            subject=printable(without_queries(event.subject)),
            text=declared.text,
            detail=printable(without_queries(detail_of(event))),
        )
        with self._lock:
            before = self._events.pop((event.name, event.subject), None)
            recent.count += 0 if before is None else before.count
            self._events[event.name, event.subject] = recent  # at the end: the order is that of time
            if len(self._events) > MOST_EVENTS:
                del self._events[next(iter(self._events))]

    def newest_first(self) -> list[dict[str, Any]]:
        """The events as plain values."""
        with self._lock:
            return [asdict(event) for event in reversed(self._events.values())]
