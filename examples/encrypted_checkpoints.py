"""A second stream extension: encrypts checkpoints with AES-256-GCM. Explained in docs/how-to/encrypt-checkpoints.md.

    key = AESGCM.generate_key(256)                      # keep it where secrets are kept, not next to the checkpoint
    encryption = encryption_with({"2026-01": key})
    dcp.save(state, storage_writer=CheckpointWriter(path, _extensions=[encryption("2026-01")]))
    dcp.load(state, storage_reader=CheckpointReader(path, _extension_registry=extension_registry(encryption)))

Needs the package `cryptography`. A stream is a random prefix, then segments of at most 1 MiB, each a length and a GCM
ciphertext with its tag. The segment's number and whether it is the last one are in its nonce, so that segments cannot be
exchanged, left out, or cut off.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Mapping
from typing import IO, Any, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch.distributed.checkpoint._extension import StreamTransformExtension

SEGMENT_BYTES = 1 << 20
_PREFIX_BYTES, _TAG_BYTES = 7, 16
# GCM's nonce of 12 bytes as in the STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizar 2015).
_COUNTER = struct.Struct(">I?")
_LENGTH = struct.Struct("<I")


class _Encrypting(io.RawIOBase):
    def __init__(self, cipher: AESGCM, output: IO[bytes]) -> None:
        super().__init__()
        self._cipher, self._output = cipher, output
        self._prefix = os.urandom(_PREFIX_BYTES)
        self._held = bytearray()
        self._number = 0
        output.write(self._prefix)

    def __del__(self) -> None:
        # The base class would close, and so end an interrupted stream as if it were whole.
        pass

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._held += view
        while len(self._held) > SEGMENT_BYTES:  # not the last one: there is more
            self._put(self._held[:SEGMENT_BYTES], last=False)
            del self._held[:SEGMENT_BYTES]
        return len(view)

    def close(self) -> None:
        if not self.closed:
            self._put(self._held, last=True)
            super().close()
            self._output.close()

    def _put(self, segment: bytearray, *, last: bool) -> None:
        nonce = self._prefix + _COUNTER.pack(self._number, last)
        self._output.write(_LENGTH.pack(len(segment)))
        self._output.write(self._cipher.encrypt(nonce, segment, None))
        self._number += 1


class _Decrypting(io.RawIOBase):
    def __init__(self, cipher: AESGCM, source: IO[bytes]) -> None:
        super().__init__()
        self._cipher, self._source = cipher, source
        self._prefix = self._exactly(_PREFIX_BYTES)
        self._segment = memoryview(b"")
        self._number = 0
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._segment and not self._ended:
            self._next()
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._segment))
        target[:count], self._segment = self._segment[:count], self._segment[count:]
        return count

    def readall(self) -> bytes:
        parts = [self._segment]
        while not self._ended:
            self._next()
            parts.append(self._segment)
        self._segment = memoryview(b"")
        return b"".join(parts)

    def _next(self) -> None:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > SEGMENT_BYTES:
            raise ValueError("an encrypted segment is impossibly long")
        ciphertext = self._exactly(length + _TAG_BYTES)
        try:
            segment = self._cipher.decrypt(self._prefix + _COUNTER.pack(self._number, False), ciphertext, None)
        except InvalidTag:
            segment = self._cipher.decrypt(self._prefix + _COUNTER.pack(self._number, True), ciphertext, None)
            self._ended = True
        self._segment, self._number = memoryview(segment), self._number + 1

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._source.read(count - len(data))
            if not part:
                raise ValueError("an encrypted stream is cut off")
            data += part
        return data


def encryption_with(keys: Mapping[str, bytes]) -> type[Any]:
    """The extension class that has these `keys`. Checkpoints name the key that they were written with, not the key."""

    class Encryption(StreamTransformExtension):
        def __init__(self, key_name: str) -> None:
            self._key_name = key_name
            self._cipher = AESGCM(keys[key_name])

        @staticmethod
        def registry_name() -> str:
            return "stream.aes_gcm@example"

        @staticmethod
        def from_descriptor(version: str) -> Encryption:
            number, _, key_name = version.partition(".")
            if number != "1" or key_name not in keys:
                raise ValueError(f"no key for an encrypted stream of version {version}")
            return Encryption(key_name)

        def get_descriptor(self) -> str:
            return f"{self.registry_name()}/1.{self._key_name}"

        def transform_to(self, output: IO[bytes]) -> IO[bytes]:
            return cast("IO[bytes]", _Encrypting(self._cipher, output))

        def transform_from(self, input: IO[bytes]) -> IO[bytes]:
            return cast("IO[bytes]", _Decrypting(self._cipher, input))

    return Encryption
