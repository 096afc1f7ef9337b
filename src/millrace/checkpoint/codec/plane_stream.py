"""The plane codec on a stream of bytes with unknown element types. No torch.

A stream extension sees a tensor only as the archive that `torch.save` makes of it. The archive puts values at multiples
of 64 bytes, so blocks at multiples of 1 MiB hold whole elements. A trial finds their type. The stream (little-endian):

======================  ==========================================================================
8 bytes                 magic `89 4D 49 4C 4C 52 50 0A`
blocks                  of 1 MiB of content each, the last one shorter:
  u32, u32, u64, u64    length of the content, length of the stored bytes, and the xxh3 of both (stored first)
  stored                a chunk of `millrace.checkpoint.codec.planes`, then the rest that is shorter than an element
u32, u32                0, 0: end of the blocks
index                   u32 for each block: stored length
footer: u64, u64, u64   length of all content, number of blocks, xxh3 of the index and the two numbers
======================  ==========================================================================

With a seekable input, the reader starts at the footer and decodes only the requested blocks. Otherwise it reads from the
beginning. It verifies every block in both cases.
"""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import OPAQUE, Effort, Kind, as_bytes, checksum
from millrace.checkpoint.codec.planes import PlaneCodec
from millrace.errors import CorruptCheckpointError, UsageError

BLOCK_BYTES = 1 << 20

_MAGIC = b"\x89MILLRP\n"
_BLOCK = struct.Struct("<IIQQ")
_END = struct.Struct("<II")
_FOOTER = struct.Struct("<QQQ")
# The header of the codec, and the rest of an element.
_MOST_OVERHEAD = 64 + 8

_TRIAL_BYTES, _TRIAL_PIECES = 16 << 10, 4
# The element type is tried again after this many blocks, or when a block compresses this much worse than the one before.
_TRIAL_EVERY = 64
_WORSE = 1.02


# Without slots, which all threads would share. A codec keeps no state between calls, so streams can share it.
@dataclass
class _Local(threading.local):
    codec: PlaneCodec = field(default_factory=PlaneCodec)


_LOCAL = _Local()


class PlaneStreamWriter(io.RawIOBase):
    """Compresses written bytes into `output`, one block at a time. `close` ends the stream and closes `output`.

    Not thread-safe. A stream without `close` is incomplete, and readers refuse it.
    """

    def __init__(self, output: IO[bytes], effort: Effort = Effort.TYPED) -> None:
        super().__init__()
        self._output, self._effort = output, effort
        self._held = bytearray()
        self._kind = OPAQUE
        self._ratio = 0.0
        self._stored_lengths: list[int] = []
        self._total_bytes = 0
        output.write(_MAGIC)

    def __del__(self) -> None:
        # The base class would close the stream here. An interrupted stream would look complete.
        pass

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        if self.closed:
            raise UsageError("the stream is closed", next_step="write before closing it")
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        position = 0
        while position < len(view):
            # Whole blocks are encoded in place, without a copy.
            if not self._held and len(view) - position >= BLOCK_BYTES:
                self._encode(view[position : position + BLOCK_BYTES])
                position += BLOCK_BYTES
                continue
            taken = min(BLOCK_BYTES - len(self._held), len(view) - position)
            self._held += view[position : position + taken]
            position += taken
            if len(self._held) == BLOCK_BYTES:
                self._encode(self._held)
                self._held = bytearray()
        return len(view)

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self._held:
                self._encode(self._held)
                self._held = bytearray()
            index = struct.pack(f"<{len(self._stored_lengths)}I", *self._stored_lengths)
            counts = struct.pack("<QQ", self._total_bytes, len(self._stored_lengths))
            self._output.write(_END.pack(0, 0) + index + counts + struct.pack("<Q", checksum(index + counts)))
        finally:
            super().close()
        self._output.close()

    def _encode(self, block: Buffer) -> None:
        raw = as_bytes(block)
        codec = _LOCAL.codec
        fresh = len(self._stored_lengths) % _TRIAL_EVERY == 0
        if fresh:
            self._kind = _find_kind(codec, raw)
        stored = self._encode_as(codec, raw, self._kind)
        if not fresh and len(stored) > _WORSE * self._ratio * raw.size:
            kind = _find_kind(codec, raw)
            if kind != self._kind:
                self._kind, stored = kind, self._encode_as(codec, raw, kind)
        self._ratio = len(stored) / raw.size
        self._output.write(_BLOCK.pack(raw.size, len(stored), checksum(stored), checksum(raw.data)))
        self._output.write(stored)
        self._stored_lengths.append(len(stored))
        self._total_bytes += raw.size

    def _encode_as(self, codec: PlaneCodec, raw: np.ndarray[Any, Any], kind: Kind) -> bytes:
        whole = raw.size - raw.size % kind.width
        return b"".join([*codec.encode(raw[:whole].data, kind, effort=self._effort), raw[whole:].data])


