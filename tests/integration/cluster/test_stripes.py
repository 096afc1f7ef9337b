"""A file that is larger than a stripe, read by every node at once: spread over the nodes, each byte once from the origin."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.local_cluster import TOKEN

from millrace.cluster import placement
from millrace.cluster.membership import Member, View
from millrace.config import resolve
from millrace.filesystem import filesystem
from millrace.node.process import NodeProcess
from millrace.store.records import object_id
from millrace.testing.process import free_ports
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

MB = 1 << 20


@pytest.mark.slow
def test_stripes_have_several_owners_and_are_fetched_once(
    tmp_path: Path, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, patient_peers: None
) -> None:
    # As 256 MiB and 1 GiB are in earnest, in nodes that all live in this process.
    monkeypatch.setattr(placement, "STRIPE_BYTES", 8 * MB)
    monkeypatch.setattr(placement, "WHOLE_BYTES", 16 * MB)
    data = os.urandom(60 * MB + 12_345)
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.005, bytes_per_second=None) as region:
        options = {**s3.target_options, "endpoint_url": region.endpoint_url}
        filesystem("s3", s3.target_options, members="none").pipe(f"{bucket}/large", data)
        ports = free_ports(4)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        members = f"static://{','.join(addresses)}"
        systems = [
            filesystem(
                "s3",
                options,
                members=members,
                cluster_token=TOKEN,
                cache_dir=str(tmp_path / str(port)),
                min_free=0,
                consistency="immutable",
            )
            for port in ports
        ]
        with contextlib.ExitStack() as stack:
            for port, fs in zip(ports, systems, strict=True):
                arguments = {
                    "members": members, "cluster_token": TOKEN, "cache_dir": tmp_path / str(port), "min_free": 0,
                }  # fmt: skip
                node = NodeProcess(
                    resolve(arguments, environ={"HOME": str(tmp_path)}, file={}), port=port, origins=[fs.origin]
                )
                stack.enter_context(node)
                assert node.wait_here(300)
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda fs: hashlib.sha256(fs.cat_file(f"{bucket}/large")).digest(), systems))
            assert found == [hashlib.sha256(data).digest()] * 4
            assert region.stats(f"/{bucket}/").by_kind["GET"].bytes_down == len(data)
            info = systems[0].describe(f"{bucket}/large")
            name = object_id(systems[0].origin_identity, info.key, info.version, info.size)
            placed = placement.Placement(View.of(Member(id=address, address=address) for address in addresses))
            expected: Counter[str] = Counter()
            for stripe in range(placement.stripe_count(len(data))):
                start, stop = placement.stripe_span(stripe, len(data))
                expected[placed.order(name, stripe)[0].id] += stop - start
            fetched = {
                address: fs.cache_counters()["origin_bytes"] for address, fs in zip(addresses, systems, strict=True)
            }
            assert fetched == {address: expected[address] for address in addresses}
