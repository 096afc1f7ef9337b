"""A node on a network of its own whose link goes down while others read from it, or write."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.support.asked_processes import AskedProcess
from tests.support.local_cluster import LocalCluster
from tests.support.machines.namespaces import Machine, Machines

from millrace.cluster.listings import metadata_id
from millrace.cluster.membership import View
from millrace.cluster.placement import Placement
from millrace.filesystem import filesystem
from millrace.origin import open_origin
from millrace.testing.conformance.members import eventually
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.root

OBJECTS = 60
"""In each part. With three nodes, the chance that one of them owns none of a part is below 1 in 10**10."""

MOST_SECONDS = 120
"""For one read. TCP alone would repeat its packets for a quarter of an hour."""


def downloaded(region: EmulatedRegion) -> int:
    kinds = region.stats().by_kind
    return kinds["GET"].bytes_down if "GET" in kinds else 0


@contextmanager
def cluster_with_a_machine(directory: Path, s3: S3Server) -> Iterator[tuple[LocalCluster, Machine, EmulatedRegion]]:
    """A cluster of three nodes, the third of them on the machine, whose link can be cut."""
    with (
        Machines(directory / "machines", 1) as (machine,),
        EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None, host=machine.gateway) as region,
    ):
        options = {**s3.target_options, "endpoint_url": region.endpoint_url}
        hosts = [machine.gateway, machine.gateway, f"{machine.address}:7070"]
        prefixes = {2: machine.network_prefix}
        with LocalCluster(directory, 3, target_options=options, hosts=hosts, prefixes=prefixes) as cluster:
            yield cluster, machine, region


def read_right(fs: Any, data: Mapping[str, str]) -> None:
    """Read whole objects: every byte is right, and no read waits for the link."""
    for key, digest in data.items():
        began = time.monotonic()
        assert xxhash.xxh3_64_hexdigest(fs.cat_file(key)) == digest
        assert time.monotonic() - began < MOST_SECONDS


@pytest.mark.slow
def test_read_with_a_disconnected_node_continues(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    fs = filesystem("s3", s3.target_options, members="none")
    chance = random.Random(1)
    parts: list[dict[str, str]] = []
    for part in range(3):
        parts.append({})
        for number in range(OBJECTS):
            content = chance.randbytes(200_000)
            fs.origin.put(f"{bucket}/{part}/{number}", content)
            parts[part][f"{bucket}/{part}/{number}"] = xxhash.xxh3_64_hexdigest(content)
    with cluster_with_a_machine(tmp_path, s3) as (cluster, machine, region):
        fs = filesystem("s3", **cluster.arguments(cluster.nodes[1]))
        read_right(fs, parts[0])  # with connections to both others
        assert fs.cache_counters()["peer_bytes"] > 0
        before = downloaded(region)
        machine.cut()
        read_right(fs, parts[1])
        assert downloaded(region) >= before + OBJECTS * 200_000  # also the share of the node behind the link
        machine.mend()
        read_right(fs, parts[2])


@pytest.mark.slow
def test_metadata_owner_that_was_cut_off_receives_invalidations_of_a_process_that_has_ended(
    tmp_path: Path, s3: S3Server, bucket: str
) -> None:
    with cluster_with_a_machine(tmp_path, s3) as (cluster, machine, region), ExitStack() as stack:

        def process(name: str, number: int) -> AskedProcess:
            found = AskedProcess(tmp_path / f"{name}.log", cluster.arguments(cluster.nodes[number]))
            stack.callback(found.stop)
            return found

        origin = open_origin("s3", {**s3.target_options, "endpoint_url": region.endpoint_url})
        placement = Placement(View.of(cluster.member(node) for node in cluster.nodes))
        owned = (f"{bucket}-{number}" for number in range(1000))
        bucket = next(
            name
            for name in owned
            if placement.order(metadata_id(origin.identity, name))[0].id == cluster.nodes[2].address
        )
        s3.create_bucket(bucket)
        keys = [f"{bucket}/{number}" for number in range(150)]
        for key in keys:
            origin.put(key, b"old")
        reader, writer = process("reader", 1), process("writer", 0)
        assert [reader.read(key) for key in keys] == [b"old"] * len(keys)
        machine.cut()
        for key in keys:
            writer.write(key, b"new")
        writer.stop()
        machine.mend()
        for key in keys:  # some of them from the owner
            reader.read(key)
            time.sleep(0.2)
        unknown = itertools.count()

        def has_no_open_breakers() -> bool:
            reader.ask("exists", f"{bucket}/unknown-{next(unknown)}")  # the owner is asked, or looked at again
            status = cluster.client.call(cluster.member(cluster.nodes[1]).address, "GET", "/v1/status", deadline=60.0)
            return bool(status["breakers"] == [])

        eventually(has_no_open_breakers)
        eventually(lambda: [reader.read(key) for key in keys] == [b"new"] * len(keys))
