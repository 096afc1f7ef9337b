"""Asynchronous saves in real processes: the exit of the process, `dcp.async_save`, ranks, any state."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from multiprocessing.connection import wait
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import ranks
from tests.support.states import assert_same_state
from tests.support.waiting import wait_until
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from millrace.checkpoint import CheckpointReader, CheckpointStager, CheckpointWriter
from millrace.checkpoint.state.staging import StateStager
from millrace.errors import CheckpointNotFoundError, StorageError, UnsupportedObjectError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process:UserWarning")


def load(place, state: dict) -> dict:
    dcp.load(state, storage_reader=CheckpointReader(place))
    return state


# --- leaving the process --------------------------------------------------------------------------

# Imports torch once, and forks for every training script, which then ends as any script does: `place`, `program` and
# where stderr goes come as lines of JSON.
TEMPLATE = """
import json, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed.checkpoint as dcp
from concurrent.futures import ThreadPoolExecutor
from millrace.checkpoint import CheckpointStager, CheckpointWriter
from millrace.checkpoint.run.saving import SaveResult, SaveRunner
from millrace.checkpoint.state.staging import StateStager
from millrace.errors import DiskFullError

def save(step, *, until_leaving=True, fails=False):
    staged = stager.stage(state)

    def work(report):
        begun.set()
        if until_leaving:
            leaving.wait()
        if fails:
            raise DiskFullError("the disk is full", next_step="free some")
        # As storages do that look names up in a pool of threads.
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(int, "7").result() == 7
        writer = CheckpointWriter(f"{place}/{step}", thread_count=2)
        dcp.save(staged.state, storage_writer=writer, no_dist=True)
        staged.release()
        return SaveResult(step=step, url=place, kind="full", raw_bytes=0, stored_bytes=0, restore_bytes=0,
                          staged_seconds=0, waited_seconds=0, seconds=0, chunks_full=0, chunks_delta=0, chunks_referenced=0)

    return runner.submit(step, work)

program = None
while line := os.read(0, 100_000):
    place, program, stderr = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        program = None
        continue
    os.dup2(os.open(stderr, os.O_CREAT | os.O_WRONLY), 2)
    break
if program is not None:
    runner, stager = SaveRunner(), StateStager()
    state = {"x": torch.arange(300_000.0), "n": 1}
    begun, leaving = threading.Event(), threading.Event()
    # Called before whatever was registered before it: the script has ended, nothing was waited for yet.
    threading._register_atexit(leaving.set)
    exec(program)
"""


class Ran(NamedTuple):
    returncode: int
    stderr: str


@pytest.fixture(scope="module")
def template():
    process = subprocess.Popen(
        [sys.executable, "-c", TEMPLATE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            # With its children, should one of them hang.
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def train(template, tmp_path):
    def run(program: str) -> Ran:
        stderr = tmp_path / "stderr"
        template.stdin.write(json.dumps([str(tmp_path), textwrap.dedent(program), str(stderr)]) + "\n")
        template.stdin.flush()
        ready = wait([template.stdout], 120)
        assert ready, "it does not end"
        return Ran(int(template.stdout.readline()), stderr.read_text())

    return run


def assert_saved(place: pathlib.Path, step: int) -> None:
    loaded = load(place / str(step), {"x": torch.zeros(300_000), "n": 0})
    assert loaded["x"].equal(torch.arange(300_000.0))
    assert loaded["n"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "code", "text"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('a bug in the loop')", 1, "ValueError: a bug in the loop"),
        ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
    ],
    ids=["end", "exit", "exception", "interrupt"],
)
def test_process_exit_waits_for_the_save(train, tmp_path, ending, code, text):
    ran = train(f"save(5)\nstate['x'].fill_(7)\nbegun.wait()\n{ending}")
    assert ran.returncode == code, ran.stderr
    assert text in ran.stderr
    assert "millrace:" not in ran.stderr
    assert_saved(tmp_path, 5)


def test_unseen_error_is_one_line_at_exit(train):
    ran = train("save(5, fails=True)\nbegun.wait()\ndel runner")
    assert ran.returncode == 0
    assert ran.stderr == "millrace: the save of step 5 failed: DiskFullError: the disk is full: free some\n"


def test_seen_error_is_not_repeated_at_exit(train):
    ran = train(
        """
        pending = save(5, until_leaving=False, fails=True)
        assert pending.exception() is not None
        save(6, until_leaving=False, fails=True)
        runner.drain()
        try:
            runner.check()
        except DiskFullError:
            pass
        """,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_exit_without_wait_reports_the_lost_save(train, tmp_path):
    """Ctrl-C while the process waits for its save."""
    ran = train(
        """
        def again():
            leaving.wait()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

        save(5, until_leaving=False).result()
        runner.submit(6, lambda report: again())
        """,
    )
    assert "millrace: the save of step 6 was interrupted, and is lost\n" in ran.stderr
    assert_saved(tmp_path, 5)


def test_killed_process_loses_only_the_save_in_flight(train, tmp_path):
    ran = train(
        """
        save(5, until_leaving=False).result()
        save(6)
        begun.wait()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert ran.returncode == -signal.SIGKILL
    assert_saved(tmp_path, 5)
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "6", {"x": torch.zeros(300_000), "n": 0})
    assert isinstance(caught.value.failures[0][0], CheckpointNotFoundError)


