"""What the caches of a whole cluster did, for whoever follows a job from one of its processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from pyarrow.fs import FileSystem

from millrace.cache.counters import NAMES
from millrace.cluster.locations import millrace_of
from millrace.config import CacheOptions
from millrace.errors import MillraceError, UsageError
from millrace.filesystem.cluster_access import ClusterAccess, counted
from millrace.peers.attach import link_for
from millrace.peers.client import PeerClient


def cluster_counters(filesystem: FileSystem, *, settled: bool = False) -> dict[str, int]:
    """What the caches of all nodes did, added up; of this machine's alone where there is no cluster.

    The names are those of `filesystem.cache_counters()`. Only differences between two calls in one process mean something;
    they are never negative: a node that does not answer counts with what it said last. What a node that is lost did since
    then is not counted. One small request a node, all at once.

    Processes count their opens of what is on their node's disk up to half a second late. With `settled` each node waits for
    its own, so that everything that was opened before the call is in the sums; of a process that is stopped, or does not
    get to it for 5 s, it is not. Ask so at the end of an epoch.

    Thread-safe. Raises `UsageError` for other file systems, and at the first call what finding the cluster raises.
    """
    fs = millrace_of(filesystem)
    if fs is None:
        raise UsageError("only Millrace's own file systems count", next_step="use one of millrace.filesystem(...)")
    try:
        link = link_for(fs._options, fs.origin)
    except MillraceError:
        known = _latest.get(fs._options)
        if known is None:
            raise
        return known.hear({})  # what was told last: whoever follows a training must not end it
    if link is None:
        return fs.cache_counters(settled=settled)
    with ClusterAccess(views=link.views, client=PeerClient(token=link.token, tls=link.tls)) as access:
        told = counted(access, settled=settled)
    if link.member_id is None:  # a client reads through a cache of its own
        own = fs.cache_counters(settled=settled)
        told = {**told, "": {"now": own, "at_start": own}}
    return _sums_of(fs._options, link.token).hear(told)


class Sums:
    """The sums over nodes that come, go and begin anew: they never fall. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(NAMES, 0)
        self._last: dict[str, Mapping[str, int]] | None = None

    def hear(self, told: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[str, int]:
        """Take in what nodes, by their ids, counted `now` and had counted `at_start` of their process; gives the sums.

        Nodes of the first time count as a whole; one that comes later, with a disk that was used before, from its start on.
        """
        with self._lock:
            zero = dict.fromkeys(NAMES, 0)
            known = self._last
            for node, counts in told.items():
                before = zero if known is None else known.get(node, counts["at_start"])
                now = counts["now"]
                for name in NAMES:
                    # Fewer than before: its disk was emptied, and it counts from nothing.
                    grown = now.get(name, 0) - before.get(name, 0)
                    self._sums[name] += grown if grown >= 0 else now.get(name, 0)
            self._last = {**(known or {}), **{node: counts["now"] for node, counts in told.items()}}
            return dict(self._sums)


_all: dict[tuple[CacheOptions, str], Sums] = {}
_latest: dict[CacheOptions, Sums] = {}
_lock = threading.Lock()


def _sums_of(options: CacheOptions, token: str) -> Sums:
    """Those of a cluster; another Ray cluster has another token."""
    with _lock:
        _latest[options] = _all.setdefault((options, token), Sums())
        return _latest[options]
