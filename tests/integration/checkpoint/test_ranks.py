"""Several ranks in real processes with a real process group, and loads of their checkpoints."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import resource
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support import ranks
from tests.support.failures import failures_of
from tests.support.states import assert_same_state, gathered
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from millrace.checkpoint import CheckpointReader, CheckpointWriter, describe
from millrace.errors import (
    ChangedError,
    CheckpointNotFoundError,
    DeniedError,
    DiskFullError,
    StateMismatchError,
    UsageError,
)
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ROWS, COLUMNS = 1001, 333


def whole(seed: int = 0) -> dict:
    """The state as one process has it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(ROWS, COLUMNS, generator=generator),
        "columns": torch.randn(ROWS, COLUMNS, generator=generator).bfloat16(),
        "one row": torch.randn(1, 5, generator=generator),
        "replicated": torch.randn(40, 30, generator=generator),
        "plain": torch.arange(50),
        "object": {"step": 7, "name": "run"},
    }


def zeroed(state: dict) -> dict:
    return {
        key: {"step": 0, "name": ""} if isinstance(value, dict) else torch.zeros_like(value)
        for key, value in state.items()
    }


# --- what each rank does (this file is its own program) -------------------------------------------


class FailsOnRankOne(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            raise RuntimeError("rank one fails")
        return super().resolve_data(write_item)


def sharded(state: dict, turned: bool = False) -> dict:
    """As DTensors over all ranks. `turned` exchanges sharding by rows and by columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    first, second = (Shard(1), Shard(0)) if turned else (Shard(0), Shard(1))
    places = {"rows": first, "columns": second, "one row": first, "replicated": Replicate()}
    return {
        key: distribute_tensor(value, mesh, [places[key]]) if key in places else value for key, value in state.items()
    }


def in_old_shards(tensor: torch.Tensor, dim: int) -> object:
    """As a ShardedTensor, torch's older kind, cut along one dimension."""
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    size, rank = tensor.shape[dim] // dist.get_world_size(), dist.get_rank()
    offsets = [size * rank if number == dim else 0 for number in range(2)]
    local = tensor.narrow(dim, offsets[dim], size).contiguous()
    return init_from_local_shards([Shard.from_tensor_and_offsets(local, offsets, rank)], *tensor.shape)


def old_values() -> torch.Tensor:
    return torch.randn(60, 40, generator=torch.Generator().manual_seed(5))


def load_in_old_shards(place: pathlib.Path) -> None:
    """Cut along either dimension, over as many ranks as there are."""
    for dim in (0, 1):
        target = in_old_shards(torch.zeros(60, 40), dim)
        dcp.load({"x": target}, storage_reader=CheckpointReader(place))
        (shard,) = target.local_shards()
        size = shard.tensor.shape[dim]
        assert size * dist.get_world_size() == old_values().shape[dim]
        assert torch.equal(shard.tensor, old_values().narrow(dim, dist.get_rank() * size, size))


def run_rank(root: pathlib.Path) -> None:
    state = sharded(whole())
    group = dist.new_group([0, 1])

    # Saved by two, for one process to load.
    dcp.save(state, storage_writer=CheckpointWriter(root / "two"))
    loaded = sharded(zeroed(whole()))
    dcp.load(loaded, storage_reader=CheckpointReader(root / "two"), process_group=group)
    assert_same_state(gathered(loaded), whole())

    # Saved by one process, loaded by two.
    loaded = sharded(zeroed(whole()))
    dcp.load(loaded, storage_reader=CheckpointReader(root / "one"))
    assert_same_state(gathered(loaded), whole())

    # Rows to columns and back, between the same ranks.
    loaded = sharded(zeroed(whole()), turned=True)
    dcp.load(loaded, storage_reader=CheckpointReader(root / "two"))
    assert_same_state(gathered(loaded), whole())
    dcp.save({"x": in_old_shards(old_values(), 0)}, storage_writer=CheckpointWriter(root / "old shards"))
    # What these two saved, and what one process did.
    for place in ("old shards", "one unsharded"):
        load_in_old_shards(root / place)

    # Overwriting: with another content, and with a rank that fails.
    dcp.save(sharded(whole(1)), storage_writer=CheckpointWriter(root / "twice"), process_group=group)
    dcp.save(sharded(whole(2)), storage_writer=CheckpointWriter(root / "twice"), process_group=group)
    failures = failures_of(
        lambda: dcp.save(sharded(whole(3)), storage_writer=CheckpointWriter(root / "twice"), planner=FailsOnRankOne())
    )
    assert list(failures) == [1]
    assert "rank one fails" in str(failures[1])

    # A full disk under one rank fails the save of both, which then remove what they wrote.
    dist.barrier()
    before = sorted(os.listdir(root / "twice"))
    writer = CheckpointWriter(root / "twice")
    if dist.get_rank() == 1:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    with pytest.raises(CheckpointException) as caught:
        dcp.save(sharded(whole(3)), storage_writer=writer)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(rank, type(error)) for rank, (error, _) in caught.value.failures.items()] == [(1, DiskFullError)]
    assert str(root / "twice") in str(caught.value.failures[1][0])
    writer.abandon(caught.value)
    dist.barrier()
    assert sorted(os.listdir(root / "twice")) == before

    # Shards of different types would make a checkpoint that cannot be read.
    kinds = {"rows": state["rows"].to(torch.bfloat16) if dist.get_rank() else state["rows"]}
    failures = failures_of(lambda: dcp.save(kinds, storage_writer=CheckpointWriter(root / "kinds")))
    assert [type(error) for error in failures.values()] == [UsageError]
    assert "is a tensor of torch.float32 on one rank and of torch.bfloat16 on another" in str(failures[0])

    # In the background.
    group = dist.new_group([0, 1], backend="gloo")
    dcp.async_save(sharded(whole(4)), storage_writer=CheckpointWriter(root / "async"), process_group=group).result()

    # Without collectives every rank has a checkpoint of its own, which only it loads.
    mine = {"rank": dist.get_rank(), "x": torch.full((300,), float(dist.get_rank()))}
    dcp.save(mine, storage_writer=CheckpointWriter(root / "alone"), use_collectives=False)
    dcp.save(mine, storage_writer=CheckpointWriter(root / "alone"), use_collectives=False)
    loaded = {"rank": None, "x": torch.full((300,), 9.0)}
    dcp.load(loaded, storage_reader=CheckpointReader(root / "alone"))
    assert loaded["rank"] == dist.get_rank()
    assert torch.equal(loaded["x"], mine["x"])
    with pytest.raises(UsageError, match="saved with collectives"):
        dcp.save(mine, storage_writer=CheckpointWriter(root / "two"), use_collectives=False)

    # A rank has only its own shards, and does not leave the values of another sharding as they were.
    rows = {"rows": sharded(whole())["rows"]}
    dcp.save(rows, storage_writer=CheckpointWriter(root / "shards"), use_collectives=False)
    again = {"rows": sharded(zeroed(whole()))["rows"]}
    dcp.load(again, storage_reader=CheckpointReader(root / "shards"))
    assert torch.equal(again["rows"].to_local(), rows["rows"].to_local())
    turned = {"rows": sharded(zeroed(whole()), turned=True)["rows"]}
    with pytest.raises(StateMismatchError, match=r"'rows': this rank's part of the checkpoint has \d+ of the \d+"):
        dcp.load(turned, storage_reader=CheckpointReader(root / "shards"))

    failures = failures_of(lambda: dcp.load(loaded, storage_reader=CheckpointReader(root / "nothing")))
    assert [type(error) for error in failures.values()] == [CheckpointNotFoundError] * 2


