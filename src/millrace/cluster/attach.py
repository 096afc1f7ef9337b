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

from millrace.cache.node import CacheNode, cache_node, store_directory
from millrace.cache.reading.fetching import DirectSource
from millrace.cluster.node_starter import node_starter
from millrace.config import BY_RAY, LOCAL_FOLDER, CacheOptions, is_in_ray
from millrace.errors import ConfigurationError, MillraceError, MissingDependencyError, OriginUnavailableError
from millrace.origin import Origin
from millrace.runtime import forks
from millrace.runtime.forks import importing, is_installed
from millrace.runtime.private_files import make_folder

if TYPE_CHECKING:
    from millrace.cluster.cluster import Cluster
    from millrace.cluster.folder import FolderViews, LocalNode, NodeFacts
    from millrace.cluster.membership import Membership, NodeLink
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
    if members not in BY_RAY:
        return _link_by_name(options)
    if _process.parents is not None:  # a forked child cannot use Ray
        return _link_without_ray(options, _process.parents.get(options))
    return _link_by_ray(options, origins)


def _link_by_ray(options: CacheOptions, origins: Iterable[Origin]) -> NodeLink | None:
    """The link through the node of this Ray node, which is started if there is none; None on a Ray client (`ray://`)."""
    with importing():
        from millrace.cluster.folder import LocalNode, live_node

    if not is_in_ray():
        if not is_installed("ray"):
            raise MissingDependencyError("members='ray' needs ray", next_step="pip install 'millrace[ray]'")
        raise ConfigurationError("members='ray' outside of a Ray job", next_step="call ray.init() first")
    with importing():
        from millrace.cluster.membership.ray import find_node

    try:
        record = find_node(
            options, origins, start=node_starter(), is_alive=lambda directory: live_node(directory) is not None
        )
    except OriginUnavailableError:
        link = _link_without_ray(options, None)
        if link is None:
            raise
        return link
    if record is None:
        return None
    node = LocalNode.at(record.directory)
    if node is None:
        raise OriginUnavailableError(f"{record.directory}: its node has published nothing", next_step="try again")
    return node.link()


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


def _link_without_ray(options: CacheOptions, directory: Path | None) -> NodeLink | None:
    """The link through the node with this folder, else through any running node that Ray started; None without one.

    For forked children of a process in a Ray job, where Ray cannot be used, and for times when Ray does not respond.
    """
    with importing():
        from millrace.cluster.folder import LocalNode, node_of_cluster

    node = None if directory is None else LocalNode.at(directory)
    node = node or node_of_cluster(options)
    return None if node is None else node.link()


def _link_by_name(options: CacheOptions) -> NodeLink:
    """The link through a node of this machine in the same cluster, else that of a client with its own membership."""
    with importing():
        from millrace.cluster.folder import node_of_cluster
        from millrace.cluster.membership import NodeLink

    node = node_of_cluster(options)
    if node is not None:
        return node.link()
    if options.cluster_token is None:
        raise ConfigurationError(
            f"members={options.members!r} without a cluster_token, and no node of this cluster runs on this machine",
            next_step="set 'cluster_token' (MILLRACE_CLUSTER_TOKEN), or start one with 'millrace node run'",
        )
    return NodeLink(
        views=_process.membership(options.members),
        folder=LOCAL_FOLDER,
        member_id=None,
        token=options.cluster_token,
        tls=options.tls,
        replicas=options.replicas,
    )


def known_cluster(options: CacheOptions) -> Cluster | None:
    """The cluster of a node that runs on this machine, or that `members` names. None without one; starts no node.

    Raises `ConfigurationError` if an option is missing or wrong.
    """
    if options.members == "none":
        return None
    link = _link_without_ray(options, None) if options.members in BY_RAY else _link_by_name(options)
    return None if link is None else _process.cluster(options, link)


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


