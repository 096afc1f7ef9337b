"""The cluster in Ray without any set-up: `ray.data.read_parquet` with a file system, on several raylets, real S3 behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.raylets import Raylets, on, peer_failures, raylets, through_region
from tests.support.waiting import wait_until

import millrace
from millrace.cluster.attach import close_all
from millrace.cluster.folder import LocalNode, live_nodes
from millrace.cluster.membership import MemberState
from millrace.filesystem import MillraceFileSystem
from millrace.node.figures import hit_ratio
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

_FILES = 12
_ROWS = 40_000
_OBJECTS, _OBJECT_BYTES = 20, 100_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    import ray.data

    with raylets(2) as started:
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield started


@pytest.fixture
def fs(s3: S3Server, region: EmulatedRegion, tmp_path: Path) -> MillraceFileSystem:
    return through_region(s3, region, tmp_path / "cache", capacity="2GB")


@pytest.fixture
def data(s3: S3Server, bucket: str, s3_options: dict[str, Any]) -> dict[str, int]:
    """The sizes of the files of a data set, written past the cache and the region."""
    fs = millrace.filesystem("s3", **{**s3_options, "members": "none", "cache_dir": s3_options["cache_dir"] + "-w"})
    random = np.random.default_rng(7)
    for number in range(_FILES):
        values = np.arange(_ROWS) + number * _ROWS
        with fs.open_output_stream(f"{bucket}/train/{number:02}.parquet") as out:
            pq.write_table(pa.table({"a": values, "b": random.random(_ROWS)}), out, row_group_size=_ROWS // 4)
    return {info["name"]: info["size"] for info in fs.ls(f"{bucket}/train", detail=True)}


def _dataset(fs: MillraceFileSystem, bucket: str, seconds: float = 0.0) -> Any:
    """The data set, added up by tasks of at least so many seconds each."""

    def add_up(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(seconds)
        return {"a": [int(batch["a"].sum())], "node": [ray.get_runtime_context().get_node_id()]}

    dataset = ray.data.read_parquet(f"s3://{bucket}/train", filesystem=fs, override_num_blocks=_FILES)
    return dataset.map_batches(add_up, batch_size=None)


def _epoch(fs: MillraceFileSystem, bucket: str) -> int:
    """Read everything in tasks on all nodes; the sum of a column."""
    return sum(row["a"] for row in _dataset(fs, bucket).take_all())


_SUM = sum(range(_FILES * _ROWS))


def _use(fs: MillraceFileSystem) -> None:
    assert fs.node is not None


def _nodes(fs: MillraceFileSystem) -> dict[str, LocalNode]:
    """The nodes that run on this machine, by their members' ids."""
    return {node.facts.member_id: node for node in live_nodes(fs._options)}


def _wait_for(fs: MillraceFileSystem, count: int) -> dict[str, LocalNode]:
    """Wait until `count` nodes run, and each has a view in which all own their share."""

    def all_know_all() -> bool:
        nodes = _nodes(fs)
        views = [
            {member.id for member in node.facts.view.members if member.state is MemberState.HERE}
            for node in nodes.values()
        ]
        return len(nodes) == count and all(view == set(nodes) for view in views)

    wait_until(all_know_all, f"{count} nodes own their share")
    return _nodes(fs)


def _read_in_forked_child(fs: MillraceFileSystem, first: str, second: str) -> tuple[str, str, int]:
    """As a loader's worker does: the folders that parent and child read through, and how much the child reads."""
    fs.cat_file(first)
    folder = fs.node.options.folder
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return (folder, *pool.apply(_read, (fs, second)))


def _read(fs: MillraceFileSystem, key: str) -> tuple[str, int]:
    return fs.node.options.folder, len(fs.cat_file(key))


