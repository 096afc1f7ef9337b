"""The typed codec: exact, small, and safe with hostile chunks."""

from __future__ import annotations

import argparse
import pathlib
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import zstandard

from millrace.checkpoint.codec.chunks import CHUNK_BYTES, MAX_CHUNK_BYTES, OPAQUE, Effort, Kind, checksum
from millrace.checkpoint.codec.planes import Mode, PlaneCodec
from millrace.errors import CorruptCheckpointError

KINDS = [Kind(width, is_float) for width in (1, 2, 4, 8) for is_float in (False, True)]
BF16, FP32 = Kind(2, True), Kind(4, True)


def weights(count: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(count) * 0.02).astype(np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def stored(raw: np.ndarray, kind: Kind, base: np.ndarray | None = None, *, effort: Effort = Effort.TYPED) -> bytes:
    return b"".join(PlaneCodec().encode(raw.data, kind, None if base is None else base.data, effort=effort))


def decoded(chunk: bytes, kind: Kind, nbytes: int, base: np.ndarray | None = None) -> np.ndarray:
    out = np.full(nbytes, 0xA5, dtype=np.uint8)
    PlaneCodec().decode(chunk, kind, out.data, None if base is None else base.data)
    return out


def modes(chunk: bytes, kind: Kind) -> list[int]:
    return list(chunk[1 : 1 + kind.width])


CONTENTS = {
    "empty": lambda count: np.zeros(0, np.uint8),
    "one": lambda count: np.arange(8, dtype=np.uint8),
    "zeros": lambda count: np.zeros(count, np.uint8),
    "noise": lambda count: np.random.default_rng(1).integers(0, 256, count, np.uint8),
    "counting": lambda count: np.arange(count // 8, dtype=np.uint64).view(np.uint8),
    "weights": lambda count: weights(count // 4).view(np.uint8),
    "late change": lambda count: np.r_[np.zeros(count - 8, np.uint8), np.arange(8, dtype=np.uint8)],
}


@pytest.mark.parametrize("effort", [Effort.RAW, Effort.TYPED, Effort.MAX])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("content", CONTENTS)
def test_chunk_of_every_kind_is_decoded_bit_for_bit(kind, content, effort):
    for nbytes in (4096, 300 * 1024 - 8, CHUNK_BYTES):
        raw = CONTENTS[content](nbytes)
        assert np.array_equal(decoded(stored(raw, kind, effort=effort), kind, raw.size), raw)


@pytest.mark.parametrize("effort", [Effort.RAW, Effort.TYPED, Effort.MAX])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_delta_chunk_of_every_kind_is_decoded_bit_for_bit(kind, effort):
    generator = np.random.default_rng(2)
    raw, base = generator.integers(0, 256, (2, 64 * 1024), np.uint8)
    assert np.array_equal(decoded(stored(raw, kind, base, effort=effort), kind, raw.size, base), raw)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_chunk_without_compression_is_stored_as_one_plane_of_its_bytes(kind):
    raw = np.arange(4096, dtype=np.uint32).view(np.uint8)
    chunk = stored(raw, kind, effort=Effort.RAW)
    assert modes(chunk, OPAQUE) == [Mode.RAW]
    assert chunk[6:] == raw.tobytes()


def test_max_effort_on_floats_rotates_their_bits_and_is_smaller():
    raw = bf16(weights(CHUNK_BYTES // 2)).view(np.uint8)
    typed, most = stored(raw, BF16), stored(raw, BF16, effort=Effort.MAX)
    assert typed[0] == BF16.code
    assert most[0] & 0x3F == BF16.code
    assert most[0] >> 6 in (1, 2, 3)
    assert len(most) < 0.995 * len(typed)


def test_float_chunk_with_noise_in_its_lower_halves_is_not_split_further():
    raw = weights(CHUNK_BYTES // 4).astype(np.float32).view(np.uint8)
    chunk = stored(raw, Kind(4, True))
    assert chunk[0] == Kind(4, True).code | 8
    assert chunk[1:4] == bytes([Mode.RAW, Mode.RAW, Mode.HUFFMAN])
    assert len(chunk) < 0.86 * raw.size
    assert np.array_equal(decoded(chunk, Kind(4, True), raw.size), raw)
    # If either lower byte is compressible, all four bytes are planes.
    for lost_bits in (8, 16):
        rounded = (raw.view(np.uint32) >> lost_bits << lost_bits).view(np.uint8)
        chunk = stored(rounded, Kind(4, True))
        assert chunk[0] == Kind(4, True).code
        assert len(chunk) < (0.86 - lost_bits / 32) * raw.size
        assert np.array_equal(decoded(chunk, Kind(4, True), raw.size), rounded)


def test_halved_chunk_of_another_kind_or_length_is_refused():
    base = np.zeros(64, np.uint8)
    for kind, other in ((Kind(4, False), None), (BF16, None), (Kind(8, True), None), (Kind(4, True), base)):
        # Of a delta, the bit means that it is sparse. This one is not: all values differ.
        chunk = bytearray(stored(base + np.uint8(other is not None), kind, other))
        assert not chunk[0] & 8
        chunk[0] |= 8
        with pytest.raises(CorruptCheckpointError):
            decoded(bytes(chunk), kind, 64, other)
    halved = bytearray(stored(weights(4096).astype(np.float32).view(np.uint8), Kind(4, True)))
    for turn in (1, 2, 3):
        with pytest.raises(CorruptCheckpointError, match="kind"):
            decoded(bytes([halved[0] | turn << 6]) + bytes(halved[1:]), Kind(4, True), 4 * 4096)
    for nbytes in (4 * 4096 - 4, 4 * 4096 + 4, 0):
        with pytest.raises(CorruptCheckpointError):
            decoded(bytes(halved), Kind(4, True), nbytes)


def test_max_effort_on_text_finds_matches_and_is_smaller():
    text = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8)
    assert len(stored(text, OPAQUE, effort=Effort.MAX)) < 0.9 * len(stored(text, OPAQUE))


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_rotated_chunk_of_another_kind_is_refused(turn):
    for kind in (OPAQUE, Kind(1, True), Kind(4, False)):
        chunk = bytearray(stored(np.zeros(64, np.uint8), kind))
        chunk[0] |= turn << 6
        with pytest.raises(CorruptCheckpointError, match="kind"):
            decoded(bytes(chunk), kind, 64)
    # In a delta of floats, the first of these bits marks a grouped chunk.
    base = np.zeros(64, np.uint8)
    for kind in (OPAQUE, Kind(1, True), Kind(4, False)) if turn == 1 else (BF16, FP32, OPAQUE):
        chunk = bytearray(stored(base, kind, base))
        chunk[0] |= turn << 6
        with pytest.raises(CorruptCheckpointError, match="kind"):
            decoded(bytes(chunk), kind, 64, base)


def a_step(kind: Kind, changes: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a chunk of weights before and after a step, of which `changes` returns the differences."""
    values = {2: bf16, 4: np.array, 8: lambda some: some.astype(np.float64)}[kind.width]
    base = weights(CHUNK_BYTES // kind.width)
    noise = np.random.default_rng(5).standard_normal(base.size).astype(np.float32)
    old, new = (np.ascontiguousarray(values(some)).view(np.uint8) for some in (base, base + changes(base) * noise))
    return old, new


@pytest.mark.parametrize("kind", [BF16, FP32, Kind(8, True)], ids=str)
@pytest.mark.parametrize("effort", [Effort.TYPED, Effort.MAX])
def test_delta_of_equal_steps_is_grouped_by_exponent_and_smaller(kind, effort):
    old, new = a_step(kind, lambda base: np.float32(1e-4))
    chunk = stored(new, kind, old, effort=effort)
    with mock.patch.object(PlaneCodec, "_is_grouped", return_value=False):
        ungrouped = stored(new, kind, old, effort=effort)
    assert (chunk[0] >> 6, ungrouped[0] >> 6) == (1, 0)
    assert len(chunk) < {2: 0.9, 4: 0.99, 8: 1.0}[kind.width] * len(ungrouped)
    for nbytes in (new.size, 8 * 999):
        chunk = stored(new[:nbytes], kind, old[:nbytes], effort=effort)
        assert np.array_equal(decoded(chunk, kind, nbytes, old[:nbytes]), new[:nbytes])
    # A delta with few changes is smaller without grouping.
    new = np.where(np.arange(old.size) < 9999, new, old)
    assert stored(new, kind, old, effort=effort)[0] >> 6 == 0


def test_grouped_plane_with_a_very_frequent_value_is_coded_with_matches():
    old, new = a_step(BF16, lambda base: np.float32(1e-4))
    chunk = stored(new, BF16, old)
    assert modes(chunk, BF16) == [Mode.HUFFMAN, Mode.ZSTD]
    # Its upper byte is zero nearly everywhere. A Huffman code has at least one bit.
    assert struct.unpack_from("<2I", chunk, 3)[1] < old.size // 2 // 16


@pytest.mark.parametrize(("effort", "grouped"), [(Effort.TYPED, 0), (Effort.MAX, 1)])
def test_delta_of_steps_in_proportion_is_grouped_at_max_effort_only(effort, grouped):
    old, new = a_step(FP32, lambda base: np.float32(0.01) * np.abs(base))
    chunk = stored(new, FP32, old, effort=effort)
    assert chunk[0] >> 6 == grouped
    assert np.array_equal(decoded(chunk, FP32, new.size, old), new)


def test_delta_at_max_effort_has_the_documented_layout():
    base = np.array([3.0, -0.5, 4.0, 0.5], dtype=np.float32)
    raw = base.view(np.int32) + np.arange(1, 5, dtype=np.int32)
    head = bytes([FP32.code | 32 | 64, *[Mode.RAW] * 4]) + struct.pack("<4I", 4, 4, 4, 4)
    # In the order of the exponents: -0.5 and 0.5, then 3, then 4. A negative float that grows in bits becomes less.
    codes = np.array([3, 8, 2, 6], dtype="<u4")
    planes = codes.view(np.uint8).reshape(4, 4).T.tobytes()
    out = decoded(head + planes, FP32, 16, base.view(np.uint8))
    assert out.view(np.int32).tolist() == raw.tolist()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("content", ["one", "zeros", "noise", "weights", "late change"])
def test_estimate_of_a_sample_is_near_the_length_of_its_chunk(kind, content):
    raw = CONTENTS[content](16 << 10)
    few, most = raw.copy(), raw ^ np.uint8(1)
    few[-8:] ^= 1
    for base in (None, raw, few, most):
        estimate = PlaneCodec().estimate(raw.data, kind, None if base is None else base.data)
        assert estimate == pytest.approx(len(stored(raw, kind, base)), rel=0.06, abs=200)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_estimate_of_repeated_rows_is_far_below_their_length(kind):
    rows = np.tile(weights(64).view(np.uint8), 64)
    assert PlaneCodec().estimate(rows.data, kind) < rows.size / 20


@pytest.mark.parametrize("width", [2, 4, 8])
def test_chunk_of_special_floats_keeps_their_bits(width):
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}[width]
    top = 1 << (8 * width - 1)
    # Zeros, infinities, quiet and signalling NaNs with payloads, denormals: of both signs, whatever the exponent width.
    patterns = [0, 1, top - 1, top // 2, top // 2 - 1, top // 2 + 1, 0x7C00, 0x7C01, 0x7E55, 0x7F80, 0x7F81]
    raw = np.array([p ^ sign for p in patterns for sign in (0, top)] * 100, dtype=np.uint64).astype(unsigned)
    kind, raw = Kind(width, True), raw.view(np.uint8)
    assert np.array_equal(decoded(stored(raw, kind), kind, raw.size), raw)
    base = np.roll(raw, width)
    assert np.array_equal(decoded(stored(raw, kind, base), kind, raw.size, base), raw)


def test_decode_into_unaligned_target_is_equal():
    raw = bf16(weights(5000)).view(np.uint8)
    memory = np.zeros(raw.size + 1, np.uint8)
    PlaneCodec().decode(stored(raw, BF16), BF16, memory[1:].data)
    assert np.array_equal(memory[1:], raw)


@pytest.mark.parametrize(("kind", "limit"), [(BF16, 0.67), (FP32, 0.84)], ids=["bf16", "fp32"])
def test_chunk_of_weights_is_compressed_below_its_limit(kind, limit):
    values = weights(CHUNK_BYTES // kind.width)
    raw = (bf16(values) if kind is BF16 else values).view(np.uint8)
    assert len(stored(raw, kind)) <= limit * raw.size


def test_delta_of_small_step_is_below_a_fifth_of_the_chunk():
    before = weights(CHUNK_BYTES // 2)
    after = before + weights(before.size, seed=1) * np.float32(1e-3)
    base, raw = bf16(before).view(np.uint8), bf16(after).view(np.uint8)
    assert len(stored(raw, BF16, base)) < 0.2 * raw.size


def test_plane_mode_of_each_content_is_the_smallest():
    noise = np.random.default_rng(3).integers(0, 256, 64 * 1024, np.uint8)
    text = np.frombuffer(b"the mill wheel turns and turns; " * 2048, np.uint8)
    skewed = np.random.default_rng(4).binomial(20, 0.5, 64 * 1024).astype(np.uint8)
    assert modes(stored(noise, OPAQUE), OPAQUE) == [Mode.RAW]
    assert modes(stored(text, OPAQUE), OPAQUE) == [Mode.ZSTD]
    assert modes(stored(skewed, OPAQUE), OPAQUE) == [Mode.HUFFMAN]
    assert modes(stored(np.zeros(999, np.uint8), OPAQUE), OPAQUE) == [Mode.CONSTANT]


def test_plane_with_a_rare_value_outside_the_sample_takes_less_than_a_bit_per_byte():
    rare = np.zeros(256 * 1024, np.uint8)
    rare[100_001::50_000] = 1
    chunk = stored(rare, OPAQUE)
    assert modes(chunk, OPAQUE) == [Mode.ZSTD]
    assert len(chunk) < 200


def test_chunk_of_noise_grows_by_its_header_at_most():
    for kind in KINDS:
        noise = np.random.default_rng(5).integers(0, 256, 32 * 1024, np.uint8)
        assert len(stored(noise, kind)) <= noise.size + 1 + 5 * kind.width


def test_encode_of_invalid_chunk_is_refused():
    with pytest.raises(ValueError, match="not a chunk"):
        stored(np.zeros(3, np.uint8), BF16)
    with pytest.raises(ValueError, match="not a chunk"):
        stored(np.zeros(MAX_CHUNK_BYTES + 1, np.uint8), OPAQUE)
    with pytest.raises(ValueError, match="another length"):
        stored(np.zeros(4, np.uint8), OPAQUE, np.zeros(5, np.uint8))
    with pytest.raises(ValueError, match="an element has"):
        Kind(3, False)


def chunk_of(mode: int, body: bytes, code: int = 0) -> bytes:
    return bytes([code, mode]) + struct.pack("<I", len(body)) + body


BOMB = zstandard.ZstdCompressor().compress(bytes(256 << 20))
HOSTILE = {
    "nothing": b"",
    "header cut off": b"\0\1",
    "unknown mode": chunk_of(9, b"abcdefgh"),
    "raw of another length": chunk_of(Mode.RAW, b"abc"),
    "constant of two": chunk_of(Mode.CONSTANT, b"ab"),
    "not zstd": chunk_of(Mode.ZSTD, b"abcdefgh"),
    "a bomb": chunk_of(Mode.ZSTD, BOMB),
    "a frame without length": chunk_of(
        Mode.HUFFMAN, zstandard.ZstdCompressor(write_content_size=False).compress(b"abcdefgh")
    ),
    "bytes after the frame": chunk_of(Mode.ZSTD, zstandard.ZstdCompressor().compress(b"abcdefgh") + b"x"),
    "a frame cut off": chunk_of(Mode.ZSTD, zstandard.ZstdCompressor().compress(b"abcdefgh")[:-2]),
    "length beyond the chunk": bytes([0, 0]) + struct.pack("<I", 0xFFFFFFFF) + b"abcdefgh",
    "another kind": chunk_of(Mode.RAW, b"abcdefgh", code=0x10),
    "a delta without base": chunk_of(Mode.RAW, b"abcdefgh", code=0x20),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_chunk_is_refused(name):
    with pytest.raises(CorruptCheckpointError):
        decoded(HOSTILE[name], OPAQUE, 8)


def test_decode_into_target_of_another_length_is_refused():
    chunk = stored(np.arange(250, dtype=np.uint32).view(np.uint8), BF16)
    for nbytes in (0, 998, 999, 1001, 1002):
        with pytest.raises(CorruptCheckpointError):
            decoded(chunk, BF16, nbytes)
    with pytest.raises(CorruptCheckpointError):
        PlaneCodec().decode(chunk_of(0, b""), OPAQUE, np.zeros(MAX_CHUNK_BYTES + 1, np.uint8).data)
    with pytest.raises(CorruptCheckpointError, match="another length"):
        decoded(stored(np.zeros(8, np.uint8), OPAQUE, np.ones(8, np.uint8)), OPAQUE, 8, np.ones(7, np.uint8))


def test_kind_with_unknown_code_is_refused():
    for kind in KINDS:
        assert Kind.from_code(kind.code) == kind
    for code in (4, 0x14, 0x20, 0x80, 255):
        with pytest.raises(CorruptCheckpointError):
            Kind.from_code(code)


def test_codecs_of_separate_threads_decode_equal_bytes():
    raw = [bf16(weights(CHUNK_BYTES // 2, seed)).view(np.uint8) for seed in range(4)]
    wrong: list[int] = []

    def work(number: int) -> None:
        codec = PlaneCodec()
        for _ in range(5):
            out = np.empty_like(raw[number])
            codec.decode(b"".join(codec.encode(raw[number].data, BF16)), BF16, out.data)
            if not np.array_equal(out, raw[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_checksum_of_a_chunk_is_its_xxh3():
    assert checksum(b"") == 0x2D06800538D394C2
    assert checksum(np.zeros((2, 3), np.uint16)) == checksum(bytes(12))


def test_import_of_codec_and_format_without_torch_succeeds():
    program = (
        "import sys, millrace.checkpoint.codec.planes, millrace.checkpoint.format.manifest, millrace.checkpoint as c;"
        "c.describe; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
