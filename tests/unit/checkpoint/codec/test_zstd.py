"""Huffman coding by zstd: the parameters have an effect, frames are standard, and a library may reject them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import zstandard

from millrace.checkpoint.codec import zstd
from millrace.checkpoint.codec.chunks import Effort
from millrace.checkpoint.codec.planes import PlaneCodec


@pytest.fixture
def plane() -> np.ndarray:
    """Skewed and without matches, like the exponents of weights."""
    return np.random.default_rng(0).binomial(20, 0.5, 512 * 1024).astype(np.uint8)


def entropy_bytes(plane: np.ndarray) -> float:
    share = np.bincount(plane) / plane.size
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum()) / 8 * plane.size


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """The options of every compressor that is made from now on."""
    made: list[dict[int, int]] = []

    class Recording(zstd.Compressor):
        def __init__(self, options: dict[int, int]) -> None:
            super().__init__(options)
            made.append(options)

    monkeypatch.setattr(zstd, "Compressor", Recording)
    return made


@pytest.mark.parametrize("window_log", [11, 14, 19])
def test_frame_without_matches_is_read_by_another_decoder(plane, window_log):
    frame = zstd.without_matches(window_log=window_log).compress(plane.data)
    assert zstandard.ZstdDecompressor().decompress(frame) == plane.tobytes()
    assert zstd.decompress(frame, plane.size) == plane.tobytes()


def test_compressor_without_matches_uses_the_literal_mode_and_the_largest_step(plane, options):
    frame = zstd.without_matches().compress(plane.data)
    assert [(each[zstd._LITERAL_MODE], each[zstd._Option.target_length]) for each in options] == [(1, 128 << 10)]
    assert options[0][zstd._Option.strategy] == zstd.zstd.Strategy.fast
    assert len(frame) < 1.02 * entropy_bytes(plane)
    # The parameter has an effect: without it, this step compresses nothing.
    plain = {key: value for key, value in options[0].items() if key != zstd._LITERAL_MODE}
    assert len(zstd.Compressor(plain).compress(plane.data)) >= plane.size


@pytest.mark.parametrize("refused", [ValueError, zstd.zstd.ZstdError])
def test_library_that_rejects_the_literal_mode_compresses_to_about_the_same_size(plane, options, monkeypatch, refused):
    expected = len(zstd.without_matches().compress(plane.data))
    options.clear()
    recording = zstd.Compressor

    def rejecting(each: dict[int, int]) -> zstd.Compressor:
        if zstd._LITERAL_MODE in each:
            raise refused("invalid compression parameter 'unknown parameter'")
        return recording(each)

    monkeypatch.setattr(zstd, "Compressor", rejecting)
    frame = zstd.without_matches().compress(plane.data)
    assert [each[zstd._Option.target_length] for each in options] == [0]
    assert len(frame) < 1.02 * expected
    assert zstd.decompress(frame, plane.size) == plane.tobytes()


def test_parameter_that_the_library_lacks_raises_a_caught_error(plane, monkeypatch):
    monkeypatch.setattr(zstd, "_LITERAL_MODE", 99_999)
    with pytest.raises(ValueError, match="parameter"):
        zstd.Compressor({zstd._LITERAL_MODE: 1})
    assert len(zstd.without_matches().compress(plane.data)) < 1.02 * entropy_bytes(plane)


def test_rows_of_different_scale_are_coded_in_short_blocks():
    generator = np.random.default_rng(1)
    scale = np.exp(2 * generator.standard_normal((256, 1)))
    # Means of squares of 20 gradients.
    second_moments = (generator.chisquare(20, (256, 1024)) * np.square(scale)).astype(np.float32)
    exponents = (second_moments.view(np.uint32) >> 23).astype(np.uint8).ravel()
    stored = PlaneCodec()._encode_plane(exponents, Effort.TYPED)[1]
    coarse, matched = zstd.without_matches().compress(exponents.data), zstd.at_level(1).compress(exponents.data)
    assert len(stored) < 0.7 * len(coarse)
    assert len(stored) < 1.05 * len(matched)
    assert zstd.decompress(stored, exponents.size) == exponents.tobytes()
    most = PlaneCodec()._encode_plane(exponents, Effort.MAX)[1]
    assert len(most) <= len(stored)
    assert zstd.decompress(most, exponents.size) == exponents.tobytes()


def test_plane_of_one_scale_is_coded_in_long_blocks(plane):
    assert PlaneCodec()._encode_plane(plane, Effort.TYPED)[1] == zstd.without_matches().compress(plane.data)


def test_stream_of_frames_is_read_once_as_torch_reads_it(plane):
    """Torch copies a stream that cannot be sought, and seeks to the end of any other one."""
    frames = zstd.at_level(1).compress(plane.data) * 2
    read = []

    class Source(io.BytesIO):
        def read(self, size=-1, /):
            read.append(super().read(size))
            return read[-1]

    stream = zstd.reader(Source(frames))
    assert not stream.seekable()
    assert stream.read(-1) == plane.tobytes() * 2
    assert sum(map(len, read)) == len(frames)
