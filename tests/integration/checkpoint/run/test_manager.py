"""`CheckpointManager`: saves, deltas, retention, restores and errors of one run, on a local disk."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import threading
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.checkpoints import data_file
from tests.support.fork_server import ForkedProcess, torch_server
from tests.support.harms import flip_in_the_middle
from tests.support.savers import no_files_in
from tests.support.states import assert_same_state
from tests.support.waiting import wait_until

from millrace.checkpoint import (
    CheckpointManager,
    CheckpointReader,
    CheckpointWriter,
    KeepBest,
    KeepEvery,
    KeepLast,
)
from millrace.checkpoint.run.claims import Claim
from millrace.checkpoint.run.saving import SaveProgress
from millrace.checkpoint.storage.storage import LocalStorage
from millrace.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DiskFullError,
    MillraceError,
    MissingKeyError,
    OriginUnavailableError,
    RunTakenError,
    StateMismatchError,
    StorageError,
    UsageError,
)
from millrace.events import Event, add_hook


def make_state(seed: int = 0, *, size: int = 300_000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights": {
            "large": torch.randn(size, generator=generator),
            "frozen": torch.randn(size, generator=torch.Generator().manual_seed(99)),
            "small": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        },
        "note": f"seed {seed}",
    }


def change(state: dict[str, Any], by: float = 1e-5) -> None:
    state["weights"]["large"].mul_(1 + by)
    state["weights"]["small"].add_(0.5)
    state["note"] += "."


def empty_like(state: dict[str, Any]) -> dict[str, Any]:
    return {"weights": {key: torch.zeros_like(value) for key, value in state["weights"].items()}, "note": ""}


# --- saving and restoring -------------------------------------------------------------------------


def test_empty_run_has_no_steps(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        state = make_state()
        before = copy.deepcopy(state)
        assert run.restore(state) is None
        assert run.latest() is None
        assert run.steps() == []
        assert_same_state(state, before)
        with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint"):
            run.metadata()
        with pytest.raises(CheckpointNotFoundError, match=r"step 3 in .*: there is none of any step"):
            run.restore(state, 3)


def test_ten_saves_are_deltas_and_each_is_restored_as_it_was(tmp_path: Path) -> None:
    state, saved, results = make_state(), {}, []
    with CheckpointManager(tmp_path / "run") as run:
        for step in range(10, 120, 10):
            results.append(run.save(step, state, {"loss": 1 / step}))
            saved[step] = copy.deepcopy(state)
            change(state)
        assert run.steps() == sorted(saved)
        # Deltas begin when there is a checkpoint that shares nothing with them.
        assert [result.kind for result in results[:3]] == ["full", "full", "delta"]
    full = results[0]
    assert any(result.kind == "delta" for result in results)
    assert all(result.restore_bytes <= 2 * full.restore_bytes for result in results)
    assert results[2].stored_bytes < 0.5 * full.stored_bytes
    assert results[2].chunks_referenced >= 1
    kinds = [result.kind for result in results]
    assert max(len(part) for part in "".join(kind[0] for kind in kinds).split("f")) <= 9
    with CheckpointManager(tmp_path / "run") as run:
        for step, expected in saved.items():
            found = empty_like(expected)
            assert run.restore(found, step) == step
            assert_same_state(found, expected)
        found = empty_like(state)
        assert run.restore(found) == 110
        assert run.metadata().metrics == {"loss": pytest.approx(1 / 110)}
        assert run.metadata(20).step == 20


def test_full_every_one_makes_no_deltas(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path / "run", full_every=1) as run:
        results = [run.save(step, state) for step in range(3)]
    assert [result.kind for result in results] == ["full"] * 3
    assert not any("../" in name for step in range(3) for name in _named_files(tmp_path / "run", step))


def _named_files(run: Path, step: int) -> list[str]:
    from millrace.checkpoint.storage.manifests import read_manifest
    from millrace.checkpoint.storage.storage import open_storage

    manifest = read_manifest(open_storage(run / f"step-{step:012}")).manifest
    return [file.name for file in manifest.files]


def test_delta_after_restart_uses_the_run_on_local_disk(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path / "run", independent=False) as run:
        run.save(1, state)
    change(state)
    with CheckpointManager(tmp_path / "run", independent=False) as run:
        found = empty_like(state)
        run.restore(found)
        result = run.save(2, state)
        assert result.kind == "delta"
        assert run.restore(found) == 2
    assert_same_state(found, state)


def test_base_without_memory_is_read_from_disk(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path / "run", base_memory=0, independent=False) as run:
        run.save(1, state)
        change(state)
        assert run.save(2, state).kind == "delta"
        found = empty_like(state)
        run.restore(found)
    assert_same_state(found, state)


def test_change_after_save_async_is_not_saved(tmp_path: Path) -> None:
    state = make_state(size=3_000_000)
    with CheckpointManager(tmp_path / "run") as run:
        for step in range(4):
            expected = copy.deepcopy(state)
            pending = run.save_async(step, state)
            for value in state["weights"].values():
                value.fill_(step)
            state["note"] = "changed"
            result = pending.result()
            assert result is not None
            assert result.step == step
            found = empty_like(expected)
            assert run.restore(found, step) == step
            assert_same_state(found, expected)


def test_second_save_during_another_is_skipped_or_waits(tmp_path: Path) -> None:
    state, gate = make_state(), threading.Event()
    began = threading.Event()

    def hold(progress: SaveProgress) -> None:
        began.set()
        gate.wait(300)

    with CheckpointManager(tmp_path / "skip", on_busy="skip", on_progress=hold) as run:
        first = run.save_async(1, state)
        began.wait(300)
        second = run.save_async(2, state)
        assert second.skipped
        assert second.done()
        assert second.result() is None
        assert second.exception() is None
        assert "skipped" in repr(second)
        gate.set()
        assert first.result() is not None
        assert run.steps() == [1]
    with CheckpointManager(tmp_path / "wait") as run:
        pending = [run.save_async(step, state) for step in range(3)]
        assert pending[0].done()
        assert pending[1].done()
        run.wait()
        assert run.steps() == [0, 1, 2]


def test_stateful_objects_are_restored_in_place(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 5)).square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    parts = build(0)
    for _ in range(3):
        train(*parts)
    with CheckpointManager(tmp_path / "run") as run:
        run.save(3, dict(zip(("model", "optimizer", "scheduler"), parts, strict=True)))
        expected = [train(*parts) for _ in range(3)]
        fresh = build(1)  # its optimizer has no moments yet
        assert run.restore(dict(zip(("model", "optimizer", "scheduler"), fresh, strict=True))) == 3
        assert [train(*fresh) for _ in range(3)] == expected

        weights = build(2)
        assert run.restore({"model": weights[0]}, keys="model") == 3
        assert run.restore(dict(zip(("model", "optimizer", "scheduler"), weights, strict=True)), keys="model.*") == 3
        assert not weights[1].state_dict()["state"]
        with pytest.raises(UsageError, match="no key of the state matches"):
            run.restore({"model": weights[0]}, keys="weights.*")
        with pytest.raises(MissingKeyError, match="below 'optimizer'"):
            run.restore({"model": weights[0], "optimizer": weights[1].state_dict()})
        other = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        with pytest.raises(StateMismatchError, match="shape"):
            run.restore({"model": other})
        with pytest.raises(StateMismatchError):
            run.restore({"model": torch.nn.Sequential(torch.nn.Linear(5, 4))})


class TrainingState:
    """A model and optimizers behind one `state_dict`."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(5, 2)
        self.optimizers = [torch.optim.AdamW([each], lr=0.1) for each in self.model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        first, *others = (each.state_dict() for each in self.optimizers)
        return {"model": self.model.state_dict(), "first": first, "others": others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, [state["first"], *state["others"]], strict=True):
            optimizer.load_state_dict(values)

    def train(self, factor: float) -> float:
        loss = (factor * self.model(torch.ones(3, 5))).square().sum()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()


def test_restore_of_object_with_new_optimizers_loads_their_moments(tmp_path):
    trained, fresh = TrainingState(0), TrainingState(1)
    for factor in (1.0, 2.0, 3.0):
        trained.train(factor)
    with CheckpointManager(tmp_path) as run:
        run.save(3, {"app": trained})
        assert run.restore({"app": fresh}) == 3
    assert [fresh.train(factor) for factor in (1.0, 2.0)] == [trained.train(factor) for factor in (1.0, 2.0)]


def test_restore_into_shorter_list_raises(tmp_path):
    saved = {"a": [torch.ones(3), torch.ones(2)], "deep": {"b": [torch.ones(1), 5, torch.ones(1)]}}
    with CheckpointManager(tmp_path) as run:
        run.save(1, saved)
        with pytest.raises(MissingKeyError, match=r"1 keys below 'a' that the state does not have: 'a\.1'"):
            run.restore({"a": [torch.zeros(3)], "deep": {"b": [torch.zeros(1), 0, torch.zeros(1)]}})
        with pytest.raises(MissingKeyError, match=r"below 'deep' .*'deep\.b\.2'"):
            run.restore({"a": [torch.zeros(3), torch.zeros(2)], "deep": {"b": [torch.zeros(1), 0]}})
        for empty in ([], None):
            with pytest.raises(MissingKeyError):
                run.restore({"a": empty})
        part = {"a": [torch.zeros(3)]}
        assert run.restore(part, keys="*") == 1
        assert part["a"][0].tolist() == [1.0, 1.0, 1.0]


def test_restore_of_plain_value_into_frozen_mapping_raises(tmp_path):
    with CheckpointManager(tmp_path) as run:
        run.save(1, {"a": {"w": torch.ones(2), "n": 5}})
        with pytest.raises(
            UsageError, match=r"'a\.n' cannot be set in the state \('mappingproxy' object .*: give dicts"
        ):
            run.restore({"a": MappingProxyType({"w": torch.zeros(2), "n": 0})})


class Stubborn:
    """Raises `failure` where its `state_dict()` or `load_state_dict()` is called."""

    def __init__(self, failure: BaseException) -> None:
        self.failure, self.saves = failure, True

    def state_dict(self) -> dict[str, Any]:
        if self.saves:
            return {"w": torch.ones(2)}
        raise self.failure

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise self.failure


@pytest.mark.parametrize("now", [None, 5, "text", [1], torch.ones(2)])
def test_restore_into_object_with_a_value_in_place_of_a_container_names_the_key(tmp_path, now):
    with CheckpointManager(tmp_path / "run") as run:
        run.save(1, {"object": _Holder({"inner": {"a": {"b": torch.ones(3)}}})})
        with pytest.raises(StateMismatchError, match=r"'object\.inner\.a\.b'.* has no place in 'object'"):
            run.restore({"object": _Holder({"inner": now})})


def test_restore_into_lazy_parameter_names_the_key(tmp_path):
    with CheckpointManager(tmp_path / "run") as run:
        run.save(1, {"model": torch.nn.Linear(3, 2)})
        with pytest.raises(StateMismatchError, match=r"'model\.weight' has shape \(2, 3\).* none yet in the state"):
            run.restore({"model": torch.nn.LazyLinear(2)})


class _Holder:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_metric_beyond_all_floats_does_not_block_the_run(tmp_path):
    run = tmp_path / "run"
    record = {"run": {"metrics": {"loss": 0.5, "count": 10**400}}}
    writer = CheckpointWriter(run / "step-000000000001", sync_files=False, user_metadata=record)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    with CheckpointManager(run, keep=1) as manager:
        assert manager.metadata(1).metrics == {"loss": 0.5}
        manager.save(2, {"a": torch.zeros(3)})
        assert manager.steps() == [1, 2]


@pytest.mark.parametrize("kind", [TypeError, AttributeError, IndexError, AssertionError, KeyError, ZeroDivisionError])
def test_restore_into_object_that_raises_names_the_object(tmp_path, kind):
    failure = kind("inside")
    with CheckpointManager(tmp_path) as run:
        run.save(1, {"model": Stubborn(failure)})
        with pytest.raises(StateMismatchError, match=f"'model' does not accept .*{kind.__name__}: .*inside") as caught:
            run.restore({"model": Stubborn(failure)})
        assert caught.value.__cause__ is failure


def test_recursion_inside_state_dict_names_the_object(tmp_path):
    model = Stubborn(RecursionError())
    with CheckpointManager(tmp_path) as run:
        run.save(1, {"model": model})
        model.saves = False
        for call in (lambda: run.save(2, {"model": model}), lambda: run.restore({"model": model})):
            with pytest.raises(
                UsageError, match=r"'model' is a Stubborn whose state_dict\(\) exceeds the recursion limit"
            ):
                call()


def test_save_into_removed_directory_names_the_claim(tmp_path):
    place = tmp_path / "run"
    with CheckpointManager(place) as run:
        run.save(1, make_state(size=10))
        shutil.rmtree(place)
        with pytest.raises(
            RunTakenError, match=r"run/writer-000000000001.json, the claim of this process, was removed"
        ):
            run.save(2, make_state(size=10))
        place.write_bytes(b"")
        with pytest.raises(RunTakenError, match="the claim of this process, was removed or replaced"):
            run.save(2, make_state(size=10))


# --- damage, leftovers, retention ---------------------------------------------------------------------


def damage(run: Path, step: int) -> None:
    flip_in_the_middle(data_file(run / f"step-{step:012}"))


def test_damaged_newest_checkpoint_raises_or_is_skipped(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path / "run", full_every=1) as run:
        run.save(1, state)
        expected = copy.deepcopy(state)
        change(state)
        run.save(2, state)
        damage(tmp_path / "run", 2)
        found = empty_like(state)
        with pytest.raises(CorruptCheckpointError, match="fallback=True"):
            run.restore(found)
        with pytest.warns(RuntimeWarning, match="step-000000000002 .* cannot be restored"):
            assert run.restore(found, fallback=True) == 1
        assert_same_state(found, expected)
        # Later saves are the newest, although their step existed before.
        run.save(2, found)
        assert run.steps() == [1, 2]
        again = empty_like(state)
        assert run.restore(again) == 2
        assert_same_state(again, expected)
        damage(tmp_path / "run", 1)
        with pytest.raises(CorruptCheckpointError):
            run.restore(again, 1, fallback=True)


@pytest.mark.parametrize("pattern", ["data-*", "manifest.*"])
def test_newest_checkpoint_that_the_disk_cannot_read_raises_or_is_skipped(tmp_path: Path, pattern: str) -> None:
    state = make_state(size=3000)
    with CheckpointManager(tmp_path, full_every=1) as run:
        run.save(1, state)
        expected = copy.deepcopy(state)
        change(state)
        run.save(2, state)
        (file,) = (tmp_path / "step-000000000002").glob(pattern)
        file.unlink()
        file.symlink_to(file.name)
        with pytest.raises(StorageError, match=r"symbolic links.*fallback=True"):
            run.restore(state)
        with pytest.warns(RuntimeWarning, match="step-000000000002 .* cannot be restored"):
            assert run.restore(state, fallback=True) == 1
        assert_same_state(state, expected)
        assert run.save(3, state).kind == "full"


@pytest.mark.parametrize("error", [OriginUnavailableError("no answer"), DiskFullError("no room")])
def test_restore_from_a_storage_that_fails_raises_with_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: MillraceError
) -> None:
    state = make_state(size=3000)
    with CheckpointManager(tmp_path) as run:
        run.save(1, state)
        run.save(2, state)
        monkeypatch.setattr(LocalStorage, "read", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)) as caught:
            run.restore(state, fallback=True)
        assert caught.value is error


