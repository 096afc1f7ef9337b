"""`CheckpointManager` with a near place: durable there first, then at the origin, and restored from the remaining places."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.checkpoint.run.test_manager import change, damage, empty_like, make_state
from tests.support.fork_server import ForkedProcess, torch_server
from tests.support.seen_events import seen_events
from tests.support.servers import steady_port
from tests.support.states import assert_same_state

from millrace.checkpoint import CheckpointManager, SaveProgress
from millrace.checkpoint.run import uploading
from millrace.checkpoint.run.run_layout import Run, open_run
from millrace.checkpoint.run.tiers import Upload, open_tiers
from millrace.errors import CorruptCheckpointError, MillraceError, OriginUnavailableError
from millrace.testing.s3 import S3Server


def steps_at(place: Any) -> list[int]:
    return [found.step for found in place.scan() if found.complete]


@pytest.mark.slow
def test_process_end_waits_for_the_upload_of_the_last_save_in_silence(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from millrace.checkpoint import CheckpointManager
        run = CheckpointManager(sys.argv[1], local=sys.argv[2])
        for step in range(1, 4):
            run.save_async(step, {"w": torch.randn(300_000)})
        """
    arguments = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run"), str(tmp_path / "near")]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert steps_at(open_run(tmp_path / "run")) == [1, 2, 3]


@pytest.mark.slow
def test_save_is_stored_near_first_and_then_at_the_origin(tmp_path: Path, runs_server: S3Server) -> None:
    url, options = "s3://runs/first", runs_server.target_options
    state, saved = make_state(), {}
    seen: list[SaveProgress] = []
    with CheckpointManager(url, local=tmp_path, local_keep=2, target_options=options, on_progress=seen.append) as run:
        for step in range(1, 6):
            pending = run.save_async(step, state)
            saved[step] = copy.deepcopy(state)
            change(state)
            near = pending.near.result()
            assert near is not None
            assert step in steps_at(open_tiers(url, local=tmp_path, target_options=options).local)
        run.wait()
        result = pending.result()
        assert result is not None
        assert result.seconds >= near.seconds
        assert result.kind == "delta"
    assert {each.phase for each in seen} >= {"writing", "uploading", "done"}
    tiers = open_tiers(url, local=tmp_path, target_options=options)
    assert steps_at(tiers.origin) == [1, 2, 3, 4, 5]
    assert set(steps_at(tiers.local)) <= {2, 4, 5}
    for gone in ("nothing", "local", "origin"):
        if gone == "local":
            shutil.rmtree(tmp_path)
        for step in saved if gone != "origin" else ():
            with CheckpointManager(url, local=tmp_path, target_options=options) as run:
                found = empty_like(state)
                assert run.restore(found, step) == step
                assert_same_state(found, saved[step])


def test_restore_reads_near_and_damaged_ranges_from_the_origin(tmp_path: Path, runs_server: S3Server) -> None:
    url, options = "s3://runs/damaged", runs_server.target_options
    state = make_state()
    with CheckpointManager(url, local=tmp_path, target_options=options) as run:
        run.save(1, state)
    (local,) = tmp_path.iterdir()
    damage(local, 1)
    with seen_events() as seen, CheckpointManager(url, local=tmp_path, target_options=options) as run:
        found = empty_like(state)
        assert run.restore(found) == 1
    assert_same_state(found, state)
    assert "checkpoint.tier.damaged" in {event.name for event in seen}


def test_near_save_damaged_before_upload_does_not_block_later_ones(tmp_path: Path) -> None:
    url, local = tmp_path / "run", tmp_path / "near"
    near = open_tiers(url, local=local).local
    assert near is not None

    rotten: list[int] = []

    def rot(progress: SaveProgress) -> None:
        if (progress.step, progress.phase) == (2, "uploading") and not rotten:
            rotten.append(2)
            damage(Path(near.url), 2)

    state, errors = make_state(), {}
    with CheckpointManager(url, local=local, on_progress=rot) as run:
        for step in range(1, 5):
            errors[step] = run.save_async(step, state).exception()
            change(state)
        assert isinstance(errors.pop(2), CorruptCheckpointError)
        assert set(errors.values()) == {None}
        assert steps_at(open_run(url)) == [1, 3, 4]
    # Nor does it in the next process.
    with CheckpointManager(url, local=local) as run:
        run.save(5, state)
    shutil.rmtree(local)
    with CheckpointManager(url) as run:
        found = empty_like(state)
        assert run.restore(found) == 5
        assert_same_state(found, state)