def run_four(root: pathlib.Path) -> None:
    """Four ranks load the save of two, sharded the same way and the other way."""
    for turned in (False, True):
        loaded = sharded(zeroed(whole()), turned)
        dcp.load(loaded, storage_reader=CheckpointReader(root / "two"))
        assert_same_state(gathered(loaded), whole())
    load_in_old_shards(root / "old shards")
    # On a grid of two by two, as tensor parallelism inside data parallelism has it.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid = init_device_mesh("cpu", (2, 2))
    for places in ([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Shard(0)]):
        loaded = {key: distribute_tensor(torch.zeros_like(whole()[key]), grid, places) for key in ("rows", "columns")}
        dcp.load(loaded, storage_reader=CheckpointReader(root / "two"))
        assert_same_state(gathered(loaded), {key: whole()[key] for key in loaded})
    # And back: what four saved on the grid, for one process to load.
    state = {key: distribute_tensor(whole()[key], grid, [Replicate(), Shard(0)]) for key in ("rows", "columns")}
    dcp.save(state, storage_writer=CheckpointWriter(root / "grid"))


class ReadsBeforeItIsSavedAgain(CheckpointReader):
    """Rank 0 reads the manifest and rank 1 saves over it before it reads. The old data files stay, as in a cache."""

    def read_metadata(self, *args, **kwargs):
        path = pathlib.Path(self.checkpoint_id)
        if dist.get_rank() == 0:
            metadata = super().read_metadata(*args, **kwargs)
            dist.barrier()
            dist.barrier()
            return metadata
        dist.barrier()
        data = {file: file.read_bytes() for file in path.glob("data-*")}
        dcp.save(whole(2), storage_writer=CheckpointWriter(path), no_dist=True)
        for file, content in data.items():
            file.write_bytes(content)
        dist.barrier()
        return super().read_metadata(*args, **kwargs)


def run_overwritten(root: pathlib.Path) -> None:
    """The ranks do not load different saves."""
    path = root / "overwritten"
    if dist.get_rank() == 0:
        dcp.save(whole(1), storage_writer=CheckpointWriter(path), no_dist=True)
    loaded = sharded(zeroed(whole()))
    failures = failures_of(lambda: dcp.load(loaded, storage_reader=ReadsBeforeItIsSavedAgain(path)))
    assert {type(error) for error in failures.values()} == {ChangedError}
    assert_same_state(gathered(loaded), zeroed(whole()))
    dcp.load(loaded, storage_reader=CheckpointReader(path))
    assert_same_state(gathered(loaded), whole(2))


