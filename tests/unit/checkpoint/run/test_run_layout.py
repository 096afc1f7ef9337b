"""A run's directory: its names, one listing of all of it, and the description of each checkpoint."""

from __future__ import annotations

import itertools
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.runs import add_checkpoint, add_file, complete, data_name, local_run, object_run, own_paths, tree

from millrace.checkpoint import CheckpointWriter
from millrace.checkpoint.format.manifest import MANIFEST_NAME, DataFile, Manifest
from millrace.checkpoint.format.tables import NO_BASE, chunk_table, item_table
from millrace.checkpoint.run import run_layout as layout_module
from millrace.checkpoint.run.pruning import prune
from millrace.checkpoint.run.run_info import info_of_manifest
from millrace.checkpoint.run.run_layout import checkpoint_name, open_run, parse_name
from millrace.checkpoint.storage.storage import LocalStorage
from millrace.errors import (
    ChangedError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DeniedError,
    DiskFullError,
    OriginUnavailableError,
    StorageError,
    UnsupportedFormatError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(params=["local", "object store"])
def run(request, tmp_path):
    return (local_run if request.param == "local" else object_run)(tmp_path / "run")


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "name"),
    [((0, 0), "step-000000000000"), ((1234, 0), "step-000000001234"), ((10**12 - 1, 12), "step-999999999999-r12")],
)
def test_checkpoint_names_are_parsed(at, name):
    assert checkpoint_name(*at) == name
    assert parse_name(name) == at
    assert checkpoint_name(*at) == name


@pytest.mark.parametrize(
    "name",
    ["", "step-1", "step-0000000000001", "step-000000000001-r0", "step-000000000001-r01", "step-000000000001-r",
     "step-000000000001 ", "Step-000000000001", "step-000000000001/x", "../step-000000000001", "step-٠٠٠٠٠٠٠٠٠٠٠١"],
)  # fmt: skip
def test_foreign_names_are_not_parsed(name):
    assert parse_name(name) is None


@pytest.mark.parametrize("at", [(-1, 0), (10**12, 0), (1, -1)])
def test_impossible_steps_raise(at):
    with pytest.raises(ConfigurationError):
        checkpoint_name(*at)


def test_names_sort_like_steps():
    steps = [0, 9, 10, 999, 10**11]
    assert sorted(map(checkpoint_name, steps)) == [checkpoint_name(step) for step in steps]


# --- listing --------------------------------------------------------------------------------------


def test_scan_of_empty_run_is_empty(run):
    assert run.scan() == []
    assert run.files("writer-") == []


def test_scan_returns_complete_and_incomplete_checkpoints(run, tmp_path):
    add_checkpoint(run, 20)
    add_checkpoint(run, 10, files=2)
    add_file(run, checkpoint_name(30), data_name(), 7)
    place = tmp_path / "run"
    for foreign in ("notes/manifest.millrace", "step-5/manifest.millrace", "step-000000000010/deep/manifest.millrace"):
        (place / foreign).parent.mkdir(parents=True)
        (place / foreign).write_bytes(b"foreign")
    (place / "step-000000000040").write_bytes(b"a file of this name")
    (place / "readme.txt").write_bytes(b"mine")
    (place / "step-000000000010" / "notes.txt").write_bytes(b"mine")
    found = run.scan()
    assert [(each.step, each.complete, len(each.files)) for each in found] == [
        (10, True, 4),
        (20, True, 2),
        (30, False, 1),
    ]
    assert {each.manifest.name if each.manifest else None for each in found} == {MANIFEST_NAME, None}
    assert {file.name for file in run.look().files} == {"step-000000000040", "readme.txt"}


def test_scan_of_missing_or_replaced_directory_is_empty(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / checkpoint_name(1)).symlink_to(tmp_path / "gone")
    assert local_run(tmp_path / "file").scan() == []
    assert local_run(tmp_path / "run").scan() == []


def test_scan_follows_links_to_checkpoints(tmp_path):
    elsewhere, run = local_run(tmp_path / "elsewhere"), local_run(tmp_path / "run")
    add_checkpoint(elsewhere, 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / checkpoint_name(1)).symlink_to(tmp_path / "elsewhere" / checkpoint_name(1))
    assert complete(run) == [checkpoint_name(1)]


