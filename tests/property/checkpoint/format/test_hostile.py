"""Any bytes as a checkpoint: a load returns the saved values or raises a `MillraceError`, in bounded memory."""

from __future__ import annotations

import copy
import functools
import json
import logging
import pathlib
import random
import struct
import tempfile
import tracemalloc

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.states import assert_same_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.checkpoint.codec.chunks import MAX_CHUNK_BYTES, Kind, checksum
from millrace.checkpoint.codec.planes import PlaneCodec
from millrace.checkpoint.format.manifest import decode_manifest
from millrace.checkpoint.format.slices import Runs
from millrace.checkpoint.state.tensors import metadata_of
from millrace.checkpoint.storage.fetching import ChunkFetcher, ItemRequest
from millrace.checkpoint.storage.storage import LocalStorage
from millrace.errors import CorruptCheckpointError, MillraceError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning"),
]

HEADER = struct.Struct("<8sIIQQ")
SECTION = struct.Struct("<4sQ")


def state() -> dict:
    """Planes of every mode, packs, several chunks, objects."""
    generator = torch.Generator().manual_seed(0)
    return {
        "weights": torch.randn(33_000, generator=generator),
        "half": torch.randn(20_000, generator=generator).bfloat16(),
        "counter": torch.arange(9000),
        "zeros": torch.zeros(140_000, dtype=torch.uint8),
        "noise": torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=generator),
        "nested": {"list": [torch.ones(3), 5, "text"], "bias": torch.full((7,), -0.0)},
    }


def emptied(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(member) for key, member in value.items()}
    return [emptied(member) for member in value] if isinstance(value, list) else None


@pytest.fixture
def quiet_torch():
    """Torch logs a failed load with several tracebacks, which takes longer than the load."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("saved")
    dcp.save(state(), storage_writer=CheckpointWriter(place, sync_files=False))
    return place


@pytest.mark.usefixtures("quiet_torch")
def test_thousand_flipped_bits_are_detected(saved):
    generator = random.Random(1)
    expected = state()
    files = sorted(saved.iterdir())
    assert len(files) == 2
    reported = 0
    for number in range(1000):
        # Half of them in the manifest, which is much smaller.
        file = files[number % 2]
        content = bytearray(file.read_bytes())
        bit = generator.randrange(len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
        intact = file.read_bytes()
        file.write_bytes(content)
        loaded = emptied(expected)
        try:
            dcp.load(loaded, storage_reader=CheckpointReader(saved, thread_count=1))
        except CheckpointException as error:
            reported += isinstance(error.failures[0][0], CorruptCheckpointError)
        else:
            assert_same_state(loaded, expected, f"with bit {bit} of {file} flipped, the state")
        finally:
            file.write_bytes(intact)
    # Nothing in either file is outside a checksum.
    assert reported == 1000


# --- chunks ---------------------------------------------------------------------------------------


@functools.cache
def frame(nbytes: int, declared: int | None = None) -> bytes:
    """A zstd frame of zeros; `declared` replaces the content size in its header."""
    made = zstandard.ZstdCompressor(level=1).compress(bytes(nbytes))
    if declared is None:
        return made
    # A header with an 8-byte content size and no checksum.
    return made[:4] + bytes([0xE0]) + struct.pack("<Q", declared) + made[4 + zstandard.frame_header_size(made) - 4 :]


@st.composite
def hostile_chunks(draw):
    kind = Kind(draw(st.sampled_from([1, 2, 4, 8])), draw(st.booleans()))
    count = draw(st.integers(0, 300))
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 3, count * kind.width, np.uint8)
    base = raw.data if draw(st.booleans()) else None
    if draw(st.booleans()):
        stored = bytearray(b"".join(PlaneCodec().encode(raw.data, kind, base)))
        for place, value in draw(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6)):
            if stored:
                stored[place % len(stored)] = value
        stored = stored[: draw(st.integers(0, len(stored)))] if draw(st.booleans()) else stored
    else:
        halved = draw(st.booleans())
        planes = 3 if halved else kind.width
        modes = draw(st.lists(st.integers(0, 5), min_size=planes, max_size=planes))
        bodies = [
            draw(
                st.binary(max_size=40)
                | st.just(frame(count))
                | st.just(frame(2 * count))
                | st.just(frame(64 << 20))
                | st.just(frame(10, declared=count))
                | st.just(frame(10, declared=1 << 40))
            )
            for _ in modes
        ]
        stored = bytes([kind.code | (32 if base is not None else 0) | (8 if halved else 0), *modes])
        stored += struct.pack(f"<{planes}I", *map(len, bodies)) + b"".join(bodies)
    length = draw(st.sampled_from([raw.size, raw.size + 1, raw.size + kind.width, 0]))
    return kind, bytes(stored), base, length


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(hostile_chunks())
def test_decoding_any_chunk_raises_only_millrace_errors_in_bounded_memory(chunk):
    kind, stored, base, length = chunk
    codec, out = PlaneCodec(), np.empty(length, np.uint8)
    tracemalloc.start()
    try:
        codec.decode(stored, kind, out.data, base)
    except MillraceError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MAX_CHUNK_BYTES


# --- manifests ------------------------------------------------------------------------------------


def taken_apart(data: bytes) -> dict[bytes, bytes]:
    body = zstandard.ZstdDecompressor().decompress(data[HEADER.size : -8])
    sections, position = {}, 0
    while position < len(body):
        tag, nbytes = SECTION.unpack_from(body, position)
        position += SECTION.size
        sections[tag] = body[position : position + nbytes]
        position += nbytes
    return sections


def put_together(sections: dict[bytes, bytes]) -> bytes:
    """With right lengths and checksums, whatever the sections hold."""
    body = b"".join(SECTION.pack(tag, len(part)) + part for tag, part in sections.items())
    stored = zstandard.ZstdCompressor().compress(body)
    head = HEADER.pack(b"\x89MILLRC\n", 1, 0, len(stored), len(body)) + stored
    return head + struct.pack("<Q", checksum(head))


def places(value, path=()):
    """Paths of all members of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


