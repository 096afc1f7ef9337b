"""Nodes in this process: shares, published facts, copies, restarts, and failed starts."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import wait_until

import millrace
from millrace.cli import main
from millrace.cluster import placement
from millrace.cluster.attach import close_all
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.folder import live_nodes
from millrace.cluster.load_order import LoadOrder
from millrace.cluster.membership import Member, MemberState, View
from millrace.cluster.membership.protocol import Watchers
from millrace.cluster.moving import Mover
from millrace.config import CacheOptions, resolve
from millrace.errors import (
    ConfigurationError,
    DeniedError,
    DiskFullError,
    OriginUnavailableError,
    PeerSilentError,
    UsageError,
)
from millrace.event_log import level_of
from millrace.events import Event
from millrace.filesystem.cluster_access import access_from_here, access_through, statuses
from millrace.filesystem.cluster_loading import load_on_cluster
from millrace.filesystem.loading import LoadProgress
from millrace.node import load_jobs
from millrace.node import process as node_process
from millrace.node.drain import DrainReport
from millrace.node.load_jobs import LoadJobs
from millrace.node.process import NodeProcess
from millrace.origin import open_origin
from millrace.origin.object_store import ObjectStoreOrigin
from millrace.store.records import object_id
from millrace.testing.process import free_ports
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.usefixtures("patient_peers", "data")

OBJECTS, OBJECT_BYTES = 30, 300_000
TOTAL = OBJECTS * OBJECT_BYTES
TOKEN = "a-token-for-tests-only"


@pytest.fixture(scope="module")
def data(s3: S3Server) -> None:
    s3.create_bucket("nodes")
    origin = open_origin("s3", s3.target_options)
    for number in range(OBJECTS):
        origin.put(f"nodes/train/{number}.bin", os.urandom(OBJECT_BYTES))


@pytest.fixture
def origin(s3: S3Server, region: EmulatedRegion) -> ObjectStoreOrigin:
    return open_origin("s3", {**s3.target_options, "endpoint_url": region.endpoint_url})


class Nodes:
    """Static nodes of this process, by number; all have one cache directory, in which each takes its folder."""

    def __init__(self, cache_dir: Path, origin: ObjectStoreOrigin, count: int) -> None:
        self.ports = free_ports(count)
        self.members = f"static://{','.join(f'127.0.0.1:{port}' for port in self.ports)}"
        self.cache_dir = cache_dir
        self.origin = origin
        self.running: dict[int, NodeProcess] = {}

    def options(self, **more: Any) -> CacheOptions:
        given = {"cache_dir": str(self.cache_dir), "min_free": 0, "members": self.members, "cluster_token": TOKEN}
        return resolve({**given, **more})

    def start(self, number: int, **more: Any) -> NodeProcess:
        node = NodeProcess(self.options(**more), port=self.ports[number], origins=[self.origin])
        node.start()
        self.running[number] = node
        assert node.wait_here(300)
        return node

    def load(self, *, keys: Sequence[str] = ("nodes/train",), **more: Any) -> LoadProgress:
        node = next(iter(self.running.values()))
        with access_through(node.address, self.options()) as cluster:
            settings = {"replicas": cluster.replicas, **more}
            return load_on_cluster(cluster.views, cluster.client, self.origin.identity, keys, **settings)


@pytest.fixture
def nodes(tmp_path: Path, origin: ObjectStoreOrigin) -> Iterator[Nodes]:
    found = Nodes(tmp_path / "cache", origin, 3)
    yield found
    close_all()
    with ExitStack() as stack:
        for node in found.running.values():
            stack.callback(node.close)


def owned(nodes: Nodes, view: View) -> Counter[str]:
    """How many objects each member owns: their ids are hashes of addresses with random ports."""
    placed, identity = placement.Placement(view), nodes.origin.identity
    infos = [info for page in nodes.origin.list_all("nodes/train") for info in page]
    names = [object_id(identity, info.key, info.version, info.size) for info in infos]
    return Counter(placed.holders(name)[0].id for name in names)


def wait_for_objects(nodes: Iterable[NodeProcess], count: int) -> None:
    """Wait until the nodes report this sum of objects. A count is reused for fifty times its duration, also the first."""
    wait_until(lambda: sum(node.status()["objects"] for node in nodes) == count)


def fetched(region: EmulatedRegion) -> int:
    return region.stats(prefix="/nodes/train/").bytes_down


def test_nodes_of_one_machine_use_separate_folders(nodes: Nodes, region: EmulatedRegion) -> None:
    started = [nodes.start(number) for number in range(3)]
    assert [live.facts.address for live in live_nodes(nodes.options())] == [node.address for node in started]
    assert sorted(node.status()["folder"] for node in started) == ["local", "node-1", "node-2"]
    seen: list[LoadProgress] = []
    done = nodes.load(progress=seen.append)
    assert (done.nodes, done.done_objects, done.fetched_bytes, fetched(region)) == (3, OBJECTS, TOTAL, TOTAL)
    assert seen[-1] == done
    wait_for_objects(started, OBJECTS)
    shares = owned(nodes, started[0].view())
    assert [node.status()["objects"] for node in started] == [shares[node.member_id] for node in started]
    with access_from_here(nodes.options()) as cluster:  # type: ignore[union-attr]
        assert [reported["state"] for reported in statuses(cluster)] == ["here"] * 3
        started[1].close()
        reported = {each["address"]: each["answers"] for each in statuses(cluster)}
    assert reported == {started[0].address: True, started[1].address: False, started[2].address: True}


def test_load_of_a_file_system_uses_its_cluster(nodes: Nodes, region: EmulatedRegion, s3: S3Server) -> None:
    for number in range(2):
        nodes.start(number)
    options = {**s3.target_options, "endpoint_url": region.endpoint_url}
    for cache_dir in (nodes.cache_dir, nodes.cache_dir / "elsewhere"):  # through the machine's node, and as a client
        fs = millrace.filesystem(
            "s3", options, cache_dir=str(cache_dir), min_free=0, members=nodes.members, cluster_token=TOKEN
        )
        done = fs.load(["s3://nodes/train/", "nodes/train/1.bin"])
        assert (done.nodes, done.done_objects, done.done_bytes) == (2, OBJECTS, TOTAL)
        with pytest.raises(FileNotFoundError, match="nothing does not exist"):
            fs.load("s3://nodes/nothing")
    assert fetched(region) == TOTAL
    # Reads use the loaded blocks.
    assert len(fs.cat_file("nodes/train/3.bin")) == OBJECT_BYTES
    assert fetched(region) == TOTAL
    alone = millrace.filesystem("s3", options, cache_dir=str(nodes.cache_dir / "alone"), min_free=0, members="none")
    assert alone.load("s3://nodes/train").nodes == 1
    assert fetched(region) == 2 * TOTAL


@pytest.mark.slow
def test_load_continues_when_a_node_leaves(nodes: Nodes, region: EmulatedRegion) -> None:
    started = [nodes.start(number) for number in range(3)]
    region.reshape(round_trip_seconds=0.0, bytes_per_second=3e5)  # for half a minute
    try:
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(nodes.load)
            wait_until(lambda: fetched(region) > 0)
            started[2].drain(30)
            region.reshape(round_trip_seconds=0.0, bytes_per_second=None)
            done = loading.result(300)
    finally:
        region.reshape(round_trip_seconds=0.0, bytes_per_second=None)
    assert (done.nodes, done.objects, done.done_objects, done.done_bytes) == (2, OBJECTS, OBJECTS, TOTAL)
    wait_for_objects(started[:2], OBJECTS)


def test_load_of_many_urls_sends_them_to_all_nodes(nodes: Nodes) -> None:
    for number in range(2):
        nodes.start(number)
    urls = [f"nodes/train/{number % OBJECTS}.bin" for number in range(45_000)]
    assert len("".join(urls)) > 1 << 19
    done = nodes.load(keys=urls)
    assert (done.objects, done.done_objects, done.done_bytes) == (OBJECTS, OBJECTS, TOTAL)


def test_loads_beyond_those_that_a_node_runs_at_once_wait_for_them(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_jobs, "_MOST_RUNNING", 1)
    nodes.start(0)
    start, load, second_waits = LoadJobs.start, load_jobs.load, threading.Event()

    def start_one(jobs: LoadJobs, job_id: str, order: LoadOrder) -> dict[str, Any]:
        try:
            return start(jobs, job_id, order)
        finally:
            if jobs.state(job_id) is None:
                second_waits.set()

    def load_late(*arguments: Any, **options: Any) -> LoadProgress:
        assert second_waits.wait(120)
        return load(*arguments, **options)

    monkeypatch.setattr(LoadJobs, "start", start_one)
    monkeypatch.setattr(load_jobs, "load", load_late)
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(nodes.load) for _ in range(2)]
        assert [done.result().done_objects for done in loads] == [OBJECTS] * 2


def test_load_of_too_many_urls_raises(nodes: Nodes) -> None:
    nodes.start(0)
    for urls in (["nodes/train/"] * 1_000_001, [f"nodes/{'x' * (1 << 20)}"] * 61):
        with pytest.raises(UsageError, match=f"{len(urls)} URLs are too many for one load"):
            nodes.load(keys=urls)


def test_load_without_a_client_ends(nodes: Nodes, region: EmulatedRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    region.reshape(round_trip_seconds=0.0, bytes_per_second=1e5)
    node = nodes.start(0)
    order = LoadOrder(origin_identity=nodes.origin.identity, keys=("nodes/train",), members=node.view())
    assert node.jobs.start("job", order)["state"] == "running"
    monkeypatch.setattr(load_jobs, "_ABANDONED_SECONDS", 0.5)
    wait_until(lambda: node.status()["loads"] == 0)
    assert (node.jobs.state("job") or {})["state"] == "cancelled"


def test_load_continues_after_its_client_was_stopped(
    nodes: Nodes, region: EmulatedRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        nodes.start(number)
    region.reshape(round_trip_seconds=0.0, bytes_per_second=3e5)
    stopped: list[LoadProgress] = []

    def stop_once(state: LoadProgress) -> None:
        if fetched(region) and not stopped:
            stopped.append(state)
            monkeypatch.setattr(load_jobs, "_ABANDONED_SECONDS", 0.0)
            wait_until(lambda: not any(node.status()["loads"] for node in nodes.running.values()))
            monkeypatch.setattr(load_jobs, "_ABANDONED_SECONDS", 600.0)
            region.reshape(round_trip_seconds=0.0, bytes_per_second=None)

    done = nodes.load(progress=stop_once)
    assert stopped[0].done_objects < OBJECTS
    assert (done.objects, done.done_objects, done.done_bytes) == (OBJECTS, OBJECTS, TOTAL)


def test_load_continues_when_a_node_closes(
    nodes: Nodes, region: EmulatedRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, loaded = threading.Event(), threading.Event()
    close = load_jobs.LoadJobs.close

    def close_slowly(jobs: load_jobs.LoadJobs) -> None:
        close(jobs)
        closing.set()
        assert loaded.wait(300)

    monkeypatch.setattr(load_jobs.LoadJobs, "close", close_slowly)
    *_, last = [nodes.start(number) for number in range(3)]
    region.reshape(round_trip_seconds=0.0, bytes_per_second=3e5)
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(nodes.load)
        try:
            wait_until(lambda: last.status()["loads"] == 1 and fetched(region) > 0)
            ending = pool.submit(last.close)
            assert closing.wait(300)
            region.reshape(round_trip_seconds=0.0, bytes_per_second=None)
            done = loading.result(300)
        finally:
            region.reshape(round_trip_seconds=0.0, bytes_per_second=None)
            loaded.set()
        ending.result(300)
    assert (done.nodes, done.objects, done.done_objects, done.done_bytes) == (2, OBJECTS, OBJECTS, TOTAL)


def test_load_ends_on_a_node_whose_share_the_others_load(
    nodes: Nodes, region: EmulatedRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was stopped receives requests when it continues. It would fetch its share a second time."""
    first, second = (nodes.start(number) for number in range(2))
    monkeypatch.setattr(load_jobs, "_ABANDONED_SECONDS", 600.0)
    region.reshape(round_trip_seconds=0.0, bytes_per_second=1e6)
    request, ended = PeerClient.call, list[bool]()

    def silent(client: PeerClient, address: str, method: str, path: str, *args: Any, **more: Any) -> Any:
        if address == second.address and method == "GET" and path.startswith("/v1/load/"):
            raise PeerSilentError("the second is silent")
        return request(client, address, method, path, *args, **more)

    def in_the_second_round(state: LoadProgress) -> None:
        if state.nodes == 1 and not ended:
            wait_until(lambda: not second.jobs.running(), seconds=30)
            ended.append(True)
            region.reshape(round_trip_seconds=0.0, bytes_per_second=None)

    monkeypatch.setattr(PeerClient, "call", silent)
    done = nodes.load(progress=in_the_second_round)
    assert ended
    assert first.jobs.running() == 0
    assert (done.nodes, done.objects, done.done_objects) == (1, OBJECTS, OBJECTS)


