"""Two ranks on two nodes, each with a disk of its own: deltas near, restores from near, from afar, after a node is lost."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support import ranks
from tests.support.replicas import ReplicaNodes
from tests.support.savers import PATIENT_WITH_NODES

from millrace.checkpoint.run import uploading
from millrace.checkpoint.run.manager import CheckpointManager
from millrace.checkpoint.run.peers import Peers
from millrace.checkpoint.run.run_layout import checkpoint_name, rank_of_part
from millrace.checkpoint.run.tiers import Tiers, open_tiers
from millrace.checkpoint.storage.layered import missing_files
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.errors import OriginUnavailableError
from millrace.events import Event, add_hook

ROWS, STEPS = 300_000, 4


def state(value: float) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(5)
    frozen = torch.randn(ROWS, generator=generator)
    return {
        "moving": distribute_tensor(torch.full((ROWS,), float(value)), mesh, [Shard(0)]),
        "frozen": distribute_tensor(frozen if value else torch.zeros(ROWS), mesh, [Shard(0)]),
        "step": int(value),
    }


def manager(root: Path) -> CheckpointManager:
    return CheckpointManager(root / "origin", local=root / f"node{dist.get_rank()}", thread_count=1)


def tiers_of(root: Path, node: int) -> Tiers:
    return open_tiers(root / "origin", local=root / f"node{node}")


# --- what the ranks do ----------------------------------------------------------------------------


def save(root: Path) -> None:
    seen: list[Event] = []
    remove = add_hook(seen.append)
    with manager(root) as run:
        kinds = [run.save(step, state(step)).kind for step in range(1, STEPS + 1)]
    remove()
    assert kinds == ["full", "full", "delta", "delta"]
    # Nothing had to be saved a second time.
    assert "run.base.gone" not in {event.name for event in seen}


def die_before_the_upload(root: Path) -> None:
    """The step after the last one is complete near, and nothing of it has left the nodes."""
    from millrace.checkpoint.run import uploading

    def die(*args: object, **options: object) -> None:
        os._exit(9)

    uploading.copy_files = die  # type: ignore[assignment]
    manager(root).save(STEPS + 1, state(STEPS + 1))


def refuse_one_manifest(root: Path) -> None:
    """Blocks the path of the manifest on the second node's disk. Its rank finds this after all data is written."""
    if dist.get_rank() == 1:
        local = tiers_of(root, 1).local
        (Path(local.url_of(checkpoint_name(1))) / "manifest.millrace").mkdir(parents=True)
    dist.barrier()
    seen: list[Event] = []
    remove = add_hook(seen.append)
    with manager(root) as run:
        pending = run.save_async(1, state(1))
        assert pending.near.result().step == 1
        assert pending.result().step == 1
        # The next one is not disturbed by that.
        assert run.save(2, state(2)).step == 2
    remove()
    assert ("checkpoint.tier.refused" in {event.name for event in seen}) == (dist.get_rank() == 1)


def save_over_an_outdated_manifest(root: Path) -> None:
    """The second node's disk has another save of step 2, which the first rank does not know."""
    with manager(root) as run:
        run.save(1, state(1))
        dist.barrier()
        if dist.get_rank() == 1:
            local = tiers_of(root, 1).local
            Path(local.url_of(checkpoint_name(2))).mkdir()
            shutil.copy(Path(local.url_of(checkpoint_name(1))) / "manifest.millrace", local.url_of(checkpoint_name(2)))
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            run.save_async(2, state(2)).result()
            run.save_async(3, state(3)).result()
        loaded = state(0)
        for step in (2, 3):
            assert run.restore(loaded, step=step) == step
            assert torch.equal(loaded["moving"].to_local(), state(step)["moving"].to_local())


def find_only_half(root: Path) -> None:
    with warnings.catch_warnings(record=True) as warned, manager(root) as run:
        warnings.simplefilter("always")
        assert run.restore(state(0)) is None
    found = [str(each.message) for each in warned if "on disks of several nodes" in str(each.message)]
    assert len(found) == (dist.get_rank() == 0)
    assert all("the parts of these ranks are missing: 1" in each for each in found)


def restore_of_one_process(root: Path) -> None:
    found = {"weights": torch.zeros(1000)}
    with manager(root) as run:
        assert run.restore(found) == 2
        assert run.steps() == [1, 2]
    assert torch.equal(found["weights"], torch.full((1000,), 2.0))


def restore_the_later(root: Path) -> None:
    restore(root, STEPS + 1)


def restore(root: Path, step: int = STEPS) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        loaded, expected = state(0), state(step)
        with manager(root) as run:
            assert run.restore(loaded) == step
    for key in ("moving", "frozen"):
        assert torch.equal(loaded[key].to_local(), expected[key].to_local())
    assert loaded["step"] == step


def leave_files_on_one_node(root: Path) -> None:
    def die(*args: object, **options: object) -> None:
        os._exit(9)

    uploading.copy_files = die  # type: ignore[assignment]
    weights = {f"weights {number}": torch.full((1000,), 3.0) for number in range(4)}
    CheckpointManager(root / "origin", local=root / "node0").save(1, weights)


