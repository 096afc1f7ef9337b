"""Checkpoints of other training libraries in Millrace's format.

- accelerate: `accelerator_state`, the state of everything that was prepared, for `CheckpointManager`.
- Hugging Face `Trainer`: `MillraceTrainer`, or `MillraceTrainerMixin` for other trainers.
- Lightning: `MillraceCheckpointIO`, a plugin.
- torchtitan: `MillraceCheckpointer`, whose `Config` replaces that of torchtitan's own checkpointer.

Key terms:
- run, manager: as in `millrace.checkpoint`. All but Lightning save into a run.
- plugin: Lightning's interface that writes and reads one checkpoint at a path that Lightning chooses.

Each library is imported on the first use of its name. Start reading in `accelerate.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.checkpoint.integrations.accelerate import accelerator_state
    from millrace.checkpoint.integrations.lightning import MillraceCheckpointIO
    from millrace.checkpoint.integrations.torchtitan import MillraceCheckpointer
    from millrace.checkpoint.integrations.trainer import MillraceTrainer, MillraceTrainerMixin

__all__ = [
    "MillraceCheckpointIO",
    "MillraceCheckpointer",
    "MillraceTrainer",
    "MillraceTrainerMixin",
    "accelerator_state",
]

# The module of each name, and the extra with its library.
_LAZY = {
    "MillraceCheckpointIO": ("lightning", "trainers"),
    "MillraceCheckpointer": ("torchtitan", "torchtitan"),
    "MillraceTrainer": ("trainer", "trainers"),
    "MillraceTrainerMixin": ("trainer", "trainers"),
    "accelerator_state": ("accelerate", "trainers"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, extra = _LAZY[name]
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ImportError as error:
        if (error.name or "").startswith("millrace"):
            raise
        from millrace.errors import MissingDependencyError

        raise MissingDependencyError(
            f"{name} cannot be imported ({error!s:.200})", next_step=f"pip install 'millrace[{extra}]'"
        ) from error
