"""Stream extensions in the manifest: named, bounded, the same on every rank."""

from __future__ import annotations

import dataclasses
import io

import pytest

from millrace.checkpoint.format.manifest import DataFile, Manifest, decode_manifest, encode_manifest
from millrace.checkpoint.format.tables import NO_BASE, chunk_table, item_table
from millrace.checkpoint.format.transforms import Transforms, transforms_for
from millrace.checkpoint.writing.assembly import Described, build_manifest
from millrace.checkpoint.writing.packing import RankData, StoredItem
from millrace.errors import CorruptCheckpointError, UnsupportedFormatError, UsageError


def chunks(stored_bytes):
    row = {"kind": 0, "file": 0, "base": NO_BASE, "raw_bytes": 1000, "stored_bytes": stored_bytes, "offset": 0}
    return chunk_table({name: [value] for name, value in (row | {"stored_checksum": 1, "raw_checksum": 2}).items()})


def manifest(stored_bytes, *transforms):
    return Manifest(
        created=1.0,
        writer="test",
        files=(DataFile("data-0-0-0.millrace", stored_bytes),),
        tensors=(),
        blobs=("blob",),
        items=item_table({"chunk": [0], "start": [0], "nbytes": [1000]}),
        chunks=chunks(stored_bytes),
        transforms=transforms,
    )


def test_manifest_names_extensions_in_order():
    read = decode_manifest(encode_manifest(manifest(900, "b@x/1", "a/2")))
    assert read.transforms == ("b@x/1", "a/2")
    assert decode_manifest(encode_manifest(manifest(900))).transforms == ()


def test_chunk_lengthened_beyond_the_bound_of_its_extensions_is_refused():
    decode_manifest(encode_manifest(manifest(1064)))
    decode_manifest(encode_manifest(manifest(1064 + 133 + 4096, "a/1")))
    for impossible in (manifest(1065), manifest(1064 + 133 + 4097, "a/1"), manifest(900, *["a/1"] * 17)):
        with pytest.raises(CorruptCheckpointError, match="impossib"):
            decode_manifest(encode_manifest(impossible))


@pytest.mark.parametrize("registry", [None, "empty"])
def test_unknown_extension_is_named(registry):
    class Registry:
        def from_descriptor_list(self, descriptors):
            raise ValueError(descriptors)

    with pytest.raises(UnsupportedFormatError, match="rot13@x/1"):
        transforms_for(["rot13@x/1"], Registry() if registry else None)
    assert transforms_for([], None).descriptors == ()


def test_transforms_without_extensions_copy_nothing():
    data = b"chunk"
    assert Transforms().apply(data) is data
    assert Transforms().undo(data, 3) is data


def test_endless_transform_is_stopped():
    class Endless:
        def get_descriptor(self):
            return "endless/1"

        def transform_to(self, output):
            return output

        def transform_from(self, input):
            class Stream(io.RawIOBase):
                def read(self, size=-1):
                    return b"x" * size

            return Stream()

    with pytest.raises(CorruptCheckpointError, match="endless/1 returns more"):
        Transforms([Endless()]).undo(b"", 1 << 20)


def test_ranks_with_different_extensions_raise():
    described = Described((), ("a", "b"), None)
    data = [RankData((DataFile(f"data-{n}-0-0.millrace", 900),), chunks(900), ("x/1",)) for n in range(2)]

    def written(ranks):
        return [((key, None), StoredItem(rank, 0, 0, 1000)) for key, rank in zip("ab", ranks, strict=True)]

    assert build_manifest(described, written(data), {}, save_id="x").transforms == ("x/1",)
    with pytest.raises(UsageError, match="different stream extensions"):
        build_manifest(described, written([data[0], dataclasses.replace(data[1], transforms=())]), {}, save_id="x")
