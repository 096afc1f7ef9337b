"""Reads checkpoint files through the cache of this node and its cluster, or from their origin.

The cache never decides which version is read: the caller names the version, which the origin has described to it. A fault of
the cache costs time, never a restore: the bytes are then read from the origin.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer

from millrace.config import BY_RAY, resolve
from millrace.errors import ConfigurationError, MillraceError, PeerError, StorageError, UsageError
from millrace.origin import ObjectInfo, Origin
from millrace.runtime import forks
from millrace.runtime.forks import importing
from millrace.store.records import ReadAhead

if TYPE_CHECKING:
    from millrace.cache.node import CacheNode
    from millrace.cache.reading.reader import ObjectReader, OriginReader
    from millrace.cluster.attach import Attached

_log = logging.getLogger("millrace.cluster")

_OPEN_READERS = 64


class ReadThrough:
    """Reads versions of the objects of one origin through the cache. Thread-safe, picklable, usable after a fork.

    `required` raises `ConfigurationError` at the first read of a process that is in no cluster; otherwise such a process
    reads from the origin. The options of the cache are those of the environment and of `millrace.toml`. Every byte from the
    disk is verified when it is read. Open files are closed with this object.

    A single rank of its node stores only the blocks that this node owns: no other process would read copies of the rest.
    """

    def __init__(self, origin: Origin, *, required: bool = False) -> None:
        self._origin = origin
        self._required = required
        self._start()

    def _start(self) -> None:
        self._owner = forks.Owner()
        self._lock = threading.Lock()
        self._readers: OrderedDict[tuple[str, str], _Readers] = OrderedDict()
        self._attached: Attached | None = None
        self._is_decided = False

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ReadThrough, required=self._required), (self._origin,)

    def read(self, info: ObjectInfo, start: int, stop: int) -> Buffer:
        """The bytes `[start, stop)` of this version. Raises as `Readable.read` of the origin."""
        if not 0 <= start <= stop <= info.size:
            raise UsageError(f"the range [{start}, {stop}) ends past the {info.size} bytes of {info.key}")
        readers = self._readers_of(info)
        if readers is not None:
            try:
                return readers.read(start, stop)
            except (StorageError, PeerError) as error:
                _log.warning("%s: read from the origin, without the cache: %s", info.key, error)
        return self._origin.read(info.key, start, stop, version=info.version)

    def drop(self, keys: Sequence[str]) -> None:
        """Drop the cached data of removed objects on every node that responds. Starts no node; never raises."""
        try:
            options = resolve({})
            folders = (folder for each in options.cache_dirs for folder in each.glob("millrace/*.node"))
            if options.members == "none" or (options.members in BY_RAY and not any(folders)):
                return  # without loading the cache
            with importing():
                from millrace.cluster.attach import known_cluster

            cluster = known_cluster(options)
            if cluster is None:
                return
            with importing():
                from millrace.cluster.invalidation import Invalidations

            Invalidations(cluster).send(self._origin.identity, keys)
        except (MillraceError, OSError) as error:
            # Checkpoint files are the first that eviction removes.
            _log.warning("removed checkpoint files stay in the cache until their space is needed: %s", error)

    # --- inside -----------------------------------------------------------------------------------

    def _readers_of(self, info: ObjectInfo) -> _Readers | None:
        """The readers of this version, kept for the next ranges; None to read from the origin."""
        if not self._owner.is_this_process:
            self._start()
        with self._lock:
            if not self._is_decided:
                self._attached = self._attach()
                self._is_decided = True
            node = None if self._attached is None else self._node(self._attached)
            if node is None:
                return None
            name = info.key, info.version
            readers = self._readers.pop(name, None)
            if readers is None:
                passing = None if _ranks_share_node() else node.open_passing_reader(self._origin, info)
                readers = _Readers(node.open_reader(self._origin, info, verify=True), passing)
            self._readers[name] = readers
            while len(self._readers) > _OPEN_READERS:
                self._readers.popitem(last=False)  # its last user closes it
            return readers

    def _attach(self) -> Attached | None:
        options = resolve({})
        if not options.names_cluster:
            if self._required:
                raise ConfigurationError(
                    f"read_through='cluster' in a process without a cluster (members={options.members!r})",
                    next_step="set MILLRACE_MEMBERS, or 'members' in millrace.toml; call ray.init() first; "
                    "or leave it 'auto'",
                )
            return None
        with importing():
            from millrace.cluster.attach import Attached

        return Attached(options, self._origin)

    def _node(self, attached: Attached) -> CacheNode | None:
        """The cache, at the first use of a process after a search for its cluster. None, and no more, if that fails."""
        try:
            return attached.node
        except ConfigurationError:
            raise
        except MillraceError as error:
            _log.warning("%s: read without the cache of its cluster: %s", self._origin.identity, error)
            self._attached = None
            return None


class _Readers:
    """Two ways to read one object version: with the disk of this node, and without storing anything on it.

    Reads ahead of a scan. Concurrent threads may lose a step of that, which costs no correctness.
    """

    def __init__(self, stored: ObjectReader, passing: OriginReader | None) -> None:
        self._stored = stored
        self._passing = passing
        self._ahead = ReadAhead()

    def read(self, start: int, stop: int) -> Buffer:
        if self._passing is not None and self._passing.is_fetched_by_peer(start, stop):
            return self._passing.read(start, stop)
        self._ahead = self._ahead.after(start, stop)
        self._stored.prefetch(self._ahead.wanted(self._stored.size, self._stored.block_bytes))
        return self._stored.read(start, stop)


def _ranks_share_node() -> bool:
    """Whether other ranks on this node restore as well, by the variables of torchrun and Ray Train."""
    count = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return count != "1"