def test_load_includes_a_lost_member_that_returns_at_another_address(nodes: Nodes, region: EmulatedRegion) -> None:
    first, second = (nodes.start(number) for number in range(2))
    [free] = free_ports(1)
    before = Member(id=second.member_id, address=f"127.0.0.1:{free}")
    members = [Member(id=first.member_id, address=first.address), before]
    region.reshape(round_trip_seconds=0.0, bytes_per_second=3e5)

    class Views:
        def view(self) -> View:
            return View.of(members)

    def return_after_the_loss(state: LoadProgress) -> None:
        if state.nodes == 1 and before in members:
            members[1] = replace(before, address=second.address)
            region.reshape(round_trip_seconds=0.0, bytes_per_second=None)

    with access_through(first.address, nodes.options()) as cluster:
        identity, keys = nodes.origin.identity, ["nodes/train"]
        done = load_on_cluster(Views(), cluster.client, identity, keys, progress=return_after_the_loss)
    assert (done.nodes, done.objects, done.done_objects) == (2, OBJECTS, OBJECTS)


def test_load_of_a_large_object_is_divided_by_stripes(
    nodes: Nodes, region: EmulatedRegion, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "WHOLE_BYTES", 16 << 20)
    monkeypatch.setattr(placement, "STRIPE_BYTES", 4 << 20)
    size = (44 << 20) + 12345
    data = os.urandom(size)
    nodes.origin.put("nodes/large/one.bin", data)
    for number in range(3):
        nodes.start(number)
    done = nodes.load(keys=["nodes/large"])
    assert (done.objects, done.done_objects, done.nbytes, done.done_bytes) == (1, 1, size, size)
    assert region.stats(prefix="/nodes/large/").bytes_down == size
    held = [node.status()["used_bytes"] for node in nodes.running.values()]
    assert max(held) < size <= sum(held)
    again = nodes.load(keys=["nodes/large"], verify=True)
    assert (again.done_bytes, again.fetched_bytes) == (size, 0)
    fs = millrace.filesystem(
        "s3",
        {**s3.target_options, "endpoint_url": region.endpoint_url},
        cache_dir=str(nodes.cache_dir / "elsewhere"),
        min_free=0,
        members=nodes.members,
        cluster_token=TOKEN,
    )
    assert fs.load([]).objects == 0
    assert fs.cat_file("nodes/large/one.bin") == data
    assert region.stats(prefix="/nodes/large/").bytes_down == size


