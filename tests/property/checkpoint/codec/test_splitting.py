"""Splitting and joining of byte planes follow the documented layout, for every kind and length."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.checkpoint.codec import splitting
from millrace.checkpoint.codec.chunks import Kind
from millrace.checkpoint.codec.planes import Mode, PlaneCodec

# Lengths around the block of the bit operations, in bytes, and short ones.
BLOCK_BYTES = 256 << 10
COUNTS = st.one_of(
    st.integers(0, 300), st.integers(-2, 2).map(lambda more: BLOCK_BYTES + more), st.just(2 * BLOCK_BYTES + 9)
)
KINDS = st.builds(Kind, st.sampled_from([2, 4, 8]), st.booleans())


def noise(count: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count * width, np.uint8)


def planes_of(raw: np.ndarray, width: int, rotation: int) -> list[np.ndarray]:
    """Byte planes of `raw`, the lowest first, by the definition: each element is rotated left, then cut into bytes."""
    bits = 8 * width
    words = raw.view(f"<u{width}").astype(np.uint64)
    turned = words << np.uint64(rotation) | words >> np.uint64(bits - rotation) if rotation else words
    return [(turned >> np.uint64(8 * number) & np.uint64(255)).astype(np.uint8) for number in range(width)]


def chunk_of(code: int, planes: list[np.ndarray]) -> bytes:
    """A stored chunk with all planes raw."""
    lengths = struct.pack(f"<{len(planes)}I", *(plane.size for plane in planes))
    return bytes([code, *[Mode.RAW] * len(planes)]) + lengths + b"".join(plane.tobytes() for plane in planes)


@pytest.fixture(scope="module", params=["numpy", "compiled"], autouse=True)
def library(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "loops", splitting.Loops())
        assert request.param == "numpy" or splitting.loops.load()
        yield


def decoded(chunk: bytes, kind: Kind, nbytes: int) -> np.ndarray:
    # Also to an unaligned target, as a slice of a larger one is.
    memory = np.full(nbytes + 1, 0xA5, np.uint8)
    PlaneCodec().decode(chunk, kind, memory[1:].data)
    aligned = np.full(nbytes, 0xA5, np.uint8)
    PlaneCodec().decode(chunk, kind, aligned.data)
    assert np.array_equal(aligned, memory[1:])
    return aligned


@settings(deadline=None)
@given(KINDS, COUNTS, st.integers(1, 4), st.integers(0, 99))
@example(Kind(2, True), BLOCK_BYTES // 2 + 1, 1, 0)
@example(Kind(4, True), BLOCK_BYTES // 4 + 1, 3, 0)
def test_planes_of_every_rotation_are_joined_as_documented(kind, count, rotation, seed):
    raw = noise(count, kind.width, seed)
    turn = rotation if kind.is_float else 0
    chunk = chunk_of(kind.code | (max(0, turn - 1) << 6), planes_of(raw, kind.width, turn))
    assert np.array_equal(decoded(chunk, kind, raw.size), raw)


@settings(deadline=None)
@given(COUNTS, st.integers(0, 99))
def test_planes_of_a_halved_chunk_are_joined_as_documented(count, seed):
    raw = noise(count, 4, seed)
    halves = raw.view("<u2")
    chunk = chunk_of(
        Kind(4, True).code | 8,
        [halves[::2].copy().view(np.uint8), *planes_of(halves[1::2].copy().view(np.uint8), 2, 1)],
    )
    assert np.array_equal(decoded(chunk, Kind(4, True), raw.size), raw)


@settings(deadline=None)
@given(KINDS, COUNTS, st.integers(0, 99))
def test_noise_of_every_kind_is_stored_as_the_documented_planes(kind, count, seed):
    raw = noise(count, kind.width, seed)
    chunk = b"".join(PlaneCodec().encode(raw.data, kind))
    if chunk[0] & 8:  # halved
        halves = raw.view("<u2")
        planes = [halves[::2].copy().view(np.uint8), *planes_of(halves[1::2].copy().view(np.uint8), 2, 1)]
    else:
        planes = planes_of(raw, kind.width, int(kind.is_float))
    modes = chunk[1 : 1 + len(planes)]
    lengths = struct.unpack_from(f"<{len(planes)}I", chunk, 1 + len(planes))
    position, checked = 1 + 5 * len(planes), 0
    for mode, length, plane in zip(modes, lengths, planes, strict=True):
        if mode == Mode.RAW:
            assert chunk[position : position + length] == plane.tobytes()
            checked += 1
        position += length
    # A few values may happen to be a constant plane.
    assert checked == len(planes) or count < 10
    assert np.array_equal(decoded(chunk, kind, raw.size), raw)
