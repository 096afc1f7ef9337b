"""Chunks that are not compressed are not copied either, unless a stream extension needs one piece."""

from __future__ import annotations

from typing import IO, Any

import numpy as np
import pytest
import torch

from millrace.checkpoint.codec.chunks import Effort, Kind, checksum
from millrace.checkpoint.codec.planes import PlaneCodec
from millrace.checkpoint.codec.registry import Steady
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.state.tensors import bytes_of
from millrace.checkpoint.writing.packing import ChunkEncoder, Encoded
from millrace.checkpoint.writing.plans import _LeafSource

BF16 = Kind(2, True)


class Plain:
    """A stream extension that changes nothing."""

    def get_descriptor(self) -> str:
        return "plain/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return output

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return input


@pytest.fixture
def raw() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)


def decoded(encoded: Encoded, nbytes: int) -> np.ndarray[Any, Any]:
    assert encoded.stored is not None
    stored = bytes(encoded.stored) + bytes(encoded.rest)
    assert len(stored) == encoded.stored_bytes
    assert checksum(stored) == encoded.stored_checksum
    out = np.empty(nbytes, np.uint8)
    PlaneCodec().decode(stored, BF16, out.data)
    return out


def test_uncompressed_chunk_refers_to_its_raw_bytes(raw: np.ndarray[Any, Any]) -> None:
    encoded = ChunkEncoder(Steady(Effort.RAW), Transforms()).encode(raw, BF16)
    assert np.shares_memory(np.frombuffer(encoded.rest, np.uint8), raw)
    assert len(encoded.rest) == raw.size
    assert np.array_equal(decoded(encoded, raw.size), raw)


@pytest.mark.parametrize("size", [0, 2, 4096])
def test_uncompressed_chunk_of_any_size_is_decoded_bit_for_bit(raw: np.ndarray[Any, Any], size: int) -> None:
    encoded = ChunkEncoder(Steady(Effort.RAW), Transforms()).encode(raw[:size], BF16)
    assert np.array_equal(decoded(encoded, size), raw[:size])


@pytest.mark.parametrize(
    ("effort", "transforms"),
    [(Effort.TYPED, Transforms()), (Effort.RAW, Transforms([Plain()]))],
    ids=["typed", "extension"],
)
def test_compressed_or_transformed_chunk_is_one_piece(
    raw: np.ndarray[Any, Any], effort: Effort, transforms: Transforms
) -> None:
    encoded = ChunkEncoder(Steady(effort), transforms).encode(raw, BF16)
    assert not encoded.rest
    assert np.array_equal(decoded(encoded, raw.size), raw)


def test_checksum_of_parts_is_that_of_the_whole(raw: np.ndarray[Any, Any]) -> None:
    for cut in (0, 1, 6, raw.size):
        assert checksum(raw[:cut].data, raw[cut:].data) == checksum(raw.data)
    assert checksum(b"", b"", b"") == checksum(b"")


@pytest.mark.parametrize("transposed", [False, True])
def test_pieces_of_a_tensor_are_views_if_its_values_are_one_run(transposed: bool) -> None:
    tensor = torch.arange(60_000, dtype=torch.int32).reshape(200, 300)
    tensor = tensor.T if transposed else tensor
    source = _LeafSource("weight", tensor, tensor.nbytes, Kind(4, False), keep=False)
    expected = bytes_of(tensor.contiguous()).numpy()
    for start, stop in ((0, 131_072), (131_072, 240_000), (0, 240_000)):
        piece = np.asarray(source.read(start, stop))
        assert np.array_equal(piece, expected[start:stop])
        assert np.shares_memory(piece, tensor.numpy()) is not transposed
