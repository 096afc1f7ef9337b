"""The training state of an `accelerate.Accelerator`, for `CheckpointManager`: `accelerator_state`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from millrace.checkpoint.run.resuming import RandomState
from millrace.errors import UsageError

_UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def accelerator_state(accelerator: Accelerator) -> dict[str, Any]:
    """The state of everything that the accelerator has prepared or registered, for `CheckpointManager`.

        state = accelerator_state(accelerator)           # after prepare()
        step = run.restore(state) or 0
        ...
        run.save_async(step, state)                      # after an optimizer step, on every process

    It replaces `accelerator.save_state` and `load_state`, and may be extended (`{**state, "data": position}`). The members
    are `model`, `optimizer`, `scheduler` (a second one is `model_1`), `scaler`, `random` (the generators of each process),
    and `custom`, `custom_1`, ... from `register_for_checkpointing`. They refer to the prepared objects, so one dict serves
    all saves. The position in the data is not included: use `DataPosition` with a loader that was not prepared.

    With FSDP (versions 1 and 2) model and optimizer are sharded, each process saves its own shards, and a restore works with
    any number of processes. Raises `UsageError` for DeepSpeed, Megatron-LM and XLA, and before `prepare`.
    """
    kind = accelerator.distributed_type
    if kind in _UNSUPPORTED:
        raise UsageError(
            f"the accelerator uses {kind.value}, whose state Millrace cannot save",
            next_step="use its own save_state, or FSDP",
        )
    models, optimizers = list(accelerator._models), list(accelerator._optimizers)
    if not models:
        raise UsageError("the accelerator has no model", next_step="call accelerator.prepare(model, optimizer) first")
    sharded = kind == DistributedType.FSDP
    if sharded and len(optimizers) > len(models):
        raise UsageError(
            f"{len(optimizers)} optimizers share {len(models)} sharded models", next_step="prepare a model for each"
        )
    members: dict[str, list[Any]] = {
        "model": [model_state(accelerator, model, sharded=sharded) for model in models],
        "optimizer": [
            optimizer_state(optimizer, models[index] if sharded else None) for index, optimizer in enumerate(optimizers)
        ],
        "scheduler": list(accelerator._schedulers),
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        "random": [RandomState()],
        "custom": list(accelerator._custom_objects),
    }
    return dict(_numbered(members))


def model_state(accelerator: Accelerator, model: Any, *, sharded: bool) -> Any:
    """A model as a member of a state: the shards of an FSDP model, or the model without its wrappers."""
    return _ShardedModel(model) if sharded else accelerator.unwrap_model(model, keep_torch_compile=False)


def optimizer_state(optimizer: Any, sharded_model: Any = None) -> Any:
    """A prepared optimizer as a member of a state, with the names of the parameters of its FSDP model as keys."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if sharded_model is None else _ShardedOptimizer(sharded_model, inner)


def _numbered(members: Mapping[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    for name, values in members.items():
        for index, value in enumerate(values):
            yield name if index == 0 else f"{name}_{index}", value


class _ShardedModel:
    """A `Stateful` with the shards of this rank, by the names of the unwrapped model's parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = get_model_state_dict(self._model)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state)


class _ShardedOptimizer:
    """A `Stateful` with the optimizer's shards of this rank. `state_dict` creates the state of a new optimizer."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = get_optimizer_state_dict(self._model, self._optimizer)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._model, self._optimizer, state)
