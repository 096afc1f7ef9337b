"""State dicts that no checkpoint can hold, or be loaded into: one clear error, and the process continues."""

from __future__ import annotations

import gc
import os
import pathlib
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support import wrappers
from tests.support.failures import failure_of
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from millrace.checkpoint import (
    CheckpointLoadPlanner,
    CheckpointManager,
    CheckpointReader,
    CheckpointSavePlanner,
    CheckpointWriter,
    load_weights,
)
from millrace.checkpoint.state.wrappers import take_apart
from millrace.errors import ConfigurationError, StateMismatchError, UnsupportedObjectError, UsageError
from millrace.runtime.pipeline import collection_paused

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is .*single process:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning"),
]


def freed() -> torch.Tensor:
    tensor = torch.randn(100)
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_behind_an_offset() -> torch.Tensor:
    tensor = torch.randn(10_000)[5000:]
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_columns() -> torch.Tensor:
    tensor = torch.randn(100, 70).t()
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk() -> torch.Tensor:
    tensor = torch.randn(100_000)
    tensor.untyped_storage().resize_(40_000)
    return tensor


WITHOUT_MEMORY = [freed, freed_behind_an_offset, freed_columns, shrunk]


def save(path, state, planner=None):
    dcp.save(state, storage_writer=CheckpointWriter(path), planner=planner)


def load(path, state, planner=None):
    dcp.load(state, storage_reader=CheckpointReader(path), planner=planner)


@pytest.mark.parametrize("planner", [None, CheckpointSavePlanner], ids=["torch", "ours"])
@pytest.mark.parametrize("make", WITHOUT_MEMORY)
def test_save_of_tensor_without_memory_raises(tmp_path, make, planner):
    error = failure_of(save, tmp_path / "c", {"there": torch.ones(3), "gone": make()}, planner and planner())
    assert isinstance(error, UnsupportedObjectError)
    assert "'gone'" in str(error)
    assert not any((tmp_path / "c").iterdir())


@pytest.mark.parametrize("planner", [None, CheckpointLoadPlanner], ids=["torch", "ours"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", WITHOUT_MEMORY)
def test_load_into_tensor_without_memory_raises(tmp_path, make, dtype, planner):
    target = make()
    save(tmp_path / "c", {"gone": torch.ones(target.shape, dtype=dtype)})
    error = failure_of(load, tmp_path / "c", {"gone": target}, planner and planner())
    assert isinstance(error, StateMismatchError)
    assert "'gone'" in str(error)


def test_tensor_with_shrunk_storage_is_saved_and_loaded(tmp_path):
    base = torch.arange(100.0)
    base.untyped_storage().resize_(40)
    state = {"kept": base[:10], "empty": base[50:50]}
    save(tmp_path / "c", state, CheckpointSavePlanner())
    loaded = {"kept": torch.zeros(10), "empty": torch.zeros(0)}
    load(tmp_path / "c", loaded, CheckpointLoadPlanner())
    assert loaded["kept"].equal(torch.arange(10.0))


def into_itself() -> dict:
    state = {"tensor": torch.ones(2)}
    state["state"] = state
    return state


def a_long_way_down() -> dict:
    state: dict = {"tensor": torch.ones(2)}
    for _ in range(5000):
        state = {"more": state}
    return state


@pytest.mark.parametrize("planner", [None, CheckpointSavePlanner()], ids=["torch", "millrace"])
def test_result_of_an_asynchronous_collective_is_awaited_and_saved_as_a_plain_tensor(tmp_path, planner):
    results = [AsyncCollectiveTensor(torch.arange(5.0)) for _ in range(2)]
    save(tmp_path / "c", {"x": results[0]}, planner)
    with CheckpointManager(tmp_path / "run") as run:
        run.save(1, {"x": results[1]})
    assert all(each.completed for each in results)
    for path in (tmp_path / "c", tmp_path / "run" / "step-000000000001"):
        assert torch.equal(load_weights(path)["x"], torch.arange(5.0))


def test_wrapper_around_the_result_of_an_asynchronous_collective_is_taken_apart():
    wrapper = wrappers.Scaled(torch.arange(4.0), torch.tensor(2.0), wrappers.Settings(8), torch.float32)
    wrapper.values_ = AsyncCollectiveTensor(wrapper.values_)
    _, tensors = take_apart(wrapper, "x")
    assert type(tensors["x.values_"]) is torch.Tensor
    assert tensors["x.values_"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_recursive_state_dict_fails_the_save(tmp_path):
    for state in (into_itself(), a_long_way_down()):
        error = failure_of(save, tmp_path / "c", state, CheckpointSavePlanner())
        assert type(error) is UsageError
        assert "nested" in str(error)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
        (lambda: torch.ones(3).to_mkldnn(), "opaque"),
        (lambda: torch.nn.LazyLinear(3).weight, "lazy"),
    ],
    ids=["nested", "jagged", "mkldnn", "lazy"],
)
def test_tensors_without_a_shape_or_memory_fail_the_save(tmp_path, make, message):
    error = failure_of(save, tmp_path / "c", {"odd": make()}, CheckpointSavePlanner())
    assert isinstance(error, UnsupportedObjectError)
    assert "'odd'" in str(error)
    assert message in str(error)


def test_unpicklable_object_is_named(tmp_path):
    error = failure_of(save, tmp_path / "c", {"fine": 1, "function": lambda: 0})
    assert isinstance(error, UnsupportedObjectError)
    assert "'function'" in str(error)
    assert "pickle" in str(error)


def test_integer_too_long_for_the_safe_loader_is_named(tmp_path):
    longest = 2**2039 - 1
    save(tmp_path / "c", {"list": [longest, -longest - 1]})
    error = failure_of(save, tmp_path / "d", {"list": [longest + 1]})
    assert isinstance(error, UnsupportedObjectError)
    assert "'list' contains an integer of more than 2039 bits" in str(error)
    assert "store it as text" in str(error)


class Foreign:
    pass


def test_class_refused_by_the_safe_loader_is_named(tmp_path):
    error = failure_of(save, tmp_path / "c", {"list": [1, {"deep": Foreign()}]})
    assert isinstance(error, UnsupportedObjectError)
    assert f"{__name__}.Foreign" in str(error)


@pytest.mark.parametrize("value", [np.float64(0.3), np.int64(3), np.arange(3), [np.float32(1)]])
def test_value_of_numpy_is_refused_with_a_way_to_store_it(tmp_path, value):
    error = failure_of(save, tmp_path / "c", {"best": value})
    assert isinstance(error, UnsupportedObjectError)
    assert "'best' is an object that torch's safe loader refuses" in str(error)
    assert error.next_step.startswith("store numbers as value.item() and arrays as torch.from_numpy(array)")
    assert "trusted_types" not in str(error)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.zeros(1).expand(3, 3),
        lambda: torch.zeros(7).as_strided((3, 3), (2, 1)),
        lambda: torch._efficientzerotensor((3, 3)),
    ],
    ids=["sparse", "csr", "expanded", "overlapping", "zeros without memory"],
)
def test_load_into_uncopyable_tensor_raises(tmp_path, make):
    save(tmp_path / "c", {"odd": torch.ones(3, 3)})
    error = failure_of(load, tmp_path / "c", {"odd": make()})
    assert isinstance(error, StateMismatchError)
    assert "'odd'" in str(error)


