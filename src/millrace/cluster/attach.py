"""Finds this process's part in a cluster, and attaches the `CacheNode` of its file systems to it.

There is one attachment for each set of options, checked at intervals while it is used. When the machine's node restarts,
ends or publishes another token, the next reads use the new state. A search that may take long runs in a thread of its
own. Only the first read of all waits for one, and not even that on the only node of a Ray cluster, whose actor starts
meanwhile. A process without a cluster imports no other module of this package.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.cache.metadata.metadata import ORIGIN_METADATA
from millrace.cache.metadata.sources import MetadataSource
from millrace.cache.node import CacheNode, open_node, store_directory
from millrace.cache.reading.fetching import DirectSource, MakeSource
from millrace.cluster.node_starter import node_starter
from millrace.config import BY_RAY, CacheOptions, is_in_ray
from millrace.errors import MillraceError, OriginUnavailableError
from millrace.origin import Origin
from millrace.runtime import forks
from millrace.runtime.forks import importing

if TYPE_CHECKING:
    from millrace.cluster.cluster import Cluster
    from millrace.cluster.folder import FolderViews, LocalNode
    from millrace.cluster.links import Links
    from millrace.cluster.membership import NodeLink
    from millrace.cluster.membership.ray_records import NodeRecord

_log = logging.getLogger("millrace.cluster")

_LOOK_SECONDS = 0.1  # between two checks of the facts that the machine's node publishes
_ALIVE_SECONDS = 1.0  # between two checks whether the node runs, or whether there is one now
_FOR_GOOD_SECONDS = 30.0  # a restart of the node takes less than this

SEARCHING = "millrace-attach"
"""The name of the threads that search for a cluster."""


class Attached:
    """The cache of this process for `options`, attached to the cluster if `members` names one.

    Thread-safe, and usable after a fork. `origin` is the origin that the caller reads: in Ray, the cluster's other nodes get
    access to it.
    """

    def __init__(self, options: CacheOptions, origin: Origin | None = None) -> None:
        """Attaches at the first use. Raises `ConfigurationError` if `members` names an unknown backend."""
        if "://" in options.members:
            with importing():
                from millrace.cluster.membership.backends import backend_of

            backend_of(options.members)
        self._options = options
        self._origin = origin
        self._attachment: _Attachment | None = None

    @property
    def node(self) -> CacheNode:
        """The node; later calls cost little. Raises `ConfigurationError`, `MissingDependencyError`."""
        attachment = self._attachment
        if attachment is None or attachment.process is not _process or attachment.node.closed:
            attachment = self._attachment = _process.attach(self._options, self._origin)
            if self._origin is not None:
                attachment.introduce(self._origin)
        if time.monotonic() >= attachment.next_look:
            attachment.look()
        return attachment.node


def link_for(options: CacheOptions, *origins: Origin) -> NodeLink | None:
    """The link through which a process with `options` takes part in a cluster; None without a cluster.

    In Ray, the cluster's other nodes get access to `origins`. Raises `ConfigurationError` if an option is missing or wrong,
    `MissingDependencyError` without Ray.
    """
    members = options.members
    if members == "none" or (members == "auto" and not is_in_ray()):
        return None
    return _process.links().find(options, origins)


def _start_without_waiting(options: CacheOptions, origins: Iterable[Origin]) -> Callable[[], NodeRecord | None] | None:
    """Start the node of this Ray node if reads need not wait for it: if no other Ray node exists that could own a block.

    Returns a function that requests its record, else None. The new node claims the folder of `options`, which is free now.
    So the blocks that are stored there meanwhile are its own.
    """
    if (
        options.members != "auto"
        or not is_in_ray()
        or _process.parents is not None
        or node_holding(options) is not None
    ):
        return None
    with importing():
        from millrace.cluster.membership.ray import start_on_only_node

    try:
        return start_on_only_node(options, origins, start=node_starter())
    except OriginUnavailableError:  # a search finds a running node without Ray, or raises this again
        return None


def known_cluster(options: CacheOptions) -> Cluster | None:
    """The cluster of a node that runs on this machine, or that `members` names. None without one; starts no node.

    Raises `ConfigurationError` if an option is missing or wrong.
    """
    if options.members == "none":
        return None
    return _process.links().known_cluster(options)


def node_holding(options: CacheOptions) -> LocalNode | None:
    """The running node that holds the folder of `options` in a cache directory; None without one. Never raises."""
    for cache_dir in options.cache_dirs:
        directory = store_directory(cache_dir).with_name(f"{options.folder}.node")
        if os.path.exists(directory / "node.json"):
            with importing():
                from millrace.cluster.folder import live_node

            if (node := live_node(directory)) is not None:
                return node
    return None


def with_node_limits(options: CacheOptions) -> CacheOptions:
    """`options` with the limits of the node that holds their folder.

    They apply to every process that uses the folder: with higher ones it would store blocks that the node has to evict.
    """
    node = node_holding(options)
    return options if node is None else replace(options, capacity=node.facts.capacity, min_free=node.facts.min_free)


def close_all() -> None:
    """Close this process's attachments to clusters; the next use attaches again. For tests."""
    global _process
    ended, _process = _process, _Process()
    ended.close()


