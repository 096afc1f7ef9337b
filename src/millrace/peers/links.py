"""The ways to take part in a cluster: through the machine's node, through Ray, or as a client with its own membership."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.cache.node import store_directory
from millrace.config import LOCAL_FOLDER, CacheOptions
from millrace.errors import ConfigurationError, MissingDependencyError, OriginUnavailableError
from millrace.members import Membership, NodeLink
from millrace.members.opening import same_cluster
from millrace.origin import Origin
from millrace.origin.importing import is_installed
from millrace.peers.breakers import Breakers
from millrace.peers.cluster import Cluster
from millrace.peers.folder import FolderViews, LiveNode, NodeFacts, is_held, live_nodes, read_facts
from millrace.private_files import make_folder

_log = logging.getLogger("millrace")


def ray_link(options: CacheOptions, origin: Origin | None, *, in_job: bool) -> NodeLink | None:
    """Through the node that runs on this Ray node, started if there is none; None on a mere client of Ray (`ray://`).

    `origin` is made known to the other nodes. Raises `MissingDependencyError`, `ConfigurationError` outside of a job, and
    what starting the node raises.
    """
    if not in_job:
        if not is_installed("ray"):
            raise MissingDependencyError("members='ray' needs ray", next_step="pip install 'millrace[ray]'")
        raise ConfigurationError("members='ray' outside of a Ray job", next_step="call ray.init() first")
    # By name: nothing but that module may import ray.
    find_node: Any = importlib.import_module("millrace.members.ray").find_node
    try:
        record = find_node(options, origin, is_alive=_says_something)
    except OriginUnavailableError:
        link = inherited_link(options, None)  # Ray does not answer; a node that runs already is as good
        if link is None:
            raise
        return link
    if record is None:
        return None
    facts = read_facts(record.directory)
    if facts is None:
        raise OriginUnavailableError(f"the node in {record.directory} says nothing of itself", next_step="try again")
    return link_to(record.directory, record.folder, facts)


def inherited_link(options: CacheOptions, directory: Path | None) -> NodeLink | None:
    """Through the node with this folder, which the parent of this process reads through; else through any that Ray runs.

    For a process that was forked in a Ray job, where Ray cannot be used, and while Ray does not answer. None where no node
    is found.
    """
    facts = None if directory is None else read_facts(directory)
    if directory is not None and facts is not None:
        return link_to(directory, directory.name.removesuffix(".node"), facts)
    live = next((node for node in live_nodes(options) if node.facts.members in ("auto", "ray")), None)
    return None if live is None else link_to(live.directory, live.name, live.facts)


def _says_something(directory: Path) -> bool:
    """Whether the node with this folder lives, and has come so far that others can use it."""
    return is_held(directory) and read_facts(directory) is not None


def named_link(options: CacheOptions, membership: Callable[[str], Membership]) -> NodeLink:
    """Through a node of this machine that is in the same cluster; where there is none, as a client.

    `membership` gives what this process has for an option `members`. Raises `ConfigurationError`.
    """
    live = node_here(options)
    if live is not None:
        return link_to(live.directory, live.name, live.facts)
    if options.cluster_token is None:
        raise ConfigurationError(
            f"members={options.members!r} without a cluster_token, and no node of this cluster runs on this machine",
            next_step="set 'cluster_token' (MILLRACE_CLUSTER_TOKEN), or start one with 'millrace node run'",
        )
    return NodeLink(
        views=membership(options.members),
        folder=LOCAL_FOLDER,
        member_id=None,
        token=options.cluster_token,
        tls=options.tls,
        replicas=options.replicas,
    )


def node_here(options: CacheOptions) -> LiveNode | None:
    """The first living node of this machine that is in the same cluster."""
    return next((node for node in live_nodes(options) if same_cluster(node.facts.members, options.members)), None)


def link_to(directory: Path, folder: str, facts: NodeFacts) -> NodeLink:
    """Through the node that has published these facts in `directory`."""
    return NodeLink(
        views=FolderViews(directory),
        folder=folder,
        member_id=facts.member_id,
        token=facts.token,
        tls=facts.tls,
        replicas=facts.replicas,
        capacity=facts.capacity,
        min_free=facts.min_free,
    )


def views_of(link: NodeLink | None) -> FolderViews | None:
    """What a node of this machine publishes, where the link goes through one."""
    return link.views if link is not None and isinstance(link.views, FolderViews) else None


def differs(link: NodeLink, facts: NodeFacts) -> bool:
    """Whether a node says something of itself that it did not when the link was made."""
    told = (facts.member_id, facts.token, facts.tls, facts.replicas, facts.capacity, facts.min_free)
    return (link.member_id, link.token, link.tls, link.replicas, link.capacity, link.min_free) != told


def key_of(options: CacheOptions, link: NodeLink) -> object:
    """What makes one part in a cluster another than the next. A client's views come from its own membership."""
    views = link.views.directory if isinstance(link.views, FolderViews) else id(link.views)
    return (options.cache_dirs, views, link.folder, link.member_id, link.token, link.tls, link.replicas)


def cluster_of(options: CacheOptions, link: NodeLink) -> Cluster:
    """A cluster to read from, with breakers that the machine's processes share: a node's, or those of all clients."""
    name = "client" if link.member_id is None else link.folder
    directory = store_directory(options.cache_dirs[0]).parent / f"{name}.node"
    try:
        make_folder(directory.parent)
        make_folder(directory)
    except OSError as error:
        _log.warning("which peers do not answer is known to this process only: %s: %s", directory, error.strerror)
        return Cluster(link, breakers=Breakers(None))
    return Cluster(link, breakers=Breakers(directory / "breakers"))
