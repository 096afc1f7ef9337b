"""Saves and loads through torch's protocol of planners and storages.

A save is planned by all ranks together. Each rank then writes its items without collective calls. A load uses
`torch.distributed.checkpoint` where there are several ranks. Of torch's `CheckpointException`, which is not an `Exception`,
the cause is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from millrace.checkpoint.reading.load_planner import CheckpointLoadPlanner
from millrace.checkpoint.reading.reader import CheckpointReader
from millrace.checkpoint.run.ranks import Ranks, first_failure, lost_ranks_translated
from millrace.checkpoint.run.save_values import Staged
from millrace.checkpoint.state.staging import StagedState
from millrace.checkpoint.state.wrappers import is_wrapper, take_apart
from millrace.checkpoint.writing.bases import ItemKey
from millrace.checkpoint.writing.packing import ItemSource, WrapperParts
from millrace.checkpoint.writing.plans import check_cover, describe, join, key_of, sources_of
from millrace.checkpoint.writing.rank_writer import RankWriter
from millrace.checkpoint.writing.save_planner import CheckpointSavePlanner
from millrace.checkpoint.writing.state_plan import RankPlan


class _CountingPlanner(CheckpointSavePlanner):
    """Counts the bytes of each tensor when its write begins."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Callable[[int], None] | None = None

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if self.count is None:
            return data
        if not isinstance(data, torch.Tensor):
            self.count(data.getbuffer().nbytes)
        elif is_wrapper(data):
            self.count(sum(leaf.nbytes for leaf in take_apart(data, write_item.index.fqn)[1].values()))
        elif data.layout is torch.strided:  # the caller raises for other layouts, which have no size
            self.count(data.nbytes)
        return data


def plan_save(state: dict[str, Any], ranks: Ranks | None = None) -> RankPlan:
    """Plan the save of a state dict of plain members (no `Stateful`). A collective call of `ranks`. Raises on all ranks."""
    planner = _CountingPlanner()
    if ranks is None or ranks.count == 1:
        planner.set_up_planner(state, None, is_coordinator=True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        # Planners do not check a single plan: it may be that of one rank in a save without collectives.
        check_cover(metadata, complete=True)
        return RankPlan(planner, planner.finish_plan(plans[0]), metadata)

    def own() -> Any:
        planner.set_up_planner(state, None, is_coordinator=ranks.is_first)
        return planner.create_local_plan()

    plan = planner.finish_plan(ranks.exchange(own, lambda plans: planner.create_global_plan(plans)[0]))
    _, metadata = join([plan])
    metadata.planner_data = plan.planner_data
    return RankPlan(planner, plan, metadata)


def save(plan: RankPlan, writer: RankWriter, *, count: Callable[[int], None] | None = None) -> None:
    """Save this rank's items of a planned state.

    `count` is called with the bytes of each tensor when its write begins, from several threads.
    """
    plan.planner.count = count
    kept: dict[ItemKey, ItemSource] = {}
    wrapped: dict[int, WrapperParts] = {}
    keys = [key_of(item) for item in plan.plan.items]
    try:
        writer.begin()
        sources = sources_of(plan.plan, plan.planner, writer.trusted_types, kept, wrapped)
        places = writer.write_sources(len(keys), sources, kept, wrapped)
        described = describe(plan.metadata, {keys[number][0] for number in wrapped})
        writer.finish_save(described, list(zip(keys, places, strict=True)))
    except BaseException as error:
        writer.abandon(error)
        raise


def save_staged(staged: Staged, writer: RankWriter, count: Callable[[int], None]) -> None:
    """Save a state that was staged in this process. `count` is called with the bytes of each tensor."""
    if not isinstance(staged, StagedState):
        raise AssertionError("the state was staged in another process")
    save(staged.plan or plan_save(staged.state), writer, count=count)


def load(state: dict[str, Any], reader: CheckpointReader, planner: CheckpointLoadPlanner, ranks: Ranks) -> None:
    """Load into a state dict of plain members, in place. Raises the error of any rank; then the state is partly loaded.

    Raises `RetryableError` when another rank has ended.
    """
    if ranks.count > 1:
        try:
            with lost_ranks_translated():
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