def test_incomplete_checkpoint_is_ignored_by_restore_and_the_next_save(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path / "run") as run:
        run.save(1, state)
        dead = tmp_path / "run" / "step-000000000002"
        dead.mkdir()
        (dead / "data-0123456789abcdef-0-0.millrace").write_bytes(b"half")
        (tmp_path / "run" / "notes.txt").write_text("of another program")
        assert run.steps() == [1]
        assert run.latest() == 1
        assert run.restore(empty_like(state)) == 1
        run.save(2, state)
        assert run.steps() == [1, 2]
    assert (tmp_path / "run" / "notes.txt").exists()


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (2, {7, 8}),
        ("last=1,every=4", {0, 4, 8}),
        (KeepLast(1) | KeepBest("loss", n=2), {0, 1, 8}),
        (KeepEvery(3), {0, 3, 6, 8}),
    ],
)
def test_retention_keeps_the_selected_steps(tmp_path: Path, keep: Any, left: set[int]) -> None:
    state, saved = make_state(), {}
    with CheckpointManager(tmp_path / "run", keep=keep) as run:
        for step in range(9):
            run.save(step, state, {"loss": float(step)})
            saved[step] = copy.deepcopy(state)
            change(state)
        # With the newest one stays the full one that its deltas build on.
        anchor = {int(name.split("-")[1]) for name in [run.metadata().full] if name is not None}
        assert anchor == {1}
        # Of the two full saves with which a run begins the first one shares nothing with the newest.
        left = left | anchor | {0}
        assert set(run.steps()) == left
        for step in left:
            found = empty_like(state)
            assert run.restore(found, step) == step
            assert_same_state(found, saved[step])
    # A checkpoint that another one needs keeps its files, and nothing else stays.
    directories = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
    complete = {path.parent.name for path in (tmp_path / "run").glob("step-*/manifest.millrace")}
    assert complete == {f"step-{step:012}" for step in left}
    needed = {name.split("/")[1] for step in left for name in _named_files(tmp_path / "run", step) if "/" in name}
    assert directories == complete | needed


