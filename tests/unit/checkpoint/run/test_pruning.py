"""The effect of a pruning on a run, and on leftovers of crashed saves and prunings."""

from __future__ import annotations

import functools

import pytest
from tests.support.runs import (
    DAY,
    add_checkpoint,
    add_file,
    age,
    assert_whole,
    complete,
    data_name,
    local_run,
    object_run,
    own_paths,
    tree,
)

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.run import pruning
from millrace.checkpoint.run.claims import Claim, ClaimRecord
from millrace.checkpoint.run.processes import this_process
from millrace.checkpoint.run.prune_plan import IN_FLIGHT_SECONDS, Note, plan_work
from millrace.checkpoint.run.retention import KeepAll
from millrace.checkpoint.run.run_layout import ListedCheckpoint, Run, RunListing, checkpoint_name
from millrace.checkpoint.storage.base import StoredFile
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.storage import LocalStorage
from millrace.errors import (
    ChangedError,
    CheckpointNotFoundError,
    ConfigurationError,
    DeniedError,
    DiskFullError,
    OriginUnavailableError,
)

# Exactly the selection of the policy; test_independence.py is about the additional independent one.
prune = functools.partial(pruning.prune, independent=False)


@pytest.fixture(params=["local", "object store"])
def run(request, tmp_path):
    return (local_run if request.param == "local" else object_run)(tmp_path)


def files(tmp_path) -> set[str]:
    return {path for path in tree(tmp_path) if not path.endswith("/")}


def names(*steps: int) -> list[str]:
    return [checkpoint_name(step) for step in steps]


# --- checkpoints ----------------------------------------------------------------------------------


def test_prune_removes_old_checkpoints_and_reports_them(run, tmp_path, events):
    for step in range(1, 6):
        add_checkpoint(run, step, files=2)
    before = tree(tmp_path)
    reported = []
    dry = prune(run, 2, dry_run=True)
    assert tree(tmp_path) == before
    report = prune(run, 2, progress=lambda done, total: reported.append((done, total)))
    assert complete(run) == names(4, 5)
    assert (report.removed, report.kept) == (tuple(names(1, 2, 3)), tuple(names(4, 5)))
    assert report.freed_bytes == sum(before.values()) - sum(tree(tmp_path).values())
    assert report.deleted_files == 9
    assert (dry.freed_bytes, dry.deleted_files, dry.removed) == (report.freed_bytes, 9, report.removed)
    assert (dry.dry_run, report.dry_run) == (True, False)
    assert [done for done, _ in reported] == [1, 2, 3, 5, 7, 9]
    assert {total for _, total in reported} == {9}
    assert [event.name for event in events] == ["checkpoint.pruned"]
    if not run.is_remote:
        assert {path.name for path in tmp_path.iterdir()} == set(names(4, 5))
    # A second pruning removes and reports nothing.
    assert prune(run, 2).deleted_files == 0
    assert len(events) == 1


def test_prune_keeps_the_bases_of_a_kept_delta(run, tmp_path):
    first = add_checkpoint(run, 1, files=2)
    shared, alone = own_paths(first)
    second = add_checkpoint(run, 2, siblings=[shared])
    add_checkpoint(run, 3, siblings=[shared, *own_paths(second)])
    report = prune(run, 1)
    assert report.removed == tuple(names(1, 2))
    assert report.kept_for_others == {
        first.name: (shared.split("/")[1],),
        second.name: (own_paths(second)[0].split("/")[1],),
    }
    assert_whole(run)
    assert alone not in files(tmp_path)
    # They stay at any age while a delta needs them, and are removed with the last one.
    for path in (shared, *own_paths(second)):
        age(tmp_path, path, 3 * DAY)
    assert prune(run, 1).deleted_files == 0
    add_checkpoint(run, 4)
    last = prune(run, 1)
    assert (last.removed, last.leftovers, last.deleted_files) == (tuple(names(3)), (), 4)
    assert complete(run) == names(4)
    assert {path.partition("/")[0] for path in files(tmp_path)} == {checkpoint_name(4)}


