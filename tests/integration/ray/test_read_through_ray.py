"""Restores through the cluster inside a Ray job, alone and next to epochs of Ray Data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.support.ray_sessions import start_ray

import millrace
from millrace.checkpoint import CheckpointManager
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

FILES, ROWS = 40, 150_000  # 1.2 MB each


@pytest.fixture
def region(s3: S3Server) -> Iterator[EmulatedRegion]:
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        yield region


@pytest.fixture
def job(
    s3: S3Server, region: EmulatedRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """A Ray whose processes have a cache of half the data set; returns the options of the storage."""
    import ray.data

    variables = {
        "MILLRACE_CACHE_DIR": str(tmp_path / "cache"),
        "MILLRACE_MIN_FREE": "0",
        "MILLRACE_CAPACITY": str(FILES * ROWS * 8 // 2),
        "MILLRACE_CONSISTENCY": "immutable",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    start_ray(num_cpus=2, _node_ip_address="127.0.0.1", runtime_env={"env_vars": variables})
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield {**s3.target_options, "endpoint_url": region.endpoint_url}
    ray.shutdown()


def down(region: EmulatedRegion, prefix: str) -> int:
    kinds = region.stats(prefix).by_kind
    return kinds["GET"].bytes_down if "GET" in kinds else 0


def test_restore_in_a_ray_job_is_cached_and_does_not_displace_training_data(
    job: dict[str, Any], s3: S3Server, bucket: str, region: EmulatedRegion
) -> None:
    chance = np.random.default_rng(0)
    direct = millrace.filesystem("s3", s3.target_options, members="none")
    for number in range(FILES):
        with direct.open_output_stream(f"{bucket}/train/{number}.parquet") as out:
            table = pa.table({"a": chance.integers(0, 1 << 62, ROWS)})
            pq.write_table(table, out, compression="none", use_dictionary=False)
    size = sum(entry["size"] for entry in direct.find(f"{bucket}/train", detail=True).values())
    url, state = f"s3://{bucket}/run", {"weights": torch.randn(3_000_000)}
    with CheckpointManager(url, target_options=s3.target_options, read_through="none") as run:
        run.save(1, state)

    def restore() -> None:
        loaded = {"weights": torch.zeros(3_000_000)}
        with CheckpointManager(url, target_options=job) as run:
            assert run.restore(loaded) == 1
        assert torch.equal(loaded["weights"], state["weights"])

    # Into the empty cache: the storage delivers it once.
    for _ in range(3):
        restore()
    saved = sum(entry["size"] for entry in direct.find(f"{bucket}/run/step-000000000001", detail=True).values())
    assert saved <= down(region, f"/{bucket}/run") < 1.2 * saved  # the listings and claims are small

    fs = millrace.filesystem("s3", job)

    def epoch() -> float:
        """Read all; returns the share of the bytes that was cached."""
        before = down(region, f"/{bucket}/train")
        dataset = ray.data.read_parquet(f"s3://{bucket}/train", filesystem=fs)
        blocks = dataset.iter_batches(batch_format="numpy", batch_size=None)
        assert sum(len(block["a"]) for block in blocks) == FILES * ROWS
        return 1 - (down(region, f"/{bucket}/train") - before) / size

    epoch()
    alone = (epoch() + epoch()) / 2
    restore()
    first = epoch()
    restore()
    with_restores = (first + epoch()) / 2
    assert alone > 0.3
    assert alone - with_restores < 0.02
