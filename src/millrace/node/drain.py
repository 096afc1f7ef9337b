"""A planned leave: this node reports it to the other members, and waits until they have copied their new shares."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from millrace.cluster.cluster import Cluster
from millrace.cluster.membership import Member, MemberState
from millrace.errors import MillraceError, PeerSilentError
from millrace.events import Event, emit

_LOOK_SECONDS = 1.0
_REQUEST_SECONDS = 2.0
_REQUEST_THREADS = 32
_NO_RESPONSE = "cluster.member.no_response"


@dataclass(frozen=True, kw_only=True)
class DrainReport:
    """The result of a planned leave: the ids of the members that took over their shares, and of those that did not in time;
    and its duration.
    """

    took_over: tuple[str, ...] = ()
    did_not: tuple[str, ...] = ()
    seconds: float = 0.0


class DrainCoordinator:
    """Coordinates the leave of the node `me` with the other members. Thread-safe."""

    def __init__(self, cluster: Cluster, *, me: str) -> None:
        self._cluster = cluster
        self._me = me
        self._change = threading.Condition()
        self._done: dict[str, frozenset[str]] = {}
        """By the member that has taken over its share: the owners among which that share was determined."""
        self._gone: set[str] = set()
        self._missed: set[str] = set()

    def announce(self, state: MemberState, *, again: bool = False) -> None:
        """Send this node's state to all members. For static members, which have no service that does it.

        With `again`, only to those that were not reached: they could regard this node as leaving without end.
        """
        others = [member for member in self._others() if not again or member.id in self._missed]
        # At the start of this node, others may not have started yet.
        event = "cluster.member.awaited" if state is MemberState.HERE else _NO_RESPONSE
        body = {"member": self._me, "state": str(state)}
        self._missed = self._request(others, "POST", "/v1/state", body, event=None if again else event)

    def taken_over(self, member_id: str, owners: Iterable[str] = ()) -> None:
        """Record that a member has taken over its share, as determined among `owners`.

        If one of these leaves, its share becomes that of the others, which then take over again.
        """
        with self._change:
            self._done[member_id] = frozenset(owners)
            self._change.notify_all()

    def wake(self) -> None:
        """Make `wait` check again."""
        with self._change:
            self._change.notify_all()

    def remaining(self) -> list[Member]:
        """The members that have not taken over their shares yet, without those that do not respond."""
        return [member for member in self._not_done() if member.id not in self._gone]

    def _not_done(self) -> list[Member]:
        """The members that have not taken over their shares yet."""
        here = [member for member in self._others() if member.state is MemberState.HERE]
        done = self._took_over({member.id for member in here})
        return [member for member in here if member.id not in done]

    def _took_over(self, here: Set[str]) -> set[str]:
        """The members that have taken over their shares, if these were determined among members that are all `here`."""
        return {member_id for member_id, owners in list(self._done.items()) if owners <= here}

    def wait(self, deadline: float, ended: threading.Event) -> DrainReport:
        """Wait for all members that respond, until `deadline` (monotonic) or `ended`."""
        started = time.monotonic()
        while self.remaining() and not ended.is_set() and time.monotonic() < deadline:
            with self._change:
                notified = self._change.wait(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            if not notified:
                # Also from silent members: this node waits for one that responds again.
                self._request(self._not_done(), "GET", "/v1/view")
        here = {member.id for member in self._others() if member.state is MemberState.HERE}
        return DrainReport(
            took_over=tuple(sorted(self._took_over(here))),
            did_not=tuple(member.id for member in self.remaining()),
            seconds=time.monotonic() - started,
        )

    def _others(self) -> list[Member]:
        return [member for member in self._cluster.link.views.view().members if member.id != self._me]

    def _request(
        self, others: Sequence[Member], method: str, path: str, body: Any = None, *, event: str | None = _NO_RESPONSE
    ) -> set[str]:
        """Send a request to all of `others` at once; returns the ids of those that failed. Records silent members.

        Emits `event`, if any, for each failure, unless the member was silent before.
        """

        def request(member: Member) -> bool:
            try:
                self._cluster.client.call(
                    member.address, method, path, body, deadline=_REQUEST_SECONDS, working_seconds=0
                )
            except MillraceError as error:
                if event is not None and member.id not in self._gone:
                    emit(Event(name=event, subject=member.address, detail=str(error)))
                if isinstance(error, PeerSilentError):
                    self._gone.add(member.id)
                return False
            self._gone.discard(member.id)
            return True

        if not others:
            return set()
        with ThreadPoolExecutor(min(len(others), _REQUEST_THREADS), thread_name_prefix="millrace-announce") as pool:
            return {member.id for member, did in zip(others, pool.map(request, others), strict=True) if not did}