def test_near_save_of_dead_process_is_restored_and_uploaded(tmp_path: Path, runs_server: S3Server) -> None:
    url, options = "s3://runs/left", runs_server.target_options
    state, saved = make_state(), {}
    with CheckpointManager(url, local=tmp_path, target_options=options) as run:
        run.save(1, state)
        saved[1] = copy.deepcopy(state)
    origin = open_run(url, options)
    near = open_tiers(url, local=tmp_path, target_options=options).local
    assert near is not None
    # As if the process had died between the two: the next saves went no farther than the disk.
    with CheckpointManager(near.url) as run:
        for step in (2, 3):
            change(state)
            run.save(step, state)
            saved[step] = copy.deepcopy(state)
    assert steps_at(origin) == [1]
    with CheckpointManager(url, local=tmp_path, target_options=options) as run:
        found = empty_like(state)
        assert run.restore(found) == 3
        assert_same_state(found, saved[3])
        change(state)
        run.save(4, state)
        saved[4] = copy.deepcopy(state)
    assert steps_at(origin) == [1, 2, 3, 4]
    with CheckpointManager(url, target_options=options) as run:
        for step, expected in saved.items():
            assert run.restore(found, step) == step
            assert_same_state(found, expected)


def test_unwritable_near_disk_is_skipped(tmp_path: Path, runs_server: S3Server) -> None:
    url, options = "s3://runs/full", runs_server.target_options
    (tmp_path / "file").write_text("where a directory should be")
    state = make_state()
    with CheckpointManager(url, local=tmp_path / "file", target_options=options) as run:
        with pytest.warns(RuntimeWarning, match="goes to the origin directly"):
            run.save(1, state)
        change(state)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.save(2, state)  # the first warning is enough
        found = empty_like(state)
        assert run.restore(found) == 2
        assert_same_state(found, state)
        (tmp_path / "file").unlink()
        run.save(3, state)
        shutil.rmtree(tmp_path / "file")
        (tmp_path / "file").write_text("a file again")
        with pytest.warns(RuntimeWarning, match="goes to the origin directly"):
            run.save(4, state)


@pytest.mark.parametrize("save", [CheckpointManager.save, CheckpointManager.save_async])
def test_near_disk_that_cannot_be_listed_is_skipped(tmp_path: Path, save: Callable[..., Any]) -> None:
    near = open_tiers(tmp_path / "run", local=tmp_path / "near").local
    assert near is not None
    (tmp_path / "near").mkdir()
    Path(near.url).symlink_to(near.url)  # a loop of links, which the kernel refuses to follow
    state = make_state()
    with warnings.catch_warnings(), seen_events() as seen:
        warnings.simplefilter("ignore", RuntimeWarning)
        with CheckpointManager(tmp_path / "run", local=tmp_path / "near") as run:
            save(run, 1, state)
            run.wait()
            found = empty_like(state)
            assert run.restore(found) == 1
    assert_same_state(found, state)
    assert {"checkpoint.tier.unreachable", "checkpoint.tier.refused"} <= {event.name for event in seen}


@pytest.mark.slow
def test_save_during_an_outage_of_the_origin_loses_no_state(tmp_path: Path) -> None:
    state, server = make_state(), S3Server(tmp_path / "s3", port=steady_port())
    with server:
        server.create_bucket("runs")
        options = server.target_options
        run = CheckpointManager("s3://runs/run", local=tmp_path / "near", target_options=options)
        run.save(1, state)
        server.stop()
        change(state)
        expected = copy.deepcopy(state)
        pending = run.save_async(2, state)
        assert isinstance(pending.exception(), MillraceError)
        server.start()
        change(state)
        run.save(3, state)
        run.close()
        with CheckpointManager("s3://runs/run", target_options=options) as again:
            found = empty_like(state)
            if 2 in again.steps():
                assert again.restore(found, 2) == 2
                assert_same_state(found, expected)
            assert again.restore(found) == 3
            assert_same_state(found, state)


