"""A `CheckpointManager` with wrong arguments, changed objects and failing states: its saves, restores and errors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.interrupts import interrupted_inside
from tests.support.savers import savers_with
from tests.support.waiting import wait_until

from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.run.restoring import Restorer
from millrace.checkpoint.run.run_layout import checkpoint_name
from millrace.checkpoint.run.saving import SaveProgress, wait_for
from millrace.checkpoint.run.tiers import run_directory
from millrace.errors import (
    CorruptCheckpointError,
    MissingKeyError,
    StateMismatchError,
    UnsupportedObjectError,
    UsageError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def weights(value: float, size: int = 5000) -> dict[str, Any]:
    return {"w": torch.full((size,), float(value)), "note": value}


def restored(url: Path, step: int | None = None) -> float:
    """The one value that a state of `weights` was restored with."""
    state = weights(0)
    with CheckpointManager(url) as run:
        assert run.restore(state, step) is not None
    assert torch.equal(state["w"], torch.full_like(state["w"], state["note"]))
    return float(state["note"])


def test_restore_next_to_a_job_that_prunes_loads_a_newer_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checkpoints that the restore has found are removed before it reads the first one."""
    load, names = Restorer._load, []

    def load_late(self: Restorer, name: str, *arguments: Any) -> None:
        if not names:
            for step in range(3, 9):
                job.save(step, weights(step))
        names.append(name)
        load(self, name, *arguments)

    monkeypatch.setattr(Restorer, "_load", load_late)
    state = weights(0)
    with CheckpointManager(tmp_path, keep=1, full_every=2) as job, CheckpointManager(tmp_path) as run:
        for step in (1, 2):
            job.save(step, weights(step))
        with pytest.warns(RuntimeWarning, match="trying step 8"):
            assert run.restore(state) == 8
    assert state["note"] == 8
    assert names == [checkpoint_name(2), checkpoint_name(8)]


def test_first_parts_of_a_claim_and_a_manifest_do_not_block_the_run(tmp_path: Path) -> None:
    """A conditional write that is killed leaves them over files and on sftp."""
    url, options = "dir://runs/run", {"target_protocol": "file", "path": str(tmp_path)}
    directory = tmp_path / "runs" / "run"
    claim, manifest = directory / "writer-000000000001.json", directory / checkpoint_name(2) / "manifest.millrace"
    directory.mkdir(parents=True)
    claim.write_bytes(b'{"pro')
    with CheckpointManager(url, target_options=options) as run:
        run.save(1, weights(1))
        run.save(2, weights(2))
    assert not claim.exists()
    manifest.write_bytes(manifest.read_bytes()[:5])
    state = weights(0)
    with CheckpointManager(url, target_options=options) as run:
        with pytest.raises(CorruptCheckpointError):
            run.restore(state)
        with pytest.warns(RuntimeWarning, match="trying step 1"):
            assert run.restore(state, fallback=True) == 1
        run.save(2, weights(3))
        assert run.restore(state) == 2
    assert state["note"] == 3


# --- preemption -----------------------------------------------------------------------------------