HOSTILE = [
    *(None, True, 0, 1, -1, 3.5, 2**31, 2**32, 2**62, 2**63, 2**64, 10**400, float("nan"), float("inf")),
    *("", "x", "../../etc/passwd", "/etc/passwd", "data-0.millrace", "../../data-0.millrace", "../x/data-0.millrace"),
    *("float32", "float64", "bool", "strided", "jagged", "float8_e4m3fn", "__class__", "\0", "\ud800", "weights"),
    *([], {}, [[]], [0], [0, 0], [-1, -1], [2**62, 2**62], [None] * 5, {"t": 1}, {"b": "!"}, {"d": [[1]]}),
    *({"d": [[{"d": []}, 1]]}, {"t": [{"d": []}]}, {"d": [["x", {"t": ["x", 10**12]}]]}),
]

cells = st.tuples(st.sampled_from([b"ITEM", b"CHNK"]), st.integers(0, 2000), st.binary(min_size=1, max_size=8))
changes = st.tuples(st.integers(0, 10_000), st.sampled_from(HOSTILE), st.booleans())


def changed(sections: dict[bytes, bytes], meta_changes, cell_changes) -> dict[bytes, bytes]:
    meta = json.loads(sections[b"META"])
    for choice, value, remove in meta_changes:
        paths = list(places(meta))[1:]
        if not paths:
            break
        *path, last = paths[choice % len(paths)]
        owner = meta
        for key in path:
            owner = owner[key]
        if remove:
            del owner[last]
        else:
            owner[last] = copy.deepcopy(value)
    made = {**sections, b"META": json.dumps(meta).encode()}
    for tag, place, data in cell_changes:
        table = bytearray(made[tag])
        table[place % len(table) : place % len(table) + len(data)] = data
        made[tag] = bytes(table)
    return made


