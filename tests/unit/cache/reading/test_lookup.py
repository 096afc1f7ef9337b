"""The first open of an object by a process: one index transaction returns the results of four lookups, or nothing."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.origins import MemoryOrigin

from millrace.cache.metadata.metadata import MetadataCache
from millrace.cache.metadata.page_map import Freshness, PageMap, PageMemory
from millrace.cache.metadata.pages import (
    Page,
    description_in,
    description_in_record,
    encode,
    pack_page,
    pack_record,
    unpack_record,
)
from millrace.cache.node import CacheNode, cache_node, close_nodes
from millrace.config import resolve
from millrace.origin import ObjectInfo

pytestmark = pytest.mark.usefixtures("no_maintenance")

MakeNode = Callable[..., CacheNode]
COUNT = 50  # more than are looked up before a page is unpacked


@pytest.fixture
def make_node(tmp_path: Path) -> MakeNode:
    def make(**options: object) -> CacheNode:
        close_nodes()  # as another process
        given = {"cache_dir": str(tmp_path / "cache"), "min_free": 0, "consistency": "immutable", **options}
        return cache_node(resolve(given, environ={}, file={}))

    return make


def filled(count: int = COUNT) -> MemoryOrigin:
    origin = MemoryOrigin()
    for number in range(count):
        origin.put(f"b/set/{number:04}", os.urandom(1000 + number))
    return origin


def keys_of(origin: MemoryOrigin) -> list[str]:
    return list(origin._objects)


def read(node: CacheNode, origin: MemoryOrigin, key: str) -> bytes:
    info = node.metadata.stat(origin, key)
    reader = node.open_reader(origin, info)
    try:
        return bytes(reader.read(0, info.size))
    finally:
        reader.close()


def found(node: CacheNode, origin: MemoryOrigin, key: str) -> bytes | None:
    """The result of one index transaction, which must equal that of the four lookups."""
    first = node.find_known(origin, key)
    if first is None:
        return None
    info, until = node.metadata.stat_until(origin, key)
    native = node.find_native(origin, info, node.changes())
    assert native is not None
    assert native.entry == first.found.entry
    assert first.until <= until  # another process may have sent a request since
    assert first.stamp == node.open_disks[0].store.index.stamp()
    assert first.found.buffer.equals(native.buffer)
    return bytes(first.found.buffer.to_pybytes())


def remembered(node: CacheNode) -> PageMemory:
    assert isinstance(node.metadata, MetadataCache)
    return node.metadata._map._memory


@pytest.mark.parametrize("how", ["listed", "level", "alone"])
@pytest.mark.parametrize("sealed", [True, False])
def test_fresh_and_cached_object_is_found(make_node: MakeNode, how: str, sealed: bool) -> None:
    origin = filled()
    if how == "level":
        origin.put("b/set/deeper/x", b"x")  # so that a level is not everything
    node = make_node()
    if how == "listed":
        list(node.metadata.list_all(origin, "b/set"))
    elif how == "level":
        node.metadata.list_level(origin, "b/set")
    keys = keys_of(origin)[:COUNT]
    for key in keys:
        assert found(node, origin, key) is None
        read(node, origin, key)
    disk = node.open_disks[0]
    if sealed:
        assert disk.segment_sealer.seal(disk.store.index.segment_records()[0].generation)
    node = make_node()
    asked = origin.count("head") + origin.count("list") + origin.count("read")
    random.Random(3).shuffle(keys)
    for _ in range(2):
        for key in keys:
            assert found(node, origin, key) == origin._objects[key][0]
    assert len(remembered(node)) == (COUNT if how == "listed" else 0)
    assert origin.count("head") + origin.count("list") + origin.count("read") == asked


def test_cached_large_object_is_found_by_a_new_node(make_node: MakeNode) -> None:
    origin = MemoryOrigin()
    origin.put("b/large", os.urandom(3 << 20))
    node = make_node()
    assert read(node, origin, "b/large")
    assert found(make_node(), origin, "b/large") == origin._objects["b/large"][0]


def test_object_that_needs_a_request_is_not_found(make_node: MakeNode, tmp_path: Path) -> None:
    origin = filled(3)
    key = keys_of(origin)[0]
    node = make_node(consistency="60s")
    assert node.find_known(origin, key) is None  # nothing is cached
    node.metadata.stat(origin, key)
    assert node.find_known(origin, key) is None  # not here
    read(node, origin, key)
    assert node.find_known(origin, key) is not None
    metadata = node.metadata
    assert isinstance(metadata, MetadataCache)
    metadata._clock = lambda: time.time() + 61
    assert node.find_known(origin, key) is None  # expired
    metadata._clock = lambda: time.time() - 61
    assert node.find_known(origin, key) is None  # from the future
    assert make_node(consistency="always").find_known(origin, key) is None
    assert make_node(native=False).find_known(origin, key) is None
    several = [str(tmp_path / "cache"), str(tmp_path / "other")]
    assert make_node(cache_dir=several).find_known(origin, key) is None
    node = make_node()
    assert node.find_known(origin, key) is not None
    node.open_disks[0].failed = True
    assert node.find_known(origin, key) is None


def test_lookup_while_metadata_expires_is_not_kept(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The freshness was read before the numbers, so the result was valid after the expiry."""
    origin = filled(3)
    key = keys_of(origin)[0]
    node = make_node()
    read(node, origin, key)
    signals, freshness_of = node.open_disks[0].signals, MetadataCache.freshness_of

    def expire_next(*arguments: Any) -> Freshness:
        found = freshness_of(*arguments)
        signals.expire_metadata(time.time())
        return found

    monkeypatch.setattr(MetadataCache, "freshness_of", expire_next)
    found = node.find_known(origin, key)
    assert found is not None
    assert found.stamp.changes != signals.read().changes


