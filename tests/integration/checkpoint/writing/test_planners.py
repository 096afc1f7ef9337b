"""Checkpoints through our planners and torch's, in ours and the stock storage, all combined; one process and two ranks."""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support import ranks
from tests.support.failures import failure_of, failures_of
from tests.support.states import assert_same_state, in_order
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from millrace.checkpoint import CheckpointLoadPlanner, CheckpointReader, CheckpointSavePlanner, CheckpointWriter
from millrace.errors import MissingKeyError, StateMismatchError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process:UserWarning")

SAVE_PLANNERS = {"ours": CheckpointSavePlanner, "torch's": DefaultSavePlanner}
LOAD_PLANNERS = {"ours": CheckpointLoadPlanner, "torch's": DefaultLoadPlanner}
STORAGE = {
    "ours": (CheckpointWriter, CheckpointReader),
    "stock": (dcp.FileSystemWriter, dcp.FileSystemReader),
}


def state(seed: int = 0) -> dict:
    """Small tensors of every kind that storage treats in its own way, and everything else that a state dict has."""
    generator = torch.Generator().manual_seed(seed)
    floats = torch.randn(3, 500, generator=generator)
    return {
        "small": {f"layers.{number}.bias": floats[number % 3, number : number + number % 17] for number in range(300)},
        "views": {
            "transposed": floats.t(),
            "strided": floats[:, ::2],
            "negative": torch.view_as_complex(floats.reshape(-1, 2).contiguous()).conj().imag,
            "conjugate": torch.view_as_complex(floats.reshape(-1, 2).contiguous()).conj(),
        },
        "parameter": torch.nn.Parameter(floats[0].clone()),
        "dtypes": {
            **{
                str(dtype): floats.to(dtype)
                for dtype in (torch.bfloat16, torch.half, torch.double, torch.float8_e4m3fn)
            },
            "bool": floats > 0,
            "int": torch.arange(10) + seed,
        },
        "large": torch.randn(700, 900, generator=generator),
        "scalar": torch.tensor(2.5 + seed),
        "empty": torch.empty(0, 3),
        "list": [torch.full((2,), seed), seed, {"deep": None}],
        "settings": {"rate": 0.1, "name": "run", "seed": seed, "betas": [0.9, 0.99]},
    }


def target(values):
    """The same containers, with other values in memory of the tensors' own."""
    if isinstance(values, torch.Tensor):
        return (
            torch.nn.Parameter(torch.zeros(values.shape))
            if values.requires_grad
            else torch.empty_like(values.resolve_conj().resolve_neg(), memory_format=torch.contiguous_format)
        )
    if isinstance(values, dict):
        return {key: target(value) for key, value in values.items()}
    if isinstance(values, list):
        return [target(value) for value in values]
    return None


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("saved_by", SAVE_PLANNERS)
def test_planners_load_saves_of_each_other(tmp_path, storage, saved_by):
    writer, reader = STORAGE[storage]
    values = state()
    dcp.save(values, storage_writer=writer(tmp_path), planner=SAVE_PLANNERS[saved_by]())
    for planner in LOAD_PLANNERS.values():
        loaded = target(values)
        places = {key: tensor.data_ptr() for key, tensor in loaded["small"].items()}
        dcp.load(loaded, storage_reader=reader(tmp_path), planner=planner())
        assert_same_state(loaded, values)
        assert places == {key: tensor.data_ptr() for key, tensor in loaded["small"].items()}


@pytest.mark.parametrize("storage", STORAGE)
def test_unflattened_state_dict_is_saved_and_loaded(tmp_path, storage):
    writer, reader = STORAGE[storage]
    values = {"x": torch.ones(5), "settings": {"rate": 0.1, "deep": [1, 2]}}
    # With `flatten_sharded_tensors` torch's planner works on a copy here, and objects do not get back.
    options = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    dcp.save(values, storage_writer=writer(tmp_path), planner=CheckpointSavePlanner(**options))
    loaded = {"x": torch.zeros(5), "settings": None}
    dcp.load(loaded, storage_reader=reader(tmp_path), planner=CheckpointLoadPlanner(**options))
    assert_same_state(loaded, values)