def test_prune_keeps_foreign_files_and_directories(run, tmp_path):
    for step in (1, 2):
        add_checkpoint(run, step)
    foreign = ["notes.txt", "logs/a/b.txt", "step-3/manifest.millrace", f"{checkpoint_name(1)}/notes.txt",
               f"{checkpoint_name(1)}/deep/data-0a-0-0.millrace", "data-0a-0-0.millrace"]  # fmt: skip
    for path in foreign:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"mine")
        age(tmp_path, path, 3 * DAY)
    prune(run, 1)
    assert files(tmp_path) == {
        *foreign,
        *(f"{found.name}/{file.name}" for found in run.scan()[1:] for file in found.files),
    }
    assert complete(run) == names(2)


def test_prune_keeps_protected_checkpoints(run):
    for step in range(1, 4):
        add_checkpoint(run, step)
    assert prune(run, 1, protected=names(1)).kept == tuple(names(1, 3))
    assert prune(run, "last=1").kept == tuple(names(3))


def test_prune_of_empty_run_removes_nothing(run):
    report = prune(run, 3)
    assert (report.removed, report.kept, report.freed_bytes) == ((), (), 0)
    with pytest.raises(ConfigurationError):
        prune(run, "last=0")


def test_prune_with_checkpoint_removed_by_another_succeeds(run, monkeypatch):
    for step in range(1, 4):
        add_checkpoint(run, step)
    look = Run.look

    def racing(self):
        listing = look(self)
        first = listing.checkpoints[0]
        self.remove(first.name, [file.name for file in first.files])
        return listing

    with monkeypatch.context() as patch:
        patch.setattr(Run, "look", racing)
        report = prune(run, 1)
    assert report.removed == tuple(names(2))
    assert complete(run) == names(3)


def test_prune_with_checkpoint_removed_after_reading_succeeds(run, monkeypatch):
    for step in range(1, 4):
        add_checkpoint(run, step)
    describe_all = Run.describe_all

    def racing(self, founds):
        described = describe_all(self, founds)
        self.remove(checkpoint_name(1), [file.name for file in self.scan()[0].files])
        return described

    with monkeypatch.context() as patch:
        patch.setattr(Run, "describe_all", racing)
        assert prune(run, 1).removed == tuple(names(2))
    assert complete(run) == names(3)


def test_prune_with_replaced_checkpoint_plans_again(run, tmp_path, monkeypatch):
    for step in range(1, 4):
        add_checkpoint(run, step)
        age(tmp_path, f"{checkpoint_name(step)}/{MANIFEST_NAME}", 60)  # the clock of files may have long ticks
    describe_all, times = Run.describe_all, [1]

    def racing(self, founds):
        described = describe_all(self, founds)
        if times[0]:
            times[0] -= 1
            add_checkpoint(self, 1)
        return described

    monkeypatch.setattr(Run, "describe_all", racing)
    # Published last by now, so it stays; its first version's data is a leftover of today.
    report = prune(run, 1)
    assert report.removed == tuple(names(2))
    assert complete(run) == names(1, 3)
    assert_whole(run)
    times[0] = 99
    monkeypatch.setattr(
        Run, "describe_all", lambda self, founds: (add_checkpoint(self, 0), describe_all(self, founds))[1]
    )
    prune(run, 1)
    assert_whole(run)


def test_prune_with_endless_changes_raises(run, monkeypatch):
    for step in range(1, 4):
        add_checkpoint(run, step)
    monkeypatch.setattr("millrace.checkpoint.run.pruning._is_as_listed", lambda run, found: False)
    with pytest.raises(ChangedError, match="replaced while they are pruned"):
        prune(run, 1)
    assert complete(run) == names(1, 2, 3)
    assert_whole(run)


