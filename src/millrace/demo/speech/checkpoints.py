"""One checkpoint an epoch below a run's folder, saved beside the training; and the way back to the newest one."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from millrace.checkpoint import CheckpointManager, PendingSave
from millrace.demo.place import Place
from millrace.demo.speech.log import CheckpointRecord
from millrace.demo.speech.patience import patiently
from millrace.demo.speech.precision import MixedPrecision
from millrace.errors import RetryableError


class EpochCheckpoints:
    """The checkpoints of a training. Every worker makes one and calls the same methods in the same order.

    `target_options` are those of the storage; `keep` is how many checkpoints stay (None: all).
    """

    def __init__(
        self,
        run: Place,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: MixedPrecision,
        *,
        keep: int | None = None,
        target_options: dict[str, Any] | None = None,
    ) -> None:
        self._manager = CheckpointManager(run.at("checkpoints").url, keep=keep, target_options=target_options)
        self._model, self._optimizer, self._precision = model, optimizer, precision
        self._pending: PendingSave | None = None

    def restore(self) -> CheckpointRecord | None:
        """Load the newest complete checkpoint; gives what is known of it (not how long it took), None if there is none."""
        state = self._state()
        epoch = patiently(lambda: self._manager.restore(state, fallback=True))
        if epoch is None:
            return None
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        info = patiently(lambda: self._manager.metadata(epoch))
        return CheckpointRecord(
            epoch=epoch,
            kind=info.kind or "full",
            checkpoint_bytes=info.stored_bytes,
            raw_bytes=info.raw_bytes,
            seconds=0.0,
        )

    def save(self, epoch: int, metrics: dict[str, float]) -> None:
        """Copy the state and let the save run. Waits for the one before."""
        self._pending = self._manager.save_async(epoch, self._state(), metrics)

    def settled(self) -> CheckpointRecord | RetryableError | None:
        """Wait for the save in flight: its record, or what it failed of when that may be gone by the next one.

        None when none is in flight. Raises any other error of the save.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        error = pending.exception()
        if isinstance(error, RetryableError):
            return error
        result = pending.result()
        if result is None:
            raise AssertionError("a save that waits is not skipped")
        return CheckpointRecord(
            epoch=result.step,
            kind=result.kind,
            checkpoint_bytes=result.stored_bytes,
            raw_bytes=result.raw_bytes,
            seconds=result.seconds,
        )

    def wait(self) -> None:
        """Wait until nothing is in flight, however that ends. May be called on one worker alone."""
        if self._pending is not None:
            self._pending.exception()

    def close(self) -> None:
        """Wait for what is in flight, and give the run free."""
        self._manager.close()

    def _state(self) -> dict[str, Any]:
        # Names, not positions: the state can be loaded by any number of workers, wrapped or not.
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "precision": self._precision}
