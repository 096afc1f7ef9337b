"""Checkpoints of a real Ray Train job on a real S3 server: a worker is killed, and the job continues from the newest one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.ray_sessions import start_ray
from torch import nn

import millrace
from millrace.checkpoint import ResumableSampler
from millrace.checkpoint.run.run_layout import open_run
from millrace.errors import UsageError
from millrace.ray import checkpoint_reader, location_of, report, restore
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning",
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore:torch.distributed is disabled:UserWarning",
    ),
]

SAMPLES, BATCH, WORLD = 42, 3, 2
STEPS = 2 * SAMPLES // (BATCH * WORLD)
SAVE_EVERY, KILLED_AFTER = 2, 6


def aws_environment(s3: S3Server) -> dict[str, str]:
    """The variables by which any S3 client finds the server."""
    options = s3.target_options
    return {
        "AWS_ENDPOINT_URL": s3.endpoint_url,
        "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"],
        "AWS_REGION": "us-east-1",
    }


@pytest.fixture(scope="module")
def cluster(s3: S3Server) -> Iterator[None]:
    environment = pytest.MonkeyPatch()
    # Ray takes one report each time that it looks, which by default is every two seconds.
    environment.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    # A trainer leaves its own: an interrupt would then start another cluster, long after this one has ended.
    on_interrupt = signal.getsignal(signal.SIGINT)
    start_ray(
        num_cpus=2,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **aws_environment(s3)}},
    )
    yield
    ray.shutdown()
    signal.signal(signal.SIGINT, on_interrupt)
    environment.undo()


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 1))


def dataset() -> torch.utils.data.TensorDataset:
    features = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(4))
    return torch.utils.data.TensorDataset(torch.arange(SAMPLES), features)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, features: torch.Tensor) -> float:
    loss = nn.functional.mse_loss(model(features), features[:, :1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def loop(config: dict[str, Any]) -> None:
    """One worker."""
    import os
    import signal

    import ray.train
    import ray.train.torch

    from millrace import ray as cluster
    from millrace.checkpoint import DataPosition, RandomState

    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = dataset()
    sampler = ResumableSampler(data, batch_size=BATCH, seed=5)
    position = DataPosition(torch.utils.data.DataLoader(data, batch_sampler=sampler))
    state = {"model": model, "optimizer": optimizer, "data": position, "random": RandomState()}
    step = cluster.restore(state) or 0
    notes = Path(config["notes"]) / f"{rank}-from-{step}.jsonl"
    with open(notes, "w", buffering=1) as lines:
        while position.epoch < 2:
            for indices, features in position:
                loss = step_of(model, optimizer, features)
                step += 1
                lines.write(json.dumps([step, indices.tolist()]) + "\n")
                if step == 1:
                    cluster.report({"loss": loss})
                if step % SAVE_EVERY == 0:
                    cluster.report({"loss": loss, "step": step}, state, step=step, wait=step == STEPS)
                if step == KILLED_AFTER and rank == 1 and not notes.with_name("killed").exists():
                    ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED)
                    notes.with_name("killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)


def by_value() -> Callable[[dict[str, Any]], None]:
    """The loop, for processes that cannot import this module."""
    import sys

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return loop


def expected() -> tuple[nn.Module, list[list[int]]]:
    """What one process makes of the same samples, with no one killed."""
    model, data = network(), dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = ResumableSampler(data, batch_size=BATCH * WORLD, seed=5)
    taken: list[list[int]] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for indices in sampler:
            step_of(model, optimizer, data[indices][1])
            taken.append(list(indices))
    return model, taken


@pytest.mark.slow
def test_job_with_a_killed_worker_resumes(cluster: None, s3: S3Server, bucket: str, tmp_path: Path) -> None:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0, bytes_per_second=None) as region:
        fs = millrace.filesystem(
            "s3",
            target_options={**s3.target_options, "endpoint_url": region.endpoint_url},
            cache_dir=str(tmp_path / "cache"),
            min_free=0,
        )
        trainer = TorchTrainer(
            by_value(),
            train_loop_config={"notes": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=WORLD),
            run_config=RunConfig(
                name="job",
                storage_path=f"{bucket}/train",
                storage_filesystem=fs,
                failure_config=FailureConfig(max_failures=1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        )
        result = trainer.fit()
        moved = region.stats(prefix=f"/{bucket}/train/job/step-")

        # The job continued from the last checkpoint, inside an epoch, with the remaining samples.
        assert (tmp_path / "killed").exists()
        assert result.metrics["step"] == STEPS
        model, taken = expected()
        shares: dict[int, list[int]] = {}
        for start in (0, KILLED_AFTER):
            for rank in range(WORLD):
                lines = (tmp_path / f"{rank}-from-{start}.jsonl").read_text().splitlines()
                for step, indices in map(json.loads, lines):
                    if start or step <= KILLED_AFTER:
                        shares.setdefault(step, []).extend(indices)
        assert shares == dict(enumerate(taken, start=1))
        loaded = {"model": {f"module.{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}}
        dcp.load(loaded, storage_reader=checkpoint_reader(result.checkpoint), no_dist=True)
        for name, value in model.state_dict().items():
            assert torch.allclose(loaded["model"][f"module.{name}"], value, atol=1e-4), name

        # What Ray does not keep is gone, and nothing that is kept was sent twice.
        url, options = location_of(result.checkpoint.filesystem, result.checkpoint.path)
        run = open_run(url.rpartition("/")[0], options)
        kept = run.scan()
        assert [found.step for found in kept if found.complete] == [STEPS - SAVE_EVERY, STEPS]
        assert [found for found in kept if not found.complete] == []
        assert len(result.best_checkpoints) == 2
        one = sum(file.size for file in kept[-1].files)
        saves = STEPS // SAVE_EVERY
        assert one > 1_000_000
        assert 0.98 * saves * one < moved.bytes_up < 1.02 * saves * one
        info = run.describe(kept[-1])
        assert info.kind == "full"
        assert info.metrics["loss"] == pytest.approx(result.metrics["loss"])


def test_report_outside_of_a_worker_raises() -> None:
    for call in (lambda: report({"loss": 1.0}), lambda: report({}, {"a": torch.zeros(1)}), lambda: restore({})):
        with pytest.raises(UsageError, match="training function of a trainer"):
            call()
