"""How bytes leave and reach a server's connection: straight through the kernel, or through TLS.

Both have time limits without a `poll` before every call: a plain socket by the kernel's own (`SO_RCVTIMEO`, `SO_SNDTIMEO`),
which costs nothing, a TLS socket by Python's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterable
from typing import Protocol

from typing_extensions import Buffer

from millrace.peers.answers import BrokenAnswerError, FilePart, Part

_TIMEVAL = struct.Struct("ll")
_RECEIVE_BYTES = 64 << 10
_HEAD_BYTES = 8 << 10  # as much as is needed at a time; memory that is not used costs time as well
_HELD_BYTES, _HELD_PARTS = 256 << 10, 256  # what waits for more to go out with it
_TLS_CHUNK_BYTES = 256 << 10
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 8 << 20


class Transport(Protocol):
    """One connection. Not thread-safe but for `shut_down`. Raises `OSError`, `TimeoutError` when a limit has passed."""

    def wait_at_most(self, seconds: float) -> None:
        """How long `receive` waits for the next byte from now on."""
        ...

    def receive(self) -> bytes:
        """What has come; waits for some. Empty when the other side has ended."""
        ...

    def receive_into(self, buffer: memoryview) -> int:
        """As `receive`, into memory."""
        ...

    def send(self, parts: Iterable[Part]) -> None:
        """Send everything, in as few packets as there are. Raises `BrokenAnswerError` when a file ends too early."""
        ...

    def shut_down(self) -> None:
        """End both directions now, from any thread: whoever waits in this connection wakes up."""
        ...

    def linger(self) -> None:
        """End sending and let the other side read what it was sent: an abrupt end could take that from it."""
        ...

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        ...


class PlainTransport:
    """A TCP connection as it is: files go out by `sendfile`."""

    def __init__(self, connection: socket.socket, *, send_seconds: float) -> None:
        self._socket = connection
        self._descriptor = connection.fileno()
        self._limit = 0.0
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_seconds))

    def wait_at_most(self, seconds: float) -> None:
        if seconds != self._limit:
            self._limit = seconds
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def receive(self) -> bytes:
        try:
            return self._socket.recv(_HEAD_BYTES)
        except BlockingIOError:
            raise TimeoutError("nothing came") from None

    def receive_into(self, buffer: memoryview) -> int:
        try:
            return self._socket.recv_into(buffer)
        except BlockingIOError:
            raise TimeoutError("nothing came") from None

    def send(self, parts: Iterable[Part]) -> None:
        if isinstance(parts, tuple) and len(parts) == 3:
            before, part, after = parts
            if isinstance(part, FilePart) and isinstance(before, bytes) and isinstance(after, bytes):
                self._send_memory([before], len(before), socket.MSG_MORE)  # nearly every large answer
                self._send_file(part)
                self._send_memory([after], len(after), 0)
                return
        memory: list[Buffer] = []
        nbytes = 0
        for part in parts:
            if isinstance(part, FilePart):
                if memory:
                    self._send_memory(memory, nbytes, socket.MSG_MORE)
                    memory, nbytes = [], 0
                self._send_file(part)
                continue
            memory.append(part)
            nbytes += len(part) if type(part) is bytes else memoryview(part).nbytes
            if nbytes > _HELD_BYTES or len(memory) >= _HELD_PARTS:
                self._send_memory(memory, nbytes, socket.MSG_MORE)
                memory, nbytes = [], 0
        if memory:
            self._send_memory(memory, nbytes, 0)

    def _send_memory(self, parts: list[Buffer], nbytes: int, flags: int) -> None:
        try:
            sent = self._socket.sendmsg(parts, (), flags) if len(parts) > 1 else self._socket.send(parts[0], flags)
            if sent == nbytes:
                return
            # Only where the kernel was interrupted in the middle.
            rest = memoryview(b"".join(bytes(part) for part in parts))
            while sent < nbytes:
                sent += self._socket.send(rest[sent:], flags)
        except BlockingIOError:
            raise TimeoutError("nothing was taken") from None

    def _send_file(self, part: FilePart) -> None:
        source, offset, stop = part.file.descriptor, part.offset, part.offset + part.nbytes
        try:
            while offset < stop:
                sent = os.sendfile(self._descriptor, source, offset, stop - offset)
                if not sent:
                    raise BrokenAnswerError("a file is shorter than it was")
                offset += sent
        except BlockingIOError:
            raise TimeoutError("nothing was taken") from None

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def linger(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            _drain(self)

    def close(self) -> None:
        self._socket.close()


class TlsTransport:
    """The same through TLS, where every byte has to pass through this process."""

    def __init__(self, connection: ssl.SSLSocket, *, send_seconds: float) -> None:
        self._socket = connection
        self._send_seconds = send_seconds
        self._limit = send_seconds
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def wait_at_most(self, seconds: float) -> None:
        self._limit = seconds

    def receive(self) -> bytes:
        self._socket.settimeout(self._limit)
        return self._socket.recv(_RECEIVE_BYTES)

    def receive_into(self, buffer: memoryview) -> int:
        self._socket.settimeout(self._limit)
        return self._socket.recv_into(buffer)

    def send(self, parts: Iterable[Part]) -> None:
        self._socket.settimeout(self._send_seconds)
        small = b""  # a head goes into one record with what follows it
        for part in parts:
            if isinstance(part, FilePart):
                self._send_file(part, small)
                small = b""
            elif memoryview(part).nbytes <= _RECEIVE_BYTES:
                small += bytes(part)
            else:
                self._send_all(small)
                small = b""
                self._send_all(part)
        self._send_all(small)

    def _send_file(self, part: FilePart, before: bytes) -> None:
        offset, stop = part.offset, part.offset + part.nbytes
        while offset < stop:
            data = os.pread(part.file.descriptor, min(_TLS_CHUNK_BYTES, stop - offset), offset)
            if not data:
                raise BrokenAnswerError("a file is shorter than it was")
            self._send_all(before + data if before else data)
            before = b""
            offset += len(data)

    def _send_all(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self._socket.send(view) :]

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def linger(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            _drain(self)

    def close(self) -> None:
        self._socket.close()


def _drain(transport: Transport) -> None:
    """Take what still comes, for a moment."""
    until, nbytes = time.monotonic() + _LINGER_SECONDS, 0
    while (left := until - time.monotonic()) > 0.01 and nbytes < _LINGER_BYTES:
        transport.wait_at_most(left)
        data = transport.receive()
        if not data:
            return
        nbytes += len(data)


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return _TIMEVAL.pack(whole, max(1, int((seconds - whole) * 1e6)))
