"""How a process finds its node and its cluster: over real folders, real members and the process's real cache."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.cache.asking import ASK_ORIGIN
from millrace.cache.node import cache_node, close_nodes
from millrace.cache.source import direct
from millrace.config import Amount, CacheOptions, resolve
from millrace.errors import ConfigurationError
from millrace.members import Member, View
from millrace.members.etcd import EtcdMembers
from millrace.members.opening import same_cluster
from millrace.peers import attach
from millrace.peers.attach import Attached, close_all, link_for, node_for
from millrace.peers.cluster import Cluster
from millrace.peers.folder import FolderViews, NodeFolder
from millrace.peers.listings import ClusterListings
from millrace.testing.conformance.members import eventually, wait_for
from millrace.testing.etcd import EtcdServer
from millrace.testing.origins import MemoryOrigin

STATIC = "static://127.0.0.1:7001,127.0.0.1:7002"
TOKEN = "a-secret-token"
VIEW = View.of([Member(id="127.0.0.1:7001", address="127.0.0.1:7001")])
OTHER = View.of([Member(id="127.0.0.1:7002", address="127.0.0.1:7002")])

Options = Callable[..., CacheOptions]
Node = Callable[..., NodeFolder]


@pytest.fixture
def options(tmp_path: Path) -> Options:
    def build(**given: Any) -> CacheOptions:
        return resolve({"cache_dir": str(tmp_path / "cache"), "min_free": 0, **given}, environ={}, file={})

    return build


@pytest.fixture
def node(options: Options) -> Iterator[Node]:
    """A node of this machine, as far as other processes can see: its folder, and what it publishes."""
    folders: list[NodeFolder] = []

    def start(view: View = VIEW, **published: Any) -> NodeFolder:
        folders.append(NodeFolder.claim(options()))
        publish(folders[-1], view, **published)
        return folders[-1]

    yield start
    for folder in folders:
        folder.close()


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass, for all that looks at the clock now and then."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds
        for options in list(attach._process.attachments):
            node_for(options)
        for thread in threading.enumerate():
            if thread.name == attach.SEARCHING:
                thread.join(60)

    return wait


def publish(folder: NodeFolder, view: View = VIEW, **given: Any) -> None:
    facts: dict[str, Any] = {"address": "127.0.0.1:7001", "token": TOKEN, "members": STATIC, **given}
    folder.publish(view, **facts)


def cluster_of(options: CacheOptions) -> Cluster:
    """The cluster that a process reads through."""
    cluster = getattr(node_for(options).source, "__self__", None)
    assert isinstance(cluster, Cluster)
    return cluster


# --- alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", ["none", "auto"])
def test_without_a_cluster_it_is_the_node_alone(options: Options, members: str) -> None:
    alone = options(members=members)
    assert link_for(alone) is None
    assert node_for(alone, MemoryOrigin()) is cache_node(alone)
    assert (node_for(alone).source, node_for(alone).asking) == (direct, ASK_ORIGIN)


def test_without_a_cluster_nothing_of_it_is_imported(options: Options, tmp_path: Path) -> None:
    code = """
import sys
import millrace
millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0).node
print([name for name in sys.modules if name.startswith(("millrace.peers.", "millrace.members", "ray"))])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "['millrace.peers.attach']"


def test_alone_nothing_is_ever_looked_at_again(options: Options, passing: Callable[[float], None], node: Node) -> None:
    alone = node_for(options(members="none"))
    node()
    passing(1e6)
    assert node_for(options(members="none")) is alone


def test_a_cache_that_was_closed_is_opened_anew(options: Options) -> None:
    first = node_for(options(members="none"))
    close_nodes()
    second = node_for(options(members="none"))
    assert second is not first
    assert not second.closed


def test_ray_is_asked_for_where_there_is_none(options: Options) -> None:
    with pytest.raises(ConfigurationError, match=r"ray\.init"):
        node_for(options(members="ray"))


