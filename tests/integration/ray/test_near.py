"""Reads near the data on three raylets over real S3: the local share, and busy or removed nodes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.raylets import Raylets, raylets, through_region
from tests.support.waiting import wait_until

import millrace
from millrace.errors import UsageError
from millrace.filesystem import MillraceFileSystem
from millrace.ray import cluster_counters, homes, read_near
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

_NODES = 3
_FILES = 48
_FILE_BYTES = 50_000
_TABLES = 24
_ROWS = 2_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    import ray.data

    with raylets(_NODES) as started:
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield started


@pytest.fixture
def fs(s3: S3Server, region: EmulatedRegion, tmp_path: Path) -> MillraceFileSystem:
    return through_region(s3, region, tmp_path / "cache", capacity="1GB")


@pytest.fixture
def direct(s3_options: dict[str, Any]) -> MillraceFileSystem:
    """For writing past the caches and the region."""
    return millrace.filesystem("s3", **{**s3_options, "members": "none", "cache_dir": s3_options["cache_dir"] + "-w"})


@pytest.fixture
def clips(direct: MillraceFileSystem, bucket: str) -> list[str]:
    random = np.random.default_rng(3)
    names = [f"{bucket}/clips/{number % 2}/{number:02}" for number in range(_FILES)]
    for name in names:
        direct.pipe_file(name, random.bytes(_FILE_BYTES))
    return names


def _marked(dataset: Any) -> Any:
    """Each file's path, with the node on which it was decoded, in tasks that Ray does not join with those that read."""

    def mark(batch: dict[str, Any]) -> dict[str, Any]:
        return {"path": batch["path"], "node": [ray.get_runtime_context().get_node_id()] * len(batch["path"])}

    return dataset.map_batches(mark, batch_size=4, num_cpus=0, concurrency=1)


def _epoch(dataset: Any, fs: MillraceFileSystem) -> tuple[dict[str, str], dict[str, int]]:
    """Read everything: where each file was decoded, and what the caches did meanwhile."""
    before = cluster_counters(fs, settled=True)
    rows = dataset.take_all()
    counts: dict[str, int] = {}

    def all_is_counted() -> bool:
        """A process that gets no CPU time for five seconds is not waited for."""
        after = cluster_counters(fs, settled=True)
        counts.update({name: after[name] - before[name] for name in after})
        return sum(counts[f"{place}_bytes"] for place in ("cache", "origin", "peer")) >= _FILES * _FILE_BYTES

    wait_until(all_is_counted, "the reads are counted")
    assert len(rows) == len({row["path"] for row in rows})
    return {row["path"]: row["node"] for row in rows}, counts


