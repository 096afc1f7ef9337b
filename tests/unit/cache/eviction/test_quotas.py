"""Quotas of prefixes: the counts equal the cached bytes, and a quota fills with whole objects and stays full."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.computed import ComputedOrigin

from millrace.cache import catalog
from millrace.cache.eviction.evictor import Candidate
from millrace.cache.eviction.holdings import Holdings, Surveyor
from millrace.cache.node import CacheNode
from millrace.config import Amount
from millrace.store.records import BLOCK_BYTES, ObjectName
from millrace.store.segments import appended_bytes

pytestmark = pytest.mark.usefixtures("no_maintenance")

MakeNode = Callable[..., CacheNode]


def read(node: CacheNode, origin: ComputedOrigin, key: str, start: int = 0, stop: int | None = None) -> None:
    info = origin.head(key)
    stop = info.size if stop is None else stop
    reader = node.open_reader(origin, info)
    try:
        assert bytes(reader.read(start, stop)) == bytes(origin.expected(key, start, stop))
    finally:
        reader.close()


def whole_bytes(node: CacheNode) -> int:
    return sum(found.size for found in catalog.cached_objects(node) if found.complete)


def reported(node: CacheNode) -> Iterator[int]:
    """The bytes below the only prefix with a rule; every count must agree."""
    disk = node.open_disks[0]
    yield from (rule.used_bytes for rule in catalog.placed_rules(node))
    yield sum(found.cached_bytes for found in catalog.cached_objects(node))
    survey = Surveyor(disk.records, Holdings(disk.store)).current(disk.rules.current())
    yield from survey.used.values()


@pytest.mark.parametrize(
    ("blocks", "here"),
    [
        ([0], BLOCK_BYTES),
        ([2], 1),
        ([0, 2], BLOCK_BYTES + 1),
        ([0, 1], 2 * BLOCK_BYTES),
        ([0, 1, 2], 2 * BLOCK_BYTES + 1),
    ],
)
def test_short_last_block_counts_its_actual_bytes(make_node: MakeNode, blocks: list[int], here: int) -> None:
    size = 2 * BLOCK_BYTES + 1
    origin = ComputedOrigin({"b/logs/x": size})
    node = make_node(capacity="1GB")
    catalog.limit(node, (origin.identity, "b/logs"), quota=Amount(nbytes=1 << 30), ttl_seconds=None)
    for block in blocks:
        read(node, origin, "b/logs/x", block * BLOCK_BYTES, min(size, (block + 1) * BLOCK_BYTES))
    disk = node.open_disks[0]
    disk.write_down_uses()
    assert disk.store.index.used_bytes() == here
    assert set(reported(node)) == {here}
    assert catalog.free(node, None).nbytes == here


@pytest.mark.parametrize(
    ("size", "count", "room"),
    [
        (2 * BLOCK_BYTES, 10, 5.5),
        (2 * BLOCK_BYTES + 1, 10, 7.2),
        (9_000_000, 10, 6.7),
        (5_000_000, 16, 12.3),
        (50_000, 60, 20.01),
        (1_001, 600, 200.3),
    ],
)
def test_quota_fills_with_whole_objects_and_stays_full(make_node: MakeNode, size: int, count: int, room: float) -> None:
    origin = ComputedOrigin({f"b/logs/{number}": size for number in range(count)})
    node = make_node(capacity="1GB")
    quota = int(room * size)
    catalog.limit(node, (origin.identity, "b/logs"), quota=Amount(nbytes=quota), ttl_seconds=None)
    disk = node.open_disks[0]
    for _ in range(3):
        for number in range(count):
            read(node, origin, f"b/logs/{number}")
        disk.write_down_uses()
        disk.evictor._surveyor._due = 0.0
        disk.evictor.enforce(wait=True)
        assert disk.store.index.used_bytes() <= quota
        assert whole_bytes(node) >= quota * size // appended_bytes(size) - 2 * size  # small ones are aligned


def test_lower_quota_evicts_no_more_than_needed(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (1 << 20) + 1
    monkeypatch.setattr(
        "millrace.cache.eviction.holdings._SHARE", 0
    )  # the counts are looked up again all the time, as they
    monkeypatch.setattr("millrace.cache.eviction.holdings._LEAST_PAUSE_SECONDS", 0.0)  # are in whatever takes a second
    origin = ComputedOrigin({f"b/logs/{number}": size for number in range(20)})
    node = make_node(capacity="1GB")
    for number in range(20):
        read(node, origin, f"b/logs/{number}")
    catalog.limit(node, (origin.identity, "b/logs"), quota=Amount(nbytes=12 * size), ttl_seconds=None)
    node.open_disks[0].write_down_uses()
    node.open_disks[0].evictor.enforce(wait=True)
    assert 11 * size <= whole_bytes(node) <= 12 * size


def test_lower_quota_evicts_small_objects_in_steps(make_node: MakeNode) -> None:
    size = 20_000
    origin = ComputedOrigin({f"b/logs/{number}": size for number in range(200)})
    node = make_node(capacity="1GB")
    for quota in (200 * size + 200 * 64, 180 * size):
        catalog.limit(node, (origin.identity, "b/logs"), quota=Amount(nbytes=quota), ttl_seconds=None)
        for number in range(200):
            read(node, origin, f"b/logs/{number}")
        node.open_disks[0].write_down_uses()
        node.open_disks[0].evictor._surveyor._due = 0.0
        node.open_disks[0].evictor.enforce(wait=True)
        assert quota * 3 // 4 <= whole_bytes(node) <= quota


def test_full_quota_is_reported_once(make_node: MakeNode, caplog: pytest.LogCaptureFixture) -> None:
    size = (1 << 20) + 1
    origin = ComputedOrigin({f"b/{folder}/{number}": size for number in range(6) for folder in ("logs", "train")})
    node = make_node(capacity=5 * size)
    catalog.limit(node, (origin.identity, "b/logs"), quota=Amount(nbytes=2 * size + 9), ttl_seconds=None)
    caplog.set_level(logging.WARNING, "millrace")
    for number in range(6):
        read(node, origin, f"b/logs/{number}")
    (reported,) = caplog.messages
    assert "quota of b/logs" in reported
    assert "2.10 MB" in reported
    for number in range(6):
        read(node, origin, f"b/train/{number}")
    reported = caplog.messages[1]
    assert len(caplog.messages) == 2
    assert "the quota of" not in reported
    assert "5.24 MB" in reported


def test_concurrent_readers_fill_a_quota(make_node: MakeNode) -> None:
    size = 2_000_000
    origin = ComputedOrigin({f"b/logs/{number}": size for number in range(40)})
    node = make_node(capacity="1GB")
    quota = 12 * size + 9
    catalog.limit(node, (origin.identity, "b/logs"), quota=Amount(nbytes=quota), ttl_seconds=None)
    with ThreadPoolExecutor(16) as readers:
        list(readers.map(lambda number: read(node, origin, f"b/logs/{number}"), range(40)))
    disk = node.open_disks[0]
    disk.write_down_uses()
    disk.evictor._surveyor._due = 0.0
    disk.evictor.enforce(wait=True)
    assert quota - 2 * size <= disk.store.index.used_bytes() <= quota


def test_pin_over_its_quota_evicts_no_more_when_another_block_takes_the_space_first(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, count = BLOCK_BYTES, 6
    origin = ComputedOrigin({f"b/train/{number}": size for number in range(count)})
    node = make_node(capacity="1GB")
    catalog.limit(node, (origin.identity, "b/train"), quota=Amount(nbytes=count * size), ttl_seconds=None)
    for number in range(count):
        read(node, origin, f"b/train/{number}")
    disk = node.open_disks[0]
    disk.write_down_uses()
    catalog.pin(node, (origin.identity, "b/train/kept"))
    evictor = disk.evictor
    reserve, taken_first = evictor._reserve, iter([False, False])
    monkeypatch.setattr(evictor, "_reserve", lambda *a, **k: next(taken_first, True) and reserve(*a, **k))
    name = ObjectName(origin.identity, "b/train/kept/0", "1")

    assert evictor.reserve(2 * size, Candidate(b"kept".ljust(16), 2 * size, lambda: name, lambda: "b/train/kept"))
    assert whole_bytes(node) == (count - 2) * size
    assert evictor._surveyor.current(disk.rules.current()).used == {(origin.identity, "b/train"): count * size}
