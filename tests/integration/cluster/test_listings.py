"""Metadata in a cluster of real servers and stores, in one process, over an origin that counts its requests."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.origins import MemoryOrigin
from tests.support.planes import Views

from millrace.cache.metadata.metadata import ORIGIN_METADATA, MetadataCache, UncachedMetadata
from millrace.cache.metadata.page_map import PageMap
from millrace.cache.node import CacheNode
from millrace.cluster.breakers import Breakers
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.server import Call, PlaneServer
from millrace.cluster.invalidation import Invalidations, batches
from millrace.cluster.listings import ClusterListings, MetadataOwner, metadata_id
from millrace.cluster.membership import Member, MemberState, NodeLink, View
from millrace.cluster.origins import Origins
from millrace.cluster.placement import Placement
from millrace.cluster.serving import BlockService
from millrace.config import SILENCE_SECONDS, resolve
from millrace.errors import ObjectNotFoundError, PeerRefusedError
from millrace.events import Event
from millrace.origin import ListingPage
from millrace.testing.conformance.members import eventually

pytestmark = pytest.mark.usefixtures("patient_peers")

TOKEN = "a-token-for-tests-only"


@dataclass
class Node:
    """A node, and a process that reads on it, with stores of their own so that neither finds what the other remembers."""

    member: Member
    serving: CacheNode
    reading: CacheNode
    server: PlaneServer
    cluster: Cluster


MakeNodes = Callable[..., list[Node]]
"""So many nodes, with this `consistency`. Their readers request metadata from its owner. So do the servers' own caches at
the positions `asking_servers` of `in_order`: these servers must handle requests to forget by `_forgets`."""


@pytest.fixture
def origin() -> MemoryOrigin:
    return MemoryOrigin()


@pytest.fixture
def make_nodes(tmp_path: Path, origin: MemoryOrigin) -> Iterator[MakeNodes]:
    made: list[Node] = []

    def make(count: int, consistency: str, *, asking_servers: Collection[int] = ()) -> list[Node]:
        views = Views()
        ids = View.of(Member(id=f"node-{number}", address="") for number in range(count))
        order = [member.id for member in Placement(ids).order(metadata_id("memory", "b"))]
        for number in range(count):
            member_id = f"node-{number}"
            link = NodeLink(views=views, folder="local", member_id=member_id, token=TOKEN)
            cluster = Cluster(link, breakers=Breakers(None))

            def node(name: str, *, asks_owner: bool, number: int = number, cluster: Cluster = cluster) -> CacheNode:
                arguments = {
                    "cache_dir": tmp_path / f"{number}-{name}", "min_free": 0, "consistency": consistency, "members": "none",
                }  # fmt: skip
                options = resolve(arguments, environ={"HOME": str(tmp_path)}, file={})
                listings = ClusterListings(cluster, options.max_age_seconds)
                return CacheNode(options, metadata_source=listings if asks_owner else ORIGIN_METADATA)

            origins = Origins()
            origins.register(origin)
            serving, reading = (
                node("serving", asks_owner=order.index(member_id) in asking_servers),
                node("reading", asks_owner=True),
            )
            service = BlockService(serving, cluster, origins)
            server = PlaneServer(service, host="127.0.0.1", token=TOKEN)
            MetadataOwner(serving, origins, Invalidations(cluster)).add_routes(server)
            server.route("GET", "/v1/view", lambda _, cluster=cluster: cluster.link.views.view().to_json())  # type: ignore[misc]
            server.start()
            made.append(Node(Member(id=member_id, address=server.address), serving, reading, server, cluster))
        views.now = View.of(node.member for node in made)
        return made

    yield make
    for node in made:
        node.cluster.link.views.now = View.of([])  # type: ignore[attr-defined]  # nothing is sent to it later
        node.cluster.close()
        node.server.close()
        node.serving.close()
        node.reading.close()


def names(node: Node, origin: MemoryOrigin, prefix: str) -> list[str]:
    return [info.key for page in node.reading.metadata.list_all(origin, prefix) for info in page]


def in_order(nodes: list[Node]) -> list[Node]:
    """The nodes in the order of ownership of the metadata of bucket `b`."""
    by_id = {node.member.id: node for node in nodes}
    return [by_id[member.id] for member in nodes[0].cluster.placement().order(metadata_id("memory", "b"))]


def filled(origin: MemoryOrigin, count: int) -> list[str]:
    """`count` objects in `b/train`, each with its key as its content; returns the sorted keys."""
    keys = [f"b/train/{number:05d}" for number in range(count)]
    for key in keys:
        origin.put(key, key.encode())
    return keys


def test_listing_is_requested_once_for_all_nodes(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    expected = filled(origin, 2500)
    nodes = make_nodes(3, "immutable")
    _, *others = in_order(nodes)
    for node in others:
        assert names(node, origin, "b/train") == expected
    assert origin.count("list") == 3  # 2,500 keys, a thousand a request
    for node in others:
        assert names(node, origin, "b/train") == expected  # from its own memory
        assert node.reading.metadata.stat(origin, expected[7]).size == len(expected[7])
    assert (origin.count("list"), origin.count("head")) == (3, 0)


def test_levels_and_heads_are_requested_once_for_all_nodes(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    for key in ("b/one/x", "b/one/y", "b/two/z"):
        origin.put(key, b"data")
    nodes = make_nodes(3, "immutable")
    _, *others = in_order(nodes)
    for node in others:
        listing = node.reading.metadata.list_level(origin, "b")
        assert list(listing.prefixes) == ["b/one", "b/two"]
    assert origin.count("list") == 1
    for node in others:
        assert node.reading.metadata.stat(origin, "b/two/z").size == 4
    assert origin.count("head") == 1


def test_write_is_visible_on_its_own_node(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    origin.put("b/data/one", b"1")
    nodes = make_nodes(3, "1h")
    writer = in_order(nodes)[1]
    assert names(writer, origin, "b/data") == ["b/data/one"]
    origin.put("b/data/two", b"2")
    writer.reading.metadata.invalidate(origin, "b/data/two")
    assert names(writer, origin, "b/data") == ["b/data/one", "b/data/two"]
    origin.put("b/data/one", b"another")
    writer.reading.metadata.invalidate(origin, "b/data/one")
    assert writer.reading.metadata.stat(origin, "b/data/one").size == 7


def test_metadata_of_an_owner_has_half_the_max_age(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    origin.put("b/data/one", b"1")
    nodes = make_nodes(2, "1h")
    owner, other = in_order(nodes)
    _, received_until = other.reading.metadata.stat_until(origin, "b/data/one")
    _, requested_until = owner.reading.metadata.stat_until(origin, "b/data/one")
    assert requested_until - received_until == pytest.approx(1800, abs=60)


def test_consistency_always_reads_the_origin(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    origin.put("b/data/one", b"1")
    nodes = make_nodes(3, "always")
    for count, node in enumerate(nodes, 1):
        assert names(node, origin, "b/data") == ["b/data/one"]
        assert origin.count("list") == count


def test_metadata_with_dead_owners_is_requested_from_the_origin(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    expected = filled(origin, 1500)
    nodes = make_nodes(3, "immutable")
    first, second, last = in_order(nodes)
    first.server.close()
    assert names(last, origin, "b/train") == expected  # by the second
    assert origin.count("list") == 2
    second.server.close()
    last.reading.metadata.invalidate_all()
    assert names(last, origin, "b/train") == expected  # from the origin
    assert origin.count("list") == 4
    with pytest.raises(ObjectNotFoundError):
        last.reading.metadata.stat(origin, "b/nothing")


def test_listing_continues_when_its_owner_dies(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    expected = filled(origin, 2500)
    nodes = make_nodes(2, "immutable")
    owner, other = in_order(nodes)
    pages = other.reading.metadata.list_all(origin, "b/train")
    found = [info.key for info in next(iter(pages))]
    owner.server.close()
    found += [info.key for page in pages for info in page]
    assert found == expected


def test_listing_continues_behind_a_key_when_its_owner_dies_before_a_directory(
    make_nodes: MakeNodes, origin: MemoryOrigin
) -> None:
    keys = ["b/c", "b/d-x", "b/d/1", "b/e"]
    for key in keys:
        origin.put(key, b"")
    nodes = make_nodes(2, "immutable")
    owner, reader = in_order(nodes)
    list(owner.serving.metadata.list_all(origin, "b"))
    owner.serving.metadata_within(0).list_level(origin, "b/d")  # now the page before it ends where it begins
    pages = reader.reading.metadata.list_all(origin, "b")
    found = [info.key for info in next(iter(pages))]
    assert found == keys[:2]
    owner.server.close()
    begun: list[str] = []
    origin.before_list = lambda _, after: begun.append(after)
    assert [*found, *(info.key for page in pages for info in page)] == keys
    assert begun == [keys[1]]


def test_listing_left_by_one_node_is_not_continued_by_another_when_it_is_old(
    make_nodes: MakeNodes, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One response of Azure contains several pages: the owner has the next ones since the first was requested."""
    keys = filled(origin, 2500)

    def at_once(prefix: str, **arguments: Any) -> Iterator[ListingPage]:
        return iter(list(MemoryOrigin.list_pages(origin, prefix, **arguments)))

    monkeypatch.setattr(origin, "list_pages", at_once)
    _, *others = in_order(make_nodes(3, "1s"))
    assert names(others[0], origin, "b/train") == keys
    time.sleep(1.1)
    assert others[1].reading.metadata.below(origin, "b/train") == "something"  # one page
    origin.put(keys[1500], b"written by another program")
    time.sleep(1.1)
    assert others[0].reading.metadata.stat(origin, keys[1500]).size == len(b"written by another program")


