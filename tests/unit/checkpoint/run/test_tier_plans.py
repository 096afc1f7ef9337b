"""The places of a run: their names, complete checkpoints, missing uploads, and full disks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.checkpoints import assert_same_arrays, copy_checkpoint, load_all, make_checkpoint, random_state

from millrace.checkpoint.run.run_info import CheckpointInfo
from millrace.checkpoint.run.run_layout import ListedCheckpoint, Run, checkpoint_name, open_run
from millrace.checkpoint.run.tiers import (
    Tiers,
    Upload,
    is_local_failure,
    open_tiers,
    outdated,
    pending_uploads,
    plan_uploads,
    report_local_failure,
    run_directory,
)
from millrace.checkpoint.run.timeline import timeline
from millrace.checkpoint.storage.base import StoredFile
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.replicating import copy_files, publish_checkpoint
from millrace.checkpoint.storage.storage import LocalStorage
from millrace.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    DeniedError,
    DiskFullError,
    ObjectNotFoundError,
    OriginUnavailableError,
    OutcomeUnknownError,
    RunTakenError,
    StorageError,
)

ENDPOINT = {"endpoint_url": "http://127.0.0.1:9000"}


# --- names ----------------------------------------------------------------------------------------


def test_spellings_of_a_run_have_one_near_directory(tmp_path, monkeypatch):
    url = "s3://bucket/team/run"
    for same in ("s3://bucket/team/run/", "s3a://bucket/team/run"):
        assert run_directory(same) == run_directory(url)
    assert run_directory(url, {"key": "a", "secret": "b"}) == run_directory(url)
    (tmp_path / "real" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    names = {
        run_directory(each) for each in ("real/run", "link/run", tmp_path / "real/run", f"file://{tmp_path}/real/run/")
    }
    assert len(names) == 1


def test_regions_of_amazon_share_their_buckets(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    here = run_directory("s3://bucket/run")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert run_directory("s3://bucket/run") == here


def test_different_runs_have_different_near_directories():
    urls = [
        ("s3://bucket/run", None),
        ("s3://bucket/a/run", None),
        ("s3://other/run", None),
        ("s3://bucket/run", ENDPOINT),
        ("s3://bucket/run", {"endpoint_url": "http://127.0.0.1:9001"}),
        ("/bucket/run", None),
        ("s3://bucket/RUN", None),
        ("s3://bucket/r-n", None),
        ("s3://bucket/r n", None),
        ("s3://bucket//run", None),
    ]
    names = [run_directory(url, options) for url, options in urls]
    assert len(set(names)) == len(urls)
    assert run_directory("s3://bucket/run") == "run-c314c1ca7845e9e2", "a later version finds the directory again"


@pytest.mark.parametrize("stem", ["läufe/ä ö", "a" * 300, "...", "-", "x/../.hidden"])
def test_near_directory_name_is_plain(stem):
    name = run_directory(f"s3://bucket/{stem}")
    assert name == name.encode("ascii").decode()
    assert len(name) <= 60
    assert not name.startswith((".", "-"))
    assert "/" not in name


def test_near_places_are_separate_directories(tmp_path):
    for wrong in ("s3://bucket/x", ""):
        with pytest.raises(ConfigurationError):
            open_tiers("s3://bucket/run", local=wrong)
    tiers = open_tiers("s3://bucket/run", local=tmp_path / "a")
    assert [run.url for run in tiers.places] == [
        f"{tmp_path}/a/{run_directory('s3://bucket/run')}",
        "s3://bucket/run",
    ]
    assert list(tmp_path.iterdir()) == [], "nothing is made before something is saved"
    assert open_tiers("s3://bucket/run").places[0].url == "s3://bucket/run"


# --- complete checkpoints -------------------------------------------------------------------------


@pytest.fixture
def tiers(tmp_path) -> Tiers:
    return open_tiers(tmp_path / "origin", local=tmp_path / "near", sync=False)


def put(run: Run, step: int, seed: int = 0, revision: int = 0, **options):
    return make_checkpoint(
        run.checkpoint(checkpoint_name(step, revision)), random_state(9000, 50, seed=seed), **options
    )


def copy(source: Run, target: Run, step: int, **options):
    name = checkpoint_name(step)
    return copy_checkpoint(source.checkpoint(name), target.checkpoint(name), **options)


def test_checkpoint_in_several_places_is_listed_once(tiers):
    put(tiers.origin, 10)
    put(tiers.local, 20)
    copy(tiers.local, tiers.origin, 20)
    put(tiers.local, 30)
    put(tiers.local, 40, publish=False)
    complete = tiers.complete()
    assert [(each.step, each.run) for each in complete] == [
        (10, tiers.origin), (20, tiers.origin), (30, tiers.local)
    ]  # fmt: skip
    assert [each.step for each in timeline(complete)] == [10, 20, 30]
    assert complete[2].describe().name == complete[2].name


def test_revision_in_one_place_supersedes_another_place(tiers):
    put(tiers.origin, 10)
    put(tiers.local, 10, revision=1)
    assert [(each.revision, each.found.superseded) for each in tiers.complete()] == [(0, True), (1, False)]


class Down:
    """A run of which no place answers."""

    url = "s3://bucket/run"

    def scan(self):
        raise OriginUnavailableError("the store is down")

    def url_of(self, name):
        return f"{self.url}/{name}"

    def checkpoint(self, name):
        raise OriginUnavailableError("the store is down")


def test_run_without_origin_lists_near_checkpoints(tiers, events):
    put(tiers.local, 20)
    cut_off = Tiers(origin=Down(), local=tiers.local)
    (found,) = cut_off.complete()
    assert found.step == 20
    assert [event.name for event in events] == ["checkpoint.tier.unreachable"]
    assert (
        cut_off.manifest(found.name).manifest.save_id
        == read_manifest(tiers.local.checkpoint(found.name)).manifest.save_id
    )


def test_tiers_with_an_unavailable_origin_and_no_local_checkpoint_raise(tiers):
    with pytest.raises(OriginUnavailableError):
        Tiers(origin=Down(), local=tiers.local).complete()
    with pytest.raises(OriginUnavailableError):
        Tiers(origin=Down(), local=tiers.local).manifest(checkpoint_name(1))


def test_save_id_is_that_of_the_origin(tiers):
    put(tiers.local, 20, seed=1)
    put(tiers.origin, 20, seed=2)
    name = checkpoint_name(20)
    save_id = tiers.manifest(name).manifest.save_id
    assert_same_arrays(load_all(tiers.checkpoint(name, save_id=save_id)), random_state(9000, 50, seed=2))
    (tmp := Path(tiers.origin.url) / name / "manifest.millrace").write_bytes(b"damaged")
    assert tiers.manifest(name).manifest.save_id != save_id, "a near copy heals a damaged origin"
    tmp.unlink()
    (Path(tiers.local.url) / name / "manifest.millrace").unlink()
    with pytest.raises(CheckpointNotFoundError):
        tiers.manifest(name)


def test_run_without_near_places_uses_the_origin_directly(tmp_path):
    tiers = open_tiers(tmp_path / "run", sync=False)
    put(tiers.origin, 1)
    assert isinstance(tiers.checkpoint(checkpoint_name(1)), LocalStorage)
    assert (
        tiers.manifest(checkpoint_name(1)).manifest.save_id
        == read_manifest(tiers.origin.checkpoint(checkpoint_name(1))).manifest.save_id
    )


# --- what the origin lacks ------------------------------------------------------------------------


def info(step: int, *files: str, revision: int = 0, after: int | None = None) -> CheckpointInfo:
    name = checkpoint_name(step, revision)
    return CheckpointInfo(
        name=name,
        url=name,
        step=step,
        revision=revision,
        complete=True,
        created=0.0,
        raw_bytes=0,
        stored_bytes=0,
        restore_bytes=0,
        kind="full",
        files=frozenset(files or (f"data-{step}.millrace",)),
        after=None if after is None else checkpoint_name(after),
    )


def found(step: int, *files: str, complete: bool = True, revision: int = 0) -> ListedCheckpoint:
    return ListedCheckpoint(
        name=checkpoint_name(step, revision),
        step=step,
        revision=revision,
        complete=complete,
        files=tuple(StoredFile(name, 1, "", 0.0) for name in files or (f"data-{step}.millrace",)),
        manifest=None,
    )


def here(*infos: CheckpointInfo) -> set[str]:
    return {f"{each.name}/{name}" for each in infos for name in each.files if not name.startswith("../")}


def plan(local, origin):
    return plan_uploads(local, here(*local), origin)


def whole(step: int, revision: int = 0) -> Upload:
    return Upload(name=checkpoint_name(step, revision), files=(f"data-{step}.millrace",), manifest=True)


def test_plan_uploads_newer_saves_oldest_first():
    assert plan([info(30), info(20), info(10)], [found(10)]) == (whole(20), whole(30))
    assert plan([info(10)], []) == (whole(10),)
    assert plan([], [found(10)]) == ()
    assert plan([info(10)], [found(10)]) == ()


def test_plan_completes_an_interrupted_upload():
    local = [info(20, "data-a.millrace", "data-b.millrace")]
    upload = Upload(name=checkpoint_name(20), files=("data-b.millrace",), manifest=True)
    assert plan(local, [found(10), found(20, "data-a.millrace", complete=False)]) == (upload,)


def test_plan_skips_saves_older_than_the_origins_newest():
    """The run continued on another node while this one was stopped."""
    assert plan([info(15), info(20), info(40)], [found(10), found(30)]) == (whole(40),)
    # A higher revision is newer, whatever its step.
    assert plan([info(900)], [found(30, revision=1)]) == ()
    assert plan([info(40, revision=2)], [found(900, revision=1)]) == (whole(40, revision=2),)


@pytest.mark.parametrize(
    ("near", "origin", "gone"),
    [
        ([(400, 300)], [300], []),  # the usual save that is not uploaded yet
        ([(400, 300), (410, 400)], [300], []),
        ([(400, 300)], [300, 320], [400]),  # the run continued from 300 on another node
        ([(400, 300), (410, 400)], [300, 320], [400, 410]),
        ([(400, 300), (330, 320)], [300, 320], [400]),
        (
            [(400, 300)],
            [300, 450],
            [],
        ),  # older than the newest: never uploaded, and not the one that a restore begins with
        ([(400, 300), (410, 400)], [320, 340], [400, 410]),  # and 300 was pruned since
        ([(300, None), (400, 300)], [320, 340], [400]),  # but not on the disk of the node
        ([(400, 390)], [300, 320], []),  # 390 is gone: unknown
        ([(400, None)], [300, 320], []),  # saved by an earlier version: unknown
        ([(400, 410), (410, 400)], [300, 320], []),  # no writer makes this
        ([(400, 300)], [], []),
        ([(400, 300)], [300, 400], []),  # the origin has it
    ],
)
def test_history_that_another_node_did_not_continue_is_outdated(near, origin, gone):
    infos = [info(step, after=after) for step, after in near]
    assert outdated(infos, [found(step) for step in origin]) == {checkpoint_name(step) for step in gone}
    uploads = plan(infos, [found(step) for step in origin])
    assert not {upload.name for upload in uploads} & {checkpoint_name(step) for step in gone}


@pytest.mark.parametrize(
    ("after_file", "files", "gone"),
    [
        ("data-mine.millrace", ("data-mine.millrace", "manifest.millrace"), False),
        ("data-mine.millrace", ("data-theirs.millrace", "manifest.millrace"), True),
        (
            "data-mine.millrace",
            ("manifest.millrace",),
            False,
        ),  # all of its chunks are in earlier ones, or its file is lost
        (None, ("data-theirs.millrace", "manifest.millrace"), False),  # unknown
    ],
)
def test_history_after_another_save_of_the_newest_step_is_outdated(after_file, files, gone):
    near = [replace(info(400, after=300), after_file=after_file), info(500, after=400)]
    origin = [found(200), found(300, *files)]
    assert outdated(near, origin) == ({each.name for each in near} if gone else frozenset())
    assert (plan(near, origin) == ()) is gone


def test_plan_uploads_a_delta_after_its_base():
    full, delta = info(10), info(20, "data-20.millrace", f"../{checkpoint_name(10)}/data-10.millrace")
    assert plan([delta, full], []) == (whole(10), whole(20))
    assert plan([delta, full], [found(10)]) == (whole(20),)
    # The origin pruned the base meanwhile, with all of its files: only these are uploaded again.
    bytes_alone = Upload(name=checkpoint_name(10), files=("data-10.millrace",), manifest=False)
    assert plan([delta, full], [found(15)]) == (bytes_alone, whole(20))
    # The origin pruned the base, but kept the files that others need.
    assert plan([delta, full], [found(10, complete=False), found(15)]) == (whole(20),)


def test_plan_uploads_a_shared_base_once():
    base = f"../{checkpoint_name(10)}/data-10.millrace"
    local = [info(10), info(20, "data-20.millrace", base), info(30, "data-30.millrace", base)]
    uploads = plan(local, [found(15)])
    assert [(upload.name, upload.manifest) for upload in uploads] == [
        (checkpoint_name(10), False), (checkpoint_name(20), True), (checkpoint_name(30), True)
    ]  # fmt: skip


def test_plan_uploads_only_files_of_its_own_node():
    both = info(20, "data-mine.millrace", "data-theirs.millrace")
    uploads = plan_uploads([both], {f"{both.name}/data-mine.millrace"}, [])
    assert uploads == (Upload(name=both.name, files=("data-mine.millrace",), manifest=True),)


def test_uploads_after_crashes_complete_the_origin(tiers):
    state = random_state(9000, 50)
    base = put(tiers.local, 10)
    make_checkpoint(tiers.local.checkpoint(checkpoint_name(20)), state, shared={0: base}, directory=checkpoint_name(10))
    put(tiers.local, 30, publish=False)
    (Path(put_damaged(tiers.local, 40)) / "manifest.millrace").write_bytes(b"damaged")
    pending = pending_uploads(tiers.local, tiers.origin)
    assert [upload.name for upload in pending] == [checkpoint_name(10), checkpoint_name(20)]
    with pytest.raises(ObjectNotFoundError):
        copy(tiers.local, tiers.origin, 20)  # not in this order
    for upload in pending:
        source, target = tiers.local.checkpoint(upload.name), tiers.origin.checkpoint(upload.name)
        copy_files(source, target, upload.files)
        if upload.manifest:
            publish_checkpoint(source, target, lambda: None)
    assert_same_arrays(load_all(tiers.origin.checkpoint(checkpoint_name(20))), state)
    assert pending_uploads(tiers.local, tiers.origin) == ()
    assert pending_uploads(open_run(Path(tiers.local.url) / "none"), tiers.origin) == ()


def put_damaged(run: Run, step: int) -> str:
    put(run, step)
    return run.url_of(checkpoint_name(step))


# --- a near place that fails ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DiskFullError("full"), True),
        (StorageError("broken"), True),
        (DeniedError("read-only"), True),
        (ObjectNotFoundError("unmounted"), True),
        (OutcomeUnknownError("the disk failed after the rename"), True),
        (RunTakenError("taken"), False),
        (OriginUnavailableError("down"), False),
        (MemoryError(), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_failing_disk_is_distinguished_from_failing_save(error, expected):
    assert is_local_failure(error) is expected


def test_failing_near_disk_emits_an_event(tmp_path, events):
    run = open_run(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"step-000000000001 goes to the origin directly: .* \(no room\)"):
        report_local_failure(run, checkpoint_name(1), DiskFullError("no room"))
    assert [(event.name, event.subject) for event in events] == [("checkpoint.tier.refused", run.url)]
