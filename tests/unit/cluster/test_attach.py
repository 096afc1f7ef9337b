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
from tests.support.etcd import EtcdServer
from tests.support.origins import MemoryOrigin

from millrace.cache.disk import Disk
from millrace.cache.metadata.metadata import ORIGIN_METADATA
from millrace.cache.node import CacheNode, cache_node, close_nodes, store_directory
from millrace.cache.reading.fetching import DirectSource
from millrace.cluster import attach
from millrace.cluster.attach import Attached, close_all, link_for
from millrace.cluster.cluster import Cluster
from millrace.cluster.folder import FolderViews, NodeFacts, NodeFolder
from millrace.cluster.listings import ClusterListings
from millrace.cluster.membership import Member, View
from millrace.cluster.membership.backends import same_cluster
from millrace.cluster.membership.etcd import EtcdMembers
from millrace.cluster.membership.ray_records import NodeRecord
from millrace.cluster.source import ClusterSources
from millrace.config import Amount, CacheOptions, resolve
from millrace.errors import ConfigurationError, StorageError
from millrace.origin import Origin
from millrace.runtime.locks import StoppedHolderError
from millrace.testing.conformance.members import eventually, wait_for

STATIC = "static://127.0.0.1:7001,127.0.0.1:7002"
TOKEN = "a-secret-token"
VIEW = View.of([Member(id="127.0.0.1:7001", address="127.0.0.1:7001")])
OTHER = View.of([Member(id="127.0.0.1:7002", address="127.0.0.1:7002")])

Options = Callable[..., CacheOptions]
Node = Callable[..., NodeFolder]


def node_for(options: CacheOptions, origin: Origin | None = None) -> CacheNode:
    return Attached(options, origin).node


@pytest.fixture
def options(tmp_path: Path) -> Options:
    def build(**given: Any) -> CacheOptions:
        return resolve({"cache_dir": str(tmp_path / "cache"), "min_free": 0, **given}, environ={}, file={})

    return build


@pytest.fixture
def node(options: Options) -> Iterator[Node]:
    """A node of this machine, as other processes see it: its folder and its published facts."""
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
                thread.join(300)

    return wait


def publish(folder: NodeFolder, view: View = VIEW, **given: Any) -> None:
    facts: dict[str, Any] = {
        "member_id": folder.member_id,
        "address": "127.0.0.1:7001",
        "token": TOKEN,
        "members": STATIC,
        "replicas": 1,
        "tls": None,
        "pid": os.getpid(),
        "view": view,
        "capacity": Amount(share=0.8),
        "min_free": Amount(nbytes=0),
    }
    folder.publish(NodeFacts(**{**facts, **given}))


def cluster_of(options: CacheOptions) -> Cluster:
    """The cluster that a process reads through."""
    sources = node_for(options).source
    assert isinstance(sources, ClusterSources)
    return sources.cluster


# --- alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", ["none", "auto"])
def test_node_without_a_cluster_reads_the_origin(options: Options, members: str) -> None:
    alone = options(members=members)
    assert link_for(alone) is None
    assert node_for(alone, MemoryOrigin()) is cache_node(alone)
    assert (node_for(alone).source, node_for(alone).metadata_source) == (DirectSource, ORIGIN_METADATA)


def test_read_continues_when_a_cache_that_is_opened_later_has_other_content(
    options: Options,
    passing: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stopped(self: Disk, *_: object) -> None:
        raise StoppedHolderError("another process")

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "__init__", stopped)
        node = node_for(options())
    assert node.open_disks == []
    store = store_directory(options().cache_dirs[0])
    store.mkdir(parents=True, exist_ok=True)
    (store / "FORMAT").write_text("of another version")
    passing(100)
    assert node_for(options()) is node
    assert node.open_disks == []
    assert "cannot be opened" in caplog.text


