"""`verify_checkpoint`: finds each kind of damage, names the affected keys, reads every chunk once, checks all of them."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.checkpoints import data_file
from tests.support.harms import flip
from tests.support.runs import name_of
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import Buffer

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.checkpoint.codec.chunks import checksum
from millrace.checkpoint.format.manifest import decode_manifest, encode_manifest
from millrace.checkpoint.storage.base import StoredFile
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.storage import LocalStorage, open_storage
from millrace.checkpoint.tools import verifying
from millrace.checkpoint.tools.verifying import verify_checkpoint
from millrace.errors import (
    ChangedError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DeniedError,
    OriginUnavailableError,
    UsageError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state_of(step: int) -> dict:
    generator = torch.Generator().manual_seed(7)
    large = torch.randn(700_000, generator=generator)
    for number in range(step):
        large = large * (1 + 1e-3 * torch.randn(large.shape, generator=torch.Generator().manual_seed(number)))
    return {
        "frozen": torch.arange(300_000),
        "large": large,
        **{f"small.{number}": torch.full((40,), float(step + number)).bfloat16() for number in range(5)},
        "object": step,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run: a full save, and two that build on it."""
    run, base = tmp_path_factory.mktemp("saved"), None
    for step in range(3):
        writer = CheckpointWriter(run / name_of(step), sync_files=False, base=base, keep_base=True, restore_limit=9)
        dcp.save(state_of(step), storage_writer=writer)
        base = writer.written_base(name_of(step))
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def row_of(manifest, key: str, chunk: int = 0) -> int:
    keys = [entry.key for entry in manifest.tensors] + list(manifest.blobs)
    return int(manifest.items["chunk"][keys.index(key)]) + chunk


def test_verify_of_intact_checkpoint_reports_no_damage(run: Path) -> None:
    seen = []
    for step in range(3):
        report = verify_checkpoint(run / name_of(step), threads=2, progress=seen.append)
        manifest = read_manifest(open_storage(run / name_of(step))).manifest
        assert report.ok
        assert report.decoded
        assert report.chunks == len(manifest.chunks)
        assert report.stored_bytes == int(manifest.chunks["stored_bytes"].sum())
        assert report.files == len(manifest.files)
        assert (seen[-1].done_bytes, seen[-1].problems) == (seen[-1].total_bytes, 0)
    assert manifest.chunks["base"].min() == 0  # there are deltas


def test_verify_reads_each_stored_byte_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    inner = LocalStorage.read

    def counting(self, file, start, stop):
        read.append((os.path.basename(file.name), start, stop))
        return inner(self, file, start, stop)

    monkeypatch.setattr(LocalStorage, "read", counting)
    report = verify_checkpoint(run / name_of(2), threads=2)
    ranges = sorted(each for each in read if each[0].startswith("data-"))
    assert sum(stop - start for _, start, stop in ranges) >= report.stored_bytes
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(ranges))
    assert len(ranges) < report.chunks


def test_verify_finds_and_names_a_flipped_byte(run: Path) -> None:
    directory = run / name_of(0)
    manifest = read_manifest(open_storage(directory)).manifest
    rows = [row_of(manifest, "large", 1), row_of(manifest, "frozen"), row_of(manifest, "small.3")]
    for row in rows:
        start, stored = (int(manifest.chunks[name][row]) for name in ("offset", "stored_bytes"))
        flip(data_file(directory), start + stored - 1)
    report = verify_checkpoint(directory)
    assert [damage.chunk for damage in report.damages] == sorted(rows)
    named = {damage.chunk: damage.keys for damage in report.damages}
    assert named[rows[0]] == ("large",)
    assert named[rows[1]] == ("frozen",)
    # Values packed into one chunk are damaged together.
    assert named[rows[2]] == tuple(f"small.{number}" for number in range(5))
    assert all(damage.problem == "does not match its checksum" for damage in report.damages)
    assert all(damage.file == data_file(directory).name for damage in report.damages)


