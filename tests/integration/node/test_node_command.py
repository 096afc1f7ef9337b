"""`millrace node run` as processes: divided loads, planned leaves, lost nodes, and their output."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.etcd import EtcdServer
from tests.support.local_cluster import TOKEN, LocalCluster, LocalNode
from tests.support.waiting import wait_until

from millrace.cli import main
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.dataplane.wire import GetMode, ObjectDescription
from millrace.cluster.membership import View
from millrace.cluster.placement import Placement
from millrace.errors import PeerError, PeerRefusedError
from millrace.origin import ObjectInfo, open_origin
from millrace.origin.object_store import ObjectStoreOrigin
from millrace.store.records import object_id
from millrace.testing.process import free_ports
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

OBJECTS, OBJECT_BYTES = 24, 1_500_000
TOTAL = OBJECTS * OBJECT_BYTES
URL = "s3://cluster-loads/train"

pytestmark = pytest.mark.usefixtures("patient_peers", "data")


@pytest.fixture(scope="module")
def data(s3: S3Server) -> None:
    s3.create_bucket("cluster-loads")
    origin = open_origin("s3", s3.target_options)
    for number in range(OBJECTS):
        origin.put(f"cluster-loads/train/{number}.bin", os.urandom(OBJECT_BYTES))


@pytest.fixture
def asker(options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a token and credentials, which runs no node."""
    monkeypatch.setenv("MILLRACE_CLUSTER_TOKEN", TOKEN)
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "asker"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])


@pytest.fixture
def cluster(options: dict[str, str], tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path / "cluster", 3, target_options=options, options=["--min-free", "0"], patient=True
    ) as cluster:
        yield cluster


