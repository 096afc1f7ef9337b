"""Invalidations: every write makes all members drop their cached metadata of the written or removed keys.

A write returns when every reachable member has dropped the keys. A bucket's metadata owners come first: a member that is
invalidated later and then sends them a request must not receive the old metadata again. While the cluster changes, a member
may know members, or name owners, that the writer does not: its response names its view, and the invalidation is sent
again to the members of both. Members that cannot be reached, or whose disk hangs, receive the invalidation later, from a
thread of this process and from one of this machine's node (or of another member), since this process may end before. Both
try for ten minutes at most. Until then their readers see what `consistency` allows.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.wire import MAX_BODY_BYTES
from millrace.cluster.membership import Member, View
from millrace.cluster.placement import Placement
from millrace.config import SILENCE_SECONDS
from millrace.errors import DamagedError, MillraceError, PeerError, PeerSilentError
from millrace.events import Event, emit
from millrace.origin.side_by_side import side_by_side
from millrace.runtime import forks

FORGET = "/v1/forget"

MOST_PENDING = 10_000
"""Pending keys over all members. Beyond that the oldest are dropped, with an event."""

_KEY_SECONDS = 0.005  # ten times the usual duration
_WORKING_SECONDS = 20.0  # a busy node takes seconds; a disk may hang
_THREADS = 16
_PAUSE_SECONDS = 1.0
_KEPT_SECONDS = 600.0
_BATCH_BYTES = MAX_BODY_BYTES // 2


class Invalidations:
    """Sends invalidations to members. Thread-safe; a forked child begins without pending ones. Never raises."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._begin()

    def _begin(self) -> None:
        self._owner = forks.Owner()
        self._lock = threading.RLock()  # entered instead of its condition, which an interrupt could leave locked
        self._change = threading.Condition(self._lock)
        self._pending: dict[tuple[str, str, str], float] = {}
        """By member, origin and key: the time (monotonic) at which it is dropped. The oldest come first."""
        self._thread: threading.Thread | None = None

    def send(
        self, identity: str, keys: Sequence[str], first: Callable[[Placement], Sequence[Member]] = lambda _: ()
    ) -> set[str]:
        """Invalidate `keys` of an origin on every member: on those of `first` one after the other, then on all the rest.

        Includes this machine's node: its readers may have requested metadata, since this process dropped the keys, from a
        member that was invalidated later. Returns the ids of unreachable members, which receive the invalidation later.
        After an interrupt all members do.
        """
        if not self._owner.is_this_process:
            self._begin()
        try:
            return self._send_now(identity, keys, first)
        except BaseException:  # Ctrl-C, while a silent member is waited for: the write has happened nevertheless
            self.send_later([member.id for member in self._cluster.placement().view.members], identity, keys)
            raise

    def view(self) -> View:
        """The view by which this process sends invalidations."""
        return self._cluster.placement().view

    # --- now --------------------------------------------------------------------------------------

    def _send_now(self, identity: str, keys: Sequence[str], first: Callable[[Placement], Sequence[Member]]) -> set[str]:
        placement = self._cluster.placement()
        mine, members = placement.view, placement.view.members
        versions = self._send_in_order(members, first(placement), identity, keys)
        missed = {name for name, version in versions.items() if version is None}
        views = self._other_views(mine, versions)
        if views:
            everyone = View.of(member for view in (mine, *views) for member in view.members)
            members = everyone.members
            owners = [owner for view in (*views, everyone) for owner in first(Placement(view))]
            versions = self._send_in_order(members, owners, identity, keys)
            missed |= {name for name, version in versions.items() if version is None}
        if missed:
            self.send_later(missed, identity, keys)
            me = self._cluster.link.member_id
            reached = [member for member in members if member.id not in missed]
            for member in sorted(reached, key=lambda member: member.id != me)[:1]:
                self._send(member, identity, keys, missed)
        return missed

    def _send_in_order(
        self, members: Sequence[Member], owners: Sequence[Member], identity: str, keys: Sequence[str]
    ) -> dict[str, str | None]:
        """Invalidate keys on `owners` one after the other, then on the other members; returns the results of `_send`."""
        first = {owner.id: owner for owner in owners}
        versions = {name: self._send(owner, identity, keys) for name, owner in first.items()}
        rest = [member for member in members if member.id not in first]
        return versions | dict(zip((each.id for each in rest), self._send_all(rest, identity, keys), strict=True))

    def _send_all(self, members: Sequence[Member], identity: str, keys: Sequence[str]) -> Iterable[str | None]:
        return side_by_side(lambda member: self._send(member, identity, keys), members, _THREADS, "millrace-invalidate")

    def _send(self, member: Member, identity: str, keys: Sequence[str], missed: Iterable[str] = ()) -> str | None:
        """Invalidate keys on a member, which also sends them later to `missed` members.

        Returns the version of the member's view (empty if it does not name one), or None if it was not reached.
        """
        if not self._cluster.is_available(member):
            return None
        response: Any = None
        try:
            for batch in batches(keys):
                body = {"origin": identity, "keys": batch, "missed": [*missed]}
                deadline = SILENCE_SECONDS + len(batch) * _KEY_SECONDS
                response = self._cluster.client.call(
                    member.address, "POST", FORGET, body, deadline=deadline, working_seconds=_WORKING_SECONDS
                )
        except PeerError as error:
            record_failure(self._cluster, member, error)
            return None
        self._cluster.breakers.worked(member.id)
        return str(response.get("view", "")) if isinstance(response, Mapping) else ""

    def _other_views(self, mine: View, versions: Mapping[str, str | None]) -> list[View]:
        """The views of members that differ from `mine`, each once."""
        found: dict[str, View] = {}
        for member in mine.members:
            version = versions.get(member.id)
            if version and version != mine.version and version not in found:
                try:
                    response = self._cluster.client.call(member.address, "GET", "/v1/view", deadline=SILENCE_SECONDS)
                    found[version] = View.from_json(response)
                except (PeerError, DamagedError) as error:
                    record_failure(self._cluster, member, error)
        return list(found.values())

    # --- later ------------------------------------------------------------------------------------

    def send_later(self, members: Iterable[str], identity: str, keys: Sequence[str]) -> None:
        """Invalidate keys on unreachable members when they respond again, and then on all others again. Returns at once."""
        until = time.monotonic() + _KEPT_SECONDS
        dropped = 0
        with self._lock:
            for member_id in members:
                for key in keys:
                    self._pending.pop((member_id, identity, key), None)
                    self._pending[member_id, identity, key] = until
            while len(self._pending) > MOST_PENDING:
                del self._pending[next(iter(self._pending))]
                dropped += 1
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="millrace-invalidate-later", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError:  # the interpreter is ending
                    self._pending.clear()
        if dropped:
            emit(Event(name="peer.invalidation_dropped", subject=identity, detail=f"{dropped} objects"))

    def _run(self) -> None:
        try:
            self._send_pending()
        except BaseException:  # a defect: otherwise no thread would take its place
            with self._lock:
                self._thread = None
            raise

    def _send_pending(self) -> None:
        while True:
            time.sleep(_PAUSE_SECONDS)
            now = time.monotonic()
            with self._lock:
                pending = {name: until for name, until in self._pending.items() if until > now}
                for name in self._pending.keys() - pending.keys():
                    del self._pending[name]
                if not pending:
                    self._thread = None
                    return
            for member_id, identity in dict.fromkeys(name[:2] for name in pending):
                of_one = {key: until for (*of, key), until in pending.items() if of == [member_id, identity]}
                self._send_pending_of(member_id, identity, of_one)

    def _send_pending_of(self, member_id: str, identity: str, pending: Mapping[str, float]) -> None:
        """Send a member its pending keys, given with the times that were read with them."""
        keys = list(pending)
        members = self._cluster.placement().view.members
        member = next((each for each in members if each.id == member_id), None)
        if member is None or self._send(member, identity, keys) is None:
            return
        with self._lock:
            for key, until in pending.items():
                # A write in between that missed this member as well has set a new time.
                if self._pending.get((member_id, identity, key)) == until:
                    del self._pending[member_id, identity, key]
        # Members and readers may have requested the old metadata from it in between, and cached it.
        self._send_all([each for each in members if each.id != member_id], identity, keys)
        emit(Event(name="peer.invalidation_late", subject=member.address, detail=f"{len(keys)} objects of {identity}"))


def record_failure(cluster: Cluster, member: Member, error: MillraceError) -> None:
    """Record a failed request: opens the breaker of a silent member, and emits an event."""
    if isinstance(error, PeerSilentError):
        cluster.breakers.failed(member.id)
        emit(Event(name="peer.failed", subject=member.address, detail=str(error)))
    else:
        emit(Event(name="peer.refused", subject=member.address, detail=str(error)))


def batches(keys: Sequence[str], most_bytes: int = _BATCH_BYTES) -> Iterator[list[str]]:
    """Keys in batches that each fit into the body of one request. Pure."""
    batch: list[str] = []
    nbytes = 0
    for key in keys:
        size = len(json.dumps(key)) + 2
        if batch and nbytes + size > most_bytes:
            yield batch
            batch, nbytes = [], 0
        batch.append(key)
        nbytes += size
    if batch:
        yield batch
