"""Saves and loads by torch's protocol of planners and storages: by `torch.distributed.checkpoint` where there are ranks, and
in the same order of calls, without its talk about missing process groups, where one process is alone.

Errors come as what they are: of torch's `CheckpointException`, which is no `Exception`, the cause is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from millrace.checkpoint.loop.ranks import Ranks, first_failure
from millrace.checkpoint.reading.load_planner import CheckpointLoadPlanner
from millrace.checkpoint.reading.reader import CheckpointReader
from millrace.checkpoint.writing.save_planner import CheckpointSavePlanner
from millrace.checkpoint.writing.writer import CheckpointWriter


class _CountingPlanner(CheckpointSavePlanner):
    """Says how many bytes have been taken up for writing, a tensor at a time."""

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__()
        self._count = count

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if not isinstance(data, torch.Tensor):
            self._count(data.getbuffer().nbytes)
        elif data.layout is torch.strided:  # others are refused by who asked, and say no size
            self._count(data.nbytes)
        return data


def save(
    state: dict[str, Any], writer: CheckpointWriter, ranks: Ranks, *, count: Callable[[int], None] | None = None
) -> None:
    """Save a state dict, whose members are plain (no `Stateful`), on all ranks. Raises what went wrong on any of them.

    `count` gets the bytes of each tensor as its turn comes, from several threads.
    """
    planner = CheckpointSavePlanner() if count is None else _CountingPlanner(count)
    if ranks.count > 1:
        try:
            dcp.save(state, storage_writer=writer, planner=planner, process_group=ranks.group)
        except CheckpointException as error:
            writer.abandon(error)
            raise first_failure(error.failures) from error
        return
    try:
        storage_meta = writer.storage_meta()
        planner.set_up_planner(state, storage_meta, is_coordinator=True)
        writer.set_up_storage_writer(True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan(plans)
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        writer.finish(metadata, [results])
    except BaseException as error:
        writer.abandon(error)
        raise


def load(state: dict[str, Any], reader: CheckpointReader, planner: CheckpointLoadPlanner, ranks: Ranks) -> None:
    """Load into a state dict of plain members, in place. Raises what went wrong on any rank; the state is half read then."""
    if ranks.count > 1:
        try:
            dcp.load(state, storage_reader=reader, planner=planner, process_group=ranks.group)
        except CheckpointException as error:
            raise first_failure(error.failures) from error
        return
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