def test_load_with_replicas_loads_copies(nodes: Nodes, region: EmulatedRegion) -> None:
    for number in range(3):
        nodes.start(number, replicas=2)
    done = nodes.load()
    assert (done.done_objects, done.done_bytes, done.fetched_bytes) == (OBJECTS, TOTAL, TOTAL)
    wait_for_objects(nodes.running.values(), 2 * OBJECTS)
    assert fetched(region) == TOTAL


def test_static_node_leaves_and_returns(nodes: Nodes, region: EmulatedRegion, events: list[Event]) -> None:
    first, second, third = (nodes.start(number) for number in range(3))
    nodes.load()
    # The third node is dead. The drain does not wait for it.
    third.close()
    del nodes.running[2]
    report = second.drain(60)
    assert (report.took_over, report.did_not) == ((first.address,), ())
    assert second.state == "left"
    assert [event.subject for event in events if event.name == "cluster.left"] == [third.address, second.address]
    states = {member.id: member.state for member in first.view().members}
    assert states[second.address] is MemberState.LEAVING
    second.close()
    again = nodes.start(1)
    assert again.member_id == second.member_id
    assert again.status()["folder"] == second.status()["folder"]
    wait_until(lambda: {member.id: member.state for member in first.view().members}[again.address] is MemberState.HERE)


