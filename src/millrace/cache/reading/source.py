"""Sources of blocks that are not on this disk: the origin, or in a cluster the peers and then the origin.

A single node has the origin only (`DirectSource`). In a cluster, `millrace.cluster` provides its own `Source`. No other
module of the cache depends on the cluster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from typing_extensions import Buffer

from millrace.cache.counters import Counters
from millrace.cache.eviction.copies import Keep
from millrace.errors import shown_key
from millrace.events import fetch_id
from millrace.origin import ObjectInfo, Origin
from millrace.runtime.locks import lock_number

_log = logging.getLogger("millrace.cache")

_ASKED_ELSEWHERE = 1 << 40  # beyond any block


class Fetched(NamedTuple):
    """The requested bytes from the origin or a peer, and how they may be kept."""

    data: Buffer
    keep: Keep


class Source(Protocol):
    """Reads any range of one pinned version of one object. Thread-safe; updates the counters."""

    def read(self, start: int, stop: int) -> Fetched:
        """The bytes `[start, stop)`, a range inside the object. Raises the errors of `Readable.read`."""
        ...

    def asks_to_fetch(self, start: int) -> bool:
        """Whether another node is requested to fetch the bytes at `start`, which may take long; see `lock_key`."""
        ...


class DirectSource:
    """The `Source` of a node without a cluster: every byte comes from the origin."""

    def __init__(self, origin: Origin, info: ObjectInfo, counters: Counters | None) -> None:
        self._origin = origin
        self._info = info
        self._counters = counters

    def read(self, start: int, stop: int) -> Fetched:
        began = time.perf_counter()
        data = self._origin.read(self._info.key, start, stop, version=self._info.version)
        seconds = time.perf_counter() - began
        log_fetch(self._info.key, start, stop, "the origin", seconds)
        if self._counters is not None:
            self._counters.observe("origin_seconds", seconds)
            self._counters.add("origin_requests")
            self._counters.add("origin_bytes", stop - start)
        return Fetched(data, Keep.OWNED)

    def asks_to_fetch(self, start: int) -> bool:
        return False


def log_fetch(key: str, start: int, stop: int, source: str, seconds: float) -> None:
    """Log at DEBUG that a range was received from `source`."""
    if _log.isEnabledFor(logging.DEBUG):
        text = "%s: bytes %d to %d from %s in %.6f s (fetch %s)"
        _log.debug(text, shown_key(key), start, stop, source, seconds, fetch_id.get())


def lock_key(source: Source, object_id: bytes, block: int, start: int) -> int:
    """The lock of one block's fetch between the processes of a node; `start` is the block's first byte.

    A fetch through another node holds another lock than a fetch from the origin. The server of a node takes the second
    kind only, so nodes that disagree about the owner of a block cannot wait for each other in a cycle.
    """
    return lock_number(object_id, block + _ASKED_ELSEWHERE if source.asks_to_fetch(start) else block)


MakeSource = Callable[[Origin, ObjectInfo, bytes, Counters | None], Source]
"""Makes the `Source` of an object version: its origin, description and id, and the counters to update (None: none)."""


def direct(origin: Origin, info: ObjectInfo, object_id: bytes, counters: Counters | None) -> Source:
    """The `MakeSource` of a node without a cluster."""
    del object_id
    return DirectSource(origin, info, counters)
