"""The counters of a whole cluster's caches, for monitoring a job from one of its processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from pyarrow.fs import FileSystem

from millrace.cache.counters import NAMES
from millrace.cluster.attach import link_for
from millrace.cluster.dataplane.client import PeerClient
from millrace.config import CacheOptions
from millrace.errors import MillraceError, UsageError
from millrace.filesystem.cluster_access import ClusterAccess, counted
from millrace.ray.locations import millrace_of


def cluster_counters(filesystem: FileSystem, *, settled: bool = False) -> dict[str, int]:
    """The sums of the counters of all nodes' caches; those of this machine alone without a cluster.

    The names are those of `filesystem.cache_counters()`. Only differences between two calls in one process are meaningful.
    They are never negative: a node that does not respond counts with its last figures, and later ones of a lost node are not
    counted. Sends one small request to each node, all at once.

    Processes count opens of cached objects up to half a second late. With `settled`, each node waits for its processes, so
    that the sums include everything that was opened before the call, except by processes that are stopped or take longer
    than 5 s. Use it at the end of an epoch.

    Thread-safe. Raises `UsageError` for other file systems, and at the first call the errors of finding the cluster.
    """
    fs = millrace_of(filesystem)
    if fs is None:
        raise UsageError(
            "only Millrace's own file systems have counters", next_step="use one of millrace.filesystem(...)"
        )
    try:
        link = link_for(fs._options, fs.origin)
    except MillraceError:
        known = _latest.get(fs._options)
        if known is None:
            raise
        return known.add({})  # the last figures: monitoring must not end a training job
    if link is None:
        return fs.cache_counters(settled=settled)
    with ClusterAccess(views=link.views, client=PeerClient(token=link.token, tls=link.tls)) as access:
        counts = counted(access, settled=settled)
    if link.member_id is None:  # a client has a cache of its own
        own = fs.cache_counters(settled=settled)
        counts = {**counts, "": {"now": own, "at_start": own}}
    return _sums_of(fs._options, link.token).add(counts)


class Sums:
    """Sums over nodes that join, leave and restart, which never decrease. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(NAMES, 0)
        self._last: dict[str, Mapping[str, int]] | None = None

    def add(self, counts_of: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[str, int]:
        """Add the counters of nodes, by id: `now`, and `at_start` of their process. Returns the sums.

        Nodes of the first call count as a whole; nodes that join later, with a used disk, count from their start.
        """
        with self._lock:
            zero = dict.fromkeys(NAMES, 0)
            known = self._last
            for node, counts in counts_of.items():
                before = zero if known is None else known.get(node, counts["at_start"])
                now = counts["now"]
                for name in NAMES:
                    # Less than before: its disk was emptied, and it counts from zero.
                    grown = now.get(name, 0) - before.get(name, 0)
                    self._sums[name] += grown if grown >= 0 else now.get(name, 0)
            self._last = {**(known or {}), **{node: counts["now"] for node, counts in counts_of.items()}}
            return dict(self._sums)


_all: dict[tuple[CacheOptions, str], Sums] = {}
_latest: dict[CacheOptions, Sums] = {}
_lock = threading.Lock()


def _sums_of(options: CacheOptions, token: str) -> Sums:
    """The sums of a cluster; another Ray cluster has another token."""
    with _lock:
        _latest[options] = _all.setdefault((options, token), Sums())
        return _latest[options]