def test_verify_detects_damage_in_any_byte_of_a_chunk(run: Path) -> None:
    directory = run / name_of(1)
    manifest = read_manifest(open_storage(directory)).manifest
    row = row_of(manifest, "object")
    assert not manifest.files[int(manifest.chunks["file"][row])].name.startswith("../")
    start, stored = (int(manifest.chunks[name][row]) for name in ("offset", "stored_bytes"))
    path = data_file(directory)
    for position in range(start, start + stored, 9):
        flip(path, position)
        report = verify_checkpoint(directory)
        assert [(damage.chunk, damage.keys) for damage in report.damages] == [(row, ("object",))]
        flip(path, position)
    assert verify_checkpoint(directory).ok


def test_verify_reports_damage_of_base_for_its_deltas(run: Path) -> None:
    """A byte in the first save's file: the last one needs it through two deltas."""
    first = read_manifest(open_storage(run / name_of(0))).manifest
    row = row_of(first, "large")
    flip(data_file(run / name_of(0)), int(first.chunks["offset"][row]) + 20)
    for step in range(3):
        report = verify_checkpoint(run / name_of(step))
        (damage,) = report.damages
        assert damage.keys == ("large",)
        assert damage.file.endswith(data_file(run / name_of(0)).name)
        with pytest.raises(CorruptCheckpointError):
            load({"large": torch.zeros(700_000)}, run / name_of(step))


def load(state: dict, directory: Path) -> None:
    try:
        dcp.load(state, storage_reader=CheckpointReader(directory))
    except CheckpointException as failed:
        raise next(iter(failed.failures.values()))[0] from None


@pytest.mark.parametrize("how", ["missing", "short", "long", "a directory"])
def test_verify_detects_a_changed_file(run: Path, how: str) -> None:
    path = data_file(run / name_of(0))
    size = path.stat().st_size
    if how == "short":
        os.truncate(path, size - 1)
    elif how == "long":
        os.truncate(path, size + 1)
    else:
        path.unlink()
        if how == "a directory":
            path.mkdir()
    report = verify_checkpoint(run / name_of(2))
    (damage,) = report.damages
    assert (damage.chunk, damage.file) == (None, f"../{name_of(0)}/{path.name}")
    expected = {"short": f"has {size - 1} bytes instead of {size}", "long": f"has {size + 1} bytes instead of {size}"}
    assert damage.problem == expected.get(how, "is missing")
    assert {"frozen", "large"} <= set(report.damaged_keys)


def test_verify_detects_a_wrong_codec_by_the_second_checksum(run: Path) -> None:
    """The stored bytes match the manifest, and decode to other values, or not at all."""
    directory = run / name_of(0)
    path = directory / "manifest.millrace"
    manifest = decode_manifest(path.read_bytes())
    chunks = {name: column.copy() for name, column in manifest.chunks.columns.items()}
    wrong, garbage = row_of(manifest, "frozen"), row_of(manifest, "large")
    chunks["raw_checksum"][wrong] ^= np.uint64(1)
    start, stored = int(chunks["offset"][garbage]), int(chunks["stored_bytes"][garbage])
    with open(data_file(directory), "r+b") as file:
        file.seek(start)
        file.write(b"\xff" * stored)
    chunks["stored_checksum"][garbage] = checksum(b"\xff" * stored)
    manifest.chunks.columns.update(chunks)
    path.write_bytes(encode_manifest(manifest))
    report = verify_checkpoint(directory)
    found = {damage.chunk: damage for damage in report.damages}
    assert found[wrong].problem == "decodes to other bytes than were saved"
    assert found[garbage].keys == ("large",)
    assert set(found) == {wrong, garbage}


