"""Where the bytes of an object come from when they are not on this disk: the origin, or the nodes of a cluster before it.

A node alone has the origin only (`DirectSource`). In a cluster `millrace.peers` puts its own `Source` here; nothing else of
the cache knows of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

from typing_extensions import Buffer

from millrace.cache.counters import Counters
from millrace.cache.flight import BlockKey
from millrace.origin import ObjectInfo, Origin

_ASKED_ELSEWHERE = 1 << 40  # beyond any block


class Keep(Enum):
    """What a node may give up to keep bytes that it has just got."""

    OWNED = "owned"
    """The node is where others look for them: they compete with what is here by the usual policy."""
    COPY = "copy"
    """Another node owns them: they are kept in spare room only, and are the first to go."""


class Fetched(NamedTuple):
    """Bytes from elsewhere, exactly those that were asked for, and how they may be kept."""

    data: Buffer
    keep: Keep


class Source(Protocol):
    """Gives any range of one pinned version of one object. Thread-safe; counts what it does."""

    def read(self, start: int, stop: int) -> Fetched:
        """The bytes `[start, stop)`, which lie inside the object. Raises what `Readable.read` raises."""
        ...

    def asks_to_fetch(self, start: int) -> bool:
        """Whether another node will be asked to fetch what lies at `start`, which may take long; see `lock_key`."""
        ...


class DirectSource:
    """The `Source` of a node without a cluster: every byte comes from the origin."""

    def __init__(self, origin: Origin, info: ObjectInfo, counters: Counters | None) -> None:
        self._origin = origin
        self._info = info
        self._counters = counters

    def read(self, start: int, stop: int) -> Fetched:
        data = self._origin.read(self._info.key, start, stop, version=self._info.version)
        if self._counters is not None:
            self._counters.add("origin_requests")
            self._counters.add("origin_bytes", stop - start)
        return Fetched(data, Keep.OWNED)

    def asks_to_fetch(self, start: int) -> bool:
        return False


def lock_key(source: Source, object_id: bytes, block: int, start: int) -> BlockKey:
    """What stands for one block's fetch between the processes of a node; `start` is the block's first byte.

    Who waits for another node holds another lock than who asks the origin: a node's server takes the second kind only, so
    nodes that disagree about who owns a block cannot wait for each other in a circle.
    """
    return object_id, block + _ASKED_ELSEWHERE if source.asks_to_fetch(start) else block


MakeSource = Callable[[Origin, ObjectInfo, bytes, Counters | None], Source]
"""Makes the `Source` of an object version: its origin, description and id, and where to count (None: nowhere)."""


def direct(origin: Origin, info: ObjectInfo, object_id: bytes, counters: Counters | None) -> Source:
    """The `MakeSource` of a node without a cluster."""
    del object_id
    return DirectSource(origin, info, counters)
