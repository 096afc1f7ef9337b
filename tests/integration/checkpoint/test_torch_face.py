"""Every way in which torch calls a storage writer or reader, with ours in the place of the stock ones."""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import threading
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.failures import failure_of
from tests.support.fork_server import PATH, ForkedProcess, torch_server
from tests.support.memory import resident_bytes
from tests.support.states import assert_same_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import LoadPlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, _save_state_dict

from millrace.checkpoint import CheckpointReader, CheckpointWriter, ZstdPlanes, describe
from millrace.checkpoint.reading import loads
from millrace.errors import (
    ChangedError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DeniedError,
    MillraceError,
    StorageError,
    UnsupportedObjectError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process:UserWarning")

_NOBODY = 65534


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(30, 40), torch.nn.Linear(40, 2)


def trained() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.last(model.first(torch.randn(8, 30))).sum().backward()
    optimizer.step()
    return model, optimizer


# --- one process ----------------------------------------------------------------------------------


def test_stock_arguments_are_accepted_by_position_and_name(tmp_path):
    with pytest.warns(UserWarning, match="per_thread_copy_ahead"):
        writer = CheckpointWriter(tmp_path, True, False, 2, 5, True, True, None, SerializationFormat.TORCH_SAVE)
    model, _ = trained()
    dcp.save({"model": model}, storage_writer=writer)
    other = Model()
    dcp.load({"model": other}, storage_reader=CheckpointReader(path=tmp_path, _extension_registry=None))
    assert_same_state(dict(other.state_dict()), dict(model.state_dict()))


def test_no_dist_with_positional_writer_saves(tmp_path):
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    returned = dcp.save(state, storage_writer=CheckpointWriter(tmp_path), no_dist=True)
    assert set(returned.state_dict_metadata) == set(CheckpointReader(tmp_path).read_metadata().state_dict_metadata)
    # Torch returns the result of `save` to its callers, also in another process.
    pickle.loads(pickle.dumps(returned))
    loaded = {"model": Model().state_dict(), "optimizer": trained()[1].state_dict()}
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path), no_dist=True)
    assert_same_state(loaded, state)


def test_save_without_collectives_in_one_process_is_loaded(tmp_path):
    state = {"x": torch.randn(500), "n": 5}
    for _ in range(2):
        state["n"] += 1
        dcp.save(state, storage_writer=CheckpointWriter(tmp_path), no_dist=True, use_collectives=False)
    loaded = {"x": torch.zeros(500), "n": 0}
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path), no_dist=True)
    assert_same_state(loaded, state)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".millrace"] * 2


class LeavesOutW(DefaultLoadPlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[item for item in plan.items if item.dest_index.fqn != "w"])


class LoadsAverageIntoW(DefaultLoadPlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        items = [
            dataclasses.replace(item, storage_index=dataclasses.replace(item.storage_index, fqn="average"))
            for item in plan.items
        ]
        return dataclasses.replace(plan, items=items)


class MakesNewPlans(DefaultLoadPlanner):
    def create_global_plan(self, plans):
        return [LoadPlan(plan.items) for plan in plans]


@pytest.mark.parametrize(("planner", "expected"), [(LeavesOutW, 0.0), (LoadsAverageIntoW, 2.0), (MakesNewPlans, 1.0)])
@pytest.mark.parametrize("use_collectives", [True, False])
def test_load_with_a_planner_of_ones_own_reads_what_it_plans(planner, expected, use_collectives, tmp_path):
    state = {"w": torch.ones(4), "average": torch.full((4,), 2.0)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path), no_dist=True, use_collectives=use_collectives)
    loaded = {"w": torch.zeros(4)}
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path), planner=planner(), no_dist=True)
    assert loaded["w"].tolist() == [expected] * 4