def test_lookup_during_a_change_finds_nothing(make_node: MakeNode) -> None:
    origin = filled()
    node = make_node()
    list(node.metadata.list_all(origin, "b/set"))
    key = keys_of(origin)[0]
    read(node, origin, key)
    signals = node.open_disks[0].store.index.signals
    stamp = signals.read()
    signals.changed(1 << 40)
    for _ in range(COUNT):
        assert node.find_known(origin, key) is None
    assert len(remembered(node)) == 0  # the page may be about to change
    signals.changed(stamp.changes)
    assert node.find_known(origin, key) is not None
    signals.removed(1 << 40)
    assert node.find_known(origin, key) is None
    signals.removed(stamp.removals)
    assert node.find_known(origin, key) is not None


def unpack(node: CacheNode, origin: MemoryOrigin) -> list[str]:
    """Load all keys of a listing into the memory of a process, without the index; all are cached."""
    list(node.metadata.list_all(origin, "b/set"))
    keys = keys_of(origin)
    for key in keys:
        read(node, origin, key)
    for key in keys:
        assert node.find_known(origin, key) is not None
    assert len(remembered(node)) == len(keys)
    return keys


def test_write_of_another_process_is_visible_at_once(make_node: MakeNode) -> None:
    origin = filled()
    node = make_node()
    keys = unpack(node, origin)
    disk = node.open_disks[0]
    others = MetadataCache(
        PageMap(disk.store.index),
        disk.locks,
        max_age_seconds=60.0,
        on_changed=lambda *_: None,  # so that the old version stays here
        report=disk.report,
    )
    origin.put(keys[7], b"new")
    others.invalidate(origin, keys[7])
    assert node.find_known(origin, keys[7]) is None
    assert read(node, origin, keys[7]) == b"new"
    assert found(node, origin, keys[7]) == b"new"
    assert found(node, origin, keys[8]) == origin._objects[keys[8]][0]


def test_answer_to_another_process_is_used(make_node: MakeNode) -> None:
    origin = filled()
    node = make_node(consistency="60s")
    keys = unpack(node, origin)
    disk = node.open_disks[0]
    others = MetadataCache(
        PageMap(disk.store.index),
        disk.locks,
        max_age_seconds=60.0,
        on_changed=node.discard,
        report=disk.report,
        clock=lambda: time.time() + 100,
    )
    origin.put(keys[7], b"new")
    origin.delete([keys[9]])
    list(others.list_all(origin, "b/set"))
    for gone in (keys[7], keys[9]):
        assert node.find_known(origin, gone) is None
    assert found(node, origin, keys[8]) == origin._objects[keys[8]][0]


def test_evicted_object_is_not_found(make_node: MakeNode) -> None:
    origin = filled()
    node = make_node()
    keys = unpack(node, origin)
    disk = node.open_disks[0]
    first = node.find_known(origin, keys[0])
    assert first is not None
    disk.remove(first.found.entry.object_id)
    assert node.find_known(origin, keys[0]) is None
    assert found(node, origin, keys[1]) is not None


