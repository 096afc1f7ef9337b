"""Joins and leaves over real sockets and stores: shares move, and the origin is not read."""

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.computed import ComputedOrigin
from tests.support.harms import flip
from tests.support.waiting import wait_until

from millrace.cache.node import CacheNode, close_nodes
from millrace.cluster import moving
from millrace.cluster.breakers import Breakers
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.server import PlaneServer
from millrace.cluster.dataplane.wire import ObjectDescription
from millrace.cluster.inventory import Inventory
from millrace.cluster.membership import Member, MemberState, NodeLink, View
from millrace.cluster.moving import Mover, MoveReport, Rate, Run, runs_to_pull
from millrace.cluster.origins import Origins
from millrace.cluster.placement import Placement
from millrace.cluster.serving import BlockService
from millrace.cluster.source import ClusterSources
from millrace.config import Amount, resolve
from millrace.errors import PeerSilentError, StorageError
from millrace.events import Event, add_hook
from millrace.node import moves as node_moves
from millrace.node.moves import Moves
from millrace.store.records import BLOCK_BYTES, Entry, object_id

pytestmark = pytest.mark.usefixtures("patient_peers")

TOKEN = "secret"
FAST = 1e12
HERE, JOINING, LEAVING = MemberState.HERE, MemberState.JOINING, MemberState.LEAVING

SIZES = {f"b/small/{number:03}": 20_000 + 977 * number for number in range(40)} | {
    f"b/large/{number:03}": 1_200_000 + number % 2 * BLOCK_BYTES + 10_007 * number for number in range(16)
}


