"""Every registered codec: exact, limited in size, and safe with damaged chunks. The dispatch between codecs."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from millrace.checkpoint.codec.chunks import CHUNK_BYTES, MAX_CHUNK_OVERHEAD_BYTES, OPAQUE, Effort, Kind, as_bytes
from millrace.checkpoint.codec.planes import PlaneCodec
from millrace.checkpoint.codec.registry import CODECS, ChunkCodec, RegisteredCodec, efforts
from millrace.errors import CorruptCheckpointError

BF16 = Kind(2, True)


class Deflate:
    """A second codec for the tests of the dispatch."""

    def encode(self, raw, kind, *, effort):
        return [zlib.compress(as_bytes(raw).data, 1 + effort.level)]

    def decode(self, stored, kind, out):
        as_bytes(out)[:] = as_bytes(zlib.decompress(stored))


SECOND = len(CODECS)
TWO = (*CODECS, RegisteredCodec(Deflate, {"second": 0, "second-more": 1}))


def values(nbytes: int) -> np.ndarray:
    floats = (np.random.default_rng(0).standard_normal(nbytes // 4) * 0.02).astype(np.float32)
    return floats.view(np.uint8)


def stored(codec: ChunkCodec, raw: np.ndarray, kind: Kind, effort: Effort, base: np.ndarray | None = None) -> bytes:
    return b"".join(codec.encode(raw.data, kind, None if base is None else base.data, effort=effort))


def decoded(chunk: bytes, kind: Kind, nbytes: int, base: np.ndarray | None = None) -> np.ndarray:
    out = np.zeros(nbytes, np.uint8)
    ChunkCodec(TWO).decode(chunk, kind, out.data, None if base is None else base.data)
    return out


def test_registered_codecs_have_distinct_names_and_levels_in_range():
    names = [name for registered in CODECS for name in registered.levels]
    assert len(set(names)) == len(names)
    assert len(CODECS) <= 32
    assert all(0 <= level < Effort.LEVELS for registered in CODECS for level in registered.levels.values())
    assert efforts().items() >= {"typed": Effort.TYPED, "max": Effort.MAX, "none": Effort.RAW}.items()


@pytest.mark.parametrize("name", efforts(TWO))
@pytest.mark.parametrize(
    "kind", [Kind(width, is_float) for width in (1, 2, 4, 8) for is_float in (False, True)], ids=str
)
def test_chunk_of_every_kind_by_a_registered_codec_is_decoded_to_the_same_bytes(name, kind):
    codec, effort = ChunkCodec(TWO), efforts(TWO)[name]
    for raw in (np.zeros(0, np.uint8), np.zeros(64, np.uint8), values(CHUNK_BYTES)):
        chunk = stored(codec, raw, kind, effort)
        assert len(chunk) <= raw.size + MAX_CHUNK_OVERHEAD_BYTES
        assert np.array_equal(decoded(chunk, kind, raw.size), raw)


@pytest.mark.parametrize("name", efforts())
def test_damaged_chunk_of_a_registered_codec_raises_corrupt_checkpoint_error(name):
    raw = values(8192)
    chunk = stored(ChunkCodec(), raw, BF16, efforts()[name])
    for damaged in (chunk[:-1], chunk[:5], chunk + b"\0"):
        with pytest.raises(CorruptCheckpointError):
            ChunkCodec().decode(damaged, BF16, np.zeros(raw.size, np.uint8).data)


def test_chunk_of_the_plane_codec_is_stored_without_a_mark():
    raw = values(8192)
    for effort in (Effort.RAW, Effort.TYPED, Effort.MAX):
        assert stored(ChunkCodec(), raw, BF16, effort) == b"".join(PlaneCodec().encode(raw.data, BF16, effort=effort))


def test_chunk_of_another_codec_names_it_in_the_first_byte():
    raw = np.zeros(4096, np.uint8)
    chunk = stored(ChunkCodec(TWO), raw, OPAQUE, efforts(TWO)["second"])
    assert chunk[0] == SECOND << 3 | 0x04
    assert zlib.decompress(chunk[1:]) == raw.tobytes()


def test_chunk_that_grows_with_another_codec_is_stored_by_the_plane_codec():
    raw = np.random.default_rng(1).integers(0, 256, CHUNK_BYTES, np.uint8)
    chunk = stored(ChunkCodec(TWO), raw, OPAQUE, efforts(TWO)["second"])
    assert chunk == stored(ChunkCodec(), raw, OPAQUE, Effort.RAW)


def test_delta_with_another_codec_is_stored_by_the_plane_codec():
    raw = values(8192)
    base = np.roll(raw, 4)
    chunk = stored(ChunkCodec(TWO), raw, BF16, efforts(TWO)["second"], base)
    assert chunk == b"".join(PlaneCodec().encode(raw.data, BF16, base.data))
    assert np.array_equal(decoded(chunk, BF16, raw.size, base), raw)


def test_chunk_of_an_unregistered_codec_raises_corrupt_checkpoint_error():
    chunk = stored(ChunkCodec(TWO), np.zeros(4096, np.uint8), OPAQUE, efforts(TWO)["second"])
    with pytest.raises(CorruptCheckpointError, match=f"codec {SECOND}"):
        ChunkCodec().decode(chunk, OPAQUE, np.zeros(4096, np.uint8).data)
    with pytest.raises(CorruptCheckpointError, match="codec 0"):
        ChunkCodec().decode(b"\x04" + chunk[1:], OPAQUE, np.zeros(4096, np.uint8).data)


def test_delta_chunk_of_another_codec_raises_corrupt_checkpoint_error():
    chunk = stored(ChunkCodec(TWO), np.zeros(4096, np.uint8), OPAQUE, efforts(TWO)["second"])
    with pytest.raises(CorruptCheckpointError, match="plane codec"):
        decoded(chunk, OPAQUE, 4096, np.zeros(4096, np.uint8))