def test_scan_ignores_empty_directories(tmp_path):
    run = local_run(tmp_path)
    (tmp_path / checkpoint_name(3)).mkdir()
    listing = run.look()
    assert listing.checkpoints == ()
    assert [each.name for each in listing.empty] == [checkpoint_name(3)]


def test_scan_skips_checkpoints_removed_meanwhile(tmp_path, monkeypatch):
    run = local_run(tmp_path)
    for step in range(4):
        add_checkpoint(run, step)
    names, left = LocalStorage.names, []

    def racing(self):
        seen = names(self)
        if self.url.endswith(checkpoint_name(1)):
            run.remove(checkpoint_name(1), seen)
        if self.url.endswith(checkpoint_name(2)):
            run.remove(checkpoint_name(2), seen[:1])
            left.append(seen[1])
        return seen

    monkeypatch.setattr(LocalStorage, "names", racing)
    found = run.scan()
    assert [each.step for each in found] == [0, 2, 3]
    assert [file.name for file in found[1].files] == left


def after_directories(monkeypatch, run, action):
    """Calls `action` each time the run's directories were listed, before their files are."""
    directories = LocalStorage.directories

    def then_act(self):
        found = directories(self)
        if self.url == run.url:
            action()
        return found

    monkeypatch.setattr(LocalStorage, "directories", then_act)


def test_scan_while_all_checkpoints_are_replaced_finds_the_new_one(tmp_path, monkeypatch):
    """The run seemed to be empty, and a restore began anew."""
    run, new = local_run(tmp_path / "run"), []
    for step in (7, 8):
        add_checkpoint(run, step)

    def replace_all():
        if new:
            return
        new.append(checkpoint_name(9))
        add_checkpoint(run, 9)
        for step in (7, 8):
            shutil.rmtree(tmp_path / "run" / checkpoint_name(step))

    after_directories(monkeypatch, run, replace_all)
    assert complete(run) == new


def test_scan_while_a_listed_save_replaces_all_checkpoints_finds_it(tmp_path, monkeypatch):
    """It began again from an earlier step: its directory, which had no manifest yet, is listed before the others."""
    run, new, names = local_run(tmp_path / "run"), checkpoint_name(5, 1), LocalStorage.names
    for step in (7, 8):
        add_checkpoint(run, step)
    add_file(run, new, data_name())

    def replaced_before(self):
        if self.url.endswith(checkpoint_name(7)):
            monkeypatch.setattr(LocalStorage, "names", names)
            add_checkpoint(run, 5, revision=1)
            for step in (7, 8):
                shutil.rmtree(tmp_path / "run" / checkpoint_name(step))
        return names(self)

    monkeypatch.setattr(LocalStorage, "names", replaced_before)
    assert complete(run) == [new]


def test_scan_that_always_misses_newer_checkpoints_raises(tmp_path, monkeypatch):
    run = local_run(tmp_path / "run")
    steps = itertools.count()
    after_directories(monkeypatch, run, lambda: add_file(run, checkpoint_name(next(steps)), data_name()))
    monkeypatch.setattr(layout_module, "_WALKS", 3)
    with pytest.raises(ChangedError, match="faster than they can be listed"):
        run.scan()


def test_highest_complete_revision_of_a_step_is_used(run):
    for revision in range(3):
        add_checkpoint(run, 10, revision=revision)
    add_file(run, checkpoint_name(10, 3), data_name())
    add_checkpoint(run, 11)
    found = {(each.step, each.revision): each for each in run.scan()}
    assert [at for at, each in found.items() if each.superseded] == [(10, 0), (10, 1)]
    assert not found[10, 3].complete
    assert run.describe(found[10, 1]).superseded
    assert not run.describe(found[10, 2]).superseded


# --- describing -----------------------------------------------------------------------------------


