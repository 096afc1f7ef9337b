"""A near disk that is full or broken: the save continues, no partial checkpoint is left, and earlier ones stay."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.checkpoints import assert_same_arrays, copy_checkpoint, load_all, make_checkpoint, random_state
from torch.distributed.checkpoint.api import CheckpointException

from millrace.checkpoint import CheckpointWriter
from millrace.checkpoint.run import pruning
from millrace.checkpoint.run.retention import KeepLast
from millrace.checkpoint.run.run_layout import Run, checkpoint_name, open_run
from millrace.checkpoint.run.tiers import Tiers, is_local_failure, open_tiers, pending_uploads
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.errors import DiskFullError, StorageError

# Exactly what the policy keeps; test_independence.py is about the one that stays besides.
prune = functools.partial(pruning.prune, independent=False)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(run: Run, step: int, state: dict) -> None:
    dcp.save(state, storage_writer=CheckpointWriter(run.url_of(checkpoint_name(step)), overwrite=False))


def weights(step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randint(0, 256, (4 << 20,), dtype=torch.uint8, generator=generator), "step": step}


def contents(run: Run) -> dict[str, list[str]]:
    """The files in every directory, hidden ones too."""
    place = Path(run.url)
    return {each.name: sorted(os.listdir(each)) for each in sorted(place.iterdir()) if each.is_dir()}


def copy(tiers: Tiers, source: Run, target: Run, step: int) -> int:
    name = checkpoint_name(step)
    return copy_checkpoint(source.checkpoint(name), target.checkpoint(name))


@pytest.mark.root
def test_save_refused_by_full_near_disk_is_stored_at_the_origin(tmp_path, small_disk):
    tiers = open_tiers(tmp_path / "origin", local=small_disk)
    for step in (10, 20):
        save(tiers.local, step, weights(step))
    before = contents(tiers.local)
    with pytest.raises(CheckpointException) as caught:
        save(tiers.local, 30, weights(30))
    (failure, _) = caught.value.failures[0]
    assert is_local_failure(failure)
    assert isinstance(failure, DiskFullError)
    assert {name: files for name, files in contents(tiers.local).items() if files} == before
    save(tiers.origin, 30, weights(30))
    assert [(each.step, each.run) for each in tiers.complete()] == [
        (10, tiers.local), (20, tiers.local), (30, tiers.origin)
    ]  # fmt: skip
    # Saves older than the origin's newest are not uploaded, but can be pruned.
    assert pending_uploads(tiers.local, tiers.origin) == ()
    report = prune(tiers.local, KeepLast(1))
    assert report.removed == (checkpoint_name(10),)
    save(tiers.local, 40, weights(40))
    assert [upload.name for upload in pending_uploads(tiers.local, tiers.origin)] == [checkpoint_name(40)]


@pytest.mark.root
def test_completely_full_disk_is_pruned(small_disk):
    run = open_run(small_disk / "run")
    for step in (1, 2, 3):
        make_checkpoint(run.checkpoint(checkpoint_name(step)), random_state(1 << 20, seed=step), chunk_bytes=1 << 20)
    with open(small_disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    assert prune(run, KeepLast(1)).removed == (checkpoint_name(1), checkpoint_name(2))
    assert list(contents(run)) == [checkpoint_name(3)]
    assert_same_arrays(load_all(run.checkpoint(checkpoint_name(3))), random_state(1 << 20, seed=3))


@pytest.mark.root
def test_full_second_place_is_completed_when_it_has_space(tmp_path, small_disk):
    tiers, second = open_tiers(tmp_path / "origin", local=tmp_path / "near"), open_run(small_disk / "second")
    state = random_state(3 << 20, 5 << 20, 4 << 20)
    manifest = make_checkpoint(tiers.local.checkpoint(checkpoint_name(1)), state, chunk_bytes=1 << 20)
    with pytest.raises(DiskFullError):
        copy(tiers, tiers.local, second, 1)
    (files,) = contents(second).values()
    sizes = {file.name: file.size for file in manifest.files}
    place = Path(second.url_of(checkpoint_name(1)))
    assert files, "what was whole by then stays"
    assert all(os.path.getsize(place / name) == sizes[name] for name in files)
    assert not any(found.complete for found in second.scan())
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert copy(tiers, tiers.local, second, 1) == sum(size for name, size in sizes.items() if name not in files)
    assert_same_arrays(load_all(second.checkpoint(checkpoint_name(1))), state)


def test_quota_reached_inside_a_file_leaves_no_part_of_it(tmp_path):
    tiers = open_tiers(tmp_path / "origin", local=tmp_path / "near")
    state = random_state(1 << 20, 5 << 20)
    manifest = make_checkpoint(tiers.local.checkpoint(checkpoint_name(1)), state, chunk_bytes=1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, limits[1]))
    try:
        with pytest.raises(DiskFullError):
            copy(tiers, tiers.local, tiers.origin, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # The two files are copied at the same time: the first one is there, or was given up with the second one.
    found = contents(tiers.origin)
    first, second = manifest.files
    assert found in ({checkpoint_name(1): []}, {checkpoint_name(1): [first.name]})
    there_bytes = first.size if found[checkpoint_name(1)] else 0
    assert copy(tiers, tiers.local, tiers.origin, 1) == first.size + second.size - there_bytes
    assert_same_arrays(load_all(tiers.origin.checkpoint(checkpoint_name(1))), state)


@pytest.mark.parametrize("call", ["fsync", "replace", "link"])
def test_copy_after_a_failing_disk_completes(tmp_path, monkeypatch, call):
    tiers = open_tiers(tmp_path / "origin", local=tmp_path / "near")
    state = random_state(100_000, 5000)
    make_checkpoint(tiers.local.checkpoint(checkpoint_name(1)), state)

    def broken(*args, **options):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        with pytest.raises(StorageError):
            copy(tiers, tiers.local, tiers.origin, 1)
    assert [each.run for each in tiers.complete()] == [tiers.local]
    assert not [name for files in contents(tiers.origin).values() for name in files if name.endswith(".tmp")]
    copy(tiers, tiers.local, tiers.origin, 1)
    assert_same_arrays(load_all(tiers.origin.checkpoint(checkpoint_name(1))), state)


def test_unreadable_near_disk_fails_no_restore(tmp_path, monkeypatch, events):
    tiers = open_tiers(tmp_path / "origin", local=tmp_path / "near")
    state = random_state(100_000, 5000)
    make_checkpoint(tiers.local.checkpoint(checkpoint_name(1)), state)
    copy(tiers, tiers.local, tiers.origin, 1)
    read, bad = os.preadv, tiers.local.url

    def broken(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(bad):
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    saved = tiers.manifest(checkpoint_name(1)).manifest.save_id
    assert saved == read_manifest(tiers.origin.checkpoint(checkpoint_name(1))).manifest.save_id
    assert_same_arrays(load_all(tiers.checkpoint(checkpoint_name(1), save_id=saved)), state)
    assert {event.name for event in events} == {"checkpoint.tier.damaged"}
