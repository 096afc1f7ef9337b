"""`ZstdPlanes` under torch's own `FileSystemWriter` and `FileSystemReader`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.harms import flip_in_the_middle
from tests.support.states import assert_same_state
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException

from millrace.checkpoint import CheckpointReader, CheckpointWriter, ZstdPlanes, extension_registry
from millrace.errors import CorruptCheckpointError, UnsupportedFormatError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is .*single process:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.uint8,
    torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def state(fill=None):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1500, 400, generator=generator) * 3
    made = {str(dtype): noise.to(dtype) for dtype in DTYPES}
    made |= {"view": noise.bfloat16()[::2, 5:], "empty": torch.empty(0, 3), "object": {"step": 7, "name": "x"}}
    if fill is not None:
        for tensor in (value for value in made.values() if isinstance(value, torch.Tensor)):
            tensor.copy_(torch.zeros_like(tensor))
        made["object"] = {"step": 0, "name": ""}
    return made


def size(path):
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


@pytest.mark.parametrize("threads", [1, 3])
def test_saved_items_are_loaded_equal_by_both_readers(tmp_path, threads):
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path, thread_count=threads, _extensions=[ZstdPlanes()]))
    for reader in (FileSystemReader, CheckpointReader):
        loaded = state(fill=0)
        dcp.load(loaded, storage_reader=reader(tmp_path, _extension_registry=extension_registry()))
        assert_same_state(loaded, state())


@pytest.mark.parametrize("extension", [ZStandard, ZstdPlanes])
@pytest.mark.parametrize("writer", [FileSystemWriter, CheckpointWriter])
def test_extension_of_torch_or_millrace_is_loaded_without_registering(tmp_path, writer, extension):
    """Torch's reader finds ZStandard without a registry. Millrace's reader does too, for either writer's checkpoints."""
    dcp.save(state(), storage_writer=writer(tmp_path, _extensions=[extension()]))
    loaded = state(fill=0)
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path))
    assert_same_state(loaded, state())


def test_zstd_planes_of_weights_are_smaller_than_zstandard(tmp_path):
    weights = {"w": (torch.randn(3000, 1000) * 0.02).bfloat16()}
    for name, extension in {"planes": ZstdPlanes(), "zstd": ZStandard()}.items():
        dcp.save(weights, storage_writer=FileSystemWriter(tmp_path / name, _extensions=[extension]))
    assert size(tmp_path / "planes") < 0.87 * size(tmp_path / "zstd") < 0.87 * 0.85 * weights["w"].nbytes


def test_load_of_damaged_file_raises_corrupt_checkpoint_error(tmp_path):
    weights = {"w": torch.randn(3000, 100)}
    dcp.save(weights, storage_writer=FileSystemWriter(tmp_path, _extensions=[ZstdPlanes()]))
    (file,) = tmp_path.glob("*.distcp")
    flip_in_the_middle(file)
    for reader in (FileSystemReader, CheckpointReader):
        with pytest.raises(CheckpointException) as caught:
            dcp.load(weights, storage_reader=reader(tmp_path, _extension_registry=extension_registry()))
        assert isinstance(caught.value.failures[0][0], CorruptCheckpointError)


def test_descriptor_with_known_version_is_loaded_and_with_unknown_version_is_refused():
    assert ZstdPlanes().get_descriptor() == "stream.zstd_planes@millrace/1"
    (extension,) = extension_registry().from_descriptor_list([ZstdPlanes().get_descriptor()])
    assert isinstance(extension, ZstdPlanes)
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        extension_registry().from_descriptor_list(["stream.zstd_planes@millrace/2.0"])
    assert isinstance(extension_registry().from_descriptor_list(["stream.zstd/1"])[0], ZStandard)


def test_import_of_plane_stream_does_not_import_torch():
    program = "import sys, millrace.checkpoint.codec.plane_stream; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
