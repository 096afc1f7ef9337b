"""The plane codec: encodes a chunk of tensor bytes as a smaller one, and decodes it bit for bit. Pure; no torch, no I/O.

A float's exponent is predictable and its mantissa is noise, but in memory they share bytes. Rotating each value left by
one bit moves the whole exponent to the top byte, and the sign next to the mantissa. Splitting the values into byte planes
then separates the compressible bytes from the others. Each plane is stored raw, as a constant, as Huffman-only zstd with
long or short blocks, or as ordinary zstd. A trial on a sample selects the coding. Integers are split without the rotation.

With `Effort.MAX` a float is rotated by up to four bits. The top byte then contains mantissa bits in place of the first
exponent bits, which hardly ever change. Both bytes compress, and Huffman codes, which have at least one bit, lose less on
a byte without a very frequent value. bf16 shrinks by another 1 to 3 % and takes twice the time to decode.

A stored chunk describes itself (little-endian, `W` = bytes of an element):

======================  ==========================================================
1 byte                  kind: bits 0-1 log2(W), bit 2 zero, bit 3 halved, bit 4 float, bit 5 delta; bits 6-7: rotation
                        of floats in bits, less one; in a delta, bit 3: sparse, bit 6: grouped
W bytes                 mode of each plane, lowest byte of the element first
W x 4 bytes             stored length of each plane
then                    the planes, one after the other
======================  ==========================================================

A chunk that is not compressed is one plane of bytes, whatever the type of its elements.

The lower half of a 32-bit float is noise in nearly all tensors. Then only the upper half, which is a bfloat16, is rotated
and split. The lower halves are one plane of two bytes per element, stored first. Bit 3 of the first byte marks such a
*halved* chunk, which has three planes. Splitting the noise as well would cost a fifth of the decoding time and save
nothing.

A *delta* chunk holds, for each element, the zig-zag difference to the element of a base chunk of equal length. Both are read
as integers that order like the values. Where at most an eighth of the elements differ, the delta is *sparse*: bit 3 of its
first byte is set, and it holds the positions and differences of these elements only (`deltas.py`). Decoding needs the base.
The differences of other deltas of floats are grouped by the exponents in the base where their lengths depend on these, and
with `Effort.MAX` always: up to 20 % smaller, but encoding and decoding take twice as long.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec import deltas, zstd
from millrace.checkpoint.codec.chunks import MAX_CHUNK_BYTES, OPAQUE, Array, Effort, Kind, as_bytes
from millrace.checkpoint.codec.deltas import apply_difference, by_exponent, difference
from millrace.checkpoint.codec.splitting import Scratch, Splitter
from millrace.errors import CorruptCheckpointError

_HALVED, _DELTA, _GROUPED, _ROTATION_SHIFT = 0x08, 0x20, 0x40, 6
# In the first byte: a chunk of another codec.
_OTHER = 0x04
# In a delta, the bit of `_HALVED`.
_SPARSE = 0x08
# A delta is sparse if at most one element in this many differs. Below, a byte of each element takes at least a bit.
_SPARSE_SHARE = 8
# It is grouped only if more than one element in this many differs.
_GROUPED_SHARE = 4
# The head of a sparse delta is longer than a chunk of fewer elements.
_SPARSE_LEAST = 64
# A short plane that shrinks by more than the first factor may have matches, as may one of grouped differences whose sample
# shrinks by more than the second.
_LEAST_MATCHED, _LEAST_GROUPED = 5, 3
# The first byte, the number of changed elements, the length of their distances, and whether there are lower bytes.
_SPARSE_HEAD = struct.Struct("<BIIB")
_ROTATIONS = (1, 2, 3, 4)
_SAMPLE_PIECES, _SAMPLE_BYTES = 4, 8192
# A plane that shrinks by less than this on the sample is stored raw, which decodes faster.
_WORTH = 0.99
# Short blocks take twice the time of long ones, and ordinary zstd takes four times, so they have to save more. Short blocks
# suit the second moments of Adam, where each row has other exponents.
_WORTH_SHORT_BLOCKS, _WORTH_MATCHING = 0.9, 0.85
# With `Effort.MAX` both are compressed where they may save something.
_WORTH_TRYING = 0.97
# Short blocks have 2 KiB, like the pieces of a sample, so that a trial shows their savings.
_SHORT_BLOCK_LOG = 11
# Grouped differences change little from block to block. Blocks of 8 KiB are smaller than short ones, and take two thirds of
# the time. Four samples are too few to estimate what such blocks save, so no sample is compressed first.
_GROUPED_BLOCK_LOG = 13
# Effort.MAX uses a larger sample, because it chooses between results of similar size.
_MAX_SAMPLE_BYTES = 64 << 10
_STRONG_LEVEL = 19
# Takes 2 us for a sample without matches.
_FASTEST_LEVEL = -3

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SINGLE = Kind(4, True)


class Mode(IntEnum):
    """The coding of one plane."""

    RAW = 0
    HUFFMAN = 1
    ZSTD = 2
    CONSTANT = 3


class PlaneCodec:
    """The default `Codec`, which also encodes deltas. Holds compressor state and about 7 MiB of scratch memory."""

    def __init__(self) -> None:
        self._huffman = zstd.without_matches()
        self._short_blocks = zstd.without_matches(window_log=_SHORT_BLOCK_LOG)
        self._grouped_blocks = zstd.without_matches(window_log=_GROUPED_BLOCK_LOG)
        self._zstd, self._fastest = zstd.at_level(1), zstd.at_level(_FASTEST_LEVEL)
        self._strongest: zstd.Compressor | None = None
        self._scratch = Scratch()
        self._splitter = Splitter(self._scratch)

    # --- encoding ---------------------------------------------------------------------------------

    def encode(
        self, raw: Buffer, kind: Kind, base: Buffer | None = None, *, effort: Effort = Effort.TYPED
    ) -> list[Buffer]:
        """Return the stored chunk of `raw` in parts, as `Codec.encode`. With `base`, of the same length, it is a delta
        chunk.
        """
        data = as_bytes(raw)
        if data.size % kind.width or data.size > MAX_CHUNK_BYTES:
            raise ValueError(f"{data.size} bytes are not a chunk of {kind.width}-byte elements")
        if effort == Effort.RAW and base is None:
            # As bytes of unknown type: splitting takes time and saves nothing.
            return _packed(bytes([OPAQUE.code]), [(Mode.RAW, data.data)])
        code, grouped = kind.code, False
        if base is None:
            if effort == Effort.TYPED and kind == _SINGLE and self._has_noisy_halves(data):
                return self._encode_halved(data, effort)
            rotation = int(kind.is_float)
            if effort == Effort.MAX and rotation and kind.width > 1:
                rotation = self._best_rotation(data, kind)
                code |= (rotation - 1) << _ROTATION_SHIFT
            planes = self._split(data, kind, rotation)
        else:
            reference = as_bytes(base)
            if reference.size != data.size:
                raise ValueError("the base chunk has another length than the chunk")
            code |= _DELTA
            words, bases = _elements(data, kind), _elements(reference, kind)
            differs = words != bases
            changed = int(np.count_nonzero(differs))
            if _are_few(changed, words):
                return self._encode_sparse(words, bases, np.flatnonzero(differs), kind)
            coded = self._difference(words, bases, kind)
            # Differences of a few rows compress better ungrouped.
            grouped = changed * _GROUPED_SHARE > words.size and self._is_grouped(coded, bases, kind, effort)
            if grouped:
                code |= _GROUPED
                coded = np.take(
                    coded, by_exponent(bases), out=self._scratch.array("grouped", words.dtype, words.size), mode="clip"
                )
            planes = self._split(coded.view(np.uint8), kind, 0)
        return _packed(bytes([code]), [self._encode_plane(plane, effort, grouped=grouped) for plane in planes])

    def estimate(self, sample: Buffer, kind: Kind, base: Buffer | None = None) -> int:
        """About the length of the chunk that `encode` makes of a short sample.

        For floats this takes half of the time of `encode`: differences are not grouped, each plane has one Huffman code, and
        matches are found only in repeated values.
        """
        data = as_bytes(sample)
        if not kind.is_float:
            return _length(self.encode(sample, kind, base))
        if base is None:
            repeated = len(self._fastest.compress(data.data))
            return min(repeated, self._estimate_planes(data, kind, 1))
        words, bases = _elements(data, kind), _elements(as_bytes(base), kind)
        differs = words != bases
        if _are_few(int(np.count_nonzero(differs)), words):
            return _length(self._encode_sparse(words, bases, np.flatnonzero(differs), kind))
        return self._estimate_planes(self._difference(words, bases, kind).view(np.uint8), kind, 0)

    def _estimate_planes(self, data: Array, kind: Kind, rotation: int) -> int:
        return _length([self._encode_short(plane)[1] for plane in self._split(data, kind, rotation)])

    def _difference(self, words: Array, bases: Array, kind: Kind) -> Array:
        coded = self._scratch.array("coded", words.dtype, words.size)
        difference(words, bases, kind.is_float, coded, self._scratch.array)
        return coded

    @staticmethod
    def _is_grouped(coded: Array, bases: Array, kind: Kind, effort: Effort) -> bool:
        """Whether to group differences by the exponents of the base."""
        if effort == Effort.RAW or not kind.is_float or kind.width == 1:
            return False
        return effort == Effort.MAX or deltas.depend_on_exponent(coded, bases)

    def _encode_sparse(self, words: Array, bases: Array, index: Array, kind: Kind) -> list[Buffer]:
        """A delta of the elements `index`, which are all that differ."""
        distances = deltas.encode_distances(index)
        values = np.empty(index.size, dtype=words.dtype)
        difference(words[index], bases[index], kind.is_float, values, self._scratch.array)
        values -= values.dtype.type(1)  # none is zero
        planes = [distances.escaped, *(() if distances.low is None else (distances.low,))]
        planes += self._split(values.view(np.uint8), kind, 0)
        coded = [self._encode_short(plane) for plane in planes if index.size]
        head = _SPARSE_HEAD.pack(
            kind.code | _DELTA | _SPARSE, index.size, distances.escaped.size, distances.low is not None
        )
        return _packed(head, coded)

    def _encode_short(self, plane: Array) -> tuple[Mode, Buffer]:
        """Encode a short plane, without a trial on a sample."""
        if (plane == plane[0]).all():
            return Mode.CONSTANT, bytes(plane[:1])
        coded = Mode.HUFFMAN, self._huffman.compress(plane.data)
        if _LEAST_MATCHED * len(coded[1]) < plane.size:
            # One value is very frequent, and a Huffman code has at least one bit.
            coded = min(coded, (Mode.ZSTD, self._zstd.compress(plane.data)), key=lambda each: len(each[1]))
        return coded if len(coded[1]) < plane.size else (Mode.RAW, plane.tobytes())

    def _has_noisy_halves(self, data: Array) -> bool:
        """Whether compressing the two lower bytes of a 32-bit float saves nothing, by a sample."""
        sample = _sample(_elements(data, _SINGLE), _SAMPLE_BYTES).view(np.uint8).reshape(-1, 4)
        planes = [np.ascontiguousarray(sample[:, number]) for number in range(2)] if sample.size else []
        return bool(planes) and all(self._encode_plane(plane, Effort.TYPED)[0] is Mode.RAW for plane in planes)

    def _encode_halved(self, data: Array, effort: Effort) -> list[Buffer]:
        low, planes = self._splitter.split_halves(_elements(data, _SINGLE))
        coded = [self._encode_plane(plane, effort) for plane in planes]
        return _packed(bytes([_SINGLE.code | _HALVED]), [(Mode.RAW, low.view(np.uint8).data), *coded])

    def _encode_plane(self, plane: Array, effort: Effort, *, grouped: bool = False) -> tuple[Mode, Buffer]:
        if plane.size == 0 or effort == Effort.RAW:
            return Mode.RAW, plane.data
        sample = _sample(plane, _SAMPLE_BYTES)
        uniform = bool((sample == plane[0]).all())
        if uniform and (plane == plane[0]).all():
            return Mode.CONSTANT, bytes(plane[:1])
        if grouped and effort != Effort.MAX and not uniform:
            mode, compressor, tried = self._grouped_coding(sample)
        else:
            matched = self._zstd.compress(sample.data)
            if len(matched) >= sample.size:
                # Noise, also for a Huffman code.
                return Mode.RAW, plane.data
            mode, compressor, tried = self._best_coding(sample, matched, effort, uniform=uniform)
        if len(tried) >= _WORTH * sample.size:
            return Mode.RAW, plane.data
        if effort == Effort.MAX and compressor is not self._huffman:
            mode, stored = min(
                (Mode.HUFFMAN, self._short_blocks.compress(plane.data)),
                (Mode.ZSTD, self._strong.compress(plane.data)),
                key=lambda coded: len(coded[1]),
            )
        else:
            stored = tried if sample.size == plane.size else compressor.compress(plane.data)
        return (mode, stored) if len(stored) < plane.size else (Mode.RAW, plane.data)

    def _best_coding(
        self, sample: Array, matched: bytes, effort: Effort, *, uniform: bool
    ) -> tuple[Mode, zstd.Compressor, bytes]:
        """The coding that is worth its time for a sample, and its result. `matched`: the sample as ordinary zstd."""
        if uniform:
            # Huffman coding takes at least a bit per byte. Matches take next to nothing.
            return Mode.ZSTD, self._zstd, matched
        worth_short, worth_matching = _WORTH_SHORT_BLOCKS, _WORTH_MATCHING
        if effort == Effort.MAX:
            worth_short = worth_matching = _WORTH_TRYING
        best = Mode.HUFFMAN, self._huffman, self._huffman.compress(sample.data)
        if len(matched) < len(best[2]):
            # Where matches save nothing, short blocks save nothing either.
            short = self._short_blocks.compress(sample.data)
            if len(short) < worth_short * len(best[2]):
                best = Mode.HUFFMAN, self._short_blocks, short
            if len(matched) < worth_matching * len(best[2]):
                best = Mode.ZSTD, self._zstd, matched
        return best

    def _grouped_coding(self, sample: Array) -> tuple[Mode, zstd.Compressor, bytes]:
        """The same for a plane of grouped differences, which has matches only if one value is very frequent."""
        coded = self._grouped_blocks.compress(sample.data)
        if _LEAST_GROUPED * len(coded) < sample.size:
            matched = self._zstd.compress(sample.data)
            if len(matched) < _WORTH_MATCHING * len(coded):
                return Mode.ZSTD, self._zstd, matched
        return Mode.HUFFMAN, self._grouped_blocks, coded

    @property
    def _strong(self) -> zstd.Compressor:
        """The slow, strong zstd compressor, for planes with matches. On noise it saves .4 % in 100 times the time."""
        if self._strongest is None:
            self._strongest = zstd.at_level(_STRONG_LEVEL)
        return self._strongest

    def _best_rotation(self, data: Array, kind: Kind) -> int:
        """The rotation with the smallest planes under Huffman coding, by a sample. The smallest rotation wins a tie."""
        sample = _sample(_elements(data, kind), _MAX_SAMPLE_BYTES // kind.width).view(np.uint8)

        def cost(rotation: int) -> int:
            return sum(
                min(len(self._huffman.compress(plane.data)), plane.size)
                for plane in self._split(sample, kind, rotation)
            )

        return min(_ROTATIONS, key=cost)

    def _split(self, data: Array, kind: Kind, rotation: int) -> list[Array]:
        """Byte planes of `data`, lowest byte first. Each element is rotated left by `rotation` bits before.

        The plane of one-byte elements is `data` itself.
        """
        width = kind.width
        if width == 1:
            # Rotation does not change the entropy of a single plane.
            return [data]
        return self._splitter.split(_elements(data, kind), rotation)

    # --- decoding ---------------------------------------------------------------------------------

    def decode(self, stored: Buffer, kind: Kind, out: memoryview, base: Buffer | None = None) -> None:
        """Decode the chunk `stored` into all of `out` (writable bytes, any alignment).

        `base` holds the decoded base of a delta. The caller has verified the checksum of `stored`. Raises
        `CorruptCheckpointError` when the chunk cannot be of `kind` and `len(out)` bytes. Every length is checked before
        memory is allocated for it.
        """
        source = as_bytes(stored).data
        target = as_bytes(out)
        if base is not None and is_sparse(source):
            self._decode_sparse(source, kind, target, as_bytes(base))
            return
        if base is None and source and source[0] == OPAQUE.code:
            kind = OPAQUE  # of any elements, not compressed
        width = kind.width
        halved = bool(source) and base is None and source[0] == _SINGLE.code | _HALVED and kind == _SINGLE
        count, code = (3, kind.code) if halved else (width, source[0] & ~(3 << _ROTATION_SHIFT) if source else 0)
        head = 1 + 5 * count
        if len(source) < head or target.size % width or target.size > MAX_CHUNK_BYTES:
            raise CorruptCheckpointError(f"a stored chunk of {len(source)} bytes cannot hold {target.size}")
        rotation = source[0] >> _ROTATION_SHIFT
        expected_code = kind.code | (0 if base is None else _DELTA)
        rotatable = kind.is_float and width > 1
        if code != expected_code or (rotation and not rotatable) or (rotation > 1 and base is not None):
            raise CorruptCheckpointError(f"the chunk has the kind {source[0]:#x} instead of {expected_code:#x}")
        lengths = struct.unpack_from(f"<{count}I", source, 1 + count)
        if head + sum(lengths) != len(source):
            raise CorruptCheckpointError("the lengths of the planes do not add up to the length of the chunk")
        planes = []
        for number in range(count):
            body = source[head : head + lengths[number]]
            head += lengths[number]
            nbytes = target.size // width * (2 if halved and number == 0 else 1)
            planes.append(self._decode_plane(source[1 + number], body, nbytes))
        if halved:
            self._splitter.join_halves(planes[0], planes[1:], _elements(target, _SINGLE))
            return
        if base is None:
            self._join(planes, target, kind, rotation + 1 if kind.is_float else 0)
            return
        reference = as_bytes(base)
        if reference.size != target.size:
            raise CorruptCheckpointError("the base chunk has another length than the chunk")
        words, bases = _elements(target, kind), _elements(reference, kind)
        if rotation:
            grouped = self._scratch.array("grouped", words.dtype, words.size)
            self._join(planes, grouped.view(np.uint8), kind, 0)
            words[by_exponent(bases)] = grouped
        else:
            self._join(planes, target, kind, 0)
        apply_difference(words, bases, kind.is_float, self._scratch.array)

    def _decode_sparse(self, source: memoryview, kind: Kind, target: Array, reference: Array) -> None:
        width, expected = kind.width, kind.code | _DELTA | _SPARSE
        if target.size % width or target.size > MAX_CHUNK_BYTES or reference.size != target.size:
            raise CorruptCheckpointError("the base chunk has another length than the chunk")
        if len(source) < _SPARSE_HEAD.size or source[0] != expected:
            raise CorruptCheckpointError(f"the chunk has the kind {source[0]:#x} instead of {expected:#x}")
        words, bases = _elements(target, kind), _elements(reference, kind)
        _, number, escaped, low = _SPARSE_HEAD.unpack_from(source)
        if number > words.size or not number <= escaped <= deltas.most_bytes(number, words.size) or low > 1:
            raise CorruptCheckpointError("a sparse chunk has an impossible number of positions")
        np.copyto(words, bases)
        sizes = [escaped, *([number] * (low + width))] if number else []
        at = _SPARSE_HEAD.size + 5 * len(sizes)
        if len(source) < at:
            raise CorruptCheckpointError("a sparse chunk is cut off")
        modes = source[_SPARSE_HEAD.size : _SPARSE_HEAD.size + len(sizes)]
        lengths = struct.unpack_from(f"<{len(sizes)}I", source, _SPARSE_HEAD.size + len(sizes))
        if at + sum(lengths) != len(source):
            raise CorruptCheckpointError("the lengths of the planes do not add up to the length of the chunk")
        planes = []
        for mode, length, size in zip(modes, lengths, sizes, strict=True):
            planes.append(self._decode_plane(mode, source[at : at + length], size))
            at += length
        if not number:
            return
        index = deltas.decode_distances(deltas.Distances(number, planes[0], planes[1] if low else None), words.size)
        values = np.empty(number, dtype=words.dtype)
        self._join(planes[1 + low :], values.view(np.uint8), kind, 0)
        values += values.dtype.type(1)
        apply_difference(values, bases[index], kind.is_float, self._scratch.array)
        words[index] = values

    def _decode_plane(self, mode: int, body: memoryview, count: int) -> Array:
        if mode == Mode.RAW and len(body) == count:
            return np.frombuffer(body, dtype=np.uint8)
        if mode == Mode.CONSTANT and len(body) == 1:
            return np.broadcast_to(np.frombuffer(body, dtype=np.uint8), (count,))
        if mode in (Mode.HUFFMAN, Mode.ZSTD):
            return np.frombuffer(zstd.decompress(body, count), dtype=np.uint8)
        raise CorruptCheckpointError(f"a plane of mode {mode} and {len(body)} bytes cannot hold {count}")

    def _join(self, planes: list[Array], target: Array, kind: Kind, rotation: int) -> None:
        """The inverse of `_split`, into `target`."""
        width = kind.width
        if width == 1:
            target[:] = planes[0]
            return
        self._splitter.join(planes, _elements(target, kind), rotation)


def _length(parts: Sequence[Buffer]) -> int:
    return sum(memoryview(part).nbytes for part in parts)


def _are_few(changed: int, words: Array) -> bool:
    """Whether a delta with this number of changed words is sparse."""
    return words.size >= _SPARSE_LEAST and changed * _SPARSE_SHARE <= words.size


def is_sparse(stored: memoryview) -> bool:
    """Whether a stored chunk of the plane codec is a sparse delta."""
    return len(stored) > 0 and stored[0] & (_DELTA | _SPARSE | _OTHER) == _DELTA | _SPARSE


def _packed(head: bytes, coded: Sequence[tuple[Mode, Buffer]]) -> list[Buffer]:
    """The parts of a stored chunk with these planes: the head with their modes and lengths, then their bodies."""
    lengths = struct.pack(f"<{len(coded)}I", *(memoryview(body).nbytes for _, body in coded))
    return [head + bytes([mode for mode, _ in coded]) + lengths, *(body for _, body in coded)]


def _elements(data: Array, kind: Kind) -> Array:
    return data.view(_UNSIGNED[kind.width])


def _sample(values: Array, count: int) -> Array:
    """About `count` of the values, in pieces spread over the array. All values of a short array."""
    if values.size <= 2 * count:
        return values
    piece = count // _SAMPLE_PIECES
    stride = (values.size - piece) // (_SAMPLE_PIECES - 1)
    return np.concatenate([values[number * stride : number * stride + piece] for number in range(_SAMPLE_PIECES)])
