"""Three real nodes in one process, each with its own cache, data plane and readers, over one origin that counts."""

from __future__ import annotations

import itertools
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.origins import MemoryOrigin
from tests.support.planes import Views

from millrace.cache.attribution import NO_READS
from millrace.cache.counters import NAMES
from millrace.cache.measures import samples_of
from millrace.cache.node import CacheNode
from millrace.cluster.breakers import Breakers
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.server import PlaneServer
from millrace.cluster.membership import Member, MemberState, NodeLink, View
from millrace.cluster.origins import Origins
from millrace.cluster.serving import BlockService
from millrace.cluster.source import ClusterSources
from millrace.config import resolve
from millrace.errors import ObjectChangedError
from millrace.events import Event
from millrace.figures import hit_ratio
from millrace.metrics import JOB_BYTES, SAVED_BYTES
from millrace.node.measures import Prices
from millrace.origin import ObjectInfo
from millrace.store.records import BLOCK_BYTES, object_id

pytestmark = pytest.mark.usefixtures("patient_peers")

TOKEN = "a-secret-of-the-cluster"
SIZES = [3 * BLOCK_BYTES + 1000, BLOCK_BYTES, 5 * BLOCK_BYTES, 100_000, 2000, 1 << 20, 700_000, 2 * BLOCK_BYTES - 1]


class Node:
    """One node: a store, a server of it, and readers on the same machine."""

    def __init__(self, number: int, directory: Path, nodes: Nodes) -> None:
        self.id = f"node-{number}"
        self.options = resolve(
            {"cache_dir": str(directory), "members": "none", "min_free": 0, "capacity": "200MB"}, environ={}, file={}
        )
        link = NodeLink(views=nodes.views, folder="local", member_id=self.id, token=TOKEN, replicas=nodes.replicas)
        self.cluster = Cluster(link, breakers=Breakers(directory.with_suffix(".breakers"), name_of=link.address_of))
        self.serving_cluster = Cluster(
            link, breakers=Breakers(directory.with_suffix(".breakers"), name_of=link.address_of)
        )
        self.serving = CacheNode(self.options, source=ClusterSources(self.serving_cluster, serving=True))
        self.reading = CacheNode(self.options, source=ClusterSources(self.cluster))
        origins = Origins([nodes.origin] if nodes.has_access(number) else [], environment=False)
        service = BlockService(self.serving, self.serving_cluster, origins)
        self.server = PlaneServer(service, host="127.0.0.1", token=TOKEN)
        self.server.start()

    def member(self, state: MemberState = MemberState.HERE) -> Member:
        return Member(id=self.id, address=self.server.address, state=state)

    def close(self) -> None:
        self.server.close()
        for cluster in (self.cluster, self.serving_cluster):
            cluster.close()
        for node in (self.reading, self.serving):
            node.close()


class Nodes:
    """Nodes over an origin in memory with an object of each of `SIZES`."""

    def __init__(self, directory: Path, *, replicas: int, has_access: Callable[[int], bool]) -> None:
        self.directory = directory
        self.replicas = replicas
        self.has_access = has_access
        self.views = Views()
        self.origin = MemoryOrigin()
        self.data: dict[str, bytes] = {}
        for number, size in enumerate(SIZES):
            key = f"bucket/{number}"
            self.data[key] = random.Random(number).randbytes(size)
            self.origin.put(key, self.data[key])
        self.infos = {key: self.origin.head(key) for key in self.data}
        self.all: list[Node] = []

    def start(self, count: int) -> None:
        for _ in range(count):
            number = len(self.all)
            self.all.append(Node(number, self.directory / f"cache-{number}", self))
        self.views.now = View.of(node.member() for node in self.all)

    def read(self, node: Node, info: ObjectInfo) -> bytes:
        reader = node.reading.open_reader(self.origin, info)
        try:
            return bytes(memoryview(reader.read(0, info.size)).cast("B"))
        finally:
            reader.close()

    def epoch(self, nodes: list[Node], *, seed: int = 0) -> int:
        """Every node reads everything at the same time, each in its own order; returns the bytes read from the origin."""
        before = self.origin.bytes_read()

        def run(number: int) -> list[str]:
            keys = sorted(self.infos)
            random.Random(seed + number).shuffle(keys)
            return [key for key in keys if self.read(nodes[number], self.infos[key]) != self.data[key]]

        with ThreadPoolExecutor(len(nodes)) as pool:
            assert list(pool.map(run, range(len(nodes)))) == [[]] * len(nodes)
        return self.origin.bytes_read() - before

    def owner(self, key: str) -> str:
        info = self.infos[key]
        name = object_id(self.origin.identity, key, info.version, info.size)
        return self.all[0].cluster.placement().order(name)[0].id

    def counted(self, name: str) -> int:
        return sum(node.reading.counters()[name] for node in self.all)

    def settle(self) -> None:
        for node in self.all:
            assert node.cluster.handover.settle(300)
            assert node.serving_cluster.handover.settle(300)

    def close(self) -> None:
        for node in self.all:
            node.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def build(count: int = 3, *, replicas: int = 1, has_access: Callable[[int], bool] = lambda number: True) -> Nodes:
        made.append(Nodes(tmp_path, replicas=replicas, has_access=has_access))
        made[-1].start(count)
        return made[-1]

    yield build
    for nodes in made:
        nodes.close()


