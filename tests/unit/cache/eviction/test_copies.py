"""Copies of data that other nodes own: they use spare space only, and are evicted first, as long as they are copies."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.computed import ComputedOrigin

from millrace.cache import catalog
from millrace.cache.counters import Counters
from millrace.cache.disk import HeldBlocks
from millrace.cache.eviction import keep_policy
from millrace.cache.eviction.copies import Copies, Keep
from millrace.cache.eviction.policy import Group
from millrace.cache.eviction.usage import Read, UsageLog
from millrace.cache.eviction.usage_records import UsageRecords, group_number
from millrace.cache.node import CacheNode
from millrace.cache.reading.fetching import DirectSource, Fetched
from millrace.config import Amount, resolve
from millrace.origin import ObjectInfo, Origin
from millrace.store.index import Index
from millrace.store.records import Entry, ObjectName, object_id, segment_unit

pytestmark = pytest.mark.usefixtures("no_maintenance")

SIZE = (1 << 20) + 4096  # just large enough for its own file
SMALL = 60_000


def objects(count: int, kind: str, size: int = SIZE, *, folder: str = "train") -> dict[str, int]:
    # In one folder, so that all are of one data set: else an idle one might be evicted as a whole.
    return {f"b/{folder}/{kind}-{number:04}": size for number in range(count)}


def kind_of(key: str) -> str:
    return key.rpartition("/")[2].partition("-")[0]


class Placed:
    """A placement by hand: another node owns objects of these kinds."""

    def __init__(self, origin: ComputedOrigin, *of_others: str) -> None:
        self.origin = origin
        self.of_others = set(of_others)

    def source(self, origin: Origin, info: ObjectInfo, counters: Counters | None) -> "PlacedSource":
        return PlacedSource(self, DirectSource(origin, info, counters), info.key)

    def is_of_others(self, key: str) -> bool:
        return kind_of(key) in self.of_others

    def still_a_copy(self, name: bytes, size: int) -> bool:
        infos = [self.origin.head(key) for key in self.origin._sizes]
        keys = {object_id(self.origin.identity, info.key, info.version, info.size): info.key for info in infos}
        return self.is_of_others(keys[name])


class PlacedSource:
    def __init__(self, placed: Placed, source: DirectSource, key: str) -> None:
        self._placed, self._source, self._key = placed, source, key

    def read(self, start: int, stop: int) -> Fetched:
        fetched = self._source.read(start, stop)
        return fetched._replace(keep=Keep.COPY if self._placed.is_of_others(self._key) else Keep.OWNED)

    def fetches_through_peer(self, start: int) -> bool:
        return False


MakePlacedNode = Callable[..., CacheNode]


@pytest.fixture
def make_node(tmp_path: Path) -> MakePlacedNode:
    def make(placed: Placed, **options: object) -> CacheNode:
        node = CacheNode(
            resolve({"cache_dir": str(tmp_path / "cache"), "min_free": 0, **options}, environ={}, file={}),
            source=placed.source,
        )
        node.distinguish_copies(placed.still_a_copy)
        node.open_disks[0].held = HeldBlocks(0)
        return node

    return make


def read(node: CacheNode, origin: ComputedOrigin, *keys: str) -> None:
    for key in keys:
        info = origin.head(key)
        found = node.find_native(origin, info)
        if found is None:
            reader = node.open_reader(origin, info)
            assert bytes(reader.read(0, info.size)) == bytes(origin.expected(key, 0, info.size))
            reader.close()


def here(node: CacheNode, *kinds: str) -> list[int]:
    """The number of cached objects of each kind."""
    keys = [entry.name.key for entry in node.entries() if entry.complete]
    return [sum(kind_of(key) == kind for key in keys) for kind in kinds]


@pytest.mark.parametrize("size", [SIZE, SMALL])
def test_new_owned_data_evict_the_copies_first_and_then_by_the_usual_policy(
    make_node: MakePlacedNode, size: int
) -> None:
    origin = ComputedOrigin(objects(18, "own", size) | objects(2, "copied", size) | objects(6, "new", size))
    node = make_node(Placed(origin, "copied"), capacity=20 * size + 20_000)
    read(node, origin, *objects(18, "own"), *objects(2, "copied"))
    assert here(node, "own", "copied") == [18, 2]
    read(node, origin, *objects(6, "new"))
    assert here(node, "own", "copied") == [18, 0]
    # Only in the space of the copies: these are not more valuable than the others.
    assert here(node, "new") == [2]
    assert node.disks()[0][1] <= 20 * size + 20_000


def test_eviction_removes_only_as_many_copies_as_needed(make_node: MakePlacedNode) -> None:
    origin = ComputedOrigin(objects(10, "own") | objects(10, "copied") | objects(3, "new"))
    node = make_node(Placed(origin, "copied"), capacity=20 * SIZE)
    read(node, origin, *objects(10, "own"), *objects(10, "copied"), *objects(3, "new"))
    assert here(node, "own", "copied", "new") == [10, 7, 3]


@pytest.mark.parametrize("size", [SIZE, SMALL])
def test_copies_evict_nothing_however_many_there_are(make_node: MakePlacedNode, size: int) -> None:
    origin = ComputedOrigin(objects(6, "own", size) | objects(30, "copied", size) | objects(30, "more", size))
    node = make_node(Placed(origin, "copied", "more"), capacity=10 * size)
    read(node, origin, *objects(6, "own"))
    for _ in range(3):
        read(node, origin, *objects(30, "copied"))
    [copied] = here(node, "copied")
    assert 3 <= copied <= 4
    read(node, origin, *objects(30, "more"))
    assert here(node, "own", "copied", "more") == [6, copied, 0]


@pytest.mark.parametrize("size", [SIZE, SMALL])
def test_copy_that_becomes_owned_loses_its_mark(make_node: MakePlacedNode, size: int) -> None:
    origin = ComputedOrigin(objects(8, "own", size) | objects(2, "copied", size) | objects(6, "new", size))
    placed = Placed(origin, "copied")
    node = make_node(placed, capacity=10 * size + 20_000)
    read(node, origin, *objects(8, "own"), *objects(2, "copied"))
    placed.of_others.clear()
    read(node, origin, *objects(6, "new"))
    assert here(node, "own", "copied", "new") == [8, 2, 0]


@pytest.mark.parametrize("size", [SIZE, SMALL])
def test_units_of_a_joined_member_are_marked_as_copies(make_node: MakePlacedNode, size: int) -> None:
    moved = objects(4, "moved", size, folder="elsewhere")  # so that small ones have a separate segment
    origin = ComputedOrigin(objects(6, "own", size) | moved | objects(6, "new", size))
    placed = Placed(origin)
    node = make_node(placed, capacity=10 * size + 20_000)
    read(node, origin, *moved, *objects(6, "own"))
    disk = node.open_disks[0]
    assert disk.mark_copies() == 0
    placed.of_others = {"moved"}
    assert disk.mark_copies() == (4 if size == SIZE else 1)
    assert disk.mark_copies() == 0
    read(node, origin, *objects(6, "new"))
    assert here(node, "own", "moved", "new") == [6, 0, 4]


def test_segment_with_owned_objects_is_not_a_copy(make_node: MakePlacedNode) -> None:
    origin = ComputedOrigin(objects(6, "own", SMALL) | objects(1, "moved", SMALL))
    placed = Placed(origin)
    node = make_node(placed, capacity=10 * SMALL)
    read(node, origin, *objects(6, "own", SMALL), *objects(1, "moved", SMALL))
    placed.of_others = {"moved"}
    assert node.open_disks[0].mark_copies() == 0


def test_hot_copy_competes_like_an_owned_unit(make_node: MakePlacedNode) -> None:
    origin = ComputedOrigin(objects(9, "own") | {"b/train/copied-a": 5 << 20} | objects(9, "new"))
    placed = Placed(origin, "copied")
    node = make_node(placed, capacity=9 * SIZE + (5 << 20))
    read(node, origin, *objects(9, "own"))
    info = origin.head("b/train/copied-a")
    reader = node.open_reader(origin, info)
    reader.read(0, 1)  # its first block as a copy,
    placed.of_others.clear()
    reader.read(4 << 20, info.size)  # its second when it is hot
    reader.close()
    placed.of_others = {"copied"}
    read(node, origin, *objects(9, "new"))
    assert here(node, "copied") == [1]


@pytest.mark.parametrize("size", [SIZE, SMALL])
def test_node_without_cluster_has_no_copies(make_node: MakePlacedNode, size: int) -> None:
    origin = ComputedOrigin(objects(8, "own", size) | objects(2, "copied", size) | objects(6, "new", size))
    node = make_node(Placed(origin, "copied"), capacity=10 * size + 20_000)
    node.distinguish_copies(None)
    read(node, origin, *objects(8, "own"), *objects(2, "copied"), *objects(6, "new"))
    assert node.open_disks[0].mark_copies() == 0
    assert here(node, "own", "copied", "new") == [8, 2, 0]


def test_client_that_owns_nothing_has_no_copies(make_node: MakePlacedNode) -> None:
    old, new = objects(12, "old"), objects(12, "new", folder="elsewhere")
    origin = ComputedOrigin(old | new)
    node = make_node(Placed(origin, "old", "new"), capacity=10 * SIZE)
    node.distinguish_copies(None)  # as a client of a cluster does
    read(node, origin, *old)
    for _ in range(12):  # with so few residents, draws may be unlucky for some epochs
        read(node, origin, *new)
        if here(node, "new") >= [8]:
            break
    assert here(node, "new") >= [8]


def test_pinned_copy_stays_when_owned_data_is_evicted(make_node: MakePlacedNode) -> None:
    origin = ComputedOrigin(objects(7, "own") | objects(2, "kept") | objects(1, "copied") | objects(6, "new"))
    node = make_node(Placed(origin, "kept", "copied"), capacity=10 * SIZE)
    for key in objects(2, "kept"):
        catalog.pin(node, (origin.identity, key))
    read(node, origin, *objects(7, "own"), *objects(2, "kept"), *objects(1, "copied"), *objects(6, "new"))
    assert here(node, "own", "kept", "copied", "new") == [7, 2, 0, 1]
    catalog.resize(node, Amount(nbytes=2 * SIZE))
    assert here(node, "own", "kept", "copied", "new") == [0, 2, 0, 0]


@pytest.mark.parametrize("size", [SIZE, SMALL])
def test_lower_capacity_evicts_copies_first(make_node: MakePlacedNode, size: int) -> None:
    origin = ComputedOrigin(objects(6, "own", size) | objects(6, "copied", size))
    node = make_node(Placed(origin, "copied"), capacity=20 * size)
    read(node, origin, *objects(6, "copied"), *objects(6, "own"))
    catalog.resize(node, Amount(nbytes=6 * size + 10_000))
    assert here(node, "own", "copied") == [6, 0]


def test_candidate_over_quota_replaces_copies_of_its_prefix(make_node: MakePlacedNode) -> None:
    own, new = objects(2, "own", folder="logs"), objects(2, "new", folder="logs")
    copied, others = objects(1, "copied", folder="logs"), objects(4, "other")
    origin = ComputedOrigin(own | new | copied | others)
    node = make_node(Placed(origin, "copied", "other"), capacity=20 * SIZE)
    catalog.limit(node, (origin.identity, "b/logs"), quota=Amount(nbytes=3 * SIZE), ttl_seconds=None)
    read(node, origin, *others, *own, *copied)
    assert here(node, "other", "own", "copied") == [4, 2, 1]
    read(node, origin, *new)
    assert here(node, "other", "own", "copied", "new") == [4, 2, 0, 1]


_OTHER_PROCESS = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_copies import Placed, objects, read, SIZE, SMALL
from millrace.cache.node import CacheNode
from millrace.config import resolve
from tests.support.computed import ComputedOrigin
from millrace.cache.node import close_nodes

size = int(sys.argv[3])
origin = ComputedOrigin(objects(4, "copied", size))
placed = Placed(origin, "copied")
options = resolve({"cache_dir": sys.argv[1], "min_free": 0, "capacity": 10 * size + 20_000}, environ={}, file={})
node = CacheNode(options, source=placed.source)
read(node, origin, *objects(4, "copied"))
close_nodes()
"""


