"""Checkpoints pass their conformance suites on local disks, a real S3 server, through origins and through extensions."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.origins import MemoryOrigin
from torch.distributed.checkpoint._extension import ZStandard

from millrace.checkpoint import CheckpointReader, CheckpointWriter, ZstdPlanes, extension_registry
from millrace.origin import open_origin
from millrace.testing.checkpoint_conformance import CheckpointConformance, CheckpointPlace, ExtensionConformance
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning")

EXAMPLE = pathlib.Path(__file__).parent.parent.parent / "examples" / "encrypted_checkpoints.py"


@pytest.fixture(scope="module")
def encryption() -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    spec = importlib.util.spec_from_file_location("encrypted_checkpoints", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.encryption_with({"now": AESGCM.generate_key(256)})


def in_memory(folder: pathlib.Path) -> MemoryOrigin:
    """An origin that contains the present files of a folder, by their paths."""
    origin = MemoryOrigin()
    for path in folder.rglob("*"):
        if path.is_file():
            origin.put(str(path), path.read_bytes())
    origin.requests.clear()
    return origin


class TestLocalDisk(CheckpointConformance):
    @pytest.fixture
    def place(self, tmp_path: pathlib.Path) -> CheckpointPlace:
        return CheckpointPlace(url=str(tmp_path))


class TestS3(CheckpointConformance):
    damaged_bits = 2

    @pytest.fixture
    def place(self, runs_server: S3Server, tmp_path: pathlib.Path) -> CheckpointPlace:
        return CheckpointPlace(url=f"s3://runs/{tmp_path.name}", target_options=runs_server.target_options)


class TestReadThroughMemory(CheckpointConformance):
    damaged_bits = 2

    @pytest.fixture
    def place(self, tmp_path: pathlib.Path) -> CheckpointPlace:
        return CheckpointPlace(url=str(tmp_path), origin=lambda: in_memory(tmp_path))


class TestReadThroughTheFileOrigin(CheckpointConformance):
    damaged_bits = 2

    @pytest.fixture
    def place(self, tmp_path: pathlib.Path) -> CheckpointPlace:
        return CheckpointPlace(url=str(tmp_path), origin=lambda: open_origin("file"))


class TestEncrypted(CheckpointConformance):
    @pytest.fixture
    def place(self, tmp_path: pathlib.Path, encryption: Any) -> CheckpointPlace:
        registry = extension_registry(encryption)
        return CheckpointPlace(url=str(tmp_path), extensions=[encryption("now")], registry=registry)


class TestThroughTorchsZStandard(CheckpointConformance):
    damaged_bits = 2

    @pytest.fixture
    def place(self, tmp_path: pathlib.Path) -> CheckpointPlace:
        return CheckpointPlace(url=str(tmp_path), extensions=[ZStandard()])


class TestZstdPlanes(ExtensionConformance):
    @pytest.fixture
    def extension(self) -> ZstdPlanes:
        return ZstdPlanes()


class TestEncryption(ExtensionConformance):
    @pytest.fixture
    def extension(self, encryption: Any) -> Any:
        return encryption("now")


class TestZStandard(ExtensionConformance):
    notices_damage = False

    @pytest.fixture
    def extension(self) -> ZStandard:
        return ZStandard()


def test_loading_lists_nothing_and_reads_little(tmp_path):
    """Two `head` requests for metadata names, one for the data, then few ranges for a sixteenth of the values."""
    from millrace.testing.checkpoint_conformance import _Rows

    tensor = torch.randn(16384, 1024).bfloat16()
    dcp.save({"w": tensor}, storage_writer=CheckpointWriter(tmp_path, compression="none"), no_dist=True)
    origin = in_memory(tmp_path)
    share = {"w": torch.zeros(1024, 1024, dtype=torch.bfloat16)}
    reader = CheckpointReader(tmp_path, origin=origin)
    dcp.load(share, storage_reader=reader, planner=_Rows(5 * 1024), no_dist=True)
    assert torch.equal(share["w"], tensor[5 * 1024 : 6 * 1024])
    assert origin.count("list") == 0
    assert origin.bytes_read() <= 1.2 / 16 * tensor.nbytes
    assert origin.count("read") <= 3
    origin.requests.clear()
    dcp.load({"w": torch.zeros_like(tensor)}, storage_reader=CheckpointReader(tmp_path, origin=origin), no_dist=True)
    assert origin.count("list") == 0
    assert origin.bytes_read() <= 1.01 * tensor.nbytes
    assert origin.count("read") <= 2 + tensor.nbytes // (4 << 20)


def test_conformance_package_does_not_import_torch():
    program = "import sys, millrace.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
