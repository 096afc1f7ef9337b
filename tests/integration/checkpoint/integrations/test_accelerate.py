"""accelerate with a run: killed and resumed trainings on one process, with DDP, and with FSDP in other shards."""

from __future__ import annotations

import functools
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, set_seed
from tests.support import ranks
from tests.support.states import assert_same_state, in_order
from tests.support.training import kill_with_the_others, run_script, set_up_rank
from torch.distributed.tensor import DTensor

from millrace.checkpoint import CheckpointManager, CheckpointReader, DataPosition, load_weights
from millrace.checkpoint.integrations import accelerator_state
from millrace.errors import UsageError

STEPS, SAVED, KILLED = 10, 6, 8


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def accelerator_of(kind: str) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    if kind != "fsdp":
        return Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
    accelerator = Accelerator(cpu=True)
    # accelerate offers FSDP on accelerators only; torch shards on CPUs as well.
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def train(run: str, kind: str, last: int = STEPS, kill: int | None = None) -> dict[str, Any]:
    """Train to step `last`; returns the state."""
    accelerator = accelerator_of(kind)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(33, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if kind == "fsdp":
        assert isinstance(next(model.parameters()), DTensor)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    samples = torch.randn(48, 8, generator=torch.Generator().manual_seed(3))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples), batch_size=4, shuffle=True)
    position = DataPosition(loader, seed=1)
    state = {**accelerator_state(accelerator), "data": position}
    with CheckpointManager(run) as manager:
        step = manager.restore(state) or 0
        while step < last:
            for (batch,) in position:
                loss = torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                counter.count += 2
                if step % 3 == 0 or step == last:
                    manager.save_async(step, state)
                if step == kill:
                    manager.wait()
                    kill_with_the_others()
                if step == last:
                    break
    assert counter.count == 2 * step
    return state


def saved(run: Path | str, step: int = STEPS) -> dict[str, Any]:
    with CheckpointManager(run) as manager:
        assert manager.latest() == step
        return load_weights(manager.metadata().url)


# --- programs of the ranks ------------------------------------------------------------------------


def reference_and_killed(root: Path, kind: str) -> None:
    set_up_rank(root)
    train("whole", kind)
    train("killed", kind, kill=KILLED)


def resumed(root: Path, kind: str) -> None:
    set_up_rank(root)
    train("killed", kind)


def resharded(root: Path) -> None:
    """Another number of ranks loads everything, and saves it again."""
    set_up_rank(root)
    state = train("killed", "fsdp")
    with CheckpointManager("resharded") as manager:
        manager.save(STEPS, state)


PROGRAMS = {
    "resharded": resharded,
    **{
        f"{program.__name__}_{kind}": functools.partial(program, kind=kind)
        for program in (reference_and_killed, resumed)
        for kind in ("ddp", "fsdp")
    },
}


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_killed_and_resumed_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    train(str(tmp_path / "whole"), "alone")
    assert run_script(__file__, "alone", "run", directory=tmp_path) == -signal.SIGKILL
    assert set(saved(tmp_path / "run", SAVED)) > {"model.0.weight", "optimizer.state.0.exp_avg", "random.torch-rank0"}
    train(str(tmp_path / "run"), "alone")
    assert_same_state(saved(tmp_path / "run"), saved(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_on_two_ranks_killed_and_resumed_equals_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    ranks.run(__file__, f"reference_and_killed_{kind}", 2, tmp_path, codes=(-9, -9))
    assert_has_shards(tmp_path / "killed", kind)
    ranks.run(__file__, f"resumed_{kind}", 2, tmp_path)
    whole = saved(tmp_path / "whole")
    assert_same_state(in_order(saved(tmp_path / "killed")), in_order(whole))
    assert {"random.torch-rank0", "random.torch-rank1"} <= whole.keys()
    if kind == "fsdp":
        ranks.run(__file__, "resharded", 1, tmp_path)  # it has no second generator
        other = saved(tmp_path / "resharded")
        assert other.keys() == {name for name in whole if "rank1" not in name}
        assert_same_state(other, {name: whole[name] for name in other})


def assert_has_shards(run: Path, kind: str) -> None:
    with CheckpointManager(run) as manager:
        metadata = CheckpointReader(manager.metadata().url).read_metadata().state_dict_metadata
    name = "optimizer.state.0.weight.exp_avg" if kind == "fsdp" else "optimizer.state.0.exp_avg"
    assert name in metadata, sorted(metadata)
    assert len(metadata["model.0.weight"].chunks) == len(metadata[name].chunks) == (2 if kind == "fsdp" else 1)


def test_state_of_an_accelerator_that_has_prepared_nothing_raises() -> None:
    with pytest.raises(UsageError, match=r"has no model: call accelerator.prepare\(model, optimizer\) first"):
        accelerator_state(accelerator_of("alone"))


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        train(sys.argv[2], "alone", kill=KILLED)
    ranks.main(PROGRAMS)
