"""`CheckpointManager` where retention could lose data: lower steps, misspelt metrics, damage to files that others need."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import data_file
from tests.support.harms import flip_in_the_middle

from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.run.retention import KeepLast
from millrace.checkpoint.run.run_layout import checkpoint_name
from millrace.checkpoint.storage.storage import LocalStorage
from millrace.cli import main
from millrace.errors import (
    ConfigurationError,
    CorruptCheckpointError,
    DeniedError,
    MillraceError,
    StateMismatchError,
    UsageError,
)
from millrace.events import Event
from millrace.origin import open_origin
from millrace.testing.s3 import S3Server

DOCS = Path(__file__).parents[4] / "docs" / "how-to" / "manage-checkpoints.md"


def state_of(seed: int, size: int = 20_000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(99)
    return {"w": torch.randn(size, generator=generator) * (1 + 1e-5 * seed), "n": seed}


def restored(place: Path) -> int | None:
    """The step that a restore with `fallback` finds, its values checked; None where there is nothing to restore."""
    state = state_of(0)
    with warnings.catch_warnings(), CheckpointManager(place) as run:
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            step = run.restore(state, fallback=True)
        except CorruptCheckpointError:
            return None
    assert torch.equal(state["w"], state_of(state["n"])["w"])
    return step


# --- lower steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 299])
def test_save_of_lower_step_by_the_same_manager_is_refused(tmp_path: Path, step: int) -> None:
    with CheckpointManager(tmp_path, keep=3) as run:
        for number in (100, 200, 300):
            run.save(number, state_of(number))
        with pytest.raises(UsageError, match=rf"step {step} is not beyond step 300.*restore a checkpoint first"):
            run.save(step, state_of(1))
        with pytest.raises(UsageError, match="not beyond"):
            run.save_async(step, state_of(1)).result()
        assert run.steps() == [100, 200, 300]
        run.save(301, state_of(301))


@pytest.mark.parametrize("keep", [1, 3, None])
def test_newest_step_saved_again_replaces_the_earlier_save(tmp_path: Path, keep: int | None) -> None:
    with CheckpointManager(tmp_path, keep=keep) as run:
        for number in (100, 200, 300):
            run.save(number, state_of(number))
        before = run.steps()
        run.save(300, state_of(301), user={"final": True})
        assert (run.steps()[-1], run.metadata().user) == (300, {"final": True})
        if keep is None:
            assert run.steps() == before
        run.save_async(300, state_of(302)).result()
        with pytest.raises(UsageError, match="step 200 is not beyond step 300"):
            run.save(200, state_of(200))
        run.save(400, state_of(400))
        with pytest.raises(UsageError, match="step 300 is not beyond step 400"):
            run.save(300, state_of(300))
    state = state_of(0)
    with CheckpointManager(tmp_path) as run:
        run.restore(state, 300) if keep != 1 else run.restore(state)
    assert state["n"] == (302 if keep != 1 else 400)
    assert torch.equal(state["w"], state_of(state["n"])["w"])


def test_step_saved_by_another_manager_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as run:
        run.save(100, state_of(100))
    with CheckpointManager(tmp_path) as run:
        with pytest.raises(UsageError, match=r"step 100 is already saved in .*: restore a checkpoint first"):
            run.save(100, state_of(1))
        run.save(101, state_of(101))
        run.save(101, state_of(102))
        assert run.steps() == [100, 101]


def test_step_of_another_manager_after_failed_save_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as run:
        run.save(100, state_of(100))
    with CheckpointManager(tmp_path) as run:
        with pytest.raises(MillraceError):
            run.save(101, {"w": torch.nn.UninitializedParameter()})
        with pytest.raises(UsageError, match="step 100 is already saved"):
            run.save(100, state_of(1))


def test_restore_allows_one_save_of_a_lower_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=3) as run:
        for number in (100, 200, 300):
            run.save(number, state_of(number))
        run.restore(state_of(0), 100)
        with pytest.raises(UsageError, match="number"):
            run.save(150, state_of(150), {"loss": "low"})  # type: ignore[dict-item]
        run.save(150, state_of(150))
        # The restored checkpoint stays: it shares nothing with later saves.
        assert run.steps() == [100, 150]
        with pytest.raises(UsageError, match="step 120 is not beyond step 150"):
            run.save(120, state_of(120))
        run.save(200, state_of(201))
        assert run.steps() == [100, 150, 200]


def test_failed_restore_allows_no_save_of_a_lower_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as run:
        run.save(100, state_of(100))
        with pytest.raises(StateMismatchError):
            run.restore(state_of(0, size=3))
        with pytest.raises(UsageError, match="not beyond"):
            run.save(1, state_of(1))


def test_rewind_allows_lower_steps_and_keeps_the_last_saves(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=3, rewind=True) as run:
        for number in (100, 200, 300, 1):
            run.save(number, state_of(number))
        assert run.latest() == 1
    kept = {path.parent.name for path in tmp_path.glob("step-*/manifest.millrace")}
    assert {"step-000000000200", "step-000000000300", "step-000000000001-r1"} <= kept


# --- warnings that a filter raises ---------------------------------------------------------------------------


def test_raised_damage_warning_fails_one_save_only(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as run:
        for step in (1, 2, 3):
            run.save(step, state_of(step))
        flip_in_the_middle(data_file(tmp_path / checkpoint_name(2)))
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            with pytest.raises(RuntimeWarning, match="is damaged"):
                run.save(4, state_of(4))
            assert run.save(5, state_of(5)).kind == "full"
    assert restored(tmp_path) == 5


# --- policies that match nothing ----------------------------------------------------------------------------


def test_metric_missing_in_all_saves_is_reported_once_and_last_n_stay(tmp_path: Path, events: list[Event]) -> None:
    with CheckpointManager(tmp_path, keep="best=val_loss:min:3", full_every=1) as run:
        with pytest.warns(RuntimeWarning, match=r"'val_loss' of step 0 is missing \(there are 'val/loss'\)"):
            run.save(0, state_of(0), {"val/loss": 0.0})
        for step in range(1, 8):  # a second warning would be an error
            run.save(step, state_of(step), {"val/loss": float(step)})
        assert [event.name for event in events].count("run.policy.matches_nothing") == 1
        assert run.steps() == [5, 6, 7]
        with pytest.raises(UsageError, match=r"no checkpoint of .* has the metric 'val_loss' \(there are 'val/loss'\)"):
            run.prune()
        # From the first save that has it on it decides.
        for step, loss in ((8, 3.0), (9, 1.0), (10, 2.0), (11, 9.0)):
            run.save(step, state_of(step), {"val_loss": loss})
        run.save(12, state_of(12))
        assert run.steps() == [8, 9, 10, 11, 12]  # the best three, the newest, and one that shares nothing with it


@pytest.mark.parametrize(
    ("keep", "steps", "words"),
    [
        ("every=100", (1, 101), "divides neither"),
        ("best=loss", (1,), "is NaN"),
        ("newer=0.001s", (1, 2), "keeps the newest checkpoint alone"),
    ],
)
def test_policy_that_keeps_nothing_is_reported(tmp_path: Path, keep: str, steps: tuple[int, ...], words: str) -> None:
    with CheckpointManager(tmp_path, keep=keep) as run:
        for step in steps[:-1]:
            run.save(step, state_of(step), {"loss": float("nan")})
        with pytest.warns(RuntimeWarning, match=words):
            run.save(steps[-1], state_of(steps[-1]), {"loss": float("nan")})


@pytest.mark.parametrize("keep", ["last=1,every=100", "best=loss", "newer=1h", 2, None])
def test_policy_that_keeps_something_is_not_reported(tmp_path: Path, keep: Any, events: list[Event]) -> None:
    with CheckpointManager(tmp_path, keep=keep) as run:
        for step in (50, 100, 150):
            run.save(step, state_of(step), {"loss": 1.0})
    assert "run.policy.matches_nothing" not in {event.name for event in events}


class Custom:
    """A user's policy that returns `result(checkpoints)`."""

    def __init__(self, result: Callable[[Any], Any]) -> None:
        self.result = result

    def keep(self, checkpoints: Any, *, now: float) -> Any:
        return self.result(checkpoints)