def read_everything(data: bytes, place: pathlib.Path) -> None:
    """What a reader does with a manifest, as far as it gets."""
    manifest = decode_manifest(data)
    metadata_of(manifest)
    fetcher = ChunkFetcher(LocalStorage(str(place)), manifest, 1)
    for number, nbytes in enumerate(manifest.items["nbytes"].tolist()):
        if 0 < nbytes <= 1 << 20:
            fetcher.fetch([ItemRequest(number, Runs(0, nbytes, (), ()), np.empty(nbytes, np.uint8))])


@pytest.mark.slow
@settings(deadline=None, max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(meta_changes=st.lists(changes, max_size=3), cell_changes=st.lists(cells, max_size=3))
def test_reading_any_manifest_raises_only_millrace_errors_in_bounded_memory(saved, meta_changes, cell_changes):
    data = (saved / "manifest.millrace").read_bytes()
    hostile = put_together(changed(taken_apart(data), meta_changes, cell_changes))
    tracemalloc.start()
    try:
        read_everything(hostile, saved)
    except MillraceError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 64 << 20


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400))
def test_decoding_any_manifest_body_raises_a_millrace_error(body):
    stored = zstandard.ZstdCompressor().compress(body)
    head = HEADER.pack(b"\x89MILLRC\n", 1, 0, len(stored), len(body)) + stored
    with pytest.raises(MillraceError):
        decode_manifest(head + struct.pack("<Q", checksum(head)))
    with pytest.raises(MillraceError):
        decode_manifest(body)


def with_section(saved, **sections: bytes) -> bytes:
    data = (saved / "manifest.millrace").read_bytes()
    return put_together({**taken_apart(data), **{tag.encode(): part for tag, part in sections.items()}})


# Begin, repeated middle, number of repetitions, end.
BOMBS = {
    "brackets": (b"", b"[", 40 << 20, b""),
    "empty lists": (b"[", b"[],", 13 << 20, b"[]]"),
    "numbers": (b"[", b"0,", 20 << 20, b"0]"),
    "one long text": (b'"', b"x", 40 << 20, b'"'),
    "a long number": (b"", b"9", 1 << 20, b""),
    "repeated keys": (b"{", b'"files":[],', 4 << 20, b'"files":[]}'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_compression_bomb_costs_its_stored_size(saved, name):
    """Each takes a few kilobytes to store."""
    begin, middle, count, end = BOMBS[name]
    bomb = with_section(saved, META=begin + middle * count + end)
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(bomb)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.slow
def test_largest_accepted_bomb_is_small(saved):
    """The largest manifest that counts as small, with the JSON that needs the most memory for its length."""
    bomb = with_section(saved, META=b"[" + b"[]," * ((4 << 20) // 3 - 1000) + b"[]]")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(bomb)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert 32 << 20 < peak < 256 << 20


def test_paths_that_would_make_long_lists_are_refused(saved):
    """Torch fills a list up to whatever index its planner's data names."""
    data = (saved / "manifest.millrace").read_bytes()
    sections = taken_apart(data)
    meta = json.loads(sections[b"META"])
    path = next(pair for pair in meta["planner"]["d"] if pair[0] == "nested.list.0")
    with tempfile.TemporaryDirectory() as place:
        target = pathlib.Path(place)
        for file in saved.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        for index in (10**12, -(10**12)):
            path[1]["t"][2] = index
            (target / "manifest.millrace").write_bytes(put_together({**sections, b"META": json.dumps(meta).encode()}))
            with pytest.raises(CheckpointException) as caught:
                _load_state_dict_from_keys(storage_reader=CheckpointReader(target))
            assert isinstance(caught.value.failures[0][0], CorruptCheckpointError)


def test_long_path_costs_its_stored_size(saved):
    data = (saved / "manifest.millrace").read_bytes()
    sections = taken_apart(data)
    meta = json.loads(sections[b"META"])
    meta["planner"]["d"].append(["long", {"t": [0] * 10_000}])
    manifest = decode_manifest(put_together({**sections, b"META": json.dumps(meta).encode()}))
    tracemalloc.start()
    try:
        metadata_of(manifest)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
