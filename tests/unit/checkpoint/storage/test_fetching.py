"""Reading chunks back: deltas, references to a sibling, damage, and the fixture of format version 1."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from tests.support.harms import flip

from millrace.checkpoint.codec.chunks import Kind, checksum
from millrace.checkpoint.codec.planes import PlaneCodec
from millrace.checkpoint.format.manifest import DataFile, Manifest, Shard, TensorEntry, decode_manifest, encode_manifest
from millrace.checkpoint.format.slices import box_runs
from millrace.checkpoint.format.tables import NO_BASE, chunk_table, item_table
from millrace.checkpoint.storage.fetching import ChunkFetcher, ItemRequest
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.storage import LocalStorage, open_storage
from millrace.errors import CorruptCheckpointError

FIXTURE = pathlib.Path(__file__).parents[3] / "fixtures" / "checkpoint-v1"
FP32 = Kind(4, True)
FILES = ("../step-0/data-a-0-0.millrace", "data-b-0-0.millrace")


def steps(count: int) -> list[np.ndarray]:
    """A tensor of 4 x 300 floats as it changes from step to step."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((4, 300)).astype(np.float32)]
    for _ in range(count - 1):
        values.append(values[-1] + rng.standard_normal((4, 300)).astype(np.float32) * np.float32(1e-4))
    return values


def write_chain(root: pathlib.Path, count: int = 3, bases: list[int] | None = None) -> list[np.ndarray]:
    """A checkpoint of which the only tensor is the last of a chain of deltas; the chain begins in a sibling."""
    for name in ("step-0", "step-1"):
        (root / name).mkdir()
    values, codec = steps(count), PlaneCodec()
    bases = list(range(-1, count - 1)) if bases is None else bases
    stored = []
    for number, base in enumerate(bases):
        reference = None if base < 0 else values[base].view(np.uint8).reshape(-1).data
        stored.append(b"".join(codec.encode(values[number].data, FP32, reference)))
    (root / "step-0" / "data-a-0-0.millrace").write_bytes(b"other" + stored[0])
    (root / "step-1" / "data-b-0-0.millrace").write_bytes(b"".join(stored[1:]))
    offsets = [5, *np.cumsum([0, *map(len, stored[1:-1])]).tolist()][:count]
    chunks = {
        "kind": [FP32.code] * count,
        "file": [0] + [1] * (count - 1),
        "base": [NO_BASE if base < 0 else base for base in bases],
        "raw_bytes": [4800] * count,
        "stored_bytes": [len(chunk) for chunk in stored],
        "offset": offsets,
        "stored_checksum": [checksum(chunk) for chunk in stored],
        "raw_checksum": [checksum(value) for value in values],
    }
    manifest = Manifest(
        created=0.0,
        writer="test",
        files=(DataFile(FILES[0], 5 + len(stored[0])), DataFile(FILES[1], sum(map(len, stored[1:])))),
        tensors=(TensorEntry("w", "float32", (4, 300), (Shard((0, 0), (4, 300)),)),),
        blobs=(),
        items=item_table({"chunk": [count - 1], "start": [0], "nbytes": [4800]}),
        chunks=chunk_table(chunks),
    )
    (root / "step-1" / "manifest.millrace").write_bytes(encode_manifest(manifest))
    return values


def fetch(storage, offsets=(0, 0), lengths=(4, 300)) -> np.ndarray:
    manifest = read_manifest(storage).manifest
    out = np.zeros(lengths, np.float32)
    runs = box_runs((4, 300), offsets, lengths, 4)
    ChunkFetcher(storage, manifest, 2).fetch([ItemRequest(0, runs, out.reshape(-1).view(np.uint8))])
    return out


@pytest.mark.parametrize("count", [2, 3, 8])
def test_delta_chain_across_siblings_is_read(tmp_path, count):
    values = write_chain(tmp_path, count)
    storage = open_storage(tmp_path / "step-1")
    assert np.array_equal(fetch(storage), values[-1])
    assert np.array_equal(fetch(storage, (1, 7), (2, 100)), values[-1][1:3, 7:107])


def test_manifest_of_delta_names_the_feature(tmp_path):
    write_chain(tmp_path)
    manifest = decode_manifest((tmp_path / "step-1" / "manifest.millrace").read_bytes())
    assert manifest.chunks["base"].tolist() == [NO_BASE, 0, 1]


def test_endless_chain_is_refused(tmp_path):
    write_chain(tmp_path, 70)
    with pytest.raises(CorruptCheckpointError, match="more than 64"):
        fetch(open_storage(tmp_path / "step-1"))


def test_damaged_base_is_detected(tmp_path):
    write_chain(tmp_path)
    path = tmp_path / "step-0" / "data-a-0-0.millrace"
    flip(path, 40)
    with pytest.raises(CorruptCheckpointError, match="does not match its checksum"):
        fetch(open_storage(tmp_path / "step-1"))


def test_wrong_result_of_codec_is_detected(tmp_path, monkeypatch):
    write_chain(tmp_path)
    decode = PlaneCodec.decode

    def wrong(self, stored, kind, out, base=None):
        decode(self, stored, kind, out, base)
        out[3] ^= 1

    monkeypatch.setattr(PlaneCodec, "decode", wrong)
    with pytest.raises(CorruptCheckpointError, match="other bytes than were saved"):
        fetch(open_storage(tmp_path / "step-1"))


class Counting(LocalStorage):
    """Counts the bytes and calls of reads."""

    def __init__(self, path):
        super().__init__(str(path))
        self.reads: list[int] = []

    def read(self, file, start, stop):
        self.reads.append(stop - start)
        return super().read(file, start, stop)


def test_chunk_for_several_items_is_read_and_decoded_once(tmp_path, monkeypatch):
    values = write_chain(tmp_path, 2, bases=[-1, -1])
    storage = Counting(tmp_path / "step-1")
    manifest = read_manifest(storage).manifest
    storage.reads.clear()
    decoded = []
    decode = PlaneCodec.decode
    monkeypatch.setattr(PlaneCodec, "decode", lambda *args: decoded.append(1) or decode(*args))
    outs = [np.zeros(300, np.float32) for _ in range(4)]
    requests = [
        ItemRequest(0, box_runs((4, 300), (row, 0), (1, 300), 4), out.view(np.uint8)) for row, out in enumerate(outs)
    ]
    ChunkFetcher(storage, manifest, 2).fetch(requests)
    assert np.array_equal(np.stack(outs), values[1])
    assert len(storage.reads) == len(decoded) == 1


# --- format version 1, as it was written ----------------------------------------------------------


def test_manifest_of_version_1_has_the_documented_layout():
    data = (FIXTURE / "manifest.millrace").read_bytes()
    assert data[:8] == b"\x89MILLRC\n"
    assert data[8:16] == bytes([1, 0, 0, 0, 0, 0, 0, 0])
    assert int.from_bytes(data[16:24], "little") == len(data) - 40
    assert int.from_bytes(data[-8:], "little") == checksum(data[:-8])
