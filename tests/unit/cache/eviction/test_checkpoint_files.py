"""Checkpoint files in the cache: spare space only, evicted first, and no evidence against the data sets."""

import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from tests.support.computed import ComputedOrigin

from millrace.cache import catalog
from millrace.cache.disk import HeldBlocks
from millrace.cache.eviction import copies
from millrace.cache.node import CacheNode, cache_node, close_nodes
from millrace.config import Amount, resolve

pytestmark = pytest.mark.usefixtures("no_maintenance")

SIZE = (1 << 20) + 4096  # just large enough for its own file
SMALL = 60_000
SPARE = 20_000  # for the headers of segments

MakeNode = Callable[..., CacheNode]


def train(count: int, size: int = SIZE, *, kind: str = "part") -> dict[str, int]:
    # In one folder, so that all are of one data set: else an idle one might be evicted as a whole.
    return {f"b/train/{kind}-{number:04}.parquet": size for number in range(count)}


def checkpoint(step: int, count: int, size: int = SIZE) -> dict[str, int]:
    return {f"b/run/step-{step:04}/data-{number:04}.millrace": size for number in range(count)}


@pytest.fixture
def make_node(tmp_path: Path) -> MakeNode:
    def make(capacity: int) -> CacheNode:
        options = {"cache_dir": str(tmp_path / "cache"), "min_free": 0, "capacity": capacity}
        node = cache_node(resolve(options, environ={}, file={}))
        for disk in node.open_disks:
            disk.held = HeldBlocks(0)
        return node

    return make


def read(node: CacheNode, origin: ComputedOrigin, keys: Iterable[str]) -> int:
    """Read objects; returns how many were completely cached before."""
    hits = 0
    for key in keys:
        info = origin.head(key)
        if node.find_native(origin, info) is not None:
            hits += 1
            continue
        reader = node.open_reader(origin, info)
        before = origin.bytes_read
        assert bytes(reader.read(0, info.size)) == bytes(origin.expected(key, 0, info.size))
        hits += origin.bytes_read == before
        reader.close()
    return hits


def cached(node: CacheNode, keys: Mapping[str, int]) -> int:
    return sum(entry.complete and entry.name.key in keys for entry in node.entries())


@pytest.mark.parametrize("size", [SIZE, SMALL])
def test_training_data_replaces_checkpoint_files_first(make_node: MakeNode, size: int) -> None:
    old, saved, new = train(6, size), checkpoint(1, 4, size), train(8, size, kind="new")
    origin = ComputedOrigin({**old, **saved, **new})
    node = make_node(10 * size + SPARE)
    read(node, origin, [*old, *saved])
    assert (cached(node, old), cached(node, saved)) == (6, 4)
    read(node, origin, new)
    assert (cached(node, old), cached(node, saved)) == (6, 0)
    assert cached(node, new) >= 3


@pytest.mark.parametrize("size", [SIZE, SMALL])
def test_restore_into_a_full_cache_evicts_no_training_data(make_node: MakeNode, size: int) -> None:
    old, saved = train(10, size), checkpoint(1, 10, size)
    origin = ComputedOrigin({**old, **saved})
    node = make_node(10 * size + SPARE)
    read(node, origin, old)
    for _ in range(5):
        read(node, origin, saved)
    assert (cached(node, old), cached(node, saved)) == (10, 0)


def test_restore_evicts_no_pinned_data(make_node: MakeNode) -> None:
    old, saved = train(10), checkpoint(1, 10)
    origin = ComputedOrigin({**old, **saved})
    node = make_node(10 * SIZE)
    catalog.pin(node, (origin.identity, "b/train"))
    read(node, origin, old)
    read(node, origin, saved)
    assert (cached(node, old), cached(node, saved)) == (10, 0)


