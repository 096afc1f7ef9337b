"""Lightning with `MillraceCheckpointIO`: killed and resumed trainings, `ModelCheckpoint`'s files, and what it saves."""

from __future__ import annotations

import importlib
import os
import signal
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.training import environment_of, run_script

from millrace.checkpoint import CheckpointManager, describe, load_weights, verify_checkpoint
from millrace.errors import CheckpointNotFoundError, ConfigurationError, UnsupportedFormatError
from millrace.testing.s3 import S3Server

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    """Loaded here: the import takes 2 s of CPU, also in the processes that only collect these tests."""
    return importlib.import_module("tests.support.lightning_training")


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_training_killed_and_resumed_equals_an_uninterrupted_one(
    lightning: ModuleType, is_async: bool, tmp_path: Path
) -> None:
    folder, whole = str(tmp_path / "saves"), str(tmp_path / "whole")
    lightning.fit(whole, plugin=lightning.AsyncCheckpointIO(lightning.MillraceCheckpointIO()) if is_async else None)
    assert run_script(str(lightning.__file__), folder, directory=tmp_path) == -signal.SIGKILL
    assert sorted(os.listdir(folder)) == ["last.ckpt", "step=3.ckpt", "step=6.ckpt"]
    lightning.fit(folder, resume=f"{folder}/last.ckpt")
    lightning.assert_same_end(folder, whole)
    weights = load_weights(f"{folder}/end.ckpt", "state_dict")
    assert set(weights) == {f"state_dict.net.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
    assert verify_checkpoint(f"{folder}/step=9.ckpt").ok


def test_training_that_saves_to_s3_resumes(
    lightning: ModuleType, s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of(s3).items():
        monkeypatch.setenv(name, value)
    folder = f"s3://{bucket}/saves"
    whole = lightning.fit(folder)
    assert whole.checkpoint_callback.best_model_path == f"{folder}/step=9.ckpt"
    lightning.fit(str(tmp_path / "again"), resume=f"{folder}/step=6.ckpt")
    lightning.assert_same_end(folder, str(tmp_path / "again"))


def test_training_resumes_from_a_file_of_lightnings_own_plugin(lightning: ModuleType, tmp_path: Path) -> None:
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    lightning.fit(old, plugin=lightning.TorchCheckpointIO())
    assert os.path.isfile(f"{old}/step=6.ckpt")
    lightning.fit(new, resume=f"{old}/step=6.ckpt")
    lightning.assert_same_end(old, new)


def test_training_resumes_in_the_folder_of_lightnings_own_plugin(lightning: ModuleType, tmp_path: Path) -> None:
    folder = str(tmp_path)
    lightning.fit(folder, plugin=lightning.TorchCheckpointIO())
    lightning.fit(folder, resume=f"{folder}/step=6.ckpt")
    names = ["end.ckpt", "last.ckpt", "step=3.ckpt", "step=6.ckpt", "step=9-v1.ckpt", "step=9.ckpt"]
    assert sorted(os.listdir(folder)) == names
    assert (
        lightning.MillraceCheckpointIO().load_checkpoint(f"{folder}/last.ckpt", weights_only=False)["global_step"] == 9
    )
    assert verify_checkpoint(f"{folder}/last.ckpt").ok


def test_checkpoints_that_lightning_removes_are_removed(lightning: ModuleType, tmp_path: Path) -> None:
    class Loss(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
            module.log("falls", -float(trainer.global_step))

    best = lightning.ModelCheckpoint(
        tmp_path / "best", monitor="falls", save_top_k=1, every_n_train_steps=3, filename="{step}"
    )
    lightning.fit(str(tmp_path / "all"), Loss(), best)
    assert os.listdir(tmp_path / "best") == ["step=9.ckpt"]


def test_link_to_a_checkpoint_is_removed_without_the_checkpoint(lightning: ModuleType, tmp_path: Path) -> None:
    """Lightning removes old links with `save_last="link"` and a step in the name of the last checkpoint."""
    saves = lightning.ModelCheckpoint(
        tmp_path / "links", filename="{step}", every_n_train_steps=4, save_top_k=-1, save_last="link"
    )
    saves.CHECKPOINT_NAME_LAST = "last-{step}"
    lightning.fit(str(tmp_path / "all"), saves)
    links = [each.name for each in (tmp_path / "links").iterdir() if each.is_symlink()]
    assert links == [f"last-step={lightning.STEPS}.ckpt"]
    for step in (4, 8):
        loaded = lightning.MillraceCheckpointIO().load_checkpoint(
            tmp_path / "links" / f"step={step}.ckpt", weights_only=False
        )
        assert loaded["global_step"] == step


def test_save_in_place_of_a_link_leaves_the_checkpoint_behind_it(lightning: ModuleType, tmp_path: Path) -> None:
    """After a resume, `save_last="link"` may save a last checkpoint where there is a link to the best one."""
    plugin = lightning.MillraceCheckpointIO()
    plugin.save_checkpoint({"x": torch.zeros(2)}, tmp_path / "best")
    os.symlink("best", tmp_path / "last")
    plugin.save_checkpoint({"x": torch.ones(2)}, tmp_path / "last")
    for name, value in (("best", 0.0), ("last", 1.0)):
        assert plugin.load_checkpoint(tmp_path / name, weights_only=False)["x"].tolist() == [value, value]


@pytest.mark.slow
def test_two_ranks_save_once_and_both_resume(lightning: ModuleType, tmp_path: Path) -> None:
    """Lightning starts the second process itself."""
    assert run_script(str(lightning.__file__), str(tmp_path / "a"), str(tmp_path / "b"), directory=tmp_path) == 0
    lightning.assert_same_end(str(tmp_path / "a"), str(tmp_path / "b"))


def test_every_value_of_a_checkpoint_comes_back(lightning: ModuleType, tmp_path: Path) -> None:
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
    plugin = lightning.MillraceCheckpointIO()
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


def test_checkpoint_that_cannot_be_used_raises(lightning: ModuleType, tmp_path: Path) -> None:
    plugin = lightning.MillraceCheckpointIO()
    with pytest.raises(CheckpointNotFoundError):
        plugin.load_checkpoint(tmp_path / "missing")
    with pytest.raises(ConfigurationError):
        lightning.MillraceCheckpointIO(compression="best")  # type: ignore[arg-type]
    with CheckpointManager(tmp_path / "run") as run:
        other = run.save(1, {"a": torch.ones(2)}).url
    with pytest.raises(UnsupportedFormatError, match="was not saved by Lightning: load it with load_weights"):
        plugin.load_checkpoint(other)
