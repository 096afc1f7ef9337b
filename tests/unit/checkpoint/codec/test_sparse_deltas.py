"""Sparse deltas: bit for bit, smaller than other forms, and no invalid chunk is accepted or crashes."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.checkpoint.codec import deltas, zstd
from millrace.checkpoint.codec.chunks import Array, Kind
from millrace.checkpoint.codec.planes import PlaneCodec, is_sparse
from millrace.errors import CorruptCheckpointError

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
BF16 = Kind(2, True)
KINDS = [Kind(1, False), Kind(1, True), BF16, Kind(2, False), Kind(4, True), Kind(8, True), Kind(8, False)]


def bfloat16(values: Array) -> Array:
    """Values as the bits of bfloat16, rounded to nearest."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def trained(rate: float, count: int = 1 << 19, seed: int = 0) -> tuple[Array, Array]:
    """Weights of bf16 before and after a step of this size in each fp32 master weight."""
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal(count) * 0.02).astype(np.float32)
    return bfloat16(weights), bfloat16(weights + rate * rng.standard_normal(count).astype(np.float32))


def encoded(words: Array, base: Array, kind: Kind) -> bytes:
    return b"".join(bytes(memoryview(part)) for part in PlaneCodec().encode(words, kind, base))


def decoded(stored: bytes, base: Array, kind: Kind) -> Array:
    out = np.empty(base.nbytes, dtype=np.uint8)
    PlaneCodec().decode(stored, kind, out.data, base)
    return out.view(base.dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.001, 0.02, 0.12])
def test_sparse_delta_of_any_kind_and_density_decodes_bit_for_bit(kind: Kind, share: float) -> None:
    rng = np.random.default_rng(1)
    for count in (1, 9, 300, 70_001):
        base = rng.integers(0, 256, count * kind.width, dtype=np.uint8).view(UNSIGNED[kind.width])
        words, changed = base.copy(), rng.random(count) < share
        words[changed] = rng.integers(0, 256, int(changed.sum()) * kind.width, dtype=np.uint8).view(base.dtype)
        stored = encoded(words, base, kind)
        assert np.array_equal(decoded(stored, base, kind), words)
        assert is_sparse(memoryview(stored)) == (count > 9 and np.count_nonzero(words != base) * 8 <= count)
        assert len(stored) <= base.nbytes + 1 + 5 * kind.width


@pytest.mark.parametrize("rate", [1e-6, 3e-6])
def test_sparse_delta_of_a_training_step_is_smaller_than_xor_and_lists(rate: float) -> None:
    base, words = trained(rate)
    stored = encoded(words, base, BF16)
    assert is_sparse(memoryview(stored))
    assert np.array_equal(decoded(stored, base, BF16), words)
    index = np.flatnonzero(words != base).astype(np.uint32)
    others = [
        len(zstd.at_level(3).compress((words ^ base).tobytes())),
        len(zstd.at_level(3).compress(index.tobytes() + words[index].tobytes())),
    ]
    assert len(stored) <= 0.8 * min(others)


def test_delta_with_many_changed_values_is_dense() -> None:
    base, words = trained(3e-4)
    stored = encoded(words, base, BF16)
    assert not is_sparse(memoryview(stored))
    assert np.array_equal(decoded(stored, base, BF16), words)


@pytest.mark.parametrize("gap", [1, 2, 254, 255, 256, 257, 510, 70_000])
def test_distances_at_the_limits_of_a_byte_are_decoded(gap: int) -> None:
    positions = np.arange(20) * gap
    coded = deltas.encode_distances(positions)
    elements = int(positions[-1]) + 1
    assert np.array_equal(deltas.decode_distances(coded, elements), positions)
    assert coded.escaped.size <= deltas.most_bytes(20, elements)
    with pytest.raises(CorruptCheckpointError):
        deltas.decode_distances(coded, elements - 1)


def test_damaged_sparse_chunk_raises_or_decodes_within_its_memory() -> None:
    base, words = trained(2e-6, 20_000)
    stored = encoded(words, base, BF16)
    assert is_sparse(memoryview(stored))
    rng = np.random.default_rng(2)
    accepted = 0
    for _ in range(600):
        harmed = bytearray(stored)
        for place in rng.integers(1, len(stored) if rng.random() < 0.5 else 60, rng.integers(1, 4)):
            harmed[place] = rng.integers(256)
        cut = bytes(harmed[: rng.integers(1, len(harmed))]) if rng.random() < 0.3 else bytes(harmed)
        try:
            decoded(cut, base, BF16)
            accepted += 1  # other values, which the checksum of the decoded bytes detects
        except CorruptCheckpointError:
            pass
    assert accepted < 600


def test_sparse_chunk_without_its_base_is_refused() -> None:
    base, words = trained(1e-6, 5000)
    out = np.empty(base.nbytes, dtype=np.uint8)
    with pytest.raises(CorruptCheckpointError):
        PlaneCodec().decode(encoded(words, base, BF16), BF16, out.data)
