"""Trainings with Lightning and `MillraceCheckpointIO`.

Run as a script, it trains and is killed: `python lightning_training.py FOLDER`. With two folders, two ranks train, and
resume in the second.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from millrace.checkpoint import DataPosition
from millrace.checkpoint.integrations import MillraceCheckpointIO

__all__ = ["AsyncCheckpointIO", "TorchCheckpointIO"]

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


def two_ranks(first: str, second: str) -> None:
    options = {"devices": 2, "strategy": "ddp"}
    fit(first, **options)
    fit(second, resume=f"{first}/step=6.ckpt", **options)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        two_ranks(sys.argv[1], sys.argv[2])
    else:
        fit(sys.argv[1], Kills())
