"""The typed codec on a stream: any bytes in any portions are restored, damage is detected, and memory is bounded."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc

import numpy as np
import pytest

from millrace.checkpoint.codec.chunks import checksum
from millrace.checkpoint.codec.plane_stream import BLOCK_BYTES, PlaneStreamReader, PlaneStreamWriter
from millrace.errors import CorruptCheckpointError, UsageError


class Sink(io.BytesIO):
    """Keeps its content when it is closed."""

    def close(self):
        self.content = self.getvalue()
        super().close()


class OneWay(io.RawIOBase):
    """A source that cannot seek and gives little at a time."""

    def __init__(self, content):
        self._stream = io.BytesIO(content)

    def readable(self):
        return True

    def read(self, size=-1):
        return self._stream.read(min(size, 70_000) if size >= 0 else 70_000)


def weights(count, dtype=np.float32):
    return (np.random.default_rng(0).standard_normal(count) * 0.02).astype(dtype)


def bf16(count):
    return (weights(count).view(np.uint32) >> 16).astype(np.uint16)


def compressed(content, portion=1 << 30):
    sink = Sink()
    stream = PlaneStreamWriter(sink)
    for start in range(0, len(content), portion):
        part = content[start : start + portion]
        assert stream.write(part) == len(part)
    stream.close()
    assert sink.closed
    return sink.content


MIXED = random.Random(1).randbytes(700) + weights(700_000).tobytes() + b"end"


@pytest.mark.parametrize("content", [b"", b"x", bytes(BLOCK_BYTES), bytes(2 * BLOCK_BYTES + 5), MIXED], ids=len)
@pytest.mark.parametrize("portion", [99_991, BLOCK_BYTES, 1 << 30])
def test_stream_written_and_read_in_any_portions_is_equal(content, portion):
    stored = compressed(content, portion)
    assert PlaneStreamReader(io.BytesIO(stored)).read() == content
    assert PlaneStreamReader(OneWay(stored)).read() == content
    for source in (io.BytesIO(stored), OneWay(stored)):
        reader, parts = PlaneStreamReader(source), []
        while part := reader.read(61_813):
            parts.append(part)
        assert b"".join(parts) == content
        assert reader.read(1) == b""


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        (bf16(1 << 20), 0.68),
        (weights(1 << 19), 0.85),
        (weights(1 << 18, np.float64), 0.94),
        (np.arange(1 << 18, dtype=np.int64), 0.3),
        (np.frombuffer(b"the mill wheel turns; " * 50_000, np.uint8), 0.01),
    ],
    ids=["bf16", "fp32", "fp64", "int64", "text"],
)
def test_stream_of_typed_values_is_compressed_by_their_element_type(values, limit):
    content = b"an archive's head".ljust(64) + values.tobytes()
    assert len(compressed(content)) < limit * len(content)


def test_stream_with_changing_element_type_is_compressed_by_each_type():
    halves, singles = bf16(2 << 20).tobytes(), weights(1 << 20).tobytes()
    together = len(compressed(halves + singles))
    assert together < 1.01 * (len(compressed(halves)) + len(compressed(singles)))


def test_read_after_seek_reads_only_the_requested_blocks():
    content = weights(5 << 18).tobytes()
    stored = compressed(content)

    class Counting(io.BytesIO):
        taken = 0

        def read(self, size=-1):
            data = super().read(size)
            self.taken += len(data)
            return data

    source = Counting(stored)
    reader = PlaneStreamReader(source)
    assert reader.seekable()
    generator = random.Random(2)
    for _ in range(20):
        start = generator.randrange(len(content) + 10)
        assert reader.seek(start) == start
        assert reader.read(5000) == content[start : start + 5000]
        assert reader.tell() == min(start + 5000, max(start, len(content)))
    assert reader.seek(-7, io.SEEK_END) == len(content) - 7
    assert reader.seek(-1, io.SEEK_CUR) == len(content) - 8
    source.taken = 0
    reader.seek(BLOCK_BYTES + 1)
    reader.read(10)
    assert source.taken < 1.1 * BLOCK_BYTES
    with pytest.raises(io.UnsupportedOperation):
        PlaneStreamReader(OneWay(stored)).seek(0)


def test_stream_with_any_flipped_bit_raises_or_is_equal():
    content = weights(100_000).tobytes() + bf16(500_000).tobytes()
    stored = compressed(content)
    generator = random.Random(3)
    positions = [*range(40), *range(len(stored) - 60, len(stored)), *generator.sample(range(len(stored)), 200)]
    for position in positions:
        damaged = bytearray(stored)
        damaged[position] ^= 1 << generator.randrange(8)
        for source in (io.BytesIO(damaged), OneWay(damaged)):
            try:
                got = PlaneStreamReader(source).read()
            except CorruptCheckpointError:
                continue
            # A reader that seeks does not use the eight bytes between the last block and the index.
            assert got == content


def test_stream_that_was_cut_raises_corrupt_checkpoint_error():
    stored = compressed(MIXED)
    for length in (0, 1, 7, 8, 20, 40, len(stored) // 2, len(stored) - 40, len(stored) - 1):
        for source in (io.BytesIO(stored[:length]), OneWay(stored[:length])):
            with pytest.raises(CorruptCheckpointError):
                PlaneStreamReader(source).read()


def test_stream_that_was_not_closed_raises_corrupt_checkpoint_error():
    sink = Sink()
    stream = PlaneStreamWriter(sink)
    stream.write(MIXED)
    del stream
    with pytest.raises(CorruptCheckpointError):
        PlaneStreamReader(io.BytesIO(sink.getvalue())).read()
    stream = PlaneStreamWriter(Sink())
    stream.close()
    stream.close()
    with pytest.raises(UsageError, match="closed"):
        stream.write(b"more")


def test_hostile_stream_is_refused_with_little_memory():
    magic = b"\x89MILLRP\n"
    counts = struct.pack("<QQ", 1 << 60, 1 << 40)
    hostile = [
        magic + bytes(8) + counts + struct.pack("<Q", checksum(counts)),
        magic + struct.pack("<IIQQ", 0xFFFFFFFF, 0xFFFFFFFF, 0, 0) + bytes(100),
        magic + struct.pack("<IIQQ", BLOCK_BYTES, 0xFFFFFFFF, 0, 0) + bytes(100),
        magic + struct.pack("<IIQQ", 5, 0, checksum(b""), 0) + bytes(100),
    ]
    tracemalloc.start()
    for content in hostile:
        for source in (io.BytesIO(content), OneWay(content)):
            with pytest.raises(CorruptCheckpointError):
                PlaneStreamReader(source).read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * BLOCK_BYTES


def test_writer_of_long_stream_needs_bounded_memory():
    class Nothing(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            return len(data)

    portion = weights(1 << 18).tobytes()
    tracemalloc.start()
    stream = PlaneStreamWriter(Nothing())
    for _ in range(40):
        stream.write(portion[:-13])
    stream.close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * BLOCK_BYTES
