"""How a process finds its part in a cluster: the `CacheNode` that its file systems read through, attached where they say so.

What was found is kept for the process and looked after on the way: when the machine's node dies and another takes over, or
tells another token, the next reads follow. What may take long, to find the cluster anew, a thread does aside: only the first
read of all waits for it. A process without a cluster imports nothing of it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.cache.asking import ASK_ORIGIN
from millrace.cache.node import CacheNode, cache_node
from millrace.cache.source import direct
from millrace.config import CacheOptions
from millrace.errors import MillraceError
from millrace.origin import Origin

if TYPE_CHECKING:
    from millrace.members import Membership, NodeLink
    from millrace.peers.cluster import Cluster

_log = logging.getLogger("millrace")

_LOOK_SECONDS = 0.1  # at what the node has published
_ALIVE_SECONDS = 1.0  # whether the node lives, or whether there is one now
_FOR_GOOD_SECONDS = 30.0  # a node that is gone for so long is not just being restarted


SEARCHING = "millrace-attach"
"""The name of threads that find a cluster anew."""


def node_for(options: CacheOptions, origin: Origin | None = None) -> CacheNode:
    """The cache of this process for `options`, with the cluster behind it where `members` says so.

    Thread-safe, and usable after a fork; after the first time as quick as a look into a dictionary. `origin` is what will be
    read: a cluster in Ray makes it known to the other nodes. Raises `ConfigurationError`, `MissingDependencyError`.
    """
    attachment = _process.attachments.get(options)
    if attachment is None or attachment.node.closed:
        attachment = _process.attach(options, origin)
    if origin is not None and origin.identity not in attachment.origins:
        attachment.introduce(origin)
    if time.monotonic() >= attachment.next_look:
        attachment.look()
    return attachment.node


class Attached:
    """`node_for` for one who asks often: what was found is remembered here, and nothing is looked up. As safe as that."""

    def __init__(self, options: CacheOptions, origin: Origin | None = None) -> None:
        self._options = options
        self._origin = origin
        self._attachment: _Attachment | None = None

    @property
    def node(self) -> CacheNode:
        """See `node_for`."""
        attachment = self._attachment
        if attachment is None or attachment.process is not _process or attachment.node.closed:
            node_for(self._options, self._origin)
            attachment = self._attachment = _process.attach(self._options, self._origin)
        elif time.monotonic() >= attachment.next_look:
            attachment.look()
        return attachment.node


def link_for(options: CacheOptions, origin: Origin | None = None) -> NodeLink | None:
    """How a process with `options` takes part in a cluster; None where it does not.

    Raises `ConfigurationError` where something must be set, `MissingDependencyError` without Ray.
    """
    members = options.members
    if members == "none" or (members == "auto" and not _in_ray()):
        return None
    from millrace.peers import links

    if members in ("auto", "ray"):
        if _process.parents is not None:
            return links.inherited_link(options, _process.parents.get(options))
        return links.ray_link(options, origin, in_job=_in_ray())
    return links.named_link(options, _process.membership)


def close_all() -> None:
    """End what this process has of clusters; the next use attaches anew. For tests."""
    global _process
    ended, _process = _process, _Process()
    ended.close()


def _in_ray() -> bool:
    """Whether this process is part of a Ray job. Does not import ray: who is in a job has done so."""
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


class _Attachment:
    """The part that file systems of one set of options have in a cluster, or that they have none.

    `next_look` is when (`time.monotonic`) somebody who passes is to look whether it is still so.
    """

    def __init__(self, process: _Process, options: CacheOptions, origin: Origin | None) -> None:
        self.options = options
        self.origins: set[str] = set() if origin is None else {origin.identity}
        self.next_look = 0.0
        self.process = process
        self._lock = threading.Lock()
        self._searching = False
        self._by_ray = options.members in ("auto", "ray")
        self._in_ray = _in_ray()
        self._gone_since: float | None = None
        self._use(self._first_link(origin))

    def _first_link(self, origin: Origin | None) -> NodeLink | None:
        try:
            return link_for(self.options, origin)
        except MillraceError as error:
            if self.options.members != "auto":
                raise
            _log.warning("this process reads without its Ray cluster's cache: %s", error)
            self._gone_since = time.monotonic()  # from then on it is tried again
            return None

    def _use(self, link: NodeLink | None) -> None:
        """Read through `link` from now on."""
        if link is None:
            node = cache_node(self.options)
            node.source, node.asking = direct, ASK_ORIGIN
        else:
            from millrace.peers.copies import know_copies
            from millrace.peers.listings import ClusterListings

            cluster = self.process.cluster(self.options, link)
            # In a node's folder its limits hold: a reader with others would fill what the node then has to empty.
            capacity, min_free = link.capacity or self.options.capacity, link.min_free or self.options.min_free
            node = cache_node(replace(self.options, folder=link.folder, capacity=capacity, min_free=min_free))
            node.source, node.asking = cluster.source, ClusterListings(cluster, self.options.max_age_seconds)
            know_copies(node, cluster)
        node.again = lambda: node_for(self.options)
        self._link = link
        self.directory: Path | None = None if link is None else getattr(link.views, "directory", None)
        self.node = node
        self._next_alive = time.monotonic() + _ALIVE_SECONDS
        self._plan()

    def _plan(self) -> None:
        """Say when to look again: never, where nothing can change."""
        if self._link is None and self.options.members != "auto":
            self.next_look = float("inf")
        else:
            self.next_look = time.monotonic() + (_LOOK_SECONDS if self._link is not None else _ALIVE_SECONDS)

    def introduce(self, origin: Origin) -> None:
        """Make an origin known to the cluster, where that is of any use."""
        with self._lock:
            if origin.identity in self.origins:
                return
            self.origins.add(origin.identity)
            if self._link is None or not self._by_ray:
                return
        self._search(origin)

    def look(self) -> None:
        """Follow what has changed. Never raises; where another thread is at it already, that is enough."""
        if self._lock.acquire(blocking=False):
            try:
                self._plan()
                self._follow()
            finally:
                self._lock.release()

    def _follow(self) -> None:
        if self._follow_facts():
            return
        now = time.monotonic()
        if now < self._next_alive:
            return
        self._next_alive = now + _ALIVE_SECONDS
        if self._by_ray and _in_ray() != self._in_ray:  # ray.init or ray.shutdown since the last time
            self._in_ray = not self._in_ray
            self._search_aside()
        elif self._is_alive():
            self._gone_since = None
        elif self._has_successor() or self._is_gone_for_good(now):
            self._search_aside()

    def _follow_facts(self) -> bool:
        """Whether the machine's node says something else of itself now."""
        if self._link is None:
            return False
        from millrace.peers import links

        views = links.views_of(self._link)
        facts = None if views is None else views.facts()
        if views is None or facts is None or not self._is_ours(facts.members) or not links.differs(self._link, facts):
            return False
        self._use(links.link_to(views.directory, self._link.folder, facts))
        return True

    def _is_ours(self, members: str) -> bool:
        """Whether a node that found its cluster by this is in ours."""
        if self._by_ray:
            return members in ("auto", "ray")
        from millrace.members.opening import same_cluster

        return same_cluster(members, self.options.members)

    def _is_alive(self) -> bool:
        """Whether what this process takes part through is still there."""
        if self._link is None:
            return not self._in_ray
        from millrace.peers import folder, links

        views = links.views_of(self._link)
        if views is None:
            return self._by_ray or links.node_here(self.options) is None  # a client, until there is a node
        facts = views.facts()
        return facts is not None and self._is_ours(facts.members) and folder.is_held(views.directory)

    def _has_successor(self) -> bool:
        if self._by_ray:
            return False  # Ray says where its node is
        from millrace.peers import links

        return links.node_here(self.options) is not None

    def _is_gone_for_good(self, now: float) -> bool:
        """True once after each time of `_FOR_GOOD_SECONDS` without a node."""
        if self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since >= _FOR_GOOD_SECONDS:
            self._gone_since = now
            return True
        return False

    def _search_aside(self) -> None:
        """Find the cluster anew in a thread of its own, if none does so already. The lock is held."""
        if not self._searching:
            self._searching = True
            try:
                threading.Thread(target=self._search_once, name=SEARCHING, daemon=True).start()
            except RuntimeError as error:  # no more threads, or the interpreter is ending: what is there goes on
                self._searching = False
                _log.warning("this process does not look for its cluster now: %s", error)

    def _search_once(self) -> None:
        try:
            self._search(None)
        finally:
            self._searching = False

    def _search(self, origin: Origin | None) -> None:
        """Find the cluster anew, which may take a minute, and read through what is found."""
        try:
            link = link_for(self.options, origin)
        except MillraceError as error:
            # What is there goes on: its view is old, and who does not answer is passed over.
            _log.warning("this process cannot find its cluster anew: %s", error)
            return
        with self._lock:
            if link is not None and self._link is not None:
                from millrace.peers import links

                if links.key_of(self.options, link) == links.key_of(self.options, self._link):
                    return
            if self.process is _process:  # not after `close_all`
                self._use(link)


