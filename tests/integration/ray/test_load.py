"""`fs.load` inside a Ray job: every Ray node's disk gets its share, also where nothing was read before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.raylets import Raylets, peer_failures, raylets

import millrace
from millrace.cluster.folder import live_nodes
from millrace.node.figures import hit_ratio
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

OBJECTS, OBJECT_BYTES = 20, 100_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(2) as started:
        yield started


def test_load_starts_a_node_on_every_ray_node(cluster: Raylets, s3: S3Server, bucket: str, tmp_path: Path) -> None:
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0) as region:
        options = {**s3.target_options, "endpoint_url": region.endpoint_url}
        fs = millrace.filesystem("s3", options, cache_dir=str(tmp_path / "cache"), capacity="1GB", min_free=0)
        for number in range(OBJECTS):
            fs.pipe_file(f"{bucket}/train/{number}.bin", os.urandom(OBJECT_BYTES))
        done = fs.load(f"s3://{bucket}/train")
        assert (done.nodes, done.done_objects, done.done_bytes) == (2, OBJECTS, OBJECTS * OBJECT_BYTES)
        assert region.stats(prefix=f"/{bucket}/train/").by_kind["GET"].bytes_down == OBJECTS * OBJECT_BYTES
        assert len(live_nodes(fs._options)) == 2
        assert len(fs.cat_file(f"{bucket}/train/7.bin")) == OBJECT_BYTES
        again = region.stats(prefix=f"/{bucket}/train/").by_kind["GET"].bytes_down - OBJECTS * OBJECT_BYTES
        assert again == 0 or (again == OBJECT_BYTES and peer_failures(fs))  # a busy node may be too slow for a reader
        assert hit_ratio(fs.cache_counters()) is not None