def test_restarted_owner_serves_no_metadata_from_before(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    keys = filled(origin, 3)
    owner, *others = in_order(make_nodes(3, "immutable"))
    assert names(others[0], origin, "b/train") == keys
    origin.put(keys[1], b"the owner did not receive the invalidation of this write")
    owner.server._routes.clear()
    restarted = MetadataOwner(owner.serving, Origins([origin], environment=False), Invalidations(owner.cluster))
    restarted.add_routes(owner.server)
    assert others[1].reading.metadata.stat(origin, keys[1]) == origin.head(keys[1])
    assert names(others[1], origin, "b/train") == keys
    before = origin.count("list")
    assert names(others[1], origin, "b/train") == keys
    assert origin.count("list") == before


def test_owner_serves_no_metadata_from_before_a_pause_of_its_process(
    make_nodes: MakeNodes, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.cluster.listings.SILENCE_SECONDS", SILENCE_SECONDS)
    keys = filled(origin, 3)
    owner, *others = in_order(make_nodes(3, "immutable"))
    alive = MetadataOwner(owner.serving, Origins([origin], environment=False), Invalidations(owner.cluster))
    owner.server._routes.clear()
    alive.add_routes(owner.server)
    alive.record_alive()
    assert names(others[0], origin, "b/train") == keys
    origin.put(keys[1], b"written in the pause")
    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + SILENCE_SECONDS)
    assert others[1].reading.metadata.stat(origin, keys[1]) == origin.head(keys[1])


def test_owner_serves_no_metadata_from_before_its_absence_from_the_members(
    make_nodes: MakeNodes, origin: MemoryOrigin
) -> None:
    keys, absences = filled(origin, 3), [5]
    owner, *others = in_order(make_nodes(3, "immutable"))
    origins = Origins([origin], environment=False)
    absent = MetadataOwner(owner.serving, origins, Invalidations(owner.cluster), lambda: absences[0])
    owner.server._routes.clear()
    absent.add_routes(owner.server)
    assert names(others[0], origin, "b/train") == keys
    origin.put(keys[1], b"written while the owner had no routes")
    absences[0] += 1
    assert others[1].reading.metadata.stat(origin, keys[1]) == origin.head(keys[1])


def test_missing_object_is_not_reported_as_refusal_of_its_metadata_owner(
    make_nodes: MakeNodes, origin: MemoryOrigin, events: list[Event]
) -> None:
    filled(origin, 2)
    _, other = in_order(make_nodes(2, "immutable"))
    with pytest.raises(ObjectNotFoundError):
        other.reading.metadata.stat(origin, "b/train")  # a prefix is not an object
    assert not [event for event in events if event.name.startswith("peer.")]


def test_origin_error_is_raised_unchanged(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    nodes = make_nodes(2, "immutable")
    _, other = in_order(nodes)
    with pytest.raises(ObjectNotFoundError, match="does not exist"):
        other.reading.metadata.stat(origin, "b/nothing")
    assert other.reading.metadata.below(origin, "b/nothing") == "nothing"


def test_max_age_is_kept_over_owners(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    nodes = make_nodes(1, "immutable")
    assert nodes[0].reading.metadata_within(math.inf).list_level(origin, "b").objects == []


def test_simultaneous_requests_share_one_result(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    expected = filled(origin, 2500)
    nodes = make_nodes(5, "immutable")
    _, *others = in_order(nodes)
    together = threading.Barrier(len(others))
    origin.before_list = lambda *_: time.sleep(0.2)

    def ask(node: Node) -> list[str]:
        together.wait()
        return names(node, origin, "b/train")

    with ThreadPoolExecutor(len(others)) as pool:
        assert all(found == expected for found in pool.map(ask, others))
    assert origin.count("list") == 3


@pytest.mark.parametrize(
    "listing",
    [
        "text",
        None,
        {"objects": [["b/train/00001", 10**400, "v", 10**400]], "through": "b/train/00001", "is_directory": False},
        {"objects": [["b/train/00001", -1, "v", 0.0]], "through": "b/train/00001", "is_directory": False},
        {"objects": [["elsewhere", 1, "v", 0.0]], "through": "b/train/00001", "is_directory": False},
        {"objects": [], "through": "a", "is_directory": False},
        {"objects": [["b/train/00001", 1, "v", 0.0]], "through": 7, "is_directory": False},
        {"objects": [["b/train/00001", 1, "v", 0.0]], "through": "", "is_directory": False},
        [],
    ],
    ids=["text", "null", "large", "negative", "elsewhere", "backwards", "number", "nowhere", "list"],
)  # fmt: skip
def test_malformed_response_of_an_owner_is_replaced_by_the_origin(
    make_nodes: MakeNodes, origin: MemoryOrigin, listing: object
) -> None:
    expected = filled(origin, 3)
    nodes = make_nodes(2, "1h")
    owner, other = in_order(nodes)
    for path in ("/v1/listing", "/v1/level", "/v1/head", "/v1/forget"):
        owner.server.route("POST" if path == "/v1/forget" else "GET", path, lambda call: listing)
    assert names(other, origin, "b/train") == expected
    other.reading.metadata.invalidate_all()
    assert [info.key for info in other.reading.metadata.list_level(origin, "b/train").objects] == expected
    other.reading.metadata.invalidate_all()
    assert other.reading.metadata.stat(origin, "b/train/00002").size == len("b/train/00002")
    other.reading.metadata.invalidate(origin, "b/train/00002")


def test_metadata_of_another_object_is_refused(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    origin.put("b/one", b"1")
    nodes = make_nodes(2, "1h")
    owner, other = in_order(nodes)
    owner.server.route("GET", "/v1/head", lambda call: ["b/two", 7, "v", 0.0])
    assert other.reading.metadata.stat(origin, "b/one").size == 1


def test_metadata_with_an_invalid_member_is_requested_from_the_origin(
    make_nodes: MakeNodes, origin: MemoryOrigin
) -> None:
    origin.put("b/one", b"1")
    nodes = make_nodes(2, "1h")
    owner, other = in_order(nodes)
    other.cluster.link.views.now = View.of(  # type: ignore[attr-defined]
        [other.member, Member(id=owner.member.id, address="no address")]
    )
    assert other.reading.metadata.stat(origin, "b/one").size == 1
    other.reading.metadata.invalidate(origin, "b/one")


def test_writer_without_its_owner_reads_the_origin(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    origin.put("b/data/one", b"1")
    origin.put("b/other/x", b"1")
    nodes = make_nodes(3, "1h")
    owner, second, writer = in_order(nodes)
    assert names(writer, origin, "b/data") == ["b/data/one"]  # which the owner caches from now on
    writer.cluster.breakers.failed(owner.member.id)  # it does not respond for a moment
    origin.put("b/data/two", b"2")
    writer.reading.metadata.invalidate(origin, "b/data/two")
    writer.cluster.breakers.worked(owner.member.id)
    assert names(writer, origin, "b/data") == ["b/data/one", "b/data/two"]
    assert [info.key for info in writer.reading.metadata.list_level(origin, "b/data").objects] == [
        "b/data/one",
        "b/data/two",
    ]
    before = origin.count("list")
    # Metadata elsewhere in the bucket still comes from the owner.
    assert names(writer, origin, "b/other") == names(second, origin, "b/other") == ["b/other/x"]
    assert origin.count("list") == before + 1


def test_invalidation_without_access_to_the_origin_is_applied(
    make_nodes: MakeNodes, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.put("b/one", b"1")
    nodes = make_nodes(3, "1h")
    _, writer, reader = in_order(nodes)
    assert writer.reading.metadata.stat(origin, "b/one").size == 1
    origin.put("b/one", b"22")
    with monkeypatch.context() as denied:
        denied.setattr(Origins, "find", lambda *_: None)
        writer.reading.metadata.invalidate(origin, "b/one")
    assert reader.reading.metadata.stat(origin, "b/one").size == 2


@pytest.mark.parametrize("consistency", ["1h", "immutable"])
def test_write_invalidates_every_node(make_nodes: MakeNodes, origin: MemoryOrigin, consistency: str) -> None:
    keys = [f"b/data/{number}" for number in range(5)] + ["another/x", "another/y"]
    for key in keys:
        origin.put(key, b"1")
    nodes = make_nodes(4, consistency)
    # The processes of a node share the metadata of its server, which is invalidated.
    for writer in nodes:
        for node in nodes:
            for key in keys:
                node.serving.metadata.stat(origin, key)
        for key in keys:
            origin.put(key, b"more than before" + writer.member.id.encode())
        writer.reading.metadata.invalidate(origin, *keys)
        size = len(b"more than before") + len(writer.member.id)
        for node in nodes:
            if node is not writer:  # whose own server shares the memory of its readers, but in these tests
                assert [node.serving.metadata.known(origin, key) for key in keys] == [None] * len(keys)
                assert [node.serving.metadata.stat(origin, key).size for key in keys] == [size] * len(keys)
            else:
                node.serving.metadata.invalidate(origin, *keys)


def test_write_with_consistency_always_invalidates_the_others(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    origin.put("b/one", b"1")
    nodes = make_nodes(3, "1h")
    always = ClusterListings(nodes[0].cluster, max_age_seconds=0.0)
    for metadata in (
        MetadataCache(
            PageMap(nodes[0].reading.open_disks[0].store.index),
            nodes[0].reading.open_disks[0].locks,
            max_age_seconds=0.0,
            on_changed=lambda *_: None,
            report=lambda _: None,
            source=always,
        ),
        UncachedMetadata(always),
    ):
        for node in nodes[1:]:
            node.serving.metadata.stat(origin, "b/one")
        metadata.invalidate(origin, "b/one")
        assert [node.serving.metadata.known(origin, "b/one") for node in nodes[1:]] == [None, None]


def test_invalidation_of_an_unreachable_member_is_sent_later(make_nodes: MakeNodes, origin: MemoryOrigin) -> None:
    origin.put("b/one", b"1")
    nodes = make_nodes(4, "immutable")
    away, _, reader, writer = in_order(nodes)
    for node in nodes:
        node.serving.metadata.stat(origin, "b/one")
    asking = writer.reading.metadata_source
    assert isinstance(asking, ClusterListings)
    writer.cluster.breakers = Breakers(None, clock=lambda: 0.0)  # it stays open until the test closes it
    writer.cluster.breakers.failed(away.member.id)
    origin.put("b/one", b"22")
    writer.reading.metadata.invalidate(origin, "b/one")
    pending = asking._invalidations._pending
    assert len(pending) == 1
    assert away.serving.metadata.stat(origin, "b/one").size == 1
    assert reader.reading.metadata.stat(origin, "b/one").size == 1  # from the owner that was not invalidated
    reader.serving.metadata.stat(origin, "b/one")
    writer.cluster.breakers.worked(away.member.id)
    deadline = time.monotonic() + 120
    while pending and time.monotonic() < deadline:
        time.sleep(0.05)
    assert away.serving.metadata.stat(origin, "b/one").size == 2
    # Invalidated again, because the unreachable owner may have served old metadata.
    while reader.serving.metadata.known(origin, "b/one") is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert reader.serving.metadata.stat(origin, "b/one").size == 2


def test_interrupted_invalidation_is_sent_later(
    make_nodes: MakeNodes, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write waits for silent members, and may be interrupted then. The process continues, as in a notebook."""
    origin.put("b/x", b"old")
    *others, writer = in_order(make_nodes(3, "immutable"))
    assert [node.reading.metadata.stat(origin, "b/x").size for node in others] == [3, 3]

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    origin.put("b/x", b"newer")
    with monkeypatch.context() as silent:
        silent.setattr(writer.cluster.client, "call", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.reading.metadata.invalidate(origin, "b/x")
    eventually(lambda: [node.serving.metadata.stat(origin, "b/x").size for node in others] == [5, 5])


def test_write_invalidates_a_member_that_the_writer_does_not_know_yet(
    make_nodes: MakeNodes, origin: MemoryOrigin
) -> None:
    origin.put("b/one", b"1")
    writer, _, newcomer = make_nodes(3, "immutable")
    _change_view(writer, lambda members: [member for member in members if member != newcomer.member])
    assert newcomer.serving.metadata.stat(origin, "b/one").size == 1
    origin.put("b/one", b"22")
    writer.reading.metadata.invalidate(origin, "b/one")
    assert newcomer.serving.metadata.known(origin, "b/one") is None


def test_write_by_a_writer_that_does_not_know_the_new_owner_yet_is_seen(
    make_nodes: MakeNodes, origin: MemoryOrigin
) -> None:
    """A reader that is invalidated before the owner that only it knows receives the old metadata once more."""
    origin.put("b/one", b"1")
    nodes = make_nodes(3, "immutable", asking_servers=[2])
    owner, writer, reader = in_order(nodes)
    state = MemberState.JOINING
    _change_view(
        writer, lambda members: [replace(each, state=state) if each == owner.member else each for each in members]
    )
    reader.server.route("POST", "/v1/forget", _forgets(reader, origin))
    forget, received = _forgets(owner, origin), list[int]()

    def forget_late(call: Call) -> object:
        if not received:
            eventually(lambda: reader.serving.metadata.known(origin, "b/one") is None)
            received.append(reader.serving.metadata.stat(origin, "b/one").size)
        return forget(call)

    owner.server.route("POST", "/v1/forget", forget_late)
    assert [node.serving.metadata.stat(origin, "b/one").size for node in (owner, reader)] == [1, 1]
    origin.put("b/one", b"22")
    writer.reading.metadata.invalidate(origin, "b/one")
    assert received == [1]
    assert reader.serving.metadata.stat(origin, "b/one").size == 2


def _change_view(node: Node, change: Callable[[Sequence[Member]], Iterable[Member]]) -> None:
    """Give a node a view of its own."""
    views = Views()
    views.now = View.of(change(node.cluster.link.views.view().members))
    node.cluster.link = replace(node.cluster.link, views=views)


@pytest.mark.slow
def test_invalidated_member_never_receives_old_metadata_from_an_owner(
    make_nodes: MakeNodes, origin: MemoryOrigin
) -> None:
    """Readers read continuously while one node writes: each sees every write after it returns."""
    origin.put("b/one", b"")
    nodes = make_nodes(4, "1h", asking_servers=[1, 2, 3])
    writer, *readers = in_order(nodes)
    for node in readers:  # usually a node's reader shares the metadata of its server; here they have separate caches
        node.server.route("POST", "/v1/forget", _forgets(node, origin))
    stop = threading.Event()

    def ask(node: Node) -> None:
        while not stop.is_set():
            node.reading.metadata.stat(origin, "b/one")

    with ThreadPoolExecutor(len(readers)) as pool:
        asking = [pool.submit(ask, node) for node in readers]
        try:
            for size in range(1, 60):
                origin.put("b/one", bytes(size))
                writer.serving.metadata.invalidate(origin, "b/one")
                writer.reading.metadata.invalidate(origin, "b/one")
                assert [node.reading.metadata.stat(origin, "b/one").size for node in readers] == [size] * len(readers)
        finally:
            stop.set()
        for each in asking:
            each.result()


def _forgets(node: Node, origin: MemoryOrigin) -> Callable[[Call], object]:
    def forget(call: Call) -> object:
        for cache in (node.serving, node.reading):
            index = cache.open_disks[0].store.index
            for key in call.body.get("keys", [call.body.get("key")]):
                PageMap(index).change(origin.identity, key)
        return {"view": node.cluster.placement().view.version}

    return forget


def test_invalidation_of_many_keys_is_sent_in_batches() -> None:
    keys = [f"b/{number:04d}" + "\N{SNOWMAN}" * 300 for number in range(1000)] + ["x" * 2000]
    found = list(batches(keys, most_bytes=100_000))
    assert [key for batch in found for key in batch] == keys
    assert len(found) > 10
    assert all(len(json.dumps(batch)) <= 100_000 for batch in found)
    assert list(batches([])) == []
    assert list(batches(["x" * 10], most_bytes=5)) == [["x" * 10]]


@pytest.mark.parametrize(
    "body", [None, [], "x", {}, {"origin": 1, "key": "b/one"}, {"origin": "memory", "keys": ["b", 1]}], ids=str
)
def test_invalidation_without_keys_is_refused(make_nodes: MakeNodes, body: object) -> None:
    (node,) = make_nodes(1, "1h")
    with pytest.raises(PeerRefusedError) as refused:
        node.cluster.client.call(node.member.address, "POST", "/v1/forget", body)
    assert refused.value.status == 400
