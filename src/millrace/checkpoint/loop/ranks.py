"""The ranks of a training job as a run's manager sees them: who coordinates, and agreeing on one answer."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from millrace.errors import MillraceError, UsageError

Value = TypeVar("Value")


class Ranks:
    """One conversation among all ranks of a job, over a process group of its own (gloo); or one process alone.

    Every rank makes it, and calls `agree` and `gather` in the same order and from one thread: what two threads have to say
    needs two conversations. Picklable it is not.
    """

    def __init__(self) -> None:
        """A collective call where `torch.distributed` is initialised."""
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        self.group: Any = None if alone else dist.new_group(backend="gloo")
        self.rank = 0 if alone else dist.get_rank()
        self.count = 1 if alone else dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this rank decides for all."""
        return self.rank == 0

    def agree(self, decide: Callable[[], Value]) -> Value:
        """What `decide` gives, or raises, on the first rank, on every rank."""
        if self.count == 1:
            return decide()
        said: list[Any] = [None, None]
        if self.is_first:
            try:
                said[0] = decide()
            except Exception as error:  # noqa: BLE001 - every rank has to hear of it, whatever it is
                said[1] = _sayable(error)
        dist.broadcast_object_list(said, src=0, group=self.group)
        if said[1] is not None:
            raise said[1]
        value: Value = said[0]
        return value

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in the order of the ranks, on every rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def settle(self, act: Callable[[], Value]) -> list[Value]:
        """Let every rank act. Gives all results, or raises on every rank the first error, in the order of the ranks."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = act()
        except Exception as error:  # noqa: BLE001 - as in `agree`
            failure = error
        outcomes = self.gather((result, self._sayable(failure)))
        for _, wrong in outcomes:
            if wrong is not None:
                raise wrong
        return [value for value, _ in outcomes]

    def share(self, failure: Exception | None) -> None:
        """Raise on every rank the failure of the lowest one that has any."""
        for wrong in self.gather(self._sayable(failure)):
            if wrong is not None:
                raise wrong

    def together(self, act: Callable[[], Value]) -> Value:
        """As `settle`, but each rank gets its own result only, which is not sent."""
        results: list[Value] = []
        failure: Exception | None = None
        try:
            results.append(act())
        except Exception as error:  # noqa: BLE001 - as in `agree`
            failure = error
        self.share(failure)
        return results[0]

    def _sayable(self, error: Exception | None) -> Exception | None:
        return error if self.count == 1 or error is None else _sayable(error)

    def close(self) -> None:
        """Give up the process group, where it still exists."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


def _sayable(error: Exception) -> Exception:
    """An error that reaches the other ranks: one that cannot be pickled is told in words, since they wait for it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does
        return UsageError(f"a rank failed ({type(error).__name__}: {error!s:.300})", next_step="see its log")
    return error


def first_failure(failures: Mapping[int, Any]) -> BaseException:
    """What a `CheckpointException` of torch is about: our own error of the lowest rank that has one, else the first."""
    errors = [failure[0] for _, failure in sorted(failures.items()) if isinstance(failure[0], BaseException)]
    for error in errors:
        if isinstance(error, MillraceError):
            return error
    return errors[0] if errors else UsageError("a rank failed and did not say why", next_step="see its log")