def test_load_of_a_damaged_manifest_next_to_an_older_save_without_collectives_raises(tmp_path):
    dcp.save({"n": 1}, storage_writer=CheckpointWriter(tmp_path), no_dist=True, use_collectives=False)
    dcp.save({"n": 2}, storage_writer=CheckpointWriter(tmp_path), no_dist=True)
    (tmp_path / "manifest.millrace").write_bytes(b"damaged")
    loaded = {"n": 0}
    failure = failure_of(lambda: dcp.load(loaded, storage_reader=CheckpointReader(tmp_path), no_dist=True))
    assert isinstance(failure, CorruptCheckpointError)
    assert loaded == {"n": 0}


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
def test_checkpoint_of_torchs_own_writer_that_is_saved_again_during_a_load_raises_changed(tmp_path):
    class SavesAgain(DefaultLoadPlanner):
        def create_local_plan(self):
            dcp.save({"x": torch.ones(500)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
            return super().create_local_plan()

    dcp.save({"x": torch.zeros(500)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    loaded = {"x": torch.zeros(500)}
    reader = CheckpointReader(tmp_path)
    failure = failure_of(lambda: dcp.load(loaded, storage_reader=reader, planner=SavesAgain(), no_dist=True))
    assert isinstance(failure, ChangedError)
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path), no_dist=True)
    assert torch.equal(loaded["x"], torch.ones(500))


def test_checkpoint_to_torch_file_and_back_is_equal(tmp_path):
    """What `dcp_to_torch_save` and `torch_save_to_dcp` do, which name the stock classes."""
    model, _ = trained()
    state = {"model": model.state_dict(), "list": [torch.ones(2), 5], "name": "run"}
    torch.save(state, tmp_path / "model.pt")
    _save_state_dict(
        torch.load(tmp_path / "model.pt", weights_only=False),
        storage_writer=CheckpointWriter(tmp_path / "ours"),
        no_dist=True,
    )
    whole: dict = {}
    _load_state_dict(
        whole,
        storage_reader=CheckpointReader(tmp_path / "ours"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    torch.save(whole, tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=False)
    assert again["list"][1] == 5
    assert torch.equal(again["list"][0], torch.ones(2))
    assert again["name"] == "run"
    assert_same_state(again["model"], dict(state["model"]))
    # And only some keys of it.
    part: dict = {}
    planner = _EmptyStateDictLoadPlanner(keys={"model.first.weight"})
    _load_state_dict(part, storage_reader=CheckpointReader(tmp_path / "ours"), planner=planner, no_dist=True)
    assert_same_state(part, {"model": {"first.weight": state["model"]["first.weight"]}})


def test_cached_plans_save_new_values(tmp_path):
    for cache in vars(SavePlanner):
        if cache.startswith("_cached"):
            getattr(SavePlanner, cache).clear()
    writer = CheckpointWriter(tmp_path / "0")
    for step in range(4):
        # The shapes change once: the cached plans no longer fit.
        state = {"x": torch.randn(1000 + (step > 2)), "n": step}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=tmp_path / str(step), storage_writer=writer, planner=planner)
        loaded = {"x": torch.zeros_like(state["x"]), "n": None}
        dcp.load(loaded, storage_reader=CheckpointReader(tmp_path / str(step)))
        assert_same_state(loaded, state)


def test_planner_without_flattening_loads_a_partial_state(tmp_path):
    state = {"x": torch.randn(50), "extra": {"deep": [1, 2]}}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path), planner=DefaultSavePlanner(flatten_state_dict=False))
    loaded = {"x": torch.zeros(50), "extra": None, "absent": torch.ones(2)}
    planner = DefaultLoadPlanner(flatten_state_dict=False, allow_partial_load=True)
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path), planner=planner)
    assert torch.equal(loaded["x"], state["x"])
    assert torch.equal(loaded["absent"], torch.ones(2))


def test_consecutive_asynchronous_saves_are_loaded(tmp_path):
    writer = CheckpointWriter(tmp_path)
    state = {"x": torch.zeros(300_000), "n": 0}
    for step in range(3):
        state["x"].fill_(step)
        state["n"] = step
        pending = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.THREAD)
        state["x"].fill_(-1)
        pending.result()
        loaded = {"x": torch.zeros(300_000), "n": None}
        dcp.load(loaded, storage_reader=CheckpointReader(tmp_path))
        assert (loaded["x"] == step).all()
        assert loaded["n"] == step