def test_forked_process_in_a_task_reads_through_the_same_node(
    cluster: Raylets, region: EmulatedRegion, fs: MillraceFileSystem, bucket: str, data: dict[str, int]
) -> None:
    keys = sorted(data)
    for node in cluster.ids():
        on(node, _use, fs)
    _wait_for(fs, 2)
    folders = set()
    for number, node in enumerate(cluster.ids()):
        parent, child, size = on(node, _read_in_forked_child, fs, keys[0], keys[1 + number])
        assert parent == child
        assert size == data[keys[1 + number]]
        folders.add(child)
    assert folders == {"local", "node-1"}
    for node in cluster.ids():
        for number in range(3):
            on(node, _read, fs, keys[number])
    size = sum(data[key] for key in keys[:3])
    assert size <= region.stats(prefix=f"/{bucket}/").bytes_down <= (1 + 2 * peer_failures(fs)) * size


def test_new_readers_without_the_control_plane_find_the_running_node(
    cluster: Raylets, fs: MillraceFileSystem, data: dict[str, int]
) -> None:
    key, size = next(iter(data.items()))
    assert fs.node.options.folder in {node.name for node in _nodes(fs).values()}
    close_all()
    with cluster.silent_control_plane():
        assert _read(fs, key) == (live_nodes(fs._options)[0].name, size)


@pytest.mark.slow
def test_epochs_over_joining_and_leaving_raylets_read_everything(
    cluster: Raylets,
    region: EmulatedRegion,
    fs: MillraceFileSystem,
    bucket: str,
    data: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def origin_bytes() -> int:
        return region.stats(prefix=f"/{bucket}/").bytes_down

    def again() -> int:
        """Bytes that may be read from the origin again: all, for each request that a busy node was too slow to answer.

        For a while, the readers then pass over that node and all that it has.
        """
        return 2 * peer_failures(fs) * sum(data.values())

    size = sum(data.values())
    for node in cluster.ids():
        on(node, _use, fs)
    two = _wait_for(fs, 2)
    assert sorted(node.name for node in two.values()) == ["local", "node-1"]

    assert _epoch(fs, bucket) == _SUM
    assert size <= origin_bytes() <= size + again()  # each byte once, for all readers
    assert _epoch(fs, bucket) == _SUM
    assert size <= origin_bytes() <= size + again()

    # From here on with the older of Ray Data's two ways to read Parquet: the newer one lists with actors of its own, and
    # fails with the node of any of them.
    monkeypatch.setattr(ray.data.DataContext.get_current(), "use_datasource_v2", False)

    # A third comes, and is filled by the others.
    third = cluster.add()
    on(third, _use, fs)
    (joined,) = set(_wait_for(fs, 3)) - set(two)
    assert _epoch(fs, bucket) == _SUM
    assert size <= origin_bytes() <= size + again()

    # Its actor is killed: reads continue meanwhile, and Ray brings it back as the member that it was, with what it had.
    before = _nodes(fs)[joined].facts
    os.kill(before.pid, signal.SIGKILL)
    assert _epoch(fs, bucket) == _SUM
    wait_until(lambda: joined in _nodes(fs) and _nodes(fs)[joined].facts.pid != before.pid, "the actor is back")
    _wait_for(fs, 3)
    read, before_epoch = origin_bytes(), again()
    assert read < 2 * size + before_epoch
    assert _epoch(fs, bucket) == _SUM
    assert read <= origin_bytes() <= read + again() - before_epoch

    # Its Ray node is killed in the middle of an epoch.
    total = 0
    for number, row in enumerate(_dataset(fs, bucket, seconds=0.5).iter_rows()):
        total += row["a"]
        if number == 0:
            cluster.kill(third)
    assert total == _SUM
    left = _wait_for(fs, 2)
    assert set(left) == set(two)
    read, before_epoch = origin_bytes(), again()
    assert read < 3 * size + before_epoch
    assert _epoch(fs, bucket) == _SUM
    assert read <= origin_bytes() <= read + again() - before_epoch
    wait_until(lambda: ray.cluster_resources()["CPU"] == ray.available_resources().get("CPU"), "nothing is reserved")


# --- loads ----------------------------------------------------------------------------------------


def test_load_starts_a_node_on_every_ray_node(cluster: Raylets, s3: S3Server, bucket: str, tmp_path: Path) -> None:
    """Every Ray node's disk gets its share, also where nothing was read before."""
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0) as region:
        options = {**s3.target_options, "endpoint_url": region.endpoint_url}
        fs = millrace.filesystem("s3", options, cache_dir=str(tmp_path / "cache"), capacity="1GB", min_free=0)
        for number in range(_OBJECTS):
            fs.pipe_file(f"{bucket}/train/{number}.bin", os.urandom(_OBJECT_BYTES))
        done = fs.load(f"s3://{bucket}/train")
        assert (done.nodes, done.done_objects, done.done_bytes) == (2, _OBJECTS, _OBJECTS * _OBJECT_BYTES)
        assert region.stats(prefix=f"/{bucket}/train/").by_kind["GET"].bytes_down == _OBJECTS * _OBJECT_BYTES
        assert len(live_nodes(fs._options)) == 2
        assert len(fs.cat_file(f"{bucket}/train/7.bin")) == _OBJECT_BYTES
        again = region.stats(prefix=f"/{bucket}/train/").by_kind["GET"].bytes_down - _OBJECTS * _OBJECT_BYTES
        assert again == 0 or (again == _OBJECT_BYTES and peer_failures(fs))  # a busy node may be too slow for a reader
        assert hit_ratio(fs.cache_counters()) is not None


