"""One node of a cluster, in this process: its folder, store, membership and data plane, and what moves when members do.

`millrace node run` is a process with one of these, the Ray actor is another. Several in one process are several nodes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from millrace._version import __version__
from millrace.cache.node import CacheNode
from millrace.config import CacheOptions, address_text
from millrace.errors import ConfigurationError, MillraceError, StorageError, UsageError
from millrace.events import Event, emit
from millrace.filesystem.load_jobs import LoadJobs
from millrace.filesystem.node_commands import add_commands
from millrace.filesystem.node_leaving import DrainReport, Heirs
from millrace.filesystem.node_moves import Moves
from millrace.filesystem.node_status import NodeFigures
from millrace.filesystem.node_weight import weight_of, worth_telling
from millrace.members import WIRE_VERSIONS, Member, Membership, MemberState, NodeLink, View
from millrace.members.opening import open_membership
from millrace.members.static import StaticMembers
from millrace.members.told import ToldMembers
from millrace.origin import Origin
from millrace.peers.breakers import Breakers
from millrace.peers.cluster import Cluster
from millrace.peers.folder import NodeFolder
from millrace.peers.inventory import Inventory
from millrace.peers.listings import ClusterListings, Teller
from millrace.peers.origins import Origins
from millrace.peers.server import PlaneServer
from millrace.peers.serving import BlockService

_log = logging.getLogger("millrace")

_LOOK_SECONDS = 1.0
_WEIGHT_SECONDS = 10.0
_SEEN_SECONDS = 10.0
_SEEN_LOOK_SECONDS = 0.02
_TELL_SECONDS = 10.0  # between two times of telling those who have not heard


class NodeProcess:
    """One node. Thread-safe; not usable after a fork. A context manager that starts and closes it.

    It serves on `host`:`port` (0: a free one), which the others must reach by that name. `membership` is that of
    `options.members` where none is given; `origins` are served beside those that its environment gives access to. With
    `tag` it takes the folder again that it had under that name.

    Raises `ConfigurationError` where the options name no cluster, or lack its token.
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
        wire: tuple[int, int] = WIRE_VERSIONS,
        find_origin: Callable[[str], Origin | None] | None = None,
    ) -> None:
        if options.cluster_token is None:
            raise ConfigurationError(
                "a node needs the secret of its cluster, the same on every node and client",
                next_step="set MILLRACE_CLUSTER_TOKEN, or 'cluster_token' in millrace.toml",
            )
        self.token = options.cluster_token
        self._options = options
        self._host, self._port, self._wire = host, port, wire
        self._given_membership = membership
        self._origins = Origins(origins, lookup=find_origin)
        self._is_static = membership is None and options.members.startswith("static://")
        if self._is_static and not port:
            raise ConfigurationError("a static member has no free port", next_step="give the port that the others know")
        self._tag = tag or (address_text(host, port) if self._is_static else "")
        self._change = threading.Condition()
        self._publishing = threading.RLock()
        self._seeing = threading.Lock()
        self._state: MemberState | None = None
        self._weight = 1.0
        self._is_unpublished = self._is_unwritten = False
        self._was_seen = self._is_doubled = False
        self._ending = threading.Event()
        self.left = threading.Event()
        """Set when the node has left its cluster, by whatever."""
        self._resources = contextlib.ExitStack()
        self.started_at = 0.0

    def __enter__(self) -> NodeProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve, and join: returns when the others can reach it; it is being filled from then on.

        Raises `ConfigurationError` (also where the port is in use), `StorageError`, and `OriginUnavailableError` where the
        membership's service cannot be reached.
        """
        if self._state is not None:
            raise UsageError("this node was started before", next_step="make a new NodeProcess")
        with contextlib.ExitStack() as opened:
            self._open(opened)
            self.started_at = time.time()
            self._state = MemberState.JOINING
            self._membership.join(self._member())
            opened.callback(self._leave)
            opened.callback(self._membership.watch(self._saw))
            self._saw()
            thread = threading.Thread(target=self._run, name="millrace-node", daemon=True)
            opened.callback(self._end, thread)
            thread.start()
            self._resources = opened.pop_all()

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Open everything, so that it is closed in the reverse order."""
        options = self._options
        self._folder = NodeFolder.claim(options, tag=self._tag)
        opened.callback(self._folder.close)
        options = replace(options, members="none", folder=self._folder.name)
        self._node = CacheNode(options)
        opened.callback(self._node.close)
        if not self._node.open_disks:
            raise StorageError("no cache directory can be used", next_step="'millrace doctor' says why")
        self._membership = self._given_membership or membership_of(self._options)
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
        self._cluster = Cluster(link, breakers=Breakers(self._folder.breakers_path))
        opened.callback(self._cluster.close)
        self.heirs = Heirs(self._cluster, me=self.member_id)
        self._node.source = self._cluster.serving_source
        service = BlockService(
            self._node,
            views=self._membership,
            member_id=self.member_id,
            replicas=options.replicas,
            origins=self._origins,
        )
        server = PlaneServer(
            service, host=self._host, port=self._port, token=self.token, tls=options.tls, wire=self._wire
        )
        opened.callback(server.close)
        self.address = server.address
        # Lists through the member that lists for all; the server's own node asks the origin on behalf of the others.
        loading = CacheNode(options)
        opened.callback(loading.close)
        loading.source = self._cluster.serving_source
        loading.asking = ClusterListings(self._cluster, options.max_age_seconds)
        self.jobs = LoadJobs(loading, self._origins.find, member_id=self.member_id)
        opened.callback(self.jobs.close)
        self._moves = Moves(self._node, self._cluster, me=self.member_id)
        opened.callback(self._moves.close)
        self._figures = NodeFigures(self._node)
        Teller(self._node, self._origins).add_routes(server)
        Inventory(self._node, self._membership, replicas=options.replicas).add_routes(server)
        add_commands(server, self)
        server.start()

    def close(self) -> None:
        """Leave at once, and end everything. Idempotent."""
        self._resources.close()

    def drain(self, seconds: float) -> DrainReport:
        """Leave as planned: the others take over what becomes theirs, for at most so long; then it is no member any more.

        It serves on until `close`.
        """
        started = time.monotonic()
        with self._change:
            if self._state in (None, MemberState.LEAVING) or self.left.is_set():
                self._change.wait_for(self.left.is_set, seconds)
                return DrainReport()
            has_much = self._state is MemberState.HERE
            self._state = MemberState.LEAVING
        emit(Event(name="cluster.leaving", subject=self.address))
        self._moves.stop()  # it takes nothing over any more itself
        self._publish_member()
        self._tell_static()
        report = self.heirs.wait(started + seconds, self._ending) if has_much else DrainReport()
        self._leave()
        return report

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
        self.heirs.wake()
        self._moves.stop()
        thread.join()

    # --- what it does by itself -------------------------------------------------------------------

    def _run(self) -> None:
        """Be filled, and from then on keep what is published true."""
        self._tell_static()
        # Whoever sees itself in a view sees those who were there before.
        deadline = time.monotonic() + _SEEN_SECONDS
        while self.view().member(self.member_id) is None and time.monotonic() < deadline:
            if self._ending.wait(_SEEN_LOOK_SECONDS):
                return
        self._moves.fill()
        with self._change:
            if self._state is MemberState.JOINING and not self._ending.is_set():
                self._state = MemberState.HERE
                self._change.notify_all()
        self._publish_member()
        if self._state is MemberState.HERE:
            emit(Event(name="cluster.joined", subject=self.address, detail=self.member_id))
        told_at = stated_at = time.monotonic()
        while not self._ending.wait(_LOOK_SECONDS):
            # Every change of a weight moves blocks: not for a disk that goes up and down.
            may_tell = time.monotonic() - told_at >= _WEIGHT_SECONDS
            if self._is_unpublished or (may_tell and worth_telling(self._weight, weight_of(self._node))):
                self._publish_member()
                told_at = time.monotonic()
            if self._is_unwritten:
                self._saw()
            if time.monotonic() - stated_at >= _TELL_SECONDS:
                self._tell_static(again=True)
                stated_at = time.monotonic()

    def wait_here(self, seconds: float) -> bool:
        """Wait until the node owns its share; whether it does."""
        with self._change:
            self._change.wait_for(lambda: self._state is not MemberState.JOINING, seconds)
            return self._state is MemberState.HERE

    def _member(self) -> Member:
        """This node as the others are told of it."""
        self._weight = weight_of(self._node)
        return Member(
            id=self.member_id,
            address=self.address,
            weight=1.0 if self._is_static else self._weight,
            state=self._state or MemberState.JOINING,
            wire=self._wire,
        )

    def _publish_member(self) -> None:
        with self._publishing:  # what is published last is what is true last
            if self.left.is_set():
                return
            try:
                self._membership.join(self._member())
                self._is_unpublished = False
            except MillraceError as error:
                if not self._is_unpublished:
                    emit(Event(name="cluster.membership.failed", subject=self.address, detail=str(error)))
                    _log.warning("the other nodes are not told of a change, which is tried again: %s", error)
                self._is_unpublished = True

    def _saw(self, _: View | None = None) -> None:
        """Tell the machine's processes, and whoever moves blocks, of the newest view."""
        with self._seeing:
            view = self._membership.view()  # of two threads that tell of views the later one may bring the older view
            self._write(view)
            self._look_for_a_double(view)
            self._cluster.placement()  # says that the view has changed
            self._moves.saw(view)
        self.heirs.wake()

    def _write(self, view: View) -> None:
        """Publish a view for the machine's processes; what fails is tried again."""
        try:
            self._folder.publish(
                view,
                address=self.address,
                token=self.token,
                members=self._options.members,
                member_id=self.member_id,
                replicas=self._options.replicas,
                tls=self._options.tls,
                capacity=self._options.capacity,
                min_free=self._options.min_free,
            )
            self._is_unwritten = False
        except StorageError as error:
            if not self._is_unwritten:
                emit(Event(name="cluster.folder.failed", subject=str(self._folder.directory), detail=str(error)))
                _log.warning("the processes of this machine do not hear of the cluster: %s", error)
            self._is_unwritten = True

    def _look_for_a_double(self, view: View) -> None:
        """Say once that another node has this one's id, as a copied cache directory brings it."""
        shown = view.member(self.member_id)
        if shown is None or self.left.is_set():
            return
        if shown.address == self.address:
            self._was_seen = True
        elif self._was_seen and not self._is_doubled:  # before, it is where this node was until it was started again
            self._is_doubled = True
            emit(Event(name="cluster.member.doubled", subject=self.address, detail=f"{self.member_id} {shown.address}"))
            _log.warning(
                "the node at %s has this node's id %s and takes its place: end one of the two, and remove %s if its "
                "cache directory is a copy",
                shown.address,
                self.member_id,
                self._folder.directory / "id",
            )

    # --- static members: states are told by the nodes themselves ------------------------------------

    def _tell_static(self, *, again: bool = False) -> None:
        """Have the other nodes know whether this one is here or leaves, where nobody else tells them."""
        if isinstance(self._membership, ToldMembers):
            state = MemberState.LEAVING if self._state is MemberState.LEAVING else MemberState.HERE
            self.heirs.tell_again(state) if again else self.heirs.tell(state)

    def hear_state(self, member_id: str, state: MemberState) -> None:
        """A static member says what state it is in."""
        if isinstance(self._membership, ToldMembers):
            self._membership.tell(member_id, state)
            self._cluster.breakers.worked(member_id)  # who speaks is there again

    # --- what others ask ----------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """`new`, `joining`, `here`, `leaving` or `left`."""
        return "left" if self.left.is_set() else str(self._state or "new")

    def view(self) -> View:
        """The members as this node knows them."""
        return self._membership.view()

    def status(self) -> dict[str, Any]:
        """What `millrace status` shows of this node, as plain values."""
        return {
            "member_id": self.member_id,
            "address": self.address,
            "state": self.state,
            "version": __version__,
            "pid": os.getpid(),
            "seconds": time.time() - self.started_at,
            "folder": self._folder.name,
            "weight": self._weight,
            "replicas": self._options.replicas,
            "waiting_for": self._waiting_for(),
            "breakers": sorted(self._cluster.breakers.open_ids()),
            "loads": self.jobs.running(),
            **self._figures.now(),
        }

    def counters(self, *, settled: bool) -> dict[str, dict[str, int]]:
        """See `NodeFigures.counters`."""
        return self._figures.counters(settled=settled)

    def _waiting_for(self) -> list[str]:
        """The addresses of those that a planned leave waits for."""
        is_leaving = self._state is MemberState.LEAVING and not self.left.is_set()
        return [member.address for member in self.heirs.left()] if is_leaving else []

    @property
    def node(self) -> CacheNode:
        """The store that the others are served from."""
        return self._node


def membership_of(options: CacheOptions) -> Membership:
    """The membership that the options name. Raises `ConfigurationError` where they name none that a process can join."""
    opened = open_membership(options.members)
    return ToldMembers(opened) if isinstance(opened, StaticMembers) else opened