TOTAL = sum(SIZES)


def test_read_by_all_nodes_uses_the_origin_once(make: Callable[..., Nodes]) -> None:
    nodes = make()
    assert len({nodes.owner(key) for key in nodes.infos}) == 3
    assert nodes.epoch(nodes.all) == TOTAL
    assert nodes.epoch(nodes.all, seed=9) == 0
    assert nodes.counted("origin_bytes") == TOTAL
    assert nodes.counted("peer_failures") == 0
    assert nodes.counted("peer_bytes") == nodes.counted("served_bytes") > 0


def test_read_from_owner_is_linked_to_its_requests_at_the_origin(
    make: Callable[..., Nodes], caplog: pytest.LogCaptureFixture
) -> None:
    nodes = make()
    reader = nodes.all[0]
    key = next(key for key in nodes.infos if nodes.owner(key) != reader.id)
    caplog.set_level(logging.DEBUG, "millrace")
    nodes.read(reader, nodes.infos[key])
    received, waited, requested = (
        set(re.findall(rf"{key}: {text} .*\(fetch ([\w, -]+)\)", caplog.text))
        for text in (r"bytes \d+ to \d+ from peer node-\d", r"waited", r"bytes \d+ to \d+ from the origin")
    )
    assert received
    assert received == requested
    assert received <= set(", ".join(waited).split(", "))


def test_read_by_many_at_once_uses_the_origin_once(make: Callable[..., Nodes]) -> None:
    nodes = make()
    info = nodes.infos["bucket/2"]
    begin = threading.Barrier(12)

    def run(number: int) -> bytes:
        begin.wait()
        return nodes.read(nodes.all[number % 3], info)

    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(run, range(12))) == {nodes.data["bucket/2"]}
    assert nodes.origin.bytes_read() == info.size


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_read_of_random_ranges_returns_the_right_bytes(make: Callable[..., Nodes], replicas: int) -> None:
    nodes = make(4, replicas=replicas)
    nodes.origin.before_read = lambda *_: time.sleep(0.02)

    def run(number: int) -> list[str]:
        rnd, node = random.Random(number), nodes.all[number % 4]
        wrong = []
        for key in rnd.sample(sorted(nodes.infos), len(nodes.infos)):
            reader = node.reading.open_reader(nodes.origin, nodes.infos[key])
            cuts = [0, *sorted(rnd.sample(range(1, reader.size), 5)), reader.size]
            for start, stop in rnd.sample(list(itertools.pairwise(cuts)), 6):
                reader.prefetch(range(rnd.randrange(2)))
                if bytes(memoryview(reader.read(start, stop)).cast("B")) != nodes.data[key][start:stop]:
                    wrong.append(key)
            reader.close()
        return wrong

    before = nodes.origin.bytes_read()
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(run, range(16))) == [[]] * 16
    assert nodes.origin.bytes_read() - before == sum(SIZES)