@pytest.mark.parametrize("size", [SIZE, SMALL])
def test_copy_of_another_process_is_evicted_first(make_node: MakePlacedNode, tmp_path: Path, size: int) -> None:
    origin = ComputedOrigin(objects(6, "own", size) | objects(4, "copied", size) | objects(6, "new", size))
    node = make_node(Placed(origin, "copied"), capacity=10 * size + 20_000)
    read(node, origin, *objects(6, "own"))
    command = [sys.executable, "-c", _OTHER_PROCESS, str(tmp_path / "cache"), str(Path(__file__).parent), str(size)]
    subprocess.run(command, check=True, timeout=300)
    assert here(node, "copied") == [4]
    read(node, origin, *objects(6, "new"))
    assert here(node, "own", "copied", "new") == [6, 0, 4]


# --- the records ----------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path) -> Index:
    (tmp_path / "index").mkdir()
    return Index(tmp_path / "index")


def entry(number: int, nbytes: int = 100) -> Entry:
    name = ObjectName("o", f"b/f/{number}", "1")
    return Entry(object_id("o", name.key, "1", nbytes), 1, nbytes, nbytes, 1, packed_name=name.pack())


def kept(records: UsageRecords, *entries: Entry, copy: bool) -> None:
    log = UsageLog()
    for each in entries:
        log.note(Read(each, 0, hit=False, kept=True, group=lambda: "g", copy=copy))
    records.note(log.drain(), capacity_bytes=10_000, now=0.0)