class _Attachment:
    """The attachment of the file systems with one set of options: to a cluster through a link, or to none.

    States: alone (no link), client (a link with its own membership), or through a node of this machine (a link whose views
    the node publishes). `next_look` is the time (`time.monotonic`) after which a caller must check whether it still holds.
    """

    def __init__(self, process: _Process, options: CacheOptions, origin: Origin | None) -> None:
        self.options = options
        self.origins: set[str] = set()
        self._not_introduced: dict[str, Origin] = {}
        if origin is not None:
            self._add(origin)
        self.next_look = 0.0
        self.process = process
        self._lock = threading.Lock()
        self._searching = False
        self._by_ray = options.members in BY_RAY
        self._in_ray = is_in_ray()
        self._gone_since: float | None = None
        self._own_limits_from: float | None = None
        self._starting: Callable[[], NodeRecord | None] | None = None
        self._use(self._first_link())

    def _first_link(self) -> NodeLink | None:
        try:
            self._starting = _start_without_waiting(self.options, self._not_introduced.values())
            if self._starting is not None:
                self._not_introduced = {}
                self._gone_since = time.monotonic()
                return None
            return self._find_link()
        except MillraceError as error:
            if self.options.members != "auto":
                raise
            _log.warning("this process reads without its Ray cluster's cache: %s", error)
            self._gone_since = time.monotonic()  # the search is repeated from then on
            return None

    def _find_link(self) -> NodeLink | None:
        """`link_for`, which gives the cluster access to the origins that it does not have yet."""
        origins = list(self._not_introduced.values())
        link = link_for(self.options, *origins)
        if link is not None:
            for origin in origins:
                self._not_introduced.pop(origin.identity, None)
        return link

    def _use(self, link: NodeLink | None) -> None:
        """Read through `link` from now on."""
        source: MakeSource = DirectSource
        metadata_source: MetadataSource = ORIGIN_METADATA
        cluster: Cluster | None = None
        views: FolderViews | None = None
        if link is not None:
            with importing():
                from millrace.cluster.folder import FolderViews
                from millrace.cluster.listings import ClusterListings
                from millrace.cluster.source import ClusterSources

            cluster = self.process.links().cluster(self.options, link)
            source = ClusterSources(cluster)
            metadata_source = ClusterListings(cluster, self.options.max_age_seconds)
            views = link.views if isinstance(link.views, FolderViews) else None
        node = open_node(
            self._limited(link),
            source=source,
            metadata_source=metadata_source,
            reopen=lambda: Attached(self.options).node,
        )
        node.apply_limits()
        if cluster is not None:
            node.distinguish_copies(cluster.still_a_copy)
            self._starting = None
        self._link, self._cluster, self.views, self.node = link, cluster, views, node
        self._next_alive = time.monotonic() + _ALIVE_SECONDS
        self._plan()

    def _limited(self, link: NodeLink | None) -> CacheOptions:
        """The options of the cache that belongs to `link`, with the limits of the node that holds its folder."""
        options = self.options if link is None else replace(self.options, folder=link.folder)
        if link is None or link.capacity is None or link.min_free is None:
            return with_node_limits(options)
        return replace(options, capacity=link.capacity, min_free=link.min_free)

    def _plan(self) -> None:
        """Set the time of the next look."""
        waits = self._link is None and self._starting is None
        self.next_look = time.monotonic() + (_ALIVE_SECONDS if waits else _LOOK_SECONDS)

    def introduce(self, origin: Origin) -> None:
        """Register an origin in a cluster in Ray. Other clusters do not need it."""
        with self._lock:
            if origin.identity in self.origins:
                return
            self._add(origin)
            if self._link is None or not self._by_ray:
                return
        self._search()

    def _add(self, origin: Origin) -> None:
        self.origins.add(origin.identity)
        self._not_introduced[origin.identity] = origin

    def look(self) -> None:
        """Follow changes of the machine's node. Never raises. Returns at once while another thread does the same."""
        if self._lock.acquire(blocking=False):
            try:
                self._plan()
                self._follow()
            finally:
                self._lock.release()

    def _follow(self) -> None:
        """Take over changed facts of the node, or start a search if the link no longer holds. The lock is held."""
        node = self._started_node()
        if node is not None:
            self._use(node.link())
            if self._not_introduced:
                self._start_search()
            return
        link = self._published_link()
        if link is not None and link != self._link:
            self._use(link)
            return
        now = time.monotonic()
        if now < self._next_alive:
            return
        self._next_alive = now + _ALIVE_SECONDS
        self._follow_limits(now)
        if self._link is None and self.options.members != "auto":
            return
        if self._by_ray and is_in_ray() != self._in_ray:  # ray.init or ray.shutdown since the last check
            self._in_ray = not self._in_ray
            self._start_search()
        elif self._is_alive(link):
            self._gone_since = None
        elif self._other_node_runs() or self._is_gone_for_good(now):
            self._start_search()

    def _follow_limits(self, now: float) -> None:
        """Take over the limits of the node that holds the folder, or this process's own when the node has ended for good.

        Also opens the disks that could not be opened next to a stopped process.
        """
        try:
            if self.node.open_again() and self._cluster is not None:
                self.node.distinguish_copies(self._cluster.still_a_copy)
        except (MillraceError, OSError) as error:  # such as a directory that has other content now
            _log.warning("the cache of this process cannot be opened: %s", error)
        limited = self._limited(self._link)
        if limited == self.node.options:
            self._own_limits_from = None
            return
        if node_holding(limited) is None:
            if self._own_limits_from is None:
                self._own_limits_from = now + _FOR_GOOD_SECONDS
            if now < self._own_limits_from:
                return
        self._own_limits_from = None
        try:
            self._use(self._link)
        except (MillraceError, OSError) as error:
            _log.warning("the limits of this machine's node cannot be applied: %s", error)

    def _started_node(self) -> LocalNode | None:
        """The node whose start was not waited for, once it runs. Searches if another node has claimed its folder."""
        if self._starting is None:
            return None
        node = node_holding(self.options)
        try:
            record = None if node is None else self._starting()
        except MillraceError:
            self._starting = None  # the search after `_FOR_GOOD_SECONDS` finds it
            return None
        if node is None or record is None:
            return None
        if record.member_id != node.facts.member_id:  # another node claimed the folder first
            self._start_search()
            return None
        return node

    def _published_link(self) -> NodeLink | None:
        """The link by the newest facts of the node behind our link, if that node is still in our cluster."""
        facts = None if self.views is None else self.views.facts()
        if self.views is None or facts is None or not facts.is_of_cluster(self.options):
            return None
        return self.views.link(facts)

    def _is_alive(self, published: NodeLink | None) -> bool:
        """Whether our link still is the right one, with the link that its node has published."""
        if self._link is None:
            return not self._in_ray
        if self.views is None:  # a client, until a node runs on this machine
            return not self._other_node_runs()
        with importing():
            from millrace.cluster.folder import is_held

        return published is not None and is_held(self.views.directory)

    def _other_node_runs(self) -> bool:
        """Whether a node of our cluster runs on this machine. In Ray, only Ray has the list of nodes.

        A forked child, which cannot use Ray, uses any node that Ray started: its parent may not have waited for it.
        """
        by_name = not self._by_ray and self._link is not None
        is_forked = self._by_ray and self._link is None and self.process.parents is not None
        if not (by_name or is_forked):
            return False
        with importing():
            from millrace.cluster.folder import node_of_cluster

        return node_of_cluster(self.options) is not None

    def _is_gone_for_good(self, now: float) -> bool:
        """True once after each period of `_FOR_GOOD_SECONDS` without a node."""
        if self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since >= _FOR_GOOD_SECONDS:
            self._gone_since = now
            return True
        return False

    def _start_search(self) -> None:
        """Search in a thread of its own, unless one is already running. The lock is held."""
        self._starting = None
        if not self._searching:
            self._searching = True
            try:
                threading.Thread(target=self._search_once, name=SEARCHING, daemon=True).start()
            except RuntimeError as error:  # no more threads, or the interpreter is ending: the present link stays
                self._searching = False
                _log.warning("cannot search for this process's cluster now: %s", error)

    def _search_once(self) -> None:
        try:
            self._search()
        finally:
            self._searching = False

    def _search(self) -> None:
        """Find the link again, which may take a minute, and use it."""
        try:
            link = self._find_link()
        except MillraceError as error:
            # The present link stays: its view is old, and breakers skip members that do not respond.
            _log.warning("this process cannot find its cluster again: %s", error)
            return
        with self._lock:
            if self.process is _process:  # not after `close_all`
                cluster = None if link is None else self.process.links().cluster(self.options, link)
                if cluster is not self._cluster:
                    self._use(link)
        if link is not None and self._not_introduced:  # `introduce` was called meanwhile
            self._search()