class _Process:
    """What this process has of clusters.

    `parents` is set in a process that was forked from one in a Ray job, and cannot ask Ray itself: which nodes' folders its
    parent read through.
    """

    def __init__(self, *, parents: Mapping[CacheOptions, Path] | None = None) -> None:
        self.parents = parents
        self.attachments: dict[CacheOptions, _Attachment] = {}
        self._lock = threading.RLock()
        self._clusters: dict[object, Cluster] = {}
        self._memberships: dict[str, Membership] = {}

    def folders(self) -> dict[CacheOptions, Path]:
        """The folders of the nodes that file systems read through. Takes no lock: it is asked after a fork."""
        return {
            options: attachment.directory
            for options, attachment in list(self.attachments.items())
            if attachment.directory is not None
        }

    def attach(self, options: CacheOptions, origin: Origin | None) -> _Attachment:
        """What file systems with `options` have, found at the first time."""
        with self._lock:
            attachment = self.attachments.get(options)
            if attachment is None or attachment.node.closed:
                attachment = self.attachments[options] = _Attachment(self, options, origin)
            return attachment

    def cluster(self, options: CacheOptions, link: NodeLink) -> Cluster:
        """One for all that have the same part."""
        from millrace.peers import links

        key = links.key_of(options, link)
        with self._lock:
            cluster = self._clusters.get(key)
            if cluster is None:
                cluster = self._clusters[key] = links.cluster_of(options, link)
            return cluster

    def membership(self, members: str) -> Membership:
        """One for all clients of a cluster."""
        with self._lock:
            membership = self._memberships.get(members)
            if membership is None:
                from millrace.members.opening import open_membership

                membership = self._memberships[members] = open_membership(members)
            return membership

    def close(self) -> None:
        """End all of it."""
        with self._lock:
            for cluster in self._clusters.values():
                cluster.close()
            for membership in self._memberships.values():
                membership.close()


_process = _Process()


def _forget_after_fork() -> None:
    # Connections and threads are the parent's. Nothing of them is closed here.
    global _process
    known = {**(_process.parents or {}), **_process.folders()}
    _process = _Process(parents=known if _in_ray() else None)


os.register_at_fork(after_in_child=_forget_after_fork)
