"""Two workers of Ray Train, of which one has registered a report before the other. Ray is replaced; the ranks are real."""

from __future__ import annotations

import types
from pathlib import Path

import pyarrow.fs
import pytest
import torch
import torch.distributed as dist
from tests.support import ranks

from millrace.checkpoint import CheckpointManager

ray = pytest.importorskip("ray")


def restore_with(root: Path, *registered: int | None) -> tuple[int | None, torch.Tensor]:
    """Restore where the ranks have registered the checkpoints of these steps."""
    import ray.train
    from ray.train import Checkpoint

    from millrace.ray import restore

    files = pyarrow.fs.LocalFileSystem()
    storage = types.SimpleNamespace(storage_filesystem=files, experiment_fs_path=str(root / "run"))
    context = types.SimpleNamespace(get_storage=lambda: storage, get_world_size=dist.get_world_size)
    step = registered[dist.get_rank()]
    newest = None if step is None else Checkpoint(str(root / "run" / f"step-{step:012d}"), files)
    ray.train.get_context, ray.train.get_checkpoint = lambda: context, lambda: newest
    found = {"weights": torch.zeros(1000)}
    return restore(found, read_through="none"), found["weights"]


def restore_after_reports(root: Path) -> None:
    with CheckpointManager(root / "run", full_every=1) as run:
        for step in (1, 2):
            run.save(step, {"weights": torch.full((1000,), float(step))})
    for registered in ((2, 1), (1, 2), (2, None)):
        step, weights = restore_with(root, *registered)
        assert step == registered[0]
        assert torch.equal(weights, torch.full((1000,), float(registered[0])))
    assert restore_with(root, None, 1)[0] is None


@pytest.mark.slow
def test_restore_while_one_worker_has_registered_a_newer_report_loads_one_checkpoint(tmp_path: Path) -> None:
    ranks.run(__file__, "restore_after_reports", 2, tmp_path)


if __name__ == "__main__":
    ranks.main({program.__name__: program for program in (restore_after_reports,)})
