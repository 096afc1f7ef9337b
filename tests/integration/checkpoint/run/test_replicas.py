"""`CheckpointManager(replicas=)`: the newest save is on other nodes' disks, too, and is restored from there."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.checkpoint.run.test_manager import assert_same, change, empty_like, make_state
from tests.support.replicas import ReplicaNodes, seen_events
from tests.support.waiting import wait_until

from millrace.checkpoint import CheckpointManager
from millrace.errors import MillraceError
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

FIRST, SECOND, THIRD = (f"step-{step:012d}" for step in (1, 2, 3))


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket("runs")
        yield server


@pytest.fixture
def region(bucket: S3Server) -> Iterator[EmulatedRegion]:
    with EmulatedRegion(bucket.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        yield region


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[ReplicaNodes]:
    with ReplicaNodes(tmp_path / "nodes") as nodes:
        yield nodes


def names(seen: list[Any]) -> list[str]:
    return [event.name for event in seen]


def has(seen: list[Any], name: str, text: str = "") -> bool:
    return any(event.name == name and text in str(event.detail) for event in seen)


def no_uploads(region: EmulatedRegion) -> None:
    """From now on the store accepts no data files."""
    region.fail("status", status=503, method="PUT", path="*data-*", count=None)


def options_of(bucket: S3Server, region: EmulatedRegion) -> dict[str, Any]:
    return {**bucket.target_options, "endpoint_url": region.endpoint_url}


def test_save_survives_the_loss_of_its_node_before_the_upload(
    tmp_path: Path, bucket: S3Server, region: EmulatedRegion, nodes: ReplicaNodes
) -> None:
    url, options, state = "s3://runs/lost", options_of(bucket, region), make_state()
    with seen_events() as seen, nodes.on(0):
        run = CheckpointManager(url, local=tmp_path / "local", replicas=1, target_options=options, timeout=20)
        run.save(1, state)
        wait_until(lambda: has(seen, "checkpoint.replicated", FIRST))
        change(state)
        expected = copy.deepcopy(state)
        no_uploads(region)
        pending = run.save_async(2, state)
        wait_until(lambda: has(seen, "checkpoint.replicated", SECOND))
        assert not pending.done()
        (holder,) = nodes.holders(SECOND)
        assert holder != 0
        local = {path.name: path.read_bytes() for path in tmp_path.glob(f"local/*/{SECOND}/*")}
        assert {p.name: p.read_bytes() for p in nodes.replicas()[holder] if p.parent.name == SECOND} == local
        assert pending.exception() is not None
        with contextlib.suppress(MillraceError):
            run.close()
    region.clear_faults()
    nodes.stop(0)
    shutil.rmtree(tmp_path / "local")
    other = next(number for number in (1, 2) if number != holder)
    with seen_events() as seen, nodes.on(other):
        with CheckpointManager(url, local=tmp_path / "other", replicas=1, target_options=options) as again:
            found = empty_like(state)
            assert again.restore(found) == 2
            assert_same(found, expected)
        assert has(seen, "run.restored", "from other nodes")