def test_describe_returns_the_facts_of_a_checkpoint(run):
    first = add_checkpoint(run, 1, files=2, metrics={"loss": 0.5}, full=checkpoint_name(1))
    (base, _) = own_paths(first)
    info = run.describe(add_checkpoint(run, 2, siblings=[base], full=checkpoint_name(1), created=123.0))
    assert (info.name, info.step, info.kind, info.bases) == (checkpoint_name(2), 2, "delta", {first.name})
    assert (info.url, info.created, info.full) == (f"{run.url}/{checkpoint_name(2)}", 123.0, first.name)
    assert info.files > {f"../{base}"}
    assert info.complete
    assert not info.superseded
    earlier = run.describe(first)
    assert (earlier.kind, earlier.bases, earlier.metrics, earlier.user) == ("full", frozenset(), {"loss": 0.5}, {})
    assert earlier.stored_bytes == sum(file.size for file in first.files)
    assert earlier.published == first.manifest.modified


def test_manifest_is_read_once_per_version(run, monkeypatch):
    found = add_checkpoint(run, 1)
    reads = []
    load = layout_module.load_manifest
    monkeypatch.setattr(layout_module, "load_manifest", lambda *args: reads.append(args) or load(*args))
    assert run.describe(found) == run.describe(found)
    assert len(reads) == 1
    again = add_checkpoint(run, 1, metrics={"loss": 1.0})
    assert run.describe(again).metrics == {"loss": 1.0}
    assert len(reads) == 2


def test_incomplete_checkpoint_is_described_by_its_files(run):
    add_file(run, checkpoint_name(4), data_name(), 70)
    (found,) = run.scan()
    info = run.describe(found)
    assert (info.complete, info.kind, info.stored_bytes, info.raw_bytes) == (False, None, 70, 0)
    assert info.created == found.files[0].modified


def test_checkpoint_removed_after_listing_is_skipped(run):
    found = add_checkpoint(run, 1)
    run.remove(found.name, [file.name for file in found.files])
    with pytest.raises(CheckpointNotFoundError, match="removed or replaced while it was read"):
        run.describe(found)
    assert run.describe_all([found]) == {}


def test_damaged_and_newer_manifests_are_reported_separately(run):
    good = add_checkpoint(run, 1)
    for step, data in ((2, b"damaged"), (3, b"")):
        add_file(run, checkpoint_name(step), MANIFEST_NAME, 0)
        run.checkpoint(checkpoint_name(step)).publish(MANIFEST_NAME, data, replace=True)
    described = run.describe_all(run.scan())
    assert described[good.name] == run.describe(good)
    assert [type(each) for each in described.values()][1:] == [CorruptCheckpointError] * 2
    assert issubclass(UnsupportedFormatError, ValueError)
    with pytest.raises(CorruptCheckpointError, match=checkpoint_name(2)):
        run.describe(run.scan()[1])


def test_manifest_that_the_disk_cannot_read_is_an_error_of_its_checkpoint(tmp_path):
    run = local_run(tmp_path)
    for step in (1, 2):
        add_checkpoint(run, step)
    for loop in (tmp_path / checkpoint_name(1) / MANIFEST_NAME, tmp_path / "foreign"):
        loop.unlink(missing_ok=True)
        loop.symlink_to(loop.name)
    assert complete(run) == [checkpoint_name(1), checkpoint_name(2)]
    described = run.describe_all(run.scan())
    assert type(described[checkpoint_name(1)]) is StorageError
    assert described[checkpoint_name(2)].complete
    report = prune(run, 1)
    assert (report.unreadable, report.removed) == ((checkpoint_name(1),), ())


