"""A node on a network of its own whose link goes down while others read from it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import xxhash
from tests.support.local_cluster import LocalCluster
from tests.support.machines.namespaces import Machines

from millrace.filesystem import filesystem
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.root


def downloaded(region: EmulatedRegion) -> int:
    kinds = region.stats().by_kind
    return kinds["GET"].bytes_down if "GET" in kinds else 0


def test_read_with_a_disconnected_node_continues(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    fs = filesystem("s3", s3.target_options, members="none")
    chance = random.Random(1)
    data = {}
    for number in range(12):
        content = chance.randbytes(2_000_000)
        fs.origin.put(f"{bucket}/{number}", content)
        data[f"{bucket}/{number}"] = xxhash.xxh3_64_hexdigest(content)
    with (
        Machines(tmp_path / "machines", 1) as (machine,),
        EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None, host=machine.gateway) as region,
    ):
        options = {**s3.target_options, "endpoint_url": region.endpoint_url}
        hosts = [machine.gateway, machine.gateway, f"{machine.address}:7070"]
        prefixes = {2: machine.network_prefix}
        with LocalCluster(tmp_path, 3, target_options=options, hosts=hosts, prefixes=prefixes) as cluster:
            first = cluster.read_on(cluster.nodes[0], data)
            report = first.report()
            assert (report["wrong"], report["errors"]) == ([], [])
            assert report["counters"]["peer_bytes"] > 0
            readings = [cluster.read_on(cluster.nodes[1], data, passes=2, options={"capacity": 0})]
            before = downloaded(region)
            machine.cut()
            for _ in range(2):
                report = readings[0].report()
                assert (report["wrong"], report["errors"]) == ([], [])
                assert report["longest_seconds"] < 12
            assert downloaded(region) > before  # the share of the node behind the link
            machine.mend()
            again = cluster.read_on(cluster.nodes[1], data, options={"capacity": 0})
            report = again.report()
            assert (report["wrong"], report["errors"]) == ([], [])
            for reading in (first, *readings, again):
                reading.stop()