def test_who_asks_often_gets_the_same(options: Options, node: Node, passing: Callable[[float], None]) -> None:
    folder = node()
    wanted = options(members=STATIC)
    attached = Attached(wanted, MemoryOrigin())
    assert attached.node is attached.node is node_for(wanted)
    publish(folder, token="another-token")
    passing(0.2)
    assert attached.node.source == cluster_of(wanted).source
    assert cluster_of(wanted).link.token == "another-token"
    first = attached.node
    close_all()
    close_nodes()
    assert attached.node is node_for(wanted) is not first


# --- a client -----------------------------------------------------------------------------------------------


def test_a_client_needs_the_token(options: Options) -> None:
    with pytest.raises(ConfigurationError, match="cluster_token"):
        node_for(options(members=STATIC))


def test_a_client_has_a_membership_of_its_own(options: Options) -> None:
    wanted = options(members=STATIC, cluster_token=TOKEN, replicas=2)
    link = cluster_of(wanted).link
    assert (link.folder, link.member_id, link.token, link.replicas) == ("local", None, TOKEN, 2)
    assert [member.address for member in link.views.view().members] == ["127.0.0.1:7001", "127.0.0.1:7002"]
    listings = node_for(wanted).asking
    assert isinstance(listings, ClusterListings)


def test_one_process_has_one_membership_of_a_cluster(options: Options) -> None:
    one = cluster_of(options(members=STATIC, cluster_token=TOKEN))
    two = cluster_of(options(members=STATIC, cluster_token=TOKEN, consistency="1h"))
    assert one is two


def test_a_client_follows_a_node_that_starts(options: Options, node: Node, passing: Callable[[float], None]) -> None:
    wanted = options(members=STATIC, cluster_token=TOKEN)
    assert cluster_of(wanted).link.member_id is None
    started = node()
    passing(1.1)
    assert cluster_of(wanted).link.member_id == started.member_id


# --- through the machine's node -----------------------------------------------------------------------------


def test_the_node_of_the_machine_says_all(options: Options, node: Node) -> None:
    node(member_id="127.0.0.1:7001", replicas=2)
    wanted = options(members=STATIC)
    link = cluster_of(wanted).link
    assert (link.folder, link.member_id, link.token, link.replicas) == ("local", "127.0.0.1:7001", TOKEN, 2)
    assert link.views.view() == VIEW
    assert cluster_of(wanted).placement().view == VIEW


def test_the_limits_of_the_node_hold(options: Options, node: Node, passing: Callable[[float], None]) -> None:
    mine = options(members=STATIC, capacity="1GB")
    folder = node(capacity=Amount(nbytes=5_000_000), min_free=Amount(share=0.0))
    ((_, _, capacity),) = node_for(mine).disks()
    assert capacity == 5_000_000
    publish(folder, capacity=Amount(nbytes=7_000_000), min_free=Amount(share=0.0))
    passing(1.0)
    ((_, _, capacity),) = node_for(mine).disks()
    assert capacity == 7_000_000
    publish(folder)  # as an older node, which does not say
    passing(1.0)
    ((_, _, capacity),) = node_for(mine).disks()
    assert capacity == 1_000_000_000


def test_nodes_of_other_clusters_are_passed_over(options: Options, node: Node) -> None:
    node(members="static://127.0.0.1:9")
    mine = node()
    wanted = options(members=STATIC)
    assert cluster_of(wanted).link.member_id == mine.member_id
    assert node_for(wanted).options.folder == "node-1"
    assert [str(place) for place, _, _ in node_for(wanted).disks()] == [
        str(wanted.cache_dirs[0] / "millrace" / "node-1")
    ]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("etcd://a:1,b:2", "etcd://b:2", True),
        ("etcd://a:1/default", "etcd://a:1", True),
        ("etcd://a:1/x", "etcd://a:1/x", True),
        ("etcd://a:1/x", "etcd://a:1", False),
        ("etcd://a:1", "etcd://b:2", False),
        ("static://a:1,b:2", "static://b:2,a:1", True),
        ("static://a:1,b:2", "static://a:1", False),
        ("static://a:1", "etcd://a:1", False),
        ("ray", "static://a:1", False),
    ],
)
def test_one_cluster_may_be_written_in_several_ways(one: str, other: str, same: bool) -> None:
    assert same_cluster(one, other) is same_cluster(other, one) is same