# --- replicas of checkpoints ----------------------------------------------------------------------


def _values() -> dict[str, Any]:
    import torch

    return {"w": torch.randn(200_000, generator=torch.Generator().manual_seed(3)), "step": 7}


def _save(url: str, local: str, environment: dict[str, str], options: dict[str, Any]) -> bool:
    """A save on this node whose upload fails; returns whether another node has it before."""
    import threading

    from tests.support.savers import PATIENT_WITH_NODES, savers_with

    from millrace.checkpoint import CheckpointManager
    from millrace.events import add_hook

    os.environ.update(environment)
    replicated = threading.Event()
    add_hook(lambda event: replicated.set() if event.name == "checkpoint.replicated" else None)
    run = CheckpointManager(url, local=local, replicas=1, target_options=options)
    with savers_with(PATIENT_WITH_NODES):
        pending = run.save_async(7, _values())
    # The upload continues, and this process is killed with its node.
    return replicated.wait(120) and not pending.done()


def _restore(url: str, local: str, environment: dict[str, str], options: dict[str, Any]) -> tuple[int | None, bool]:
    """The step that is restored on this node, and whether its values are those that were saved."""
    import torch

    from millrace.checkpoint import CheckpointManager

    os.environ.update(environment)
    state = {"w": torch.zeros(200_000), "step": 0}
    with CheckpointManager(url, local=local, replicas=1, target_options=options) as run:
        step = run.restore(state)
    return step, bool(torch.equal(state["w"], _values()["w"])) and state["step"] == 7


def test_newest_save_is_restored_on_another_node_of_the_job_after_its_own_was_killed(
    cluster: Raylets, s3: S3Server, region: EmulatedRegion, bucket: str, tmp_path: Path
) -> None:
    environment = {"MILLRACE_CACHE_DIR": str(tmp_path / "cache"), "MILLRACE_MIN_FREE": "0"}
    url, doomed = f"s3://{bucket}/run", cluster.add()
    options = {**s3.target_options, "endpoint_url": region.endpoint_url}
    assert on(cluster.head, _restore, url, str(tmp_path / "a"), environment, options) == (None, False)
    region.fail("status", status=500, method="PUT", path="*data-*", count=None)
    assert on(doomed, _save, url, str(tmp_path / "b"), environment, options)
    cluster.kill(doomed)
    assert on(cluster.head, _restore, url, str(tmp_path / "a"), environment, options) == (7, True)
