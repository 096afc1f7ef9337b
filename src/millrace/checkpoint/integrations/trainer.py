"""Hugging Face `Trainer` with the checkpoints of a `CheckpointManager`: `MillraceTrainer`.

A `TrainerCallback` would see a step before its evaluation, and could not replace the trainer's own files. So the methods
that save and load a checkpoint are overridden.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from millrace.checkpoint.integrations.accelerate import model_state, optimizer_state
from millrace.checkpoint.run.manager import CheckpointManager
from millrace.checkpoint.run.resuming import RandomState
from millrace.errors import CheckpointNotFoundError, ConfigurationError

_STATE = "trainer_state"


class MillraceTrainerMixin:
    """Makes a subclass of `Trainer` save into a run: `class MyTrainer(MillraceTrainerMixin, Seq2SeqTrainer): pass`.

        trainer = MillraceTrainer(model=model, args=args, train_dataset=data, run="s3://bucket/run")
        trainer.train(resume_from_checkpoint=True)

    `save_strategy` and `save_steps` decide when a checkpoint is saved. It contains model, optimizer, scheduler, gradient
    scaler, the random generators of each process, and the trainer's state; evaluation metrics are those of the checkpoint
    (`KeepBest`). The training continues while it is written. `train` returns when the last one is durable.

    - `run`: a URL or directory, or a `CheckpointManager` that was created after the `TrainingArguments`.
    - `run_options`: those of `CheckpointManager`, such as `{"keep": 5}`. `save_total_limit` has no effect.

    `checkpoints` is the manager. Every process of a distributed training saves and restores; with FSDP each one its shards.
    Raises `ConfigurationError` for DeepSpeed, and for `load_best_model_at_end` and `push_to_hub`, which need the trainer's
    own files.
    """

    def __init__(
        self,
        *arguments: Any,
        run: str | os.PathLike[str] | CheckpointManager,
        run_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        given = options.get("args", arguments[1] if len(arguments) > 1 else None)
        for name in ("load_best_model_at_end", "push_to_hub", "deepspeed"):
            if getattr(given, name, None):
                raise ConfigurationError(
                    f"TrainingArguments({name}=...) needs the Trainer's own checkpoints",
                    next_step="leave it out, and use run_options={'keep': ...} and load_weights",
                )
        super().__init__(*arguments, **options)
        self.checkpoints = run if isinstance(run, CheckpointManager) else CheckpointManager(run, **(run_options or {}))
        # The directory that stands for the checkpoint to resume from, its step, and its random generators.
        self._placeholder: str | None = None
        self._step = 0
        self._random: dict[str, Any] = {}

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        """As `Trainer.train`. `resume_from_checkpoint=True` continues from the newest checkpoint of the run, if it has one;
        a number, from that step; a path, from a checkpoint of a stock `Trainer`. Raises the errors of a restore.
        """
        train = getattr(super(), "train")  # noqa: B009 - the mixin's base has none
        if resume_from_checkpoint is True or type(resume_from_checkpoint) is int:
            step = self.checkpoints.latest() if resume_from_checkpoint is True else resume_from_checkpoint
            result = (
                train(None, *arguments, **options) if step is None else self._resume(train, step, arguments, options)
            )
        else:
            result = train(resume_from_checkpoint, *arguments, **options)
        self.checkpoints.wait()
        return result

    def _resume(self, train: Any, step: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Train from a directory with the trainer's state alone. The methods below load the rest from the run."""
        text = self.checkpoints.metadata(step).user.get(_STATE)
        if text is None:
            raise CheckpointNotFoundError(
                f"step {step} of {self.checkpoints.url} was not saved by a Trainer", next_step="give another step"
            )
        with tempfile.TemporaryDirectory() as self._placeholder:
            with open(os.path.join(self._placeholder, TRAINER_STATE_NAME), "w", encoding="utf-8") as file:
                file.write(text)
            self._step = step
            try:
                return train(self._placeholder, *arguments, **options)
            finally:
                self._placeholder = None

    # --- called by Trainer ------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        trainer.store_flos()
        state = trainer.state
        exported = [*trainer.callback_handler.callbacks, trainer.control]
        exported = [each for each in exported if isinstance(each, ExportableState)]
        state.stateful_callbacks = TrainerState(stateful_callbacks=exported).stateful_callbacks
        step = state.global_step
        metrics: dict[str, float] = {}
        for entry in state.log_history:
            if entry.get("step") == step:
                numbers = {name: value for name, value in entry.items() if isinstance(value, int | float)}
                metrics |= {name: value for name, value in numbers.items() if name != "step"}
        text = json.dumps(dataclasses.asdict(state))
        self.checkpoints.save_async(step, self._training_state(), metrics, user={_STATE: text})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if resume_from_checkpoint != self._placeholder:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or checkpoint != self._placeholder:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        # The model is prepared and the scheduler exists only now.
        self.checkpoints.restore(self._training_state(), step=self._step)
        self._random = RandomState().state_dict()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called once more after the batches before the checkpoint were skipped."""
        if checkpoint is None or checkpoint != self._placeholder:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            RandomState().load_state_dict(self._random)

    def _training_state(self) -> dict[str, Any]:
        trainer: Any = self
        sharded = bool(trainer.is_fsdp_enabled)
        model = trainer.model_wrapped if sharded else trainer.model
        state = {
            "model": model_state(trainer.accelerator, model, sharded=sharded),
            "optimizer": optimizer_state(trainer.optimizer, model if sharded else None),
            "scheduler": trainer.lr_scheduler,
            "random": RandomState(),
        }
        return state if trainer.accelerator.scaler is None else {**state, "scaler": trainer.accelerator.scaler}


class MillraceTrainer(MillraceTrainerMixin, Trainer):  # type: ignore[misc]
    """Hugging Face `Trainer` that saves into a run; see `MillraceTrainerMixin`."""