def test_metadata_has_the_ids_of_save_and_load(tmp_path):
    """As torch's own classes do; every save has a name of its own, also of one writer or its copies."""
    writer, seen = CheckpointWriter(tmp_path), set()
    for one in (writer, writer, *[pickle.loads(pickle.dumps(writer)) for _ in range(2)]):
        dcp.save({"x": torch.ones(3)}, storage_writer=one)
        reader = CheckpointReader(tmp_path)
        described = reader.read_metadata().storage_meta
        assert str(described.checkpoint_id) == str(tmp_path)
        assert described.save_id == one.save_id
        assert described.load_id == reader.load_id
        seen.add(one.save_id)
    assert len(seen) == 4
    stock = dcp.FileSystemWriter(tmp_path / "stock")
    dcp.save({"x": torch.ones(3)}, storage_writer=stock)
    assert CheckpointReader(tmp_path / "stock").read_metadata().storage_meta.save_id == stock.save_id


def test_stock_checkpoint_is_described(tmp_path):
    state = {"x": torch.randn(300, 7), "h": torch.randn(9).bfloat16(), "n": 3}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    summary = describe(tmp_path)
    assert summary == CheckpointReader(tmp_path).summary()
    assert (summary.format_version, summary.tensors, summary.objects) == (0, 2, 1)
    tensor_bytes = 300 * 7 * 4 + 9 * 2
    assert tensor_bytes < summary.raw_bytes < tensor_bytes + 2000
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert summary.raw_bytes < summary.stored_bytes <= on_disk
    assert summary.created == (tmp_path / ".metadata").stat().st_mtime


# --- errors ---------------------------------------------------------------------------------------


def save(path, state=None, **options) -> None:
    dcp.save(state or {"x": torch.ones(5)}, storage_writer=CheckpointWriter(path, **options))


def load(path, state=None, **options) -> None:
    dcp.load(state or {"x": torch.ones(5)}, storage_reader=CheckpointReader(path, **options))