def test_read_after_an_owners_death_fetches_its_share_only(make: Callable[..., Nodes], events: list[Event]) -> None:
    nodes = make()
    first, second, third = nodes.all
    assert nodes.epoch([first]) == TOTAL
    second.server.close()
    lost = sum(info.size for key, info in nodes.infos.items() if nodes.owner(key) == second.id)
    # The first has copies of all that it read; the third has to do without the second.
    assert nodes.epoch([first, third]) <= lost
    assert nodes.epoch([first, third]) == 0
    failed = [event.subject for event in events if event.name == "peer.failed"]
    assert set(failed) <= {second.server.address}
    assert third.reading.counters()["peer_failures"] >= 1


def test_read_after_all_others_died_uses_the_origin(make: Callable[..., Nodes]) -> None:
    nodes = make()
    nodes.epoch([nodes.all[0]])
    nodes.all[1].server.close()
    nodes.all[2].server.close()
    nodes.all[0].reading.close()
    assert nodes.epoch([nodes.all[0]]) == 0
    nodes.data["bucket/new"] = b"x" * 5000
    nodes.origin.put("bucket/new", nodes.data["bucket/new"])
    nodes.infos["bucket/new"] = nodes.origin.head("bucket/new")
    assert nodes.epoch([nodes.all[0]]) == 5000


def test_read_after_an_owners_death_with_replicas_fetches_nothing(make: Callable[..., Nodes]) -> None:
    nodes = make(replicas=2)
    assert nodes.epoch([nodes.all[0]]) == TOTAL
    nodes.settle()
    nodes.all[1].server.close()
    assert nodes.epoch([nodes.all[2]]) == 0