def test_pinned_checkpoint_is_stored_and_stays(make_node: MakeNode) -> None:
    old, saved, new = train(10), checkpoint(1, 3), train(20, kind="new")
    origin = ComputedOrigin({**old, **saved, **new})
    node = make_node(10 * SIZE)
    read(node, origin, old)
    catalog.pin(node, (origin.identity, "b/run/step-0001"))
    read(node, origin, saved)
    assert cached(node, saved) == 3
    read(node, origin, new)
    assert cached(node, saved) == 3


def test_newer_checkpoint_replaces_the_files_of_an_idle_one(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, first, second = train(6), checkpoint(1, 4), checkpoint(2, 4)
    origin = ComputedOrigin({**old, **first, **second})
    node = make_node(10 * SIZE)
    read(node, origin, [*old, *first])
    read(node, origin, second)  # while the first one may still be in use by other ranks
    assert (cached(node, old), cached(node, first), cached(node, second)) == (6, 4, 0)
    monkeypatch.setattr(copies, "_RESTORE_SECONDS", -2.0)  # times of use are in whole seconds
    # Another manager reads a little later: a refusal holds for one second.
    node.open_disks[0].evictor._refused_objects.clear()
    read(node, origin, second)
    assert cached(node, old) == 6
    assert cached(node, second) > 0


def test_checkpoint_files_are_recognised_after_a_rebuild_of_the_index(make_node: MakeNode, tmp_path: Path) -> None:
    old, saved, new = train(6), checkpoint(1, 4), train(8, kind="new")
    origin = ComputedOrigin({**old, **saved, **new})
    node = make_node(10 * SIZE)
    read(node, origin, [*old, *saved])
    close_nodes()
    for file in (tmp_path / "cache" / "millrace" / "local" / "index").iterdir():
        file.unlink()
    node = make_node(10 * SIZE)
    assert (cached(node, old), cached(node, saved)) == (6, 4)
    read(node, origin, new)
    assert (cached(node, old), cached(node, saved)) == (6, 0)


def test_lower_capacity_evicts_checkpoint_files_first(make_node: MakeNode) -> None:
    old, saved = train(6), checkpoint(1, 6)
    origin = ComputedOrigin({**old, **saved})
    node = make_node(20 * SIZE)
    read(node, origin, [*saved, *old])
    catalog.resize(node, Amount(nbytes=6 * SIZE))
    assert (cached(node, old), cached(node, saved)) == (6, 0)


@pytest.mark.parametrize("size", [SIZE, SMALL])
def test_removed_checkpoint_files_are_dropped_and_no_others(make_node: MakeNode, size: int) -> None:
    old, first, second = train(3, size), checkpoint(1, 3, size), checkpoint(2, 3, size)
    origin = ComputedOrigin({**old, **first, **second})
    node = make_node(20 * size + SPARE)
    read(node, origin, [*old, *first, *second])
    node.drop_checkpoint_files("another origin", list(first))
    node.drop_checkpoint_files(origin.identity, [*first, *old])
    assert (cached(node, old), cached(node, first), cached(node, second)) == (3, 0, 3)


# --- a trace: epochs, and restores between and during them ----------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("restores", [False, True], ids=["alone", "with restores"])
def test_restores_during_epochs_cost_less_than_two_points_of_hits(make_node: MakeNode, restores: bool) -> None:
    # A data set of twice the cache, of which the optimum is half. Each restore reads two and a half times the cache.
    data = train(80)
    saved = [checkpoint(step, 100) for step in range(4)]
    everything = dict(data)
    for each in saved:
        everything.update(each)
    origin = ComputedOrigin(everything)
    node = make_node(40 * SIZE)
    random_order = random.Random(0)
    read(node, origin, data)
    hits = 0
    for step in range(4):
        order = list(data)
        random_order.shuffle(order)
        if restores:
            read(node, origin, saved[step])
        hits += read(node, origin, order[:40])
        if restores:
            read(node, origin, saved[step - 1])
        hits += read(node, origin, order[40:])
    assert hits / (4 * len(data)) > 0.5 - 0.02