def _find_kind(codec: PlaneCodec, raw: np.ndarray[Any, Any]) -> Kind:
    """The kind with the smallest encoding of a sample of `raw`."""
    sample = raw[: raw.size - raw.size % 8]
    if raw.size > 2 * _TRIAL_BYTES:
        piece = _TRIAL_BYTES // _TRIAL_PIECES
        # Aligned, so that elements stay whole. The first piece is skipped: it holds the header of the archive.
        stride = (raw.size - 2 * piece) // (_TRIAL_PIECES - 1) & ~7
        sample = np.concatenate([raw[piece + at * stride :][:piece] for at in range(_TRIAL_PIECES)])
        sample = sample[: sample.size - sample.size % 8]

    def stored_bytes(kind: Kind) -> int:
        return sum(memoryview(part).nbytes for part in codec.encode(sample.data, kind))

    floats = min((OPAQUE, Kind(2, True), Kind(4, True), Kind(8, True)), key=stored_bytes)
    return min(floats, Kind(floats.width, False), key=stored_bytes)


class PlaneStreamReader(io.RawIOBase):
    """Reads a stream of `PlaneStreamWriter`, one block at a time. Seekable if `source` is.

    Not thread-safe. Raises `CorruptCheckpointError` on reaching a damaged block or the end of an incomplete stream.
    """

    def __init__(self, source: IO[bytes]) -> None:
        super().__init__()
        self._source = source
        self._position = 0
        self._block = np.empty(0, dtype=np.uint8)
        self._block_number = -1
        self._index = _read_index(source) if source.seekable() else None
        if self._index is None:
            _check_magic(source)
            self._blocks = self._read_through()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._index is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._index is None:
            raise io.UnsupportedOperation("the source is not seekable")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._index.total_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        target = as_bytes(buffer)
        done = 0
        while done < target.size:
            number, start = divmod(self._position, BLOCK_BYTES)
            if self._index is not None and start == 0 and self._index.length(number) <= target.size - done:
                # A whole block is decoded straight into place.
                length = self._index.length(number)
                if length:
                    self._decode_indexed(number, target[done : done + length])
            else:
                block = self._load(number)
                length = min(max(0, block.size - start), target.size - done)
                target[done : done + length] = block[start : start + length]
            if not length:
                break
            done += length
            self._position += length
        return done

    def readall(self) -> bytes:
        parts: list[bytes] = []
        while True:
            number, start = divmod(self._position, BLOCK_BYTES)
            block = self._load(number)
            if start >= block.size:
                return b"".join(parts)
            parts.append(block[start:].tobytes())
            self._position += block.size - start

    def _load(self, number: int) -> np.ndarray[Any, Any]:
        """The content of a block. Empty after the last one."""
        if number == self._block_number:
            return self._block
        if self._index is None:
            self._block = next(self._blocks, np.empty(0, dtype=np.uint8))
        else:
            self._block = np.empty(self._index.length(number), dtype=np.uint8)
            if self._block.size:
                self._decode_indexed(number, self._block)
        self._block_number = number
        return self._block

    def _decode_indexed(self, number: int, out: np.ndarray[Any, Any]) -> None:
        assert self._index is not None
        start, stop = int(self._index.offsets[number]), int(self._index.offsets[number + 1])
        self._source.seek(start)
        header = _BLOCK.unpack(_read_exactly(self._source, _BLOCK.size))
        if header[0] != out.size or _BLOCK.size + header[1] != stop - start:
            raise CorruptCheckpointError("a block of a compressed stream has another length than in its index")
        _decode(header, _read_exactly(self._source, header[1]), out)

    def _read_through(self) -> Iterator[np.ndarray[Any, Any]]:
        """All blocks in order. Checks the end of the stream before the last one."""
        lengths: list[int] = []
        total_bytes = 0
        while True:
            raw_bytes, stored_bytes = _END.unpack(_read_exactly(self._source, _END.size))
            if not raw_bytes:
                self._check_end(lengths, total_bytes)
                return
            header = (raw_bytes, stored_bytes, *struct.unpack("<QQ", _read_exactly(self._source, 16)))
            if raw_bytes > BLOCK_BYTES or stored_bytes > raw_bytes + _MOST_OVERHEAD:
                raise CorruptCheckpointError("a block of a compressed stream has an impossible length")
            block = np.empty(raw_bytes, dtype=np.uint8)
            _decode(header, _read_exactly(self._source, stored_bytes), block)
            lengths.append(stored_bytes)
            total_bytes += raw_bytes
            if raw_bytes < BLOCK_BYTES:
                # The caller stops reading after a short block, so check the end now.
                if _read_exactly(self._source, _END.size) != _END.pack(0, 0):
                    raise CorruptCheckpointError("a block of a compressed stream follows the last one")
                self._check_end(lengths, total_bytes)
                yield block
                return
            yield block

    def _check_end(self, lengths: list[int], total_bytes: int) -> None:
        index = struct.pack(f"<{len(lengths)}I", *lengths)
        counts = struct.pack("<QQ", total_bytes, len(lengths))
        expected = index + counts + struct.pack("<Q", checksum(index + counts))
        if _read_exactly(self._source, len(expected)) != expected:
            raise CorruptCheckpointError("the end of a compressed stream does not match its content")


