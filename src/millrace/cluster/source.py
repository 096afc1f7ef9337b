"""Reads the bytes of an object in a cluster: from its owner, the next members in the order, former holders, or the origin.

`route` (pure) determines the requests, and `ClusterSource` sends them. No response of a peer ends a read: after a failure
the next peer is tried, three at most, and then the origin. Only the origin determines that an object has changed or is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millrace.cache.counters import Counters
from millrace.cache.eviction.copies import Keep
from millrace.cache.reading.fetching import DirectSource, Fetched, Source, log_fetch
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.client import PeerBytes
from millrace.cluster.dataplane.wire import GetMode, ObjectDescription
from millrace.cluster.membership import Member
from millrace.cluster.placement import Placement, stripe_of, stripe_span
from millrace.config import SILENCE_SECONDS
from millrace.errors import (
    ChangedError,
    MillraceError,
    MissingError,
    PeerError,
    PeerRefusedError,
    WireError,
)
from millrace.events import Event, emit
from millrace.origin import ObjectInfo, Origin
from millrace.store.records import BLOCK_BYTES, blocks_of, span_of

MOST_PEERS = 3
"""The most fetch requests, and the most failures, of one read before it uses the origin."""

_PART_BYTES = 16 << 20  # per request; a peer that has to fetch needs memory for it

_NOT_CACHED, _CHANGED, _GONE, _NOT_OWNER, _NO_ACCESS, _NO_ORIGIN, _BUSY = 404, 409, 410, 421, 424, 502, 503

_ORDINARY = frozenset({_NOT_CACHED, _CHANGED, _GONE, _NOT_OWNER, _NO_ACCESS, _NO_ORIGIN})
"""Responses of a peer that works normally."""

_ORIGIN_NEXT = frozenset({_CHANGED, _GONE, _NO_ACCESS, _NO_ORIGIN})
"""Responses after which no other peer is tried: it would receive the same, or fetch a second time."""


class Step(NamedTuple):
    """One request to a peer. `rank` is its place in the order of ownership, 0 for a request for cached blocks only."""

    member: Member
    mode: GetMode
    rank: int = 0


def route(
    placement: Placement,
    me: str | None,
    object_id: bytes,
    stripe: int,
    *,
    changed_lately: bool,
    earlier: Sequence[Placement] = (),
    serving: bool = False,
) -> list[Step]:
    """The requests of the node `me` (None: a client) for a missing stripe, in order, before it reads the origin. Pure.

    First, fetch requests to the members before `me` in the placement order. Then `me` acts as the owner, and requests only
    cached blocks: from the other holders, from the owners by the `earlier` placements that this process saw, and, with
    `changed_lately`, from two members that may have been the owner before: it may not have seen every placement.
    A node that is `serving` others sends no fetch requests, so nodes cannot wait for each other in a circle.
    """
    order = placement.order(object_id, stripe)
    mine = next((place for place, member in enumerate(order) if member.id == me), None)
    before = () if serving else order[:mine]
    steps = [Step(member, GetMode.FETCH, rank) for rank, member in enumerate(before)]
    if mine is None and not serving:
        return steps
    # From here on this node acts as the owner, because no member before it responded.
    candidates = list(order[: placement.replicas]) if placement.replicas > 1 else []
    owned_before = [member.id for old in earlier for member in old.order(object_id, stripe)[:1]]
    # Their addresses may have changed.
    candidates += [member for name in owned_before if (member := placement.view.member(name)) is not None]
    if changed_lately:
        candidates += placement.former(object_id, stripe)[:1]
        candidates += [member for member in order if member.id != me][:1]
    included = {me, *(member.id for member in before)}
    for member in candidates:
        if member.id not in included:
            included.add(member.id)
            steps.append(Step(member, GetMode.CACHED))
    return steps


@dataclass(frozen=True, slots=True)
class ClusterSources:
    """Makes the sources of a process that reads (a `MakeSource`); with `serving`, those of a node's own server.

    A server sends no fetch requests.
    """

    cluster: Cluster
    serving: bool = False

    def __call__(self, origin: Origin, info: ObjectInfo, counters: Counters | None) -> Source:
        if origin.head_is_local:
            # Local files: on another machine the same name may be another file, and peers are not faster.
            return DirectSource(origin, info, counters)
        return ClusterSource(self.cluster, origin, info, counters, serving=self.serving)


class ClusterSource:
    """The `Source` of one object version in a cluster. Thread-safe; updates the counters."""

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
        data, keep, peer_bytes = bytearray(), Keep.OWNED, 0
        for part in parts:
            fetched = self._read_part(*part)
            data += memoryview(fetched.data).cast("B")
            keep = fetched.keep if keep is Keep.OWNED else keep
            peer_bytes += fetched.peer_bytes
        return Fetched(data, keep, peer_bytes)

    def fetches_through_peer(self, start: int) -> bool:
        steps = self._steps(self._cluster.placement(), stripe_of(start, self._what.size))
        return any(step.mode is GetMode.FETCH and not self._cluster.is_skipped(step.member) for step in steps)

    def _steps(self, placement: Placement, stripe: int) -> list[Step]:
        return route(
            placement,
            self._me,
            self._what.object_id(),
            stripe,
            changed_lately=self._cluster.changed_lately(),
            earlier=self._cluster.earlier_placements(),
            serving=self._serving,
        )

    # --- one part of one stripe -------------------------------------------------------------------

    def _read_part(self, start: int, stop: int) -> Fetched:
        placement = self._cluster.placement()
        stripe = stripe_of(start, self._what.size)
        steps = self._steps(placement, stripe)
        visit = _Visit(self, placement, stripe, start, stop)
        found = visit.request(steps)
        if found is not None:
            keep = Keep.OWNED if found.hot or visit.is_mine() else Keep.COPY
            return Fetched(found.data, keep, stop - start)
        return self._from_origin(visit, start, stop)

    def _from_origin(self, visit: _Visit, start: int, stop: int) -> Fetched:
        if visit.lease is not None:
            # This read uploads the blocks to their owner, which stores only whole ones.
            blocks = blocks_of(start, stop, BLOCK_BYTES)
            first, last = span_of(blocks.start, blocks.stop, self._what.size, BLOCK_BYTES)
            whole = self._direct.read(first, last).data
            self._cluster.handover.upload(visit.lease, self._what, first, whole)
            return Fetched(memoryview(whole).cast("B")[start - first : stop - first], visit.keep_of_origin())
        data = self._direct.read(start, stop).data
        for member in visit.replica_holders():
            self._cluster.handover.upload(member, self._what, start, data)
        return Fetched(data, visit.keep_of_origin())

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter, if there are any."""
        if self._counters is not None:
            self._counters.add(name, amount)

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a histogram, if there are counters."""
        if self._counters is not None:
            self._counters.observe(name, value)


class _Visit:
    """The requests for one range, and their outcomes. For one thread."""

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
        """The owner without access that granted this read an upload lease."""

    # --- placement --------------------------------------------------------------------------------

    def is_mine(self) -> bool:
        """Whether this node is a holder of these bytes."""
        return self._me is not None and self._placement.is_holder(self._me, self._what.object_id(), self._stripe)

    def replica_holders(self) -> Sequence[Member]:
        """The other holders of these bytes, if this node is their owner."""
        holders = self._placement.holders(self._what.object_id(), self._stripe)
        return holders[1:] if holders and holders[0].id == self._me else ()

    def keep_of_origin(self) -> Keep:
        """How bytes of the origin are stored: as owned by the first reachable owner, otherwise as a copy."""
        order = self._placement.order(self._what.object_id(), self._stripe)
        if self.is_mine() or not order:
            return Keep.OWNED
        reachable = [member.id for member in order if member.id == self._me or not self._cluster.is_skipped(member)]
        return Keep.OWNED if self._me is not None and reachable[:1] == [self._me] else Keep.COPY

    # --- requests ---------------------------------------------------------------------------------

    def request(self, steps: list[Step]) -> PeerBytes | None:
        """The bytes from the first peer that has them; None if the origin must be read."""
        fetches = 0
        for step in steps:
            if self._failures == MOST_PEERS or (step.mode is GetMode.FETCH and fetches == MOST_PEERS):
                return None
            if not self._cluster.is_available(step.member):
                continue
            fetches += step.mode is GetMode.FETCH
            try:
                return self._send(step)
            except PeerRefusedError as error:
                if error.status == _NO_ACCESS and error.has_lease:
                    self.lease = step.member
                if error.status in _ORIGIN_NEXT:
                    return None
            except (ChangedError, MissingError):
                return None
            except PeerError:
                pass  # already reported and counted
        return None

    def _send(self, step: Step) -> PeerBytes:
        cluster, began = self._cluster, time.perf_counter()
        self._source.count("peer_requests")
        try:
            found = cluster.client.read(
                step.member,
                self._what,
                self._range,
                mode=step.mode,
                rank=step.rank,
                deadline=SILENCE_SECONDS,
            )
        except WireError:  # the request cannot be built: not a failure of the peer
            raise
        except (PeerError, ChangedError, MissingError) as error:
            self._record(step.member, error)
            raise
        cluster.breakers.worked(step.member.id)
        self._source.count("peer_bytes", len(found.data))
        seconds = time.perf_counter() - began
        self._source.observe("peer_seconds", seconds)
        log_fetch(self._what.key, *self._range, f"peer {step.member.id}", seconds)
        return found

    def _record(self, member: Member, error: MillraceError) -> None:
        """Record a peer's refusal or silence."""
        status = error.status if isinstance(error, PeerRefusedError) else None
        if isinstance(error, PeerRefusedError):
            self._cluster.record_refusal(member, error)
        if status in _ORDINARY or not isinstance(error, PeerError):
            self._cluster.breakers.worked(member.id)
            return
        self._failures += 1
        self._source.count("peer_failures")
        emit(Event(name="peer.failed", subject=member.address, detail=str(error)))
        if status == _BUSY:
            self._cluster.breakers.worked(member.id)
        else:
            self._cluster.breakers.failed(member.id)


def _parts(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """A range in parts, each inside one stripe and small enough for one request."""
    while start < stop:
        _, end = stripe_span(stripe_of(start, size), size)
        end = min(stop, end, (start // _PART_BYTES + 1) * _PART_BYTES)
        yield start, end
        start = end