def test_state_dict_is_rebuilt_from_the_plan(tmp_path):
    values = state()
    del values["views"]
    dcp.save(values, storage_writer=CheckpointWriter(tmp_path / "ours"), planner=CheckpointSavePlanner())
    dcp.save(values, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), planner=CheckpointSavePlanner())
    dcp_to_torch_save(tmp_path / "stock", tmp_path / "whole.pt")
    rebuilt = torch.load(tmp_path / "whole.pt", weights_only=False)
    values["parameter"] = values["parameter"].detach()
    assert_same_state(in_order(rebuilt), in_order(values))
    planner_data = CheckpointReader(tmp_path / "ours").read_metadata().planner_data
    assert planner_data == dcp.FileSystemReader(tmp_path / "stock").read_metadata().planner_data
    assert planner_data["list.2.deep"] == ("list", 2, "deep")


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`:UserWarning", "ignore:Multiple backends:UserWarning")
def test_tensors_without_values_get_memory(tmp_path):
    values = {"model": {"w": torch.randn(5, 3), "b": torch.randn(3)}}
    dcp.save(values, storage_writer=CheckpointWriter(tmp_path), planner=CheckpointSavePlanner())
    # Not by variables of the environment, which later tests in this process would have, too.
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1)
    try:
        loaded = {"model": {"w": torch.empty(5, 3, device="meta"), "b": torch.zeros(3)}}
        dcp.load(loaded, storage_reader=CheckpointReader(tmp_path), planner=CheckpointLoadPlanner())
    finally:
        dist.destroy_process_group()
    assert_same_state(loaded, values)


def test_zeros_that_have_no_memory_are_saved(tmp_path):
    """Torch's autograd makes such tensors; its own writer fails with them."""
    values = {"x": torch._efficientzerotensor(5, 3), "large": torch._efficientzerotensor(500, 300)}
    dcp.save(values, storage_writer=CheckpointWriter(tmp_path), planner=CheckpointSavePlanner())
    loaded = {"x": torch.ones(5, 3), "large": torch.ones(500, 300)}
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path), planner=CheckpointLoadPlanner())
    assert not any(tensor.any() for tensor in loaded.values())


@pytest.mark.parametrize("storage", STORAGE)
def test_mismatched_template_raises_one_error_before_any_read(tmp_path, storage):
    writer, reader = STORAGE[storage]
    dcp.save({"x": torch.ones(5), "y": torch.ones(5)}, storage_writer=writer(tmp_path))

    def load(values: dict, **options: bool) -> None:
        dcp.load(values, storage_reader=reader(tmp_path), planner=CheckpointLoadPlanner(**options))

    values = {"x": torch.zeros(5), "a": torch.zeros(5), "b": 3}
    error = failure_of(lambda: load(values))
    assert type(error) is MissingKeyError
    assert error.keys == ("a", "b")
    error = failure_of(lambda: load({"x": torch.zeros(6), "y": torch.zeros(1)}))
    assert type(error) is StateMismatchError
    assert error.keys == ("x", "y")
    assert values["x"].sum() == 0
    load(values, allow_partial_load=True)
    assert values["x"].sum() == 5
    assert values["b"] == 3


def test_planner_subclass_that_renames_or_converts_is_used(tmp_path):
    """The hooks that torch documents for its default planners work in ours."""

    class Half(CheckpointSavePlanner):
        def create_local_plan(self):
            self.state_dict = {key: value.half() for key, value in self.state_dict.items()}
            return super().create_local_plan()

    class Renames(CheckpointLoadPlanner):
        committed = 0

        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            super().set_up_planner({f"old.{key}": value for key, value in state_dict.items()}, metadata, is_coordinator)

        def commit_tensor(self, read_item, tensor):
            Renames.committed += 1
            tensor += 1

    dcp.save({"old": {"x": torch.ones(300)}}, storage_writer=CheckpointWriter(tmp_path), planner=Half())
    loaded = {"x": torch.nn.Parameter(torch.zeros(300))}
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path), planner=Renames())
    assert (loaded["x"] == 2).all()
    assert Renames.committed == 1


@pytest.mark.usefixtures("no_cached_plans")
def test_consecutive_saves_with_cached_plans_are_loaded_equal(tmp_path):
    for step, seed in enumerate((0, 1, 2, 3)):
        values = state(seed)
        if step >= 2:
            values["dtypes"]["int"] = values["dtypes"]["int"].int()
        if step >= 3:
            values["new"] = torch.ones(3)
        planner = CheckpointSavePlanner(enable_plan_caching=True)
        dcp.save(values, storage_writer=CheckpointWriter(tmp_path / str(step)), planner=planner)
        loaded = target(values)
        dcp.load(loaded, storage_reader=CheckpointReader(tmp_path / str(step)), planner=CheckpointLoadPlanner())
        assert_same_state(loaded, values)


# --- processes (this file is its own program) -----------------------------------------------------


def sharded() -> dict:
    """DTensors over two ranks by rows, columns, unevenly and replicated, torch's older shards, and values of all ranks."""
    from torch.distributed._shard.sharded_tensor import Shard as OldShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(6, 4, generator=generator)
    shard = OldShard.from_tensor_and_offsets(old[3 * rank : 3 * rank + 3].clone(), [3 * rank, 0], rank)
    cuts = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    return {
        "model": {
            name: distribute_tensor(torch.randn(7, 5, generator=generator), mesh, [cut]) for name, cut in cuts.items()
        },
        "one row": distribute_tensor(torch.randn(1, 3, generator=generator), mesh, [Shard(0)]),
        "old": init_from_local_shards([shard], 6, 4),
        "plain": {f"layers.{number}": torch.randn(number, generator=generator) for number in range(40)},
        "settings": {"rate": 0.1, "steps": [1, 2]},
        "list": [torch.ones(2), 3],
    }


def local_values(values):
    if isinstance(values, dict):
        return {key: local_values(value) for key, value in values.items()}
    if isinstance(values, list):
        return [local_values(value) for value in values]
    if hasattr(values, "to_local"):
        return values.to_local().clone()
    if hasattr(values, "local_shards"):
        return [shard.tensor.clone() for shard in values.local_shards()]
    return copy.deepcopy(values)


def cleared(values):
    if isinstance(values, dict):
        return {key: cleared(value) for key, value in values.items()}
    if isinstance(values, list):
        return [cleared(value) for value in values]
    if hasattr(values, "local_shards"):
        for shard in values.local_shards():
            shard.tensor.zero_()
    elif isinstance(values, torch.Tensor):
        values.zero_()
    else:
        return None
    return values


class Overlapping(CheckpointSavePlanner):
    """Every rank claims the first row."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.index.fqn == "x" and dist.get_rank() == 1:
                object.__setattr__(item.tensor_data.chunk, "offsets", torch.Size((1, 0)))
                object.__setattr__(item.index, "offset", torch.Size((1, 0)))
        return plan


def run_two(root: pathlib.Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    values = sharded()
    wanted = local_values(values)
    for options in (
        {},
        {"dedup_save_to_lowest_rank": True},
        {"enable_plan_caching": True},
        {"enable_plan_caching": True},
    ):
        seen = []
        for name, planner_class in SAVE_PLANNERS.items():
            planner = planner_class(**options)
            metadata = dcp.save(values, storage_writer=CheckpointWriter(root / name), planner=planner)
            seen.append((metadata, planner.plan, [item.index.index for item in planner.plan.items]))
        (ours, plan, hints), (torchs, expected, expected_hints) = seen
        assert ours.state_dict_metadata == torchs.state_dict_metadata
        assert list(ours.state_dict_metadata) == list(torchs.state_dict_metadata)
        assert list(ours.planner_data.items()) == list(torchs.planner_data.items())
        assert plan == expected
        assert hints == expected_hints
        assert len(plan.items) >= 3

    for saved_by in SAVE_PLANNERS:
        for planner_class in LOAD_PLANNERS.values():
            loaded = cleared(sharded())
            dcp.load(loaded, storage_reader=CheckpointReader(root / saved_by), planner=planner_class())
            assert_same_state(local_values(loaded), wanted)
    dcp.save(values, storage_writer=dcp.FileSystemWriter(root / "stock"), planner=CheckpointSavePlanner())
    loaded = cleared(sharded())
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(root / "stock"), planner=CheckpointLoadPlanner())
    assert_same_state(local_values(loaded), wanted)

    save_aside(values, root / "thread", AsyncCheckpointerType.THREAD)
    loaded = cleared(sharded())
    dcp.load(loaded, storage_reader=CheckpointReader(root / "thread"), planner=CheckpointLoadPlanner())
    assert_same_state(local_values(loaded), wanted)

    # Every rank raises an error of one rank, or of all of them together.
    failures = failures_of(
        lambda: dcp.load(
            {"plain": {"layers.3": torch.zeros(3)}, f"only on {dist.get_rank()}": 1},
            storage_reader=CheckpointReader(root / "ours"),
            planner=CheckpointLoadPlanner(),
        )
    )
    assert [(rank, type(error)) for rank, error in failures.items()] == [(0, MissingKeyError), (1, MissingKeyError)]
    assert [error.keys for error in failures.values()] == [("only on 0",), ("only on 1",)]
    row = {"x": distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])}
    error = failure_of(lambda: dcp.save(row, storage_writer=CheckpointWriter(root / "bad"), planner=Overlapping()))
    assert isinstance(error, UsageError)
    assert "overlap" in str(error)
    assert not list((root / "bad").glob("manifest*"))


def save_aside(values: dict, place: pathlib.Path, kind: AsyncCheckpointerType) -> None:
    dcp.async_save(
        values,
        storage_writer=CheckpointWriter(place),
        planner=CheckpointSavePlanner(),
        async_checkpointer_type=kind,
    ).result()


def run_one(root: pathlib.Path) -> None:
    values = state()
    save_aside(values, root / "process", AsyncCheckpointerType.PROCESS)
    loaded = target(values)
    dcp.load(loaded, storage_reader=CheckpointReader(root / "process"), planner=CheckpointLoadPlanner())
    assert_same_state(loaded, values)


PROGRAMS = {"two": run_two, "one": run_one}


@pytest.mark.slow
@pytest.mark.parametrize(("program", "world"), [("two", 2), ("one", 1)])
def test_planners_in_process_groups_save_and_load_equal_values(tmp_path, program, world):
    ranks.run(__file__, program, world, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir())


if __name__ == "__main__":
    ranks.main(PROGRAMS)
