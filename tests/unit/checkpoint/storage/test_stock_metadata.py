"""The metadata of torch's own writer is a pickle: reading it runs no code and changes nothing."""

from __future__ import annotations

import pickle
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter, metadata

from millrace.checkpoint import describe, load_weights
from millrace.checkpoint.storage.stock_metadata import unpickle_metadata
from millrace.errors import CorruptCheckpointError, MillraceError, UnsupportedObjectError


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


LAYOUT = b"\x80\x02ctorch.serialization\n_get_layout\n"


@pytest.mark.parametrize(
    "name", ["torch.save", "torch.load", "torch.compile", "torch.nn", "torch.float32", "missing", "os"]
)
def test_layout_that_is_something_else_of_torch_is_refused(name: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    call = text("owned") + text(str(victim)) + b"\x86R."
    with pytest.raises((UnsupportedObjectError, CorruptCheckpointError)):
        unpickle_metadata(LAYOUT + text(name) + b"\x85R" + call, "x")
    assert victim.read_text() == "precious"
    (tmp_path / ".metadata").write_bytes(LAYOUT + text(name) + b"\x85R" + call)
    with pytest.raises(MillraceError):
        describe(tmp_path)
    assert victim.read_text() == "precious"


ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("protocol", [2, 4])
def test_metadata_saved_by_the_first_releases_of_python_3_11_is_read(
    protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12 has 3.11.2, which stores a member of an enumeration as a call of `getattr`."""
    dcp.save({"a": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path))
    saved = pickle.loads((tmp_path / ".metadata").read_bytes())
    monkeypatch.setattr(
        metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )
    data = pickle.dumps(saved, protocol)
    assert b"getattr" in data
    assert unpickle_metadata(data, "x") == saved


@pytest.mark.parametrize(
    "arguments",
    [
        ENCODING + text("__init__"),
        ENCODING + text("mro"),
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n" + text("__init__"),
        b"ctorch\nfloat32\n" + text("to_complex"),
        ENCODING + b"]",
    ],
)
def test_attribute_that_is_no_memory_format_is_refused(arguments: bytes) -> None:
    with pytest.raises(UnsupportedObjectError):
        unpickle_metadata(b"\x80\x02c__builtin__\ngetattr\n" + arguments + b"\x86R.", "x")


@pytest.mark.parametrize("name", ["BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"])
def test_pickle_that_changes_a_class_is_refused_and_undone(name: str) -> None:
    kind = getattr(metadata, name)
    before = dict(vars(kind))
    # The class, then BUILD with (None, {attribute: value}), which sets attributes of the class.
    state = b"N}(" + text("__eq__") + text("x") + text("planted") + b"K\x01u\x86b"
    hostile = b"\x80\x02ctorch.distributed.checkpoint.metadata\n" + name.encode() + b"\n" + state + b"."
    with pytest.raises(CorruptCheckpointError):
        unpickle_metadata(hostile, "x")
    assert dict(vars(kind)) == before
    assert not hasattr(kind, "planted")


@pytest.mark.parametrize(
    ("target", "attribute"),
    [
        (b"Metadata\n", "__qualname__"),
        (b"Metadata\n", "__name__"),
        (b"_MEM_FORMAT_ENCODING\nK\x00\x85R", "_value_"),  # a member
    ],
)
def test_pickle_that_changes_what_is_saved_later_is_refused_and_undone(target: bytes, attribute: str) -> None:
    before = pickle.dumps((metadata.Metadata, *metadata._MEM_FORMAT_ENCODING))
    state = b"N}" + text(attribute) + text("planted") + b"s\x86b"
    with pytest.raises(CorruptCheckpointError):
        unpickle_metadata(b"\x80\x02ctorch.distributed.checkpoint.metadata\n" + target + state + b".", "x")
    assert pickle.dumps((metadata.Metadata, *metadata._MEM_FORMAT_ENCODING)) == before


def test_class_that_a_pickle_makes_unusable_is_restored() -> None:
    module = b"ctorch.distributed.checkpoint.metadata\n"
    state = b"N}" + text("__getattribute__") + module + b"Metadata\ns\x86b"
    with pytest.raises(CorruptCheckpointError):
        unpickle_metadata(b"\x80\x02" + module + b"_MEM_FORMAT_ENCODING\n" + state + b".", "x")
    assert [each.value for each in metadata._MEM_FORMAT_ENCODING] == [0, 1, 2]


@pytest.mark.parametrize("instruction", [b"r\xff\xff\xff\x3f", b"p1073741823\n"])
def test_pickle_that_would_allocate_gigabytes_is_refused(instruction: bytes) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), limits[1]))  # a failure must not end the machine
    try:
        with pytest.raises(CorruptCheckpointError, match="impossible number"):
            unpickle_metadata(b"\x80\x02N" + instruction + b".", "x")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_metadata_of_every_layout_that_torch_writes_is_read(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3), "b": [1, "x"]}, storage_writer=FileSystemWriter(tmp_path))
    read = unpickle_metadata((tmp_path / ".metadata").read_bytes(), "x")
    assert read.state_dict_metadata["a"].properties.layout == torch.strided
    assert (
        pickle.loads((tmp_path / ".metadata").read_bytes()).state_dict_metadata.keys()
        == read.state_dict_metadata.keys()
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", ["chunks", "properties", "offsets", "fqn", "relative_path", "length", "storage_data"])
def test_metadata_without_a_part_that_readers_use_is_corrupt(name: str, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3), "b": [1, "x"]}, storage_writer=FileSystemWriter(tmp_path))
    data = (tmp_path / ".metadata").read_bytes()
    assert name.encode() in data
    (tmp_path / ".metadata").write_bytes(data.replace(name.encode(), name.upper().encode()))
    for read in (describe, load_weights):
        with pytest.raises(CorruptCheckpointError, match="the metadata cannot be read"):
            read(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", [b"__0_\0.distcp", b"\xed\xa0\x80_0.distc", b"../__0.distc"])
def test_metadata_with_a_name_that_no_data_file_has_is_corrupt(name: bytes, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path))
    data = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(data.replace(b"__0_0.distcp", name))
    with pytest.raises(CorruptCheckpointError):
        load_weights(tmp_path)