KILLED = """
import sys, json, torch
from millrace.checkpoint import CheckpointManager
url, local, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
run = CheckpointManager(url, local=local, target_options=options, full_every=3, keep=3)
state = {"x": torch.zeros(1_000_000), "step": -1}
first = -1 if run.latest() is None else run.restore(state)
for step in range(first + 1, first + 1000):
    state["x"] += torch.arange(1_000_000) % 7 == step % 7
    state["step"] = step
    run.save_async(step, state).near.result()
    print(step, flush=True)
"""


@pytest.mark.slow
def test_kill_9_between_the_places_loses_nothing(tmp_path: Path, runs_server: S3Server) -> None:
    url, options = "s3://runs/killed", runs_server.target_options
    expected = torch.zeros(1_000_000)
    for number in range(4):
        log, arguments = tmp_path / "log", (url, str(tmp_path / "near"), json.dumps(options))
        child = ForkedProcess(torch_server(), KILLED, *arguments, log=log, pipes=True)
        announced = [int(child.stdout.readline() or log.read_text()) for _ in range(2 + number % 2)]
        timer = threading.Timer(0.03 * number, os.kill, (child.pid, signal.SIGKILL))
        timer.start()
        announced += [int(line) for line in child.stdout.read().split()]
        timer.join()
        child.kill()
        with CheckpointManager(url, local=tmp_path / "near", target_options=options) as run:
            state: dict[str, Any] = {"x": torch.ones(1_000_000), "step": -2}
            newest = run.restore(state)
        assert newest is not None
        assert announced[-1] <= newest <= announced[-1] + 1
        expected.zero_()
        for step in range(newest + 1):
            expected += torch.arange(1_000_000) % 7 == step % 7
        assert torch.equal(state["x"], expected)
    # The checkpoints at the origin are complete without the near disk.
    with CheckpointManager(url, target_options=options) as run:
        for step in run.steps():
            found: dict[str, Any] = {"x": torch.ones(1_000_000), "step": -2}
            assert run.restore(found, step) == step == found["step"]


def test_first_upload_leaves_later_saves_to_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catching up of a new manager begins when a second save is complete on the local disk."""
    look = uploading.pending_uploads

    def after_the_second(local: Run, origin: Run) -> tuple[Upload, ...]:
        deadline = time.monotonic() + 120
        while len([found for found in local.scan() if found.complete]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return look(local, origin)

    monkeypatch.setattr(uploading, "pending_uploads", after_the_second)
    state = make_state()
    with (
        seen_events() as seen,
        CheckpointManager(tmp_path / "run", local=tmp_path / "near", independent=False) as run,
    ):
        for step in (1, 2):
            run.save_async(step, state)
            change(state)
    assert "checkpoint.tier.left" not in {event.name for event in seen}
    assert steps_at(open_run(tmp_path / "run")) == [1, 2]


def test_leftover_whose_manifest_fails_for_a_passing_reason_is_published_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failures are injected: no server fails exactly these two requests."""
    failures = ["copy_files", "publish_checkpoint"]

    def failing(name: str, call: Any, source: Any, target: Any, *arguments: Any, **options: Any) -> None:
        if target.url.endswith("2") and failures[:1] == [name]:
            failures.pop(0)
            raise OriginUnavailableError(f"{target.url}: no answer", next_step="try again")
        call(source, target, *arguments, **options)

    for name in failures:
        monkeypatch.setattr(uploading, name, functools.partial(failing, name, getattr(uploading, name)))
    with CheckpointManager(tmp_path / "run", local=tmp_path / "near", local_keep=2, full_every=1) as run:
        run.save(1, make_state())
        for step in (2, 3):
            with pytest.raises(OriginUnavailableError):
                run.save(step, make_state())
        run.save(4, make_state())
    assert failures == []
    assert steps_at(open_run(tmp_path / "run")) == [1, 2, 3, 4]


def save_and_lose_last_upload(url: Path, near: Path, state: Any, **options: Any) -> None:
    """Save steps 300 and 400, of which the URL gets only the first: as if the node was lost before the upload."""
    with CheckpointManager(url, local=near, **options) as run:
        for step in (300, 400):
            run.save(step, state)
    shutil.rmtree(url / "step-000000000400")