def test_what_the_node_publishes_is_followed(options: Options, node: Node, passing: Callable[[float], None]) -> None:
    folder = node()
    wanted = options(members=STATIC)
    first = cluster_of(wanted)
    publish(folder, OTHER)
    passing(0.2)
    assert cluster_of(wanted) is first
    assert first.link.views.view() == OTHER
    publish(folder, OTHER, token="another-token")
    passing(0.2)
    second = cluster_of(wanted)
    assert (second.link.token, second.link.views.view()) == ("another-token", OTHER)
    assert node_for(wanted) is cache_node(node_for(wanted).options)


def test_a_dead_node_leaves_its_view_and_its_successor_is_followed(
    options: Options, node: Node, passing: Callable[[float], None]
) -> None:
    folder = node()
    wanted = options(members=STATIC)
    first = cluster_of(wanted)
    folder.close()
    for _ in range(100):
        passing(1.0)
        assert cluster_of(wanted) is first  # no token, so it cannot be a client
    assert first.link.views.view() == VIEW
    successor = node(OTHER, token="another-token")
    assert successor.name == "local"
    passing(0.2)
    assert cluster_of(wanted).link.token == "another-token"


def test_another_node_of_the_machine_takes_the_place_of_a_dead_one(
    options: Options, node: Node, passing: Callable[[float], None]
) -> None:
    folder, other = node(), node()
    wanted = options(members=STATIC)
    assert node_for(wanted).options.folder == "local"
    folder.close()
    passing(1.1)
    assert cluster_of(wanted).link.member_id == other.member_id
    assert node_for(wanted).options.folder == "node-1"


def test_a_folder_that_another_cluster_took_is_left(
    options: Options, node: Node, passing: Callable[[float], None]
) -> None:
    folder, other = node(), node()
    wanted = options(members=STATIC)
    assert cluster_of(wanted).link.member_id == folder.member_id
    folder.close()
    node(members="static://127.0.0.1:9", token="a-strange-token")
    passing(0.2)
    assert cluster_of(wanted).link.token == TOKEN
    passing(1.1)
    assert cluster_of(wanted).link.member_id == other.member_id


def test_with_a_token_it_becomes_a_client_when_the_node_is_gone_for_good(
    options: Options, node: Node, passing: Callable[[float], None]
) -> None:
    folder = node()
    wanted = options(members=STATIC, cluster_token=TOKEN)
    assert cluster_of(wanted).link.member_id is not None
    folder.close()
    passing(1.1)
    assert cluster_of(wanted).link.member_id is not None  # it may be starting anew
    passing(31)
    assert cluster_of(wanted).link.member_id is None
    node()
    passing(1.1)
    assert cluster_of(wanted).link.member_id is not None


