"""Twenty thousand small tensors: the cost of each tensor in addition to its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.checkpoints import Opener, digest, folder_bytes, millrace, raw_bytes, stock, tensors_of, warm_up
from benchmarks.harness import Case, Measure, Options, Prepared


def _state(count: int) -> dict[str, dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, 64, generator=generator) * 0.02
    return {"model": {f"layers.{number}.bias": values[number].clone() for number in range(count)}}


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    count = 2000 if options.quick else 20_000
    state = _state(count)
    yield Prepared(
        {"count": count},
        expected=digest(state),
        notes=(f"{count} fp32 tensors of 64 elements, {raw_bytes(state) / 1e6:.1f} MB; files synced.",),
    )


case = Case(
    name="checkpoint_small", title="Twenty thousand small tensors", prepare=prepare, baseline="stock plain, 2 threads"
)


def _save_and_load(
    measure: Measure, context: Mapping[str, Any], openers: tuple[Opener, Opener], *, own_planners: bool = False
) -> str:
    import torch.distributed.checkpoint as dcp

    from millrace.checkpoint import CheckpointLoadPlanner, CheckpointSavePlanner

    place = f"{context['scratch']}/checkpoint"
    warm_up(openers, f"{context['scratch']}/warm-up")
    state = _state(context["count"])
    with measure("save") as figures:
        planner = CheckpointSavePlanner() if own_planners else None
        dcp.save(state, storage_writer=openers[0](place), planner=planner, no_dist=True)
        figures["MB stored"] = folder_bytes(place) / 1e6
    for tensor in tensors_of(state):
        tensor.fill_(7)
    with measure("load"):
        load_planner = CheckpointLoadPlanner() if own_planners else None
        dcp.load(state, storage_reader=openers[1](place), planner=load_planner, no_dist=True)
    return digest(state)


@case.contender("stock plain, 2 threads")
def stock_plain(measure: Measure, context: Mapping[str, Any]) -> str:
    return _save_and_load(measure, context, stock(2))


@case.contender("stock ZStandard, 2 threads")
def stock_zstd(measure: Measure, context: Mapping[str, Any]) -> str:
    return _save_and_load(measure, context, stock(2, "zstd"))


@case.contender("Millrace, 2 threads")
def millrace_typed(measure: Measure, context: Mapping[str, Any]) -> str:
    return _save_and_load(measure, context, millrace(2))


@case.contender("Millrace with its planners")
def millrace_planned(measure: Measure, context: Mapping[str, Any]) -> str:
    return _save_and_load(measure, context, millrace(2), own_planners=True)


@case.contender("stock plain, our planners")
def stock_planned(measure: Measure, context: Mapping[str, Any]) -> str:
    """What the planners alone bring: they work with every writer and reader."""
    return _save_and_load(measure, context, stock(2), own_planners=True)


@case.contender("no storage at all")
def no_storage(measure: Measure, context: Mapping[str, Any]) -> str:
    """What torch's planner costs by itself, which every writer and reader pays: tensors are kept in a dict."""
    import torch
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

    kept: dict[Any, Any] = {}

    def done(value: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(value)
        return future

    class Both(StorageWriter, StorageReader):  # type: ignore[misc]
        def reset(self, checkpoint_id: Any = None) -> None:
            pass

        def storage_meta(self) -> Any:
            return StorageMeta()

        def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            pass

        def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            pass

        def prepare_local_plan(self, plan: Any) -> Any:
            return plan

        def prepare_global_plan(self, plans: Any) -> Any:
            return plans

        def write_data(self, plan: Any, planner: Any) -> Any:
            for item in plan.items:
                kept[item.index] = planner.resolve_data(item).clone()
            return done([WriteResult(index=item.index, size_in_bytes=1, storage_data=None) for item in plan.items])

        def finish(self, metadata: Any, results: Any) -> None:
            kept["metadata"] = metadata

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return kept["metadata"]

        def read_data(self, plan: Any, planner: Any) -> Any:
            for item in plan.items:
                target = planner.resolve_tensor(item)
                target.copy_(kept[item.storage_index])
                planner.commit_tensor(item, target)
            return done(None)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

    def opener(place: str) -> Any:
        return Both()

    return _save_and_load(measure, context, (opener, opener))