class Views:
    """The view of all nodes, set by the test."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}

    def view(self) -> View:
        return View.of(self.members.values())

    def publish(self, node: "Node", state: MemberState | None) -> None:
        members = {name: member for name, member in self.members.items() if name != node.name}
        if state is not None:
            members[node.name] = Member(id=node.name, address=node.server.address, state=state)
        self.members = members


class Node:
    """A node: its disk, what serves it, and a reader on its machine."""

    def __init__(self, name: str, directory: Path, origin: ComputedOrigin, views: Views, replicas: int, capacity: str):
        self.name = name
        self.origin = origin
        options = resolve(
            {"cache_dir": str(directory / name), "min_free": 0, "members": "none", "capacity": capacity},
            environ={},
            file={},
        )
        link = NodeLink(views=views, folder="local", member_id=name, token=TOKEN, replicas=replicas)
        self.cluster = Cluster(link, breakers=Breakers(None))
        self.store = CacheNode(options, source=ClusterSources(self.cluster, serving=True))
        self.reader = CacheNode(options, source=ClusterSources(self.cluster))
        self.store.distinguish_copies(self.cluster.still_a_copy)
        service = BlockService(self.store, self.cluster, Origins([origin], environment=False))
        self.server = PlaneServer(service, host="127.0.0.1", token=TOKEN)
        Inventory(self.store, replicas=replicas).add_routes(self.server)
        self.server.start()

    def read(self, key: str) -> None:
        info = self.origin.head(key)
        reader = self.reader.open_reader(self.origin, info)
        with contextlib.closing(reader):
            assert bytes(reader.read(0, info.size)) == bytes(self.origin.expected(key, 0, info.size))

    def entry(self, key: str) -> Entry | None:
        return next((entry for entry in self.store.entries() if entry.name.key == key), None)

    def complete(self) -> set[str]:
        """The keys of all objects that are here as a whole."""
        return {entry.name.key for entry in self.store.entries() if entry.complete}

    def mover(self, **options: Any) -> Mover:
        return Mover(self.store, self.cluster, **{"bytes_per_second": FAST, **options})

    def close(self) -> None:
        self.server.close()
        self.cluster.close()
        self.store.close()
        self.reader.close()


class Nodes:
    """Some nodes over one origin, and the view that they share."""

    def __init__(self, directory: Path) -> None:
        self.origin = ComputedOrigin(SIZES)
        self.views = Views()
        self.every: dict[str, Node] = {}
        self._directory = directory

    def add(self, name: str, state: MemberState, *, replicas: int = 1, capacity: str = "10GB") -> Node:
        node = self.every[name] = Node(name, self._directory, self.origin, self.views, replicas, capacity)
        self.views.publish(node, state)
        return node

    def holders(self, key: str, replicas: int = 1) -> list[str]:
        """The holders of an object in the present view."""
        info = self.origin.head(key)
        name = object_id(self.origin.identity, key, info.version, info.size)
        return [member.id for member in Placement(self.views.view(), replicas=replicas).holders(name)]

    def share(self, name: str, replicas: int = 1) -> set[str]:
        """The keys that a member is to hold by the present view."""
        return {key for key in SIZES if name in self.holders(key, replicas)}

    def fill(self, replicas: int = 1) -> None:
        """Have everything with those, and only those, that are to hold it."""
        for key in SIZES:
            for name in self.holders(key, replicas):
                self.every[name].read(key)
        assert self.origin.bytes_read == sum(SIZES.values())


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for node in nodes.every.values():
        node.close()
    close_nodes()


@contextlib.contextmanager
def load(*readers: Node) -> Iterator[Callable[[], None]]:
    """Objects are read and compared all the time; the value waits until some more were."""
    ending = threading.Event()
    errors: list[BaseException] = []
    turn = threading.Semaphore(0)

    def work(node: Node, seed: int) -> None:
        choice = random.Random(seed)
        while not ending.is_set():
            try:
                node.read(choice.choice(list(SIZES)))
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
                ending.set()
            turn.release()

    def some_more() -> None:
        for _ in range(5 * len(readers)):
            assert turn.acquire(timeout=300)

    threads = [threading.Thread(target=work, args=(node, seed)) for seed, node in enumerate(readers)]
    for thread in threads:
        thread.start()
    try:
        yield some_more
    finally:
        ending.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def nbytes(keys: set[str]) -> int:
    return sum(SIZES[key] for key in keys)


def test_join_under_load_moves_the_share_without_origin_reads(nodes: Nodes) -> None:
    old = [nodes.add(name, HERE) for name in "abc"]
    nodes.fill()
    with load(*old) as some_more:
        some_more()
        newcomer = nodes.add("d", JOINING)
        report = newcomer.mover().fill("d")
        nodes.views.publish(newcomer, HERE)
        some_more()
    share = nodes.share("d")
    assert report.complete
    assert report.moved_bytes == nbytes(share) == newcomer.store.counters()["moved_bytes"]
    assert report.moved_objects == len(share)
    assert newcomer.complete() == share
    for key in share:
        newcomer.read(key)
        old[0].read(key)
    assert nodes.origin.bytes_read == sum(SIZES.values())
    # Those that had it before let it go first from now on.
    large = {key for key in share if SIZES[key] > 1 << 20}
    assert large
    for node in old:
        node.mover().mark_copies()
        ids = {entry.object_id for key in large if (entry := node.entry(key)) is not None}
        found = {each for disk in node.store.open_disks for each in disk.find_copies(nodes.origin.identity, large)}
        assert found == ids


def test_leave_under_load_moves_the_share_without_origin_reads(nodes: Nodes) -> None:
    leaver, *others = (nodes.add(name, HERE) for name in "abcd")
    nodes.fill()
    had = nodes.share("a")
    assert leaver.complete() == had
    reported: list[Event] = []
    remove = add_hook(lambda event: reported.append(event) if event.name == "cluster.moved" else None)
    with load(*others) as some_more:
        some_more()
        nodes.views.publish(leaver, LEAVING)
        some_more()
        reports = [node.mover().take_over(nodes.views.members["a"]) for node in others]
        nodes.views.publish(leaver, None)
        leaver.server.close()
        some_more()
    remove()
    assert all(report.complete for report in reports)
    # The leaving member also served the reads of the new owners.
    assert sum(report.moved_bytes for report in reports) <= nbytes(had)
    assert sum(event.nbytes for event in reported) == sum(report.moved_bytes for report in reports)
    for node in others:
        assert nodes.share(node.name) <= node.complete()
        for key in had:
            node.read(key)
    assert nodes.origin.bytes_read == sum(SIZES.values())


def test_leave_without_readers_moves_exactly_the_share(nodes: Nodes) -> None:
    leaver, *others = (nodes.add(name, HERE) for name in "abcd")
    nodes.fill()
    had = nodes.share("a")
    nodes.views.publish(leaver, LEAVING)
    reports = {node.name: node.mover().take_over(nodes.views.members["a"]) for node in others}
    nodes.views.publish(leaver, None)
    assert {name: report.moved_bytes for name, report in reports.items()} == {
        node.name: nbytes(had & nodes.share(node.name)) for node in others
    }
    for node in others:
        assert node.complete() == nodes.share(node.name)
    assert nodes.origin.bytes_read == sum(SIZES.values())


def test_crash_with_replicas_restores_copies_from_holders(nodes: Nodes) -> None:
    lost, *others = (nodes.add(name, HERE, replicas=2) for name in "abcd")
    nodes.fill(replicas=2)
    had = nodes.share("a", 2)
    lost.server.close()
    nodes.views.publish(lost, None)
    reports = [node.mover().restore(node.name) for node in others]
    assert all(report.complete for report in reports)
    assert sum(report.moved_bytes for report in reports) == nbytes(had)
    for node in others:
        assert node.complete() == nodes.share(node.name, 2)
    assert nodes.origin.bytes_read == sum(SIZES.values())


def _no_threads(*_: object, **__: object) -> MoveReport:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("take_over", [Mover.take_over, _no_threads])
def test_copies_of_a_member_that_dies_while_it_leaves_are_restored(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, take_over: Callable[[Mover, Member], MoveReport]
) -> None:
    monkeypatch.setattr(moving, "FIRST_PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(Mover, "take_over", take_over)
    leaver, *others = (nodes.add(name, HERE, replicas=2) for name in "abcd")
    nodes.fill(replicas=2)
    with contextlib.ExitStack() as stack:
        moves = [Moves(node.store, node.cluster, me=node.name) for node in others]
        for each in moves:
            stack.callback(each.close)
            each.view_changed(nodes.views.view())
        leaver.server.close()
        for state in (LEAVING, None):
            nodes.views.publish(leaver, state)
            for each in moves:
                each.view_changed(nodes.views.view())
        for node in others:
            wait_until(lambda node=node: nodes.share(node.name, 2) <= node.complete())  # type: ignore[misc]
    assert nodes.origin.bytes_read == sum(SIZES.values())


def test_copies_of_a_lost_member_are_restored_from_a_member_that_was_silent_for_a_moment(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, other, _ = (nodes.add(name, HERE, replicas=2) for name in "abc")
    nodes.fill(replicas=2)
    lost.server.close()
    nodes.views.publish(lost, None)
    silent = [True, True]
    request = other.cluster.client.call

    def silent_at_first(*args: Any, **options: Any) -> Any:
        if silent:
            silent.pop()
            raise PeerSilentError("c is silent", next_step="try again")
        return request(*args, **options)

    monkeypatch.setattr(other.cluster.client, "call", silent_at_first)
    assert other.mover().restore("b").complete
    assert other.complete() == set(SIZES)
    assert nodes.origin.bytes_read == sum(SIZES.values())


def test_copies_of_a_lost_member_are_restored_after_all_members_were_silent_or_restoring_failed(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but time changes: the members stay the same."""
    monkeypatch.setattr(node_moves, "_RESTORE_PAUSES_SECONDS", (0.1, 0.1, 0.1, 0.1))
    lost, other, _ = (nodes.add(name, HERE, replicas=2) for name in "abc")
    nodes.fill(replicas=2)
    restore, outcomes = Mover.restore, [MoveReport(failed_bytes=1), StorageError("no disk", next_step="try again")]
    calls = []

    def restore_in_the_end(mover: Mover, me: str) -> MoveReport:
        calls.append(me)
        if outcomes:
            outcome = outcomes.pop()
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        return restore(mover, me)

    monkeypatch.setattr(Mover, "restore", restore_in_the_end)
    with contextlib.closing(Moves(other.store, other.cluster, me="b")) as following:
        following.view_changed(nodes.views.view())
        lost.server.close()
        nodes.views.publish(lost, None)
        following.view_changed(nodes.views.view())
        wait_until(lambda: other.complete() == set(SIZES))
        time.sleep(0.5)
    assert len(calls) == 3  # a complete one is not repeated
    assert nodes.origin.bytes_read == sum(SIZES.values())