def test_prune_on_full_disk_frees_space(tmp_path, monkeypatch, events):
    run = local_run(tmp_path)
    for step in range(1, 4):
        add_checkpoint(run, step)

    def full(*args, **options):
        raise DiskFullError("no room")

    monkeypatch.setattr(LocalStorage, "publish", full)
    assert prune(run, 1).removed == tuple(names(1, 2))
    assert [event.name for event in events] == ["checkpoint.prune.note.failed", "checkpoint.pruned"]


def test_prune_on_failing_storage_raises(run, monkeypatch):
    for step in range(1, 3):
        add_checkpoint(run, step)

    def broken(*args, **options):
        raise OriginUnavailableError("down")

    monkeypatch.setattr(type(run.storage), "read", broken)
    with pytest.raises(OriginUnavailableError):
        prune(Run(run.storage, run._place), 1)
    assert complete(run) == names(1, 2)


def denying(monkeypatch, run, *denied: str) -> None:
    """Make the storage refuse to delete these files, as a store does with locked objects."""
    delete = type(run.storage).delete

    def delete_some(self, names):
        found = [path for name in names if (path := f"{self.url.rpartition('/')[2]}/{name}") in denied]
        if found:
            raise DeniedError(f"{found[0]} is locked")
        delete(self, names)

    monkeypatch.setattr(type(run.storage), "delete", delete_some)


def test_prune_with_a_checkpoint_that_must_not_be_removed_removes_all_others(run, tmp_path, monkeypatch):
    base = add_checkpoint(run, 1)
    locked = add_checkpoint(run, 2, siblings=own_paths(base))
    for step in (3, 4, 5):
        add_checkpoint(run, step)
    denying(monkeypatch, run, f"{locked.name}/{MANIFEST_NAME}")
    for last in (5, 6):
        with pytest.raises(DeniedError, match="locked"):
            prune(run, 1)
        assert complete(run) == names(2, last)
        assert_whole(run)
        # No notes either, which the next prunings would have to read.
        assert {path.partition("/")[0] for path in files(tmp_path)} == {*names(1, 2, last)}
        add_checkpoint(run, last + 1)


def test_prune_with_a_file_that_must_not_be_removed_removes_all_others(run, tmp_path, monkeypatch):
    locked = own_paths(add_checkpoint(run, 1))
    for step in (2, 3):
        add_checkpoint(run, step)
    with monkeypatch.context() as patch:
        denying(patch, run, *locked)
        for _ in range(2):
            with pytest.raises(DeniedError, match="locked"):
                prune(run, 1)
            assert complete(run) == names(3)
            assert {path.partition("/")[0] for path in files(tmp_path)} == {*names(1, 3)}
            age(tmp_path, locked[0], DAY + 60)
    assert prune(run, 1).leftovers == tuple(locked)


# --- manifests that cannot be read ----------------------------------------------------------------


def test_prune_with_unreadable_manifest_keeps_its_possible_files(run, tmp_path, events):
    for step in (1, 2):
        add_checkpoint(run, step)
    for path in files(tmp_path):
        age(tmp_path, path, 3 * DAY)
    add_file(run, checkpoint_name(3), data_name())
    add_file(run, checkpoint_name(3), MANIFEST_NAME, 10)
    for step in (4, 5, 6):
        add_checkpoint(run, step)
    before = files(tmp_path)
    report = prune(run, 1)
    assert report.unreadable == tuple(names(3))
    assert report.removed == ()
    assert files(tmp_path) == before
    assert [event.name for event in events] == ["checkpoint.prune.unreadable"]
    # A file a day younger cannot belong to it.
    for path in files(tmp_path):
        if path.startswith(checkpoint_name(3)):
            age(tmp_path, path, 2 * DAY)
    assert prune(run, 1).removed == tuple(names(4, 5))
    assert complete(run) == names(1, 2, 3, 6)


# --- leftovers ------------------------------------------------------------------------------------