def restore_on_two_nodes(root: Path) -> None:
    """Ranks 0 and 1 on the node that has the files, rank 2 on another one."""
    exec(PATIENT_WITH_NODES, {})
    rank, copy = dist.get_rank(), Peers.copy

    def copy_and_note(self: Peers, *arguments: Any, **options: Any) -> list[str]:
        (root / f"copied by {rank}").touch()
        return copy(self, *arguments, **options)

    Peers.copy = copy_and_note  # type: ignore[method-assign]
    found = {f"weights {number}": torch.zeros(1000) for number in range(4)}
    with CheckpointManager(root / "origin", local=root / f"node{rank // 2}", replicas=1) as run:
        assert run.restore(found) == 1
    for weights in found.values():
        assert torch.equal(weights, torch.full((1000,), 3.0))


# --- the tests ------------------------------------------------------------------------------------


def data_files(place: Path) -> set[str]:
    return {path.name for path in place.rglob("data-*.millrace")}


@pytest.mark.slow
def test_each_node_stores_its_part_and_the_origin_all(tmp_path: Path) -> None:
    ranks.run(__file__, "save", 2, tmp_path)
    mine, theirs = (data_files(tmp_path / f"node{node}") for node in (0, 1))
    assert mine
    assert theirs
    assert not mine & theirs
    assert mine | theirs <= data_files(tmp_path / "origin")
    newest = checkpoint_name(STEPS)
    for node in (0, 1):
        tiers = tiers_of(tmp_path, node)
        manifest = read_manifest(tiers.local.checkpoint(newest)).manifest
        assert missing_files(tiers.local.checkpoint(newest), manifest.files) != [], "one node's disk is half of it"
        assert missing_files(tiers.checkpoint(newest), manifest.files) == []

    # A node that is new gets its part from the origin.
    shutil.rmtree(tmp_path / "node1")
    ranks.run(__file__, "restore", 2, tmp_path)


@pytest.mark.slow
def test_manifest_refused_by_the_disk_of_one_node_is_an_event(tmp_path: Path) -> None:
    ranks.run(__file__, "refuse_one_manifest", 2, tmp_path)
    for step in (1, 2):
        assert tiers_of(tmp_path, 0).is_at_origin(checkpoint_name(step))


@pytest.mark.slow
def test_step_of_which_the_disk_of_the_second_rank_has_another_save_is_saved(tmp_path: Path) -> None:
    ranks.run(__file__, "save_over_an_outdated_manifest", 2, tmp_path)
    for step in (1, 2, 3):
        assert tiers_of(tmp_path, 0).is_at_origin(checkpoint_name(step))


@pytest.mark.slow
def test_checkpoint_that_only_the_disk_of_the_second_rank_has_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OriginUnavailableError("an outage", next_step="wait")

    with CheckpointManager(tmp_path / "origin", local=tmp_path / "node1") as run:
        run.save(1, {"weights": torch.full((1000,), 1.0)})
        monkeypatch.setattr(uploading, "copy_files", refuse)
        with pytest.raises(OriginUnavailableError):
            run.save(2, {"weights": torch.full((1000,), 2.0)})
    ranks.run(__file__, "restore_of_one_process", 2, tmp_path)


@pytest.mark.slow
def test_checkpoint_in_parts_on_two_nodes_is_joined(tmp_path: Path) -> None:
    ranks.run(__file__, "die_before_the_upload", 2, tmp_path, codes=(9, 9))
    newest = checkpoint_name(STEPS + 1)
    assert not data_files(tmp_path / "origin")
    for node in (0, 1):
        names = set(tiers_of(tmp_path, node).local.checkpoint(newest).names())
        assert "manifest.millrace" not in names
        assert any(rank_of_part(name) == node for name in names)
    # While one node is missing, half of the files are not a checkpoint.
    (tmp_path / "node1").rename(tmp_path / "away")
    ranks.run(__file__, "find_only_half", 2, tmp_path)
    shutil.rmtree(tmp_path / "node1", ignore_errors=True)
    (tmp_path / "away").rename(tmp_path / "node1")
    ranks.run(__file__, "restore_the_later", 2, tmp_path)
    origin = tiers_of(tmp_path, 0).origin.checkpoint(newest)
    assert missing_files(origin, read_manifest(origin).manifest.files) == []


def test_files_of_a_node_with_two_ranks_are_copied_to_other_nodes_once(tmp_path: Path) -> None:
    ranks.run(__file__, "leave_files_on_one_node", 2, tmp_path, codes=(9, 9))
    with ReplicaNodes(tmp_path / "nodes") as nodes, nodes.on(0):
        ranks.run(__file__, "restore_on_two_nodes", 3, tmp_path)
    assert [path.name for path in tmp_path.glob("copied by *")] == ["copied by 0"]


if __name__ == "__main__":
    programs = (
        save,
        restore,
        restore_of_one_process,
        die_before_the_upload,
        restore_the_later,
        find_only_half,
        refuse_one_manifest,
        save_over_an_outdated_manifest,
        leave_files_on_one_node,
        restore_on_two_nodes,
    )
    ranks.main({program.__name__: program for program in programs})