BROKEN_POLICIES = {
    "nothing": lambda found: None,
    "one name": lambda found: found[-1].name,
    "descriptions": lambda found: [found[-1]],
    "raises": lambda found: 1 / 0,
    "raises later": lambda found: (1 / 0 for _ in found),
}


@pytest.mark.parametrize("result", BROKEN_POLICIES.values(), ids=BROKEN_POLICIES)
@pytest.mark.parametrize("joined", [False, True])
def test_policy_that_fails_is_reported_once_and_ends_no_save(
    tmp_path: Path, result: Any, joined: bool, events: list[Event]
) -> None:
    policy: Any = Custom(result)
    keep = KeepLast(1) | policy if joined else policy
    with CheckpointManager(tmp_path, keep=keep, full_every=1, independent=False) as run:
        for step in (1, 2, 3):
            run.save(step, state_of(step))
        (failure,) = (event for event in events if event.name == "run.prune.failed")
        assert "policy Custom" in failure.detail
        assert run._engine.retention.make_room(run._run) == 0
        with pytest.raises(UsageError, match="policy Custom"):
            run.prune()
        assert run.steps() == [1, 2, 3]
        run.prune(Custom(lambda found: [each.name for each in found[:1]]))
        assert run.steps() == [1, 3]


def test_room_that_a_pruning_makes_before_it_is_denied_one_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    with CheckpointManager(tmp_path, full_every=1) as run:
        for step in (1, 2, 3):
            run.save(step, state_of(step))
    delete = LocalStorage.delete

    def delete_unlocked(self: LocalStorage, names: Collection[str]) -> None:
        if names and self.url.endswith(checkpoint_name(1)):
            raise DeniedError("step 1 is locked")
        delete(self, names)

    monkeypatch.setattr(LocalStorage, "delete", delete_unlocked)
    with CheckpointManager(tmp_path, keep=1, independent=False) as run:
        retention = run._engine.retention
        assert retention.make_room(run._run) > 0
        assert run.steps() == [1, 3]
        assert retention.make_room(run._run) == 0
    assert [event.name for event in events].count("run.prune.failed") == 2


