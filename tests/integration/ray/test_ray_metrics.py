"""A node that Ray starts passes its metrics to `ray.util.metrics`, and Ray exports them."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.ray_sessions import start_ray

import millrace
from millrace.cluster.attach import close_all
from millrace.testing.process import free_ports

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def port() -> Iterator[int]:
    """The port at which Ray exports its metrics."""
    (port,) = free_ports(1)
    start_ray(num_cpus=1, _metrics_export_port=port, _system_config={"metrics_report_interval_ms": 1000})
    yield port
    close_all()
    ray.shutdown()


def _exported(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=300) as answer:
        page = answer.read().decode()
    return {
        f"{sample.name} {sample.labels.get('tier', '')}".strip(): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("ray_millrace_")
    }


def test_metrics_of_the_node_are_exported_by_ray(
    port: int, bucket: str, s3_options: dict[str, Any], tmp_path: Path
) -> None:
    fs = millrace.filesystem("s3", **s3_options, members="ray")
    fs.pipe_file(f"{bucket}/key", b"x" * 30_000)
    for _ in range(2):
        fs.cat_file(f"{bucket}/key")
    fs.cache_counters(settled=True)
    deadline = time.monotonic() + 120
    read, capacity = "ray_millrace_read_bytes_total origin", "ray_millrace_capacity_bytes"
    reads = "ray_millrace_read_duration_seconds_count_total origin"
    # The node passes one after the other, and Ray may export in between.
    while not {read, capacity, reads} <= (found := _exported(port)).keys():
        assert time.monotonic() < deadline, sorted(found)
        time.sleep(1)
    assert found[read] == 30_000
    assert found[capacity] > 0
    assert found[reads] >= 1