def test_cache_in_two_directories_is_opened_later_and_each_failure_is_reported_once(
    tmp_path: Path, passing: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the last of the directories failed for another reason than a stopped process."""
    paths = ":".join(str(tmp_path / name) for name in "ab")
    options = resolve({"min_free": 0}, environ={"MILLRACE_CACHE_DIR": paths}, file={})

    def fail(self: Disk, directory: Path, *_: object) -> None:
        if tmp_path / "a" in directory.parents:
            raise StoppedHolderError("another process")
        raise StorageError("the disk is read-only", next_step="check it")

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "__init__", fail)
        node = node_for(options)
        passing(100)
        passing(100)
    assert [caplog.text.count(text) for text in ("does not continue", "is read-only")] == [1, 1]
    passing(100)
    assert len(node.open_disks) == 2


def test_process_without_a_cluster_imports_nothing_of_it(options: Options, tmp_path: Path) -> None:
    code = """
import sys
import millrace
millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0).node
print(sorted(name for name in sys.modules if name.startswith(("millrace.cluster.", "millrace.cluster.membership", "ray"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "['millrace.cluster.attach', 'millrace.cluster.node_starter']"


def test_node_with_members_none_never_searches(options: Options, passing: Callable[[float], None], node: Node) -> None:
    alone = node_for(options(members="none"))
    node()
    passing(1e6)
    assert node_for(options(members="none")) is alone


def test_node_after_a_close_is_opened_again(options: Options) -> None:
    first = node_for(options(members="none"))
    close_nodes()
    second = node_for(options(members="none"))
    assert second is not first
    assert not second.closed


def test_node_with_members_ray_outside_of_ray_raises(options: Options) -> None:
    with pytest.raises(ConfigurationError, match=r"ray\.init"):
        node_for(options(members="ray"))


def test_attached_returns_the_same_node_as_another(
    options: Options, node: Node, passing: Callable[[float], None]
) -> None:
    folder = node()
    wanted = options(members=STATIC)
    attached = Attached(wanted, MemoryOrigin())
    assert attached.node is attached.node is node_for(wanted)
    publish(folder, token="another-token")
    passing(0.2)
    assert attached.node.source == ClusterSources(cluster_of(wanted))
    assert cluster_of(wanted).link.token == "another-token"
    first = attached.node
    close_all()
    close_nodes()
    assert attached.node is node_for(wanted) is not first


@pytest.mark.parametrize("given", [{"members": "none"}, {"members": "static://127.0.0.1:9", "cluster_token": TOKEN}])
def test_process_outside_of_the_cluster_uses_the_limits_of_a_node_while_it_runs(
    options: Options, node: Node, passing: Callable[[float], None], given: dict[str, str]
) -> None:
    mine = options(capacity="1GB", **given)

    def capacity() -> int:
        ((_, _, nbytes),) = node_for(mine).disks()
        return nbytes

    assert capacity() == 10**9
    for nbytes in (5_000_000, 7_000_000):
        folder = node(capacity=Amount(nbytes=nbytes))
        passing(1.1)
        assert capacity() == nbytes
        folder.close()
        passing(1.1)
        assert capacity() == nbytes  # the node may only start again
        passing(31)
        assert capacity() == 10**9


# --- a client -----------------------------------------------------------------------------------------------


def test_file_system_of_an_unknown_backend_is_refused_at_once(options: Options) -> None:
    with pytest.raises(ConfigurationError, match="is not known"):
        Attached(options(members="zookeeper://127.0.0.1:1"))


def test_client_without_a_token_is_refused(options: Options) -> None:
    with pytest.raises(ConfigurationError, match="cluster_token"):
        node_for(options(members=STATIC))


def test_client_opens_a_separate_membership(options: Options) -> None:
    wanted = options(members=STATIC, cluster_token=TOKEN, replicas=2)
    link = cluster_of(wanted).link
    assert (link.folder, link.member_id, link.token, link.replicas) == ("local", None, TOKEN, 2)
    assert [member.address for member in link.views.view().members] == ["127.0.0.1:7001", "127.0.0.1:7002"]
    listings = node_for(wanted).metadata_source
    assert isinstance(listings, ClusterListings)


def test_clients_of_one_cluster_share_a_membership(options: Options) -> None:
    one = cluster_of(options(members=STATIC, cluster_token=TOKEN))
    two = cluster_of(options(members=STATIC, cluster_token=TOKEN, consistency="1h"))
    assert one is two


def test_client_uses_a_node_that_starts(options: Options, node: Node, passing: Callable[[float], None]) -> None:
    wanted = options(members=STATIC, cluster_token=TOKEN)
    assert cluster_of(wanted).link.member_id is None
    started = node()
    passing(1.1)
    assert cluster_of(wanted).link.member_id == started.member_id


# --- through the machine's node -----------------------------------------------------------------------------


def test_link_through_a_node_uses_its_facts(options: Options, node: Node) -> None:
    node(member_id="127.0.0.1:7001", replicas=2)
    wanted = options(members=STATIC)
    link = cluster_of(wanted).link
    assert (link.folder, link.member_id, link.token, link.replicas) == ("local", "127.0.0.1:7001", TOKEN, 2)
    assert link.views.view() == VIEW
    assert cluster_of(wanted).placement().view == VIEW


def test_link_through_a_node_uses_its_limits(options: Options, node: Node, passing: Callable[[float], None]) -> None:
    mine = options(members=STATIC, capacity="1GB")
    folder = node(capacity=Amount(nbytes=5_000_000), min_free=Amount(share=0.0))
    ((_, _, capacity),) = node_for(mine).disks()
    assert capacity == 5_000_000
    publish(folder, capacity=Amount(nbytes=7_000_000), min_free=Amount(share=0.0))
    passing(1.0)
    ((_, _, capacity),) = node_for(mine).disks()
    assert capacity == 7_000_000


def test_link_skips_nodes_of_other_clusters(options: Options, node: Node) -> None:
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
def test_same_cluster_compares_members_and_endpoints(one: str, other: str, same: bool) -> None:
    assert same_cluster(one, other) is same_cluster(other, one) is same


def test_link_follows_published_facts(options: Options, node: Node, passing: Callable[[float], None]) -> None:
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


def test_link_to_a_dead_node_keeps_its_view_until_a_successor(
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


def test_link_to_a_dead_node_is_replaced_by_another_node(
    options: Options, node: Node, passing: Callable[[float], None]
) -> None:
    folder, other = node(), node()
    wanted = options(members=STATIC)
    assert node_for(wanted).options.folder == "local"
    folder.close()
    passing(1.1)
    assert cluster_of(wanted).link.member_id == other.member_id
    assert node_for(wanted).options.folder == "node-1"


def test_link_to_a_folder_of_another_cluster_is_replaced(
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


def test_link_to_removed_node_becomes_a_client(options: Options, node: Node, passing: Callable[[float], None]) -> None:
    folder = node()
    wanted = options(members=STATIC, cluster_token=TOKEN)
    assert cluster_of(wanted).link.member_id is not None
    folder.close()
    passing(1.1)
    assert cluster_of(wanted).link.member_id is not None  # it may be restarting
    passing(31)
    assert cluster_of(wanted).link.member_id is None
    node()
    passing(1.1)
    assert cluster_of(wanted).link.member_id is not None


def test_read_during_a_search_does_not_wait(
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
        found.wait(300)
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


def test_read_without_new_threads_keeps_its_link(
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


def test_attachment_of_many_threads_is_one(options: Options, node: Node) -> None:
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


def test_attachment_in_a_forked_child_is_new(options: Options, node: Node) -> None:
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
def test_client_in_forked_child_opens_a_separate_membership(options: Options, etcd: EtcdServer) -> None:
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
def test_client_without_etcd_reads_the_origin(options: Options, tmp_path: Path) -> None:
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


def test_forked_child_in_ray_uses_a_node_that_starts_later(
    options: Options, node: Node, passing: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "is_in_ray", lambda: True)
    monkeypatch.setattr(attach, "_process", attach._Process(parents={}))
    assert node_for(options()).source is DirectSource
    node(members="auto")
    passing(attach._ALIVE_SECONDS + 0.1)
    assert isinstance(node_for(options()).source, ClusterSources)


def test_origin_introduced_during_a_search_reaches_the_cluster(
    options: Options, node: Node, passing: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "is_in_ray", lambda: True)
    monkeypatch.setattr(attach, "_process", attach._Process(parents={}))
    first, late = MemoryOrigin(), MemoryOrigin("late")
    assert node_for(options(), first).source is DirectSource
    node(members="auto")
    introduced: list[list[str]] = []

    def searched(options: CacheOptions, *origins: Origin) -> Any:
        introduced.append([origin.identity for origin in origins])
        if len(introduced) == 1:
            Attached(options, late).node  # noqa: B018 - it introduces its origin
        return link_for(options, *origins)

    monkeypatch.setattr(attach, "link_for", searched)
    passing(attach._ALIVE_SECONDS + 0.1)
    assert introduced == [[first.identity], [late.identity]]


def test_process_searches_where_another_node_claimed_its_folder(
    options: Options, node: Node, passing: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "is_in_ray", lambda: True)
    ours = NodeRecord(directory=options().cache_dirs[0], member_id="ours")
    monkeypatch.setattr(attach, "_start_without_waiting", lambda *_: lambda: ours)
    searches: list[CacheOptions] = []
    monkeypatch.setattr(attach, "link_for", lambda options, *_: searches.append(options))
    assert node_for(options()).source is DirectSource
    node(members="static://127.0.0.1:7002")
    passing(attach._LOOK_SECONDS + 0.1)
    assert searches == [options()]
    assert node_for(options()).source is DirectSource


def test_attachment_used_after_close_all_is_connected_again(options: Options) -> None:
    wanted = options(members=STATIC, cluster_token=TOKEN)
    attached = Attached(wanted)
    assert attached.node is node_for(wanted)
    first = cluster_of(wanted)
    close_all()
    assert not attach._process.attachments
    assert attached.node.source == ClusterSources(cluster_of(wanted))
    assert cluster_of(wanted) is not first


def test_close_all_during_the_first_search_closes_its_cluster(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, process = options(members=STATIC, cluster_token=TOKEN), attach._process
    searching, found = threading.Event(), threading.Event()
    read_through: list[Cluster] = []
    closed: list[Cluster] = []

    def slowly(*arguments: Any) -> Any:
        searching.set()
        found.wait(300)
        return link_for(*arguments)

    monkeypatch.setattr(attach, "link_for", slowly)
    monkeypatch.setattr(Cluster, "close", lambda cluster: closed.append(cluster))
    reading = threading.Thread(target=lambda: read_through.append(cluster_of(wanted)))
    reading.start()
    assert searching.wait(300)
    closing = threading.Thread(target=close_all)
    closing.start()
    eventually(lambda: attach._process is not process)
    found.set()
    for thread in (reading, closing):
        thread.join(300)
    assert closed == read_through


def test_disks_of_a_node_distinguish_copies_and_those_of_a_client_do_not(options: Options, node: Node) -> None:
    client = node_for(options(members=STATIC, cluster_token=TOKEN, cache_dir=str(options().cache_dirs[0]) + "-client"))
    assert client.open_disks[0].copies.still_a_copy is None
    node(VIEW, member_id="127.0.0.1:7001")
    attached = node_for(options(members=STATIC, cluster_token=TOKEN))
    ask = attached.open_disks[0].copies.still_a_copy
    assert ask is not None
    assert not ask(b"x" * 16, 10)  # it is the only member
