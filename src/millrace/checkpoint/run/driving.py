"""Saves and loads through torch's protocol of planners and storages.

Several ranks use `torch.distributed.checkpoint`. A single process makes the same calls in the same order, without torch's
warnings about a missing process group. Of torch's `CheckpointException`, which is not an `Exception`, the cause is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from millrace.checkpoint.reading.load_planner import CheckpointLoadPlanner
from millrace.checkpoint.reading.reader import CheckpointReader
from millrace.checkpoint.run.ranks import Ranks, first_failure
from millrace.checkpoint.state.wrappers import is_wrapper, take_apart
from millrace.checkpoint.writing.save_planner import CheckpointSavePlanner
from millrace.checkpoint.writing.writer import CheckpointWriter


class _CountingPlanner(CheckpointSavePlanner):
    """Counts the bytes of each tensor when its write begins."""

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__()
        self._count = count

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if not isinstance(data, torch.Tensor):
            self._count(data.getbuffer().nbytes)
        elif is_wrapper(data):
            self._count(sum(leaf.nbytes for leaf in take_apart(data, write_item.index.fqn)[1].values()))
        elif data.layout is torch.strided:  # the caller raises for other layouts, which have no size
            self._count(data.nbytes)
        return data


def save(
    state: dict[str, Any], writer: CheckpointWriter, ranks: Ranks, *, count: Callable[[int], None] | None = None
) -> None:
    """Save a state dict of plain members (no `Stateful`) on all ranks. Raises the error of any rank.

    `count` is called with the bytes of each tensor when its write begins, from several threads.
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
    """Load into a state dict of plain members, in place. Raises the error of any rank; then the state is partly loaded."""
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