@pytest.mark.parametrize("error", [OriginUnavailableError("no answer"), DiskFullError("no room"), DeniedError("no")])
def test_describe_all_of_a_storage_that_fails_raises(run, monkeypatch, error):
    add_checkpoint(run, 1)
    monkeypatch.setattr(type(run.checkpoint("")), "read", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        run.describe_all(run.scan())


def test_checkpoint_without_manager_is_described(run, tmp_path):
    place = tmp_path / "run" / checkpoint_name(7)
    dcp.save({"x": torch.zeros(1000), "n": 3}, storage_writer=CheckpointWriter(place, user_metadata={"note": "mine"}))
    (found,) = run.scan()
    info = run.describe(found)
    summary = sum(file.size for file in found.files)
    assert (info.kind, info.full, info.metrics, info.user) == ("full", None, {}, {"note": "mine"})
    assert info.stored_bytes == summary
    assert 0 < info.restore_bytes <= summary
    assert info.raw_bytes >= 4000


@pytest.mark.parametrize(
    "user",
    [{"run": 3}, {"run": {"metrics": [1], "full": 9}}, {"run": {"metrics": {"a": "b", "loss": 2}}, "user": "text"}],
)
def test_invalid_run_record_is_ignored(user):
    manifest = Manifest(
        created=1.0, writer="", files=(), tensors=(), blobs=(), items=item_table(), chunks=chunk_table(), user=user
    )
    info = info_of_manifest(manifest, 10, name="n", url="u", step=1, revision=0, published=2.0)
    assert info.full is None
    assert set(info.metrics) <= {"loss"}
    assert isinstance(info.user, dict)


def test_restore_bytes_count_each_stored_chunk_once():
    """Two ranks name the same file of a sibling, each for itself; one chunk of it is a base and a reference."""
    chunks = {
        "kind": [0] * 5,
        "file": [0, 1, 2, 2, 0],
        "base": [NO_BASE, NO_BASE, NO_BASE, 1, NO_BASE],
        "raw_bytes": [9] * 5,
        "stored_bytes": [5, 5, 7, 3, 6],
        "offset": [10, 10, 0, 7, 20],
    }
    files = (
        DataFile("../b/data-1.millrace", 99),
        DataFile("../b/data-1.millrace", 99),
        DataFile("data-2.millrace", 10),
    )
    values = {**chunks, "stored_checksum": [0] * 5, "raw_checksum": [0] * 5}
    manifest = Manifest(
        created=1.0, writer="", files=files, tensors=(), blobs=(), items=item_table(), chunks=chunk_table(values)
    )
    info = info_of_manifest(manifest, 100, name="a", url="", step=1, revision=0, published=0.0)
    assert info.restore_bytes == 100 + 5 + 7 + 3 + 6
    assert (info.stored_bytes, info.kind, info.bases) == (110, "delta", {"b"})


# --- removing -------------------------------------------------------------------------------------


def test_remove_deletes_the_manifest_first(tmp_path, monkeypatch):
    run = open_run(tmp_path)
    found = add_checkpoint(run, 1, files=3)
    gone, unlink = [], os.unlink
    monkeypatch.setattr(os, "unlink", lambda path, **more: gone.append(os.path.basename(path)) or unlink(path, **more))
    run.remove(found.name, [file.name for file in found.files])
    assert gone[0] == MANIFEST_NAME
    assert len(gone) == 4
    assert tree(tmp_path) == {"./": 0}
    run.remove(found.name, ["data-gone.millrace"])  # a missing file does not raise


def test_remove_keeps_a_directory_with_other_files(tmp_path):
    run = local_run(tmp_path)
    found = add_checkpoint(run, 1)
    (tmp_path / found.name / "notes.txt").write_bytes(b"mine")
    run.remove(found.name, [file.name for file in found.files])
    assert tree(tmp_path) == {f"{found.name}/notes.txt": 4}


def test_remove_refuses_other_names(run):
    for name in ("notes", "..", "", "step-1"):
        with pytest.raises(ConfigurationError):
            run.remove(name, ["x"])


def test_open_run_of_invalid_place_raises(tmp_path):
    assert not open_run(tmp_path).is_remote
    remote = open_run("s3://bucket/runs/a/", {"endpoint_url": "http://127.0.0.1:1"})
    assert (remote.is_remote, remote.url) == (True, "s3://bucket/runs/a")
    assert remote.url_of("x") == remote.checkpoint("x").url == "s3://bucket/runs/a/x"
    assert open_run(f"file://{tmp_path}").url == str(tmp_path)
    for wrong in ("", "s3://bucket", "nope://b/x", "s3:/b/x"):
        with pytest.raises(ConfigurationError):
            open_run(wrong)