def test_disk_of_a_node_that_was_away_restores_no_outdated_history(tmp_path: Path) -> None:
    url, state = tmp_path / "run", make_state()
    save_and_lose_last_upload(url, tmp_path / "a", state, full_every=1)
    change(state)
    with CheckpointManager(url, local=tmp_path / "b", full_every=1) as run:
        assert run.restore(empty_like(state)) == 300
        for step in (310, 320):
            run.save(step, state)
    with seen_events() as seen, CheckpointManager(url, local=tmp_path / "a", full_every=1) as run:
        found = empty_like(state)
        assert run.restore(found) == 320
        assert_same_state(found, state)
        assert run.steps() == [300, 310, 320]
        run.save(330, state)
        assert run.steps() == [300, 310, 320, 330]
    assert "checkpoint.tier.outdated" in {event.name for event in seen}
    assert steps_at(open_run(url)) == [300, 310, 320, 330]
    assert not (url / "step-000000000400").exists()


def test_disk_of_a_node_that_was_away_restores_no_history_after_a_pruned_checkpoint(tmp_path: Path) -> None:
    url, state = tmp_path / "run", make_state()
    save_and_lose_last_upload(url, tmp_path / "a", state, full_every=1)
    change(state)
    with CheckpointManager(url, local=tmp_path / "b", full_every=1, keep=1) as run:
        assert run.restore(empty_like(state)) == 300
        for step in (310, 320, 330):
            run.save(step, state)
        assert run.steps() == [320, 330]
    with CheckpointManager(url, local=tmp_path / "a") as run:
        found = empty_like(state)
        assert run.restore(found) == 330
        assert_same_state(found, state)


def test_disk_that_returns_during_a_run_with_an_outdated_save_of_the_same_step_is_skipped(tmp_path: Path) -> None:
    url, state = tmp_path / "run", make_state()
    save_and_lose_last_upload(url, tmp_path / "a", state)
    (tmp_path / "a").rename(tmp_path / "away")
    with CheckpointManager(url, local=tmp_path / "a") as run:
        assert run.restore(empty_like(state)) == 300
        run.save(350, state)
        change(state)
        [outdated] = (tmp_path / "away").glob("*/step-000000000400")
        shutil.copytree(outdated, tmp_path / "a" / outdated.relative_to(tmp_path / "away"))
        with pytest.warns(RuntimeWarning, match="contains another save"):
            run.save(400, state)
        found = empty_like(state)
        assert run.restore(found) == 400
        assert_same_state(found, state)
    assert steps_at(open_run(url)) == [300, 350, 400]


def test_disk_of_a_node_that_was_away_restores_no_history_of_equal_steps(tmp_path: Path) -> None:
    url, state = tmp_path / "run", make_state()
    with CheckpointManager(url, local=tmp_path / "a", local_keep=5) as run:
        for step in (300, 400, 500):
            run.save(step, state)
    for step in (400, 500):  # as if the node was lost before the uploads
        shutil.rmtree(url / f"step-000000000{step}")
    change(state)
    with CheckpointManager(url, local=tmp_path / "b") as run:
        assert run.restore(empty_like(state)) == 300
        run.save(400, state)
    with CheckpointManager(url, local=tmp_path / "a", local_keep=5) as run:
        found = empty_like(state)
        assert run.restore(found) == 400
        assert_same_state(found, state)
        change(state)
        run.save(600, state)
    assert steps_at(open_run(url)) == [300, 400, 600]
    with CheckpointManager(url, local=tmp_path / "c") as run:
        assert run.restore(found) == 600
        assert_same_state(found, state)


@pytest.mark.parametrize("lost", ["nothing", "near", "newest"])
def test_restored_state_is_freed_without_a_garbage_collection(tmp_path: Path, lost: str) -> None:
    origin, near = tmp_path / "run", tmp_path / "near"
    with CheckpointManager(origin, local=near) as run:
        for step in (1, 2):
            run.save(step, {"weights": torch.full((1000,), float(step))})
    if lost != "nothing":
        shutil.rmtree(near)
    if lost == "newest":
        damage(origin, 2)
    weights = torch.zeros(1000)
    seen = weakref.ref(weights)
    gc.disable()  # as after `gc.freeze`, or between two collections, which may be minutes
    try:
        with CheckpointManager(origin, local=near) as run, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert run.restore({"weights": weights}, fallback=True) == (1 if lost == "newest" else 2)
        del weights
        assert seen() is None
    finally:
        gc.enable()
