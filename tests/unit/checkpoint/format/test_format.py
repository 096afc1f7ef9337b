"""The manifest: round trips are equal, and hostile bytes raise an error."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from millrace.checkpoint.codec.chunks import Kind, checksum
from millrace.checkpoint.format import manifest as fmt
from millrace.checkpoint.format.manifest import (
    DataFile,
    Manifest,
    Properties,
    Shard,
    TensorEntry,
    WrappedEntry,
    decode_manifest,
    encode_manifest,
    pack_value,
    unpack_value,
)
from millrace.checkpoint.format.tables import NO_BASE, chunk_table, item_table
from millrace.errors import CorruptCheckpointError, UnsupportedFormatError, UnsupportedObjectError

FP32, OPAQUE = Kind(4, True).code, 0
NAME = "data-0a-0-0.millrace"


def sample(**changes) -> Manifest:
    """Two tensors (one sharded and in a pack with the other) and a blob."""
    chunks = {
        "kind": [FP32, FP32, OPAQUE],
        "file": [0, 0, 0],
        "base": [NO_BASE] * 3,
        "raw_bytes": [400, 100, 50],
        "stored_bytes": [300, 90, 56],
        "offset": [0, 300, 390],
        "stored_checksum": [1, 2, 2**64 - 1],
        "raw_checksum": [3, 4, 5],
    }
    items = {"chunk": [0, 0, 1, 2], "start": [0, 200, 0, 0], "nbytes": [200, 300, 0, 50]}
    manifest = Manifest(
        created=1.5,
        writer="test",
        files=(DataFile(NAME, 446),),
        tensors=(
            TensorEntry("a.weight", "float32", (5, 10), (Shard((0, 0), (5, 10)),), Properties(requires_grad=True)),
            TensorEntry("b", "float32", (25, 3), (Shard((0, 0), (25, 3)), Shard((25, 0), (0, 3)))),
        ),
        blobs=("extra",),
        items=item_table(items),
        chunks=chunk_table(chunks),
        planner_data={"a.weight": ("a", "weight"), "b": ("b", 3)},
        user={"step": 7},
    )
    return dataclasses.replace(manifest, **changes)


def table_with(table, column, row, value):
    columns = {name: values.copy() for name, values in table.columns.items()}
    columns[column][row] = value
    return (chunk_table if "kind" in columns else item_table)(columns)


def parts(manifest: Manifest):
    for name in ("items", "chunks"):
        table = getattr(manifest, name)
        yield {column: values.tolist() for column, values in table.columns.items()}
    yield dataclasses.replace(manifest, items=None, chunks=None)


def test_manifest_roundtrip_is_unchanged():
    assert list(parts(decode_manifest(encode_manifest(sample())))) == list(parts(sample()))


def test_empty_manifest_roundtrip_is_unchanged():
    empty = Manifest(created=0.0, writer="", files=(), tensors=(), blobs=(), items=item_table(), chunks=chunk_table())
    assert list(parts(decode_manifest(encode_manifest(empty)))) == list(parts(empty))


def test_twenty_thousand_tensors_are_compact():
    count = 20_000
    tensors = tuple(
        TensorEntry(f"model.layers.{n // 10}.block.{n % 10}.bias", "float32", (16,), (Shard((0,), (16,)),))
        for n in range(count)
    )
    chunk_count = count * 64 // (1 << 20) + 1
    rng = np.random.default_rng(0)
    sums = rng.integers(0, 2**63, (2, chunk_count)).tolist()
    chunks = {
        "kind": [FP32] * chunk_count,
        "file": [0] * chunk_count,
        "base": [NO_BASE] * chunk_count,
        "raw_bytes": [1 << 20] * chunk_count,
        "stored_bytes": [1000] * chunk_count,
        "offset": [1000 * n for n in range(chunk_count)],
        "stored_checksum": sums[0],
        "raw_checksum": sums[1],
    }
    items = {
        "chunk": [n * 64 >> 20 for n in range(count)],
        "start": [n * 64 & 0xFFFFF for n in range(count)],
        "nbytes": [64] * count,
    }
    manifest = sample(
        tensors=tensors,
        blobs=(),
        files=(DataFile(NAME, 1000 * chunk_count),),
        items=item_table(items),
        chunks=chunk_table(chunks),
        planner_data={entry.key: tuple(entry.key.split(".")) for entry in tensors},
    )
    data = encode_manifest(manifest)
    assert len(data) < 20 * count
    assert len(decode_manifest(data).tensors) == count


def test_extremely_regular_manifest_is_readable():
    manifest = sample(user={"text": "x" * (40 << 20)})
    data = encode_manifest(manifest)
    assert len(data) < 2 << 20
    assert decode_manifest(data).user == manifest.user


def with_checksum(data: bytes) -> bytes:
    return data + struct.pack("<Q", checksum(data))


def test_newer_version_raises_unsupported_format():
    data = bytearray(encode_manifest(sample())[:-8])
    data[8] = 2
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        decode_manifest(with_checksum(bytes(data)))


def test_unknown_feature_raises_unsupported_format():
    with pytest.raises(UnsupportedFormatError, match="sparkle"):
        decode_manifest(rebuilt(lambda meta: meta.update(features=["sparkle"])))


def test_flipped_bit_in_manifest_is_detected():
    data = bytearray(encode_manifest(sample()))
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(data)
        data[bit // 8] ^= 1 << bit % 8
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(data[:length])
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(data + b"\0")


def rebuilt(change_meta=lambda meta: None, change_body=lambda body: body, declared=None, **sections) -> bytes:
    """A manifest with a right checksum and something wrong inside."""
    data = encode_manifest(sample())
    body = zstandard.ZstdDecompressor().decompress(data[32:-8])
    found, position = {}, 0
    while position < len(body):
        tag, nbytes = struct.unpack_from("<4sQ", body, position)
        found[tag.decode()] = body[position + 12 : position + 12 + nbytes]
        position += 12 + nbytes
    meta = json.loads(found["META"])
    change_meta(meta)
    found["META"] = json.dumps(meta).encode()
    found.update(sections)
    body = change_body(b"".join(struct.pack("<4sQ", tag.encode(), len(part)) + part for tag, part in found.items()))
    stored = zstandard.ZstdCompressor().compress(body)
    head = struct.pack("<8sIIQQ", data[:8], 1, 0, len(stored), len(body) if declared is None else declared)
    return with_checksum(head + stored)


def set_in(*path, to):
    def change(meta):
        for key in path[:-1]:
            meta = meta[key]
        meta[path[-1]] = to

    return change


def test_rebuilt_manifest_is_valid():
    assert list(parts(decode_manifest(rebuilt()))) == list(parts(sample()))


def test_unknown_section_is_skipped():
    assert list(parts(decode_manifest(rebuilt(NOTE=b"from a later writer")))) == list(parts(sample()))


HOSTILE_META = {
    "no tensors": lambda meta: meta.pop("tensors"),
    "path outside": set_in("files", 0, 0, to="../../etc/passwd"),
    "absolute path": set_in("files", 0, 0, to="/etc/passwd"),
    "parent as sibling": set_in("files", 0, 0, to="../../data-0a-0-0.millrace"),
    "dots as sibling": set_in("files", 0, 0, to="../../../data-0a-0-0.millrace"),
    "newline in name": set_in("files", 0, 0, to=NAME + "\n"),
    "negative file size": set_in("files", 0, 1, to=-1),
    "file too short": set_in("files", 0, 1, to=445),
    "no files": set_in("files", to=[]),
    "unknown dtype": set_in("dtypes", 0, to="object"),
    "dtype number negative": set_in("tensors", 0, 1, to=-1),
    "dtype number too large": set_in("tensors", 0, 1, to=9),
    "shape too large": set_in("tensors", 0, 2, to=[5, 11]),
    "shape enormous": set_in("tensors", 0, 2, to=[2**62, 2**62]),
    "shape negative": set_in("tensors", 0, 2, to=[-5, -10]),
    "shape of booleans": set_in("tensors", 0, 2, to=[True, 50]),
    "shape of floats": set_in("tensors", 0, 2, to=[5.0, 10]),
    "shard outside": set_in("tensors", 1, 4, 0, to=[[1, 0], [25, 3]]),
    "shard of another rank": set_in("tensors", 1, 4, 0, to=[[0], [75]]),
    "key twice": set_in("tensors", 1, 0, to="a.weight"),
    "key no text": set_in("tensors", 0, 0, to=5),
    "blob too many": set_in("blobs", to=["extra", "more"]),
    "unknown value": set_in("planner", to={"x": 1}),
    "dict without pairs": set_in("user", to={"d": 5}),
    "user data no dict": set_in("user", to=[1]),
    "meta a list": lambda meta: meta.clear(),
}


@pytest.mark.parametrize("name", HOSTILE_META)
def test_hostile_metadata_is_refused(name):
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(rebuilt(HOSTILE_META[name]))


def test_json_nested_beyond_the_stack_is_refused():
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(rebuilt(META=b"[" * 200_000))


HOSTILE_CHUNKS = {
    "unknown kind": ("kind", 0, 7),
    "kind of another width": ("kind", 0, Kind(2, True).code),
    "kind changes inside an item": ("kind", 1, Kind(4, False).code),
    "file beyond": ("file", 1, 1),
    "offset beyond": ("offset", 2, 391),
    "offset wraps": ("offset", 0, 2**64 - 100),
    "stored beyond": ("stored_bytes", 2, 57),
    "raw enormous": ("raw_bytes", 0, 0xFFFF_FFF0),
    "raw not whole": ("raw_bytes", 0, 401),
    "raw too short for the item": ("raw_bytes", 1, 96),
    "stored longer than raw": ("raw_bytes", 0, 200),
    "base itself": ("base", 0, 0),
    "base later": ("base", 0, 1),
    "base of another length": ("base", 1, 0),
    "base of another kind": ("base", 2, 1),
}


@pytest.mark.parametrize("name", HOSTILE_CHUNKS)
def test_hostile_chunks_are_refused(name):
    column, row, value = HOSTILE_CHUNKS[name]
    hostile = sample(chunks=table_with(sample().chunks, column, row, value))
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(encode_manifest(hostile))


HOSTILE_ITEMS = {
    "chunk beyond": ("chunk", 3, 3),
    "start beyond": ("start", 0, 400),
    "length of another shape": ("nbytes", 0, 196),
    "blob beyond": ("nbytes", 3, 51),
    "blob enormous": ("nbytes", 3, 2**64 - 1),
    "item runs out": ("start", 1, 204),
    "wrong chunk": ("chunk", 3, 1),
}


@pytest.mark.parametrize("name", HOSTILE_ITEMS)
def test_hostile_items_are_refused(name):
    column, row, value = HOSTILE_ITEMS[name]
    hostile = sample(items=table_with(sample().items, column, row, value))
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(encode_manifest(hostile))


def test_hostile_lengths_are_refused():
    for hostile in (
        rebuilt(declared=10),
        rebuilt(declared=1 << 62),
        rebuilt(change_body=lambda body: body[:-1]),
        rebuilt(change_body=lambda body: body + b"x"),
        rebuilt(CHNK=struct.pack("<Q", 2**61)),
        rebuilt(CHNK=b""),
        rebuilt(ITEM=struct.pack("<Q", 1) + bytes(15)),
    ):
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(hostile)


def test_decompression_bomb_is_refused_before_decompression():
    stored = zstandard.ZstdCompressor().compress(bytes(512 << 20))
    for declared in (512, 4 * fmt.MAX_MANIFEST_BYTES + 1):
        head = struct.pack("<8sIIQQ", encode_manifest(sample())[:8], 1, 0, len(stored), declared)
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(with_checksum(head + stored))


def test_random_body_with_right_checksum_raises_only_format_errors():
    generator = random.Random(0)
    data = encode_manifest(sample())
    body = bytearray(zstandard.ZstdDecompressor().decompress(data[32:-8]))
    for _ in range(500):
        damaged = bytearray(body)
        for _ in range(generator.randrange(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        with contextlib.suppress(CorruptCheckpointError, UnsupportedFormatError):
            decode_manifest(rebuilt(change_body=lambda _, damaged=damaged: bytes(damaged)))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_roundtrip_is_unchanged(value):
    assert repr(unpack_value(json.loads(json.dumps(pack_value(value, "it"))))) == repr(value)


def test_values_that_need_a_pickle_are_refused():
    with pytest.raises(UnsupportedObjectError, match="the planner's data contains a set"):
        encode_manifest(sample(planner_data={"a": [{1, 2}]}))


# --- wrapper tensors --------------------------------------------------------------------------------------


def with_wrapper(**changes) -> Manifest:
    """`a.weight` and the first blob of the sample as the parts of a wrapper tensor."""
    entry = TensorEntry("w", "int4", (2, 3), (Shard((0, 0), (2, 3)),), Properties(requires_grad=True))
    return sample(wrapped=(WrappedEntry(entry, (("extra", ("a.weight",)),))._replace(**changes),))


def test_wrapper_tensor_roundtrip_is_unchanged():
    manifest = decode_manifest(encode_manifest(with_wrapper()))
    assert manifest.wrapped == with_wrapper().wrapped
    assert list(parts(dataclasses.replace(manifest, wrapped=()))) == list(parts(sample()))


def test_manifest_without_wrapper_tensors_is_unchanged():
    assert b"wrapped" not in zstandard.ZstdDecompressor().decompress(encode_manifest(sample())[32:-8])


@pytest.mark.parametrize(
    "wrong",
    [
        {"parts": ()},
        {"parts": (("nothing", ("a.weight",)),)},
        {"parts": (("extra", ("nothing",)),)},
        {"parts": (("extra", ("a.weight", "a.weight")),)},
        {"parts": (("extra", ("extra",)),)},
        {"tensor": TensorEntry("b", "int8", (1,), (Shard((0,), (1,)),))},
    ],
)
def test_wrapper_tensor_without_its_parts_raises(wrong):
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(encode_manifest(with_wrapper(**wrong)))


def test_wrapper_tensors_with_shared_parts_raise():
    (one,) = with_wrapper().wrapped
    other = one._replace(tensor=one.tensor._replace(key="other"))
    with pytest.raises(CorruptCheckpointError, match="twice"):
        decode_manifest(encode_manifest(sample(wrapped=(one, other))))


@pytest.mark.parametrize("created", [float("inf"), float("nan"), -1.0, 1e308, 2.0**63])
def test_manifest_with_an_impossible_time_is_corrupt(created):
    manifest = Manifest(
        created=created, writer="", files=(), tensors=(), blobs=(), items=item_table(), chunks=chunk_table()
    )
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(encode_manifest(manifest))
