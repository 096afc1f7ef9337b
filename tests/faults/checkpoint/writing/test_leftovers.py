"""Leftovers of failed and killed saves: removed at once if they are certainly unused, otherwise a day later."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.checkpoint.storage.base import StoredFile
from millrace.checkpoint.storage.manifests import ORPHAN_SECONDS, find_orphans, old_before
from millrace.checkpoint.storage.storage import LocalStorage
from millrace.checkpoint.writing import packing as packing_module
from millrace.checkpoint.writing import rank_writer
from millrace.errors import CheckpointNotFoundError, OutcomeUnknownError, StorageError, UsageError
from millrace.events import add_hook

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

DAY = ORPHAN_SECONDS


def save(seed: int, place, **options) -> CheckpointWriter:
    writer = CheckpointWriter(place, **options)
    dcp.save({"x": torch.full((50_000,), float(seed))}, storage_writer=writer)
    return writer


def loaded(place, reader=CheckpointReader) -> float:
    state = {"x": torch.zeros(50_000)}
    dcp.load(state, storage_reader=reader(place))
    assert (state["x"] == state["x"][0]).all()
    return float(state["x"][0])


def names(place) -> set[str]:
    return set(os.listdir(place))


@pytest.fixture
def events():
    seen: list[str] = []
    remove = add_hook(lambda event: seen.append(event.name))
    yield seen
    remove()


# --- at once --------------------------------------------------------------------------------------


def test_save_that_fails_at_the_end_removes_files_of_all_ranks(tmp_path, monkeypatch):
    save(1, tmp_path)
    before = names(tmp_path)

    def broken(*args, **options):
        raise StorageError("the disk is gone")

    for module, name in ((rank_writer, "encode_manifest"), (LocalStorage, "publish")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            with pytest.raises(CheckpointException):
                save(2, tmp_path)
        assert names(tmp_path) == before
    assert loaded(tmp_path) == 1


def test_files_that_were_finished_before_the_failure_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(packing_module, "_FILE_BYTES", 1)
    state = {"x": torch.randn(600_000), "y": torch.randn(600_000), "bad": torch.empty(600_000, device="meta")}
    with pytest.raises(CheckpointException):
        dcp.save(state, storage_writer=CheckpointWriter(tmp_path, thread_count=1))
    assert names(tmp_path) == set()


def test_disk_failure_after_the_rename_raises_and_keeps_the_files(tmp_path, monkeypatch):
    save(1, tmp_path)
    replace = os.replace

    def broken_after(source, target):
        replace(source, target)
        if target.endswith("manifest.millrace"):
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", broken_after)
        with pytest.raises(CheckpointException) as caught:
            save(2, tmp_path)
    assert isinstance(caught.value.failures[0][0], OutcomeUnknownError)
    assert loaded(tmp_path) == 2


class Writer(CheckpointWriter):
    """Fails as if another rank had: after this rank's data, before the coordinator's `finish`."""

    failing = True

    def write_data(self, plan, planner):
        future = super().write_data(plan, planner)
        if self.failing:
            raise UsageError("another rank failed")
        return future


def test_abandon_removes_files_that_no_manifest_names(tmp_path):
    save(1, tmp_path)
    before = names(tmp_path)
    writer = Writer(tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": torch.zeros(50_000)}, storage_writer=writer)
    assert len(names(tmp_path) - before) == 1
    writer.abandon(caught.value)
    assert names(tmp_path) == before
    writer.abandon(caught.value)
    # After a save that succeeded there is nothing to abandon.
    writer.failing = False
    dcp.save({"x": torch.full((50_000,), 2.0)}, storage_writer=writer)
    writer.abandon()
    assert loaded(tmp_path) == 2


def test_abandon_keeps_files_that_a_manifest_may_name(tmp_path):
    writer = Writer(tmp_path)
    with pytest.raises(CheckpointException):
        dcp.save({"x": torch.zeros(50_000)}, storage_writer=writer)
    writer.abandon(CheckpointException("write", {0: (OutcomeUnknownError("lost"), None)}))
    assert len(names(tmp_path)) == 1


def test_abandon_after_interrupt_behind_the_rename_keeps_the_new_checkpoint(tmp_path, monkeypatch):
    writer = save(1, tmp_path)
    inner = LocalStorage.publish

    def interrupted(self, name, data, *, replace):
        inner(self, name, data, replace=replace)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", interrupted)
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"x": torch.full((50_000,), 2.0)}, storage_writer=writer)
    writer.abandon(caught.value)
    assert loaded(tmp_path) == 2
    dcp.save({"x": torch.full((50_000,), 3.0)}, storage_writer=writer)
    assert loaded(tmp_path) == 3
    assert len(names(tmp_path) - {"manifest.millrace"}) <= 2  # that of the interrupted save, and the one before it


def test_next_save_of_coordinator_abandons_the_last(tmp_path):
    writer = Writer(tmp_path / "a")
    with pytest.raises(CheckpointException):
        dcp.save({"x": torch.zeros(50_000)}, storage_writer=writer)
    writer.failing = False
    dcp.save({"x": torch.zeros(50_000)}, storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert names(tmp_path / "a") == set()
    assert len(names(tmp_path / "b")) == 2


# --- later ----------------------------------------------------------------------------------------


def file(name: str, age: float) -> StoredFile:
    return StoredFile(name, 1, "", 1e9 - age)


@pytest.mark.parametrize(
    ("name", "age", "orphan"),
    [
        ("data-0a-0-0.millrace", DAY + 1, True),
        ("data-0a-0-0.millrace", DAY - 1, False),
        ("data-0a-0-0.millrace", -5.0, False),
        ("data-owned-0-0.millrace", 9 * DAY, False),
        (".data-0a-0-0.millrace.0123abcd.tmp", DAY + 1, True),
        (".manifest.millrace.0123abcd.tmp", DAY + 1, True),
        (".rank-12.manifest.millrace.0123abcd.tmp", DAY + 1, True),
        (f"part-1-{'0a' * 16}.millrace", DAY + 1, True),
        (f"failed-1-{'0a' * 16}.json", DAY + 1, True),
        (f".part-1-{'0a' * 16}.millrace.0123abcd.tmp", DAY + 1, True),
        (f".failed-1-{'0a' * 16}.json.0123abcd.tmp", DAY + 1, True),
        ("failed.json", 9 * DAY, False),
        ("manifest.millrace", 9 * DAY, False),
        ("rank-3.manifest.millrace", 9 * DAY, False),
        (".metadata", 9 * DAY, False),
        ("__0_0.distcp", 9 * DAY, False),
        ("data.csv", 9 * DAY, False),
        ("data-of-mine.parquet", 9 * DAY, False),
        ("DATA-0A-0-0.millrace", 9 * DAY, False),
    ],
)
def test_orphans_are_found_by_name_and_age(name, age, orphan):
    before = old_before(1e9, 2e9)
    assert find_orphans([file(name, age)], {"data-owned-0-0.millrace"}, before) == ([name] if orphan else [])


def test_age_of_orphans_is_bounded_by_the_present_where_the_manifest_is_from_the_future():
    assert old_before(1e9 + 3 * DAY, 1e9) == old_before(1e9, 1e9 + 3 * DAY) == 1e9 - DAY


def age(path, seconds: float) -> None:
    os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def test_later_save_removes_leftovers_of_a_killed_one(tmp_path, events):
    save(1, tmp_path)
    old, young = tmp_path / "data-dead-0-0.millrace", tmp_path / "data-beef-0-0.millrace"
    torn, foreign = tmp_path / ".data-dead-0-1.millrace.01234567.tmp", tmp_path / "notes.txt"
    for path in (old, young, torn, foreign):
        path.write_bytes(b"left behind")
    for path in (old, torn, foreign):
        age(path, DAY + 60)
    save(2, tmp_path)
    assert not old.exists()
    assert not torn.exists()
    assert young.exists()
    assert foreign.exists()
    assert events == ["checkpoint.orphans.removed"]
    assert loaded(tmp_path) == 2


def test_files_of_single_rank_checkpoints_are_not_orphans(tmp_path, events):
    state = {"x": torch.full((50_000,), 1.0)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path), use_collectives=False, no_dist=True)
    for path in tmp_path.iterdir():
        age(path, 2 * DAY)
    kept = names(tmp_path)
    (tmp_path / "data-dead-0-0.millrace").write_bytes(b"")
    age(tmp_path / "data-dead-0-0.millrace", 2 * DAY)
    save(2, tmp_path)
    assert kept <= names(tmp_path)
    assert "data-dead-0-0.millrace" not in names(tmp_path)
    # A manifest that cannot be read may own anything.
    (tmp_path / "rank-7.manifest.millrace").write_bytes(b"damaged")
    (tmp_path / "data-dead-0-0.millrace").write_bytes(b"")
    age(tmp_path / "data-dead-0-0.millrace", 2 * DAY)
    save(3, tmp_path)
    assert "data-dead-0-0.millrace" in names(tmp_path)
    assert events == ["checkpoint.orphans.removed", "checkpoint.sweep.failed"]


def test_failed_sweep_does_not_fail_the_save(tmp_path, monkeypatch, events):
    def broken(*args):
        raise StorageError("no listing today")

    monkeypatch.setattr(LocalStorage, "files", broken)
    save(1, tmp_path)
    assert events == ["checkpoint.sweep.failed"]
    assert loaded(tmp_path) == 1


def test_concurrent_savers_leave_one_whole_checkpoint(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        for _ in range(4):
            list(pool.map(lambda seed: save(seed, tmp_path, sync_files=False), range(3)))
            assert loaded(tmp_path) in range(3)
    assert len([name for name in names(tmp_path) if not name.startswith("data-")]) == 1


# --- torch's own writer in the same directory -----------------------------------------------------


def stock_save(seed: int, place) -> None:
    dcp.save({"x": torch.full((50_000,), float(seed))}, storage_writer=dcp.FileSystemWriter(place))


def test_saving_over_a_stock_checkpoint_removes_it(tmp_path):
    stock_save(1, tmp_path)
    (tmp_path / "__9_9.distcp").write_bytes(b"foreign")
    save(2, tmp_path)
    assert loaded(tmp_path) == 2
    assert not [name for name in names(tmp_path) if name.startswith((".metadata", "__0"))]
    with pytest.raises(CheckpointException):
        loaded(tmp_path, dcp.FileSystemReader)


def test_save_over_stock_checkpoint_killed_before_removal_is_loaded(tmp_path, monkeypatch):
    stock_save(1, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "_discard_stock", lambda *_: None)
        save(2, tmp_path)
    assert ".metadata" in names(tmp_path)
    assert loaded(tmp_path) == 2
    assert CheckpointReader(tmp_path).summary().format_version == 1


def test_stock_save_over_millrace_checkpoint_is_loaded(tmp_path):
    save(1, tmp_path)
    stock_save(2, tmp_path)
    assert loaded(tmp_path) == 2
    assert loaded(tmp_path, dcp.FileSystemReader) == 2
    assert CheckpointReader(tmp_path).summary().format_version == 0
    # Copying changes all times, but not what replaced what.
    for name in ("manifest.millrace", ".metadata"):
        age(tmp_path / name, 100 if name == ".metadata" else 0)
    assert loaded(tmp_path) == 2
    save(3, tmp_path)
    assert loaded(tmp_path) == 3
    assert len(names(tmp_path)) == 2


def test_stock_checkpoint_without_overwrite_is_kept(tmp_path):
    stock_save(1, tmp_path)
    for options in ({"overwrite": False}, {}):
        with pytest.raises((CheckpointException, UsageError)):
            dcp.save(
                {"x": torch.zeros(5)},
                storage_writer=CheckpointWriter(tmp_path, **options),
                no_dist=True,
                use_collectives=bool(options),
            )
    assert loaded(tmp_path, dcp.FileSystemReader) == 1


def test_empty_directory_has_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        CheckpointReader(tmp_path).summary()