def test_prune_dry_run_reports_the_removals(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path / "run", full_every=1) as run:
        for step in range(4):
            run.save(step, state)
        report = run.prune(2, dry_run=True)
        assert sorted(report.removed) == ["step-000000000000", "step-000000000001"]
        assert run.steps() == [0, 1, 2, 3]
        assert run.prune(2).freed_bytes == report.freed_bytes > 0
        assert run.steps() == [2, 3]


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, 10**12, pytest.param(10**5000, id="huge"), None])
def test_save_with_invalid_step_raises(tmp_path: Path, step: Any) -> None:
    with CheckpointManager(tmp_path / "run") as run, pytest.raises(UsageError, match="whole number"):
        run.save(step, {"x": torch.zeros(3)})


@pytest.mark.parametrize(
    "options", [{"full_every": 0}, {"full_every": True}, {"on_busy": "queue"}, {"keep": 0}, {"keep": "newest"}]
)
def test_manager_with_invalid_options_raises(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        CheckpointManager(tmp_path / "run", **options)


def test_error_of_background_save_is_raised_once_by_the_next_call(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state).result()
        with no_files_in(run):
            pending = run.save_async(2, state)
            assert isinstance(pending.exception(), DiskFullError)
            with pytest.raises(StorageError, match="no room"):
                pending.result()
            unseen = run.save_async(2, state)
            wait_until(unseen.done)
        with pytest.raises(StorageError, match="no room"):
            run.wait()
        run.wait()
        change(state)
        assert run.save(3, state).step == 3
        assert run.steps() == [1, 3]
        found = empty_like(state)
        run.restore(found)
    assert_same_state(found, state)


CALLS = {
    "wait": lambda run, pending: run.wait(),
    "save": lambda run, pending: run.save(9, {"x": torch.zeros(3)}),
    "restore": lambda run, pending: run.restore({"x": torch.zeros(3)}),
    "prune": lambda run, pending: run.prune(1),
    "close": lambda run, pending: run.close(),
    "result": lambda run, pending: pending.result(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("phase", ["writing", "uploading", "done"])
def test_call_that_waits_inside_on_progress_raises(tmp_path: Path, call: Any, phase: str) -> None:
    submitted, pending, raised = threading.Event(), [], []

    def on_progress(progress: SaveProgress) -> None:
        if progress.phase == phase and progress.step == 1:
            assert submitted.wait(300)
            assert run.steps() in ([], [1])
            try:
                call(run, pending[0])
            except UsageError as error:
                raised.append(str(error))

    local = tmp_path / "near" if phase == "uploading" else None
    with CheckpointManager(tmp_path / "run", on_progress=on_progress, local=local) as run:
        pending.append(run.save_async(1, {"x": torch.zeros(3)}))
        submitted.set()
        pending[0].result(300)
        assert run.save(2, {"x": torch.ones(3)}).step == 2
    assert raised
    assert set(raised) == {
        "on_progress cannot save, restore, prune, close, or wait for a save: do that in the training loop"
    }


def test_closed_manager_and_invalid_metrics_raise(tmp_path: Path) -> None:
    run = CheckpointManager(tmp_path / "run")
    with pytest.raises(UsageError, match="not a number"):
        run.save(1, {"x": torch.zeros(3)}, {"loss": "low"})  # type: ignore[dict-item]
    run.close()
    run.close()
    with pytest.raises(UsageError, match="closed"):
        run.save(1, {"x": torch.zeros(3)})


def test_superseded_manager_raises_at_its_next_save(tmp_path: Path) -> None:
    state = make_state()
    old = CheckpointManager(tmp_path / "run")
    old.save(1, state)
    new = CheckpointManager(tmp_path / "run")
    new.save(2, state)
    with pytest.raises(RunTakenError):
        old.save(3, state)
    new.save(3, state)
    assert new.steps() == [1, 2, 3]
    old.close()
    new.close()


def test_new_job_in_a_used_run_is_refused(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path / "run") as run:
        run.save(100, state)
    with CheckpointManager(tmp_path / "run") as run:
        with pytest.raises(UsageError, match=r"step 10 is not beyond step 100.*restore a checkpoint first"):
            run.save(10, state)
        assert run.steps() == [100]
        assert not list((tmp_path / "run").glob("step-000000000010*"))
        run.save(101, state)
    with CheckpointManager(tmp_path / "run", rewind=True) as run:
        run.save(10, state)
        assert run.latest() == 10


# --- processes ----------------------------------------------------------------------------------------

HOLDING = """
import sys, torch
from millrace.checkpoint import CheckpointManager
run = CheckpointManager(sys.argv[1], keep=2)
for step in (1, 2, 3):
    run.save(step, {"x": torch.full((1000,), float(step))})
    print("saved", flush=True)
    sys.stdin.readline()
run.close()
"""


@pytest.mark.slow
def test_second_process_on_a_run_raises_run_taken_and_damages_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Claim.take.__func__.__kwdefaults__, "wait_seconds", 0.1)
    log = tmp_path / "log"
    with ForkedProcess(torch_server(), HOLDING, str(tmp_path / "run"), log=log, pipes=True) as child:
        assert child.stdout.readline() == b"saved\n", log.read_text()
        with CheckpointManager(tmp_path / "run", keep=1) as run:
            for step in (2, 9):
                with pytest.raises(RunTakenError, match=f"pid {child.pid} "):
                    run.save(step, {"x": torch.zeros(1000)})
            state = {"x": torch.zeros(1000)}
            assert run.restore(state) == 1
            # The first one has noticed nothing.
            child.stdin.write(b"\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"saved\n"
            assert run.steps() == [1, 2]
            child.stdin.write(b"\n\n")
            assert child.output() == "saved\n"
            assert run.restore(state) == 3
            assert torch.equal(state["x"], torch.full((1000,), 3.0))
            assert run.save(4, state).step == 4


PREEMPTED = """
import sys, time, torch
from millrace.checkpoint import CheckpointManager
state = {"x": torch.zeros(1000), "step": 0}
run = CheckpointManager(sys.argv[1])
run.watch_preemption()
print("ready", flush=True)
for step in range(10_000):
    state["x"] += 1
    state["step"] = step
    if run.preempted(step, state):
        break
    time.sleep(0.01)
run.close()
print("left", step, flush=True)
"""


@pytest.mark.slow
def test_sigterm_saves_the_step_that_was_done(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ForkedProcess(torch_server(), PREEMPTED, str(tmp_path / "run"), log=log, pipes=True) as child:
        assert child.stdout.readline() == b"ready\n", log.read_text()
        os.kill(child.pid, signal.SIGTERM)
        word, step = child.output().split()
    assert word == "left"
    state = {"x": torch.zeros(1000), "step": -1}
    with CheckpointManager(tmp_path / "run") as run:
        assert run.restore(state) == int(step)
    assert state["step"] == int(step)
    assert torch.equal(state["x"], torch.full((1000,), int(step) + 1.0))


def test_preemption_after_an_unseen_failure_still_saves(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path / "run") as run:
        run.watch_preemption()
        run.save_async(1, {**state, "handler": object})
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.warns(RuntimeWarning, match="an earlier save failed"):
            assert run.preempted(2, state)
        assert run.steps() == [2]


def test_preemption_with_warnings_as_errors_still_saves(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path / "run") as run:
        run.watch_preemption()
        run.save_async(1, {**state, "handler": object})
        os.kill(os.getpid(), signal.SIGTERM)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("error")
            assert run.preempted(2, state)
        assert ["an earlier save failed" in str(each.message) for each in caught] == [True]
        assert run.steps() == [2]


def test_signal_while_a_lock_of_a_hook_is_held_does_not_block_the_handler(tmp_path: Path) -> None:
    lock, reported = threading.Lock(), threading.Event()
    acquired = []

    def hook(event: Event) -> None:
        if event.name == "run.preempted":
            acquired.append(lock.acquire(timeout=300))
            reported.set()

    remove = add_hook(hook)
    try:
        with CheckpointManager(tmp_path / "run") as run:
            run.watch_preemption()
            with lock:
                os.kill(os.getpid(), signal.SIGTERM)
            assert reported.wait(300)
            assert acquired == [True]
            assert run.preempted(1, make_state())
    finally:
        remove()


KILLED = """
import sys, torch
from millrace.checkpoint import CheckpointManager
run = CheckpointManager(sys.argv[1], keep=3, full_every=4)
state = {"x": torch.zeros(2_000_000), "step": -1}
first = (run.restore(state) if run.latest() is not None else -1) + 1
for step in range(first, first + 1000):
    state["x"] += torch.arange(2_000_000) % 7 == step % 7
    state["step"] = step
    run.save_async(step, state)
    print(step, flush=True)
"""


def test_kill_9_in_the_middle_of_saves_and_prunes_loses_nothing_that_is_kept(tmp_path: Path) -> None:
    """Each child is killed in another phase; the next one continues from the newest checkpoint."""
    expected = torch.zeros(2_000_000)
    reached = -1
    for number in range(0, 8, 2):
        log = tmp_path / "log"
        child = ForkedProcess(torch_server(), KILLED, str(tmp_path / "run"), log=log, pipes=True)
        announced = [int(child.stdout.readline() or log.read_text()) for _ in range(2 + number % 3)]
        assert announced[0] >= reached  # nothing that was durable is lost
        timer = threading.Timer(0.01 * number, os.kill, (child.pid, signal.SIGKILL))
        timer.start()
        rest = [int(line) for line in child.stdout.read().split()]
        timer.join()
        child.kill()
        announced += rest
        state = {"x": torch.ones(2_000_000), "step": -2}
        with CheckpointManager(tmp_path / "run") as run:
            newest = run.restore(state)
            assert newest is not None
            # At most the one that was in flight is missing; the next one may be saved and not announced yet.
            assert announced[-1] - 1 <= newest <= announced[-1] + 1
            for step in run.steps():
                kept = {"x": torch.ones(2_000_000), "step": -2}
                assert run.restore(kept, step) == step
                assert kept["step"] == step
        expected.zero_()
        for step in range(newest + 1):
            expected += torch.arange(2_000_000) % 7 == step % 7
        assert state["step"] == newest
        assert torch.equal(state["x"], expected)
        reached = newest


DYING = """
import os, sys, torch
from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.writing.rank_writer import RankWriter
run = CheckpointManager(sys.argv[1])
run.save(1, {"x": torch.zeros(100_000)})
RankWriter.finish_save = lambda *_: os._exit(9)
run.save(2, {"x": torch.randn(100_000)})
"""


@pytest.mark.slow
def test_leftovers_of_dead_save_are_removed_by_the_next_save(tmp_path: Path) -> None:
    """Also with a policy that keeps every checkpoint."""
    with ForkedProcess(torch_server(), DYING, str(tmp_path / "run"), log=tmp_path / "log", pipes=True) as dying:
        dying.output(code=9)
    left = tmp_path / "run" / "step-000000000002"
    assert list(left.glob("data-*"))
    with CheckpointManager(tmp_path / "run") as run:
        run.save(3, {"x": torch.zeros(100_000)})
        assert run.steps() == [1, 3]
    assert not left.exists()


def test_checkpoint_reader_reads_a_delta_of_a_manager(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = make_state()
    with CheckpointManager(tmp_path / "run", independent=False) as run:
        run.save(1, state)
        change(state)
        assert run.save(2, state).kind == "delta"
    found = empty_like(state)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, storage_reader=CheckpointReader(tmp_path / "run" / "step-000000000002"))
    assert_same_state(found, state)


def test_save_below_a_file_raises_a_millrace_error(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    (tmp_path / "file").write_text("no directory")
    with CheckpointManager(tmp_path / "file" / "run") as run, pytest.raises(MillraceError):
        run.save(1, {"x": torch.zeros(3)})
