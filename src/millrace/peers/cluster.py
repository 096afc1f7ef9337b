"""What a process knows of its cluster: the members, who of them does not answer, and the connections to them."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from millrace.cache.counters import Counters
from millrace.cache.source import DirectSource, Source
from millrace.errors import PeerError, PeerRefusedError
from millrace.events import Event, emit
from millrace.members import Member, NodeLink, View
from millrace.origin import ObjectInfo, Origin
from millrace.peers.breakers import Breakers
from millrace.peers.client import READ_DEADLINE_SECONDS, PeerClient
from millrace.peers.handover import Handover
from millrace.peers.hedging import Paces
from millrace.peers.placement import Placement
from millrace.peers.source import ClusterSource
from millrace.peers.wire import ObjectDescription

_log = logging.getLogger("millrace")

CHANGED_LATELY_SECONDS = 600.0
"""So long after a change of the members those are asked, too, who held something before."""

_UNSPOKEN, _UNAUTHORIZED = 0, 401  # no version in common, another token


class _Seen(NamedTuple):
    """The newest view, what follows from it, and since when (monotonic) members and states are these."""

    view: View
    placement: Placement
    since: float


class Cluster:
    """A cluster as one process sees it. Thread-safe; a forked child may go on with it, over connections of its own.

    `source` and `serving_source` are what a `CacheNode.source` may be: the first for processes that read, the second for the
    node that serves others.
    """

    def __init__(self, link: NodeLink, *, breakers: Breakers, client: PeerClient | None = None) -> None:
        self.link = link
        self.breakers = breakers
        self.client = PeerClient(token=link.token, tls=link.tls) if client is None else client
        self.paces = Paces()
        self.handover = Handover(self.client, breakers)
        self._seen: _Seen | None = None
        self._strangers: set[str] = set()

    def placement(self) -> Placement:
        """Who holds what by the newest view."""
        view = self.link.views.view()
        seen = self._seen
        if seen is not None and (view is seen.view or view == seen.view):
            return seen.placement
        # Threads that meet here make the same twice, which is no harm.
        now = time.monotonic()
        same_places = seen is not None and seen.view.version == view.version
        since = seen.since if seen is not None and same_places else now
        placement = Placement(view, replicas=self.link.replicas)
        self._seen = _Seen(view, placement, since)
        return placement

    def changed_lately(self) -> bool:
        """Whether the members or their states changed in the last ten minutes, or are not known for longer than that."""
        seen = self._seen
        return seen is None or time.monotonic() - seen.since < CHANGED_LATELY_SECONDS

    def is_passed_over(self, member: Member) -> bool:
        """Whether a member did not answer lately; unlike `breakers.is_open` this lets no request through."""
        return self.breakers.is_known_open(member.id)

    def may_ask(self, member: Member, what: ObjectDescription | None = None) -> bool:
        """Whether a member may be asked, about `what`. One that did not answer is looked at now and then, which nobody
        waits for.
        """
        if not self.is_passed_over(member):
            return True
        if not self.breakers.is_open(member.id):
            try:
                threading.Thread(target=self._look, args=(member, what), name="millrace-look", daemon=True).start()
            except RuntimeError:  # the interpreter is ending
                return True
        return False

    def _look(self, member: Member, what: ObjectDescription | None) -> None:
        """Find out whether a member answers again."""
        try:
            if what is None:
                self.client.wire_version(member)
                self.client.call(member, "GET", "/v1/view", deadline=READ_DEADLINE_SECONDS)
            else:
                self.client.has(member, what)
        except PeerRefusedError as error:
            self.heard_refusal(member, error)
            if error.status in (_UNSPOKEN, _UNAUTHORIZED):
                self.breakers.failed(member.id)
                return
        except PeerError:
            self.breakers.failed(member.id)
            return
        self.breakers.worked(member.id)

    def heard_refusal(self, member: Member, error: PeerRefusedError) -> None:
        """Say, once for each member, that it has another token: nothing is had of it, which nobody would notice."""
        if error.status == _UNAUTHORIZED and member.id not in self._strangers:
            self._strangers.add(member.id)
            emit(Event(name="peer.unauthorized", subject=member.id, detail=member.address))
            _log.warning(
                "%s has another cluster_token than this process, and is passed over: give all nodes and readers the same",
                member.address,
            )

    def source(self, origin: Origin, info: ObjectInfo, object_id: bytes, counters: Counters | None) -> Source:
        """The `MakeSource` of processes that read."""
        return self._source(origin, info, counters, serving=False)

    def serving_source(self, origin: Origin, info: ObjectInfo, object_id: bytes, counters: Counters | None) -> Source:
        """The `MakeSource` of the node's own server: it never asks anybody to fetch."""
        return self._source(origin, info, counters, serving=True)

    def _source(self, origin: Origin, info: ObjectInfo, counters: Counters | None, *, serving: bool) -> Source:
        if origin.head_is_local:
            # Local files: the same name may be another file on another machine, and peers would be no faster.
            return DirectSource(origin, info, counters)
        return ClusterSource(self, origin, info, counters, serving=serving)

    def close(self) -> None:
        """End all connections; what is read afterwards opens new ones."""
        self.handover.close()
        self.client.close()
