"""Collective calls among the ranks of a training job: run a function on the first rank or on all, and share errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from millrace.checkpoint.run.save_values import picklable
from millrace.errors import MillraceError, RetryableError, UsageError

Value = TypeVar("Value")
Other = TypeVar("Other")


class Ranks:
    """Collective calls among all ranks of a job, over a gloo process group of its own; or one process alone.

    Every rank creates one, and calls its methods in the same order and from one thread. Two threads need two objects.
    Not picklable. Collective calls raise `RetryableError` when another rank has ended or does not respond.
    """

    def __init__(self) -> None:
        """A collective call where `torch.distributed` is initialised."""
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        self.group: Any = None if alone else dist.new_group(backend="gloo")
        self.rank = 0 if alone else dist.get_rank()
        self.count = 1 if alone else dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides for all."""
        return self.rank == 0

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in the order of the ranks, on every rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with lost_ranks_translated():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def run_on_first(self, function: Callable[[], Value]) -> Value:
        """Call `function` on the first rank. Every rank returns its result or raises its error."""
        if self.count == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = function()
            except Exception as error:  # noqa: BLE001 - every rank raises it, whatever it is
                outcome[1] = picklable(error)
        with lost_ranks_translated():
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise outcome[1]
        value: Value = outcome[0]
        return value

    def run_on_all(self, function: Callable[[], Value]) -> Value:
        """Call `function` on every rank. Each returns its own result, or all raise the error of the lowest failed rank."""
        results: list[Value] = []
        failure: Exception | None = None
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001 - as in `run_on_first`
            failure = error
        self.raise_if_any_failed(failure)
        return results[0]

    def exchange(self, function: Callable[[], Value], responses: Callable[[list[Value]], Sequence[Other]]) -> Other:
        """Call `function` on every rank, then `responses` on the first with all results. Each rank returns its own result.

        Raises on every rank the error of the lowest failed rank.
        """
        value = self.run_on_all(function)
        if self.count == 1:
            return responses([value])[0]
        gathered: list[Any] | None = [None] * self.count if self.is_first else None
        with lost_ranks_translated():
            dist.gather_object(value, gathered, dst=0, group=self.group)
        replies: list[Any] | None = None
        if gathered is not None:
            try:
                replies = [(each, None) for each in responses(gathered)]
            except Exception as error:  # noqa: BLE001 - as in `run_on_first`
                replies = [(None, picklable(error))] * self.count
        received: list[Any] = [None]
        with lost_ranks_translated():
            dist.scatter_object_list(received, replies, src=0, group=self.group)
        response, failure = received[0]
        if failure is not None:
            raise failure
        found: Other = response
        return found

    def raise_if_any_failed(self, failure: Exception | None) -> None:
        """Raise on every rank the failure of the lowest rank that has one."""
        sent = failure if self.count == 1 or failure is None else picklable(failure)
        for error in self.gather(sent):
            if error is not None:
                raise error

    def close(self) -> None:
        """Destroy the process group, where it still exists."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


@contextlib.contextmanager
def lost_ranks_translated() -> Iterator[None]:
    """Convert gloo's errors to `RetryableError`."""
    try:
        yield
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise RetryableError(
            f"another rank has ended or does not respond ({reason:.200})",
            next_step="start the job again, which continues from its newest checkpoint",
        ) from error


def first_failure(failures: Mapping[int, Any]) -> BaseException:
    """The cause of torch's `CheckpointException`: the first `MillraceError` by rank, else the first error."""
    errors = [failure[0] for _, failure in sorted(failures.items()) if isinstance(failure[0], BaseException)]
    for error in errors:
        if isinstance(error, MillraceError):
            return error
    return errors[0] if errors else UsageError("a rank failed without an error", next_step="see its log")