@pytest.fixture
def millrace(asker: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(*arguments: str, code: int = 0) -> Any:
        actual = main(list(arguments))
        captured = capsys.readouterr()
        assert actual == code, captured.err
        if code:
            assert captured.out == ""
            return captured.err
        return json.loads(captured.out) if "--json" in arguments else captured.out

    return run


def view_of(cluster: LocalCluster, node: LocalNode) -> View:
    return View.from_json(cluster.client.call(cluster.member(node).address, "GET", "/v1/view"))


def described(origin: ObjectStoreOrigin, info: ObjectInfo) -> ObjectDescription:
    return ObjectDescription(origin.identity, info.key, info.version, info.size)


def owner(cluster: LocalCluster, origin: ObjectStoreOrigin, info: ObjectInfo) -> LocalNode:
    """The node that owns an object: by a hash of addresses with random ports."""
    name = object_id(origin.identity, info.key, info.version, info.size)
    first = Placement(view_of(cluster, cluster.nodes[0])).holders(name)[0]
    return next(node for node in cluster.nodes if node.address == first.address)


def is_cached(cluster: LocalCluster, node: LocalNode, what: ObjectDescription) -> bool:
    """Whether a node has the first byte of an object."""
    try:
        cluster.client.read(cluster.member(node), what, (0, 1), mode=GetMode.CACHED, deadline=60.0)
    except PeerRefusedError as error:
        if error.status != 404:
            raise
        return False
    return True


def listed(options: dict[str, str]) -> tuple[ObjectStoreOrigin, list[ObjectInfo]]:
    origin = open_origin("s3", options)
    return origin, [info for page in origin.list_all("cluster-loads/train") for info in page]


def test_load_is_divided_and_shows_progress(
    cluster: LocalCluster, region: EmulatedRegion, options: dict[str, str], millrace: Callable[..., Any]
) -> None:
    first = cluster.nodes[0]
    done = millrace("load", URL, "--node", first.address, "--json")
    assert (done["nodes"], done["objects"], done["done_objects"], done["listed"]) == (3, OBJECTS, OBJECTS, True)
    assert (done["done_bytes"], done["fetched_bytes"]) == (TOTAL, TOTAL)
    assert region.stats(prefix="/cluster-loads/train/").bytes_down == TOTAL
    # Every object is on its owner only.
    origin, infos = listed(options)
    shares = Counter(dict.fromkeys((node.address for node in cluster.nodes), 0))
    for info in infos:
        its_owner = owner(cluster, origin, info)
        shares[its_owner.address] += 1
        for node in cluster.nodes:
            assert is_cached(cluster, node, described(origin, info)) == (node is its_owner)
    # A second load that verifies fetches nothing.
    region.reset()
    again = millrace("load", URL, "--node", cluster.nodes[1].address, "--verify", "--json")
    assert (again["done_objects"], again["fetched_bytes"], again["bad_blocks"]) == (OBJECTS, 0, 0)
    assert region.stats(prefix="/cluster-loads/train/").bytes_down == 0
    text = millrace("load", f"{URL}/1.bin", "--node", first.address)
    assert text.endswith("1.50 MB were cached before; on 3 nodes\n")
    # The caller's disk and process were not used.
    assert not Path(os.environ["MILLRACE_CACHE_DIR"], "millrace", "local").exists()

    def status() -> dict[str, Any]:
        found: dict[str, Any] = millrace("status", "--node", first.address, "--json")["cluster"]
        return found

    wait_until(lambda: status()["complete_objects"] == OBJECTS)  # an earlier count is reused for a while
    shown = status()
    assert all(node["answers"] and node["state"] == "here" for node in shown["nodes"])
    assert {node["address"]: node["objects"] for node in shown["nodes"]} == shares
    assert (shown["objects"], shown["complete_objects"]) == (OBJECTS, OBJECTS)
    assert shown["used_bytes"] >= TOTAL
    assert shown["counters"]["origin_bytes"] == TOTAL
    cluster.nodes[2].kill()
    lines = millrace("status", "--node", first.address).splitlines()
    assert lines[0].split() == [
        *("address", "state", "hits", "used", "capacity", "objects"),
        *("origin", "peers", "served", "skipped"),
    ]
    assert [line.split()[1] for line in lines[1:4]] == ["here", "here", "silent"]
    assert lines[4].startswith("2 nodes, 1 more that do not respond: ")


@pytest.mark.slow
def test_load_continues_after_a_killed_node(
    cluster: LocalCluster, region: EmulatedRegion, options: dict[str, str], millrace: Callable[..., Any]
) -> None:
    asked, *others = cluster.nodes
    origin, infos = listed(options)
    # One with a share: without one its part of the load ends at once.
    victim = next(node for info in infos if (node := owner(cluster, origin, info)) in others)
    region.reshape(round_trip_seconds=0.005, bytes_per_second=6e5)  # for a minute
    with subprocess.Popen(
        [sys.executable, "-m", "millrace.cli", "load", URL, "--node", asked.address, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as load:
        wait_until(lambda: region.stats(prefix="/cluster-loads/train/").bytes_down > TOTAL / 60)
        victim.kill()
        region.reshape(round_trip_seconds=0.0, bytes_per_second=None)
        out, err = load.communicate(timeout=300)
    assert (load.returncode, err) == (0, "")
    done = json.loads(out)
    assert (done["nodes"], done["objects"], done["done_objects"], done["done_bytes"]) == (2, OBJECTS, OBJECTS, TOTAL)
    # Only the share of the killed node may have been fetched twice.
    assert TOTAL <= region.stats(prefix="/cluster-loads/train/").bytes_down < 2 * TOTAL


@pytest.mark.slow
def test_load_continues_with_a_silent_node(
    region: EmulatedRegion,
    options: dict[str, str],
    tmp_path: Path,
    millrace: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LocalCluster(tmp_path / "cluster", 3, target_options=options, options=["--min-free", "0"]) as cluster:
        first, silent, _ = cluster.nodes
        call = PeerClient.call

        def impatient(client: PeerClient, address: str, *arguments: Any, **more: Any) -> Any:
            """Only with the silent node, however slow the others are."""
            return call(
                client, address, *arguments, **(more | {"deadline": 0.5} if address == silent.address else more)
            )

        silent.suspend()
        with monkeypatch.context() as patched:
            patched.setattr(PeerClient, "call", impatient)
            done = millrace("load", URL, "--node", first.address, "--json")
        assert (done["nodes"], done["done_objects"], done["done_bytes"]) == (2, OBJECTS, TOTAL)
        assert region.stats(prefix="/cluster-loads/train/").bytes_down == TOTAL
        silent.resume()
        # The resumed node takes part again.
        assert millrace("load", URL, "--node", first.address, "--json")["nodes"] == 3


@pytest.mark.slow
def test_interrupt_ends_a_load_on_all_nodes(
    cluster: LocalCluster, region: EmulatedRegion, millrace: Callable[..., Any]
) -> None:
    region.reshape(round_trip_seconds=0.005, bytes_per_second=6e5)  # for a minute
    with subprocess.Popen(
        [sys.executable, "-m", "millrace.cli", "load", URL, "--node", cluster.nodes[0].address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as load:
        wait_until(lambda: region.stats(prefix="/cluster-loads/train/").bytes_down > TOTAL / 60)
        load.send_signal(2)
        out, err = load.communicate(timeout=300)
    assert (load.returncode, out) == (130, "")
    assert "run the same command again to continue" in err
    wait_until(lambda: not any(status["loads"] for status in statuses(cluster)))
    region.reshape(round_trip_seconds=0.0, bytes_per_second=None)
    assert millrace("load", URL, "--node", cluster.nodes[1].address, "--json")["done_bytes"] == TOTAL


def test_node_after_sigterm_leaves_as_planned(
    cluster: LocalCluster, region: EmulatedRegion, millrace: Callable[..., Any]
) -> None:
    first, second, third = cluster.nodes
    millrace("load", URL, "--node", first.address)
    region.reset()
    third.terminate()
    assert third.wait(300) == 0
    assert f"READY {third.address} member {third.address}" in third.log.read_text()
    log = third.log.read_text()
    assert f" INFO {third.address}: this node has left the cluster\n" in log
    assert f"{third.address}: {third.address}" not in log
    # The other two nodes have every object now, without a request to the origin.
    done = millrace("load", URL, "--node", first.address, "--json")
    assert (done["nodes"], done["done_objects"]) == (2, OBJECTS)
    assert region.stats(prefix="/cluster-loads/train/").bytes_down == 0
    # Any machine with the token can drain a node. The last node waits for no other.
    reported = millrace("node", "drain", second.address, "--json")
    assert (reported["address"], reported["left"]) == (second.address, True)
    assert second.wait(120) == 0
    text = millrace("node", "drain", "--cache-dir", str(first.cache_dir))
    assert text.startswith(f"{first.address} has left after ")
    assert first.wait(120) == 0


def test_second_signal_ends_the_node_at_once(options: dict[str, str], tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "cluster", 2, target_options=options, options=["--json"], patient=True) as cluster:
        first, second = cluster.nodes
        second.suspend()  # so that no member takes over; it is waited for
        first.terminate()
        wait_until(lambda: any(line["event"] == "cluster.leaving" for line in lines_of(first)))
        first.terminate()
        assert first.wait(120) == 143  # 0 after a drain
        assert [line for line in lines_of(first) if line["event"] == "ready"] == [
            {"schema_version": 1, "event": "ready", "address": first.address, "member": first.address}
        ]
        second.resume()


def lines_of(node: LocalNode) -> list[dict[str, Any]]:
    return [json.loads(line) for line in node.log.read_text().splitlines() if line.startswith("{")]


def test_node_with_an_unread_log_continues(options: dict[str, str], tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = "exec >&- 2>&-; exec " + shlex.join(
        [sys.executable, "-m", "millrace.cli", "node", "run", "--members", f"static://127.0.0.1:{port}"]
    )
    environ = {"MILLRACE_CLUSTER_TOKEN": TOKEN, "MILLRACE_CACHE_DIR": str(tmp_path / "cache")}
    client = PeerClient(token=TOKEN)
    with subprocess.Popen(["sh", "-c", command], env={**os.environ, **environ}) as process:
        try:
            wait_until(lambda: answers(client, f"127.0.0.1:{port}"))
            process.terminate()
            assert process.wait(120) == 0
        finally:
            process.kill()
            client.close()


def answers(client: PeerClient, address: str) -> bool:
    try:
        return bool(client.call(address, "GET", "/v1/status")["state"] == "here")
    except PeerError:
        return False


def test_link_leads_to_the_status_page_of_the_node(cluster: LocalCluster, millrace: Callable[..., Any]) -> None:
    node = cluster.nodes[0]
    url = f"http://{node.address}/#token={TOKEN}"
    assert millrace("node", "link", node.address) == f"{url}\n"
    assert millrace("node", "link", node.address, "--json") == {
        "schema_version": 1,
        "address": node.address,
        "url": url,
    }
    # On the node's own machine neither its address nor the token is needed.
    assert millrace("node", "link", "--cache-dir", str(node.cache_dir)) == f"{url}\n"
    assert "no node runs on this machine" in millrace("node", "link", code=1)
    cluster.nodes[1].kill()
    assert "check the address" in millrace("node", "link", cluster.nodes[1].address, code=1)


def test_command_with_invalid_arguments_is_refused(
    cluster: LocalCluster, millrace: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = cluster.nodes[0].address
    text = millrace("load", "s3://cluster-loads/nothing", "--node", address, code=1)
    assert text.count("\n") == 1
    assert "s3://cluster-loads/nothing does not exist" in text
    # A service that is not in the nodes' environment.
    text = millrace("load", URL, "--node", address, "--endpoint-url", "http://127.0.0.1:9", code=1)
    assert text.count("\n") == 1
    assert "no access to s3+http://127.0.0.1:9" in text
    assert "--origin" in text
    monkeypatch.setenv("MILLRACE_CLUSTER_TOKEN", "another-token")
    for arguments in (
        ["status", "--node", address],
        ["load", URL, "--node", address],
        ["node", "drain", address],
        ["node", "link", address],
    ):
        assert "has another cluster_token: set the token of its cluster" in millrace(*arguments, code=1)
    monkeypatch.delenv("MILLRACE_CLUSTER_TOKEN")
    assert "MILLRACE_CLUSTER_TOKEN" in millrace("status", "--node", address, code=1)
    # On the node's own machine its token is found. The wrong token above had no effect.
    shown = millrace("status", "--cache-dir", str(cluster.nodes[0].cache_dir), "--json")
    assert len(shown["cluster"]["nodes"]) == 3
    assert shown["disks"][0]["directory"].startswith(str(cluster.nodes[0].cache_dir))
    checks = millrace("doctor", "--cache-dir", str(cluster.nodes[0].cache_dir), "--json")["checks"]
    found = {check["name"]: check for check in checks}
    assert (found["cluster token"]["state"], found["node"]["state"], found["nodes"]["state"]) == ("ok", "ok", "ok")


def test_nodes_with_etcd_form_a_cluster(
    options: dict[str, str],
    region: EmulatedRegion,
    tmp_path: Path,
    millrace: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        EtcdServer(tmp_path / "etcd") as etcd,
        LocalCluster(
            tmp_path / "cluster",
            1,
            later=1,
            members=etcd.members,
            target_options=options,
            options=["--min-free", "0"],
            patient=True,
        ) as cluster,
    ):
        monkeypatch.setenv("MILLRACE_MEMBERS", etcd.members)
        assert millrace("load", URL, "--json")["nodes"] == 1
        region.reset()
        # The new node is filled from the other node.
        newcomer = cluster.start_one(1)
        done = millrace("load", URL, "--json")
        assert (done["nodes"], done["done_bytes"]) == (2, TOTAL)
        assert region.stats(prefix="/cluster-loads/train/").bytes_down == 0
        shown = millrace("status", "--json")["cluster"]
        assert [node["state"] for node in shown["nodes"]] == ["here", "here"]
        checks = {check["name"]: check for check in millrace("doctor", "--json")["checks"]}
        assert (checks["etcd"]["state"], checks["node"]["state"], checks["nodes"]["state"]) == ("ok", "note", "ok")
        newcomer.terminate()
        assert newcomer.wait(300) == 0
        wait_until(lambda: len(view_of(cluster, cluster.nodes[0]).members) == 1)


def statuses(cluster: LocalCluster) -> list[dict[str, Any]]:
    return [
        cluster.client.call(cluster.member(node).address, "GET", "/v1/status", deadline=60.0) for node in cluster.nodes
    ]