def test_forked_workers_neither_wait_nor_save(train, tmp_path):
    """Forked as by data loaders, while a save is in flight. They return, or call `os._exit`."""
    ran = train(
        """
        import multiprocessing

        class Samples(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return index

        save(5)
        begun.wait()
        loader = torch.utils.data.DataLoader(Samples(), num_workers=2, multiprocessing_context="fork")
        assert sum(int(batch) for batch in loader) == 28
        child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(4,))
        child.start()
        child.join(300)
        assert child.exitcode == 4
        """,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert_saved(tmp_path, 5)


# --- dcp.async_save -------------------------------------------------------------------------------


def make(step: int) -> dict:
    tied = torch.full((300, 50), float(step))
    return {
        "model": {"embedding": tied, "head": tied, "columns": torch.arange(12.0).view(3, 4).t() + step},
        "step": step,
        "history": [step] * 3,
    }


def empty() -> dict:
    return {
        "model": {"embedding": torch.zeros(300, 50), "head": torch.zeros(300, 50), "columns": torch.zeros(4, 3)},
        "step": -1,
        "history": [],
    }


def overwrite(state: dict) -> None:
    for tensor in state["model"].values():
        tensor.fill_(-1)
    state["history"].clear()
    state["step"] = -1


def test_torch_async_save_with_checkpoint_stager_saves_the_staged_values(tmp_path, monkeypatch):
    stager, given_back = CheckpointStager(), []
    put_back = stager._stager._put_back
    monkeypatch.setattr(stager._stager, "_put_back", lambda slot: given_back.append(put_back(slot)))
    pending, seen = [], set()
    for step in range(4):
        state = make(step)
        pending.append(
            dcp.async_save(state, storage_writer=CheckpointWriter(tmp_path / str(step)), async_stager=stager)
        )
        overwrite(state)
    for step, future in enumerate(pending):
        future.result()
        assert_same_state(load(tmp_path / str(step), empty()), make(step))
    del pending, future
    # Torch's thread may refer to a state for a moment after its save.
    wait_until(lambda: len(given_back) == 4)
    # One after the other they share a buffer.
    for step in range(4):
        state = make(step)
        staged = stager.stage(state)
        seen.add(staged["model"]["head"].data_ptr())
        del staged
    assert len(seen) == 1
    stager.close()


def test_checkpoint_stager_with_torch_writer_saves_the_staged_values(tmp_path):
    state, stager = make(1), CheckpointStager()
    future = dcp.async_save(state, storage_writer=FileSystemWriter(tmp_path), async_stager=stager)
    overwrite(state)
    future.result()
    loaded = empty()
    dcp.load(loaded, storage_reader=FileSystemReader(tmp_path))
    assert_same_state(loaded, make(1))


def test_failed_async_save_raises_and_later_saves_succeed(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    stager = CheckpointStager()
    state = make(1)
    bad = dcp.async_save(state, storage_writer=CheckpointWriter(tmp_path / "file" / "below"), async_stager=stager)
    failure = bad.exception()
    assert isinstance(failure, CheckpointException)
    assert isinstance(failure.failures[0][0], StorageError)
    with pytest.raises(UnsupportedObjectError, match="'lambda'"):
        dcp.async_save(
            {"lambda": (i for i in ())}, storage_writer=CheckpointWriter(tmp_path / "no"), async_stager=stager
        )
    dcp.async_save(state, storage_writer=CheckpointWriter(tmp_path / "good"), async_stager=stager).result()
    assert_same_state(load(tmp_path / "good", empty()), make(1))


def test_async_save_of_torch_is_completed_at_exit(train, tmp_path):
    """Torch's pool waits for the save at exit, when other pools refuse work. Millrace's accepts it."""
    ran = train(
        """
        class Slow(CheckpointWriter):
            def prepare_local_plan(self, plan):
                leaving.wait()
                return super().prepare_local_plan(plan)

        dcp.async_save(state, storage_writer=Slow(f"{place}/5"), async_stager=CheckpointStager())
        """,
    )
    assert ran.returncode == 0, ran.stderr
    assert_saved(tmp_path, 5)


# --- several ranks (this file is its own program) -------------------------------------------------


def run_ranks(root: pathlib.Path) -> None:
    from torch.distributed._shard.sharded_tensor import Shard as OldShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    stager, staged_at = CheckpointStager(), []
    for step in range(2):
        whole = torch.arange(35.0).view(7, 5) + step
        old = torch.arange(24.0).view(6, 4) + step
        state = {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole, mesh, [Shard(1)]),
            "one row": distribute_tensor(whole[:1], mesh, [Shard(0)]),
            "whole": distribute_tensor(whole, mesh, [Replicate()]),
            "old": init_from_local_shards(
                [OldShard.from_tensor_and_offsets(old[rank * 3 : rank * 3 + 3].clone(), [rank * 3, 0], rank)], 6, 4
            ),
            "step": step,
        }
        copy = stager.stage(state)
        for key in ("rows", "columns", "one row", "whole"):
            assert type(copy[key]) is DTensor
            assert copy[key].placements == state[key].placements
            assert (copy[key].shape, copy[key].stride()) == (state[key].shape, state[key].stride())
            assert copy[key].full_tensor().equal(state[key].full_tensor())
        assert copy["old"].metadata() == state["old"].metadata()
        staged_at.append(copy["whole"].to_local().data_ptr())
        del copy
        future = dcp.async_save(state, storage_writer=CheckpointWriter(root / str(step)), async_stager=stager)
        for value in state.values():
            if isinstance(value, DTensor):
                value.to_local().fill_(-1)
        state["old"].local_shards()[0].tensor.fill_(-1)
        future.result()
        wait_until(lambda: len(stager._stager._free) == 1)  # torch's thread may refer to the state for a moment more
    assert staged_at[0] == staged_at[1]
    # A process of its own on each rank; twice, as the second state lands in shared memory.
    for step in range(2):
        local = {"x": distribute_tensor(torch.arange(10.0) + step, mesh, [Shard(0)]), "step": step}
        future = dcp.async_save(
            local,
            storage_writer=CheckpointWriter(root / f"process {step}", thread_count=1),
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        local["x"].to_local().fill_(-1)
        future.result()
        del future


@pytest.mark.slow
def test_async_save_of_sharded_tensors_is_loaded(tmp_path):
    ranks.run(__file__, "ranks", 2, tmp_path)
    for step in range(2):
        whole = torch.arange(35.0).view(7, 5) + step
        expected = {
            "rows": whole,
            "columns": whole,
            "one row": whole[:1],
            "whole": whole,
            "old": torch.arange(24.0).view(6, 4) + step,
        }
        found = load(tmp_path / str(step), {key: torch.zeros_like(value) for key, value in expected.items()})
        assert all(found[key].equal(value) for key, value in expected.items())
        assert len(list((tmp_path / str(step)).glob("data-*"))) == 2
        found = load(tmp_path / f"process {step}", {"x": torch.zeros(10), "step": -1})
        assert found["x"].equal(torch.arange(10.0) + step)
        assert found["step"] == step


# --- any state ------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.builds(
        lambda shape, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)),
        st.lists(st.integers(0, 40), max_size=3),
        st.integers(0, 99),
    ),
    st.integers(-5, 5),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=3),
)
STATES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.recursive(LEAVES, lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, max_size=3), max_leaves=6),
    min_size=1,
    max_size=5,
)


def spoil(value):
    """A state of the same structure with other values; the tensors are changed in place."""
    if isinstance(value, dict):
        for key in value:
            value[key] = spoil(value[key])
        return value
    if isinstance(value, torch.Tensor):
        return value.fill_(123)
    if isinstance(value, list):
        value.append("more")
        return value
    return "other"


@pytest.fixture(scope="module")
def one_stager():
    stager = StateStager()
    yield stager
    stager.close()


@given(state=STATES)
@settings(max_examples=25, deadline=None)
def test_any_state_is_saved_as_staged(tmp_path_factory, one_stager, state):
    import copy

    place, expected = tmp_path_factory.mktemp("any"), copy.deepcopy(state)
    staged = one_stager.stage(state)
    state = spoil(state)
    dcp.save(staged.state, storage_writer=CheckpointWriter(place, sync_files=False))
    staged.release()
    # The load overwrites every spoilt value.
    dcp.load(state, storage_reader=CheckpointReader(place))
    assert_same_state(state, expected)


if __name__ == "__main__":
    ranks.main({"ranks": run_ranks})
