"""A planned leave: the other members are told, and waited for until they have taken over what becomes theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from millrace.errors import MillraceError, PeerSilentError
from millrace.events import Event, emit
from millrace.members import Member, MemberState
from millrace.peers.cluster import Cluster

_LOOK_SECONDS = 1.0
_ASK_SECONDS = 2.0
_ASK_THREADS = 32


@dataclass(frozen=True, kw_only=True)
class DrainReport:
    """How a planned leave went: the ids of the members that have taken over what becomes theirs, and of those that had
    not by the time that was given; and how long it took.
    """

    took_over: tuple[str, ...] = ()
    did_not: tuple[str, ...] = ()
    seconds: float = 0.0


class Heirs:
    """The members that take over what the node `me` has. Thread-safe."""

    def __init__(self, cluster: Cluster, *, me: str) -> None:
        self._cluster = cluster
        self._me = me
        self._change = threading.Condition()
        self._done: set[str] = set()
        self._gone: set[str] = set()
        self._untold: set[str] = set()

    def tell(self, state: MemberState) -> None:
        """Say what state this node is in to members that nobody else tells: static ones."""
        self._untold = self._ask(self._others(), "POST", "/v1/state", {"member": self._me, "state": str(state)})

    def tell_again(self, state: MemberState) -> None:
        """As `tell`, to those who have not heard it: they could take this node for one that leaves for ever."""
        others = [member for member in self._others() if member.id in self._untold]
        body = {"member": self._me, "state": str(state)}
        self._untold = self._ask(others, "POST", "/v1/state", body, again=True)

    def has_taken_over(self, member_id: str) -> None:
        """A member has said that it has what becomes its own."""
        with self._change:
            self._done.add(member_id)
            self._change.notify_all()

    def wake(self) -> None:
        """Have whoever waits look again."""
        with self._change:
            self._change.notify_all()

    def left(self) -> list[Member]:
        """Who has not taken over yet, of those that are there."""
        done = self._done | self._gone
        return [member for member in self._others() if member.state is MemberState.HERE and member.id not in done]

    def wait(self, deadline: float, ended: threading.Event) -> DrainReport:
        """Wait for everybody, until `deadline` (monotonic) or `ended`. Who does not answer any more is not waited for."""
        started = time.monotonic()
        while (left := self.left()) and not ended.is_set() and time.monotonic() < deadline:
            with self._change:
                news = self._change.wait(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            if not news:
                self._ask(left, "GET", "/v1/view")
        return DrainReport(
            took_over=tuple(sorted(self._done)),
            did_not=tuple(member.id for member in self.left()),
            seconds=time.monotonic() - started,
        )

    def _others(self) -> list[Member]:
        return [member for member in self._cluster.link.views.view().members if member.id != self._me]

    def _ask(
        self, others: Sequence[Member], method: str, path: str, body: Any = None, *, again: bool = False
    ) -> set[str]:
        """Ask members, all at once, and remember who is not there; gives the ids of those who did not do it.

        Where they were asked before, nothing is said of that `again`.
        """

        def ask(member: Member) -> bool:
            try:
                self._cluster.client.call(member, method, path, body, deadline=_ASK_SECONDS)
            except MillraceError as error:
                if not again:
                    emit(Event(name="cluster.member.unheard", subject=member.address, detail=str(error)))
                if isinstance(error, PeerSilentError):
                    self._gone.add(member.id)
                return False
            self._gone.discard(member.id)
            return True

        if not others:
            return set()
        with ThreadPoolExecutor(min(len(others), _ASK_THREADS), thread_name_prefix="millrace-tell") as pool:
            return {member.id for member, did in zip(others, pool.map(ask, others), strict=True) if not did}