@dataclass(frozen=True, slots=True)
class _Index:
    """The offset of each block in the input, and the end of the last block."""

    total_bytes: int
    offsets: np.ndarray[Any, Any]

    def length(self, number: int) -> int:
        """Bytes of content of a block. 0 after the last one."""
        return max(0, min(BLOCK_BYTES, self.total_bytes - number * BLOCK_BYTES))


def _read_index(source: IO[bytes]) -> _Index:
    source.seek(0, io.SEEK_END)
    end = source.tell()  # `seek` of torch's file slices returns the position in the whole file
    source.seek(0)
    _check_magic(source)
    least = len(_MAGIC) + _END.size + _FOOTER.size
    if end < least:
        raise CorruptCheckpointError("a compressed stream is cut off")
    source.seek(end - _FOOTER.size)
    total_bytes, count, expected = _FOOTER.unpack(_read_exactly(source, _FOOTER.size))
    # Check the numbers before allocating memory. A block has at least a header and an entry in the index.
    if count > (end - least) // (_BLOCK.size + 4) or count != -(-total_bytes // BLOCK_BYTES):
        raise CorruptCheckpointError("the end of a compressed stream is damaged")
    source.seek(end - _FOOTER.size - 4 * count)
    index = _read_exactly(source, 4 * count)
    if checksum(index + struct.pack("<QQ", total_bytes, count)) != expected:
        raise CorruptCheckpointError("the end of a compressed stream is damaged")
    lengths = np.frombuffer(index, dtype="<u4").astype(np.int64)
    if (lengths > BLOCK_BYTES + _MOST_OVERHEAD).any():
        raise CorruptCheckpointError("a block of a compressed stream has an impossible length")
    offsets = len(_MAGIC) + np.concatenate([[0], np.cumsum(lengths + _BLOCK.size)]).astype(np.int64)
    if int(offsets[-1]) + _END.size + 4 * count + _FOOTER.size != end:
        raise CorruptCheckpointError("the blocks of a compressed stream do not add up to its length")
    return _Index(total_bytes, offsets)


def _check_magic(source: IO[bytes]) -> None:
    if _read_exactly(source, len(_MAGIC)) != _MAGIC:
        raise CorruptCheckpointError("not a compressed stream")


def _read_exactly(source: IO[bytes], count: int) -> bytes:
    parts: list[bytes] = []
    missing = count
    while missing:
        part = source.read(missing)
        if not part:
            raise CorruptCheckpointError("a compressed stream is cut off")
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decode(header: tuple[int, ...], stored: bytes, out: np.ndarray[Any, Any]) -> None:
    _, _, stored_checksum, raw_checksum = header
    if checksum(stored) != stored_checksum:
        raise CorruptCheckpointError("a block of a compressed stream does not match its checksum")
    if not stored:
        raise CorruptCheckpointError("a block of a compressed stream is empty")
    kind = Kind.from_code(stored[0] & 0x37)  # without the bits for rotation and halving
    rest = out.size % kind.width
    body = memoryview(stored)
    _LOCAL.codec.decode(body[: len(body) - rest], kind, out[: out.size - rest].data)
    if rest:
        out[out.size - rest :] = as_bytes(body[len(body) - rest :])
    if checksum(out.data) != raw_checksum:
        raise CorruptCheckpointError("a block of a compressed stream decodes to other bytes than were written")
