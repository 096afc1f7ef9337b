"""A checkpoint in several places: the place of each read, and the bytes that are copied."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.support.checkpoints import (
    assert_same_arrays,
    copy_checkpoint,
    load_all,
    make_checkpoint,
    own_files,
    random_state,
)
from tests.support.harms import flip

from millrace.checkpoint.storage import replicating
from millrace.checkpoint.storage.base import StoredFile
from millrace.checkpoint.storage.layered import LayeredStorage, StoredChunks, missing_files
from millrace.checkpoint.storage.manifests import StoredManifest, read_manifest
from millrace.checkpoint.storage.object_storage import ObjectStorage
from millrace.checkpoint.storage.replicating import copy_files, publish_checkpoint, publish_manifest
from millrace.checkpoint.storage.storage import LocalStorage
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DiskFullError,
    MillraceError,
    ObjectExistsError,
    ObjectNotFoundError,
    OriginUnavailableError,
    OutcomeUnknownError,
    RunTakenError,
    UsageError,
)
from millrace.origin import open_origin

MANIFEST = "manifest.millrace"


def local(path: Path, step: int = 1) -> LocalStorage:
    return LocalStorage(str(path / f"step-{step}"), sync=False)


class Watched:
    """Forwards all calls and records them; raises `fail` unless it is None."""

    def __init__(self, storage: LocalStorage) -> None:
        self._storage = storage
        self.calls: list[tuple[str, str]] = []
        self.fail: dict[str, MillraceError] = {}

    def __getattr__(self, name: str):
        call = getattr(self._storage, name)
        if not callable(call):
            return call

        def counted(*args, **options):
            what = args[0].name if args and isinstance(args[0], StoredFile) else str(args[0] if args else "")
            self.calls.append((name, what))
            if name in self.fail:
                raise self.fail[name]
            return call(*args, **options)

        return counted


@pytest.fixture
def near(tmp_path):
    return local(tmp_path / "near")


@pytest.fixture
def far(tmp_path):
    return local(tmp_path / "far")


@pytest.fixture
def state():
    return random_state(40_000, 100_000, 7)


@pytest.fixture
def both(near, far, state):
    """The manifest of a checkpoint in both places."""
    manifest = make_checkpoint(near, state)
    copy_checkpoint(near, far)
    return manifest


def path_of(storage: LocalStorage, name: str) -> Path:
    return Path(storage.url) / name


# --- reading from the nearest ---------------------------------------------------------------------


def test_layered_read_uses_the_nearest_place(near, far, both, state):
    watched = Watched(far)
    layers = LayeredStorage([near, watched])
    assert_same_arrays(load_all(layers), state)
    assert watched.calls == []
    assert layers.read_bytes == (sum(file.size for file in both.files), 0)
    assert layers.manifest().save_id == both.save_id
    assert layers.url == far.url


def test_file_missing_near_is_read_from_the_next_place_silently(near, far, both, state, events):
    path_of(near, both.files[1].name).unlink()
    layers = LayeredStorage([near, far])
    assert_same_arrays(load_all(layers), state)
    assert layers.read_bytes == (both.files[0].size + both.files[2].size, both.files[1].size)
    assert events == []


def test_only_the_damaged_range_is_read_from_the_next_place(near, far, state, events):
    # Chunks so long that the file is read in several ranges.
    big = random_state(40 << 20)
    manifest = make_checkpoint(near, big, chunk_bytes=4 << 20)
    copy_checkpoint(near, far)
    flip(path_of(near, manifest.files[0].name), 17 << 20)
    layers = LayeredStorage([near, far])
    assert_same_arrays(load_all(layers), big)
    from_near, from_far = layers.read_bytes
    assert 0 < from_far <= 9 << 20
    assert from_near + from_far == manifest.files[0].size
    assert [(event.name, event.subject) for event in events] == [("checkpoint.tier.damaged", near.url)]
    assert manifest.files[0].name in events[0].detail


@pytest.mark.parametrize("change", [lambda size: size - 1, lambda size: size + 1, lambda size: 0])
def test_file_of_wrong_length_is_not_read(near, far, both, state, events, change):
    os.truncate(path_of(near, both.files[0].name), change(both.files[0].size))
    layers = LayeredStorage([near, far])
    assert_same_arrays(load_all(layers), state)
    assert layers.read_bytes[1] == both.files[0].size
    assert [event.name for event in events] == ["checkpoint.tier.damaged"]


def test_file_removed_between_reads_is_read_from_the_next_place(near, far, both, events):
    layers = LayeredStorage([near, far])
    file = layers.stat(both.files[1].name)
    first = bytes(layers.read(file, 0, 5000))
    whole = path_of(far, file.name).read_bytes()
    path_of(near, file.name).unlink()
    assert first + bytes(layers.read(file, 5000, file.size)) == whole
    assert bytes(layers.read(file, 0, 10)) == whole[:10]
    assert [event.name for event in events] == ["checkpoint.tier.damaged"]


def test_damage_everywhere_is_an_error_and_no_wrong_byte(near, far, both, state):
    for place in (near, far):
        flip(path_of(place, both.files[0].name), 50)
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        load_all(LayeredStorage([near, far]))


def test_damage_in_different_chunks_of_both_copies_is_healed(near, far, both, state):
    """Each range is read from a place with an intact copy; no single place has all of them."""
    flip(path_of(near, both.files[0].name), 50)
    flip(path_of(far, both.files[1].name), 50)
    assert_same_arrays(load_all(LayeredStorage([near, far])), state)
    for alone in (near, far):
        with pytest.raises(CorruptCheckpointError):
            load_all(alone)


def test_damaged_manifest_is_skipped(near, far, both, state, events):
    flip(path_of(near, MANIFEST), 60)
    assert_same_arrays(load_all(LayeredStorage([near, far])), state)
    assert [event.name for event in events] == ["checkpoint.tier.damaged"]


def test_checkpoint_without_any_manifest_is_missing(near, far, both):
    path_of(near, MANIFEST).unlink()
    path_of(far, MANIFEST).unlink()
    with pytest.raises(CheckpointNotFoundError):
        read_manifest(LayeredStorage([near, far]))
    with pytest.raises(CheckpointNotFoundError):
        LayeredStorage([near, far]).manifest()


def test_only_manifest_damaged_raises(near, far, both):
    flip(path_of(near, MANIFEST), 60)
    path_of(far, MANIFEST).unlink()
    with pytest.raises(CorruptCheckpointError):
        read_manifest(LayeredStorage([near, far]))


def test_manifest_of_far_place_reads_near_files(near, far, both, state):
    path_of(near, MANIFEST).unlink()
    layers = LayeredStorage([near, far])
    assert_same_arrays(load_all(layers), state)
    assert layers.read_bytes[1] == 0


def test_requested_save_is_read_despite_a_nearer_one(near, far, state):
    stale = make_checkpoint(near, random_state(500, seed=9))
    manifest = make_checkpoint(far, state)
    assert_same_arrays(load_all(LayeredStorage([near, far], save_id=manifest.save_id)), state)
    assert LayeredStorage([near, far]).manifest().save_id == stale.save_id
    with pytest.raises(CheckpointNotFoundError):
        LayeredStorage([near], save_id=manifest.save_id).manifest()


def test_files_of_a_sibling_are_found_in_every_place(tmp_path, state):
    places = {name: [local(tmp_path / name, step) for step in (1, 2)] for name in ("near", "far")}
    base = make_checkpoint(places["near"][0], state)
    newer = [state[0], random_state(3000, seed=3)[0], state[2]]
    for place in places["near"][1:]:
        make_checkpoint(place, newer, shared={0: base, 2: base}, directory="step-1")
    for one, other in zip(places["near"], places["far"], strict=True):
        copy_checkpoint(one, other)
    path_of(places["near"][0], base.files[0].name).unlink()
    layers = LayeredStorage([places["near"][1], places["far"][1]])
    assert_same_arrays(load_all(layers), newer)
    assert layers.read_bytes[1] == base.files[0].size


def test_files_without_manifest_do_not_count(near, far, both):
    path_of(far, ".metadata").write_bytes(b"torch's")
    with pytest.raises(ObjectNotFoundError):
        LayeredStorage([near, far]).stat(".metadata")
    path_of(near, MANIFEST).unlink()
    assert LayeredStorage([near, far]).stat(".metadata").size == 7


def test_silent_far_place_does_not_fail_a_near_read(near, far, both, state):
    watched = Watched(far)
    for call in ("stat", "read", "files"):
        watched.fail[call] = OriginUnavailableError("the store is down")
    layers = LayeredStorage([near, watched])
    assert_same_arrays(load_all(layers), state)
    assert set(layers.names()) == set(near.names())
    path_of(near, both.files[0].name).unlink()
    for _ in range(2):  # it may answer the next time, so this is not remembered
        with pytest.raises(OriginUnavailableError):
            load_all(LayeredStorage([near, watched]))
    layers = LayeredStorage([near, watched])
    with pytest.raises(OriginUnavailableError):
        load_all(layers)
    watched.fail.clear()
    assert_same_arrays(load_all(layers), state)


def test_layered_storage_is_read_only(near, far, both):
    layers = LayeredStorage([near, far])
    for call in (
        layers.prepare,
        lambda: layers.open_writer("x"),
        lambda: layers.publish("x", b"", replace=True),
        lambda: layers.delete(["x"]),
    ):
        with pytest.raises(UsageError):
            call()
    with pytest.raises(UsageError):
        LayeredStorage([])


@pytest.mark.parametrize("seed", range(25))
def test_any_damage_yields_right_bytes_or_an_error(tmp_path, near, far, both, state, seed):
    rng = np.random.default_rng(seed)
    middle = LocalStorage(str(tmp_path / "middle"), sync=False)
    copy_checkpoint(near, middle)
    places, intact = [near, middle, far], set()
    for place in places:
        for file in both.files:
            path = path_of(place, file.name)
            match rng.integers(0, 5):
                case 0:
                    flip(path, int(rng.integers(0, file.size)))
                case 1:
                    os.truncate(path, int(rng.integers(0, file.size)))
                case 2:
                    path.unlink()
                case _:
                    intact.add(file.name)
    try:
        loaded = load_all(LayeredStorage(places))
    except CorruptCheckpointError:
        assert len(intact) < len(both.files)
    else:
        assert_same_arrays(loaded, state)


def test_damaged_checkpoint_is_read_by_many_threads(near, far, both, state):
    flip(path_of(near, both.files[1].name), 50)
    layers, failures = LayeredStorage([near, far]), []

    def read() -> None:
        try:
            assert_same_arrays(load_all(layers), state)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_missing_files_are_those_that_no_place_has_whole(near, far, both):
    assert missing_files(LayeredStorage([near, far]), both.files) == []
    path_of(near, both.files[0].name).unlink()
    path_of(near, both.files[1].name).unlink()
    os.truncate(path_of(far, both.files[1].name), 3)
    path_of(far, both.files[2].name).unlink()
    assert missing_files(LayeredStorage([near, far]), both.files) == [both.files[1]]
    assert missing_files(near, both.files) == list(both.files[:2])


# --- copying --------------------------------------------------------------------------------------


@pytest.fixture(params=["directory", "object store"])
def target(request, tmp_path):
    place = tmp_path / "target" / "step-1"
    if request.param == "directory":
        return LocalStorage(str(place), sync=False)
    place.mkdir(parents=True)
    return ObjectStorage(f"file://{place}", open_origin("file"), str(place))


def test_replicated_checkpoint_is_equal_byte_for_byte(near, target, state):
    manifest = make_checkpoint(near, state)
    seen: list[tuple[int, int]] = []
    copied_bytes = copy_checkpoint(near, target, progress=lambda done, total: seen.append((done, total)))
    for name in near.names():
        file = target.stat(name)
        assert bytes(target.read(file, 0, file.size)) == path_of(near, name).read_bytes()
    assert sorted(target.names()) == sorted(near.names())
    total = sum(file.size for file in manifest.files)
    assert copied_bytes == total
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    assert_same_arrays(load_all(target), state)


def test_second_replication_transfers_no_data(near, target, state):
    make_checkpoint(near, state)
    copy_checkpoint(near, target)
    watched, written = Watched(near), Watched(target)
    seen: list[tuple[int, int]] = []
    assert copy_checkpoint(watched, written, progress=lambda *figures: seen.append(figures)) == 0
    assert {name for call, name in watched.calls if call == "read"} == {MANIFEST}
    assert not {"open_writer", "publish"} & {call for call, _ in written.calls}
    assert seen[-1][0] == seen[-1][1]


def test_replication_copies_only_missing_files(near, target, state):
    manifest = make_checkpoint(near, state)
    copy_files(near, target, [manifest.files[0].name])
    # Of another length: from another save, or truncated by a failing disk.
    with target.open_writer(manifest.files[1].name) as writer:
        writer.write(b"cut")
    watched = Watched(target)
    copy_checkpoint(near, watched)
    assert {name for call, name in watched.calls if call == "open_writer"} == {file.name for file in manifest.files[1:]}
    assert_same_arrays(load_all(target), state)


@pytest.mark.parametrize("where", ["first", "last"])
def test_replication_of_damaged_source_raises(near, target, state, where):
    manifest = make_checkpoint(near, state)
    name = manifest.files[1].name
    flip(path_of(near, name), 3 if where == "first" else manifest.files[1].size - 1)
    with pytest.raises(CorruptCheckpointError, match=f"chunk .*{name}"):
        copy_checkpoint(near, target)
    assert name not in target.names()
    assert MANIFEST not in target.names()


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_replication_from_incomplete_source_raises(near, target, state, change):
    manifest = make_checkpoint(near, state)
    path = path_of(near, manifest.files[1].name)
    if change == "cut":
        os.truncate(path, 10)
    else:
        path.unlink()
    with pytest.raises(CorruptCheckpointError):
        copy_checkpoint(near, target)
    assert MANIFEST not in target.names()


def test_replication_without_manifest_raises(near, target, state):
    make_checkpoint(near, state, publish=False)
    with pytest.raises(CheckpointNotFoundError):
        copy_files(near, target, [])
    with pytest.raises(CheckpointNotFoundError):
        publish_checkpoint(near, target, lambda: None)


def test_replication_checks_the_claim_before_the_manifest(near, target, state):
    manifest = make_checkpoint(near, state)
    seen = []

    def check() -> None:
        seen.append(sorted(target.names()))
        raise RunTakenError("another process writes to the run")

    with pytest.raises(RunTakenError):
        copy_checkpoint(near, target, check=check)
    assert seen == [sorted(file.name for file in manifest.files)]
    assert MANIFEST not in target.names()


def test_replication_over_another_save_raises(near, target, state):
    make_checkpoint(near, state)
    other = random_state(900, seed=4)
    make_checkpoint(target, other)
    with pytest.raises(ObjectExistsError):
        copy_checkpoint(near, target)
    assert_same_arrays(load_all(target), other)


def test_replication_that_loses_the_manifest_raises(near, target, state):
    """Another save may finish between the check and the write of the manifest."""
    manifest = make_checkpoint(near, state)
    other = random_state(900, seed=4)
    with pytest.raises(ObjectExistsError):
        copy_checkpoint(near, target, check=lambda: make_checkpoint(target, other))
    assert_same_arrays(load_all(target), other)
    # Two concurrent copies of the same save do not conflict.
    second = LocalStorage(near.url + "-second", sync=False)
    copy_checkpoint(near, second, check=lambda: copy_checkpoint(near, second))
    assert read_manifest(second).manifest.save_id == manifest.save_id


def test_files_that_the_next_owner_removed_are_reported_as_the_loss_of_the_run(near, target, state):
    manifest = make_checkpoint(near, state)
    copy_files(near, target, [file.name for file in manifest.files][1:])

    def check() -> None:
        raise RunTakenError("another job owns the run", next_step="use another directory")

    with pytest.raises(RunTakenError):
        publish_checkpoint(near, target, check)
    assert MANIFEST not in target.names()


@pytest.mark.parametrize("is_taken", [True, False])
def test_manifest_published_after_the_loss_of_the_run_is_removed_or_its_outcome_is_unknown(
    near, target, state, monkeypatch, is_taken
):
    """This process is stopped between the check of the claim and the publication."""
    monkeypatch.setattr(replicating, "_AT_ONCE_SECONDS", 0)
    manifest = make_checkpoint(near, state)
    copy_files(near, target, [file.name for file in manifest.files])
    checks = []

    def check() -> None:
        checks.append(MANIFEST in target.names())
        if len(checks) == 1:
            target.delete([manifest.files[0].name])
        else:
            raise lost_run() if is_taken else no_response()

    with pytest.raises(RunTakenError if is_taken else OutcomeUnknownError):
        publish_checkpoint(near, target, check)
    assert checks == [False, True]
    assert (MANIFEST in target.names()) != is_taken


@pytest.mark.parametrize("is_taken", [True, False])
def test_complete_checkpoint_is_a_success_when_the_check_after_its_publication_fails(
    near, target, state, monkeypatch, is_taken
):
    """The claim is at the origin, and the target may be a disk of this node."""
    monkeypatch.setattr(replicating, "_AT_ONCE_SECONDS", 0)
    manifest = make_checkpoint(near, state)
    copy_files(near, target, [file.name for file in manifest.files])

    def check() -> None:
        if MANIFEST in target.names():
            raise lost_run() if is_taken else no_response()

    publish_checkpoint(near, target, check)
    assert StoredManifest.read(target).manifest.save_id == manifest.save_id


def test_manifest_of_another_save_stays_after_the_loss_of_the_run(tmp_path, near, target, state, monkeypatch):
    """This process is stopped after the publication. The next owner removes the checkpoint, and saves the step again."""
    monkeypatch.setattr(replicating, "_AT_ONCE_SECONDS", 0)
    manifest = make_checkpoint(near, state)
    copy_files(near, target, [file.name for file in manifest.files])
    other = local(tmp_path / "other")
    saved = make_checkpoint(other, state)

    def check() -> None:
        if MANIFEST in target.names():
            target.delete([MANIFEST, *(file.name for file in manifest.files)])
            copy_files(other, target, [file.name for file in saved.files])
            publish_checkpoint(other, target, lambda: None)
            raise lost_run()

    with pytest.raises(RunTakenError):
        publish_checkpoint(near, target, check)
    assert StoredManifest.read(target).manifest.save_id == saved.save_id


def lost_run() -> RunTakenError:
    return RunTakenError("another job owns the run", next_step="use another directory")


def no_response() -> OriginUnavailableError:
    return OriginUnavailableError("the storage does not respond", next_step="try again")


def test_ranks_copy_their_own_files_and_the_coordinator_the_manifest(near, target, state):
    manifest = make_checkpoint(near, state)
    names = [file.name for file in manifest.files]
    copy_files(near, target, names[:1])
    with pytest.raises(ObjectNotFoundError, match=names[1]):
        publish_checkpoint(near, target, lambda: None)
    assert MANIFEST not in target.names()
    # The other node has only its own files, and a copy of the manifest.
    path_of(near, names[0]).unlink()
    copy_files(near, target, names[1:])
    publish_checkpoint(near, target, lambda: None)
    assert_same_arrays(load_all(target), state)


def test_unpickled_manifest_is_published(near, target, state):
    manifest = make_checkpoint(near, state)
    sent = pickle.loads(pickle.dumps(StoredManifest.read(near)))
    target.prepare()
    for _ in range(2):  # ranks that share a place do it all
        publish_manifest(target, sent)
    assert read_manifest(target).manifest.save_id == manifest.save_id
    other = local(Path(near.url), 9)
    make_checkpoint(other, state)
    with pytest.raises(ObjectExistsError):
        publish_manifest(target, StoredManifest.read(other))


def test_replication_of_delta_without_base_raises(tmp_path, state):
    near = [local(tmp_path / "near", step) for step in (1, 2)]
    far = [local(tmp_path / "far", step) for step in (1, 2)]
    base = make_checkpoint(near[0], state)
    make_checkpoint(near[1], state, shared={0: base, 1: base}, directory="step-1")
    with pytest.raises(ObjectNotFoundError, match=r"2 of 3 data files"):
        copy_checkpoint(near[1], far[1])
    assert MANIFEST not in far[1].names()
    copy_files(near[0], far[0], own_files(near[0]))
    assert copy_checkpoint(near[1], far[1]) == 0
    assert_same_arrays(load_all(far[1]), state)


def test_replication_refuses_foreign_file_names(near, target, state):
    make_checkpoint(near, state)
    for name in ("data-x.millrace", "../step-0/data-x.millrace", MANIFEST):
        with pytest.raises(UsageError, match="own"):
            copy_files(near, target, [name])


def test_replication_error_ends_the_other_copies(near, tmp_path, monkeypatch):
    """And leaves no part of them."""
    monkeypatch.setattr(replicating, "_PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(replicating, "_THREADS", 3)
    manifest = make_checkpoint(near, random_state(4 << 20, 4 << 20, 4 << 20))
    target = local(tmp_path / "target")
    flip(path_of(near, manifest.files[0].name), 100)
    with pytest.raises(CorruptCheckpointError):
        copy_checkpoint(near, target)
    left = os.listdir(target.url)
    assert MANIFEST not in left
    assert not [name for name in left if name.endswith(".tmp")]
    sizes = {file.name: file.size for file in manifest.files}
    assert all(os.path.getsize(path_of(target, name)) == sizes[name] for name in left)


def test_replication_with_raising_progress_ends(near, target, state):
    make_checkpoint(near, state)

    def progress(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint(near, target, progress=progress)
    assert MANIFEST not in target.names()


def test_replication_to_full_target_raises_without_manifest(near, tmp_path, state):
    class Full(LocalStorage):
        def open_writer(self, name):
            raise DiskFullError("no room")

    make_checkpoint(near, state)
    target = Full(str(tmp_path / "target" / "step-1"), sync=False)
    with pytest.raises(DiskFullError):
        copy_checkpoint(near, target)
    assert target.names() == []


@pytest.mark.parametrize("piece_bytes", [1, 100, 4096, 5000, 1 << 20])
def test_pieces_cut_no_chunk_and_leave_nothing_out(monkeypatch, near, state, piece_bytes):
    monkeypatch.setattr(replicating, "_PIECE_BYTES", piece_bytes)
    manifest = make_checkpoint(near, state)
    for file in manifest.files:
        chunks = StoredChunks(manifest, file.name)
        pieces = list(replicating._pieces(chunks, file.size))
        assert pieces[0][0] == 0
        assert pieces[-1][1] == file.size
        assert all(one[1] == other[0] for one, other in itertools.pairwise(pieces))
        cuts = np.array([stop for _, stop in pieces])
        assert not any(
            ((cuts > start) & (cuts < stop)).any() for start, stop in zip(chunks.starts, chunks.stops, strict=True)
        )