def test_read_near_reads_every_file_on_its_owner(
    cluster: Raylets,
    region: EmulatedRegion,
    fs: MillraceFileSystem,
    bucket: str,
    clips: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Tasks that request no CPU find every node free, so the load of the machine moves no read to another node.
    options: dict[str, Any] = {
        "include_paths": True,
        "shuffle": ray.data.FileShuffleConfig(seed=7),
        "override_num_blocks": _FILES // 2,
        "num_cpus": 0,
        "concurrency": _NODES,
    }
    with monkeypatch.context() as patched:
        # What Ray does with many files: for each part a listing, or many tasks.
        for dear in ("_get_file_infos_common_path_prefix", "_get_file_infos_parallel"):
            patched.setattr(f"ray.data.datasource.file_meta_provider.{dear}", None)
        near = read_near(ray.data.read_binary_files, f"s3://{bucket}/clips", filesystem=fs, then=_marked, **options)
    asked = region.stats(prefix=f"/{bucket}").by_kind
    owners = dict(zip(clips, homes(fs, clips), strict=True))
    assert set(owners.values()) == set(cluster.ids())
    assert region.stats(prefix=f"/{bucket}").by_kind == asked  # nothing is requested again
    assert set(asked) == {"LIST"}
    size = _FILES * _FILE_BYTES
    for epoch in range(3):
        nodes, counts = _epoch(near, fs)
        assert nodes == owners
        assert counts["peer_bytes"] == 0
        assert counts["origin_bytes"] == (0 if epoch else size)
        assert counts["cache_bytes"] == (size if epoch else 0)

    assert region.stats(prefix=f"/{bucket}/clips/").bytes_down == size

    # Without it, on three nodes two thirds come from others: objects that are always read on their owner have no copies yet.
    plain = ray.data.read_binary_files(f"s3://{bucket}/clips", filesystem=fs, **options)
    nodes, counts = _epoch(_marked(plain), fs)
    assert set(nodes) == set(clips)
    assert counts["peer_bytes"] + counts["origin_bytes"] > size / 4  # from the origin, where a busy peer was too slow


def test_read_near_with_missing_paths_or_invalid_options_raises(
    cluster: Raylets, fs: MillraceFileSystem, bucket: str, clips: list[str]
) -> None:
    missing = f"s3://{bucket}/clips/missing"
    assert homes(fs, [missing, f"s3://{bucket}/clips", clips[0]])[:2] == [None, None]
    read = ray.data.read_binary_files
    with pytest.raises(FileNotFoundError):
        read_near(read, [missing, clips[0]], filesystem=fs)
    found = read_near(read, [missing, *clips[:2]], filesystem=fs, ignore_missing_paths=True, include_paths=True)
    assert sorted(row["path"] for row in found.take_all()) == sorted(clips[:2])
    with pytest.raises(UsageError, match="label_selector"):
        read_near(read, clips, filesystem=fs, label_selector={"zone": "a"})


def test_read_near_continues_with_busy_and_killed_nodes(
    cluster: Raylets, fs: MillraceFileSystem, direct: MillraceFileSystem, bucket: str
) -> None:
    for number in range(_TABLES):
        with direct.open_output_stream(f"{bucket}/train/{number:02}.parquet") as out:
            pq.write_table(pa.table({"a": np.arange(_ROWS) + number * _ROWS}), out)

    def add_up(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.1)
        return {"a": [int(batch["a"].sum())], "node": [ray.get_runtime_context().get_node_id()]}

    def added_up(dataset: Any) -> Any:
        return dataset.map_batches(add_up, batch_size=None)

    cluster.add()
    dataset = read_near(
        ray.data.read_parquet, f"s3://{bucket}/train", filesystem=fs, then=added_up, override_num_blocks=_TABLES
    )
    assert ray.data.DataContext.get_current().use_datasource_v2  # as it was
    owned = Counter(homes(fs, fs.find(f"s3://{bucket}/train")))
    assert set(owned) <= set(cluster.ids())
    lost, held = sorted(cluster.ids()[1:], key=lambda node: -owned[node])[:2]

    @ray.remote(num_cpus=1)
    class Holder:
        def pid(self) -> int:
            return os.getpid()

    # An actor takes all CPUs of a node, like a training that requests too much. Its reads run on other nodes.
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(held, soft=False)
    holder = Holder.options(scheduling_strategy=strategy).remote()
    ray.get(holder.pid.remote())
    rows = dataset.take_all()
    assert sum(row["a"] for row in rows) == sum(range(_TABLES * _ROWS))
    assert held not in {row["node"] for row in rows}
    ray.kill(holder)

    # The node that owns the most is killed in the middle of an epoch.
    before = cluster_counters(fs)
    total = 0
    for number, row in enumerate(dataset.iter_rows()):
        total += row["a"]
        if number == 0:
            cluster.kill(lost)
    assert total == sum(range(_TABLES * _ROWS))
    after = cluster_counters(fs)
    assert all(after[name] >= before[name] for name in after)
    assert sum(row["a"] for row in dataset.take_all()) == sum(range(_TABLES * _ROWS))
    again = cluster_counters(fs)
    assert all(again[name] >= after[name] for name in after)
