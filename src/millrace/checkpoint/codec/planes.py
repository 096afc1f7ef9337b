"""The typed codec: turns a chunk of tensor bytes into a smaller one and back, bit for bit. Pure; no torch, no I/O.

A float's exponent is predictable and its mantissa is noise, but in memory they share bytes. Rotating each value left by
one bit gathers the whole exponent in the top byte (and puts the sign beside the mantissa); splitting the values into
byte planes then separates what compresses from what does not. Each plane is stored on its own as the cheapest of: raw,
constant, Huffman-only zstd, ordinary zstd, chosen by trial on a sample. Integers are split without the rotation.

With `Effort.MAX` a float may be rotated by up to four bits. The top byte then takes in mantissa bits in exchange for the
first exponent bits, which hardly ever change: both bytes compress, and Huffman codes, which cannot be shorter than a
bit, lose less on a byte of which no value is very frequent. bf16 shrinks by another 1 to 3 %, and takes twice the time to
decode.

A stored chunk describes itself (little-endian, `W` = bytes of an element):

======================  ==========================================================
1 byte                  kind: bits 0-2 log2(W), bit 4 float, bit 5 delta; bit 3 halved; bits 6-7: by how many bits
                        more than one floats were rotated; of a delta bit 6: grouped
W bytes                 mode of each plane, lowest byte of the element first
W x 4 bytes             stored length of each plane
then                    the planes, one after the other
======================  ==========================================================

Of a 32-bit float with noise in its lower half (that is: nearly always) only the upper half, which is a bfloat16, is
rotated and split; the lower halves are one plane of two bytes an element, stored first. Bit 3 of the first byte says so,
and there are three planes then. Noise that was taken apart would have to be put together again: a fifth of the decoding.

A *delta* chunk holds, for each element, the zig-zag difference to the element of a base chunk of equal length, both
read as integers that order like the values; it decodes only with that base. With `Effort.MAX` those of floats are grouped by
the exponents in the base: up to 15 % smaller, in four times the time of an ordinary delta, also to decode.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import xxhash
import zstandard
from typing_extensions import Buffer

from millrace.checkpoint.codec.zigzag import SIGNED, apply_difference, by_exponent, difference, worth_grouping
from millrace.errors import CorruptCheckpointError

CHUNK_BYTES = 1 << 20
"""Tensor bytes in one chunk as written. The ratio is flat from 64 KiB to 16 MiB; the speed peaks where it fits L2."""

MAX_CHUNK_BYTES = 8 << 20
"""No chunk of a valid checkpoint decodes to more; bounds what a hostile one can make a reader allocate."""

_HALVED, _FLOAT, _DELTA, _GROUPED, _TURN_SHIFT = 0x08, 0x10, 0x20, 0x40, 6
_TURNS = (1, 2, 3, 4)
_SAMPLE_PIECES, _SAMPLE_BYTES = 4, 8192
# A plane that shrinks by less than this on the sample is not worth its decompression time.
_WORTH = 0.99
# Ordinary zstd takes three times as long as Huffman alone, so it has to save a little more.
_WORTH_MATCHING = 0.97
# What the bit operations work on at a time.
_BLOCK_BYTES = 256 << 10
# Effort.MAX looks at more, since it chooses between results that are close together.
_MAX_SAMPLE_BYTES = 64 << 10
_STRONG_LEVEL = 19

Array = np.ndarray[Any, Any]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

if sys.byteorder != "little":
    raise ImportError("millrace.checkpoint needs a little-endian machine")


class Mode(IntEnum):
    """How one plane is stored."""

    RAW = 0
    HUFFMAN = 1
    ZSTD = 2
    CONSTANT = 3


class Effort(IntEnum):
    """How hard to try: RAW stores planes as they are, TYPED is the balance of size and speed, MAX is the smallest."""

    RAW = 0
    TYPED = 1
    MAX = 2


@dataclass(frozen=True, slots=True)
class Kind:
    """What the elements of a chunk are: `width` bytes each (1, 2, 4 or 8), and whether they are floats.

    A complex number is two floats; bools, 8-bit integers and opaque bytes are integers of width 1.
    """

    width: int
    is_float: bool

    def __post_init__(self) -> None:
        if self.width not in _UNSIGNED:
            raise ValueError(f"no element is {self.width} bytes wide")

    @property
    def code(self) -> int:
        return (self.width.bit_length() - 1) | (_FLOAT if self.is_float else 0)

    @classmethod
    def from_code(cls, code: int) -> Kind:
        """Raises `CorruptCheckpointError` for a code that does not exist."""
        if code & ~_FLOAT > 3:
            raise CorruptCheckpointError(f"unknown element kind {code:#x}")
        return cls(width=1 << (code & 0xF), is_float=bool(code & _FLOAT))


OPAQUE = Kind(1, False)
"""Bytes without known structure."""

_SINGLE, _UPPER = Kind(4, True), Kind(2, True)


def as_bytes(data: Buffer) -> Array:
    """`data` as a 1-D uint8 array on the same memory. `data` is contiguous."""
    view = memoryview(data)
    # memoryview refuses to cast an empty view.
    return np.frombuffer(view.cast("B"), dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


def checksum(data: Buffer) -> int:
    """The xxh3 64-bit hash of `data`, as every checksum of the format."""
    return xxhash.xxh3_64_intdigest(as_bytes(data).data)


class PlaneCodec:
    """Encodes and decodes chunks. Holds compressor state and about 3 MiB of scratch: one codec a thread."""

    def __init__(self) -> None:
        # Strategy "fast" with matches of at least 7 bytes and a table of 64 entries finds next to no matches, which
        # leaves the entropy stage: Huffman at its own speed, in a format that every zstd decoder reads. A window over
        # the whole plane saves zstd some bookkeeping.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1, strategy=zstandard.STRATEGY_FAST, hash_log=6, min_match=7, target_length=0, window_log=19
        )
        self._huffman = zstandard.ZstdCompressor(compression_params=parameters)
        self._zstd = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_CHUNK_BYTES)
        self._strongest: zstandard.ZstdCompressor | None = None
        self._scratch: dict[str, Array] = {}

    # --- encoding ---------------------------------------------------------------------------------

    def encode(
        self, raw: Buffer, kind: Kind, base: Buffer | None = None, *, effort: Effort = Effort.TYPED
    ) -> list[Buffer]:
        """Return the stored chunk of `raw`, in parts to be written one after the other.

        `raw` holds whole elements, at most `MAX_CHUNK_BYTES`. With `base` (as long as `raw`) it becomes a delta chunk.
        The parts may refer to `raw`, and to scratch that the next call overwrites: write or copy them before.
        """
        data = as_bytes(raw)
        if data.size % kind.width or data.size > MAX_CHUNK_BYTES:
            raise ValueError(f"{data.size} bytes are no chunk of {kind.width}-byte elements")
        code = kind.code
        if base is None:
            if effort == Effort.TYPED and kind == _SINGLE and self._has_noisy_halves(data):
                return self._encode_halved(data, effort)
            turn = int(kind.is_float)
            if effort == Effort.MAX and turn and kind.width > 1:
                turn = self._best_turn(data, kind)
                code |= (turn - 1) << _TURN_SHIFT
            planes = self._split(data, kind, turn)
        else:
            reference = as_bytes(base)
            if reference.size != data.size:
                raise ValueError("a base chunk is as long as the chunk itself")
            code |= _DELTA
            words = _elements(data, kind)
            coded = self._array("coded", words.dtype, words.size)
            bases = _elements(reference, kind)
            difference(words, bases, kind.is_float, coded, self._array)
            if effort == Effort.MAX and kind.is_float and kind.width > 1 and worth_grouping(coded):
                code |= _GROUPED
                coded = np.take(
                    coded, by_exponent(bases), out=self._array("grouped", words.dtype, words.size), mode="clip"
                )
            planes = self._split(coded.view(np.uint8), kind, 0)
        return _packed(code, [self._encode_plane(plane, effort) for plane in planes])

    def _has_noisy_halves(self, data: Array) -> bool:
        """Whether neither of the two lower bytes of a 32-bit float is worth compressing, on a sample."""
        sample = _sample(_elements(data, _SINGLE), _SAMPLE_BYTES).view(np.uint8).reshape(-1, 4)
        planes = [np.ascontiguousarray(sample[:, number]) for number in range(2)] if sample.size else []
        return bool(planes) and all(self._encode_plane(plane, Effort.TYPED)[0] is Mode.RAW for plane in planes)

    def _encode_halved(self, data: Array, effort: Effort) -> list[Buffer]:
        words = _elements(data, _SINGLE)
        low, high = self._array("low", np.uint16, words.size), self._array("high", np.uint16, words.size)
        np.copyto(low, words, casting="unsafe")
        np.right_shift(words, 16, out=high, casting="unsafe")
        planes = self._split(high.view(np.uint8), _UPPER, 1)
        coded = [self._encode_plane(plane, effort) for plane in planes]
        return _packed(_SINGLE.code | _HALVED, [(Mode.RAW, low.view(np.uint8).data), *coded])

    def _encode_plane(self, plane: Array, effort: Effort) -> tuple[Mode, Buffer]:
        if plane.size == 0 or effort == Effort.RAW:
            return Mode.RAW, plane.data
        sample = _sample(plane, _SAMPLE_BYTES)
        if (sample == plane[0]).all() and (plane == plane[0]).all():
            return Mode.CONSTANT, bytes(plane[:1])
        tries = {Mode.HUFFMAN: self._huffman.compress(sample.data), Mode.ZSTD: self._zstd.compress(sample.data)}
        if len(tries[Mode.ZSTD]) < _WORTH_MATCHING * len(tries[Mode.HUFFMAN]):
            mode, compressor = Mode.ZSTD, self._zstd
        else:
            mode, compressor = Mode.HUFFMAN, self._huffman
        if len(tries[mode]) >= _WORTH * sample.size:
            return Mode.RAW, plane.data
        if effort == Effort.MAX and mode is Mode.ZSTD:
            stored = self._strong.compress(plane.data)
        else:
            stored = tries[mode] if sample.size == plane.size else compressor.compress(plane.data)
        return (mode, stored) if len(stored) < plane.size else (Mode.RAW, plane.data)

    @property
    def _strong(self) -> zstandard.ZstdCompressor:
        """Zstd that searches for long, for what has matches in it: on noise it gains 0.4 % for 100 times the time."""
        if self._strongest is None:
            self._strongest = zstandard.ZstdCompressor(level=_STRONG_LEVEL)
        return self._strongest

    def _best_turn(self, data: Array, kind: Kind) -> int:
        """The rotation whose planes become smallest under Huffman coding, on a sample. Of equals the smallest."""
        sample = _sample(_elements(data, kind), _MAX_SAMPLE_BYTES // kind.width).view(np.uint8)

        def cost(turn: int) -> int:
            return sum(
                min(len(self._huffman.compress(plane.data)), plane.size) for plane in self._split(sample, kind, turn)
            )

        return min(_TURNS, key=cost)

    def _split(self, data: Array, kind: Kind, turn: int) -> list[Array]:
        """Byte planes of `data`, each element rotated left by `turn` bits first; the lowest byte's comes first.

        Where an element is one byte the plane is `data` itself.
        """
        width, bits = kind.width, 8 * kind.width
        if width == 1:
            # One plane holds the same set of bytes in any rotation: its entropy does not change.
            return [data]
        # Blocks stay in the second-level cache; still smaller ones would only make for more calls, of which each gives
        # the interpreter lock away and has to get it back. Numpy narrows several times as fast as it copies with a stride.
        words = _elements(data, kind)
        planes = self._array("planes", np.uint8, data.size).reshape(width, words.size)
        step = _BLOCK_BYTES // width
        for start in range(0, words.size, step):
            block, parts = words[start : start + step], planes[:, start : start + step]
            for number in range(1, width):
                np.right_shift(block, 8 * number - turn, out=parts[number], casting="unsafe")
            lowest = parts[0]
            np.copyto(lowest, block, casting="unsafe")
            if turn:
                high = self._array("narrow", np.uint8, block.size)
                if turn == 1:  # bytes add, and compare, three times as fast as they shift
                    np.add(lowest, lowest, out=lowest)
                    np.less(block.view(SIGNED[width]), 0, out=high.view(np.bool_))
                else:
                    np.left_shift(lowest, turn, out=lowest)
                    np.right_shift(block, bits - turn, out=high, casting="unsafe")
                np.bitwise_or(lowest, high, out=lowest)
        return list(planes)

    # --- decoding ---------------------------------------------------------------------------------

    def decode(self, stored: Buffer, kind: Kind, out: memoryview, base: Buffer | None = None) -> None:
        """Decode the chunk `stored` into all of `out` (writable bytes, any alignment).

        The caller has verified the checksum of `stored`. Raises `CorruptCheckpointError` when the chunk cannot be one
        of `kind` and `len(out)` bytes; every length is checked before anything is allocated by it.
        """
        source = as_bytes(stored).data
        target = as_bytes(out)
        width = kind.width
        halved = bool(source) and base is None and source[0] == _SINGLE.code | _HALVED and kind == _SINGLE
        count, code = (3, kind.code) if halved else (width, source[0] & ~(3 << _TURN_SHIFT) if source else 0)
        head = 1 + 5 * count
        if len(source) < head or target.size % width or target.size > MAX_CHUNK_BYTES:
            raise CorruptCheckpointError(f"a stored chunk of {len(source)} bytes cannot hold {target.size}")
        turn = source[0] >> _TURN_SHIFT
        expected_code = kind.code | (0 if base is None else _DELTA)
        turnable = kind.is_float and width > 1
        if code != expected_code or (turn and not turnable) or (turn > 1 and base is not None):
            raise CorruptCheckpointError(f"chunk of kind {source[0]:#x} where {expected_code:#x} is expected")
        lengths = struct.unpack_from(f"<{count}I", source, 1 + count)
        if head + sum(lengths) != len(source):
            raise CorruptCheckpointError("the planes of a chunk do not add up to its length")
        planes = []
        for number in range(count):
            body = source[head : head + lengths[number]]
            head += lengths[number]
            nbytes = target.size // width * (2 if halved and number == 0 else 1)
            planes.append(self._decode_plane(source[1 + number], body, nbytes))
        if halved:
            self._join_halves(planes, target)
            return
        if base is None:
            self._join(planes, target, kind, turn + 1 if kind.is_float else 0)
            return
        reference = as_bytes(base)
        if reference.size != target.size:
            raise CorruptCheckpointError("a base chunk is as long as the chunk itself")
        words, bases = _elements(target, kind), _elements(reference, kind)
        if turn:
            grouped = self._array("grouped", words.dtype, words.size)
            self._join(planes, grouped.view(np.uint8), kind, 0)
            words[by_exponent(bases)] = grouped
        else:
            self._join(planes, target, kind, 0)
        apply_difference(words, bases, kind.is_float, self._array)

    def _decode_plane(self, mode: int, body: memoryview, count: int) -> Array:
        if mode == Mode.RAW and len(body) == count:
            return np.frombuffer(body, dtype=np.uint8)
        if mode == Mode.CONSTANT and len(body) == 1:
            return np.broadcast_to(np.frombuffer(body, dtype=np.uint8), (count,))
        if mode in (Mode.HUFFMAN, Mode.ZSTD):
            try:
                # The decompressor allocates what the frame declares, so the declaration is checked first.
                if zstandard.frame_content_size(body) == count:
                    return np.frombuffer(self._decompressor.decompress(body, allow_extra_data=False), dtype=np.uint8)
            except zstandard.ZstdError as error:
                raise CorruptCheckpointError("a compressed plane does not decompress") from error
        raise CorruptCheckpointError(f"a plane of mode {mode} and {len(body)} bytes cannot hold {count}")

    def _join(self, planes: list[Array], target: Array, kind: Kind, turn: int) -> None:
        """The inverse of `_split`, into `target`."""
        width, bits = kind.width, 8 * kind.width
        if width == 1:
            target[:] = planes[0]
            return
        words = _elements(target, kind)
        step = _BLOCK_BYTES // width
        for start in range(0, words.size, step):
            block, parts = words[start : start + step], [plane[start : start + step] for plane in planes]
            if width == 8 and turn:
                self._join_wide(parts, block, turn)
                continue
            np.copyto(block, parts[-1])
            for part in reversed(parts[:-1]):
                np.left_shift(block, 8, out=block)
                np.bitwise_or(block, part, out=block)
            if turn:
                high = self._array("wide", words.dtype, block.size)
                np.left_shift(block, bits - turn, out=high)
                np.right_shift(block, turn, out=block)
                np.bitwise_or(block, high, out=block)

    def _join_halves(self, planes: list[Array], target: Array) -> None:
        words = _elements(target, _SINGLE)
        low = np.ascontiguousarray(planes[0]).view(np.uint16)
        high = self._array("high", np.uint16, words.size)
        self._join(planes[1:], high.view(np.uint8), _UPPER, 1)
        step = _BLOCK_BYTES // words.itemsize
        for start in range(0, words.size, step):
            block = words[start : start + step]
            np.copyto(block, high[start : start + step])
            np.left_shift(block, 16, out=block)
            np.bitwise_or(block, low[start : start + step], out=block)

    def _join_wide(self, planes: list[Array], words: Array, turn: int) -> None:
        """`_join` by quarters of a word, each of which needs only its two planes and a few bits of the next."""
        quarters = words.view(np.uint16).reshape(-1, 4)
        one, other = (self._array(name, np.uint16, words.size) for name in ("one", "other"))
        narrow = self._array("narrow", np.uint8, words.size)
        for number in range(4):
            low, high, following = planes[2 * number], planes[2 * number + 1], planes[(2 * number + 2) % 8]
            np.left_shift(high, 8 - turn, out=one, dtype=np.uint16)
            np.right_shift(low, turn, out=narrow)
            np.bitwise_or(one, narrow, out=one)
            np.left_shift(following, 16 - turn, out=other, dtype=np.uint16)
            np.bitwise_or(one, other, out=quarters[:, number])

    def _array(self, name: str, dtype: Any, count: int) -> Array:
        """Scratch that is kept between calls, so that its pages are mapped once."""
        needed = count * np.dtype(dtype).itemsize
        held = self._scratch.get(name)
        if held is None or held.size < needed:
            held = self._scratch[name] = np.empty(max(needed, CHUNK_BYTES), dtype=np.uint8)
        return held[:needed].view(dtype)


def _packed(code: int, coded: Sequence[tuple[Mode, Buffer]]) -> list[Buffer]:
    """A stored chunk of planes, in parts."""
    lengths = struct.pack(f"<{len(coded)}I", *(memoryview(body).nbytes for _, body in coded))
    return [bytes([code, *(mode for mode, _ in coded)]) + lengths, *(body for _, body in coded)]


def _elements(data: Array, kind: Kind) -> Array:
    return data.view(_UNSIGNED[kind.width])


def _sample(values: Array, count: int) -> Array:
    """About `count` of the values, in pieces from all over them; all of a short array."""
    if values.size <= 2 * count:
        return values
    piece = count // _SAMPLE_PIECES
    stride = (values.size - piece) // (_SAMPLE_PIECES - 1)
    return np.concatenate([values[number * stride : number * stride + piece] for number in range(_SAMPLE_PIECES)])