def test_repeated_step_after_restore_is_saved_on_preemption(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as run:
        run.save(5, weights(5))
        run.save(10, weights(10))
        run.restore(weights(0), step=5)
        run.watch_preemption()
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.preempted(10, weights(77))
    assert restored(tmp_path) == 77


def test_unrestored_state_is_saved_on_preemption(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as run:
        run.save(5, weights(5))
        with pytest.raises(StateMismatchError):
            run.restore(weights(0, size=3))
        run.watch_preemption()
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.preempted(5, weights(6))
    assert restored(tmp_path) == 6


def test_signal_without_a_free_thread_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of threads or processes the loop must still save once more."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with CheckpointManager(tmp_path) as run:
        run.watch_preemption()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            os.kill(os.getpid(), signal.SIGTERM)
        assert run.preempted(5, weights(5))
    assert restored(tmp_path) == 5


def test_state_is_durable_on_preemption_while_an_upload_waits_for_the_origin(tmp_path: Path) -> None:
    """The grace period may end before the origin responds."""
    waits = f"""
import os, time
from millrace.checkpoint.run import uploading
copy = uploading.copy_files
def wait(*arguments, **options):
    while not os.path.exists({str(tmp_path / "responds")!r}):
        time.sleep(0.01)
    copy(*arguments, **options)
uploading.copy_files = wait
"""
    near = tmp_path / "near" / run_directory(tmp_path / "run")
    found: list[bool] = []

    def respond() -> None:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: (near / checkpoint_name(2) / "manifest.millrace").exists(), seconds=100)
        found.append((near / checkpoint_name(2) / "manifest.millrace").exists())
        (tmp_path / "responds").touch()

    with savers_with(waits), CheckpointManager(tmp_path / "run", local=tmp_path / "near") as run:
        assert run.save_async(1, weights(1)).near.exception() is None
        run.watch_preemption()
        os.kill(os.getpid(), signal.SIGTERM)
        origin = threading.Thread(target=respond)
        origin.start()
        assert run.preempted(2, weights(2))
        origin.join()
        assert found == [True]
    assert restored(tmp_path / "run") == 2


_DIES_IN = {
    # The upload of the first save is in flight, so that the saver saves the last one, too.
    "save": """
import os, signal
from millrace.checkpoint.run import engine, uploading
uploading.copy_files = lambda *arguments, **options: signal.pause()
save = engine.SaveEngine.save
def killed(self, request, *arguments):
    if request.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return save(self, request, *arguments)
engine.SaveEngine.save = killed
""",
    "upload": """
import os, signal
from millrace.checkpoint.run import uploading
def killed(*arguments, **options):
    if arguments[0].url.endswith("step-000000000002"):
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
uploading.copy_files = killed
""",
}


@pytest.mark.parametrize("part", _DIES_IN)
def test_last_save_whose_saver_dies_is_repeated_on_preemption(tmp_path: Path, part: str) -> None:
    with savers_with(_DIES_IN[part]), CheckpointManager(tmp_path / "run", local=tmp_path / "near") as run:
        if part == "save":
            assert run.save_async(1, weights(1)).near.exception() is None
        else:
            assert run.save_async(2, weights(1)).near.exception() is None
        run.watch_preemption(grace_seconds=300)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.warns(RuntimeWarning, match="the saver process"):
            assert run.preempted(2, weights(2))
    assert restored(tmp_path / "run") == 2


# --- interrupts -----------------------------------------------------------------------------------


def test_run_stays_claimed_during_a_save_after_interrupted_close(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()
    released: list[bool] = []

    def hold(progress: SaveProgress) -> None:
        started.set()
        go_on.wait(120)

    def look() -> None:
        time.sleep(0.3)  # in which a wrong `close` would release it
        record = json.loads(max(tmp_path.glob("writer-*.json")).read_bytes())
        released.append(record["released"])
        go_on.set()

    run = CheckpointManager(tmp_path, on_progress=hold)
    pending = run.save_async(1, weights(1))
    assert started.wait(120)
    with pytest.raises(KeyboardInterrupt):
        interrupted_inside(wait_for, run.close, then=look)
    assert released == [False]
    assert pending.result() is not None
    assert restored(tmp_path) == 1


def test_copy_of_a_save_that_was_interrupted_before_it_began_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with CheckpointManager(tmp_path) as run:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(KeyboardInterrupt):
                run.save(1, weights(1))
        assert len(run._stager._free) == 1
        run.save(1, weights(2))
    assert restored(tmp_path) == 2


# --- restoring what does not quite fit --------------------------------------------------------------


def test_numbered_keys_that_only_the_checkpoint_has_stay_numbers(tmp_path: Path) -> None:
    def scheduler(milestones: list[int]) -> Any:
        parameters = [torch.nn.Parameter(torch.zeros(1))]
        return torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(parameters, lr=1.0), milestones)

    with CheckpointManager(tmp_path) as run:
        run.save(1, {"scheduler": scheduler([2, 5])})
        fresh = scheduler([2])
        run.restore({"scheduler": fresh})
    assert fresh.milestones == {2: 1, 5: 1}


def test_pattern_without_matches_is_reported_next_to_a_matching_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as run:
        run.save(1, weights(1))
        with pytest.raises(UsageError, match="'optimzer"):
            run.restore(weights(0), keys=["w", "optimzer.*"])


def test_optimizer_is_restored_to_before_its_first_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path) as run:
        run.save(0, state)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        run.save(1, state)
        run.restore(state, step=0, keys="optimizer.param_groups.*")
        assert len(optimizer.state) == 2  # state that was not requested stays
        run.restore(state, step=0)
        assert not optimizer.state
        run.restore(state, step=1)
        assert len(optimizer.state) == 2


def test_key_that_begins_with_another_key_is_separate(tmp_path: Path) -> None:
    model, average = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with CheckpointManager(tmp_path) as run:
        run.save(1, {"model": model, "model.average": average})
        fresh = torch.nn.Linear(2, 2)
        assert run.restore({"model": fresh}) == 1
    assert torch.equal(fresh.weight, model.weight)