@pytest.mark.parametrize("limit", [1, 1 << 40])
def test_verify_of_long_chain_finds_the_same_damage_at_once_and_by_chunk(
    run: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The damages are the same, whether a chain is read at once or chunk by chunk."""
    monkeypatch.setattr(verifying, "_CHAIN_BYTES", limit)
    assert verify_checkpoint(run / name_of(2)).ok
    first = read_manifest(open_storage(run / name_of(0))).manifest
    flip(data_file(run / name_of(0)), int(first.chunks["offset"][row_of(first, "large")]) + 20)
    report = verify_checkpoint(run / name_of(2))
    assert report.damaged_keys == ("large",)
    assert len(report.damages) == 1


@pytest.mark.parametrize("position", [0, 20, 200, -1])
def test_verify_reports_a_damaged_manifest(run: Path, position: int) -> None:
    path = run / name_of(0) / "manifest.millrace"
    flip(path, position % path.stat().st_size)
    report = verify_checkpoint(run / name_of(0))
    assert [(damage.file, damage.chunk) for damage in report.damages] == [("manifest.millrace", None)]


def test_verify_reports_unreadable_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input/output error is reported as damage of the chunks at that position only."""
    manifest = read_manifest(open_storage(run / name_of(0))).manifest
    row = row_of(manifest, "large", 1)
    bad = int(manifest.chunks["offset"][row])
    inner = os.preadv

    def failing(fd, buffers, offset):
        if offset <= bad < offset + sum(len(buffer) for buffer in buffers):
            raise OSError(5, "Input/output error")
        return inner(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    (damage,) = verify_checkpoint(run / name_of(0), threads=1).damages
    assert (damage.chunk, damage.keys) == (row, ("large",))
    assert "Input/output error" in damage.problem


@pytest.mark.parametrize("error", [DeniedError("no"), OriginUnavailableError("gone")])
def test_verify_of_unreachable_storage_reports_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    inner = LocalStorage.read

    def failing(self, file, start, stop):
        if file.name.startswith("data-"):
            raise error
        return inner(self, file, start, stop)

    monkeypatch.setattr(LocalStorage, "read", failing)
    with pytest.raises(type(error)):
        verify_checkpoint(run / name_of(0))


def test_verify_of_save_without_collectives_checks_each_manifest(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    state = {"w": torch.arange(1000.0)}
    writer = CheckpointWriter(tmp_path / "c", sync_files=False)
    _save_state_dict(state, writer, no_dist=True, use_collectives=False)
    assert [path.name for path in (tmp_path / "c").glob("*manifest*")] == ["rank-0.manifest.millrace"]
    report = verify_checkpoint(tmp_path / "c")
    assert (report.ok, report.files) == (True, 1)
    flip(data_file(tmp_path / "c"), 10)
    assert verify_checkpoint(tmp_path / "c").damaged_keys == ("w",)


class Secret(StreamTransformExtension):
    """Stands for an encryption of which only the saver has the key."""

    @staticmethod
    def registry_name() -> str:
        return "stream.secret@test"

    @staticmethod
    def from_descriptor(version: str) -> Secret:
        return Secret()

    def get_descriptor(self) -> str:
        return "stream.secret@test/1"

    def transform_to(self, output):
        return output

    def transform_from(self, input):
        return input


def test_verify_without_key_checks_the_stored_bytes(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c", sync_files=False, _extensions=[Secret()]))
    report = verify_checkpoint(tmp_path / "c")
    assert (report.ok, report.decoded) == (True, False)
    flip(data_file(tmp_path / "c"), 10)
    assert verify_checkpoint(tmp_path / "c").damaged_keys == ("w",)


def test_verify_of_unverifiable_checkpoint_raises_with_the_reason(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path / "stock"))
    with pytest.raises(UsageError, match="without checksums"):
        verify_checkpoint(tmp_path / "stock")
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(tmp_path / "nothing")
    with pytest.raises(ConfigurationError):
        verify_checkpoint(tmp_path / "stock", threads=0)


def _act_at_the_first_data_read(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Call `action` once, when the check reads the first chunks: the manifest was read before."""
    actions = [action]

    def read(storage: LocalStorage, file: StoredFile, start: int, stop: int) -> Buffer:
        if "data-" in file.name and actions:
            actions.pop()()
        return original(storage, file, start, stop)

    original = LocalStorage.read
    monkeypatch.setattr(LocalStorage, "read", read)


def test_verify_of_a_checkpoint_removed_meanwhile_raises_instead_of_reporting_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _act_at_the_first_data_read(monkeypatch, lambda: shutil.rmtree(run / name_of(0)))
    with pytest.raises(CheckpointNotFoundError, match="was removed while it was checked"):
        verify_checkpoint(str(run / name_of(0)))


def test_verify_of_a_checkpoint_saved_again_meanwhile_raises_instead_of_reporting_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_again() -> None:
        shutil.rmtree(run / name_of(0))
        dcp.save(state_of(0), storage_writer=CheckpointWriter(run / name_of(0), sync_files=False))

    _act_at_the_first_data_read(monkeypatch, save_again)
    with pytest.raises(ChangedError, match="was saved again while it was checked"):
        verify_checkpoint(str(run / name_of(0)))
