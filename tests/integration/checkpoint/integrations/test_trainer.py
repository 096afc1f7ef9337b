"""Hugging Face's `Trainer` with a run: a killed and resumed training equals an uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import ranks
from tests.support.training import environment_of, kill_with_the_others, run_script, set_up_rank
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from millrace.checkpoint import CheckpointManager, KeepBest, export_checkpoint, load_weights
from millrace.checkpoint.integrations import MillraceTrainer
from millrace.errors import CheckpointNotFoundError, ConfigurationError, UsageError
from millrace.testing.s3 import S3Server

STEPS, SAVED, KILLED = 10, 4, 7


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(run: str, **options: Any) -> MillraceTrainer:
    """Dropout, a decaying rate, evaluation and an epoch of several saves: everything that a resume has to restore."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, attention_dropout=0.2))
    arguments = {
        "output_dir": "unused",
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "save_steps": SAVED,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options.pop("arguments", {}),
    }
    return MillraceTrainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=samples(24),
        eval_dataset=samples(4),
        run=run,
        **options,
    )


class Kills(TrainerCallback):  # type: ignore[misc]
    """Kills the process after a step, as soon as the save before it is durable on all ranks."""

    def __init__(self, of: MillraceTrainer) -> None:
        self._of = of

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == KILLED:
            self._of.checkpoints.wait()
            kill_with_the_others()


def train_until_killed(run: str) -> None:
    doomed = trainer(run)
    doomed.add_callback(Kills(doomed))
    doomed.train(resume_from_checkpoint=True)


def assert_same_training(left: MillraceTrainer, right: MillraceTrainer) -> None:
    torch.testing.assert_close(left.model.state_dict(), right.model.state_dict(), rtol=0, atol=0)
    assert left.optimizer.state_dict()["param_groups"] == right.optimizer.state_dict()["param_groups"]
    torch.testing.assert_close(
        left.optimizer.state_dict()["state"], right.optimizer.state_dict()["state"], rtol=0, atol=0
    )
    assert left.lr_scheduler.state_dict() == right.lr_scheduler.state_dict()
    assert losses(left) == losses(right)


def losses(one: MillraceTrainer) -> list[Any]:
    """What was logged, without times."""
    names = ("step", "loss", "eval_loss", "learning_rate", "grad_norm")
    logged = [{name: entry[name] for name in names if name in entry} for entry in one.state.log_history]
    return [entry for entry in logged if len(entry) > 1]


# --- on two ranks ---------------------------------------------------------------------------------


def reference_and_killed(root: Path) -> None:
    set_up_rank(root)
    whole = trainer(str(root / "whole"))
    whole.train()
    assert whole.checkpoints._ranks.count == 2
    whole.checkpoints.close()
    train_until_killed(str(root / "killed"))


def resumed(root: Path) -> None:
    set_up_rank(root)
    again = trainer(str(root / "killed"))
    again.train(resume_from_checkpoint=True)
    again.checkpoints.close()


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_killed_and_resumed_equals_an_uninterrupted_one(
    s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environment_of(s3).items():
        monkeypatch.setenv(name, value)
    whole = trainer("whole", run_options={"keep": KeepBest("eval_loss", 1)})
    with whole.checkpoints:
        whole.train(resume_from_checkpoint=True)  # an empty run
        assert whole.checkpoints.metadata().metrics["eval_loss"] == whole.state.log_history[-2]["eval_loss"]
    run = f"s3://{bucket}/run"
    assert run_script(__file__, "alone", run, directory=tmp_path) == -signal.SIGKILL
    again = trainer(run)
    with again.checkpoints:
        assert again.checkpoints.steps() == [SAVED]
        again.train(resume_from_checkpoint=True)
        assert again.checkpoints.steps() == [4, 8, 10]
        assert_same_training(again, whole)
        # From an earlier step, at the beginning of the second half of the epoch; the later steps are saved again.
        earlier = trainer(run)
    with earlier.checkpoints:
        earlier.train(resume_from_checkpoint=8)
        assert_same_training(earlier, whole)
    assert not (tmp_path / "unused").exists() or not os.listdir(tmp_path / "unused")
    assert_trained_model_exports(run, whole.model, tmp_path)


def assert_trained_model_exports(run: str, model: Any, folder: Path) -> None:
    """In shards, for `from_pretrained` and for the loader of safetensors."""
    with CheckpointManager(run) as saved:
        url = saved.metadata().url
    target = folder / "exported"
    export_checkpoint(url, target, "safetensors", keys=["model"], rename=[r"model\.(.*)=\1"], shard_bytes=20_000)
    model.config.save_pretrained(target)
    expected = model.state_dict()
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    assert set(json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]) == set(expected)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(target).state_dict(), expected, rtol=0, atol=0)
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    torch.testing.assert_close(read, dict(expected), rtol=0, atol=0)
    weights = load_weights(url, "model")
    weights = {name.removeprefix("model."): value for name, value in weights.items()}
    torch.testing.assert_close(weights, dict(expected), rtol=0, atol=0)


@pytest.mark.slow
def test_training_on_two_ranks_killed_and_resumed_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    ranks.run(__file__, "reference_and_killed", 2, tmp_path, codes=(-9, -9))
    ranks.run(__file__, "resumed", 2, tmp_path)
    whole, again = (load_state(tmp_path / name) for name in ("whole", "killed"))
    assert {"random.torch-rank0", "random.torch-rank1"} <= whole.keys()
    torch.testing.assert_close(again, whole, rtol=0, atol=0)


def load_state(run: Path) -> dict[str, Any]:
    with CheckpointManager(run) as saved:
        assert saved.latest() == STEPS
        return load_weights(saved.metadata().url)


@pytest.mark.parametrize("option", ["load_best_model_at_end", "push_to_hub"])
def test_option_that_needs_own_checkpoints_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{option}.* needs the Trainer's own checkpoints: leave it out"):
        trainer(str(tmp_path / "run"), arguments={option: True})


def test_resume_from_a_step_that_is_missing_or_of_another_program_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = trainer(str(tmp_path / "run"))
    with one.checkpoints:
        with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint of step 3"):
            one.train(resume_from_checkpoint=3)
        one.checkpoints.save(5, {"model": one.model})
        with pytest.raises(CheckpointNotFoundError, match=r"step 5 of .* was not saved by a Trainer"):
            one.train(resume_from_checkpoint=True)
        # A new training in a used run does not hide the checkpoints that are there.
        with pytest.raises(UsageError, match="step 4"):
            one.train()


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        train_until_killed(sys.argv[2])
    ranks.main({program.__name__: program for program in (reference_and_killed, resumed)})