def start_ray_nodes(options: CacheOptions) -> set[str]:
    """Start a node on every Ray node that has none; returns the member ids of the running ones.

    Raises `OriginUnavailableError` if Ray's control plane does not respond.
    """
    with importing():
        from millrace.cluster.membership.ray import start_everywhere

    return start_everywhere(options, start=node_starter())


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

        def reopen() -> CacheNode:
            return Attached(self.options).node

        options = self._limited(link)
        node = cache_node(options)
        node.apply_limits()
        if link is None:
            node.connect(source=DirectSource, reopen=reopen)
        else:
            with importing():
                from millrace.cluster.listings import ClusterListings
                from millrace.cluster.source import ClusterSources

            cluster = self.process.cluster(self.options, link)
            listings = ClusterListings(cluster, self.options.max_age_seconds)
            node.connect(source=ClusterSources(cluster), metadata_source=listings, reopen=reopen)
            cluster.distinguish_copies(node)
        self._link = link
        if link is not None:
            self._starting = None
        self.views = _folder_views(link)
        self.node = node
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
        facts = self._facts()
        if facts is not None and self._take_over(facts):
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
        elif self._is_alive(facts):
            self._gone_since = None
        elif self._other_node_runs() or self._is_gone_for_good(now):
            self._start_search()

    def _follow_limits(self, now: float) -> None:
        """Take over the limits of the node that holds the folder, or this process's own when the node has ended for good."""
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

    def _facts(self) -> NodeFacts | None:
        """The newest facts of the node behind the link, if that node is still in our cluster."""
        facts = None if self.views is None else self.views.facts()
        return facts if facts is not None and facts.is_of_cluster(self.options) else None

    def _take_over(self, facts: NodeFacts) -> bool:
        """Use the link that follows from `facts`; returns False if it is the present one."""
        with importing():
            from millrace.cluster.folder import LocalNode

        assert self.views is not None
        link = LocalNode(directory=self.views.directory, facts=facts).link(self.views)
        if link == self._link:
            return False
        self._use(link)
        return True

    def _is_alive(self, facts: NodeFacts | None) -> bool:
        """Whether the link still is the right one, with the facts of its node."""
        if self._link is None:
            return not self._in_ray
        if self.views is None:  # a client, until a node runs on this machine
            return not self._other_node_runs()
        with importing():
            from millrace.cluster.folder import is_held

        return facts is not None and is_held(self.views.directory)

    def _other_node_runs(self) -> bool:
        """Whether a node of our cluster runs on this machine. In Ray, only Ray has the list of nodes.

        A forked child, which cannot use Ray, uses any node that Ray started: its parent may not have waited for it.
        """
        is_forked = self.process.parents is not None
        if not (is_forked and self._link is None if self._by_ray else self._link is not None):
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
            same = (
                link is not None
                and self._link is not None
                and _key_of(self.options, link) == _key_of(self.options, self._link)
            )
            if not same and self.process is _process:  # not after `close_all`
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
        self._clusters: dict[object, Cluster] = {}
        self._memberships: dict[str, Membership] = {}

    def folders(self) -> dict[CacheOptions, Path]:
        """The folders of the nodes that file systems read through. Takes no lock, because a forked child calls it."""
        return {
            options: attachment.views.directory
            for options, attachment in list(self.attachments.items())
            if attachment.views is not None
        }

    def attach(self, options: CacheOptions, origin: Origin | None) -> _Attachment:
        """The attachment for `options`, made at the first call."""
        with self._lock:
            attachment = self.attachments.get(options)
            if attachment is None or attachment.node.closed:
                attachment = self.attachments[options] = _Attachment(self, options, origin)
            return attachment

    def cluster(self, options: CacheOptions, link: NodeLink) -> Cluster:
        """The cluster behind a link, one for all equal links."""
        key = _key_of(options, link)
        with self._lock:
            cluster = self._clusters.get(key)
            if cluster is None:
                cluster = self._clusters[key] = _open_cluster(options, link)
            return cluster

    def membership(self, members: str) -> Membership:
        """The membership that all clients of a cluster share."""
        with self._lock:
            membership = self._memberships.get(members)
            if membership is None:
                with importing():
                    from millrace.cluster.membership.backends import open_membership

                membership = self._memberships[members] = open_membership(members)
            return membership

    def close(self) -> None:
        """Close all clusters and memberships."""
        with self._lock:
            for cluster in self._clusters.values():
                cluster.close()
            for membership in self._memberships.values():
                membership.close()


def _folder_views(link: NodeLink | None) -> FolderViews | None:
    """The views of a link through a node of this machine; None for a client, and without a link."""
    if link is None:
        return None
    with importing():
        from millrace.cluster.folder import FolderViews

    return link.views if isinstance(link.views, FolderViews) else None


def _key_of(options: CacheOptions, link: NodeLink) -> object:
    """Links with equal keys share one `Cluster`. The views of clients differ by their membership."""
    views = _folder_views(link)
    source = id(link.views) if views is None else views.directory
    return (options.cache_dirs, source, link.folder, link.member_id, link.token, link.tls, link.replicas)


def _open_cluster(options: CacheOptions, link: NodeLink) -> Cluster:
    """A cluster to read from. The machine's processes share its breakers: those of a node, or those of all clients."""
    with importing():
        from millrace.cluster.breakers import Breakers
        from millrace.cluster.cluster import Cluster

    name = "client" if link.member_id is None else link.folder
    directory = store_directory(options.cache_dirs[0]).parent / f"{name}.node"
    path: Path | None = directory / "breakers"
    try:
        make_folder(directory.parent)
        make_folder(directory)
    except OSError as error:
        _log.warning("%s: %s; breakers are not shared with other processes", directory, error.strerror)
        path = None
    return Cluster(link, breakers=Breakers(path, name_of=link.address_of))


_process = _Process()


def _reset_after_fork() -> None:
    # Connections and threads belong to the parent. Nothing of them is closed here.
    global _process
    known = {**(_process.parents or {}), **_process.folders()}
    _process = _Process(parents=known if is_in_ray() else None)


forks.reset_in_child(_reset_after_fork)