def test_last_stored_bytes_decide_the_copy_mark(index: Index) -> None:
    records = UsageRecords(index, keep_policy, seed=1)
    kept(records, entry(1), entry(2), copy=True)
    assert records.copy_count() == 2
    kept(records, entry(2), copy=False)
    assert [record.unit.key for record in records.draw_copies(8).records] == [entry(1).object_id]
    assert {record.unit.key: record.unit.copy for record in records.draw(8).records} == {
        entry(1).object_id: True,
        entry(2).object_id: False,
    }
    records.gone([entry(1).object_id])
    assert records.copy_count() == 0


def test_mark_of_uncached_unit_is_ignored(index: Index) -> None:
    records = UsageRecords(index, keep_policy, seed=1)
    records.mark_copies([b"unknown"], copy=True)
    assert records.copy_count() == 0


def test_rebuild_recognises_segments_of_copies_by_group(index: Index) -> None:
    records = UsageRecords(index, keep_policy, seed=1)
    units = [(segment_unit(3), 3, 100, "g"), (segment_unit(4), 4, 100, "g (copies)")]
    records.enter_unknown(units, now=0.0)
    assert [record.segment for record in records.draw_copies(8).records] == [4]


def test_ghost_that_is_found_stored_again_returns_with_its_uses(index: Index) -> None:
    records = UsageRecords(index, keep_policy, seed=1)
    one, other = entry(1), entry(2)
    kept(records, one, other, copy=False)
    for number in range(3):
        log = UsageLog()
        # Traffic, or the two reads were one run.
        log.note(Read(entry(3 + number, 10_000), 10_000, hit=True, kept=True, group=lambda: "others"))
        log.note(Read(one, 100, hit=True, kept=True))
        records.note(log.drain(), capacity_bytes=10_000, now=0.0)
    used = records.find([one.object_id]).records
    assert used[0].unit.uses > 2
    group = records.group(group_number("g"))
    assert (group.units, group.bytes) == (2, 200)
    for _ in range(3):
        records.gone([one.object_id])
        records.enter_unknown([(one.object_id, 0, 100, "g")], now=0.0)  # before its process notes that it was stored
    assert records.find([one.object_id]).records == used
    assert records.group(group_number("g")) == group
    assert records.counts()[1] == 0  # and no ghost of it is left


def test_draw_of_objects_that_are_no_longer_copies_clears_their_marks(index: Index) -> None:
    records = UsageRecords(index, keep_policy, seed=1)
    copies = Copies(index, records)
    kept(records, *map(entry, range(500)), copy=True)
    assert not copies.draw(8).records  # in a node alone
    assert records.copy_count() == 500
    others = {entry(number).object_id for number in random.Random(1).sample(range(500), 5)}
    copies.still_a_copy = lambda name, size: name in others
    seen: set[bytes] = set()
    for _ in range(100):
        drawn = copies.draw(8)
        assert drawn.records
        assert all(drawn.groups[record.unit.group] != Group(last=0) for record in drawn.records)
        seen |= {record.unit.key for record in drawn.records}
    assert seen == others
    copies.still_a_copy = lambda name, size: False
    assert not copies.draw(8).records
    assert records.copy_count() == 0
