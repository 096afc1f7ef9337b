"""Real nodes in processes of their own, killed, suspended, damaged and cut off while others read: every byte stays right."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.support.etcd import EtcdServer
from tests.support.harms import flip
from tests.support.local_cluster import LocalCluster, LocalNode, Reading

from millrace.config import SILENCE_SECONDS
from millrace.filesystem import filesystem
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

MB = 1 << 20
SIZES = [*([9 * MB + 17] * 6), *([3 * MB] * 8), *([40_000] * 30)]
TOTAL = sum(SIZES)

# How long one read may take while a peer newly fails: the deadline for three peers at most, and what a busy machine adds.
_MOST_SECONDS = 3 * SILENCE_SECONDS + 60


@pytest.fixture(scope="module")
def data(s3: S3Server) -> dict[str, str]:
    """Objects at the origin: key to checksum."""
    s3.create_bucket("cluster-faults")
    fs = filesystem("s3", s3.target_options, members="none")
    chance = random.Random(5)
    keys = {}
    for number, size in enumerate(SIZES):
        content = chance.randbytes(size)
        key = f"cluster-faults/train/{number:03d}.bin"
        fs.origin.put(key, content)
        keys[key] = xxhash.xxh3_64_hexdigest(content)
    return keys


def downloaded(region: EmulatedRegion) -> int:
    """Bytes of objects that left the origin."""
    kinds = region.stats("/cluster-faults/").by_kind
    return kinds["GET"].bytes_down if "GET" in kinds else 0


def everywhere(
    cluster: LocalCluster, data: Mapping[str, str], nodes: Sequence[LocalNode], **settings: Any
) -> list[Reading]:
    return [cluster.read_on(node, data, seed=node.number, **settings) for node in nodes]


def assert_all_right(readings: Sequence[Reading], *, stop: bool = True) -> list[dict[str, Any]]:
    """One report of each, none with a wrong byte or an error."""
    reports = [reading.report() for reading in readings]
    for report in reports:
        assert (report["wrong"], report["errors"]) == ([], [])
    if stop:
        for reading in readings:
            reading.stop()
    return reports


def assert_downloaded_once(region: EmulatedRegion, cluster: LocalCluster) -> None:
    """Each byte left the origin once. A node that a busy machine kept silent for a moment costs an object each time."""
    most = TOTAL + cluster.counters()["peer_failures"] * max(SIZES)
    assert TOTAL <= downloaded(region) <= most


@pytest.mark.slow
def test_cluster_reads_each_byte_from_the_origin_once(
    tmp_path: Path, data: dict[str, str], region: EmulatedRegion, options: dict[str, str]
) -> None:
    with LocalCluster(tmp_path, 4, target_options=options) as cluster:
        assert_all_right(everywhere(cluster, data, cluster.nodes))
        assert_downloaded_once(region, cluster)
        assert_all_right(everywhere(cluster, data, cluster.nodes))
        assert_downloaded_once(region, cluster)
        counters = cluster.counters()
        assert counters["origin_bytes"] == downloaded(region)
        assert counters["served_bytes"] >= counters["peer_bytes"] > TOTAL


def test_read_with_a_killed_node_continues(
    tmp_path: Path, data: dict[str, str], region: EmulatedRegion, options: dict[str, str]
) -> None:
    with LocalCluster(tmp_path, 4, target_options=options) as cluster:
        readings = everywhere(cluster, data, cluster.nodes, passes=3)
        assert_all_right(readings[:1], stop=False)
        cluster.nodes[2].kill()
        for reading in readings:
            for _ in range(3 if reading is not readings[0] else 2):
                (report,) = assert_all_right([reading], stop=False)
                assert report["longest_seconds"] < _MOST_SECONDS
        for reading in readings:
            reading.stop()
        cluster.start_one(2)  # on what it had
        before = downloaded(region)
        assert_all_right(everywhere(cluster, data, cluster.nodes))
        assert downloaded(region) - before < TOTAL / 2


@pytest.mark.slow
def test_read_with_a_silent_node_continues(tmp_path: Path, data: dict[str, str], options: dict[str, str]) -> None:
    with LocalCluster(tmp_path, 4, target_options=options) as cluster:
        assert_all_right(everywhere(cluster, data, cluster.nodes[:1]))
        cluster.nodes[3].suspend()
        # On a node without data, so that it sends requests to the silent one.
        for report in assert_all_right(everywhere(cluster, data, cluster.nodes[1:3])):
            assert report["longest_seconds"] < _MOST_SECONDS
        # Detected by a read or, before any read, by a metadata request.
        for node in cluster.nodes[1:3]:
            status = cluster.client.call(node.address, "GET", "/v1/status", deadline=60.0)
            assert cluster.nodes[3].address in status["breakers"]
        cluster.nodes[3].resume()
        assert_all_right(everywhere(cluster, data, cluster.nodes))


@pytest.mark.slow
def test_read_with_one_node_left_continues(tmp_path: Path, data: dict[str, str], options: dict[str, str]) -> None:
    with LocalCluster(tmp_path, 4, target_options=options) as cluster:
        assert_all_right(everywhere(cluster, data, cluster.nodes[:1]))
        for node in cluster.nodes[1:]:
            node.kill()
        assert_all_right(everywhere(cluster, data, cluster.nodes[:1]))
        # Without any running node, reads use this disk and the origin.
        cluster.nodes[0].kill()
        assert_all_right(everywhere(cluster, data, cluster.nodes[:1]))


@pytest.mark.slow
def test_read_with_damaged_peer_bytes_is_right(
    tmp_path: Path, data: dict[str, str], region: EmulatedRegion, options: dict[str, str]
) -> None:
    with LocalCluster(tmp_path, 3, target_options=options) as cluster:
        assert_all_right(everywhere(cluster, data, cluster.nodes))
        for node in cluster.nodes:
            node.kill()
        # What the nodes own is damaged on every disk; what they keep of others is damaged too.
        damaged = 0
        for node in cluster.nodes:
            for path in [
                *node.cache_dir.glob("millrace/*/objects/*/*[0-9]"),
                *node.cache_dir.glob("millrace/*/segments/*.data"),
            ]:
                flip(path, min(1000, path.stat().st_size // 2))
                damaged += 1
        assert damaged > 20
        for node in cluster.nodes:
            node.start()
        for node in cluster.nodes:
            cluster.wait(node)
        assert_all_right(everywhere(cluster, data, cluster.nodes))
        assert cluster.counters()["corrupt_blocks"] > 0


@pytest.mark.slow
@pytest.mark.etcd
def test_leave_and_join_read_nothing_from_the_origin(
    tmp_path: Path, data: dict[str, str], region: EmulatedRegion, options: dict[str, str], own_etcd: EtcdServer
) -> None:
    # Moves of a node that regards another one as silent are not complete, and the origin is read again.
    with LocalCluster(tmp_path, 3, later=1, target_options=options, members=own_etcd.members, patient=True) as cluster:
        nodes = cluster.nodes[:3]
        assert_all_right(everywhere(cluster, data, nodes))
        assert_downloaded_once(region, cluster)
        readings = everywhere(cluster, data, nodes, seconds=60)
        cluster.start_one(3)
        cluster.nodes[2].terminate()
        assert cluster.nodes[2].wait(300) == 0
        readings[2].stop()  # with its node
        for reading in readings[:2]:
            assert_all_right([reading])
        assert_all_right(everywhere(cluster, data, [cluster.nodes[0], cluster.nodes[1], cluster.nodes[3]]))
        assert_downloaded_once(region, cluster)


@pytest.mark.slow
@pytest.mark.etcd
def test_read_with_a_restarted_etcd_continues(
    tmp_path: Path, data: dict[str, str], region: EmulatedRegion, options: dict[str, str], own_etcd: EtcdServer
) -> None:
    with LocalCluster(tmp_path, 3, target_options=options, members=own_etcd.members) as cluster:
        readings = everywhere(cluster, data, cluster.nodes, passes=2)
        own_etcd.kill()
        for reading in readings:
            assert_all_right([reading], stop=False)
            assert_all_right([reading])
        own_etcd.start()
        for node in cluster.nodes:
            cluster.wait(node)
        assert_all_right(everywhere(cluster, data, cluster.nodes))
        assert_downloaded_once(region, cluster)


@pytest.mark.slow
def test_request_without_the_token_receives_nothing(
    tmp_path: Path, data: dict[str, str], options: dict[str, str]
) -> None:
    with LocalCluster(tmp_path, 2, target_options=options) as cluster:
        assert_all_right(everywhere(cluster, data, cluster.nodes))
        node = cluster.nodes[0]
        name = next(path.name.partition("-")[0] for path in node.cache_dir.glob("millrace/*/objects/*/*[0-9]"))
        for token in ("", "Authorization: Bearer another-token\r\n"):
            with socket.create_connection((node.host, node.port), timeout=300) as connection:
                connection.sendall(f"GET /v1/objects/{name} HTTP/1.1\r\nHost: node\r\n{token}\r\n".encode())
                answer = connection.recv(65536)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 401 ")
            assert len(body) < 200
        # A reader with another token still reads, directly from the origin.
        wrong = everywhere(
            cluster,
            data,
            [cluster.nodes[1]],
            options={"cluster_token": "another-token", "cache_dir": str(tmp_path / "x")},
        )
        assert_all_right(wrong)


@pytest.mark.slow
def test_read_with_a_full_disk_at_the_owner_continues(
    tmp_path: Path, data: dict[str, str], options: dict[str, str]
) -> None:
    with LocalCluster(tmp_path, 3, target_options=options, options=["--capacity", "8MB"]) as cluster:
        for _ in range(2):
            assert_all_right(everywhere(cluster, data, cluster.nodes))


@pytest.mark.slow
def test_soak_of_a_cluster_reads_right_bytes(tmp_path: Path, data: dict[str, str], options: dict[str, str]) -> None:
    """Random faults for a while. `python -m tests.support.soak` runs for any time."""
    from tests.support.soak import soak

    reads = faults = 0
    for seed in range(1, 9):  # on a busy machine, a node takes many seconds to start again
        with LocalCluster(tmp_path / str(seed), 3, later=1, target_options=options) as cluster:
            report = soak(cluster, data, seconds=25.0, seed=seed)
        assert report.wrong == []
        assert report.errors == []
        reads += report.reads
        faults += sum(report.faults.values())
        if reads > 100 and faults >= 5:
            return
    pytest.fail(f"{reads} reads, {faults} faults")
