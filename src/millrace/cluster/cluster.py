"""A process's state of its cluster: placement, breakers, and connections to the members."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from millrace.cache.eviction.copies import StillACopy
from millrace.cluster.breakers import Breakers
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.handover import Handover
from millrace.cluster.membership import Member, NodeLink, View
from millrace.cluster.placement import Placement
from millrace.config import SILENCE_SECONDS
from millrace.errors import PeerError, PeerRefusedError
from millrace.events import Event, emit

_log = logging.getLogger("millrace.cluster")

CHANGED_LATELY_SECONDS = 600.0
"""For this long after a change of members, reads also send requests to former holders."""

_MOST_EARLIER = 8  # nodes that start together change the placement once each

_WRONG_VERSION, _UNAUTHORIZED = 0, 401


class _Current(NamedTuple):
    """The newest view, its placement, and the time (monotonic) of the last change of members or states.

    `earlier` are the placements with other shares before it, the newest first, each with the time (monotonic) of its end.
    """

    view: View
    placement: Placement
    since: float
    earlier: tuple[tuple[Placement, float], ...]


class Cluster:
    """The cluster as one process sees it. Thread-safe, and usable after a fork: the child opens its own connections."""

    def __init__(self, link: NodeLink, *, breakers: Breakers, client: PeerClient | None = None) -> None:
        self.link = link
        self.breakers = breakers
        self.client = PeerClient(token=link.token, tls=link.tls) if client is None else client
        self.handover = Handover(self.client, breakers)
        self._current: _Current | None = None
        self._unauthorized: set[str] = set()

    def placement(self) -> Placement:
        """The placement by the newest view."""
        view = self.link.views.view()
        current = self._current
        if current is not None and (view is current.view or view == current.view):
            return current.placement
        # Concurrent threads may compute the same twice.
        now = time.monotonic()
        placement = Placement(view, replicas=self.link.replicas)
        if current is None:
            self._current = _Current(view, placement, now, ())
            return placement
        earlier = current.earlier
        if placement.shares != current.placement.shares:
            earlier = ((current.placement, now), *earlier)[:_MOST_EARLIER]
        since = current.since if current.view.version == view.version else now
        self._current = _Current(view, placement, since, earlier)
        return placement

    def changed_lately(self) -> bool:
        """Whether the members or their states changed, or were first read, in the last ten minutes."""
        current = self._current
        return current is None or time.monotonic() - current.since < CHANGED_LATELY_SECONDS

    def earlier_placements(self) -> list[Placement]:
        """The placements with other shares that this process saw in the last ten minutes, the newest first."""
        current, since = self._current, time.monotonic() - CHANGED_LATELY_SECONDS
        return [] if current is None else [placement for placement, until in current.earlier if until > since]

    def is_skipped(self, member: Member) -> bool:
        """Whether a member's breaker is open. Unlike `breakers.is_open`, this never lets a request through."""
        return self.breakers.is_known_open(member.id)

    def is_available(self, member: Member) -> bool:
        """Whether to send a member a request. A member with an open breaker is probed in the background."""
        if not self.is_skipped(member):
            return True
        return not self.breakers.is_open(member.id) and not self.probe(member)

    def probe(self, member: Member) -> bool:
        """Check in the background whether a member responds, which opens or closes its breaker.

        Returns False if that cannot be started, because the interpreter is ending.
        """
        try:
            threading.Thread(target=self._probe, args=(member,), name="millrace-probe", daemon=True).start()
        except RuntimeError:  # the interpreter is ending
            return False
        return True

    def follow(self, member: Member) -> None:
        """Probe a member with an open breaker, and report changes of the breaker by other processes of the machine."""
        self.is_available(member)
        self.breakers.report(member.id)

    def _probe(self, member: Member) -> None:
        try:
            self.client.require_version(member)
            self.client.call(member.address, "GET", "/v1/view", deadline=SILENCE_SECONDS)
        except PeerRefusedError as error:
            self.record_refusal(member, error)
            if error.status in (_WRONG_VERSION, _UNAUTHORIZED):
                self.breakers.failed(member.id)
                return
        except PeerError:
            self.breakers.failed(member.id)
            return
        self.breakers.worked(member.id)

    def record_refusal(self, member: Member, error: PeerRefusedError) -> None:
        """Report once for each member that it has another token, which would otherwise go unnoticed."""
        if error.status == _UNAUTHORIZED and member.id not in self._unauthorized:
            self._unauthorized.add(member.id)
            emit(Event(name="peer.unauthorized", subject=member.address))
            _log.warning(
                "%s: another cluster_token than this process; reads skip it. Use the same token on all nodes and readers",
                member.address,
            )

    @property
    def still_a_copy(self) -> StillACopy | None:
        """Whether other members hold all of an object by the newest view: this node evicts it first.

        None for a client, which owns nothing: on its disks all data competes as in a single node.
        """
        me = self.link.member_id
        return None if me is None else lambda object_id, size: not self.placement().stripes_of(me, object_id, size)

    def close(self) -> None:
        """Close all connections; later reads open new ones."""
        self.handover.close()
        self.client.close()