class DiesOnRankOne(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            os._exit(9)
        return super().resolve_data(write_item)


def run_dying(root: pathlib.Path) -> None:
    """One rank dies in the middle: the other's save must end, and must not succeed."""
    state = sharded(whole(3))
    dist.barrier()
    try:
        dcp.save(state, storage_writer=CheckpointWriter(root / "async"), planner=DiesOnRankOne())
    except (CheckpointException, RuntimeError):
        os._exit(0)
    os._exit(1)


def run_upload(root: pathlib.Path) -> None:
    """The storage refuses the uploads of rank one: both ranks raise, and the previous checkpoint stays."""
    url, options = "s3://runs/ranks", json.loads((root / "options.json").read_text())
    dcp.save(sharded(whole(1)), storage_writer=CheckpointWriter(url, target_options=options))
    dist.barrier()
    (root / f"saved {dist.get_rank()}").touch()
    while not (root / "refusing").exists():
        time.sleep(0.02)
    failures = failures_of(
        lambda: dcp.save(sharded(whole(2)), storage_writer=CheckpointWriter(url, target_options=options))
    )
    assert [(rank, type(error)) for rank, error in failures.items()] == [(1, DeniedError)]
    assert "runs/ranks" in str(failures[1])
    loaded = sharded(zeroed(whole()))
    dcp.load(loaded, storage_reader=CheckpointReader(url, target_options=options))
    assert_same_state(gathered(loaded), whole(1))


PROGRAMS = {
    "two": run_rank,
    "four": run_four,
    "overwritten": run_overwritten,
    "dying": run_dying,
    "upload": run_upload,
}


# --- the tests ------------------------------------------------------------------------------------


run = functools.partial(ranks.run, __file__)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The place of the checkpoint that two ranks saved with `run_rank`."""
    root = tmp_path_factory.mktemp("ranks")
    dcp.save(whole(), storage_writer=CheckpointWriter(root / "one"))
    dcp.save({"x": old_values()}, storage_writer=CheckpointWriter(root / "one unsharded"))
    run("two", 2, root)
    return root


def load(path, state=None):
    state = zeroed(whole()) if state is None else state
    dcp.load(state, storage_reader=CheckpointReader(path))
    return state


@pytest.mark.slow
def test_one_process_loads_the_save_of_two(ran):
    assert_same_state(load(ran / "two"), whole())
    assert describe(ran / "two").raw_bytes > 0


@pytest.mark.slow
def test_four_ranks_load_the_save_of_two(ran):
    run("four", 4, ran)
    expected = {key: whole()[key] for key in ("rows", "columns")}
    assert_same_state(load(ran / "grid", zeroed(expected)), expected)
    # Of two copies one is stored.
    assert describe(ran / "grid").raw_bytes == sum(tensor.nbytes for tensor in expected.values())


def test_load_of_a_checkpoint_that_is_saved_again_meanwhile_mixes_no_saves(tmp_path):
    run("overwritten", 2, tmp_path)


def test_killed_rank_fails_the_save_of_the_other(ran):
    run("dying", 2, ran, codes=(0, 9))
    assert_same_state(load(ran / "async"), whole(4))


@pytest.mark.slow
def test_failed_upload_on_one_rank_fails_the_save_on_both(tmp_path):
    with (
        S3Server(tmp_path / "server") as server,
        EmulatedRegion(server.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region,
    ):
        server.create_bucket("runs")
        options = {**server.target_options, "endpoint_url": region.endpoint_url}
        (tmp_path / "options.json").write_text(json.dumps(options))

        def refuse_rank_one() -> None:
            deadline = time.monotonic() + 120
            while len(list(tmp_path.glob("saved *"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            # Data files are called data-ID-RANK-NUMBER.
            region.fail("status", method="PUT", path="*/data-*-1-0.millrace", status=403, count=None)
            (tmp_path / "refusing").touch()

        run("upload", 2, tmp_path, meanwhile=refuse_rank_one)


def test_sharded_tensor_of_older_torch_is_loaded_whole(ran):
    state = load(ran / "old shards", {"x": torch.zeros(60, 40)})
    assert torch.equal(state["x"], old_values())


def test_failing_rank_keeps_the_previous_checkpoint(ran):
    assert_same_state(load(ran / "twice"), whole(2))


def test_asynchronous_save_of_two_ranks_is_loaded(ran):
    assert_same_state(load(ran / "async"), whole(4))


def test_save_of_two_ranks_writes_data_files_of_both(ran):
    assert len(list((ran / "two").glob("data-*"))) == 2


def test_save_without_collectives_names_the_next_step(ran):
    with pytest.raises(CheckpointNotFoundError, match="without collectives"):
        CheckpointReader(ran / "alone").read_metadata()
    state = load(ran / "alone", {"rank": None, "x": torch.zeros(300)})
    assert state["rank"] == 0


if __name__ == "__main__":
    ranks.main(PROGRAMS)