class _Process:
    """The clusters of this process.

    `parents` is set in a child that was forked in a Ray job and therefore cannot use Ray: the folders of the nodes that its
    parent read through.
    """

    def __init__(self, *, parents: Mapping[CacheOptions, Path] | None = None) -> None:
        self.parents = parents
        self.attachments: dict[CacheOptions, _Attachment] = {}
        self._lock = threading.RLock()
        self._links: Links | None = None
        self._links_lock = threading.RLock()  # not the other, which is held during the first search

    def links(self) -> Links:
        """The links of this process. Imports what a cluster needs."""
        with self._links_lock:
            if self._links is None:
                with importing():
                    from millrace.cluster.links import Links

                self._links = Links(self.parents)
            return self._links

    def attach(self, options: CacheOptions, origin: Origin | None) -> _Attachment:
        """The attachment for `options`, made at the first call."""
        with self._lock:
            attachment = self.attachments.get(options)
            if attachment is None or attachment.node.closed:
                attachment = self.attachments[options] = _Attachment(self, options, origin)
            return attachment

    def close(self) -> None:
        """Close all clusters, also that of a first search in progress."""
        with self._lock, self._links_lock:
            if self._links is not None:
                self._links.close()


_process = _Process()


def _reset_after_fork() -> None:
    # Connections and threads belong to the parent. Nothing of them is closed here.
    global _process
    known = dict(_process.parents or {})
    for options, attachment in _process.attachments.items():
        if attachment.views is not None:
            known[options] = attachment.views.directory
    _process = _Process(parents=known if is_in_ray() else None)


forks.reset_in_child(_reset_after_fork)