def test_missing_keys_raise_with_a_next_step_of_the_manager(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as run:
        run.save(1, weights(1))
        with pytest.raises(MissingKeyError, match="keys=") as failure:
            run.restore({**weights(0), "more": torch.zeros(2)})
    assert failure.value.keys == ("more",)
    assert "allow_partial_load" not in str(failure.value)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_step_may_be_any_integer_type(tmp_path: Path, step: Any) -> None:
    with CheckpointManager(tmp_path) as run:
        assert run.save(step, weights(1)).step == 3
        assert run.steps() == [3]


@pytest.mark.parametrize("step", [torch.tensor(3.0), torch.tensor([1, 2]), np.float64(3), np.bool_(True)])
def test_step_that_is_not_an_integer_raises(tmp_path: Path, step: Any) -> None:
    with CheckpointManager(tmp_path) as run, pytest.raises(UsageError, match="whole number"):
        run.save(step, weights(1))


def test_tilde_in_path_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("~/run", local=Path("~/near")) as run:
        run.save(1, weights(1))
    assert restored(tmp_path / "run") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["near", "run"]
    assert run_directory("~/run") == run_directory(tmp_path / "run")


@pytest.mark.parametrize("metrics", [{"loss": 10**400}, [("loss", 1)], {"loss": torch.zeros(2)}, {"loss": "low"}])
def test_metrics_that_are_not_numbers_raise(tmp_path: Path, metrics: Any) -> None:
    with CheckpointManager(tmp_path) as run, pytest.raises(UsageError, match="number"):
        run.save(1, weights(1), metrics)


def test_state_that_is_not_a_dict_raises(tmp_path: Path) -> None:
    state: Any = torch.nn.Linear(2, 2)
    with CheckpointManager(tmp_path) as run:
        with pytest.raises(UsageError, match="a Linear"):
            run.save(1, state)
        with pytest.raises(UsageError, match="a Linear"):
            run.restore(state)


def test_sparse_tensor_raises_with_its_key(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as run, pytest.raises(UnsupportedObjectError, match="'sparse'"):
        run.save(1, {"sparse": torch.eye(3).to_sparse()})


# --- arguments of a save and of a restore ---------------------------------------------------------


@pytest.mark.parametrize("user", ["text", [1], 5, {"a": object()}, {"a": np.float32(1)}])
def test_user_values_that_cannot_be_stored_are_refused_before_the_save_begins(tmp_path: Path, user: Any) -> None:
    with CheckpointManager(tmp_path) as run:
        with pytest.raises((UsageError, UnsupportedObjectError), match="user="):
            run.save_async(1, weights(1), user=user)
        assert run.save(1, weights(1)).step == 1


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"inner": value}
    return value


@pytest.mark.parametrize("depth", [320, 325, 330, 400, 1000, None])
def test_user_values_nested_too_deeply_are_refused(tmp_path: Path, depth: int | None) -> None:
    user = nested(depth or 0)
    if depth is None:
        user["self"] = user
    with CheckpointManager(tmp_path) as run, pytest.raises(UsageError, match="contains itself"):
        run.save(1, weights(1), user=user)


def test_user_values_nested_in_two_hundred_dicts_are_restored(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as run:
        run.save(1, weights(1), user=nested(200))
        assert run.restore(weights(0)) == 1
        assert run.metadata().user == nested(200)


def test_user_values_changed_after_an_asynchronous_save_are_stored_as_they_were(tmp_path: Path) -> None:
    user: dict[str, Any] = {"epoch": 1, "seen": [1, 2]}
    held, release = threading.Event(), threading.Event()

    def hold(_: SaveProgress) -> None:
        held.set()
        assert release.wait(300)

    with CheckpointManager(tmp_path, on_progress=hold) as run:
        pending = run.save_async(1, weights(1), user=user)
        assert held.wait(300)
        user["epoch"] = 2
        user["seen"].append(3)
        release.set()
        pending.result()
        assert run.metadata().user == {"epoch": 1, "seen": [1, 2]}


@pytest.mark.parametrize("keys", [5, [5], b"w", ["w", None]])
def test_keys_that_are_not_text_are_refused(tmp_path: Path, keys: Any) -> None:
    with CheckpointManager(tmp_path) as run:
        run.save(1, weights(1))
        with pytest.raises(UsageError, match="keys="):
            run.restore(weights(0), keys=keys)
