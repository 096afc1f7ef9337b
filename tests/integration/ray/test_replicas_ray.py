"""`CheckpointManager(replicas=)` in a Ray job: no set-up but the option."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.raylets import Raylets, on, raylets

from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(2) as started:
        yield started


def _values() -> dict[str, Any]:
    import torch

    return {"w": torch.randn(200_000, generator=torch.Generator().manual_seed(3)), "step": 7}


def _save(url: str, local: str, environment: dict[str, str], options: dict[str, Any]) -> bool:
    """A save on this node whose upload fails; returns whether another node has it before."""
    import contextlib
    import threading

    from millrace.checkpoint import CheckpointManager
    from millrace.errors import MillraceError
    from millrace.events import add_hook

    os.environ.update(environment)
    replicated = threading.Event()
    remove = add_hook(lambda event: replicated.set() if event.name == "checkpoint.replicated" else None)
    run = CheckpointManager(url, local=local, replicas=1, target_options=options, timeout=20)
    pending = run.save_async(7, _values())
    found = replicated.wait(60) and not pending.done()
    with contextlib.suppress(MillraceError):
        pending.result()
    with contextlib.suppress(MillraceError):
        run.close()
    remove()
    return found


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
    cluster: Raylets, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    environment = {"MILLRACE_CACHE_DIR": str(tmp_path / "cache"), "MILLRACE_MIN_FREE": "0"}
    url, doomed = f"s3://{bucket}/run", next(name for name in cluster.ids() if name != cluster.head)
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        options = {**s3.target_options, "endpoint_url": region.endpoint_url}
        assert on(cluster.head, _restore, url, str(tmp_path / "a"), environment, options) == (None, False)
        region.fail("status", status=500, method="PUT", path="*data-*", count=None)
        assert on(doomed, _save, url, str(tmp_path / "b"), environment, options)
        cluster.kill(doomed)
        assert on(cluster.head, _restore, url, str(tmp_path / "a"), environment, options) == (7, True)
