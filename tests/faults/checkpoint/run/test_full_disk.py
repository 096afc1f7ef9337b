"""Leftovers of failed saves on local disks, and a full disk on which retention frees space for a retry."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fork_server import ForkedProcess, torch_server
from tests.support.small_disks import fill_disk

from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.run.tiers import open_tiers
from millrace.checkpoint.writing.rank_writer import RankWriter
from millrace.errors import DiskFullError, StorageError, UnsupportedObjectError
from millrace.events import add_hook


def noise(step: int, mib: int = 3) -> dict[str, Any]:
    """A state that does not compress."""
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randint(0, 256, (mib << 20,), dtype=torch.uint8, generator=generator), "step": step}


def restored(place: Path, mib: int = 3) -> int:
    state = noise(0, mib)
    with CheckpointManager(place) as run:
        assert run.restore(state) == state["step"]
    assert torch.equal(state["w"], noise(state["step"], mib)["w"])
    return int(state["step"])


def directories(run: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in run.glob("step-*"))


def test_failed_save_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("the disk failed")

    with CheckpointManager(tmp_path / "run") as run:
        run.save(1, noise(1))
        with pytest.raises(UnsupportedObjectError):
            run.save(2, {"w": torch.eye(3).to_sparse()})
        with monkeypatch.context() as patch:
            patch.setattr(RankWriter, "_publish", fail)
            with pytest.raises(StorageError):
                run.save(2, noise(2))
        assert directories(tmp_path / "run") == [1]
        # The name is free again.
        assert run.save(2, noise(2)).url.endswith("step-000000000002")


def test_failed_save_leaves_no_directory_on_the_near_disk(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", local=tmp_path / "near") as run:
        run.save(1, noise(1))
        with pytest.raises(UnsupportedObjectError):
            run.save(2, {"w": torch.eye(3).to_sparse()})
    local = open_tiers(tmp_path / "run", local=tmp_path / "near").local
    assert local is not None
    assert directories(Path(local.url)) == [1]
    assert directories(tmp_path / "run") == [1]


DYING = """
import os, sys, torch
from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.writing.rank_writer import RankWriter
run = CheckpointManager(sys.argv[1])
run.save(1, {"x": torch.zeros(1000)})
RankWriter.write_sources = lambda *_: os._exit(9)
run.save(2, {"x": torch.zeros(1000)})
"""


@pytest.mark.slow
@pytest.mark.parametrize("keep", [None, 3])
def test_directory_of_crashed_save_is_removed_by_the_next_manager(tmp_path: Path, keep: int | None) -> None:
    with ForkedProcess(torch_server(), DYING, str(tmp_path / "run"), log=tmp_path / "log", pipes=True) as dying:
        dying.output(code=9)
    assert directories(tmp_path / "run") == [1, 2]
    with CheckpointManager(tmp_path / "run", keep=keep) as run:
        run.save(3, {"x": torch.zeros(1000)})
    assert directories(tmp_path / "run") == [1, 3]


@pytest.mark.root
def test_save_on_full_disk_prunes_and_retries(small_disk: Path) -> None:
    with CheckpointManager(small_disk / "run", full_every=1) as run:
        for step in (1, 2, 3):
            run.save(step, noise(step))
        with pytest.raises(DiskFullError):
            run.save(4, noise(4))
        # Nothing may go, so nothing has gone.
        assert directories(small_disk / "run") == [1, 2, 3]
    with CheckpointManager(small_disk / "run", full_every=1, keep=1) as run:
        assert run.save(4, noise(4)).step == 4
        assert run.steps() == [3, 4]
    assert directories(small_disk / "run") == [3, 4]
    assert restored(small_disk / "run") == 4


def fill(disk: Path) -> None:
    """As another program would, to the last byte."""
    with contextlib.suppress(OSError), open(disk / "log", "ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.root
def test_save_on_disk_without_space_for_a_claim_prunes_and_retries(small_disk: Path) -> None:
    with CheckpointManager(small_disk / "run", full_every=1) as run:
        for step in (1, 2, 3):
            run.save(step, noise(step, mib=2))
    fill(small_disk)
    with CheckpointManager(small_disk / "run", full_every=1, keep=1, independent=False) as run:
        assert run.save(4, noise(4, mib=1)).step == 4
        assert run.steps() == [4]
        older, newest = (small_disk / "run" / f"step-{step:012d}" for step in (2, 4))
        shutil.copytree(newest, older)
        fill(small_disk)
        # The claim, which this manager has now, cannot be rewritten either.
        assert run.save(5, noise(5, mib=1)).url.endswith("step-000000000005")
    assert directories(small_disk / "run") == [5]
    assert restored(small_disk / "run", mib=1) == 5


@pytest.mark.root
def test_full_near_disk_is_pruned_but_keeps_unuploaded_saves(tmp_path: Path, small_disk: Path) -> None:
    seen: list[str] = []
    remove = add_hook(lambda event: seen.append(event.name))
    with contextlib.closing(CheckpointManager(tmp_path / "run", local=small_disk, local_keep=3, full_every=1)) as run:
        for step in (1, 2, 3):
            run.save(step, noise(step))
    with CheckpointManager(tmp_path / "run", local=small_disk, local_keep=1, full_every=1) as run:
        run.save(4, noise(4))
    assert "checkpoint.tier.refused" not in seen
    local = open_tiers(tmp_path / "run", local=small_disk).local
    assert local is not None
    assert directories(Path(local.url)) == [4]
    # Saves that are not at the origin stay, and the next save goes to the origin without a copy on the node.
    for number in range(1, 5):
        (tmp_path / "run" / f"step-{number:012d}" / "manifest.millrace").unlink()
    with warnings.catch_warnings(), CheckpointManager(tmp_path / "run", local=small_disk, local_keep=1) as run:
        warnings.simplefilter("ignore", RuntimeWarning)
        run.save(5, noise(5, mib=9))
    assert "checkpoint.tier.refused" in seen
    assert directories(Path(local.url)) == [4]
    remove()


@pytest.mark.root
def test_saves_that_a_full_near_disk_refuses_stay_deltas_and_count_as_intact(tmp_path: Path, small_disk: Path) -> None:
    """The base was refused, too: it is not damaged, and remains the base of the saves to the origin."""
    seen: list[str] = []
    remove = add_hook(lambda event: seen.append(event.name))
    state = noise(0)
    with warnings.catch_warnings(), CheckpointManager(tmp_path / "run", local=small_disk) as run:
        warnings.filterwarnings("ignore", ".*goes to the origin directly", RuntimeWarning)
        fill_disk(small_disk)
        kinds = []
        for step in range(1, 6):
            state["w"][step] += 1
            kinds.append(run.save(step, state).kind)
        assert kinds == ["full", "full", "delta", "delta", "delta"]
        (small_disk / "ballast").unlink()
        for step in (6, 7):
            state["w"][step] += 1
            kinds.append(run.save(step, state).kind)
        # The first near save has no base there.
        assert kinds[5:] == ["full", "delta"]
        assert run.save_async(8, state).result() is not None
        assert not run._damaged
    assert not {"run.base.gone", "run.base.unreadable"} & {*seen}
    local = open_tiers(tmp_path / "run", local=small_disk).local
    assert local is not None
    assert directories(Path(local.url)) == [6, 7, 8]
    for step in (5, 7, 8):
        found = noise(0)
        with CheckpointManager(tmp_path / "run") as run:
            assert run.restore(found, step=step) == step
        expected = noise(0)["w"]
        expected[1 : min(step, 7) + 1] += 1
        assert torch.equal(found["w"], expected)
    remove()