def test_prune_removes_leftovers_a_day_older_than_newest_manifest(run, tmp_path):
    add_checkpoint(run, 5)
    old, young, torn, foreign = data_name(), data_name(), f".{data_name()}.0123abcd.tmp", "data.csv"
    for name in (old, young, torn, foreign):
        add_file(run, checkpoint_name(3), name)
    add_file(run, checkpoint_name(5), old)
    for path in (f"{checkpoint_name(3)}/{each}" for each in (old, torn, foreign)):
        age(tmp_path, path, DAY + 60)
    age(tmp_path, f"{checkpoint_name(5)}/{old}", DAY + 60)
    report = prune(run, None)
    assert set(report.leftovers) == {
        f"{checkpoint_name(3)}/{old}",
        f"{checkpoint_name(3)}/{torn}",
        f"{checkpoint_name(5)}/{old}",
    }
    assert (report.removed, report.deleted_files, report.freed_bytes) == ((), 3, 300)
    assert {file.name for file in run.scan()[0].files} == {young, foreign}
    assert_whole(run)


def test_prune_with_a_manifest_from_the_future_keeps_the_files_of_a_save_in_flight(run, tmp_path):
    add_checkpoint(run, 5)
    age(tmp_path, f"{checkpoint_name(5)}/{MANIFEST_NAME}", -3 * DAY)  # the clock was ahead, or the file was copied
    young, old = data_name(), data_name()
    for name in (young, old):
        add_file(run, checkpoint_name(6), name)
    age(tmp_path, f"{checkpoint_name(6)}/{old}", DAY + 60)
    assert prune(run, None).leftovers == (f"{checkpoint_name(6)}/{old}",)
    assert [file.name for file in run.scan()[1].files] == [young]


def test_prune_without_manifests_removes_nothing(run, tmp_path):
    add_file(run, checkpoint_name(3), data_name())
    for path in files(tmp_path):
        age(tmp_path, path, 30 * DAY)
    assert prune(run, 1).deleted_files == 0


def test_checkpoints_of_single_ranks_are_foreign(run, tmp_path):
    add_checkpoint(run, 5)
    for name in (data_name(), f"rank-3.{MANIFEST_NAME}"):
        add_file(run, checkpoint_name(3), name)
        age(tmp_path, f"{checkpoint_name(3)}/{name}", 3 * DAY)
    assert prune(run, 1).deleted_files == 0


def test_prune_removes_old_empty_directories_and_torn_files_of_the_run(tmp_path):
    run = local_run(tmp_path)
    torn = [".writer-000000000003.json.0123abcd.tmp", f".pruning-{'0' * 32}.json.0123abcd.tmp"]
    for name in (*torn, ".writer.json.0123abcd.tmp"):
        (tmp_path / name).write_bytes(b"")
    for step in (1, 2):
        (tmp_path / checkpoint_name(step)).mkdir()
    add_checkpoint(run, 5)
    for path in (*torn, ".writer.json.0123abcd.tmp", checkpoint_name(1)):
        age(tmp_path, path, DAY + 60)
    prune(run, 1)
    assert {path.name for path in tmp_path.iterdir()} == {*names(2, 5), ".writer.json.0123abcd.tmp"}


def claim_of_dead(run, *saving: str) -> None:
    record = ClaimRecord(process=this_process(), token="t", created=1.0, saving=saving)
    data = record.encode().replace(b'"started":', b'"started":1')  # of an earlier process with this pid
    run.storage.prepare()
    run.storage.publish("writer-000000000001.json", data, replace=True)


def test_prune_removes_the_save_of_a_dead_writer_at_once(tmp_path):
    run = local_run(tmp_path)
    for step in (1, 5):
        add_checkpoint(run, step)
    for step in (6, 7, 8):
        add_file(run, checkpoint_name(step), data_name())
    claim_of_dead(run, *names(5, 6, 7))
    claim = Claim.take(run)
    claim.announce(names(7))  # another one saves there now
    report = prune(run, None)
    assert {path.partition("/")[0] for path in report.leftovers} == set(names(6))
    assert [found.name for found in run.scan()] == names(1, 5, 7, 8)