@pytest.mark.parametrize(("is_open", "expected"), [(True, 1), (False, 4)], ids=["unreachable", "reachable"])
def test_restore_is_repeated_only_while_a_member_without_a_list_is_reachable(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, is_open: bool, expected: int
) -> None:
    monkeypatch.setattr(node_moves, "_RESTORE_PAUSES_SECONDS", (0.05, 0.05, 0.05))
    other, _ = (nodes.add(name, HERE, replicas=2) for name in "bc")
    calls = []

    def unread(mover: Mover, me: str) -> MoveReport:
        calls.append(me)
        return MoveReport(unread=("c",))

    monkeypatch.setattr(Mover, "restore", unread)
    monkeypatch.setattr(other.cluster.breakers, "is_known_open", lambda member_id: is_open)
    with contextlib.closing(Moves(other.store, other.cluster, me="b")) as following:
        following.refill()
        wait_until(lambda: len(calls) >= expected)
        time.sleep(0.5)
    assert len(calls) == expected


def fail_restores(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes each restore incomplete; returns the list to which it adds the node."""
    calls: list[str] = []

    def failed(mover: Mover, me: str) -> MoveReport:
        calls.append(me)
        return MoveReport(failed_bytes=1)

    monkeypatch.setattr(Mover, "restore", failed)
    return calls


def test_restore_of_a_node_without_threads_does_not_delay_later_views(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_moves, "_RESTORE_PAUSES_SECONDS", (600.0,))
    first, second, other, _ = (nodes.add(name, HERE, replicas=2) for name in "abcd")
    calls = fail_restores(monkeypatch)
    with contextlib.closing(Moves(other.store, other.cluster, me="c")) as following:
        following.view_changed(nodes.views.view())
        monkeypatch.setattr(node_moves, "threading", SimpleNamespace(**{**vars(threading), "Thread": _no_threads}))
        for lost in (first, second):
            nodes.views.publish(lost, None)
            following.view_changed(nodes.views.view())
        wait_until(lambda: len(calls) == 2)


def test_only_the_newest_restore_is_repeated(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_moves, "_RESTORE_PAUSES_SECONDS", (0.3, 0.3))
    other, _ = (nodes.add(name, HERE, replicas=2) for name in "bc")
    calls = fail_restores(monkeypatch)
    with contextlib.closing(Moves(other.store, other.cluster, me="b")) as following:
        for _ in range(3):
            following.refill()
        wait_until(lambda: len(calls) >= 5)
        time.sleep(1.0)
    assert len(calls) == 5  # each once, and the last of them twice more


def test_corrupt_block_of_a_giver_is_not_copied(nodes: Nodes) -> None:
    for name in "abc":
        nodes.add(name, HERE)
    nodes.fill()
    newcomer = nodes.add("d", JOINING)
    nodes.views.publish(newcomer, HERE)
    key = max(nodes.share("d"), key=lambda key: SIZES[key])
    nodes.views.publish(newcomer, JOINING)
    assert SIZES[key] > BLOCK_BYTES
    [giver] = nodes.holders(key)
    entry = nodes.every[giver].entry(key)
    assert entry is not None
    disk = nodes.every[giver].store.open_disks[0]
    disk.sealer.close()  # the giver could verify the file in the background, and find the damage first
    path = disk.store.path(entry)
    inode = os.stat(path).st_ino
    flip(path, 1000)
    assert os.stat(path).st_ino == inode
    reported: list[str] = []
    remove = add_hook(lambda event: reported.append(event.name))
    report = newcomer.mover().fill("d")
    remove()
    assert "peer.corrupt" in reported
    assert nodes.every[giver].store.counters()["corrupt_blocks"] == 1
    assert report.complete  # once the giver had found out it did not offer the block any more
    nodes.views.publish(newcomer, HERE)
    assert newcomer.complete() == nodes.share("d") - {key}
    assert report.moved_bytes == nbytes(nodes.share("d")) - BLOCK_BYTES
    assert nodes.origin.bytes_read == sum(SIZES.values())
    newcomer.read(key)
    assert nodes.origin.bytes_read == sum(SIZES.values()) + BLOCK_BYTES


class _Breaking(Rate):
    """Calls `then` before the n-th request."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        super().__init__(FAST)
        self._count = count
        self._then = then
        self._turn = threading.Lock()

    def pause_before(self, nbytes: int) -> float:
        with self._turn:
            self._count -= 1
            if self._count == 0:
                self._then()
        return super().pause_before(nbytes)


def test_move_with_a_dying_giver_uses_the_others(nodes: Nodes) -> None:
    old = [nodes.add(name, HERE, replicas=2) for name in "abc"]
    nodes.fill(replicas=2)
    newcomer = nodes.add("d", JOINING, replicas=2)
    mover = newcomer.mover()
    mover.rate = _Breaking(5, old[0].server.close)
    report = mover.fill("d")
    nodes.views.publish(newcomer, HERE)
    assert newcomer.complete() == nodes.share("d", 2)
    assert report.failed_bytes == 0
    assert nodes.origin.bytes_read == sum(SIZES.values())


def test_leave_ends_when_the_only_giver_dies(nodes: Nodes) -> None:
    leaver, *others = (nodes.add(name, HERE) for name in "abc")
    nodes.fill()
    had = nodes.share("a")
    nodes.views.publish(leaver, LEAVING)
    member = nodes.views.members["a"]
    mover = others[0].mover(parallel=1)
    mover.rate = _Breaking(3, leaver.server.close)
    report = mover.take_over(member)
    assert not report.complete
    assert 0 < report.moved_bytes < nbytes(had)
    nodes.views.publish(leaver, None)
    for key in had:
        others[0].read(key)  # lost blocks are fetched from the origin once
    assert nodes.origin.bytes_read <= sum(SIZES.values()) + nbytes(had) - report.moved_bytes


@pytest.mark.parametrize(("method", "times"), [("call", 2), ("read", 1)], ids=["listing", "reading"])
def test_leave_copies_everything_after_the_leaver_was_silent_for_a_moment(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, method: str, times: int
) -> None:
    leaver, other = (nodes.add(name, HERE) for name in "ab")
    nodes.fill()
    nodes.views.publish(leaver, LEAVING)
    client, silent = other.cluster.client, list(range(times))
    request = getattr(client, method)

    def silent_at_first(*args: Any, **options: Any) -> Any:
        if silent:
            silent.pop()
            raise PeerSilentError("a is silent", next_step="try again")
        return request(*args, **options)

    monkeypatch.setattr(client, method, silent_at_first)
    assert other.mover().take_over(nodes.views.members["a"]).complete
    assert other.complete() == set(SIZES)
    assert nodes.origin.bytes_read == sum(SIZES.values())


def test_move_without_space_skips_and_evicts_nothing(nodes: Nodes) -> None:
    leaver, *others = (nodes.add(name, HERE) for name in "abc")
    nodes.fill()
    nodes.views.publish(leaver, LEAVING)
    taker = others[0]
    disk = taker.store.open_disks[0]
    before = taker.complete()
    room = Amount(nbytes=disk.store.index.used_bytes() + 2_000_000)
    disk.store.space.set_limits(capacity=room, min_free=Amount(nbytes=0))
    report = taker.mover(parallel=1).take_over(nodes.views.members["a"])
    assert report.skipped_bytes > 0
    assert not report.complete
    assert before <= taker.complete()
    assert disk.store.index.used_bytes() <= disk.store.space.capacity_bytes()


def test_move_after_a_stop_continues(nodes: Nodes) -> None:
    for name in "ab":
        nodes.add(name, HERE)
    nodes.fill()
    newcomer = nodes.add("d", JOINING)
    first = newcomer.mover()
    first.rate = _Breaking(6, first.stop)
    report = first.fill("d")
    assert report.stopped
    assert not report.complete
    rest = newcomer.mover().fill("d")
    nodes.views.publish(newcomer, HERE)
    assert rest.complete
    assert rest.moved_bytes > 0
    assert report.moved_bytes + rest.moved_bytes == nbytes(nodes.share("d"))
    assert newcomer.mover().fill("d").moved_bytes == 0


def test_move_copies_new_blocks_in_the_next_pass(nodes: Nodes) -> None:
    old = [nodes.add(name, HERE) for name in "ab"]
    newcomer = nodes.add("d", JOINING)
    half = list(SIZES)[::2]
    for key in half:
        old[0].read(key)

    def more() -> None:
        for key in SIZES:
            old[1].read(key)

    mover = newcomer.mover()
    mover.rate = _Breaking(2, more)
    assert mover.fill("d").complete
    nodes.views.publish(newcomer, HERE)
    assert newcomer.complete() == nodes.share("d")
    assert nodes.origin.bytes_read == sum(SIZES.values())


def test_move_with_a_defect_in_one_object_copies_the_others(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.add("a", HERE)
    nodes.fill()
    newcomer = nodes.add("d", JOINING)
    nodes.views.publish(newcomer, HERE)
    share = nodes.share("d")
    nodes.views.publish(newcomer, JOINING)
    odd = min(share)

    def planned(what: ObjectDescription, *args: Any, **options: Any) -> list[Run]:
        if what.key == odd:
            raise ZeroDivisionError("of this test")
        return runs_to_pull(what, *args, **options)

    monkeypatch.setattr("millrace.cluster.moving.runs_to_pull", planned)
    report = newcomer.mover().fill("d")
    assert (report.complete, report.failed_bytes) == (False, SIZES[odd])
    assert newcomer.complete() == share - {odd}
    assert odd in caplog.text


def test_move_without_other_members_is_empty(nodes: Nodes) -> None:
    only = nodes.add("a", JOINING)
    nodes.add("b", JOINING)
    assert only.mover().fill("a").complete
    assert nodes.origin.bytes_read == 0
