"""`CheckpointManager` on two ranks: real processes with a real process group."""

from __future__ import annotations

import os
import pathlib
import signal
import time
import warnings
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from tests.support import ranks
from tests.support.harms import flip_in_the_middle
from tests.support.states import assert_same_state, gathered
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from millrace.checkpoint import CheckpointManager
from millrace.errors import ConfigurationError, RetryableError, StateMismatchError, UsageError

ROWS, COLUMNS = 2048, 333


def whole(step: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    state = {
        "rows": torch.randn(ROWS, COLUMNS, generator=generator),
        "columns": torch.randn(ROWS, COLUMNS, generator=generator).bfloat16(),
        "replicated": torch.randn(400, 300, generator=generator),
        "frozen": torch.randn(ROWS, COLUMNS, generator=generator),
        "step": step,
    }
    for key in ("rows", "columns", "replicated"):
        state[key] *= 1 + 1e-3 * step
    return state


def sharded(state: dict) -> dict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    places = {"rows": Shard(0), "columns": Shard(1), "frozen": Shard(0), "replicated": Replicate()}
    return {
        key: distribute_tensor(value, mesh, [places[key]]) if key in places else value for key, value in state.items()
    }


def zeroed(state: dict) -> dict:
    return {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1 for key, value in state.items()}


# --- what each rank does (this file is its own program) -------------------------------------------


def saves_and_restores(root: pathlib.Path) -> None:
    with CheckpointManager(root / "run", keep=3) as run:
        assert run.restore(sharded(zeroed(whole(0)))) is None
        pending = [run.save_async(step, sharded(whole(step)), {"loss": 1 / step}) for step in range(1, 6)]
        results = [each.result() for each in pending]
        assert [result.kind for result in results if result] == ["full", "full", *["delta"] * 3]
        assert all(result.chunks_referenced > 0 for result in results[2:] if result)
        # The full one stays with its deltas, and the one before it shares nothing with them.
        assert run.steps() == [1, 2, 3, 4, 5]
        found = sharded(zeroed(whole(0)))
        assert run.restore(found) == 5
        assert_same_state(gathered(found), whole(5))
        assert run.restore(found, 3) == 3
        assert_same_state(gathered(found), whole(3))
        run.save(4, sharded(whole(40)))
        assert run.latest() == 4
    with CheckpointManager(root / "run", on_busy="skip") as run:
        found = sharded(zeroed(whole(0)))
        assert run.restore(found) == 4
        assert_same_state(gathered(found), whole(40))
        skipped = [run.save_async(step, sharded(whole(step))).skipped for step in range(6, 10)]
        of_ranks: list = [None, None]
        dist.all_gather_object(of_ranks, skipped)
        assert of_ranks[0] == of_ranks[1]
        assert not skipped[0]


def one_rank_fails(root: pathlib.Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setenv("MILLRACE_TIMEOUT", "soon")
        with pytest.raises(ConfigurationError, match="timeout='soon'"):
            CheckpointManager(root / "run")
    with CheckpointManager(root / "run") as run:
        state = sharded(whole(1))
        run.save(1, state)
        if dist.get_rank() == 1:
            # An object that no checkpoint holds, on this rank alone.
            state["step"] = object
        with pytest.raises(UsageError):
            run.save(2, state)
        assert run.steps() == [1]
        # The states of two steps.
        with pytest.raises(UsageError, match="rank 0 saves step 2, and rank 1 step 3: give the same step"):
            run.save(2 + dist.get_rank(), sharded(whole(2)))
        with pytest.raises(UsageError, match="rank 0 saves step 2, and rank 1 step 3"):
            run.save_async(2 + dist.get_rank(), sharded(whole(2))).result()
        run.save(3, sharded(whole(3)))
        assert run.steps() == [1, 3]
        wrong_argument_of_one_rank(run, is_wrong=dist.get_rank() == 1)
        assert run.restore(sharded(whole(3))) == 3
    for on_busy in ("wait", "skip"):
        an_object_fails_on_one_rank(root / on_busy, on_busy)


def wrong_argument_of_one_rank(run: CheckpointManager, *, is_wrong: bool) -> None:
    """The other rank does not wait for the one that has raised."""
    state = sharded(whole(3))
    with pytest.raises(UsageError, match="step -1"):
        run.save(-1 if is_wrong else 4, state)
    with pytest.raises(UsageError, match="the state is a list"):
        run.save_async(4, [] if is_wrong else state)
    with pytest.raises(UsageError, match="the state is empty"):
        run.restore({} if is_wrong else state)
    with pytest.raises(UsageError, match="keys=3"):
        run.restore(state, keys=3 if is_wrong else None)
    with pytest.raises(UsageError, match="rank 0 restores the newest step, and rank 1 step 1: give the same step"):
        run.restore(state, 1 if is_wrong else None)


def other_rank_ends(root: pathlib.Path) -> None:
    state = sharded(whole(1))
    run = CheckpointManager(root / "run")
    run.save(1, state)
    if dist.get_rank() == 1:
        os._exit(9)
    with pytest.raises(RetryableError, match=r"another rank has ended or does not respond.*: start the job again"):
        run.save(2, state)
    os._exit(0)  # without the barrier, for which the other rank is missing


class Failing:
    """A `Stateful` that fails on one rank alone, in its own way."""

    def __init__(self) -> None:
        self.failing = ""

    def state_dict(self) -> dict:
        class OwnError(Exception):
            """Of a class that no other process can find."""

        if self.failing == "to give":
            raise OwnError("not now")
        return {"value": 1}

    def load_state_dict(self, state: dict) -> None:
        if self.failing == "to take":
            raise ValueError("not this")


def an_object_fails_on_one_rank(root: pathlib.Path, on_busy: Literal["wait", "skip"]) -> None:
    """Before the bytes are written, or after they are read, where no collective of torch's own would notice."""
    member = Failing()
    state = {**sharded(whole(1)), "member": member}
    with CheckpointManager(root, on_busy=on_busy) as run:
        run.save(1, state)
        member.failing = "to give" if dist.get_rank() == 1 else ""
        with pytest.raises(UsageError, match="OwnError"):
            run.save_async(2, state)
        with pytest.raises(UsageError, match="not a number"):
            run.save_async(2, state, {"loss": "high" if dist.get_rank() else 1})
        with pytest.raises(UsageError, match="OwnError"):
            run.restore(state)
        member.failing = "to take" if dist.get_rank() == 1 else ""
        with pytest.raises(StateMismatchError, match="not this"):
            run.restore(state)
        member.failing = ""
        run.save(3, state)
        assert run.restore(state) == 3
        assert run.steps() == [1, 3]


def told_to_end(root: pathlib.Path) -> None:
    with CheckpointManager(root / "run") as run:
        run.watch_preemption()
        for step in range(1000):
            if dist.get_rank() == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if run.preempted(step, sharded(whole(step))):
                break
            time.sleep(0.01)
        assert 3 <= step < 1000
        assert run.latest() == step


def flip_a_bit(run: pathlib.Path, step: int) -> None:
    """In the file of the first rank's chunks; for all ranks."""
    dist.barrier()
    if dist.get_rank() == 0:
        (file,) = (run / f"step-{step:012d}").glob("data-*-0-0.millrace")
        flip_in_the_middle(file)
    dist.barrier()


def warnings_are_errors(root: pathlib.Path) -> None:
    """The first rank warns, and all have to raise it: those that do not would wait for it in their next collective."""
    warnings.simplefilter("error", RuntimeWarning)
    with CheckpointManager(root / "policy", keep="best=loss") as run:
        with pytest.raises(RuntimeWarning, match="'loss' of step 1 is missing"):
            run.save(1, sharded(whole(1)))
        run.save(2, sharded(whole(2)))
    with CheckpointManager(root / "run") as run:
        for step in (1, 2, 3):
            run.save(step, sharded(whole(step)))
        flip_a_bit(root / "run", 2)
        with pytest.raises(RuntimeWarning, match="is damaged"):
            run.save(4, sharded(whole(4)))
        result = run.save(5, sharded(whole(5)))
        assert result.kind == "full"
        flip_a_bit(root / "run", 5)
        with pytest.raises(RuntimeWarning, match="cannot be restored"):
            run.restore(sharded(zeroed(whole(0))), fallback=True)
        assert run.steps() == [1, 2, 3, 5]


def one_step_twice(root: pathlib.Path) -> None:
    with CheckpointManager(root / "run", keep=3) as run:
        for step in (1, 2):
            run.save(step, sharded(whole(step)))
        run.save(2, sharded(whole(20)))
        with pytest.raises(UsageError, match="step 1 is not beyond step 2"):
            run.save(1, sharded(whole(1)))
        found = sharded(zeroed(whole(0)))
        assert run.restore(found) == 2
        assert_same_state(gathered(found), whole(20))
        assert run.steps() == [1, 2]


PROGRAMS = {
    each.__name__: each
    for each in (
        saves_and_restores,
        one_rank_fails,
        other_rank_ends,
        told_to_end,
        warnings_are_errors,
        one_step_twice,
    )
}


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_deltas_of_two_ranks_are_restored_by_any_number_of_ranks(tmp_path: pathlib.Path) -> None:
    ranks.run(__file__, "saves_and_restores", 2, tmp_path)
    with CheckpointManager(tmp_path / "run") as run:
        found = zeroed(whole(0))
        assert run.restore(found) == run.latest() >= 6  # type: ignore[operator]
        assert_same_state(gathered(found), whole(found["step"]))
        # One process continues a run that two ranks have saved.
        assert run.save(20, found).step == 20


@pytest.mark.slow
def test_error_on_one_rank_is_raised_on_all(tmp_path: pathlib.Path) -> None:
    ranks.run(__file__, "one_rank_fails", 2, tmp_path)
    with CheckpointManager(tmp_path / "run") as run:
        assert run.steps() == [1, 3]
        found = zeroed(whole(0))
        assert run.restore(found) == 3
        assert_same_state(gathered(found), whole(3))


@pytest.mark.slow
def test_save_after_the_end_of_another_rank_raises(tmp_path: pathlib.Path) -> None:
    ranks.run(__file__, "other_rank_ends", 2, tmp_path, codes=(0, 9))


@pytest.mark.slow
def test_signal_to_one_rank_saves_the_same_step_on_all(tmp_path: pathlib.Path) -> None:
    ranks.run(__file__, "told_to_end", 2, tmp_path)
    with CheckpointManager(tmp_path / "run") as run:
        found = zeroed(whole(0))
        step = run.restore(found)
        assert step is not None
        assert_same_state(gathered(found), whole(step))


@pytest.mark.slow
def test_warning_raised_by_filter_is_raised_on_all_ranks(tmp_path: pathlib.Path) -> None:
    ranks.run(__file__, "warnings_are_errors", 2, tmp_path)
    with CheckpointManager(tmp_path / "policy") as run:
        assert run.steps() == [2]


@pytest.mark.slow
def test_two_ranks_saving_the_newest_step_again_replace_it(tmp_path: pathlib.Path) -> None:
    ranks.run(__file__, "one_step_twice", 2, tmp_path)
    with CheckpointManager(tmp_path / "run") as run:
        found = zeroed(whole(0))
        assert run.restore(found) == 2
        assert_same_state(gathered(found), whole(20))


if __name__ == "__main__":
    ranks.main(PROGRAMS)
