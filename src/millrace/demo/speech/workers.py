"""What the workers of a run say to each other beside the gradients. One process alone needs no process group."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


class Workers:
    """The conversation of all workers of one attempt, on CPUs. Every worker calls the same methods in the same order."""

    def __init__(self) -> None:
        """A collective call where `torch.distributed` is initialised."""
        joined = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size() if joined else 1
        self.rank = dist.get_rank() if joined else 0
        # The default group may be one of GPUs.
        self._group: Any = dist.new_group(backend="gloo") if self.world > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this worker logs and saves for all."""
        return self.rank == 0

    def numbers(self, number: int) -> list[int]:
        """Every worker's number, by rank: a fraction of a millisecond on one machine, since it is asked at every step."""
        if self._group is None:
            return [number]
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(numbers, torch.tensor([number]), group=self._group)
        return [int(each) for each in numbers]

    def gather(self, value: Value) -> list[Value]:
        """Every worker's value, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def told_by(self, rank: int, value: Value | None) -> Value:
        """The value that the worker `rank` has."""
        said: list[Any] = [value]
        if self._group is not None:
            dist.broadcast_object_list(said, src=rank, group=self._group)
        told: Value = said[0]
        return told
