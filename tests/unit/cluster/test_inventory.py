"""Inventories: pages of cached objects from a real store, and malformed pages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.computed import ComputedOrigin

from millrace.cache.node import CacheNode, close_nodes
from millrace.cluster.dataplane.server import Call
from millrace.cluster.dataplane.wire import ObjectDescription
from millrace.cluster.inventory import Inventory, InventoryPage, Offer, as_seen, inventory_page
from millrace.cluster.membership import Member, MemberState, View
from millrace.cluster.placement import WHOLE_BYTES, Placement, stripe_span
from millrace.config import resolve
from millrace.errors import PeerError, UsageError
from millrace.store.records import BLOCK_BYTES, PAGE_BYTES

A, B = Member(id="a", address="a:1"), Member(id="b", address="b:1")
JOINING = Member(id="new", address="n:1", state=MemberState.JOINING)


def ids(page: InventoryPage) -> list[bytes]:
    return [offer.what.object_id() for offer in page.offers]


def keys(page: InventoryPage) -> set[str]:
    return {offer.what.key for offer in page.offers}


MakeNode = Callable[..., CacheNode]


@pytest.fixture
def make_node(tmp_path: Path) -> MakeNode:
    def make(disks: int = 1) -> CacheNode:
        directories = [str(tmp_path / f"cache-{number}") for number in range(disks)]
        return CacheNode(resolve({"cache_dir": directories, "min_free": 0}, environ={}, file={}))

    return make


def read(node: CacheNode, origin: ComputedOrigin, key: str, *ranges: tuple[int, int]) -> None:
    info = origin.head(key)
    reader = node.open_reader(origin, info)
    for start, stop in ranges or [(0, info.size)]:
        reader.read(start, stop)
    reader.close()


def everything(node: CacheNode, placement: Placement, name: str, limit: int) -> list[InventoryPage]:
    pages = [inventory_page(node, placement, name, limit=limit)]
    while (after := pages[-1].after) is not None:
        pages.append(inventory_page(node, placement, name, after, limit))
    return pages


@pytest.mark.parametrize("disks", [1, 3])
def test_pages_list_each_object_once_in_order(make_node: MakeNode, disks: int) -> None:
    sizes = {f"b/small/{n}": 1000 + n for n in range(60)} | {f"b/large/{n}": (1 << 20) + 1 + n for n in range(20)}
    origin = ComputedOrigin(sizes)
    node = make_node(disks)
    for key in sizes:
        read(node, origin, key)
    placement = Placement(View.of([A, B]))
    found = {}
    for name in ("a", "b"):
        pages = everything(node, placement, name, 7)
        every = [one for page in pages for one in ids(page)]
        assert len(pages) > 3
        assert every == sorted(set(every))
        found[name] = {key for page in pages for key in keys(page)}
        assert all(placement.is_holder(name, one) for one in every)
    assert found["a"] | found["b"] == set(sizes)
    assert not found["a"] & found["b"]


def test_page_lists_the_cached_runs_of_a_partial_object(make_node: MakeNode) -> None:
    origin = ComputedOrigin({"b/x": 6 * BLOCK_BYTES + 5})
    node = make_node()
    read(node, origin, "b/x", (0, 1), (BLOCK_BYTES, 2 * BLOCK_BYTES), (6 * BLOCK_BYTES, 6 * BLOCK_BYTES + 5))
    read(node, origin, "b/x", (3 * BLOCK_BYTES + PAGE_BYTES, 4 * BLOCK_BYTES))  # pages are not offered
    [offer] = inventory_page(node, Placement(View.of([A])), "a").offers
    assert offer.blocks == (range(2), range(6, 7))
    assert offer.what == ObjectDescription("computed", "b/x", "1", 6 * BLOCK_BYTES + 5)


def test_page_lists_only_the_stripes_of_the_member(make_node: MakeNode) -> None:
    size = 2 * WHOLE_BYTES
    origin = ComputedOrigin({"b/x": size})
    node = make_node()
    here = range(62, 130)  # parts of three stripes
    read(node, origin, "b/x", (here.start * BLOCK_BYTES, here.stop * BLOCK_BYTES))
    placement = Placement(View.of([A, B]))
    named: dict[str, set[int]] = {"a": set(), "b": set()}
    for name, blocks in named.items():
        for offer in inventory_page(node, placement, name).offers:
            blocks.update(block for run in offer.blocks for block in run)
    assert named["a"] | named["b"] == set(here)
    object_id = ObjectDescription("computed", "b/x", "1", size).object_id()
    for stripe in range(3):
        start, stop = (place // BLOCK_BYTES for place in stripe_span(stripe, size))
        owner = placement.order(object_id, stripe)[0].id
        assert set(here) & set(range(start, stop)) <= named[owner]


def test_page_of_an_empty_cache_is_empty(make_node: MakeNode) -> None:
    origin = ComputedOrigin({"b/x": 2 << 20})
    node = make_node()
    node.open_reader(origin, origin.head("b/x")).close()
    assert inventory_page(node, Placement(View.of([A])), "a") == InventoryPage((), None)


def test_page_ends_after_a_limit_of_scanned_objects(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.cluster.inventory._MOST_SCANNED", 10)
    origin = ComputedOrigin({f"b/{n}": 500 for n in range(35)})
    node = make_node()
    for n in range(35):
        read(node, origin, f"b/{n}")
    pages = everything(node, Placement(View.of([A])), "nobody", 100)
    assert [len(page.offers) for page in pages] == [0, 0, 0, 0]


# --- the command ----------------------------------------------------------------------------------------


def ask(inventory: Inventory, name: str, view: View, **more: str) -> InventoryPage:
    answer = inventory.page(Call(path_rest=name, query={}, body={"view": view.to_json(), **more}))
    return InventoryPage.from_json(json.loads(json.dumps(answer)))


def test_page_lists_the_share_by_the_view_in_the_request(make_node: MakeNode) -> None:
    origin = ComputedOrigin({f"b/{n}": 500 for n in range(200)})
    node = make_node()
    for n in range(200):
        read(node, origin, f"b/{n}")
    inventory = Inventory(node, replicas=1)
    for view in (View.of([A, B]), View.of([A, B, JOINING]), as_seen(View.of([A, B, JOINING]), "new", ["b"])):
        placement = Placement(view)
        for name in ("a", "b", "new"):
            expected = {e.object_id for e in node.entries() if placement.is_holder(name, e.object_id)}
            assert set(ids(ask(inventory, name, view))) == expected
    assert len(ask(inventory, "b", as_seen(View.of([A, B]), "b", ["a"])).offers) == 200


def test_page_lists_objects_added_between_requests(make_node: MakeNode) -> None:
    origin = ComputedOrigin({f"b/{n}": 500 for n in range(20)})
    node = make_node()
    inventory = Inventory(node, replicas=1)
    both = View.of([A, B])
    for n in range(20):
        read(node, origin, f"b/{n}")
        listed = {one for name in "ab" for one in ids(ask(inventory, name, both))}
        assert listed == {e.object_id for e in node.entries()}
    assert len(ask(inventory, "a", View.of([A])).offers) == 20


def test_request_without_a_view_or_with_an_unknown_position_is_refused(make_node: MakeNode) -> None:
    inventory = Inventory(make_node(), replicas=1)
    for body in (None, [], {}, {"view": None}, {"view": {"members": [{"id": "a"}]}}):
        with pytest.raises(UsageError, match="lacks a view"):
            inventory.page(Call(path_rest="a", query={}, body=body))
    for after in ("zz", "00", "0" * 33, ""):
        with pytest.raises(UsageError, match="not the id"):
            ask(inventory, "a", View.of([A]), after=after)


OBJECT = {"origin": "o", "key": "k", "version": "1", "size": 10, "blocks": [[0, 1]]}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"objects": {}},
        {"objects": [1]},
        {"objects": [OBJECT | {"size": -1}]},
        {"objects": [OBJECT | {"size": True}]},
        {"objects": [OBJECT | {"key": 5}]},
        {"objects": [OBJECT | {"blocks": [[0, 2]]}]},
        {"objects": [OBJECT | {"blocks": [[1, 0]]}]},
        {"objects": [OBJECT | {"blocks": [["0", 1]]}]},
        {"objects": [OBJECT | {"blocks": 7}]},
        {"objects": [], "after": "no id"},
        {"objects": [], "after": 9},
    ],
)
def test_inventory_that_is_malformed_is_refused(answer: Any) -> None:
    with pytest.raises(PeerError, match=r"malformed inventory|not the id"):
        InventoryPage.from_json(answer)


def test_inventory_with_unknown_names_and_odd_keys_is_accepted() -> None:
    page = InventoryPage.from_json({"objects": [OBJECT | {"more": 1}], "after": "ab" * 16, "more": 2})
    assert page == InventoryPage((Offer(ObjectDescription("o", "k", "1", 10), (range(1),)),), b"\xab" * 16)
    odd = Offer(ObjectDescription("o", "a b/ü\udcff\n", "1", 10), (range(1),))
    assert Offer.from_json(json.loads(json.dumps(odd.to_json()))) == odd


def test_as_seen_returns_the_view_after_the_change() -> None:
    view = View.of([A, B, JOINING])
    states = {member.id: member.state for member in as_seen(view, "new", ["b"]).members}
    assert states == {"a": MemberState.HERE, "b": MemberState.LEAVING, "new": MemberState.HERE}
    assert as_seen(view, "a") == view


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    close_nodes()
