"""One node of a cluster in this process: its folder, store, membership, data plane, and moves of blocks.

`millrace node run` and the Ray actor run one each. Several in one process are several nodes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace._version import __version__
from millrace.cache.node import CacheNode
from millrace.cluster.breakers import Breakers
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.dataplane.server import PlaneServer
from millrace.cluster.folder import NodeFacts, NodeFolder
from millrace.cluster.invalidation import Invalidations
from millrace.cluster.inventory import Inventory
from millrace.cluster.listings import ClusterListings, MetadataOwner
from millrace.cluster.membership import Member, Membership, MemberState, NodeLink, View
from millrace.cluster.membership.backends import open_membership
from millrace.cluster.membership.static import StaticMembers
from millrace.cluster.origins import Origins
from millrace.cluster.replicas import ReplicaFiles
from millrace.cluster.serving import BlockService
from millrace.cluster.source import ClusterSources
from millrace.config import CacheOptions, address_text
from millrace.errors import ConfigurationError, MillraceError, StorageError, UsageError
from millrace.events import Event, emit
from millrace.metrics import Sample
from millrace.node.commands import add_commands
from millrace.node.details import details_of
from millrace.node.drain import DrainCoordinator, DrainReport
from millrace.node.figures import NodeFigures, differs_enough, weight_of
from millrace.node.history import History, RecentEvents
from millrace.node.load_jobs import LoadJobs
from millrace.node.measures import NodeMeasures, add_pages
from millrace.node.moves import Moves
from millrace.node.status_page import add_status_page
from millrace.origin import Origin

_log = logging.getLogger("millrace.node")

_LOOK_SECONDS = 1.0
_WEIGHT_SECONDS = 10.0
_SEEN_SECONDS = 10.0
_START_SECONDS = 60.0  # in which the other nodes may not have started yet
_SEEN_LOOK_SECONDS = 0.02
_ANNOUNCE_SECONDS = 10.0  # between two announcements to members that were not reached


class NodeProcess:
    """One node. Thread-safe; not usable after a fork. A context manager that starts and closes it.

    It serves on `host`:`port` (0: a free one); the other nodes must reach it by that name. `membership` defaults to that of
    `options.members`. `origins` are served in addition to those that the environment has credentials for. With `tag`, the
    node claims the folder that it had under that tag. `public_metrics` serves `/metrics` without the token.

    Raises `ConfigurationError` if the options name no cluster or have no token.
    """

    def __init__(
        self,
        options: CacheOptions,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        membership: Membership | None = None,
        origins: Iterable[Origin] = (),
        tag: str = "",
        find_origin: Callable[[str], Origin | None] | None = None,
        public_metrics: bool = False,
    ) -> None:
        if options.cluster_token is None:
            raise ConfigurationError(
                "a node needs the cluster_token of its cluster, the same on every node and client",
                next_step="set MILLRACE_CLUSTER_TOKEN, or 'cluster_token' in millrace.toml",
            )
        self.token = options.cluster_token
        self._options = options
        self._host, self._port = host, port
        self._given_membership = membership
        self._origins = Origins(origins, lookup=find_origin)
        self._is_static = membership is None and options.members.startswith("static://")
        if self._is_static and not port:
            raise ConfigurationError(
                "a static member needs a fixed port", next_step="give the port that all members list"
            )
        self._tag = tag or (address_text(host, port) if self._is_static else "")
        self._public_metrics = public_metrics
        self._thread: threading.Thread | None = None
        self._change = threading.Condition()
        self._publishing = threading.RLock()
        self._seeing = threading.Lock()
        self._state: MemberState | None = None
        self._weight = 1.0
        self._is_unpublished = self._is_unwritten = False
        self._was_seen = self._is_doubled = self._is_absent = False
        self._ending = threading.Event()
        self.left = threading.Event()
        """Set when the node has left its cluster, for any reason."""
        self._resources = contextlib.ExitStack()
        self.started_at = self._started = 0.0  # in Unix seconds, and of the monotonic clock

    def __enter__(self) -> NodeProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve and join. Returns when the other nodes can reach it; it copies its share from them afterwards.

        Raises `ConfigurationError` (also if the port is in use), `StorageError`, and `OriginUnavailableError` if the
        membership service cannot be reached.
        """
        if self._state is not None:
            raise UsageError("this node was started before", next_step="make a new NodeProcess")
        with contextlib.ExitStack() as opened:
            self._open(opened)
            self.started_at, self._started = time.time(), time.monotonic()
            self._state = MemberState.JOINING
            self._membership.join(self._member())
            opened.callback(self._leave)
            opened.callback(self._membership.watch(self._view_changed))
            self._view_changed()
            thread = self._thread = threading.Thread(target=self._run, name="millrace-node", daemon=True)
            opened.callback(self._end, thread)
            thread.start()
            self._resources = opened.pop_all()

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Open all parts; `opened` closes them in the reverse order."""
        options = self._options
        self._folder = NodeFolder.claim(options, tag=self._tag)
        opened.callback(self._folder.close)
        options = replace(options, members="none", folder=self._folder.name)
        self._membership = self._given_membership or open_membership(self._options.members)
        opened.callback(self._membership.close)
        self.member_id = address_text(self._host, self._port) if self._is_static else self._folder.member_id
        link = NodeLink(
            views=self._membership,
            folder=self._folder.name,
            member_id=self.member_id,
            token=self.token,
            tls=options.tls,
            replicas=options.replicas,
        )
        path = self._folder.breakers_path
        self._cluster = Cluster(link, breakers=Breakers(path, start_seconds=_START_SECONDS, name_of=link.address_of))
        opened.callback(self._cluster.close)
        sources = ClusterSources(self._cluster, serving=True)
        self._node = CacheNode(options, source=sources)
        opened.callback(self._node.close)
        if not self._node.open_disks:
            raise self._node.unusable()
        self._node.distinguish_copies(self._cluster.still_a_copy)
        self.drains = DrainCoordinator(self._cluster, me=self.member_id)
        # Loads list through the metadata owner. The server's own node reads the origin on behalf of the others.
        listings = ClusterListings(self._cluster, options.max_age_seconds)
        loading = CacheNode(options, source=sources, metadata_source=listings)
        opened.callback(loading.close)
        # They end after the server, so that their clients count this node as lost, and not its share as loaded or failed.
        self.jobs = LoadJobs(loading, self._origins.find, member_id=self.member_id)
        opened.callback(self.jobs.close)
        service = BlockService(self._node, self._cluster, self._origins)
        server = PlaneServer(service, host=self._host, port=self._port, token=self.token, tls=options.tls)
        opened.callback(server.close)
        self.address = server.address
        replicas = ReplicaFiles(self._node)
        opened.callback(replicas.close)
        replicas.add_routes(server)
        self._moves = Moves(self._node, self._cluster, me=self.member_id)
        opened.callback(self._moves.close)
        self._figures = NodeFigures(self._node)
        self._history = History(self._node.counters)
        self._history.start()
        opened.callback(self._history.close)
        self._recent_events = RecentEvents()
        opened.callback(self._recent_events.close)
        self._metadata_owner = MetadataOwner(
            self._node, self._origins, Invalidations(self._cluster), self._membership.absences
        )
        self._metadata_owner.add_routes(server)
        Inventory(self._node, replicas=options.replicas).add_routes(server)
        add_commands(server, self)
        self.measures = NodeMeasures(self, server)
        opened.callback(self.measures.close)
        add_pages(server, self, self.measures, public_metrics=self._public_metrics)
        add_status_page(server, self)
        server.start()

    def close(self) -> None:
        """Leave at once, and stop everything. Idempotent."""
        self._resources.close()

    def drain(self, seconds: float) -> DrainReport:
        """Leave as planned: the others copy their new shares within `seconds`; then this node leaves the membership.

        It continues to serve until `close`.
        """
        started = time.monotonic()
        with self._change:
            if self._state in (None, MemberState.LEAVING) or self.left.is_set():
                self._change.wait_for(self.left.is_set, seconds)
                return DrainReport()
            owns_share = self._state is MemberState.HERE
            self._state = MemberState.LEAVING
        try:
            emit(Event(name="cluster.leaving", subject=self.address))
            self._moves.stop()  # it takes over no more shares itself
            self._publish_member()
            self._announce_static()
            return self.drains.wait(started + seconds, self._ending) if owns_share else DrainReport()
        finally:  # also after an error, such as no more threads: the process waits until its node has left
            self._leave()

    def _leave(self) -> None:
        with self._publishing:
            if self.left.is_set():
                return
            self._membership.leave()
            with self._change:
                self._state = MemberState.LEAVING
                self.left.set()
                self._change.notify_all()
        emit(Event(name="cluster.left", subject=self.address))

    def _end(self, thread: threading.Thread) -> None:
        self._ending.set()
        self.drains.wake()
        self._moves.stop()
        thread.join()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        """Copy this node's share, then keep the published member up to date."""
        self._announce_static()
        # A view that contains this node also contains all earlier members.
        deadline = time.monotonic() + _SEEN_SECONDS
        while self.view().member(self.member_id) is None and time.monotonic() < deadline:
            if self._ending.wait(_SEEN_LOOK_SECONDS):
                return
        is_filled = self._moves.fill()
        self._metadata_owner.expire_all()
        with self._change:
            if self._state is MemberState.JOINING and not self._ending.is_set():
                self._state = MemberState.HERE
                self._change.notify_all()
        self._publish_member()
        if self._state is MemberState.HERE:
            emit(Event(name="cluster.joined", subject=self.address))
            if not is_filled:
                self._moves.refill()
        published_at = announced_at = time.monotonic()
        absences = self._membership.absences() // 2  # those that are over
        while not self._wait_alive(_LOOK_SECONDS):
            # Every change of a weight moves blocks: small variations of free space must not.
            may_change = time.monotonic() - published_at >= _WEIGHT_SECONDS
            if self._is_unpublished or (may_change and differs_enough(self._weight, weight_of(self._node))):
                self._publish_member()
                published_at = time.monotonic()
            if self._is_unwritten:
                self._view_changed()
            for member in self.view().members:
                if member.id != self.member_id:
                    self._cluster.follow(member)
            if self._membership.absences() // 2 != absences:
                absences = self._membership.absences() // 2
                # The others have read its share for it. They receive requests for it for a limited time only.
                self._moves.refill()
            if time.monotonic() - announced_at >= _ANNOUNCE_SECONDS:
                self._announce_static(again=True)
                announced_at = time.monotonic()

    def _wait_alive(self, seconds: float) -> bool:
        """Wait for the end of the node, and record before and after that this process runs."""
        self._metadata_owner.record_alive()
        ends = self._ending.wait(seconds)
        self._metadata_owner.record_alive()
        return ends

    def wait_here(self, seconds: float) -> bool:
        """Wait until the node owns its share; returns whether it does."""
        with self._change:
            self._change.wait_for(lambda: self._state is not MemberState.JOINING, seconds)
            return self._state is MemberState.HERE

    def _member(self) -> Member:
        """This node as it is published."""
        self._weight = weight_of(self._node)
        return Member(
            id=self.member_id,
            address=self.address,
            weight=1.0 if self._is_static else self._weight,
            state=self._state or MemberState.JOINING,
        )

    def _publish_member(self) -> None:
        with self._publishing:  # in order: the last published state must be the newest
            if self.left.is_set():
                return
            try:
                self._membership.join(self._member())
                self._is_unpublished = False
            except MillraceError as error:
                if not self._is_unpublished:
                    emit(Event(name="cluster.membership.failed", subject=self.address, detail=str(error)))
                self._is_unpublished = True

    def _view_changed(self, _: View | None = None) -> None:
        """Publish the newest view for the machine's processes, and start the moves that follow from it."""
        with self._seeing:
            view = self._membership.view()  # two watchers may be called in the wrong order
            self._write(view)
            self._check_for_duplicate(view)
            was_absent, self._is_absent = self._is_absent, view.member(self.member_id) is None
            if was_absent or self._is_absent:  # the views of writers lacked this node
                self._metadata_owner.expire_all()
            self._cluster.placement()  # records the time of the change
            self._moves.view_changed(view)
        self.drains.wake()

    def _write(self, view: View) -> None:
        """Publish a view for the machine's processes; a failure is tried again."""
        try:
            self._folder.publish(
                NodeFacts(
                    member_id=self.member_id,
                    address=self.address,
                    token=self.token,
                    members=self._options.members,
                    replicas=self._options.replicas,
                    tls=self._options.tls,
                    pid=os.getpid(),
                    view=view,
                    capacity=self._options.capacity,
                    min_free=self._options.min_free,
                )
            )
            self._is_unwritten = False
        except StorageError as error:
            if not self._is_unwritten:
                emit(Event(name="cluster.folder.failed", subject=str(self._folder.directory), detail=str(error)))
            self._is_unwritten = True

    def _check_for_duplicate(self, view: View) -> None:
        """Report once that another node has this one's id, for example after a copy of the cache directory."""
        published = view.member(self.member_id)
        if published is None or self.left.is_set():
            return
        if published.address == self.address:
            self._was_seen = True
        elif self._was_seen and not self._is_doubled:  # before, it is this node's address before its restart
            self._is_doubled = True
            emit(
                Event(
                    name="cluster.member.doubled",
                    subject=self.address,
                    detail=f"the other one is at {published.address}",
                )
            )
            _log.warning(
                "the node at %s has this node's id %s and replaces it: stop one of the two, and remove %s if its "
                "cache directory is a copy",
                published.address,
                self.member_id,
                self._folder.directory / "id",
            )

    # --- static members: the nodes report their states themselves -----------------------------------

    def _announce_static(self, *, again: bool = False) -> None:
        """Send this node's state to the other nodes. Only for static members, which have no service for it."""
        if self._is_static and isinstance(self._membership, StaticMembers):
            with self._publishing:  # in order: the last announced state must be the newest
                state = MemberState.LEAVING if self._state is MemberState.LEAVING else MemberState.HERE
                self.drains.announce(state, again=again)

    def set_member_state(self, member_id: str, state: MemberState) -> None:
        """Set the state that a static member reported."""
        if self._is_static and isinstance(self._membership, StaticMembers):
            self._membership.set_state(member_id, state)
            self._cluster.breakers.worked(member_id)  # it responds again

    # --- requests -----------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """`new`, `joining`, `here`, `leaving` or `left`."""
        return "left" if self.left.is_set() else str(self._state or "new")

    def is_alive(self) -> bool:
        """Whether the node works: its thread runs, and a disk is usable."""
        return self._thread is not None and self._thread.is_alive() and bool(self._node.open_disks)

    def open_breakers(self) -> list[str]:
        """The ids of the members that this machine skips."""
        return sorted(member.id for member in self.view().members if self._cluster.is_skipped(member))

    def probe(self, member_ids: Iterable[str]) -> None:
        """Check in the background whether these members respond. Emits an event for each that has become silent."""
        for member in map(self.view().member, member_ids):
            if member is not None and not self._cluster.is_skipped(member):  # else the node's thread probes it
                self._cluster.probe(member)

    def view(self) -> View:
        """This node's view of the members."""
        return self._membership.view()

    def status(self, *, details: bool = False) -> dict[str, Any]:
        """The status that `millrace status` shows, as plain values. `details` adds this node's part of the status page."""
        status = {
            "member_id": self.member_id,
            "address": self.address,
            "state": self.state,
            "version": __version__,
            "pid": os.getpid(),
            "seconds": time.monotonic() - self._started,
            "folder": self._folder.name,
            "weight": self._weight,
            "replicas": self._options.replicas,
            "waiting_for": self._waiting_for(),
            "breakers": self.open_breakers(),
            "loads": self.jobs.running(),
            **self._figures.now(),
        }
        if details:
            status["details"] = details_of(self, self._figures.contents(), self._history, self._recent_events)
        return status

    def counters(self, *, settled: bool) -> dict[str, dict[str, int]]:
        """See `NodeFigures.counters`."""
        return self._figures.counters(settled=settled)

    def samples(self) -> list[Sample]:
        """The metrics of this node."""
        return self.measures.samples()

    def _waiting_for(self) -> list[str]:
        """The addresses of the members that a planned leave waits for."""
        is_leaving = self._state is MemberState.LEAVING and not self.left.is_set()
        return [member.address for member in self.drains.remaining()] if is_leaving else []

    @property
    def directory(self) -> Path:
        """The node's folder."""
        return self._folder.directory

    @property
    def client(self) -> PeerClient:
        """Sends requests to the other nodes."""
        return self._cluster.client

    @property
    def node(self) -> CacheNode:
        """The cache that other nodes are served from."""
        return self._node


def start_node(
    options: CacheOptions,
    *,
    host: str,
    membership: Membership,
    tag: str,
    find_origin: Callable[[str], Origin | None],
) -> NodeProcess:
    """Start the node of a Ray actor (a `membership.ray_actor.StartNode`). Raises the errors of `NodeProcess.start`."""
    process = NodeProcess(options, host=host, membership=membership, tag=tag, find_origin=find_origin)
    process.start()
    return process