def test_no_read_waits_for_a_search(
    options: Options, node: Node, passing: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("_FOR_GOOD_SECONDS", "_ALIVE_SECONDS", "_LOOK_SECONDS"):
        monkeypatch.setattr(attach, pause, 0.0)
    folder = node()
    wanted = options(members=STATIC, cluster_token=TOKEN)
    first = cluster_of(wanted)
    folder.close()
    found = threading.Event()
    searches: list[object] = []

    def slowly(*arguments: Any) -> Any:
        searches.append(arguments)
        found.wait(60)
        return link_for(*arguments)

    monkeypatch.setattr(attach, "link_for", slowly)
    for _ in range(10):
        assert cluster_of(wanted) is first
    eventually(lambda: bool(searches))
    assert cluster_of(wanted) is first
    assert len(searches) == 1
    found.set()
    passing(0.0)
    assert cluster_of(wanted).link.member_id is None


def test_a_read_goes_on_where_no_thread_can_be_had(
    options: Options, node: Node, passing: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = node()
    wanted = options(members=STATIC, cluster_token=TOKEN)
    first = cluster_of(wanted)
    folder.close()
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == attach.SEARCHING:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", fails)
        passing(1.1)
        passing(31)
        assert cluster_of(wanted) is first
    passing(31)
    assert cluster_of(wanted).link.member_id is None


# --- threads and forks --------------------------------------------------------------------------------------


def test_many_threads_attach_once(options: Options, node: Node) -> None:
    node()
    wanted = options(members=STATIC)
    found: list[object] = []
    barrier = threading.Barrier(16)

    def run() -> None:
        barrier.wait()
        found.append((node_for(wanted, MemoryOrigin()), cluster_of(wanted)))

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1


def test_a_forked_child_attaches_for_itself(options: Options, node: Node) -> None:
    node()
    wanted = options(members=STATIC)
    parents = cluster_of(wanted)
    assert isinstance(parents.link.views, FolderViews)
    attached = Attached(wanted)
    assert attached.node is node_for(wanted)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            childs = cluster_of(wanted)
            same = childs.link.views.view() == VIEW and childs.link.token == TOKEN
            same = same and attached.node is node_for(wanted)
            os.write(writing, b"new" if same and childs is not parents else b"not")
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 3) == b"new"
    os.waitpid(pid, 0)
    os.close(reading)


@pytest.mark.etcd
def test_a_forked_child_of_a_client_watches_for_itself(options: Options, etcd: EtcdServer) -> None:
    wanted = options(members=f"{etcd.members}/attach-fork", cluster_token=TOKEN)
    parents = cluster_of(wanted)
    member = EtcdMembers.parse(wanted.members)
    member.join(VIEW.members[0])
    wait_for(parents.link.views, *VIEW.members)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            childs = cluster_of(wanted)
            wait_for(childs.link.views, *VIEW.members)
            member_two = View.of([*VIEW.members, *OTHER.members])
            os.write(writing, b"new" if childs is not parents else b"not")
            eventually(lambda: childs.link.views.view() == member_two)
            os.write(writing, b"two")
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 3) == b"new"
    second = EtcdMembers.parse(wanted.members)
    second.join(OTHER.members[0])
    assert os.read(reading, 3) == b"two"
    wait_for(parents.link.views, *VIEW.members, *OTHER.members)  # the child has left the parent's connections alone
    os.waitpid(pid, 0)
    os.close(reading)
    for each in (member, second):
        each.leave()
        each.close()


@pytest.mark.etcd
def test_without_etcd_a_client_reads_from_the_origin_until_there_is_one(options: Options, tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    server.kill()
    wanted = options(members=server.members, cluster_token=TOKEN)
    origin = MemoryOrigin()
    origin.put("b/k", b"x" * 100_000)
    node = node_for(wanted, origin)
    with contextlib.closing(node.open_reader(origin, origin.head("b/k"))) as reader:
        assert reader.read(0, 100_000) == b"x" * 100_000
    assert node.counters()["origin_bytes"] == 100_000
    assert cluster_of(wanted).link.views.view() == View(())
    with server:
        member = EtcdMembers.parse(wanted.members)
        member.join(VIEW.members[0])
        wait_for(cluster_of(wanted).link.views, *VIEW.members)
        member.close()


def test_close_all_ends_everything(options: Options) -> None:
    wanted = options(members=STATIC, cluster_token=TOKEN)
    attached = Attached(wanted)
    assert attached.node is node_for(wanted)
    first = cluster_of(wanted)
    close_all()
    assert not attach._process.attachments
    assert attached.node.source == cluster_of(wanted).source
    assert cluster_of(wanted) is not first


def test_a_nodes_disks_tell_copies_apart_and_a_clients_do_not(options: Options, node: Node) -> None:
    client = node_for(options(members=STATIC, cluster_token=TOKEN, cache_dir=str(options().cache_dirs[0]) + "-client"))
    assert client.open_disks[0].still_a_copy is None
    node(VIEW, member_id="127.0.0.1:7001")
    attached = node_for(options(members=STATIC, cluster_token=TOKEN))
    ask = attached.open_disks[0].still_a_copy
    assert ask is not None
    assert not ask(b"x" * 16, 10)  # it is the only member
