"""What a saving process and its encoder process say to each other over a Unix socket. No torch.

The tensors lie in regions of shared memory whose descriptors are passed once; stored chunks come back in slots of another
one. Each message of the parent is a `Head` and as many bytes as that says. Requests are answered in any order.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from millrace.checkpoint.codec.planes import CHUNK_BYTES, Array

SLOT_BYTES = CHUNK_BYTES + (64 << 10)
"""Room for one stored chunk; one that does not fit is encoded by the parent."""

_FDS_AT_ONCE = 16


class Say(IntEnum):
    """What a message of the parent is."""

    REGION = 0
    """`ticket` is the number of a region of `nbytes`, whose descriptor comes with the message."""
    SLOTS = 1
    """The same for the slots."""
    FORGET = 2
    """The region `ticket` is gone."""
    ENCODE = 3
    """A request, `nbytes` long, with this ticket."""


class Head(NamedTuple):
    """Before every message of the parent."""

    say: int
    ticket: int
    nbytes: int


class Request(NamedTuple):
    """One chunk to be encoded into `slot`. Then follow, of each of its `pieces`, the offset in the region `region`, the
    length and, with a base, the offset in `base_region`, all 64 bits.
    """

    slot: int
    kind: int
    effort: int
    pieces: int
    region: int
    has_base: bool
    has_chain: bool
    base_region: int
    base_checksum: int
    chain_bytes: int
    root_bytes: int
    limit: float


class Shape(IntEnum):
    """What an answer is."""

    FULL = 0
    DELTA = 1
    REFERENCE = 2
    FAILED = 3
    """Nothing: the parent encodes the chunk."""


class Answer(NamedTuple):
    """What became of the request `ticket`: the stored chunk is in its slot. `base_changed`: the base's bytes were not those
    that were saved. What the codec took, twice where a delta was not worth it: bytes stored and seconds.
    """

    ticket: int
    shape: int
    base_changed: bool
    raw_checksum: int
    stored_checksum: int
    stored_bytes: int
    first_bytes: int
    first_seconds: float
    second_bytes: int
    second_seconds: float


HEAD = struct.Struct("<BQQ")
REQUEST = struct.Struct("<IBBIQ??QQQQd")
ANSWER = struct.Struct("<QB?QQQQdQd")


class Stream:
    """Reads exactly so many bytes of a socket, and the descriptors that come with them. For one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.descriptors: deque[int] = deque()

    def read(self, nbytes: int) -> bytes:
        """Raises `EOFError` when the other side has closed, `OSError` for what goes wrong."""
        parts: list[bytes] = []
        while nbytes:
            part, descriptors, _, _ = socket.recv_fds(self._socket, nbytes, _FDS_AT_ONCE)
            if not part:
                raise EOFError("the other side has closed")
            self.descriptors.extend(descriptors)
            parts.append(part)
            nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def gathered(memory: Array, offsets: Array, lengths: Array) -> Array:
    """The pieces of a chunk laid end to end: where there is one, the memory itself."""
    if len(offsets) == 1:
        return memory[offsets[0] : offsets[0] + lengths[0]]
    pieces = zip(offsets.tolist(), lengths.tolist(), strict=True)
    return np.concatenate([memory[offset : offset + length] for offset, length in pieces])
