"""torchtitan's checkpointer interface, with its own optimizers, schedulers and data loader, on one rank and with FSDP2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support import ranks
from tests.support.states import assert_same_state
from tests.support.training import kill_with_the_others, set_up_rank
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager as StockCheckpointer
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from millrace.checkpoint import CheckpointManager, load_weights
from millrace.checkpoint.integrations import MillraceCheckpointer
from millrace.errors import CheckpointNotFoundError

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate computed by the scheduler"),
]

STEPS, KILLED = 10, 8


class Samples(IterableDataset):  # type: ignore[misc]
    """An endless stream with a position."""

    def __init__(self, rank: int) -> None:
        self._rank, self._next = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._next += 1
            yield torch.randn(8, generator=torch.Generator().manual_seed(1000 * self._rank + self._next))

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Training:
    """The calls of torchtitan's `Trainer` in their order; that one needs a GPU's compiler to be imported."""

    def __init__(self, folder: Path, config: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.step = 0
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if world > 1:
            fully_shard(self.model)
            assert isinstance(self.model[0].weight, DTensor)
        groups = [
            ParamGroupConfig(pattern="bias", optimizer_name="Adam", optimizer_kwargs={"lr": 0.05}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1}),
        ]
        self.optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(
            model_parts=[self.model]
        )
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.loader = ParallelAwareDataloader(Samples(rank), rank, world, batch_size=4)
        config = config or MillraceCheckpointer.Config
        self.checkpointer = config(enable=True, interval=3, folder="run", last_save_model_only=False, **options).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def train(self, last: int = STEPS, kill: int | None = None) -> None:
        self.checkpointer.load()
        batches = iter(self.loader)
        while self.step < last:
            self.step += 1
            batch = next(batches)
            self.optimizers.zero_grad()
            torch.nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True)).backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.checkpointer.save(self.step, last_step=self.step == last)
            if self.step == kill:
                self.checkpointer.maybe_wait_for_saving()
                kill_with_the_others()
        self.checkpointer.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """torchtitan always has a process group."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def saved(folder: Path, step: int = STEPS) -> dict[str, Any]:
    with CheckpointManager(folder / "run") as manager:
        assert manager.latest() == step
        return load_weights(manager.metadata().url)


# --- programs of the ranks ------------------------------------------------------------------------


def reference_and_killed(root: Path) -> None:
    set_up_rank(root)
    Training(root / "whole").train()
    Training(root / "killed").train(kill=KILLED)


def resumed(root: Path) -> None:
    Training(root / "killed").train()


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_with_fsdp_killed_and_resumed_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "killed")
    ranks.run(__file__, "reference_and_killed", 2, tmp_path, codes=(-9, -9))
    assert saved(tmp_path / "killed", 6)["0.weight"].shape == (33, 8)
    ranks.run(__file__, "resumed", 2, tmp_path)
    assert_same_state(saved(tmp_path / "killed"), saved(tmp_path / "whole"))


@pytest.mark.parametrize("mode", ["async", "disabled", "async_with_pinned_mem"])
def test_training_in_two_parts_equals_one(mode: str, group: None, tmp_path: Path) -> None:
    Training(tmp_path / "whole").train()
    Training(tmp_path / "parts", async_mode=mode, keep_latest_k=2).train(last=5)
    assert_same_state({"x": saved(tmp_path / "parts", 5)["optimizer.state.0.weight.step"]}, {"x": torch.tensor(5.0)})
    second = Training(tmp_path / "parts", async_mode=mode, keep_latest_k=2)
    second.train()
    assert_same_state(saved(tmp_path / "parts"), saved(tmp_path / "whole"))
    assert second.schedulers.state_dict() == {"last_epoch": STEPS}
    # Two, and those that the newest ones need.
    with CheckpointManager(tmp_path / "parts" / "run") as manager:
        assert set(manager.steps()) >= {9, 10}


def test_initial_load_takes_a_checkpoint_of_either_checkpointer(group: None, tmp_path: Path) -> None:
    stock = Training(tmp_path / "stock", StockCheckpointer.Config)
    stock.train(last=3)
    expected = stock.model.state_dict()
    model_only = Training(tmp_path / "new", initial_load_path=str(tmp_path / "stock" / "run" / "step-3"))
    assert model_only.checkpointer.load()
    assert_same_state(dict(model_only.model.state_dict()), dict(expected))
    assert model_only.step == 0
    model_only.checkpointer.close()
    everything = Training(
        tmp_path / "all",
        initial_load_path=str(tmp_path / "stock" / "run" / "step-3"),
        initial_load_model_only=False,
    )
    assert everything.checkpointer.load()
    assert everything.step == 3
    everything.checkpointer.close()


def test_last_checkpoint_of_the_model_only_has_the_export_dtype(group: None, tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.checkpointer.last_save_model_only, training.checkpointer.export_dtype = True, torch.bfloat16
    training.train(last=4)
    weights = saved(tmp_path, 4)
    assert set(weights) == set(training.model.state_dict())
    assert all(value.dtype == torch.bfloat16 for value in weights.values())


def test_excluded_state_and_missing_step_and_disabled_checkpointer(group: None, tmp_path: Path) -> None:
    Training(tmp_path).train(last=3)
    training = Training(tmp_path, exclude_from_loading=["dataloader", "lr_scheduler"])
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint of step 2"):
        training.checkpointer.load(2)
    assert training.checkpointer.load(3)
    assert (training.step, training.schedulers.state_dict()) == (3, {"last_epoch": 0})
    training.checkpointer.close()
    disabled = MillraceCheckpointer.Config(folder="none").build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert not disabled.load()
    assert not disabled.save(3)


if __name__ == "__main__":
    ranks.main({program.__name__: program for program in (reference_and_killed, resumed)})
