"""examples/encrypted_checkpoints.py: a second stream extension, in our writer and in torch's."""

from __future__ import annotations

import importlib.util
import io
import pathlib
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from tests.support.failures import failure_of
from tests.support.states import assert_same_state
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from millrace.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    ZstdPlanes,
    describe,
    extension_registry,
    load_weights,
)
from millrace.checkpoint.format.transforms import Transforms
from millrace.errors import ConfigurationError, CorruptCheckpointError, UnsupportedFormatError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process:UserWarning")

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "encrypted_checkpoints.py"
SECRET = b"the miller's own secret, which must not be readable in any file"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("encrypted_checkpoints", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def encryption(example):
    return example.encryption_with({"old": AESGCM.generate_key(256), "new": AESGCM.generate_key(256)})


def state(fill=None):
    made = {
        "weights": torch.randn(1000, 1500, generator=torch.Generator().manual_seed(0)) * 0.02,
        "text": torch.frombuffer(bytearray(SECRET), dtype=torch.uint8),
        "step": 12,
    }
    if fill is not None:
        made["weights"].fill_(fill)
        made["text"].fill_(fill)
        made["step"] = fill
    return made


def loaded_by(reader):
    result = state(fill=1)
    dcp.load(result, storage_reader=reader)
    return result


def test_millrace_writer_encrypts_and_compresses(tmp_path, encryption):
    dcp.save(state(), storage_writer=CheckpointWriter(tmp_path, _extensions=[encryption("old")], compression="none"))
    assert not any(SECRET in file.read_bytes() for file in tmp_path.iterdir())
    dcp.save(state(), storage_writer=CheckpointWriter(tmp_path, _extensions=[encryption("new")]))
    assert describe(tmp_path).stored_bytes < 0.88 * describe(tmp_path).raw_bytes
    registry = extension_registry(encryption)
    assert_same_state(loaded_by(CheckpointReader(tmp_path, _extension_registry=registry)), state())


def test_torch_writer_with_the_extension_encrypts_and_is_loaded(tmp_path, encryption):
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path, _extensions=[encryption("old")]))
    assert not any(SECRET in file.read_bytes() for file in tmp_path.iterdir())
    registry = extension_registry(encryption)
    for reader in (FileSystemReader, CheckpointReader):
        assert_same_state(loaded_by(reader(tmp_path, _extension_registry=registry)), state())


@pytest.mark.parametrize("writer", [CheckpointWriter, FileSystemWriter])
def test_weights_with_the_extension_are_loaded_without_a_template(tmp_path, encryption, writer):
    dcp.save(state(), storage_writer=writer(tmp_path, _extensions=[encryption("old")]))
    weights = load_weights(tmp_path, extension_registry=extension_registry(encryption))
    assert weights
    assert all(weights[key].equal(value) for key, value in state().items() if isinstance(value, torch.Tensor))
    with pytest.raises(UnsupportedFormatError, match="aes_gcm"):
        load_weights(tmp_path)


def test_reader_without_the_extension_names_it(tmp_path, encryption):
    dcp.save(state(), storage_writer=CheckpointWriter(tmp_path, _extensions=[encryption("old")]))
    for registry in (None, extension_registry()):
        error = failure_of(loaded_by, CheckpointReader(tmp_path, _extension_registry=registry))
        assert isinstance(error, UnsupportedFormatError)
        assert "stream.aes_gcm@example/1.old" in str(error)


def test_load_with_another_key_raises(tmp_path, example, encryption):
    dcp.save(state(), storage_writer=CheckpointWriter(tmp_path, _extensions=[encryption("old")]))
    others = example.encryption_with({"old": AESGCM.generate_key(256)})
    error = failure_of(loaded_by, CheckpointReader(tmp_path, _extension_registry=extension_registry(others)))
    assert isinstance(error, CorruptCheckpointError)
    assert "InvalidTag" in str(error)
    assert "key" in error.next_step


def test_several_extensions_are_undone_in_reverse(tmp_path, encryption):
    chain = [encryption("old"), ZstdPlanes(), encryption("new")]
    dcp.save(state(), storage_writer=CheckpointWriter(tmp_path, _extensions=chain))
    assert_same_state(
        loaded_by(CheckpointReader(tmp_path, _extension_registry=extension_registry(encryption))), state()
    )


def test_load_of_slice_decrypts_only_its_chunks(tmp_path, encryption):
    dcp.save(state(), storage_writer=CheckpointWriter(tmp_path, _extensions=[encryption("old")]))
    undone = []

    class Counting(encryption):
        def transform_from(self, input):
            undone.append(1)
            return super().transform_from(input)

        @staticmethod
        def from_descriptor(version):
            return Counting(version.partition(".")[2])

    small = {"text": torch.zeros(len(SECRET), dtype=torch.uint8)}
    dcp.load(small, storage_reader=CheckpointReader(tmp_path, _extension_registry=extension_registry(Counting)))
    assert bytes(small["text"].tolist()) == SECRET
    assert len(undone) == 1


def test_changed_encrypted_stream_raises(encryption):
    for content in (b"", b"x" * 10, random.Random(0).randbytes(2 << 20), random.Random(1).randbytes((2 << 20) + 1)):
        transforms = Transforms([encryption("old")])
        stored = transforms.apply(content)
        assert bytes(transforms.undo(stored, len(content))) == content
        with pytest.raises(CorruptCheckpointError, match="more than"):
            transforms.undo(transforms.apply(content + b"12"), len(content))
        for position in (0, 7, 11, len(stored) - 1, len(stored) // 2):
            damaged = bytearray(stored)
            damaged[position] ^= 4
            with pytest.raises(CorruptCheckpointError):
                transforms.undo(damaged, len(content))
        for length in (0, 5, 9, len(stored) - 1, len(stored) // 2):
            with pytest.raises(CorruptCheckpointError):
                transforms.undo(stored[:length], len(content))
        if len(content) > 2 << 20:
            whole = 4 + (1 << 20) + 16
            first, second = stored[7 : 7 + whole], stored[7 + whole : 7 + 2 * whole]
            exchanged = stored[:7] + second + first + stored[7 + 2 * whole :]
            for changed in (exchanged, stored[: 7 + 2 * whole], stored[: 7 + whole] + stored[7 + 2 * whole :]):
                with pytest.raises(CorruptCheckpointError):
                    transforms.undo(changed, len(content))


def test_interrupted_encrypted_stream_is_incomplete(encryption):
    sink = io.BytesIO()
    stream = encryption("old").transform_to(sink)
    stream.write(b"half of it")
    del stream
    with pytest.raises(CorruptCheckpointError):
        Transforms([encryption("old")]).undo(sink.getvalue(), 100)


def test_failing_extension_fails_the_save(tmp_path, encryption):
    class Failing(encryption):
        def transform_to(self, output):
            raise UsageError("no entropy", next_step="wait")

    error = failure_of(dcp.save, state(), storage_writer=CheckpointWriter(tmp_path, _extensions=[Failing("old")]))
    assert isinstance(error, UsageError)
    assert not list(tmp_path.glob("manifest*"))


def test_invalid_extension_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="object"):
        CheckpointWriter(tmp_path, _extensions=[object()])
