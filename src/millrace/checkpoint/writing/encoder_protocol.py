"""The protocol between a saving process and its encoder process, over a Unix socket. No torch.

The tensors are in regions of shared memory, whose descriptors are sent once. Stored chunks are returned in slots of
another region. Each message of the parent is a `MessageHeader` and its body. Results may come in any order.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from millrace.checkpoint.codec.chunks import CHUNK_BYTES, Array

SLOT_BYTES = CHUNK_BYTES + (64 << 10)
"""Size of a slot for one stored chunk. The parent encodes chunks that do not fit."""

_FDS_AT_ONCE = 16


class MessageType(IntEnum):
    """The type of a message of the parent."""

    REGION = 0
    """`ticket` is the number of a region of `nbytes`, whose descriptor comes with the message."""
    SLOTS = 1
    """The same for the slots."""
    FORGET = 2
    """The region `ticket` was freed."""
    ENCODE = 3
    """An `EncodeRequest` of `nbytes` with this ticket."""


class MessageHeader(NamedTuple):
    """The header of every message of the parent."""

    type: int
    ticket: int
    nbytes: int


class EncodeRequest(NamedTuple):
    """One chunk to encode into `slot`. It is followed by three arrays of 64-bit integers, with an entry for each of its
    `pieces`: the offset in the region `region`, the length and, with a base, the offset in `base_region`.
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


class ResultKind(IntEnum):
    """The form of an encoded chunk."""

    FULL = 0
    DELTA = 1
    REFERENCE = 2
    FAILED = 3
    """No result: the parent encodes the chunk."""


class EncodeResult(NamedTuple):
    """The result of the request `ticket`; its stored chunk is in the slot. `base_changed`: the bytes of the base were not
    those that were saved. The bytes stored and the seconds of the codec are given twice, because a delta that was not
    worth it is followed by a second run.
    """

    ticket: int
    kind: int
    base_changed: bool
    raw_checksum: int
    stored_checksum: int
    stored_bytes: int
    first_bytes: int
    first_seconds: float
    second_bytes: int
    second_seconds: float


HEADER = struct.Struct("<BQQ")
REQUEST = struct.Struct("<IBBIQ??QQQQd")
RESULT = struct.Struct("<QB?QQQQdQd")


class Stream:
    """Reads exact numbers of bytes from a socket, and the descriptors that come with them. For one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.descriptors: deque[int] = deque()

    def read(self, nbytes: int) -> bytes:
        """Read exactly `nbytes`. Raises `EOFError` when the other side has closed the socket, and `OSError`."""
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
    """The pieces of a chunk joined into one array; without a copy if there is only one."""
    if len(offsets) == 1:
        return memory[offsets[0] : offsets[0] + lengths[0]]
    pieces = zip(offsets.tolist(), lengths.tolist(), strict=True)
    return np.concatenate([memory[offset : offset + length] for offset, length in pieces])
