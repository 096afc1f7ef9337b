"""The one zstd library of the package, and the frames that checkpoints use.

Every compressed plane and manifest is one standard zstd frame with its decompressed size in the header.
"""

from __future__ import annotations

import sys
from typing import IO, cast

from typing_extensions import Buffer

from millrace.errors import CorruptCheckpointError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_Option = zstd.CompressionParameter
# `ZSTD_c_literalCompressionMode` and `ZSTD_ps_enable`, which the library passes through but does not name: compress the
# literals, which is all of the data when there are no matches, also with strategy "fast" and a large target length.
_LITERAL_MODE, _ENABLED = 1002, 1
_NO_MATCHES: dict[int, int] = {
    _Option.compression_level: 1,
    _Option.strategy: zstd.Strategy.fast,
    # A table of 64 entries for matches of at least 7 bytes finds hardly any matches.
    _Option.hash_log: 6,
    _Option.min_match: 7,
}
# A window over the whole plane saves zstd some bookkeeping.
_WINDOW_LOG = 19
# The step of the search for matches. The largest one skips nearly all of the data.
_LARGEST_STEP = 128 << 10
# No frame of a checkpoint needs a larger window.
_DECODING: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}


class Compressor:
    """Compresses buffers, each into a frame of its own. Not thread-safe. Releases the interpreter lock while it works."""

    def __init__(self, options: dict[int, int]) -> None:
        self._compressor = zstd.ZstdCompressor(options=options)

    def compress(self, data: Buffer) -> bytes:
        return self._compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)


def at_level(level: int) -> Compressor:
    """An ordinary compressor."""
    return Compressor({_Option.compression_level: level})


def without_matches(*, window_log: int = _WINDOW_LOG) -> Compressor:
    """A compressor that does Huffman coding only, in frames that every zstd decoder reads.

    Each block has its own code. Blocks are as long as the window, up to 128 KiB.

    zstd searches for matches with the largest step and compresses the literals. A library that rejects the parameter for
    that searches with the smallest step, which takes almost twice the time for the same size.
    """
    options = {**_NO_MATCHES, _Option.window_log: window_log}
    try:
        return Compressor({**options, _Option.target_length: _LARGEST_STEP, _LITERAL_MODE: _ENABLED})
    except (ValueError, zstd.ZstdError):
        return Compressor({**options, _Option.target_length: 0})


def decompress(stored: Buffer, nbytes: int) -> bytes:
    """Decompress a frame of exactly `nbytes`. Allocates no memory for a frame that declares another size.

    Raises `CorruptCheckpointError` for anything else than one complete frame of this size.
    """
    try:
        if zstd.get_frame_info(stored).decompressed_size == nbytes:
            decompressor = zstd.ZstdDecompressor(options=_DECODING)
            data = decompressor.decompress(stored)
            if decompressor.eof and not decompressor.unused_data and len(data) == nbytes:
                return data
    except zstd.ZstdError as error:
        raise CorruptCheckpointError("a compressed frame does not decompress") from error
    raise CorruptCheckpointError(f"a compressed frame of {memoryview(stored).nbytes} bytes cannot hold {nbytes}")


class _ForwardReader(zstd.ZstdFile):
    """Not seekable: torch would read an archive from its end, and each step back decompresses it from the beginning."""

    def seekable(self) -> bool:
        return False


def reader(source: IO[bytes]) -> IO[bytes]:
    """A stream of the content of the frames in `source`, to be read once from the beginning.

    Not thread-safe. A damaged frame raises the library's errors.
    """
    return cast("IO[bytes]", _ForwardReader(source))
