"""Checkpoints that are saved near and uploaded to a real object store, and the places that a restore reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.checkpoints import assert_same_arrays, copy_checkpoint, load_all, make_checkpoint, random_state
from tests.support.harms import flip
from tests.support.impatience import impatient
from tests.support.servers import steady_port

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.checkpoint.run.run_layout import checkpoint_name
from millrace.checkpoint.run.tiers import Tiers, open_tiers, pending_uploads
from millrace.checkpoint.storage import replicating
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.layered import missing_files
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.replicating import copy_files, publish_checkpoint
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectExistsError,
    OriginUnavailableError,
    RunTakenError,
)
from millrace.testing.s3 import S3Server

MANIFEST = "manifest.millrace"
NAME = checkpoint_name(100)
# The second goes up in parts.
SIZES = (3 << 20, 20 << 20, 100_000)

# A process that copies, and kills itself at so many bytes; below 0 when only the manifest is left.
COPY = """
import ast, os, signal, sys
from millrace.checkpoint.storage import replicating
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.run.tiers import open_tiers

url, near, name, options, last = sys.argv[1:]
last = int(last)
tiers = open_tiers(url, local=near, target_options=ast.literal_eval(options), sync=False)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def progress(done, total):
    if 0 < last <= done:
        die()

replicating._THREADS = 1  # one file after the other
source, target = tiers.local.checkpoint(name), tiers.origin.checkpoint(name)
replicating.copy_files(source, target, [file.name for file in read_manifest(source).manifest.files], progress=progress)
replicating.publish_checkpoint(source, target, die)
"""


@pytest.fixture
def tiers(s3, bucket, tmp_path) -> Tiers:
    return open_tiers(f"s3://{bucket}/run", local=tmp_path / "near", target_options=s3.target_options, sync=False)


@pytest.fixture(scope="module")
def state():
    return random_state(*SIZES)


def near(tiers: Tiers, name: str = NAME) -> CheckpointStorage:
    assert tiers.local is not None
    return tiers.local.checkpoint(name)


def far(tiers: Tiers, name: str = NAME) -> CheckpointStorage:
    return tiers.origin.checkpoint(name)


def make(tiers: Tiers, state, **options):
    return make_checkpoint(near(tiers), state, chunk_bytes=1 << 20, **options)


def upload(tiers: Tiers, **options) -> int:
    return copy_checkpoint(near(tiers), far(tiers), **options)


def test_near_checkpoint_is_uploaded_unchanged(tiers, state):
    manifest = make(tiers, state)
    upload(tiers)
    for name in near(tiers).names():
        file = far(tiers).stat(name)
        assert bytes(far(tiers).read(file, 0, file.size)) == (Path(near(tiers).url) / name).read_bytes()
    assert_same_arrays(load_all(far(tiers)), state)
    assert upload(tiers) == 0
    assert missing_files(far(tiers), manifest.files) == []
    assert pending_uploads(tiers.local, tiers.origin) == ()


def test_bit_rot_near_reaches_neither_the_store_nor_a_restore(tiers, state):
    manifest = make(tiers, state)
    copy_files(near(tiers), far(tiers), [manifest.files[0].name])
    rotten = Path(near(tiers).url) / manifest.files[1].name
    flip(rotten, manifest.files[1].size - 10)
    with pytest.raises(CorruptCheckpointError, match="does not match its checksum"):
        upload(tiers)
    assert not {rotten.name, MANIFEST} & set(far(tiers).names())
    flip(rotten, manifest.files[1].size - 10)
    upload(tiers)
    flip(rotten, 5)
    layers = tiers.checkpoint(NAME, save_id=tiers.manifest(NAME).manifest.save_id)
    assert_same_arrays(load_all(layers), state)
    assert 0 < layers.read_bytes[1] <= 8 << 20, "only the damaged range comes from afar"


@pytest.mark.slow
def test_restore_after_loss_of_disk_or_store_reads_the_other(tmp_path, state):
    with S3Server(tmp_path / "s3") as server:
        server.create_bucket("runs")
        tiers = open_tiers("s3://runs/run", local=tmp_path / "near", target_options=server.target_options, sync=False)
        manifest = make(tiers, state)
        upload(tiers)
        for file in manifest.files:
            (Path(near(tiers).url) / file.name).rename(tmp_path / file.name)
        assert_same_arrays(load_all(tiers.checkpoint(NAME)), state)
        for file in manifest.files:
            (tmp_path / file.name).rename(Path(near(tiers).url) / file.name)
        server.stop()
        with impatient():
            tiers = open_tiers(
                "s3://runs/run", local=tmp_path / "near", target_options=server.target_options, sync=False
            )
            (found,) = tiers.complete()
            assert found.name == NAME
            layers = tiers.checkpoint(NAME, save_id=tiers.manifest(NAME).manifest.save_id)
            assert_same_arrays(load_all(layers), state)
            assert layers.read_bytes[1] == 0
            (Path(near(tiers).url) / manifest.files[2].name).unlink()
            with pytest.raises(OriginUnavailableError):
                load_all(tiers.checkpoint(NAME))


@pytest.mark.slow
def test_interrupted_upload_is_completed_when_the_store_returns(tmp_path, state, monkeypatch):
    monkeypatch.setattr(replicating, "_THREADS", 1)
    # A run at another endpoint is another run.
    server = S3Server(tmp_path / "s3", port=steady_port()).start()
    try:
        server.create_bucket("runs")
        tiers = open_tiers("s3://runs/run", local=tmp_path / "near", target_options=server.target_options, sync=False)
        manifest = make(tiers, state)
        stopped = []

        def progress(done: int, total: int) -> None:
            # The first file is whole there, and a part of the second is under way.
            if done > manifest.files[0].size and not stopped:
                stopped.append(done)
                server.stop()

        with impatient(is_silent=False):
            tiers = open_tiers(
                "s3://runs/run", local=tmp_path / "near", target_options=server.target_options, sync=False
            )
            with pytest.raises(OriginUnavailableError):
                upload(tiers, progress=progress)
        server.start()
        tiers = open_tiers("s3://runs/run", local=tmp_path / "near", target_options=server.target_options, sync=False)
        assert list(far(tiers).names()) == [manifest.files[0].name]
        with pytest.raises(CheckpointNotFoundError):
            read_manifest(far(tiers))
        assert upload(tiers) == sum(file.size for file in manifest.files[1:])
        assert_same_arrays(load_all(far(tiers)), state)
    finally:
        server.stop()


@pytest.mark.parametrize(("last", "there"), [(1, 0), (SIZES[0] + 1000, 1), (SIZES[0] + SIZES[1] + 100_000, 2), (-1, 3)])
def test_upload_of_killed_process_is_completed_by_the_next(tiers, s3, bucket, state, tmp_path, last, there):
    manifest = make(tiers, state)
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            COPY,
            f"s3://{bucket}/run",
            str(tmp_path / "near"),
            NAME,
            repr(s3.target_options),
            str(last),
        ],
        timeout=300,
    )
    assert process.returncode == -signal.SIGKILL
    assert list(far(tiers).names()) == sorted(file.name for file in manifest.files[:there])
    pending = pending_uploads(tiers.local, tiers.origin)
    assert [(each.name, len(each.files), each.manifest) for each in pending] == [
        (NAME, len(manifest.files) - there, True)
    ]
    copy_files(near(tiers), far(tiers), pending[0].files)
    publish_checkpoint(near(tiers), far(tiers), lambda: None)
    assert_same_arrays(load_all(far(tiers)), state)


def test_two_savers_of_one_name_do_not_mix_files(tiers, state):
    make(tiers, state[:1])
    other = random_state(5000, seed=7)
    with pytest.raises(ObjectExistsError):
        upload(tiers, check=lambda: make_checkpoint(far(tiers), other))
    assert_same_arrays(load_all(far(tiers)), other)
    # A node that has the other save on its disk still reads the origin's.
    assert_same_arrays(load_all(tiers.checkpoint(NAME, save_id=tiers.manifest(NAME).manifest.save_id)), other)


def test_saver_that_lost_the_run_publishes_nothing(tiers, state):
    make(tiers, state[:1])

    def check() -> None:
        raise RunTakenError("another process writes to the run")

    with pytest.raises(RunTakenError):
        upload(tiers, check=check)
    assert MANIFEST not in far(tiers).names()


class TieredReader(CheckpointReader):
    """Reads what it is given."""

    def __init__(self, tiers: Tiers, name: str) -> None:
        super().__init__(tiers.origin.url_of(name))
        self._layers = tiers.checkpoint(name, save_id=tiers.manifest(name).manifest.save_id)

    def _storage(self) -> CheckpointStorage:
        return self._layers


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_load_of_near_save_uses_the_place_with_intact_bytes(tiers):
    values = {"w": torch.randn(2_000_000), "small": torch.arange(10), "step": 7}
    dcp.save(values, storage_writer=CheckpointWriter(near(tiers).url, sync_files=False))
    upload(tiers)

    def load() -> None:
        loaded = {"w": torch.zeros(2_000_000), "small": torch.zeros(10, dtype=torch.int64), "step": 0}
        dcp.load(loaded, storage_reader=TieredReader(tiers, NAME))
        assert torch.equal(loaded["w"], values["w"])
        assert torch.equal(loaded["small"], values["small"])
        assert loaded["step"] == 7

    load()
    (data,) = (name for name in near(tiers).names() if name != MANIFEST)
    flip(Path(near(tiers).url) / data, 1000)
    load()
    os.truncate(Path(near(tiers).url) / MANIFEST, 40)
    load()
    for name in near(tiers).names():
        (Path(near(tiers).url) / name).unlink()
    load()
