"""The order of a read in a cluster: as a table, and against scripted peers."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.computed import ComputedOrigin
from tests.support.origins import MemoryOrigin
from tests.support.planes import Views
from tests.support.scripted_peer import DATA, SIZE, TOKEN, Handle, Peer, Visit, framed, head_of, honest, silent

from millrace.cache.counters import Counters
from millrace.cache.eviction.copies import Keep
from millrace.cache.reading.fetching import DirectSource, Fetched
from millrace.cluster import cluster as cluster_module
from millrace.cluster import handover
from millrace.cluster.breakers import Breakers
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.client import PeerBytes
from millrace.cluster.dataplane.wire import ObjectDescription, build_response
from millrace.cluster.membership import Member, MemberState, NodeLink, View
from millrace.cluster.placement import STRIPE_BYTES, WHOLE_BYTES, Placement
from millrace.cluster.source import ClusterSources, route
from millrace.errors import ObjectChangedError, ObjectNotFoundError, OriginUnavailableError
from millrace.events import Event
from millrace.store.records import BLOCK_BYTES

NAME = bytes(16)
HERE, JOINING, LEAVING = MemberState.HERE, MemberState.JOINING, MemberState.LEAVING


# --- requests, as a table -------------------------------------------------------------------------


def _placement(replicas: int = 1, **states: MemberState) -> Placement:
    """Of members that are named by their place in the order of all of them."""
    ids = [f"node-{number}" for number in range(len(states))]
    order = Placement(View.of(Member(id=each, address="127.0.0.1:1") for each in ids)).order(NAME)
    named = {member.id: state for member, state in zip(order, states.values(), strict=True)}
    view = View.of(Member(id=each, address="127.0.0.1:1", state=named[each]) for each in ids)
    return Placement(view, replicas=replicas)


ALL = {"a": HERE, "b": HERE, "c": HERE, "d": HERE}


@pytest.mark.parametrize(
    ("states", "replicas", "me", "lately", "serving", "expected"),
    [
        # another owns it: those before me in the order, to fetch
        (ALL, 1, None, True, False, "a:fetch:0 b:fetch:1 c:fetch:2 d:fetch:3"),
        (ALL, 1, "elsewhere", True, False, "a:fetch:0 b:fetch:1 c:fetch:2 d:fetch:3"),
        (ALL, 1, "c", False, False, "a:fetch:0 b:fetch:1"),
        (ALL, 2, "b", False, False, "a:fetch:0"),
        (ALL, 3, "b", False, False, "a:fetch:0 c:cached:0"),
        # after the members before it, this node is the owner and uses former holders
        (ALL, 1, "c", True, False, "a:fetch:0 b:fetch:1"),
        (ALL, 1, "a", True, False, "b:cached:0"),
        (ALL, 1, "a", False, False, ""),
        (ALL, 2, "a", False, False, "b:cached:0"),
        (ALL, 3, "a", True, False, "b:cached:0 c:cached:0"),
        # one that has left comes first, then the next
        ({**ALL, "a": LEAVING}, 1, "b", True, False, "a:cached:0 c:cached:0"),
        ({**ALL, "a": LEAVING}, 1, "b", False, False, ""),
        ({**ALL, "a": LEAVING}, 1, "c", True, False, "b:fetch:0 a:cached:0"),
        ({**ALL, "b": LEAVING}, 1, "a", True, False, "c:cached:0"),
        # a joining member receives no requests, and sends one to the owner
        ({**ALL, "a": JOINING}, 1, "b", True, False, "c:cached:0"),
        ({**ALL, "a": JOINING}, 1, "a", True, False, "b:fetch:0 c:fetch:1 d:fetch:2"),
        # a serving node sends no fetch requests
        (ALL, 1, "a", True, True, "b:cached:0"),
        (ALL, 1, "c", True, True, "a:cached:0"),
        (ALL, 1, "c", False, True, ""),
        (ALL, 2, "c", False, True, "a:cached:0 b:cached:0"),
        ({**ALL, "a": LEAVING}, 1, "c", True, True, "a:cached:0 b:cached:0"),
        # alone
        ({"a": HERE}, 1, "a", True, False, ""),
        ({"a": HERE}, 2, "a", True, True, ""),
        ({}, 1, None, True, False, ""),
        ({"a": LEAVING}, 1, None, True, False, ""),
    ],
)
def test_route_returns_the_requests_in_order(
    states: dict[str, MemberState], replicas: int, me: str | None, lately: bool, serving: bool, expected: str
) -> None:
    placement = _placement(replicas, **states)
    order = Placement(View.of(Member(id=each.id, address="x:1") for each in placement.view.members)).order(NAME)
    letters = {member.id: name for member, name in zip(order, states, strict=True)}
    own = next((member_id for member_id, name in letters.items() if name == me), me)
    steps = route(placement, own, NAME, 0, changed_lately=lately, serving=serving)
    assert " ".join(f"{letters[step.member.id]}:{step.mode}:{step.rank}" for step in steps) == expected


@pytest.mark.parametrize(
    ("earlier", "lately", "expected"),
    [
        ([], True, "b:cached"),
        # the owners of earlier placements, the newest first, and each once
        (["d", "cd"], True, "d:cached c:cached b:cached"),
        (["bd", "d", "cd"], False, "b:cached d:cached c:cached"),
        # one that owned it while all members joined, this node, and one that is gone
        (["ac", "e", "c"], False, "c:cached"),
    ],
)
def test_route_of_an_owner_asks_the_owners_of_earlier_placements(
    earlier: list[str], lately: bool, expected: str
) -> None:
    order = _placement(**ALL, e=HERE).order(NAME)
    members = dict(zip("abcde", order, strict=True))
    now, *before = [Placement(View.of(members[name] for name in names)) for names in ["abcd", *earlier]]
    steps = route(now, members["a"].id, NAME, 0, changed_lately=lately, earlier=before)
    letters = {member.id: name for name, member in members.items()}
    assert " ".join(f"{letters[step.member.id]}:{step.mode}" for step in steps) == expected


def test_route_of_a_serving_node_has_no_fetch_requests() -> None:
    """A fetching node sends no fetch requests, for any two views."""
    for states in (ALL, {**ALL, "a": LEAVING}, {**ALL, "b": JOINING}):
        placement = _placement(2, **states)
        for member in placement.view.members:
            steps = route(placement, member.id, NAME, 0, changed_lately=True, serving=True)
            assert all(step.mode == "cached" for step in steps)
            assert member.id not in [step.member.id for step in steps]


# --- against peers --------------------------------------------------------------------------------


class Place:
    """A cluster of scripted peers, an origin that counts, and a source of one object in it."""

    def __init__(self, tmp_path: Path) -> None:
        self.origin = MemoryOrigin()
        self.origin.put("bucket/key", DATA)
        self.info = self.origin.head("bucket/key")
        self.origin.requests.clear()
        what = ObjectDescription(self.origin.identity, self.info.key, self.info.version, self.info.size)
        self.object_id = what.object_id()
        self.counters = Counters(tmp_path / "counters")
        self.views = Views()
        self.peers: list[Peer] = []
        self.cluster: Cluster | None = None
        self.others: list[Cluster] = []

    def start(self, *handles: Handle, replicas: int = 1, me: int | None = None, gone: bool = False) -> Cluster:
        """Members whose peers, in the order in which they own the object, run `handles`.

        `me` is the place of this process's node among them.
        """
        ids = [f"node-{number}" for number in range(len(handles))]
        order = Placement(View.of(Member(id=each, address="127.0.0.1:1") for each in ids)).order(self.object_id)
        self.peers = [Peer(handle) for handle in handles]
        self.members = [
            Member(id=member.id, address=peer.address) for member, peer in zip(order, self.peers, strict=True)
        ]
        self.views.now = View.of(self.members)
        link = NodeLink(
            views=self.views,
            folder="local",
            member_id=None if me is None else self.members[me].id,
            token=TOKEN,
            replicas=replicas,
        )
        self.cluster = Cluster(link, breakers=Breakers(None, name_of=link.address_of))
        return self.cluster

    def read(self, start: int = 0, stop: int = SIZE, *, serving: bool = False) -> Fetched:
        assert self.cluster is not None
        make = ClusterSources(self.cluster, serving=serving)
        return make(self.origin, self.info, self.counters).read(start, stop)

    @contextmanager
    def impatient(self, *places: int) -> Iterator[None]:
        """Wait for the peers at these places for a moment only, and for the others as long as a busy machine needs."""
        assert self.cluster is not None
        client, ids = self.cluster.client, [self.members[place].id for place in places]
        original = client.read

        def read(member: Member, *arguments: Any, **more: Any) -> PeerBytes:
            return original(member, *arguments, **(more | {"deadline": 1.5} if member.id in ids else more))

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(client, "read", read)
            yield

    def totals(self) -> dict[str, int]:
        return {name: value for name, value in self.counters.measures().counters.items() if value}

    def asked(self) -> list[int]:
        """Requests that reached each peer."""
        return [peer.requests for peer in self.peers]

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
        for peer in self.peers:
            peer.close()
        self.counters.close()


@pytest.fixture
def place(tmp_path: Path, patient_peers: None) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The members have not changed for long."""
    monkeypatch.setattr(cluster_module, "CHANGED_LATELY_SECONDS", 0.0)