@pytest.mark.parametrize("is_late", [False, True], ids=["", "which the leaver learns last"])
def test_drain_waits_for_the_shares_of_a_member_that_leaves_meanwhile(
    nodes: Nodes, region: EmulatedRegion, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    first, second, third = (nodes.start(number) for number in range(3))
    nodes.load()
    mover = second._moves._mover
    monkeypatch.setattr(mover, "take_over", lambda leaver: mover.stopped.wait(300))  # however small its new share is
    if is_late:
        learn, taken_over, reports = first.set_member_state, first.drains.taken_over, threading.Semaphore(0)

        def learn_late(member_id: str, state: MemberState) -> None:
            assert [reports.acquire(timeout=300) for _ in range(2)] == [True] * 2  # by the third, before and after
            learn(member_id, state)

        def report(member_id: str, owners: Iterable[str]) -> None:
            taken_over(member_id, owners)
            reports.release()

        monkeypatch.setattr(first, "set_member_state", learn_late)
        monkeypatch.setattr(first.drains, "taken_over", report)
    with ThreadPoolExecutor(2) as pool:
        drains = [pool.submit(first.drain, 60)]
        wait_until(lambda: [member.id for member in first.drains.remaining()] == [second.member_id])
        drains.append(pool.submit(second.drain, 60))
        assert [drain.result().took_over for drain in drains] == [(third.member_id,)] * 2
    for number in (0, 1):
        nodes.running.pop(number).close()
    done = nodes.load()
    assert (done.done_objects, done.fetched_bytes, fetched(region)) == (OBJECTS, 0, TOTAL)


def test_drain_ends_after_the_first_report_of_a_take_over_is_lost(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (nodes.start(number) for number in range(3))
    nodes.load()
    call, lost = PeerClient.call, []

    def lose_the_first(self: PeerClient, address: str, method: str, path: str, *arguments: Any, **more: Any) -> Any:
        if path == "/v1/drained" and not lost:
            lost.append(path)
            raise PeerSilentError("the request is lost")
        return call(self, address, method, path, *arguments, **more)

    monkeypatch.setattr(PeerClient, "call", lose_the_first)
    report = first.drain(60)
    assert lost
    assert (report.took_over, report.did_not) == (tuple(sorted((second.member_id, third.member_id))), ())


class _Members:
    """One node's membership in a list that all nodes of a test share."""

    def __init__(self, everyone: dict[_Members, Member | None]) -> None:
        self._everyone = everyone
        self._watchers = Watchers()
        everyone[self] = None

    def view(self) -> View:
        return View.of([member for member in list(self._everyone.values()) if member is not None])

    def watch(self, on_change: Callable[[View], None]) -> Callable[[], None]:
        return self._watchers.add(on_change)

    def join(self, me: Member) -> None:
        self._publish(me)

    def leave(self) -> None:
        self._publish(None)

    def absences(self) -> int:
        return 0

    def _publish(self, me: Member | None) -> None:
        with _publishing:
            self._everyone[self] = me
            for each in list(self._everyone):  # another node may be created meanwhile
                each._watchers.notify(self.view())

    def close(self) -> None:
        pass


_publishing = threading.RLock()


def test_drain_is_not_delayed_by_the_restoring_of_copies(
    tmp_path: Path, origin: ObjectStoreOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone: dict[_Members, Member | None] = {}
    ending = threading.Event()
    restoring = threading.Semaphore(0)

    def restore(*_: object) -> None:
        restoring.release()
        ending.wait(600)

    monkeypatch.setattr(Mover, "restore", restore)
    options = resolve(
        {"cache_dir": str(tmp_path), "min_free": 0, "members": "none", "cluster_token": TOKEN, "replicas": 2}
    )
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(NodeProcess(options, membership=_Members(everyone), origins=[origin])) for _ in range(4)
        ]
        stack.callback(ending.set)
        *_, lost = everyone
        wait_until(lambda: [member.state for member in lost.view().members] == [MemberState.HERE] * 4)
        lost.leave()
        assert all(restoring.acquire(timeout=300) for _ in range(3))
        report = nodes[0].drain(120)
        assert {nodes[1].member_id, nodes[2].member_id} <= set(report.took_over)
        assert report.did_not == ()


def test_node_that_others_missed_copies_what_they_have_read_meanwhile(
    tmp_path: Path, origin: ObjectStoreOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone: dict[_Members, Member | None] = {}
    absences, copied = [2], threading.Event()
    monkeypatch.setattr(_Members, "absences", lambda _: absences[0])
    monkeypatch.setattr(node_process, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(Mover, "restore", lambda *_: copied.set())
    given = {"cache_dir": str(tmp_path), "min_free": 0, "members": "none", "cluster_token": TOKEN}
    with NodeProcess(resolve(given), membership=_Members(everyone), origins=[origin]) as node:
        assert node.wait_here(300)
        assert not copied.wait(0.2)
        absences[0] += 1  # the others do not list it yet
        assert not copied.wait(0.2)
        absences[0] += 1
        assert copied.wait(300)


def test_node_copies_its_share_from_a_member_that_was_silent_while_it_joined(
    tmp_path: Path, origin: ObjectStoreOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers ask former owners for ten minutes only."""
    everyone: dict[_Members, Member | None] = {}
    options = resolve({"cache_dir": str(tmp_path), "min_free": 0, "members": "none", "cluster_token": TOKEN})
    silent, request = [True, True], PeerClient.call

    def silent_at_first(client: PeerClient, address: str, method: str, path: str, *args: Any, **more: Any) -> Any:
        if silent and path.startswith("/v1/inventory/"):
            silent.pop()
            raise PeerSilentError("the first is silent")
        return request(client, address, method, path, *args, **more)

    monkeypatch.setattr(PeerClient, "call", silent_at_first)
    members = _Members(everyone)
    with NodeProcess(options, membership=members, origins=[origin]) as first:
        assert first.wait_here(300)
        load_on_cluster(members, first.client, origin.identity, ["nodes/train"])
        with NodeProcess(options, membership=_Members(everyone), origins=[origin]) as second:
            wait_until(lambda: [member.state for member in first.view().members] == [MemberState.HERE] * 2)
            assert not silent
            placed = placement.Placement(first.view())
            share = {
                info.key
                for page in origin.list_all("nodes/train")
                for info in page
                if placed.is_holder(second.member_id, object_id(origin.identity, info.key, info.version, info.size))
            }
            wait_until(lambda: {entry.name.key for entry in second.node.entries() if entry.complete} == share)


def test_node_that_others_missed_serves_no_metadata_from_before(
    tmp_path: Path, origin: ObjectStoreOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone: dict[_Members, Member | None] = {}
    absences = [0]
    monkeypatch.setattr(_Members, "absences", lambda _: absences[0])
    given = {"cache_dir": str(tmp_path), "min_free": 0, "members": "none", "cluster_token": TOKEN}
    with NodeProcess(resolve(given), membership=_Members(everyone), origins=[origin]) as node:
        wait_until(lambda: [member.state for member in node.view().members] == [MemberState.HERE])
        [me] = node.view().members
        key = "nodes/missed/1.bin"

        def size() -> int:
            query = {"origin": origin.identity, "age": "inf", "key": key}
            return int(node.client.call(me.address, "GET", "/v1/head", query=query, deadline=60.0)[1])

        origin.put(key, b"before")
        assert size() == 6
        origin.put(key, b"meanwhile")
        assert size() == 6
        absences[0] += 1
        assert size() == 9


def test_drain_waits_for_a_member_that_was_silent_for_a_moment(
    tmp_path: Path, origin: ObjectStoreOrigin, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    everyone: dict[_Members, Member | None] = {}
    options = resolve({"cache_dir": str(tmp_path), "min_free": 0, "members": "none", "cluster_token": TOKEN})
    copied, silent = threading.Event(), [True]
    monkeypatch.setattr(Mover, "take_over", lambda *_: copied.wait(300))
    with ExitStack() as stack:
        first, second, third = (
            stack.enter_context(NodeProcess(options, membership=_Members(everyone), origins=[origin])) for _ in range(3)
        )
        stack.callback(copied.set)
        wait_until(lambda: [member.state for member in first.view().members] == [MemberState.HERE] * 3)
        request = first.client.call

        def silent_at_first(address: str, *args: Any, **more: Any) -> Any:
            if silent and address == third.address:
                raise PeerSilentError("the third is silent")
            return request(address, *args, **more)

        monkeypatch.setattr(first.client, "call", silent_at_first)
        with ThreadPoolExecutor(1) as pool:
            drain = pool.submit(first.drain, 300)
            wait_until(lambda: [member.id for member in first.drains.remaining()] == [second.member_id])
            silent.clear()
            wait_until(
                lambda: {member.id for member in first.drains.remaining()} == {second.member_id, third.member_id}
            )
            copied.set()
            assert set(drain.result().took_over) == {second.member_id, third.member_id}
    assert [event.subject for event in events if event.name == "cluster.member.no_response"] == [third.address]


def test_leave_does_not_wait_for_a_member_whose_disk_hangs(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports that it works on the request, for as long as the disk hangs."""
    first, second = (nodes.start(number) for number in range(2))
    goes_on, set_state = threading.Event(), first.set_member_state
    waited: list[bool] = []

    def hang(*reported: Any) -> None:
        waited.append(goes_on.wait(30))
        set_state(*reported)

    monkeypatch.setattr(first, "set_member_state", hang)
    monkeypatch.setattr("millrace.node.drain._REQUEST_SECONDS", 1.0)
    second.drain(1)
    goes_on.set()
    wait_until(lambda: bool(waited))
    assert waited == [True]


def test_static_node_that_starts_first_reports_the_others_without_a_warning(nodes: Nodes, events: list[Event]) -> None:
    first = nodes.start(0)
    assert first.wait_here(300)
    wait_until(lambda: any(event.name == "cluster.joined" for event in events))
    assert first.open_breakers()
    assert {event.name for event in events if event.subject in first.open_breakers()} == {"cluster.member.awaited"}
    assert [event for event in events if level_of(event) > logging.INFO] == []


def test_static_node_repeats_its_state_to_unreached_members(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_process, "_ANNOUNCE_SECONDS", 0.0)
    first, second = (nodes.start(number) for number in range(2))
    second.drain(30)
    second.close()
    with monkeypatch.context() as busy:
        refused: list[object] = []

        def refuse(*reported: object) -> None:
            refused.append(reported)
            raise DiskFullError("not now")

        busy.setattr(first, "set_member_state", refuse)
        again = nodes.start(1)
        wait_until(lambda: bool(refused))
    wait_until(lambda: {member.id: member.state for member in first.view().members}[again.address] is MemberState.HERE)


def test_static_node_that_leaves_while_it_repeats_its_state_is_seen_as_leaving(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_process, "_ANNOUNCE_SECONDS", 0.0)
    first, second = (nodes.start(number) for number in range(2))
    request, repeats, may_send = second.drains._request, threading.Event(), threading.Event()

    def request_late(*arguments: Any, **more: Any) -> set[str]:
        if more.get("event", "") is None and arguments[0]:  # a repeated request
            repeats.set()
            assert may_send.wait(120)
        return request(*arguments, **more)

    monkeypatch.setattr(second.drains, "_request", request_late)
    second.drains._missed = {first.address}
    monkeypatch.setattr(second.drains, "wait", lambda *_: DrainReport())
    assert repeats.wait(120)
    with ThreadPoolExecutor(1) as pool:
        leaves = pool.submit(second.drain, 30)
        wait_until(lambda: second._state is MemberState.LEAVING)
        with suppress(TimeoutError):  # it waits for the repeated state, or has announced the new one
            leaves.result(0.5)
        may_send.set()
        leaves.result(120)
    second.close()
    assert {member.id: member.state for member in first.view().members}[second.address] is MemberState.LEAVING


def test_published_view_is_the_newest(nodes: Nodes, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a thread reports an older view last, and after the disk was full for a moment."""
    first = nodes.start(0)
    older = first.view()
    first.set_member_state(nodes.members.rpartition(",")[2], MemberState.LEAVING)
    first._view_changed(older)
    (live,) = live_nodes(nodes.options())
    assert live.facts.view == first.view() != older
    with monkeypatch.context() as full:

        def fails(*_: object, **__: object) -> None:
            raise DiskFullError("no room")

        full.setattr(first._folder, "publish", fails)
        first.set_member_state(nodes.members.rpartition(",")[2], MemberState.HERE)
    wait_until(lambda: live_nodes(nodes.options())[0].facts.view == older)
    assert [event.name for event in events].count("cluster.folder.failed") == 1


def test_drain_without_time_ends_at_once(nodes: Nodes) -> None:
    first, second = nodes.start(0), nodes.start(1)
    nodes.load()
    report = first.drain(0)
    # The drain does not wait for the node that has never started. The other node may have been quick.
    assert (*report.took_over, *report.did_not) == (second.address,)
    assert first.drain(5).seconds == 0.0
    assert first.left.is_set()


def test_drain_that_fails_ends_with_the_leave_of_the_node(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nodes.start(0)
    nodes.start(1)

    def fail(*_: object) -> DrainReport:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(first.drains, "wait", fail)
    with pytest.raises(RuntimeError):
        first.drain(60)
    assert first.left.is_set()


def test_share_is_taken_over_without_a_thread_of_its_own(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = nodes.start(0), nodes.start(1)
    nodes.load()
    start = threading.Thread.start

    def start_elsewhere(thread: threading.Thread) -> None:
        if threading.current_thread() is second._moves._thread:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_elsewhere)
    assert first.drain(20).took_over == (second.member_id,)
    assert second._moves._thread.is_alive()


def test_resize_changes_the_weight(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_process, "_WEIGHT_SECONDS", 0.0)
    node = nodes.start(0)
    monkeypatch.setenv("MILLRACE_CLUSTER_TOKEN", TOKEN)
    assert main(["resize", "1GB", "--node", node.address]) == 0
    assert capsys.readouterr().out.endswith("0 B of 1.00 GB\n")
    wait_until(lambda: node.status()["weight"] == 1e9)
    assert main(["resize", "much", "--node", node.address]) == 1
    assert "is not a size" in capsys.readouterr().err
    assert main(["resize", "--default", "--node", node.address]) == 0
    wait_until(lambda: node.status()["weight"] > 1e9)


def test_load_without_access_raises(nodes: Nodes, origin: ObjectStoreOrigin) -> None:
    nodes.start(0)
    nodes.origin = open_origin("s3", {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"})
    with pytest.raises(DeniedError, match=r"node 127.0.0.1:\d+: no access to s3\+http://127.0.0.1:9: start it"):
        nodes.load()


def test_load_beyond_the_disks_raises(nodes: Nodes) -> None:
    for number in range(2):
        nodes.start(number, capacity="2MB")
    seen: list[LoadProgress] = []
    with pytest.raises(DiskFullError, match=r"is full: \d+ of 30 objects, .* of 9\.00 MB, were loaded"):
        nodes.load(progress=seen.append)
    # The objects that fit are cached. The others were tried on both nodes.
    assert seen[-1].done_objects + seen[-1].left_objects == OBJECTS
    assert 0 < seen[-1].done_bytes < TOTAL


def test_load_without_a_responding_node_raises(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = nodes.start(0)
    with access_through(node.address, nodes.options()) as cluster:
        node.close()
        with pytest.raises(OriginUnavailableError, match="no node of the cluster responds"):
            load_on_cluster(cluster.views, cluster.client, nodes.origin.identity, ["nodes/train"])


def test_load_skips_a_member_of_another_version(nodes: Nodes, region: EmulatedRegion) -> None:
    node = nodes.start(0)

    class Views:
        def view(self) -> View:
            return View.of([Member(id=node.member_id, address=node.address), odd])

    odd = Member(id="odd", address="no address")
    with access_through(node.address, nodes.options()) as cluster:
        done = load_on_cluster(Views(), cluster.client, nodes.origin.identity, ["nodes/train"])
    assert (done.nodes, done.done_bytes) == (1, TOTAL)


def test_failed_start_leaves_nothing(nodes: Nodes) -> None:
    first = nodes.start(0)
    with pytest.raises(ConfigurationError, match="cannot listen"):
        NodeProcess(nodes.options(), port=nodes.ports[0]).start()
    assert [live.facts.address for live in live_nodes(nodes.options())] == [first.address]
    other_port = next(port for port in free_ports(4) if port not in nodes.ports)
    stranger = NodeProcess(nodes.options(), port=other_port)
    with pytest.raises(ConfigurationError, match="not among the cluster's members"):
        stranger.start()
    stranger.close()
    with pytest.raises(ConfigurationError, match="fixed port"):
        NodeProcess(nodes.options())
    with pytest.raises(ConfigurationError, match="cluster_token"):
        NodeProcess(replace(nodes.options(), cluster_token=None), port=nodes.ports[1])
    with pytest.raises(ConfigurationError, match="is not known"):
        NodeProcess(replace(nodes.options(), members="none")).start()
    with pytest.raises(UsageError, match="started before"):
        first.start()
    # Their folders are free again.
    assert nodes.start(1).status()["folder"] == "node-1"
