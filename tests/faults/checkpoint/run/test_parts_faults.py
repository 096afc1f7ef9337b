"""Damage and crashes between the parts of several ranks, with real engines; threads stand for the ranks."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.harms import flip_in_the_middle
from tests.support.waiting import wait_until

from millrace.checkpoint import CheckpointManager, load_weights
from millrace.checkpoint.run import parts, run_saver
from millrace.checkpoint.run.claims import Claim
from millrace.checkpoint.run.driving import plan_save, save_staged
from millrace.checkpoint.run.engine import EngineOptions, SaveEngine
from millrace.checkpoint.run.parts import publish_failure
from millrace.checkpoint.run.pruning import prune
from millrace.checkpoint.run.recovering import Recovery
from millrace.checkpoint.run.retention import KeepAll, KeepLast
from millrace.checkpoint.run.run_layout import ListedCheckpoint, checkpoint_name, part_name
from millrace.checkpoint.run.run_saver import RunSaver
from millrace.checkpoint.run.save_values import Member, SaveOrder, SaveRequest
from millrace.checkpoint.run.timeline import timeline
from millrace.checkpoint.run.uploading import Uploader
from millrace.checkpoint.state.staging import StateStager
from millrace.checkpoint.storage import storage as storages
from millrace.checkpoint.storage.base import CheckpointStorage, StoredFile
from millrace.checkpoint.storage.manifests import StoredManifest
from millrace.checkpoint.storage.replicating import publish_manifest
from millrace.errors import (
    BaseGoneError,
    CorruptCheckpointError,
    OriginUnavailableError,
    OutcomeUnknownError,
    RunTakenError,
    SaverDiedError,
    StorageError,
)
from millrace.events import Event

RANKS = 2
MakeState = Callable[[int, int], dict[str, Any]]


def weights(rank: int, step: int) -> dict[str, Any]:
    """A tensor of one rank, of which each step changes a little."""
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(rank))
    values[: 50 * step] += step
    return {f"w{rank}": values}


class Job:
    """The engines of two ranks that save to a directory, each with a disk of its own, or both on `one_node`."""

    def __init__(
        self,
        root: Path,
        *,
        is_near: bool = True,
        state: MakeState = weights,
        independent: bool = False,
        one_node: bool = False,
    ) -> None:
        self.root = root
        self._is_near, self._state, self._independent, self._one_node = is_near, state, independent, one_node
        self._stagers = [StateStager() for _ in range(RANKS)]
        self.engines = [self._engine(rank) for rank in range(RANKS)]

    def _engine(self, rank: int) -> SaveEngine:
        options = EngineOptions(
            url=str(self.root / "origin"),
            member=Member(rank, RANKS, not (self._one_node and rank)),
            local=str(self.root / f"node{0 if self._one_node else rank}") if self._is_near else None,
            replicas=0,
            access=None,
            target_options=None,
            timeout=60.0,
            policy=KeepAll(),
            local_keep=4,
            full_every=10,
            base_memory=1 << 30,
            rewind=False,
            independent=self._independent,
            read_through="none",
            writer_options={
                "target_options": None,
                "trusted_types": (),
                "compression": "typed",
                "thread_count": 1,
            },
        )
        return SaveEngine(options=options, tiers=options.open(), damaged=set(), write=save_staged)

    def restart(self) -> None:
        """New engines, as after a crash of all ranks."""
        claim = self.engines[0]._saver._claim if self.engines[0]._saver is not None else None
        if claim is not None:
            claim.release()
        self.engines = [self._engine(rank) for rank in range(RANKS)]
        for engine in self.engines:
            engine.start_over()

    def write(self, rank: int, order: SaveOrder, state: dict[str, Any]) -> Any:
        """Write the part of one rank."""
        staged = self._stagers[rank].stage(state)
        staged.plan = plan_save(staged.state)
        request = SaveRequest(step=int(order.name.split("-")[1]), metrics={}, user={}, waited_seconds=0.0, order=order)
        return self.engines[rank].save(request, staged, lambda progress: None)

    def near(self, step: int) -> tuple[SaveOrder, list[Any]]:
        """Write the parts of all ranks."""
        order = self.engines[0].order(step)
        return order, together(lambda rank: self.write(rank, order, self._state(rank, step)))

    def upload(self, order: SaveOrder, written: list[Any]) -> list[Any]:
        def one(rank: int) -> Any:
            return self.noting(rank, order, lambda: self.engines[rank].upload(written[rank], lambda progress: None))

        return together(one)

    def noting(self, rank: int, order: SaveOrder, function: Callable[[], Any]) -> Any:
        """Call `function`, and notify the other ranks if it fails, as the manager does."""
        try:
            return function()
        except Exception as error:
            publish_failure(self.engines[rank].tiers.origin.checkpoint(order.name), rank, order.save_id, error)
            raise

    def save(self, step: int) -> list[Any]:
        return self.upload(*self.near(step))

    def complete(self) -> list[int]:
        """The steps that are complete at the origin, each of which can be read."""
        names = sorted(path.parent.name for path in (self.root / "origin").glob("*/manifest.millrace"))
        for name in names:
            load_weights(self.root / "origin" / name)
        return [int(name.split("-")[1]) for name in names]

    def steps(self) -> list[int]:
        """The steps at the origin that led to the newest one."""
        return [each.step for each in self._timeline()]

    def latest(self) -> dict[str, Any]:
        """The state of the newest step at the origin."""
        return load_weights(self.root / "origin" / self._timeline()[-1].name)

    def _timeline(self) -> list[ListedCheckpoint]:
        return timeline(each for each in self.engines[0].tiers.origin.scan() if each.complete)

    def data_file(self, rank: int, step: int) -> Path:
        """The data file of a step on the disk of a rank."""
        [file] = (self.root / f"node{rank}").glob(f"*/{checkpoint_name(step)}/data-*")
        return file


def together(function: Callable[[int], Any]) -> list[Any]:
    """What each rank returns, or its error."""

    def one(rank: int) -> Any:
        try:
            return function(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def kinds(results: list[Any]) -> list[str]:
    return [type(result).__name__ for result in results]


def test_delta_to_a_save_that_failed_in_the_upload_fails_on_all_ranks(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert kinds(job.save(1)) == ["SaveResult", "SaveResult"]
    second, third = job.near(2), job.near(3)
    assert third[0].base is not None
    flip_in_the_middle(job.data_file(1, 2))
    assert all(isinstance(result, CorruptCheckpointError) for result in job.upload(*second))
    assert all(isinstance(result, BaseGoneError) for result in job.upload(*third))
    assert job.complete() == [1]
    assert kinds(job.save(4)) == ["SaveResult", "SaveResult"]
    assert job.complete() == [1, 4]


def test_save_that_never_reached_the_origin_is_not_the_independent_one(tmp_path: Path) -> None:
    job = Job(tmp_path, independent=True)
    first = job.near(1)
    flip_in_the_middle(job.data_file(1, 1))
    assert all(isinstance(result, CorruptCheckpointError) for result in job.upload(*first))
    bases = []
    for step in (2, 3, 4):
        order, written = job.near(step)
        bases.append(order.base)
        assert kinds(job.upload(order, written)) == ["SaveResult", "SaveResult"]
    assert bases == [None, None, checkpoint_name(3)]


def test_failing_rank_leaves_the_directory_for_the_notices_of_all(tmp_path: Path) -> None:
    job = Job(tmp_path)
    order, written = job.near(1)
    flip_in_the_middle(job.data_file(1, 1))
    assert kinds(job.upload(order, written)) == ["CorruptCheckpointError", "CorruptCheckpointError"]
    names = {path.name for path in (tmp_path / "origin" / order.name).iterdir()}
    assert {name.split("-")[1] for name in names if name.startswith("failed-")} == {"0", "1"}


@pytest.mark.parametrize("harm", [Path.unlink, flip_in_the_middle])
def test_part_with_bad_data_from_an_earlier_process_blocks_no_later_save(
    tmp_path: Path, events: list[Event], harm: Callable[[Path], None]
) -> None:
    job = Job(tmp_path)
    job.save(1)
    job.near(2)
    harm(job.data_file(1, 2))
    job.restart()
    assert kinds(job.save(3)) == ["SaveResult", "SaveResult"]
    assert kinds(job.save(4)) == ["SaveResult", "SaveResult"]
    assert job.complete() == [1, 3, 4]
    assert "checkpoint.tier.left" in {event.name for event in events}


def test_parts_of_two_dead_saves_of_one_step_block_no_later_save(tmp_path: Path) -> None:
    job = Job(tmp_path)
    common = {"both": torch.zeros(5)}
    job.write(1, job.engines[0].order(2), {**common, "w1": torch.zeros(4)})
    job.restart()
    job.write(0, job.engines[0].order(2), {**common, "w0": torch.zeros(3)})
    job.restart()
    assert kinds(job.save(3)) == ["SaveResult", "SaveResult"]
    assert kinds(job.save(4)) == ["SaveResult", "SaveResult"]
    assert job.complete() == [3, 4]


def test_step_whose_first_save_died_between_the_ranks_is_saved_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.save(1)
    dead = job.engines[0].order(2)
    job.write(1, dead, weights(1, 2))
    job.restart()
    order, written = job.near(2)
    assert order.name == dead.name
    assert kinds(job.upload(order, written)) == ["SaveResult", "SaveResult"]
    assert job.complete() == [1, 2]
    found = load_weights(tmp_path / "origin" / order.name)
    assert torch.equal(found["w1"], weights(1, 2)["w1"])


def test_pruned_checkpoint_does_not_return_after_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, down = Uploader._upload_part, {2, 5}

    def upload(self: Uploader, written: Any, progress: Any) -> Any:
        if int(written.name.split("-")[1]) in down:
            raise OriginUnavailableError("an outage", next_step="wait")
        return real(self, written, progress)

    monkeypatch.setattr(Uploader, "_upload_part", upload)
    job = Job(tmp_path)
    assert kinds(job.save(1)) == ["SaveResult", "SaveResult"]
    assert kinds(job.upload(*job.near(2))) == ["OriginUnavailableError", "OriginUnavailableError"]
    assert kinds(job.save(3)) == ["SaveResult", "SaveResult"]
    assert job.complete() == [1, 2, 3]
    saver = job.engines[0]._saver
    assert saver is not None
    saver.state.is_next_full = True
    assert kinds(job.save(4)) == ["SaveResult", "SaveResult"]
    prune(job.engines[0].tiers.origin, KeepLast(1), independent=False)
    assert job.complete() == [4]
    job.upload(*job.near(5))
    assert kinds(job.save(6)) == ["SaveResult", "SaveResult"]
    assert job.complete() == [4, 5, 6]


def test_later_step_that_a_dead_job_has_uploaded_does_not_return_with_an_earlier_one(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.save(1)
    order, _ = job.near(3)
    for rank, engine in enumerate(job.engines):
        # Rank 0 dies before the manifest.
        assert engine.uploader is not None
        near = engine.uploader.local.checkpoint(order.name)
        part = StoredManifest.read(near, part_name(rank, order.save_id))
        own = [file.name for file in part.manifest.files if not file.name.startswith("../")]
        engine.uploader._copy_part(near, engine.tiers.origin.checkpoint(order.name), part, own)
    shutil.rmtree(tmp_path / "node1")  # so step 1 is restored
    job.restart()
    assert kinds(job.save(2)) == ["SaveResult", "SaveResult"]
    assert job.steps() == [1, 2]


def test_manifest_that_appears_after_the_run_was_taken_is_not_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Job(tmp_path, is_near=False)
    lost.near(1)
    order = lost.engines[0].order(3)
    held, go_on = threading.Event(), threading.Event()
    real = publish_manifest

    def publish(target: CheckpointStorage, stored: StoredManifest) -> None:
        if stored.manifest.save_id == order.save_id:  # its claim was checked just before
            held.set()
            assert go_on.wait(300)
        real(target, stored)

    monkeypatch.setattr(parts, "publish_manifest", publish)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(together, lambda rank: lost.write(rank, order, weights(rank, 3)))
        assert held.wait(300)
        job = Job(tmp_path, is_near=False)
        for engine in job.engines:
            engine.start_over()
        assert kinds(job.near(2)[1]) == ["Written", "Written"]
        go_on.set()
        assert kinds(late.result()) == ["Written", "Written"]
    assert job.steps() == [1, 2]
    assert kinds(job.near(3)[1]) == ["Written", "Written"]
    assert job.steps() == [1, 2, 3]
    assert torch.equal(job.latest()["w0"], weights(0, 3)["w0"])


@pytest.mark.parametrize("is_readable", [True, False])
def test_disk_that_fails_after_the_manifest_is_visible_costs_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    job = Job(tmp_path, is_near=False)
    job.near(1)
    real, publish, failed = storages._sync_directory, parts.publish_manifest, []
    first = threading.local()  # the other rank may still sync its part when the manifest is visible

    def noted(storage: CheckpointStorage, manifest: StoredManifest) -> None:
        first.publishes = True
        publish(storage, manifest)

    def sync(path: str) -> None:
        if hasattr(first, "publishes") and (Path(path) / "manifest.millrace").exists() and not failed:
            failed.append(path)
            raise OSError(5, "Input/output error", path)
        real(path)

    def stat(storage: storages.LocalStorage, name: str) -> StoredFile:
        if failed and not is_readable and hasattr(first, "publishes"):
            raise StorageError(f"{name} failed (Input/output error)", next_step="check the disk")
        return real_stat(storage, name)

    real_stat = storages.LocalStorage.stat
    with monkeypatch.context() as patch:
        patch.setattr(parts, "publish_manifest", noted)
        patch.setattr(storages, "_sync_directory", sync)
        patch.setattr(storages.LocalStorage, "stat", stat)
        _, written = job.near(2)
    assert failed
    assert isinstance(written[0], OutcomeUnknownError)
    assert job.complete() == [1, 2]


def test_files_of_all_ranks_stay_where_the_manifest_may_appear_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, late = Job(tmp_path, is_near=False), []

    def lose(storage: CheckpointStorage, manifest: StoredManifest) -> None:
        late.append((storage, manifest))
        raise OutcomeUnknownError("no response", next_step="wait")

    monkeypatch.setattr(parts, "publish_manifest", lose)
    order = job.engines[0].order(1)
    results = together(lambda rank: job.noting(rank, order, lambda: job.write(rank, order, weights(rank, 1))))
    assert kinds(results) == ["OutcomeUnknownError", "OutcomeUnknownError"]
    publish_manifest(*late[0])
    assert job.complete() == [1]


def test_files_of_other_ranks_stay_where_a_dead_saver_may_have_sent_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, late = Job(tmp_path, is_near=False), []

    class Killed(BaseException):
        """Ends a saver, which removes nothing."""

    def send(storage: CheckpointStorage, manifest: StoredManifest) -> None:
        late.append((storage, manifest))
        raise Killed

    discard = run_saver.discard

    def discard_unless_killed(storage: CheckpointStorage, names: Sequence[str]) -> None:
        if not isinstance(sys.exc_info()[1], Killed):
            discard(storage, names)

    def write(rank: int) -> Any:
        try:
            return job.write(rank, order, weights(rank, 1))
        except Killed as error:
            raise SaverDiedError("the saver was killed", next_step="save again") from error

    monkeypatch.setattr(parts, "publish_manifest", send)
    monkeypatch.setattr(run_saver, "discard", discard_unless_killed)
    order = job.engines[0].order(1)
    results = together(lambda rank: job.noting(rank, order, lambda: write(rank)))
    assert kinds(results) == ["SaverDiedError", "SaverDiedError"]
    publish_manifest(*late[0])
    assert job.complete() == [1]


def test_disk_that_fails_after_a_part_is_visible_costs_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, is_near=False)
    order = job.engines[0].order(1)
    real, failed = storages._sync_directory, []

    def sync(path: str) -> None:
        if (Path(path) / part_name(1, order.save_id)).exists() and not failed:
            failed.append(path)
            raise OSError(5, "Input/output error", path)
        real(path)

    monkeypatch.setattr(storages, "_sync_directory", sync)
    with pytest.raises(OutcomeUnknownError):
        job.write(1, order, weights(1, 1))
    job.write(0, order, weights(0, 1))
    assert job.complete() == [1]


def test_damaged_part_of_an_older_save_does_not_hide_a_newer_one(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.save(1)
    damaged, _ = job.near(2)
    job.near(3)
    job.engines[0].close()
    shutil.copytree(tmp_path / "node1", tmp_path / "node0", dirs_exist_ok=True)
    [part] = (tmp_path / "node0").glob(f"*/{checkpoint_name(2)}/{part_name(0, damaged.save_id)}")
    flip_in_the_middle(part)
    found = {f"w{rank}": torch.zeros(300_000) for rank in range(RANKS)}
    with CheckpointManager(tmp_path / "origin", local=tmp_path / "node0") as run:
        assert run.restore(found) == 3
    for rank in range(RANKS):
        assert torch.equal(found[f"w{rank}"], weights(rank, 3)[f"w{rank}"])


def test_outage_for_another_rank_than_the_first_does_not_report_the_save_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, is_near=False)
    order = job.engines[0].order(1)

    def outage(storage: CheckpointStorage) -> StoredManifest:
        raise OriginUnavailableError("an outage", next_step="wait")

    with monkeypatch.context() as patch:
        patch.setattr(parts.StoredManifest, "read", outage)
        results = together(lambda rank: job.noting(rank, order, lambda: job.write(rank, order, weights(rank, 1))))
    assert kinds(results) == ["Written", "OutcomeUnknownError"]
    assert job.complete() == [1]


def test_rank_that_lost_the_run_leaves_the_part_of_its_successor(tmp_path: Path) -> None:
    lost, job = Job(tmp_path, is_near=False), Job(tmp_path, is_near=False)
    former, order = lost.engines[0].order(1), job.engines[0].order(1)
    assert former.name == order.name

    storage = job.engines[0].tiers.origin.checkpoint(order.name)
    with ThreadPoolExecutor(2) as pool:
        saved = pool.submit(job.write, 1, order, weights(1, 1))
        wait_until(lambda: part_name(1, order.save_id) in storage.names())
        late = pool.submit(lost.write, 1, former, weights(1, 2))
        wait_until(lambda: part_name(1, former.save_id) in storage.names())
        # Its notices do not concern the successor either.
        publish_failure(storage, 1, former.save_id, RunTakenError("taken", next_step="end"))
        publish_failure(storage, 0, former.save_id, RunTakenError("taken", next_step="end"))
        assert isinstance(late.exception(), RunTakenError)
        assert part_name(1, order.save_id) in storage.names()
        job.write(0, order, weights(0, 1))
        assert saved.exception() is None
    assert job.complete() == [1]


def test_pruning_during_an_upload_leaves_a_step_that_a_dead_job_had_begun(tmp_path: Path) -> None:
    job = Job(tmp_path)
    run = job.engines[0].tiers.origin
    dead = Claim.take(run)
    dead.announce([checkpoint_name(1)])
    dead.abandon_saves()
    dead.announce([])
    dead.release()
    order, written = job.near(1)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(job.engines[1].upload, written[1], lambda progress: None)
        wait_until(lambda: part_name(1, order.save_id) in run.checkpoint(order.name).names())
        job.engines[0].retention.prune_after_save()
        assert part_name(1, order.save_id) in run.checkpoint(order.name).names()
        job.engines[0].upload(written[0], lambda progress: None)
        assert late.exception() is None
    assert job.complete() == [1]


def restore_next_to(job: Job) -> int | None:
    """Restore in another process of the node, while the job has not uploaded yet."""
    found = {f"w{rank}": torch.zeros(300_000) for rank in range(RANKS)}
    with CheckpointManager(job.root / "origin", local=job.root / "node0") as run:
        return run.restore(found)


def test_restore_of_another_process_of_the_node_leaves_the_parts_to_the_upload(tmp_path: Path) -> None:
    job = Job(tmp_path, one_node=True)
    order, written = job.near(1)
    assert restore_next_to(job) == 1
    assert kinds(job.upload(order, written)) == ["SaveResult", "SaveResult"]
    assert kinds(job.save(2)) == ["SaveResult", "SaveResult"]
    assert job.complete() == [1, 2]


def test_save_that_another_job_has_joined_on_the_disk_outlasts_its_failed_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outage(recovery: Recovery) -> None:
        raise OriginUnavailableError("an outage", next_step="wait")

    def taken(self: RunSaver) -> None:
        raise RunTakenError("taken", next_step="end")

    job = Job(tmp_path, one_node=True)
    order, written = job.near(1)
    monkeypatch.setattr(Recovery, "recover", outage)
    assert restore_next_to(job) == 1
    monkeypatch.setattr(RunSaver, "check_claim", taken)
    assert kinds(job.upload(order, written)) == ["RunTakenError", "RunTakenError"]
    shutil.rmtree(tmp_path / "origin")
    assert restore_next_to(job) == 1


def test_pruned_checkpoint_does_not_return_from_its_parts(tmp_path: Path) -> None:
    job = Job(tmp_path, one_node=True)
    job.near(1)
    assert restore_next_to(job) == 1
    job.restart()
    job.save(2)
    local = job.engines[0].tiers.local
    assert local is not None
    assert prune(local, KeepLast(1), independent=False).removed == (checkpoint_name(1),)
    assert not list((tmp_path / "node0").glob(f"*/{checkpoint_name(1)}/*"))


def test_last_of_two_saves_of_one_name_in_parts_is_restored(tmp_path: Path) -> None:
    """The second job began without the disks of the first one, which are there again."""
    disks = []
    for number, save_id in enumerate(("0" * 32, "f" * 32), 1):
        job = Job(tmp_path, one_node=True, state=lambda rank, _, number=number: {f"w{rank}": torch.full((9,), number)})
        order = replace(job.engines[0].order(1), save_id=save_id)
        together(lambda rank, job=job, order=order: job.write(rank, order, job._state(rank, 1)))
        job.restart()
        disks.append((tmp_path / "node0").rename(tmp_path / f"disk{number}"))
    for disk in disks:
        shutil.copytree(disk, tmp_path / "node0", dirs_exist_ok=True)
    found = {f"w{rank}": torch.zeros(9, dtype=torch.int64) for rank in range(RANKS)}
    with CheckpointManager(tmp_path / "origin", local=tmp_path / "node0") as run:
        assert run.restore(found) == 1
    assert [int(each[0]) for each in found.values()] == [2, 2]


def test_joined_manifest_requires_sparse_when_any_part_does(tmp_path: Path) -> None:
    def state(rank: int, step: int) -> dict[str, Any]:
        values = torch.randn(300_000, generator=torch.Generator().manual_seed(rank))
        if rank == 1:
            values[::1000] += step
        return {f"w{rank}": values}

    job = Job(tmp_path, state=state)
    job.save(1)
    order, written = job.near(2)
    found = [
        StoredManifest.read(engine.tiers.local.checkpoint(order.name), part_name(rank, order.save_id)).manifest
        for rank, engine in enumerate(job.engines)
        if engine.tiers.local is not None
    ]
    assert [part.sparse for part in found] == [False, True]
    assert kinds(job.upload(order, written)) == ["SaveResult", "SaveResult"]
    assert StoredManifest.read(job.engines[0].tiers.origin.checkpoint(order.name)).manifest.sparse