def answers(status: int, *fields: tuple[str, str]) -> Handle:
    def handle(visit: Visit) -> None:
        while visit.request():
            visit.send(build_response(status, fields, length=0))

    return handle


def hot(visit: Visit) -> None:
    while request := visit.request():
        body = framed(request)
        visit.send(head_of(body, ("Millrace-Hot", "1")), body)


def dead(visit: Visit) -> None:
    """Resets the connection, as the machine of a process that has ended does."""
    visit.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def is_probe(request: str) -> bool:
    """Whether this is the request of a breaker, which a slow test may see."""
    return request.startswith("GET /v1/view ")


def half(visit: Visit) -> None:
    if not is_probe(request := visit.request()):
        body = framed(request)
        visit.send(head_of(body), body[: len(body) // 2])


def wrong(visit: Visit) -> None:
    while (request := visit.request()) and not is_probe(request):
        body = framed(request, wrong=True)
        visit.send(head_of(body), body)


def garbage(visit: Visit) -> None:
    visit.request()
    visit.send(b"no HTTP\r\n\r\n")


def data_of(fetched: Fetched) -> bytes:
    return bytes(memoryview(fetched.data).cast("B"))


def test_read_returns_the_owners_bytes(place: Place) -> None:
    place.start(honest, dead, dead)
    fetched = place.read(10, SIZE)
    assert data_of(fetched) == DATA[10:]
    assert fetched.keep is Keep.COPY
    assert place.asked() == [1, 0, 0]
    assert place.totals() == {"peer_requests": 1, "peer_bytes": SIZE - 10}
    assert place.origin.requests == []


def test_read_of_a_hot_block_is_stored_as_owned(place: Place) -> None:
    place.start(hot)
    assert place.read(0, 5).keep is Keep.OWNED


def test_read_by_a_holder_is_stored_as_owned(place: Place) -> None:
    place.start(honest, honest, honest, replicas=2, me=1)
    assert place.read(0, 5).keep is Keep.OWNED


BUSY = answers(503)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [dead, silent, half, wrong, garbage, answers(500), answers(401), BUSY])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_read_with_failing_peers_makes_three_attempts(
    place: Place, fault: Handle, count: int, events: list[Event]
) -> None:
    place.start(*[fault] * count)
    impatient = [*range(count)] if fault is silent else []
    with place.impatient(*impatient):
        assert data_of(place.read()) == DATA
    failed = min(count, 3)
    totals = place.totals()
    assert totals["peer_requests"] == totals["peer_failures"] == failed
    assert (totals["origin_requests"], totals["origin_bytes"]) == (1, SIZE)
    assert [event.subject for event in events if event.name == "peer.failed"] == [
        member.address for member in place.members[:failed]
    ]
    with place.impatient(*impatient):
        assert data_of(place.read()) == DATA
    # Only the busy peer gets another request; the fourth got none before.
    assert place.totals()["peer_requests"] == (2 * failed if fault is BUSY else count)


def test_read_skips_a_peer_with_an_open_breaker(place: Place) -> None:
    place.start(dead, dead, dead)
    for _ in range(5):
        assert data_of(place.read()) == DATA
    assert place.totals()["peer_requests"] == 3
    assert place.totals()["origin_requests"] == 5


def test_peer_that_returned_is_probed_in_the_background(place: Place, events: list[Event]) -> None:
    clock = [1000.0]
    cluster = place.start(silent, honest)
    cluster.breakers = Breakers(None, clock=lambda: clock[0])
    with place.impatient(0):
        place.read()
    clock[0] += 2
    place.read()  # looks at it in the background, and reads from the next one
    until = time.monotonic() + 60
    while place.peers[0].requests < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert place.asked() == [2, 2]
    assert place.totals()["peer_failures"] == 1  # of the read; a look is none
    place.peers[0].handle = answers(404)
    clock[0] += 20
    while cluster.is_skipped(place.members[0]) and time.monotonic() < until:
        clock[0] += 20
        place.read()
        time.sleep(0.05)
    assert [event.name for event in events][-1] == "peer.breaker.closed"
    place.peers[0].handle = honest
    place.read()
    place.read()
    assert place.peers[0].requests >= 3
    assert place.origin.requests == []


def test_read_after_a_failed_peer_uses_the_next(place: Place) -> None:
    place.start(dead, honest, honest)
    for _ in range(3):
        assert data_of(place.read()) == DATA
    assert place.asked()[1:] == [3, 0]
    assert place.totals() == {"peer_requests": 4, "peer_failures": 1, "peer_bytes": 3 * SIZE}


def test_rank_counts_the_members_that_did_not_respond(place: Place) -> None:
    ranks: list[str] = []

    def handle(visit: Visit) -> None:
        while request := visit.request():
            ranks.extend(re.findall(r"Millrace-Rank: (\d+)", request))
            body = framed(request)
            visit.send(head_of(body), body)

    place.start(dead, dead, handle)
    place.read()
    place.read()
    assert ranks == ["2", "2"]


@pytest.mark.parametrize(
    ("status", "asked", "from_origin", "failures"),
    [
        (421, [1, 1, 0], 0, 0),  # its view is another: the next one
        (404, [1, 1, 0], 0, 0),
        (503, [1, 1, 0], 0, 1),
        (500, [1, 1, 0], 0, 1),
        (502, [1, 0, 0], 1, 0),  # the others would find the origin as it is, too
        (424, [1, 0, 0], 1, 0),
        (409, [1, 0, 0], 1, 0),
        (410, [1, 0, 0], 1, 0),
    ],
)
def test_read_after_a_refusal_continues(
    place: Place, status: int, asked: list[int], from_origin: int, failures: int
) -> None:
    place.start(answers(status), honest, honest)
    assert data_of(place.read()) == DATA
    assert place.asked() == asked
    assert place.totals().get("origin_requests", 0) == from_origin
    assert place.totals().get("peer_failures", 0) == failures


def test_read_sends_three_fetch_requests_at_most(place: Place) -> None:
    place.start(*[answers(421)] * 5)
    assert data_of(place.read()) == DATA
    assert place.asked() == [1, 1, 1, 0, 0]
    assert place.totals() == {"peer_requests": 3, "origin_requests": 1, "origin_bytes": SIZE}


def test_busy_peer_keeps_its_breaker_closed(place: Place) -> None:
    place.start(answers(503))
    place.read()
    place.read()
    assert place.asked() == [2]


@pytest.mark.parametrize("status", [409, 410])
def test_read_of_a_changed_object_checks_the_origin(place: Place, status: int) -> None:
    place.start(answers(status))
    assert data_of(place.read(0, 9)) == DATA[:9]
    place.origin.put("bucket/key", b"another")
    with pytest.raises(ObjectChangedError):
        place.read(0, 9)
    place.origin.delete(["bucket/key"])
    with pytest.raises(ObjectNotFoundError):
        place.read(0, 9)


def test_read_with_a_failing_origin_raises(place: Place) -> None:
    def fail(key: str, start: int, stop: int) -> None:
        raise OriginUnavailableError("no")

    place.start(dead)
    place.origin.before_read = fail
    with pytest.raises(OriginUnavailableError):
        place.read()


# --- blocks for those that are to hold them -------------------------------------------------------


class Taker:
    """A peer without access to the origin that accepts uploads; with `lease` it gives an upload lease."""

    def __init__(self, *, lease: bool, status: int = 424) -> None:
        self.taken: list[tuple[str, bytes]] = []
        self._fields = [("Millrace-Lease", "1")] if lease else []
        self._status = status

    def __call__(self, visit: Visit) -> None:
        while request := visit.request():
            if not request.startswith("PUT"):
                visit.send(build_response(self._status, self._fields, length=0))
                continue
            length = int(re.findall(r"Content-Length: (\d+)", request)[0])
            body = bytearray()
            while len(body) < length:
                body += visit.connection.recv(length - len(body))
            self.taken.append((re.findall(r"Content-Range: (.*)\r", request)[0], bytes(body)))
            visit.send(build_response(204))


def test_upload_lease_uploads_whole_blocks(place: Place) -> None:
    taker = Taker(lease=True)
    cluster = place.start(taker, honest)
    assert data_of(place.read(BLOCK_BYTES + 5, BLOCK_BYTES + 50)) == DATA[BLOCK_BYTES + 5 : BLOCK_BYTES + 50]
    assert cluster.handover.settle(300)
    assert [name for name, _ in taker.taken] == [f"bytes {BLOCK_BYTES}-{2 * BLOCK_BYTES - 1}/{SIZE}"]
    assert taker.taken[0][1][:-8] == DATA[BLOCK_BYTES : 2 * BLOCK_BYTES]
    assert place.totals() == {"peer_requests": 1, "origin_requests": 1, "origin_bytes": BLOCK_BYTES}
    assert place.asked()[1] == 0


def test_read_without_the_upload_lease_uploads_nothing(place: Place) -> None:
    taker = Taker(lease=False)
    cluster = place.start(taker)
    assert data_of(place.read(5, 50)) == DATA[5:50]
    assert cluster.handover.settle(300)
    assert taker.taken == []
    assert place.totals()["origin_bytes"] == 45


def test_fetch_by_the_owner_is_uploaded_to_replicas(place: Place, settled: None) -> None:
    taker, other = Taker(lease=False, status=404), Taker(lease=False, status=404)
    cluster = place.start(dead, taker, other, replicas=2, me=0)
    assert place.read(0, BLOCK_BYTES).keep is Keep.OWNED
    assert cluster.handover.settle(300)
    assert [name for name, _ in taker.taken] == [f"bytes 0-{BLOCK_BYTES - 1}/{SIZE}"]
    assert other.taken == []
    place.read(5, 10)  # no whole block
    assert cluster.handover.settle(300)
    assert len(taker.taken) == 1


def test_upload_beyond_the_queue_is_dropped(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "QUEUE_BYTES", 2 * BLOCK_BYTES)
    release = threading.Event()
    taker = Taker(lease=False)

    def slow_taker(visit: Visit) -> None:
        release.wait(300)
        taker(visit)

    cluster = place.start(slow_taker)
    what = ObjectDescription("memory", "bucket/key", "v1", SIZE)
    for start in range(0, 3 * BLOCK_BYTES, BLOCK_BYTES):
        cluster.handover.upload(place.members[0], what, start, DATA[start : start + BLOCK_BYTES])
    release.set()
    assert cluster.handover.settle(30)
    assert sorted(name for name, _ in taker.taken) == [
        f"bytes 0-{BLOCK_BYTES - 1}/{SIZE}",
        f"bytes {BLOCK_BYTES}-{2 * BLOCK_BYTES - 1}/{SIZE}",
    ]
    cluster.handover.upload(place.members[0], what, 0, DATA[:BLOCK_BYTES])  # there is room again
    assert cluster.handover.settle(30)
    assert len(taker.taken) == 3


def test_upload_to_a_silent_member_is_dropped(place: Place, events: list[Event]) -> None:
    cluster = place.start(dead)
    what = ObjectDescription("memory", "bucket/key", "v1", SIZE)
    for _ in range(3):
        cluster.handover.upload(place.members[0], what, 0, DATA)
        assert cluster.handover.settle(30)
    assert [event.name for event in events] == ["peer.breaker.opened", "peer.handover.failed"]


@pytest.mark.parametrize(
    ("start", "stop", "size", "whole"),
    [
        (0, 10, 10, (0, 10)),
        (0, 9, 10, (0, 0)),
        (1, 10, 10, (BLOCK_BYTES, 10)),
        (5, 2 * BLOCK_BYTES + 5, SIZE, (BLOCK_BYTES, 2 * BLOCK_BYTES)),
        (3 * BLOCK_BYTES, SIZE, SIZE, (3 * BLOCK_BYTES, SIZE)),
    ],
)
def test_whole_blocks_of_a_range_end_at_block_boundaries(
    start: int, stop: int, size: int, whole: tuple[int, int]
) -> None:
    assert handover.whole_blocks(start, stop, size) == whole


# --- as the owner ---------------------------------------------------------------------------------


@pytest.mark.parametrize("serving", [False, True])
def test_read_after_a_change_uses_former_holders(place: Place, serving: bool) -> None:
    asks: list[str] = []

    def handle(visit: Visit) -> None:
        while request := visit.request():
            asks.extend(re.findall(r"Millrace-Ask: (\w+)", request))
            body = framed(request)
            visit.send(head_of(body), body)

    place.start(dead, handle, handle, me=0)
    fetched = place.read(serving=serving)
    assert data_of(fetched) == DATA
    assert fetched.keep is Keep.OWNED
    assert asks == ["cached"]
    assert place.origin.requests == []


@pytest.mark.parametrize("state", [HERE, JOINING])
def test_read_after_several_nodes_joined_uses_what_one_of_them_fetched_between(
    place: Place, state: MemberState
) -> None:
    """The third node owned the object for a moment, before the first and the second joined."""
    empty = answers(404)
    cluster = place.start(dead, empty, honest, empty, me=0)
    everyone = place.views.now
    place.views.now = View.of([*place.members[3:], replace(place.members[2], state=HERE)])
    cluster.placement()
    if state is JOINING:  # all started at once, and the first that was `here` owned everything for a moment
        place.views.now = View.of(replace(member, state=JOINING) for member in place.members[2:])
        cluster.placement()
        place.views.now = View.of([place.members[1], *(replace(each, state=JOINING) for each in place.members[2:])])
        cluster.placement()
    place.views.now = everyone
    assert data_of(place.read()) == DATA
    assert place.origin.requests == []


def test_earlier_placements_end_after_a_while(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = place.start(dead, honest, me=0)
    assert cluster.earlier_placements() == []
    first = cluster.placement()
    place.views.now = View.of([place.members[0], replace(place.members[1], state=JOINING)])
    second = cluster.placement()
    place.views.now = View.of([replace(each, address="127.0.0.1:2") for each in place.views.now.members])
    cluster.placement()  # the same shares
    place.views.now = View.of(place.members)
    cluster.placement()
    assert [each.shares for each in cluster.earlier_placements()] == [second.shares, first.shares]
    monkeypatch.setattr(cluster_module, "CHANGED_LATELY_SECONDS", 0.0)
    assert cluster.earlier_placements() == []


def test_read_long_after_a_change_uses_the_origin(place: Place, settled: None) -> None:
    place.start(dead, honest, me=0)
    assert data_of(place.read()) == DATA
    assert place.totals() == {"origin_requests": 1, "origin_bytes": SIZE}


def test_read_by_the_last_member_is_stored_as_owned(place: Place) -> None:
    place.start(dead, dead, honest, me=2)
    assert place.read().keep is Keep.OWNED
    assert place.totals()["peer_failures"] == 2


def test_read_by_a_client_is_stored_as_a_copy(place: Place) -> None:
    place.start(dead)
    assert place.read().keep is Keep.COPY


# --- views ----------------------------------------------------------------------------------------


def test_read_in_an_empty_cluster_uses_the_origin(place: Place) -> None:
    place.start()
    assert place.read().keep is Keep.OWNED
    assert place.totals() == {"origin_requests": 1, "origin_bytes": SIZE}


def test_member_with_a_new_address_is_used(place: Place) -> None:
    cluster = place.start(dead)
    before = cluster.placement()
    assert cluster.placement() is before
    moved = Peer(honest)
    place.views.now = View.of([Member(id=place.members[0].id, address=moved.address)])
    assert data_of(place.read()) == DATA
    assert cluster.placement() is not before
    assert moved.requests == 1
    place.peers.append(moved)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", "x" * 70 + ".example:1", "127.0.0.1:99999"])
def test_member_with_an_invalid_address_is_a_failure(place: Place, address: str) -> None:
    place.start(dead)
    place.views.now = View.of([Member(id=place.members[0].id, address=address)])
    assert data_of(place.read()) == DATA
    assert place.totals()["peer_failures"] == 1


def test_peer_of_another_version_is_skipped(place: Place) -> None:
    place.start(honest, honest)
    first, second = place.members
    place.views.now = View.of([Member(id=first.id, address=first.address, wire=7), second])
    assert data_of(place.read()) == DATA
    assert place.asked() == [0, 1]


def test_local_files_are_read_from_the_origin(place: Place) -> None:
    cluster = place.start(honest)
    place.origin.head_is_local = True
    assert isinstance(ClusterSources(cluster)(place.origin, place.info, None), DirectSource)


def test_read_over_stripes_uses_each_owner() -> None:
    size = WHOLE_BYTES + 2 * STRIPE_BYTES
    origin = ComputedOrigin({"bucket/large": size})
    info = origin.head("bucket/large")
    what = ObjectDescription(origin.identity, info.key, info.version, size)
    asked: dict[str, list[str]] = {}

    def serve(name: str) -> Handle:
        def handle(visit: Visit) -> None:
            while request := visit.request():
                asked.setdefault(name, []).extend(re.findall(r"Range: bytes=(.*)\r", request))
                visit.send(build_response(421, length=0))

        return handle

    peers = {f"node-{number}": Peer(serve(f"node-{number}")) for number in range(4)}
    views = Views()
    views.now = View.of(Member(id=name, address=peer.address) for name, peer in peers.items())
    link = NodeLink(views=views, folder="local", member_id=None, token=TOKEN)
    cluster = Cluster(link, breakers=Breakers(None, name_of=link.address_of))
    order = cluster.placement().order
    border = next(
        stripe * STRIPE_BYTES
        for stripe in range(1, 6)
        if order(what.object_id(), stripe)[0] != order(what.object_id(), stripe - 1)[0]
    )
    source = ClusterSources(cluster)(origin, info, None)
    fetched = source.read(border - 1000, border + 1000)  # type: ignore[attr-defined]
    assert data_of(fetched) == bytes(origin.expected("bucket/large", border - 1000, border + 1000))
    before, after = (order(what.object_id(), border // STRIPE_BYTES + step)[0].id for step in (-1, 0))
    assert f"{border - 1000}-{border - 1}" in asked[before]
    assert f"{border}-{border + 999}" in asked[after]
    assert origin.bytes_read == 2000
    cluster.close()
    for peer in peers.values():
        peer.close()


def test_read_in_a_forked_child_succeeds(place: Place) -> None:
    place.start(honest)
    place.read(0, 5)
    cluster, info = place.cluster, place.info
    assert cluster is not None
    pid = os.fork()
    if pid == 0:
        source = ClusterSources(cluster)(place.origin, info, None)
        os._exit(0 if data_of(source.read(5, 500)) == DATA[5:500] and not place.origin.requests else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert data_of(place.read(7, 70)) == DATA[7:70]
    assert [visit.requests for visit in place.peers[0].visits] == [2, 1]


def slow(visit: Visit) -> None:
    request = visit.request()
    threading.Event().wait(0.25)
    body = framed(request)
    visit.send(head_of(body), body)
    visit.wait_for_end()


@pytest.mark.parametrize("replicas", [1, 2])
def test_slow_peer_within_its_deadline_is_waited_for(place: Place, replicas: int) -> None:
    place.start(slow, honest, replicas=replicas)
    assert data_of(place.read()) == DATA
    assert place.totals() == {"peer_requests": 1, "peer_bytes": SIZE}
    assert place.asked() == [1, 0]


def test_silent_holder_costs_one_deadline_and_the_next_serves(place: Place, events: list[Event]) -> None:
    place.start(silent, honest, replicas=2)
    with place.impatient(0):
        for _ in range(3):
            assert data_of(place.read()) == DATA
    assert place.totals() == {"peer_requests": 4, "peer_failures": 1, "peer_bytes": 3 * SIZE}
    assert [(event.name, event.subject) for event in events] == [
        ("peer.failed", place.members[0].address),
        ("peer.breaker.opened", place.members[0].address),
    ]