def test_policy_given_as_a_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a retention policy: give a number"):
        CheckpointManager(tmp_path, keep=KeepLast)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unsupported operand"):
        KeepLast(1) | KeepLast  # type: ignore[operator]


def test_prune_command_refuses_policy_without_matches_and_accepts_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with CheckpointManager(tmp_path, full_every=1) as run:
        for step in (10, 20, 30, 40):
            run.save(step, state_of(step), {"val/loss": 1.0})
        for keep, words in (("best=val_loss", "has the metric 'val_loss'"), ("last=1,every=7", "7 divides no step")):
            code = main(["checkpoints", "prune", str(tmp_path), "--keep", keep, "--yes"])
            out, err = capsys.readouterr()
            assert (code, out, err.count("\n")) == (1, "", 1)
            assert words in err
        assert run.steps() == [10, 20, 30, 40]
        assert main(["checkpoints", "prune", str(tmp_path), "--keep", "1", "--dry-run", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["kept"]) == 2
        assert main(["checkpoints", "prune", str(tmp_path), "--keep", "1", "--dry-run"]) == 0
        lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:5]}
        assert re.search(r"stays +last=1$", lines["40"])
        assert re.search(r"stays +shares no file with the newest$", lines["30"])
        assert main(["checkpoints", "prune", str(tmp_path), "--keep", "1", "--no-independent", "--yes"]) == 0
        assert run.steps() == [40]