def test_tensors_on_the_meta_device_need_a_process_group(tmp_path):
    save(tmp_path / "c", {"tensor": torch.ones(3)})
    error = failure_of(load, tmp_path / "c", {"tensor": torch.ones(3, device="meta")}, CheckpointLoadPlanner())
    assert type(error) is UsageError
    assert "to_empty" in str(error)


def test_process_forked_during_planning_collects_garbage():
    inside, leave = threading.Event(), threading.Event()

    def plan() -> None:
        with collection_paused():
            inside.set()
            leave.wait(300)

    thread = threading.Thread(target=plan)
    thread.start()
    assert inside.wait(300)
    child = os.fork()
    if child == 0:
        collecting = gc.isenabled()
        with collection_paused():
            paused = not gc.isenabled()
        os._exit(0 if collecting and paused and gc.isenabled() else 1)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()


@pytest.mark.parametrize(
    "place", [pathlib.PurePosixPath("s3://bucket/run/step-1"), "s3:/bucket/run", "a\0b"], ids=["path", "slash", "nul"]
)
def test_invalid_place_is_refused_and_creates_nothing(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    for call in (save, load):
        error = failure_of(call, place, {"tensor": torch.ones(3)})
        assert isinstance(error, ConfigurationError)
    assert not any(tmp_path.iterdir())


def test_object_under_integer_key_is_loaded_to_that_key(tmp_path):
    """Torch's planner keeps the existing object, and stores the loaded one under the number as text."""
    saved = {"state": {0: {"step": 7}, "1": {"step": 8}, 2: "two"}, "list": [{3: None}, torch.ones(1)]}
    loaded = {"state": {0: {"step": 0}, "1": {"step": 0}, 2: ""}, "list": [{3: 1}, torch.zeros(1)]}
    save(tmp_path / "c", saved)
    load(tmp_path / "c", loaded, CheckpointLoadPlanner())
    assert loaded == saved


@pytest.mark.parametrize("planner", [None, CheckpointSavePlanner], ids=["torch", "ours"])
def test_part_of_one_rank_is_not_a_checkpoint(tmp_path, planner):
    """`no_dist=True` in a job of several ranks: each would save its shards over the other's."""
    save(tmp_path, {"x": torch.full((10,), 3.0)})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        state = {"x": DTensor.from_local(torch.ones(5), mesh, [Shard(0)])}
        writer = CheckpointWriter(tmp_path)
        error = failure_of(dcp.save, state, storage_writer=writer, planner=planner and planner(), no_dist=True)
    finally:
        dist.destroy_process_group()
    assert type(error) is UsageError
    assert "10 elements, and its parts have 5" in str(error)
    loaded = {"x": torch.zeros(10)}
    load(tmp_path, loaded)
    assert loaded["x"].eq(3).all()
    assert len(list(tmp_path.iterdir())) == 2
