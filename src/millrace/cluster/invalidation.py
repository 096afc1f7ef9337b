"""Invalidations: every write makes all members drop their cached metadata of the written or removed keys.

A write returns when every reachable member has dropped the keys. A bucket's metadata owners come first: a member that is
invalidated later and then sends them a request must not receive the old metadata again. Members that cannot be reached
receive the invalidation later, from a thread of this process and from one of this machine's node (or of another member),
since this process may end before. Both try for ten minutes at most. Until then their readers see what `consistency` allows.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.wire import MAX_BODY_BYTES
from millrace.cluster.membership import Member
from millrace.config import SILENCE_SECONDS
from millrace.errors import PeerError, PeerSilentError
from millrace.events import Event, emit
from millrace.origin.side_by_side import side_by_side
from millrace.runtime import forks

FORGET = "/v1/forget"

MOST_PENDING = 10_000
"""Pending keys over all members. Beyond that the oldest are dropped, with an event."""

_KEY_SECONDS = 0.005  # ten times the usual duration
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

    def send(self, identity: str, keys: Sequence[str], first: Sequence[Member]) -> set[str]:
        """Invalidate `keys` of an origin on every member: on those of `first` one after the other, then on all the rest.

        Includes this machine's node: its readers may have requested metadata, since this process dropped the keys, from a
        member that was invalidated later. Returns the ids of unreachable members, which receive the invalidation later.
        """
        if not self._owner.is_this_process:
            self._begin()
        done = {member.id for member in first}
        rest = [member for member in self._cluster.placement().view.members if member.id not in done]
        missed = {member.id for member in first if not self._send(member, identity, keys)}
        results = self._send_all(rest, identity, keys)
        missed |= {member.id for member, reached in zip(rest, results, strict=True) if not reached}
        if missed:
            self.send_later(missed, identity, keys)
            me = self._cluster.link.member_id
            reached = [member for member in (*first, *rest) if member.id not in missed]
            for member in sorted(reached, key=lambda member: member.id != me)[:1]:
                self._send(member, identity, keys, missed)
        return missed

    def pending(self) -> int:
        """How many keys are pending, over all members."""
        with self._lock:
            return len(self._pending)

    # --- now --------------------------------------------------------------------------------------

    def _send_all(self, members: Sequence[Member], identity: str, keys: Sequence[str]) -> Iterable[bool]:
        return side_by_side(lambda member: self._send(member, identity, keys), members, _THREADS, "millrace-invalidate")

    def _send(self, member: Member, identity: str, keys: Sequence[str], missed: Iterable[str] = ()) -> bool:
        """Invalidate keys on a member, which also sends them later to `missed` members; returns whether it succeeded."""
        if not self._cluster.is_available(member):
            return False
        try:
            for batch in batches(keys):
                body = {"origin": identity, "keys": batch, "missed": [*missed]}
                deadline = SILENCE_SECONDS + len(batch) * _KEY_SECONDS
                self._cluster.client.call(member, "POST", FORGET, body, deadline=deadline)
        except PeerError as error:
            record_failure(self._cluster, member, error)
            return False
        self._cluster.breakers.worked(member.id)
        return True

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
            emit(Event(name="peer.invalidation_dropped", subject=identity, detail=f"{dropped} keys, of too many"))

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
        if member is None or not self._send(member, identity, keys):
            return
        with self._lock:
            for key, until in pending.items():
                # A write in between that missed this member as well has set a new time.
                if self._pending.get((member_id, identity, key)) == until:
                    del self._pending[member_id, identity, key]
        # Members and readers may have requested the old metadata from it in between, and cached it.
        self._send_all([each for each in members if each.id != member_id], identity, keys)
        emit(Event(name="peer.invalidation_late", subject=member_id, detail=f"{len(keys)} keys of {identity}"))


def record_failure(cluster: Cluster, member: Member, error: PeerError) -> None:
    """Record a failed request: opens the breaker of a silent member, and emits an event."""
    if isinstance(error, PeerSilentError):
        cluster.breakers.failed(member.id)
        emit(Event(name="peer.failed", subject=member.id, detail=str(error)))
    else:
        emit(Event(name="peer.refused", subject=member.id, detail=str(error)))


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