def errors_of_places(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    yield "nope://bucket/x", ConfigurationError
    yield "s3://", ConfigurationError
    yield "s3://bucket", ConfigurationError
    yield "/", ConfigurationError
    yield tmp_path / "file" / "below", StorageError
    yield tmp_path / "loop", MillraceError
    yield "/proc/nothing/here", MillraceError
    yield tmp_path / ("x" * 300), StorageError


def test_errors_of_places_are_millrace_errors_in_one_line(tmp_path):
    for place, kind in errors_of_places(tmp_path):
        for call in (save, load):
            failure = failure_of(lambda call=call, place=place: call(place))
            assert isinstance(failure, kind if call is save else MillraceError), (place, failure)
            assert "\n" not in str(failure)
            assert failure.next_step, (place, failure)
            pickle.loads(pickle.dumps(failure))


def test_directory_without_permissions_raises_denied(tmp_path):
    save(tmp_path / "before")  # imports what a save needs
    tmp_path.chmod(0o500)
    is_root = os.geteuid() == 0
    if is_root:  # which may do everything
        os.seteuid(_NOBODY)
    try:
        failure = failure_of(lambda: save(tmp_path / "run"))
    finally:
        if is_root:
            os.seteuid(0)
        tmp_path.chmod(0o700)
    assert isinstance(failure, DeniedError)


def test_errors_of_planner_are_not_translated(tmp_path):
    """The errors are raised by torch's planner, which compares keys and shapes. Each names the key."""
    save(tmp_path, {"x": torch.ones(5)})
    missing = failure_of(lambda: load(tmp_path, {"y": torch.ones(5)}))
    assert "y" in str(missing)
    mismatch = failure_of(lambda: load(tmp_path, {"x": torch.ones(6)}))
    assert "x" in str(mismatch)


def test_too_long_object_fails_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr("millrace.checkpoint.writing.plans.MAX_BLOB_BYTES", 5000)
    save(tmp_path, {"text": "x" * 1000})
    failure = failure_of(lambda: save(tmp_path, {"text": "x" * 10_000}))
    assert isinstance(failure, UnsupportedObjectError)
    assert "'text'" in str(failure)


# --- memory ---------------------------------------------------------------------------------------


class Watch:
    """The highest resident memory that a thread sees while this is open, beyond that at the beginning."""

    def __enter__(self) -> Watch:
        self.began = self.highest = resident_bytes()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self

    def run(self) -> None:
        while not self.stop.wait(0.002):
            self.highest = max(self.highest, resident_bytes())

    def __exit__(self, *exc) -> None:
        self.stop.set()
        self.thread.join()

    @property
    def added(self) -> int:
        return self.highest - self.began


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in place", "other dtype", "not contiguous"])
def test_loading_needs_no_second_copy(tmp_path, monkeypatch, how):
    nbytes = 256 << 20
    monkeypatch.setattr(loads, "_STAGING_BYTES", 16 << 20)
    dcp.save({"x": torch.randn(nbytes // 4 // 1024, 1024)}, storage_writer=CheckpointWriter(tmp_path, sync_files=False))
    target = torch.zeros(nbytes // 4 // 1024, 1024)
    if how == "other dtype":
        target = target.double()
    elif how == "not contiguous":
        target = torch.zeros(1024, nbytes // 4 // 1024).t()
    load(tmp_path, {"x": target})  # warms up whatever is loaded once
    with Watch() as watch:
        load(tmp_path, {"x": target}, thread_count=2)
    assert watch.added < nbytes // 2


@pytest.mark.parametrize("how", ["typed", "max", "none", "ZstdPlanes", "not contiguous"])
def test_saving_needs_no_second_copy(tmp_path, how):
    """A few chunks a thread, whatever the tensor's length."""
    nbytes = 256 << 20

    def writer(place: str):
        if how == "ZstdPlanes":
            return dcp.FileSystemWriter(tmp_path / place, sync_files=False, _extensions=[ZstdPlanes()])
        compression = "typed" if how == "not contiguous" else how
        return CheckpointWriter(tmp_path / place, sync_files=False, compression=compression, thread_count=2)

    dcp.save({"x": torch.randn(1 << 20)}, storage_writer=writer("warm-up"))  # libraries that are imported once
    state = {"x": torch.randn(nbytes // 4 // 1024, 1024)}
    if how == "not contiguous":
        state["x"] = state["x"].t()
    with Watch() as watch:
        dcp.save(state, storage_writer=writer("run"))
    assert watch.added < nbytes // 4


# --- a process group (this file is its own program) -----------------------------------------------


def run_group(place: str) -> None:
    # Not at a port, which another program may have taken when this one has started.
    dist.init_process_group("gloo", store=dist.FileStore(f"{place}/meeting", 1), rank=0, world_size=1)
    group = dist.new_group([0])
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n": 1}
    dcp.save(state, storage_writer=CheckpointWriter(f"{place}/group"), process_group=group)
    loaded = {"model": Model().state_dict(), "optimizer": trained()[1].state_dict(), "n": 0}
    dcp.load(loaded, storage_reader=CheckpointReader(f"{place}/group"), process_group=group)
    assert_same_state(loaded, state)
    # A separate process saves twice, the second time with other values; then it fails with the reason.
    for step in range(2):
        state["n"] = step
        state["model"]["first.weight"].fill_(step)
        dcp.async_save(
            state,
            storage_writer=CheckpointWriter(f"{place}/process", thread_count=2),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ).result()
        dcp.load(loaded, storage_reader=CheckpointReader(f"{place}/process"))
        assert_same_state(loaded, state)
    with open(f"{place}/file", "w"):
        pass
    pending = dcp.async_save(
        state,
        storage_writer=CheckpointWriter(f"{place}/file/below"),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    failure = pending.exception(300)
    assert isinstance(failure, CheckpointException)
    assert isinstance(failure.failures[0][0], StorageError)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(loaded, storage_reader=CheckpointReader(f"{place}/nothing"))
    assert isinstance(caught.value.failures[0][0], CheckpointNotFoundError)
    dist.destroy_process_group()


@pytest.mark.slow
def test_async_save_in_a_process_group_is_loaded(tmp_path):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": PATH}
    log = tmp_path / "log"
    with ForkedProcess(torch_server(), __file__, str(tmp_path), log=log, env=environment, pipes=True) as process:
        process.output()
    loaded = {"model": Model().state_dict(), "n": None}
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path / "process"))
    assert loaded["n"] == 1
    assert (loaded["model"]["first.weight"] == 1).all()


if __name__ == "__main__":
    try:
        run_group(sys.argv[1])
    except BaseException:  # noqa: BLE001 - printed, and the process ends
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