def test_page_of_level_replaces_contradicted_single_record(make_node: MakeNode) -> None:
    origin = filled(3)
    origin.put("b/set/deeper/x", b"x")
    keys = keys_of(origin)[:3]
    node = make_node()
    for key in keys:
        read(node, origin, key)
    old = node.metadata.stat(origin, keys[1])
    origin.put(keys[1], b"new")
    node.metadata.list_level(origin, "b/set")
    metadata = node.metadata
    assert isinstance(metadata, MetadataCache)
    pages, space = metadata._map, metadata._map.space(origin.identity)
    assert pages.look(lambda txn: pages.alone_in(txn, space, encode(keys[1]))) is None
    assert node.find_known(origin, keys[1]) is None
    assert node.find_native(origin, old) is None  # given up
    assert read(node, origin, keys[1]) == b"new"
    assert found(node, origin, keys[0]) == origin._objects[keys[0]][0]


# --- pages and records --------------------------------------------------------------------------------


def page(first: int, count: int, *, asked: float = 5.0) -> bytes:
    infos = [ObjectInfo(f"k/{n:05}", n, f"v{n}", float(n)) for n in range(first, first + count)]
    return pack_page([(info.key, info) for info in infos], sent_at=asked, through="z", root="k")


def test_page_with_many_lookups_is_unpacked() -> None:
    memory = PageMemory(look_ups=3)
    for _ in range(2):
        memory.note(b"s", b"at", memoryview(page(0, 10)), 1)
        assert memory.find(b"s", "k/00003", 1) is None
    memory.note(b"s", b"other", memoryview(page(10, 10)), 1)
    memory.note(b"s", b"at", memoryview(page(0, 10)), 1)
    assert memory.find(b"s", "k/00003", 1) == (3, "v3", 3.0, 5.0)
    assert memory.find(b"s", "k/00013", 1) is None
    assert memory.find(b"t", "k/00003", 1) is None
    assert memory.find(b"s", "k/00003", 2) is None  # something was changed
    memory.note(b"s", b"at", memoryview(page(0, 10)), 2)
    assert memory.find(b"s", "k/00003", 1) is None
    assert memory.find(b"s", "k/00003", 2) is None


def test_page_with_removed_keys_is_not_unpacked() -> None:
    memory = PageMemory(look_ups=1)
    memory.note(b"s", b"at", memoryview(Page(page(0, 10)).without([b"k/00003"])), 1)
    assert len(memory) == 0


def test_page_memory_is_bounded_and_keeps_its_pages() -> None:
    now = [0.0]
    memory = PageMemory(most_keys=25, look_ups=1, clock=lambda: now[0])
    for number in range(10):
        memory.note(b"s", b"%d" % number, memoryview(page(10 * number, 10)), 1)
    assert len(memory) == 30
    assert memory.find(b"s", "k/00029", 1) is not None
    assert memory.find(b"s", "k/00030", 1) is None
    now[0] = 59.0
    memory.note(b"s", b"7", memoryview(page(70, 10)), 1)
    assert memory.find(b"s", "k/00070", 1) is None
    now[0] = 60.0
    for _ in range(2):
        memory.note(b"s", b"7", memoryview(page(70, 10)), 1)
    assert memory.find(b"s", "k/00070", 1) is not None
    assert len(memory) == 10


@pytest.mark.parametrize("key", ["k", "k/ü\udc80", "k/" + "x" * 600])
def test_metadata_record_round_trip_is_equal(key: str) -> None:
    info = ObjectInfo(key, 2**40, '"ü-3"', 1.5)
    value = memoryview(pack_record(info, 7.25))
    assert unpack_record(value) == (info, 7.25)
    shown, asked = description_in_record(value)
    assert (ObjectInfo(key, *shown), asked) == (info, 7.25)
    with pytest.raises(ValueError, match="format"):
        unpack_record(memoryview(bytes([9]) + bytes(value[1:])))


def test_page_lookup_in_one_step_equals_lookup_in_steps() -> None:
    data = memoryview(Page(page(0, 500)).without([b"k/00007"]))
    whole = Page(data)
    for number in range(510):
        position = encode(f"k/{number:05}")
        asked, shown = description_in(data, position)
        assert asked == 5.0
        at = whole.find(position)
        info = None if at is None else whole.info(at, "k")
        assert info == (None if shown is None else ObjectInfo("k", *shown))
        assert (shown is None) == (number >= 500 or number == 7)


def test_immutable_object_is_found_with_consistency_always(make_node: MakeNode) -> None:
    origin = MemoryOrigin(immutable_below="b/set@commit/")
    keys = ["b/set@commit/x", "b/set/x"]
    for key in keys:
        origin.put(key, os.urandom(1000))
    node = make_node(consistency="always")
    contents = {key: read(node, origin, key) for key in keys}
    node = make_node(consistency="always")
    asked = len(origin.requests)
    assert found(node, origin, keys[0]) == contents[keys[0]]
    assert len(origin.requests) == asked
    assert node.find_known(origin, keys[1]) is None