def test_read_by_a_new_member_uses_the_others(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    assert nodes.epoch(nodes.all) == TOTAL
    nodes.start(1)
    newcomer = nodes.all[2]
    assert any(nodes.owner(key) == newcomer.id for key in nodes.infos)
    assert nodes.epoch([newcomer]) == 0
    assert nodes.epoch(nodes.all) == 0


def test_read_uses_a_leaving_members_blocks(make: Callable[..., Nodes]) -> None:
    nodes = make()
    for key, info in nodes.infos.items():  # by its owner only, which creates no copies
        owner = next(node for node in nodes.all if node.id == nodes.owner(key))
        assert nodes.read(owner, info) == nodes.data[key]
    read = nodes.origin.bytes_read()
    leaver = nodes.all[2]
    assert any(nodes.owner(key) == leaver.id for key in nodes.infos)
    nodes.views.now = View.of(
        node.member(MemberState.LEAVING if node is leaver else MemberState.HERE) for node in nodes.all
    )
    assert nodes.epoch(nodes.all[:2]) == 0
    assert nodes.origin.bytes_read() == read


def test_owner_without_access_receives_uploads(make: Callable[..., Nodes]) -> None:
    nodes = make(has_access=lambda number: False)
    assert nodes.epoch(nodes.all[:1]) == TOTAL
    nodes.settle()
    assert nodes.epoch(nodes.all[1:]) == 0


def test_read_of_a_changed_object_raises_and_never_mixes(make: Callable[..., Nodes]) -> None:
    nodes = make()
    key = next(key for key in nodes.infos if nodes.owner(key) != nodes.all[0].id)
    old = nodes.infos[key]
    nodes.origin.put(key, nodes.data[key][::-1])
    with pytest.raises(ObjectChangedError):
        nodes.read(nodes.all[0], old)
    new = nodes.origin.head(key)
    assert nodes.read(nodes.all[0], new) == nodes.data[key][::-1]


def test_read_with_two_views_succeeds(make: Callable[..., Nodes]) -> None:
    nodes = make()
    first = nodes.all[0]
    # In its view the third is missing; the others have the right view.
    old = Views()
    old.now = View.of(node.member() for node in nodes.all[:2])
    first.cluster.link = NodeLink(views=old, folder="local", member_id=first.id, token=TOKEN)
    fetched = nodes.epoch(nodes.all)
    assert TOTAL <= fetched <= 2 * TOTAL
    assert nodes.epoch(nodes.all) == 0
    assert nodes.counted("peer_failures") == 0


def saved_bytes(nodes: Nodes) -> float:
    samples = [sample for node in nodes.all for sample in Prices().savings(samples_of(node.reading))]
    return sum(float(sample.value) for sample in samples if sample.metric is SAVED_BYTES)


def reads_of(nodes: Nodes) -> int:
    return sum(nodes.counted(name) for name in ("cache_bytes", "peer_bytes", "origin_bytes")) - nodes.counted(
        "relayed_bytes"
    )


def test_savings_of_first_read_in_cluster_are_zero_and_of_later_reads_their_bytes(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    first, second = nodes.all
    for key, info in nodes.infos.items():
        assert nodes.read(first, info) == nodes.data[key]
    assert nodes.counted("peer_bytes") == nodes.counted("relayed_bytes") > 0
    assert nodes.origin.bytes_read() == reads_of(nodes) == TOTAL
    assert saved_bytes(nodes) == 0
    assert hit_ratio({name: nodes.counted(name) for name in NAMES}) == 0
    for count, node in enumerate((first, second), start=1):
        for info in nodes.infos.values():
            nodes.read(node, info)
        assert saved_bytes(nodes) == count * TOTAL
        assert reads_of(nodes) == (1 + count) * TOTAL
    assert nodes.origin.bytes_read() == TOTAL


@pytest.mark.parametrize("span", [(BLOCK_BYTES + 100_000, BLOCK_BYTES + 300_000), (100_000, 300_000)])
def test_savings_of_part_that_owner_fetches_are_zero_and_its_bytes_afterwards(
    make: Callable[..., Nodes], span: tuple[int, int]
) -> None:
    nodes = make(3)
    key = "bucket/2"
    others = [node for node in nodes.all if node.id != nodes.owner(key)]
    for count, node in enumerate(others):
        with closing(node.reading.open_reader(nodes.origin, nodes.infos[key])) as reader:
            assert bytes(memoryview(reader.read(*span)).cast("B")) == nodes.data[key][slice(*span)]
        assert nodes.counted("cache_bytes") == 0
        assert saved_bytes(nodes) == count * node.reading.counters()["peer_bytes"]
    assert saved_bytes(nodes) >= span[1] - span[0]


def test_reads_for_other_nodes_are_attributed_to_the_job_of_the_reader_only(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    for info in nodes.infos.values():
        nodes.read(nodes.all[0], info)
    disks = [disk for node in nodes.all for disk in (*node.reading.open_disks, *node.serving.open_disks)]
    for disk in disks:
        disk.write_down_uses()
    reads, others = (node.reading.open_disks[0].attributed() for node in nodes.all)
    assert set(others.values()) <= {NO_READS}
    [found] = reads.values()
    assert found.fetched_bytes == TOTAL
    assert found.peer_bytes == nodes.counted("peer_bytes")
    values = {
        sample.labels[2]: sample.value for sample in samples_of(nodes.all[0].reading) if sample.metric is JOB_BYTES
    }
    assert values == {"cache": 0, "peer": found.peer_bytes, "origin": TOTAL - found.peer_bytes}


def test_read_of_damaged_peer_bytes_is_repaired(make: Callable[..., Nodes], events: list[Event]) -> None:
    nodes = make()
    key = "bucket/2"
    info = nodes.infos[key]
    owner = next(node for node in nodes.all if node.id == nodes.owner(key))
    assert nodes.read(owner, info) == nodes.data[key]
    entry = next(entry for entry in owner.serving.entries() if entry.size == info.size)
    with Path(owner.serving.open_disks[0].store.path(entry)).open("r+b") as file:
        file.seek(BLOCK_BYTES + 77)
        file.write(b"bad")
    other = next(node for node in nodes.all if node is not owner)
    assert nodes.read(other, info) == nodes.data[key]
    assert nodes.origin.bytes_read() <= info.size + 2 * BLOCK_BYTES  # damaged blocks, once more
    assert {"peer.corrupt", "cache.block.corrupt"} & {event.name for event in events}
