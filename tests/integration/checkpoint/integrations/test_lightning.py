"""Lightning with `MillraceCheckpointIO`: killed and resumed trainings, `ModelCheckpoint`'s files, and what it saves."""

from __future__ import annotations

import os
import signal
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from tests.support.training import environment_of, run_script
from torch.utils.data import DataLoader, TensorDataset

from millrace.checkpoint import CheckpointManager, DataPosition, describe, load_weights, verify_checkpoint
from millrace.checkpoint.integrations import MillraceCheckpointIO
from millrace.errors import CheckpointNotFoundError, ConfigurationError, UnsupportedFormatError
from millrace.testing.s3 import S3Server

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]

STEPS, KILLED = 10, 7


class Model(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1))

    def train_dataloader(self) -> Any:
        """With a position, and created by each rank."""
        samples = torch.randn(40 * STEPS, 8, generator=torch.Generator().manual_seed(3))
        return DataPosition(DataLoader(TensorDataset(samples), batch_size=8, shuffle=True), seed=1)

    def training_step(self, batch: Any, index: int) -> Any:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)]


class Seeds(Callback):  # type: ignore[misc]
    """Lightning does not save random generators: each step has numbers of its own."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        torch.manual_seed(trainer.global_step)


class Kills(Callback):  # type: ignore[misc]
    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        if trainer.global_step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(folder: str, *callbacks: Any, plugin: Any = None, resume: str | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        plugins=[plugin or MillraceCheckpointIO()],
        callbacks=[saves, Seeds(), *callbacks],
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Model(), ckpt_path=resume)
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    trainer.strategy.checkpoint_io.teardown()
    return trainer


def assert_same_end(left: str, right: str) -> None:
    one, other = (
        MillraceCheckpointIO().load_checkpoint(f"{path}/end.ckpt", weights_only=False) for path in (left, right)
    )
    assert one["global_step"] == other["global_step"] == STEPS
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(one[part], other[part], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_training_killed_and_resumed_equals_an_uninterrupted_one(is_async: bool, tmp_path: Path) -> None:
    folder, whole = str(tmp_path / "saves"), str(tmp_path / "whole")
    fit(whole, plugin=AsyncCheckpointIO(MillraceCheckpointIO()) if is_async else None)
    assert run_script(__file__, folder, directory=tmp_path) == -signal.SIGKILL
    assert sorted(os.listdir(folder)) == ["last.ckpt", "step=3.ckpt", "step=6.ckpt"]
    fit(folder, resume=f"{folder}/last.ckpt")
    assert_same_end(folder, whole)
    weights = load_weights(f"{folder}/end.ckpt", "state_dict")
    assert set(weights) == {f"state_dict.net.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
    assert verify_checkpoint(f"{folder}/step=9.ckpt").ok


def test_training_that_saves_to_s3_resumes(
    s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of(s3).items():
        monkeypatch.setenv(name, value)
    folder = f"s3://{bucket}/saves"
    whole = fit(folder)
    assert whole.checkpoint_callback.best_model_path == f"{folder}/step=9.ckpt"
    fit(str(tmp_path / "again"), resume=f"{folder}/step=6.ckpt")
    assert_same_end(folder, str(tmp_path / "again"))


def test_training_resumes_from_a_file_of_lightnings_own_plugin(tmp_path: Path) -> None:
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    fit(old, plugin=TorchCheckpointIO())
    assert os.path.isfile(f"{old}/step=6.ckpt")
    fit(new, resume=f"{old}/step=6.ckpt")
    assert_same_end(old, new)


def test_training_resumes_in_the_folder_of_lightnings_own_plugin(tmp_path: Path) -> None:
    folder = str(tmp_path)
    fit(folder, plugin=TorchCheckpointIO())
    fit(folder, resume=f"{folder}/step=6.ckpt")
    names = ["end.ckpt", "last.ckpt", "step=3.ckpt", "step=6.ckpt", "step=9-v1.ckpt", "step=9.ckpt"]
    assert sorted(os.listdir(folder)) == names
    assert MillraceCheckpointIO().load_checkpoint(f"{folder}/last.ckpt", weights_only=False)["global_step"] == 9
    assert verify_checkpoint(f"{folder}/last.ckpt").ok


def test_checkpoints_that_lightning_removes_are_removed(tmp_path: Path) -> None:
    class Loss(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
            module.log("falls", -float(trainer.global_step))

    best = ModelCheckpoint(tmp_path / "best", monitor="falls", save_top_k=1, every_n_train_steps=3, filename="{step}")
    fit(str(tmp_path / "all"), Loss(), best)
    assert os.listdir(tmp_path / "best") == ["step=9.ckpt"]


def test_link_to_a_checkpoint_is_removed_without_the_checkpoint(tmp_path: Path) -> None:
    """Lightning removes old links with `save_last="link"` and a step in the name of the last checkpoint."""
    saves = ModelCheckpoint(
        tmp_path / "links", filename="{step}", every_n_train_steps=4, save_top_k=-1, save_last="link"
    )
    saves.CHECKPOINT_NAME_LAST = "last-{step}"
    fit(str(tmp_path / "all"), saves)
    links = [each.name for each in (tmp_path / "links").iterdir() if each.is_symlink()]
    assert links == [f"last-step={STEPS}.ckpt"]
    for step in (4, 8):
        loaded = MillraceCheckpointIO().load_checkpoint(tmp_path / "links" / f"step={step}.ckpt", weights_only=False)
        assert loaded["global_step"] == step


def test_save_in_place_of_a_link_leaves_the_checkpoint_behind_it(tmp_path: Path) -> None:
    """After a resume, `save_last="link"` may save a last checkpoint where there is a link to the best one."""
    plugin = MillraceCheckpointIO()
    plugin.save_checkpoint({"x": torch.zeros(2)}, tmp_path / "best")
    os.symlink("best", tmp_path / "last")
    plugin.save_checkpoint({"x": torch.ones(2)}, tmp_path / "last")
    for name, value in (("best", 0.0), ("last", 1.0)):
        assert plugin.load_checkpoint(tmp_path / name, weights_only=False)["x"].tolist() == [value, value]


@pytest.mark.slow
def test_two_ranks_save_once_and_both_resume(tmp_path: Path) -> None:
    """Lightning starts the second process itself."""
    assert run_script(__file__, str(tmp_path / "a"), str(tmp_path / "b"), directory=tmp_path) == 0
    assert_same_end(str(tmp_path / "a"), str(tmp_path / "b"))


def two_ranks(first: str, second: str) -> None:
    options = {"devices": 2, "strategy": "ddp"}
    fit(first, **options)
    fit(second, resume=f"{first}/step=6.ckpt", **options)


def test_every_value_of_a_checkpoint_comes_back(tmp_path: Path) -> None:
    modules = torch.nn.BatchNorm1d(2).state_dict()
    assert isinstance(modules, OrderedDict)
    parameter = torch.nn.Parameter(torch.ones(2))
    saved = {
        "state_dict": modules,
        "a.b": torch.tensor([1, 2]),
        "a": {"b": torch.tensor(3.5), "": (torch.zeros(0, 3), None, [b"x", {1: torch.ones(1)}])},
        "parameter": parameter,
        "sparse": torch.eye(2).to_sparse(),
        "half": torch.tensor([float("nan"), 1.0]).bfloat16(),
        "object": Path("x"),
        "empty": {},
        "reserved": {"millrace.tensor": "a.b"},
        "reserved twice": {"millrace.tensor": {"millrace.tensor": "a.b"}},
    }
    plugin = MillraceCheckpointIO()
    for _ in range(2):  # the second replaces the first
        plugin.save_checkpoint(saved, tmp_path / "c")
    loaded = plugin.load_checkpoint(tmp_path / "c", weights_only=False)
    assert list(loaded) == list(saved)
    assert loaded["state_dict"]._metadata == modules._metadata
    assert loaded["a"][""][2][0] == b"x"
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    for key in ("object", "empty", "reserved", "reserved twice"):
        assert loaded[key] == saved[key]
    torch.testing.assert_close(loaded["half"], saved["half"], rtol=0, atol=0, equal_nan=True)
    for key in ("state_dict", "a.b", "parameter"):
        torch.testing.assert_close(loaded[key], saved[key], rtol=0, atol=0)
    torch.testing.assert_close(loaded["a"]["b"], torch.tensor(3.5))
    torch.testing.assert_close(loaded["a"][""][2][1][1], torch.ones(1))
    torch.testing.assert_close(loaded["sparse"].to_dense(), torch.eye(2))
    assert describe(tmp_path / "c").tensors == 11


def test_checkpoint_that_cannot_be_used_raises(tmp_path: Path) -> None:
    plugin = MillraceCheckpointIO()
    with pytest.raises(CheckpointNotFoundError):
        plugin.load_checkpoint(tmp_path / "missing")
    with pytest.raises(ConfigurationError):
        MillraceCheckpointIO(compression="best")  # type: ignore[arg-type]
    with CheckpointManager(tmp_path / "run") as run:
        other = run.save(1, {"a": torch.ones(2)}).url
    with pytest.raises(UnsupportedFormatError, match="was not saved by Lightning: load it with load_weights"):
        plugin.load_checkpoint(other)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        two_ranks(sys.argv[1], sys.argv[2])
    else:
        fit(sys.argv[1], Kills())
