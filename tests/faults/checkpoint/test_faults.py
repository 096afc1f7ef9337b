"""If a save ends early for any reason, the previous checkpoint stays, and every failure is reported."""

from __future__ import annotations

import itertools
import os
import pathlib
import resource
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.failures import failure_of
from tests.support.fork_server import ForkedProcess, torch_server
from tests.support.states import assert_same_state

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.checkpoint.codec.planes import PlaneCodec
from millrace.checkpoint.storage.storage import LocalStorage
from millrace.errors import CheckpointNotFoundError, DiskFullError, StorageError
from millrace.events import add_hook

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SAVE_FOREVER = """
import sys, torch, warnings
warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
from millrace.checkpoint import CheckpointWriter
step = 0
while True:
    state = {"x": torch.full((1 << 22,), float(step)), "y": torch.randn(1 << 20), "step": step}
    dcp.save(state, storage_writer=CheckpointWriter(sys.argv[1], sync_files=False))
    step += 1
    print(step, flush=True)
"""


def weights(seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randn(600_000, generator=generator) for n in range(3)} | {"step": seed}


def save(state, path, **options):
    dcp.save(state, storage_writer=CheckpointWriter(path, **options))


def assert_holds(path, state) -> None:
    loaded = {key: torch.zeros_like(value) if hasattr(value, "dtype") else None for key, value in state.items()}
    dcp.load(loaded, storage_reader=CheckpointReader(path))
    assert_same_state(loaded, state)


def failed_save(path, **options) -> BaseException:
    return failure_of(save, weights(1), path, **options)


@pytest.fixture
def kept(tmp_path):
    """A checkpoint, its content, and the names of its files."""
    place = tmp_path / "run"
    save(weights(), place)
    return place, weights(), sorted(os.listdir(place))


@pytest.mark.slow
def test_killed_save_leaves_the_previous_checkpoint_complete(tmp_path):
    place = tmp_path / "run"
    for attempt in range(2):
        log = tmp_path / "log"
        process = ForkedProcess(torch_server(), SAVE_FOREVER, str(place), log=log, pipes=True)
        try:
            completed = int(process.stdout.readline() or log.read_text())
            # In the middle of one of the next saves, wherever that is.
            time.sleep(0.05 + 0.06 * attempt)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            completed = max([completed, *map(int, process.stdout.read().split())])
            process.kill()
        state = {"x": torch.zeros(1 << 22), "y": torch.zeros(1 << 20), "step": None}
        dcp.load(state, storage_reader=CheckpointReader(place))
        assert state["step"] >= completed - 1
        assert torch.equal(state["x"], torch.full((1 << 22,), float(state["step"])))


def test_killed_first_save_leaves_no_checkpoint(tmp_path):
    save(weights(), tmp_path)
    (tmp_path / "manifest.millrace").unlink()
    with pytest.raises(CheckpointNotFoundError):
        CheckpointReader(tmp_path).summary()


def test_full_disk_fails_the_save(kept):
    place, state, names = kept
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, limits[1]))
    try:
        error = failed_save(place, thread_count=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(error, DiskFullError)
    assert sorted(os.listdir(place)) == names
    assert_holds(place, state)


@pytest.mark.root
def test_full_tmpfs_fails_the_save(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(place)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this machine allows no mounts")
    try:
        save(weights(), place / "run")
        names = sorted(os.listdir(place / "run"))
        assert isinstance(failed_save(place / "run"), DiskFullError)
        assert sorted(os.listdir(place / "run")) == names
        assert_holds(place / "run", weights())
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_error_in_thread_fails_the_save(kept, monkeypatch):
    place, state, names = kept
    encode, calls = PlaneCodec.encode, itertools.count(1)

    def failing(self, *args, **options):
        if next(calls) == 4:  # in one of the threads
            raise MemoryError("no memory for a chunk")
        return encode(self, *args, **options)

    monkeypatch.setattr(PlaneCodec, "encode", failing)
    assert isinstance(failed_save(place, thread_count=3), MemoryError)
    assert sorted(os.listdir(place)) == names
    assert_holds(place, state)


@pytest.mark.parametrize("call", ["fsync", "replace", "fdatasync", "pwrite"])
def test_failing_disk_fails_the_save(kept, monkeypatch, call):
    place, state, names = kept

    def broken(*args):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        if call == "fdatasync":  # as on a file system without a block device, whose page cache is synced
            patch.setattr(os, "major", lambda _: 0)
            patch.setattr("millrace.checkpoint.storage.storage._SYNC_BYTES", 1 << 20)
        patch.setattr(os, call, broken)
        assert isinstance(failed_save(place), StorageError)
    assert sorted(os.listdir(place)) == names
    assert_holds(place, state)


def test_failed_manifest_write_keeps_the_previous_checkpoint(kept, monkeypatch):
    place, state, _ = kept

    def broken(*args, **options):
        raise StorageError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", broken)
        assert isinstance(failed_save(place), StorageError)
    assert_holds(place, state)


def test_old_files_that_cannot_be_removed_are_an_event(kept, monkeypatch):
    place, _, names = kept

    def broken(*args):
        raise StorageError("the disk is gone")

    seen = []
    remove = add_hook(seen.append)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "delete", broken)
            save(weights(1), place)
    finally:
        remove()
    assert [event.name for event in seen] == ["checkpoint.discard.failed"]
    assert set(names) <= set(os.listdir(place))
    assert_holds(place, weights(1))


def test_unreadable_previous_manifest_is_reported_and_replaced(kept):
    place, _, _ = kept
    (pathlib.Path(place) / "manifest.millrace").write_bytes(b"not a manifest")
    seen = []
    remove = add_hook(seen.append)
    try:
        save(weights(1), place)
    finally:
        remove()
    assert [event.name for event in seen] == ["checkpoint.previous.unreadable"]
    assert_holds(place, weights(1))
