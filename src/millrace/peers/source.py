"""Where the bytes of an object come from in a cluster: its owner, the next in the order, who had it before, and the origin.

Who is asked for what is decided by `route`, which is pure; `ClusterSource` asks. No answer of a peer ends a read: whatever
goes wrong, the next one is asked, three at most, and then the origin. It alone says that an object has changed or is gone.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from millrace.cache.counters import Counters
from millrace.cache.source import DirectSource, Fetched, Keep
from millrace.errors import (
    ChangedError,
    MillraceError,
    MissingError,
    PeerError,
    PeerRefusedError,
    PeerSilentError,
    WireError,
)
from millrace.events import Event, emit
from millrace.members import Member
from millrace.origin import ObjectInfo, Origin
from millrace.peers.client import READ_DEADLINE_SECONDS, PeerBytes, Reading
from millrace.peers.handover import widened
from millrace.peers.placement import Placement, stripe_of, stripe_span
from millrace.peers.wire import Ask, ObjectDescription

if TYPE_CHECKING:
    from millrace.peers.cluster import Cluster

MOST_PEERS = 3
"""So many peers are asked to fetch for one read, and so many may fail, before the origin is."""

_PART_BYTES = 16 << 20  # asked for at once; a peer that has to fetch it first needs memory for it

_NOT_THERE, _CHANGED, _GONE, _NOT_MINE, _NO_ACCESS, _NO_ORIGIN, _BUSY = 404, 409, 410, 421, 424, 502, 503

_ORDINARY = frozenset({_NOT_THERE, _CHANGED, _GONE, _NOT_MINE, _NO_ACCESS, _NO_ORIGIN})
"""Answers of a peer that works as it should."""

_ASK_THE_ORIGIN = frozenset({_CHANGED, _GONE, _NO_ACCESS, _NO_ORIGIN})
"""Answers after which no other peer is asked to fetch: it would hear the same, or fetch a second time."""


class Step(NamedTuple):
    """One peer to ask, and how. `rank` is its place in the order of ownership, 0 where it is asked for what it has only."""

    member: Member
    ask: Ask
    rank: int = 0


def route(
    placement: Placement, me: str | None, object_id: bytes, stripe: int, *, changed_lately: bool, serving: bool = False
) -> list[Step]:
    """Whom the node `me` (None: nobody's) asks for a stripe that it lacks, in this order, before the origin. Pure.

    A node that is `serving` others never asks anybody to fetch, so no circle of nodes can wait for each other.
    """
    order = placement.order(object_id, stripe)
    mine = next((place for place, member in enumerate(order) if member.id == me), None)
    before = () if serving else order[:mine]
    steps = [Step(member, Ask.FETCH, rank) for rank, member in enumerate(before)]
    if mine is None and not serving:
        return steps
    # From here on this node is the owner, since nobody before it answered.
    promising = list(order[: placement.replicas]) if placement.replicas > 1 else []
    if changed_lately:
        promising += placement.former(object_id, stripe)[:1]
        promising += [member for member in order if member.id != me][:1]
    asked = {me, *(member.id for member in before)}
    for member in promising:
        if member.id not in asked:
            asked.add(member.id)
            steps.append(Step(member, Ask.CACHED))
    return steps


class ClusterSource:
    """The `Source` of one object version in a cluster. Thread-safe; counts what it does."""

    def __init__(
        self, cluster: Cluster, origin: Origin, info: ObjectInfo, counters: Counters | None, *, serving: bool
    ) -> None:
        self._cluster = cluster
        self._me = cluster.link.member_id
        self._direct = DirectSource(origin, info, counters)
        self._what = ObjectDescription(origin.identity, info.key, info.version, info.size)
        self._counters = counters
        self._serving = serving

    def read(self, start: int, stop: int) -> Fetched:
        parts = list(_parts(start, stop, self._what.size))
        if len(parts) == 1:
            return self._read_part(start, stop)
        data, keep = bytearray(), Keep.OWNED
        for part in parts:
            fetched = self._read_part(*part)
            data += memoryview(fetched.data).cast("B")
            keep = fetched.keep if keep is Keep.OWNED else keep
        return Fetched(data, keep)

    def asks_to_fetch(self, start: int) -> bool:
        steps = self._steps(self._cluster.placement(), stripe_of(start, self._what.size))
        return any(step.ask is Ask.FETCH and not self._cluster.is_passed_over(step.member) for step in steps)

    def _steps(self, placement: Placement, stripe: int) -> list[Step]:
        return route(
            placement,
            self._me,
            self._what.object_id(),
            stripe,
            changed_lately=self._cluster.changed_lately(),
            serving=self._serving,
        )

    # --- one part of one stripe -------------------------------------------------------------------

    def _read_part(self, start: int, stop: int) -> Fetched:
        placement = self._cluster.placement()
        stripe = stripe_of(start, self._what.size)
        steps = self._steps(placement, stripe)
        visit = _Visit(self, placement, stripe, start, stop)
        found = visit.ask(steps)
        if found is not None:
            return Fetched(found.data, Keep.OWNED if found.hot or visit.is_mine() else Keep.COPY)
        return self._from_origin(visit, start, stop)

    def _from_origin(self, visit: _Visit, start: int, stop: int) -> Fetched:
        if visit.lease is not None:
            # This read brings the blocks to their owner, which can only keep whole ones.
            first, last = widened(start, stop, self._what.size)
            whole = self._direct.read(first, last).data
            self._cluster.handover.give(visit.lease, self._what, first, whole)
            return Fetched(memoryview(whole).cast("B")[start - first : stop - first], visit.keep_of_origin())
        data = self._direct.read(start, stop).data
        if visit.is_owner():
            for member in visit.other_holders():
                self._cluster.handover.give(member, self._what, start, data)
        return Fetched(data, visit.keep_of_origin())

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter, where there is a place for it."""
        if self._counters is not None:
            self._counters.add(name, amount)


class _Visit:
    """One range being asked for: whom, with what outcome. For one thread."""

    def __init__(self, source: ClusterSource, placement: Placement, stripe: int, start: int, stop: int) -> None:
        self._source = source
        self._cluster = source._cluster
        self._what = source._what
        self._me = source._me
        self._placement = placement
        self._stripe = stripe
        self._range = (start, stop)
        self._failures = 0
        self.lease: Member | None = None
        """Who cannot fetch these bytes and asked this node to bring them."""

    # --- what this node is to them ----------------------------------------------------------------

    def is_mine(self) -> bool:
        """Whether this node is to hold these bytes."""
        return self._me is not None and self._placement.is_holder(self._me, self._what.object_id(), self._stripe)

    def is_owner(self) -> bool:
        """Whether this node is the first that others ask for these bytes."""
        return [member.id for member in self._placement.order(self._what.object_id(), self._stripe)[:1]] == [self._me]

    def other_holders(self) -> list[Member]:
        """Who else is to hold these bytes."""
        holders = self._placement.holders(self._what.object_id(), self._stripe)
        return [member for member in holders if member.id != self._me]

    def keep_of_origin(self) -> Keep:
        """How bytes of the origin may be kept: as its own by whoever others will ask for them."""
        order = self._placement.order(self._what.object_id(), self._stripe)
        if self.is_mine() or not order:
            return Keep.OWNED
        reachable = [member.id for member in order if member.id == self._me or not self._cluster.is_passed_over(member)]
        return Keep.OWNED if self._me is not None and reachable[:1] == [self._me] else Keep.COPY

    # --- asking -----------------------------------------------------------------------------------

    def ask(self, steps: list[Step]) -> PeerBytes | None:
        """What the first that has them gives; None when the origin is to be asked."""
        fetchers = 0
        for place, step in enumerate(steps):
            if self._failures == MOST_PEERS or (step.ask is Ask.FETCH and fetchers == MOST_PEERS):
                return None
            if not self._cluster.may_ask(step.member, self._what):
                continue
            fetchers += step.ask is Ask.FETCH
            try:
                return self._ask(step, self._second_for(step, steps[place + 1 :]))
            except PeerRefusedError as error:
                if error.status == _NO_ACCESS and error.has_lease:
                    self.lease = step.member
                if error.status in _ASK_THE_ORIGIN:
                    return None
            except (ChangedError, MissingError):
                return None
            except PeerError:
                pass  # told where it was found out, and counted
        return None

    def _second_for(self, step: Step, rest: list[Step]) -> Member | None:
        """Who is asked as well when this one is slow: the next that is to hold the same."""
        if self._placement.replicas < 2:
            return None
        holders = {member.id for member in self.other_holders()}
        if step.member.id not in holders:
            return None
        following = (each.member for each in rest if each.member.id in holders)
        return next((member for member in following if not self._cluster.is_passed_over(member)), None)

    def _ask(self, step: Step, second: Member | None) -> PeerBytes:
        first = self._begin(step)
        patience = self._cluster.paces.patience(step.member.id)
        if second is None or patience >= READ_DEADLINE_SECONDS or first.wait(patience):
            return self._finish(first)
        self._source.count("hedged_requests")
        try:
            other = self._begin(Step(second, Ask.CACHED))
        except PeerError:
            return self._finish(first)
        return self._race(first, other, patience)

    def _race(self, first: Reading, other: Reading, waited: float) -> PeerBytes:
        """The answer of whichever is the first to give a good one; the other connection is closed."""
        begun = time.monotonic() - waited
        poll = select.poll()
        poll.register(first, select.POLLIN)
        poll.register(other, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll((READ_DEADLINE_SECONDS - waited) * 1000)}
        if other.fileno() in ready and first.fileno() not in ready:
            try:
                found = self._finish(other)
            except MillraceError:
                return self._finish(first)  # it has not what the first is still looking for
            self._overtaken(first, begun)
            return found
        # Its own deadline began when it was sent: where neither has answered it is over now.
        try:
            found = self._finish(first)
        except PeerSilentError:
            return self._finish(other)
        except MillraceError:
            other.drop()
            raise
        other.drop()
        return found

    def _overtaken(self, reading: Reading, begun: float) -> None:
        reading.drop()
        now = time.monotonic()
        if self._cluster.paces.overtaken(reading.member.id, now - begun, now, READ_DEADLINE_SECONDS):
            self._failed(reading.member, PeerSilentError(f"{reading.member.address}: silent for too long"))

    # --- one request ------------------------------------------------------------------------------

    def _begin(self, step: Step) -> Reading:
        self._source.count("peer_requests")
        try:
            return self._cluster.client.begin(
                step.member,
                self._what,
                [self._range],
                ask=step.ask,
                rank=step.rank,
                view_version=self._placement.view.version,
                deadline=READ_DEADLINE_SECONDS,
            )
        except WireError:  # the request cannot be built, which says nothing of the peer
            raise
        except PeerError as error:
            self._heard(step.member, error)
            raise

    def _finish(self, reading: Reading) -> PeerBytes:
        try:
            found = reading.finish()
        except (PeerError, ChangedError, MissingError) as error:
            self._heard(reading.member, error)
            raise
        self._cluster.breakers.worked(reading.member.id)
        self._cluster.paces.answered(reading.member.id, reading.seconds_to_answer)
        self._source.count("peer_bytes", len(found.data))
        return found

    def _heard(self, member: Member, error: MillraceError) -> None:
        """Note what a peer's refusal or silence says of it."""
        status = error.status if isinstance(error, PeerRefusedError) else None
        if isinstance(error, PeerRefusedError):
            self._cluster.heard_refusal(member, error)
        if status in _ORDINARY or not isinstance(error, PeerError):
            self._cluster.breakers.worked(member.id)
        else:
            self._failed(member, error, busy=status == _BUSY)

    def _failed(self, member: Member, error: MillraceError, *, busy: bool = False) -> None:
        self._failures += 1
        self._source.count("peer_failures")
        emit(Event(name="peer.failed", subject=member.id, detail=str(error)))
        if busy:
            self._cluster.breakers.worked(member.id)
        else:
            self._cluster.breakers.failed(member.id)


def _parts(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """A range in parts that each lie in one stripe and are not too large for one request."""
    while start < stop:
        _, end = stripe_span(stripe_of(start, size), size)
        end = min(stop, end, (start // _PART_BYTES + 1) * _PART_BYTES)
        yield start, end
        start = end
