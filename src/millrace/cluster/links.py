"""Finds the link through which this process takes part in a cluster, and keeps the clusters behind links.

`attach.py` imports this module only where there may be a cluster.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from millrace.cache.node import store_directory
from millrace.cluster.breakers import Breakers
from millrace.cluster.cluster import Cluster
from millrace.cluster.folder import FolderViews, LocalNode, live_node, node_of_cluster
from millrace.cluster.membership import Membership, NodeLink
from millrace.cluster.membership.backends import open_membership
from millrace.cluster.node_starter import node_starter
from millrace.config import BY_RAY, LOCAL_FOLDER, CacheOptions, is_in_ray
from millrace.errors import ConfigurationError, MissingDependencyError, OriginUnavailableError
from millrace.origin import Origin
from millrace.runtime.forks import importing, is_installed
from millrace.runtime.private_files import make_folder

_log = logging.getLogger("millrace.cluster")


class Links:
    """The links of one process, and the clusters behind them. Thread-safe; not usable after a fork.

    `parents` is set in a child that was forked in a Ray job and therefore cannot use Ray: the directories of the nodes that
    its parent read through.
    """

    def __init__(self, parents: Mapping[CacheOptions, Path] | None) -> None:
        self._parents = parents
        self._lock = threading.RLock()
        self._clusters: dict[object, Cluster] = {}
        self._memberships: dict[str, Membership] = {}

    def find(self, options: CacheOptions, origins: Iterable[Origin]) -> NodeLink | None:
        """The link of a process whose option `members` names a cluster; see `attach.link_for`."""
        if options.members not in BY_RAY:
            return self._by_name(options)
        if self._parents is not None:
            return _without_ray(options, self._parents.get(options))
        return _by_ray(options, origins)

    def known_cluster(self, options: CacheOptions) -> Cluster | None:
        """See `attach.known_cluster`."""
        link = _without_ray(options) if options.members in BY_RAY else self._by_name(options)
        return None if link is None else self.cluster(options, link)

    def cluster(self, options: CacheOptions, link: NodeLink) -> Cluster:
        """The cluster behind a link, one for all equal links. The views of clients differ by their membership."""
        source = link.views.directory if isinstance(link.views, FolderViews) else id(link.views)
        key = (options.cache_dirs, source, link.folder, link.member_id, link.token, link.tls, link.replicas)
        with self._lock:
            cluster = self._clusters.get(key)
            if cluster is None:
                cluster = self._clusters[key] = _open_cluster(options, link)
            return cluster

    def close(self) -> None:
        """Close all clusters and memberships."""
        with self._lock:
            for cluster in self._clusters.values():
                cluster.close()
            for membership in self._memberships.values():
                membership.close()

    def _by_name(self, options: CacheOptions) -> NodeLink:
        """The link through a node of this machine in the same cluster, else that of a client with its own membership."""
        node = node_of_cluster(options)
        if node is not None:
            return node.link()
        if options.cluster_token is None:
            raise ConfigurationError(
                f"members={options.members!r} without a cluster_token, and no node of this cluster runs on this machine",
                next_step="set 'cluster_token' (MILLRACE_CLUSTER_TOKEN), or start one with 'millrace node run'",
            )
        return NodeLink(
            views=self._membership(options.members),
            folder=LOCAL_FOLDER,
            member_id=None,
            token=options.cluster_token,
            tls=options.tls,
            replicas=options.replicas,
        )

    def _membership(self, members: str) -> Membership:
        """The membership that all clients of a cluster share."""
        with self._lock:
            membership = self._memberships.get(members)
            if membership is None:
                membership = self._memberships[members] = open_membership(members)
            return membership


def _by_ray(options: CacheOptions, origins: Iterable[Origin]) -> NodeLink | None:
    """The link through the node of this Ray node, which is started if there is none; None on a Ray client (`ray://`)."""
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
        link = _without_ray(options)
        if link is None:
            raise
        return link
    if record is None:
        return None
    node = LocalNode.at(record.directory)
    if node is None:
        raise OriginUnavailableError(f"{record.directory}: its node has published nothing", next_step="try again")
    return node.link()


def _without_ray(options: CacheOptions, directory: Path | None = None) -> NodeLink | None:
    """The link through the node with this directory, else through any running node that Ray started; None without one.

    For forked children of a process in a Ray job, where Ray cannot be used, and for times when Ray does not respond.
    """
    node = None if directory is None else LocalNode.at(directory)
    node = node or node_of_cluster(options)
    return None if node is None else node.link()


def _open_cluster(options: CacheOptions, link: NodeLink) -> Cluster:
    """A cluster to read from. The machine's processes share its breakers: those of a node, or those of all clients."""
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