def test_prune_leaves_a_save_that_became_complete_before_its_writer_died(run, tmp_path, monkeypatch):
    add_checkpoint(run, 1)
    saved = add_checkpoint(run, 2)
    manifest = tmp_path / saved.name / MANIFEST_NAME
    manifest.rename(tmp_path / "later")
    for file in own_paths(saved):
        age(tmp_path, file, IN_FLIGHT_SECONDS + 60)
    describe_all = Run.describe_all

    def racing(self, founds):
        described = describe_all(self, founds)
        (tmp_path / "later").rename(manifest)
        claim_of_dead(self, *names(2))
        return described

    monkeypatch.setattr(Run, "describe_all", racing)
    assert prune(run, None).leftovers == ()
    assert complete(run) == names(1, 2)
    assert_whole(run)


@pytest.mark.parametrize(
    ("is_remote", "quiet", "goes"),
    [(False, 0.0, True), (True, IN_FLIGHT_SECONDS - 1, False), (True, IN_FLIGHT_SECONDS + 1, True)],
)
def test_prune_waits_for_late_requests_of_a_dead_writer(is_remote, quiet, goes):
    left = ListedCheckpoint(
        name=checkpoint_name(6), step=6, revision=0, complete=False, manifest=None,
        files=(StoredFile("data-0a-0-0.millrace", 7, "", 1e9),),
    )  # fmt: skip
    claim = StoredFile("writer-000000000002.json", 1, "", 1e9 + quiet)
    listing = RunListing(checkpoints=(left,), files=(claim,))
    work = plan_work(listing, {}, KeepAll(), now=0, dead=names(6), is_remote=is_remote)
    assert work.paths == ((f"{left.name}/data-0a-0-0.millrace",) if goes else ())
    assert sum(work.sizes[path] for path in work.paths) == (7 if goes else 0)


# --- notes ----------------------------------------------------------------------------------------


def test_prune_completes_and_removes_a_pruning_record(run, tmp_path):
    add_checkpoint(run, 5)
    left = data_name()
    add_file(run, checkpoint_name(3), left)
    kept = own_paths(run.scan()[1])
    note = Note(paths=frozenset({f"{checkpoint_name(3)}/{left}", *kept, "step-000000000009/data-gone-0-0.millrace"}))
    run.storage.publish(f"pruning-{'0' * 32}.json", note.encode(), replace=True)
    report = prune(run, 1)
    assert report.leftovers == (f"{checkpoint_name(3)}/{left}",)
    assert complete(run) == names(5)
    assert_whole(run)
    assert run.look().files == ()


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"delete": 3}', b"\xff", b"[" * 100_000])
def test_prune_ignores_an_invalid_pruning_record(run, data, events):
    add_checkpoint(run, 5)
    run.storage.publish(f"pruning-{'0' * 32}.json", data, replace=True)
    prune(run, 1)
    assert_whole(run)
    assert [event.name for event in events] == ["checkpoint.prune.note.unreadable"]
    assert run.look().files == ()


def test_prune_ignores_foreign_files_in_a_pruning_record():
    paths = ["../x/data-0a-0-0.millrace", "step-000000000001/manifest.millrace", "step-000000000001/notes.txt",
             "step-000000000001/../data-0a-0-0.millrace", "/etc/passwd", "notes/data-0a-0-0.millrace"]  # fmt: skip
    note = Note(paths=frozenset([*paths, "step-000000000001/data-0a-0-0.millrace"]), directories=frozenset(["..", "/"]))
    assert Note.decode(note.encode()) == Note(paths=frozenset(["step-000000000001/data-0a-0-0.millrace"]))


def test_reader_of_pruned_checkpoint_raises_with_the_reason(run):
    for step in (1, 2):
        add_checkpoint(run, step)
    storage = run.checkpoint(checkpoint_name(1))
    prune(run, 1)
    with pytest.raises(CheckpointNotFoundError, match="may have been removed"):
        read_manifest(storage)
