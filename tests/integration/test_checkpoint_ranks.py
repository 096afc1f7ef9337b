"""Two ranks in real processes with a real process group, and what one process makes of their checkpoints."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from millrace.checkpoint import CheckpointReader, CheckpointWriter, describe
from millrace.errors import CheckpointNotFoundError, UsageError

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


def assert_same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, dict):
            assert value == right[key]
        else:
            assert value.dtype == right[key].dtype, key
            assert torch.equal(value, right[key]), key


# --- what each rank does (this file is its own program) -------------------------------------------


class FailsOnRankOne(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            raise RuntimeError("rank one fails")
        return super().resolve_data(write_item)


def sharded(state: dict) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    places = {"rows": Shard(0), "columns": Shard(1), "one row": Shard(0), "replicated": Replicate()}
    return {
        key: distribute_tensor(value, mesh, [places[key]]) if key in places else value for key, value in state.items()
    }


def gathered(state: dict) -> dict:
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}


def failures_of(call) -> dict:
    with pytest.raises(CheckpointException) as caught:
        call()
    return {rank: error for rank, (error, _) in caught.value.failures.items()}


def run_rank(root: pathlib.Path) -> None:
    state = sharded(whole())
    group = dist.new_group([0, 1])

    # Saved by two, for one process to load.
    dcp.save(state, storage_writer=CheckpointWriter(root / "two"))
    loaded = sharded(zeroed(whole()))
    dcp.load(loaded, storage_reader=CheckpointReader(root / "two"), process_group=group)
    assert_same(gathered(loaded), whole())

    # Saved by one process, loaded by two.
    loaded = sharded(zeroed(whole()))
    dcp.load(loaded, storage_reader=CheckpointReader(root / "one"))
    assert_same(gathered(loaded), whole())

    # Overwriting: with another content, and with a rank that fails.
    dcp.save(sharded(whole(1)), storage_writer=CheckpointWriter(root / "twice"), process_group=group)
    dcp.save(sharded(whole(2)), storage_writer=CheckpointWriter(root / "twice"), process_group=group)
    failures = failures_of(
        lambda: dcp.save(sharded(whole(3)), storage_writer=CheckpointWriter(root / "twice"), planner=FailsOnRankOne())
    )
    assert list(failures) == [1]
    assert "rank one fails" in str(failures[1])

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

    failures = failures_of(lambda: dcp.load(loaded, storage_reader=CheckpointReader(root / "nothing")))
    assert [type(error) for error in failures.values()] == [CheckpointNotFoundError] * 2


def main(rank: str, port: str, root: str) -> None:
    os.environ.update(RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        run_rank(pathlib.Path(root))
    except BaseException:  # noqa: BLE001 - printed, and the process ends
        traceback.print_exc()
        # Not waiting for the other rank, which waits for this one.
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


# --- the tests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Where two ranks have saved what `run_rank` says."""
    root = tmp_path_factory.mktemp("ranks")
    dcp.save(whole(), storage_writer=CheckpointWriter(root / "one"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(port), str(root)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = []
    try:
        for process in ranks:
            ended.append((process.communicate(timeout=120)[1], process.returncode))
    finally:
        for process in ranks:
            process.kill()
    for text, code in ended:
        assert code == 0, text
    return root


def load(path, state=None):
    state = zeroed(whole()) if state is None else state
    dcp.load(state, storage_reader=CheckpointReader(path))
    return state


def test_one_process_loads_what_two_saved(ran):
    assert_same(load(ran / "two"), whole())
    assert describe(ran / "two").raw_bytes > 0


def test_a_failing_rank_leaves_the_previous_checkpoint(ran):
    assert_same(load(ran / "twice"), whole(2))


def test_an_asynchronous_save_of_two_ranks_is_loaded(ran):
    assert_same(load(ran / "async"), whole(4))


def test_both_ranks_write(ran):
    assert len(list((ran / "two").glob("data-*"))) == 2


def test_a_save_without_collectives_names_its_next_step(ran):
    with pytest.raises(CheckpointNotFoundError, match="without collectives"):
        CheckpointReader(ran / "alone").read_metadata()
    state = load(ran / "alone", {"rank": None, "x": torch.zeros(300)})
    assert state["rank"] == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
