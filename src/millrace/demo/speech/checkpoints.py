"""One checkpoint an epoch below a run's folder, and the newest one that is complete."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from millrace.demo.place import Place

_NAME = re.compile(r"epoch-(\d+)")


def checkpoint_name(epoch: int) -> str:
    """The folder of an epoch's checkpoint; names sort as epochs do."""
    return f"epoch-{epoch:03d}"


def newest_complete(names: Iterable[str], is_complete: Callable[[int], bool]) -> int:
    """The latest epoch among the folder `names` whose checkpoint is complete; 0 if there is none."""
    epochs = {int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
    return next((epoch for epoch in sorted(epochs, reverse=True) if is_complete(epoch)), 0)


class EpochCheckpoints:
    """The checkpoints of a run, through stock `torch.distributed.checkpoint` with Millrace's writer and reader.

    Every rank makes one and calls the same methods in the same order. `target_options` are those of the storage.
    """

    def __init__(self, run: Place, *, target_options: dict[str, Any] | None = None) -> None:
        self._folder = run.at("checkpoints")
        self._options = target_options

    def save(self, epoch: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Save; gives the bytes that the state has, and the bytes that the checkpoint takes in storage."""
        from millrace.checkpoint import CheckpointWriter

        place = self._folder.at(checkpoint_name(epoch))
        state = self._state(model, optimizer, epoch)
        dcp.save(state, storage_writer=CheckpointWriter(place.url, target_options=self._options))
        return _tensor_bytes(state), sum(place.sizes().values())

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest complete checkpoint into both; gives its epoch, or 0 if there was none to load."""
        from millrace.checkpoint import CheckpointReader

        def reader(epoch: int) -> Any:
            return CheckpointReader(self._folder.at(checkpoint_name(epoch)).url, target_options=self._options)

        def is_complete(epoch: int) -> bool:
            try:
                reader(epoch).read_metadata()
            except FileNotFoundError:
                # Its writer was killed before the manifest, which comes last: what is there does not count.
                return False
            return True

        # One rank decides: two that look while storage changes might not agree, and would wait for each other.
        found = [0]
        if dist.get_rank() == 0:
            found[0] = newest_complete(self._folder.folders(), is_complete)
        dist.broadcast_object_list(found, src=0)
        if found[0]:
            state = self._state(model, optimizer, found[0])
            dcp.load(state, storage_reader=reader(found[0]))
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return found[0]

    @staticmethod
    def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> dict[str, Any]:
        # Names, not positions: the state can be loaded by any number of workers, wrapped or not.
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "epoch": torch.tensor(epoch)}


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return int(state.numel() * state.element_size())
    if isinstance(state, dict):
        return sum(_tensor_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(_tensor_bytes(value) for value in state)
    return 0