# --- damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"base_memory": 0}])
def test_base_damaged_while_the_manager_runs_gets_no_delta(
    tmp_path: Path, options: dict[str, Any], events: list[Event]
) -> None:
    with CheckpointManager(tmp_path, keep=2, **options) as run:
        kinds = [run.save(step, state_of(step)).kind for step in (1, 2, 3)]
        assert kinds == ["full", "full", "delta"]
        flip_in_the_middle(data_file(tmp_path / checkpoint_name(2)))
        with pytest.warns(RuntimeWarning, match=r"is damaged \(a chunk in .*checksum\); step-0+4 is saved in full"):
            assert run.save(4, state_of(4)).kind == "full"
        assert [event.name for event in events].count("run.base.damaged") == 1
        # Step 3 cannot be read any more, so it is not what stays in case step 4 is damaged.
        assert 1 in run.steps()
        assert run.save(5, state_of(5)).kind == "delta"
    flip_in_the_middle(data_file(tmp_path / checkpoint_name(4)))
    assert restored(tmp_path) == 1


@pytest.mark.slow
def test_base_replaced_in_the_bucket_gets_no_delta(tmp_path: Path, events: list[Event]) -> None:
    with S3Server(tmp_path / "s3") as server:
        server.create_bucket("runs")
        origin = open_origin("s3", server.target_options)
        with CheckpointManager("s3://runs/a", target_options=server.target_options) as run:
            assert [run.save(step, state_of(step)).kind for step in (1, 2, 3)] == ["full", "full", "delta"]
            pages = list(origin.list_pages("runs/a/step-000000000002"))
            (data,) = [info for page in pages for info in page.objects if "/data-" in info.key]
            content = bytearray(memoryview(origin.read(data.key, 0, data.size)))
            content[data.size // 2] ^= 1
            origin.put(data.key, bytes(content))
            with pytest.warns(RuntimeWarning, match="was replaced since it was saved"):
                assert run.save(4, state_of(4)).kind == "full"
            assert [event.name for event in events].count("run.base.gone") == 1
            assert run.save(5, state_of(5)).kind == "delta"


SAVES = 14
SETTINGS: dict[str, dict[str, Any]] = {
    "`keep=1`": {"keep": 1},
    "`keep=3`": {"keep": 3},
    "`keep=3, full_every=1`": {"keep": 3, "full_every": 1},
    '`keep="every=5"`': {"keep": "every=5"},
    '`keep="best=loss:min:2"`': {"keep": "best=loss:min:2"},
    "`keep=1, independent=False`": {"keep": 1, "independent": False},
    "`keep=3, independent=False`": {"keep": 3, "independent": False},
    "`keep=1, full_every=1, independent=False`": {"keep": 1, "full_every": 1, "independent": False},
}


def survival(root: Path, options: dict[str, Any]) -> tuple[float, int, int]:
    """What a run takes in sizes of a full save, its files, and after how many damages to one of them a restore succeeds."""
    run = root / "run"
    with CheckpointManager(run, **options) as manager:
        sizes = [manager.save(step, state_of(step), {"loss": float(step)}) for step in range(1, SAVES + 1)]
    files = sorted(run.glob("step-*/*.millrace"))
    stored = sum(file.stat().st_size for file in files) / sizes[0].stored_bytes
    found = 0
    for file in files:
        copy = root / "copy"
        shutil.copytree(run, copy)
        flip_in_the_middle(copy / file.relative_to(run))
        found += restored(copy) is not None
        shutil.rmtree(copy)
    return stored, len(files), found


def test_settings_survive_the_documented_losses(tmp_path: Path) -> None:
    documented = [
        line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| `keep=")
    ]
    assert [name for name, *_ in documented] == list(SETTINGS)
    for number, (name, size, losses) in enumerate(documented):
        stored, files, found = survival(tmp_path / str(number), SETTINGS[name])
        assert re.fullmatch(r"\d\.\d", size)
        # The length of a manifest differs by a few bytes from save to save, and so may the number that it is rounded to.
        assert abs(float(size) - stored) < 0.05 + 0.002, name
        assert losses == f"{found} of {files}", name
        if SETTINGS[name].get("independent", True):
            assert found == files, name
