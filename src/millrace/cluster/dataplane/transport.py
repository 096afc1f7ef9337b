"""Sending and receiving bytes on a server's connection: directly by the kernel, or through TLS.

Both have time limits. A plain socket uses those of the kernel (`SO_RCVTIMEO`, `SO_SNDTIMEO`), which need no `poll` before
every call; a TLS socket uses those of Python.
"""

from __future__ import annotations

import abc
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Iterable

from typing_extensions import Buffer

from millrace.cluster.dataplane.connections import timeval
from millrace.cluster.dataplane.responses import BrokenResponseError, FilePart, Part
from millrace.runtime.failures import FAILING_ERRNOS

_RECEIVE_BYTES = 64 << 10
_HEAD_BYTES = 8 << 10  # enough for one head; a larger buffer costs time
_HELD_BYTES, _HELD_PARTS = 256 << 10, 256  # buffered until more can be sent with it
_TLS_CHUNK_BYTES = 256 << 10
_LINGER_SECONDS = 1.0


class Transport(abc.ABC):
    """One connection. Not thread-safe except `shut_down`. Raises `OSError`; `TimeoutError` after a time limit."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @abc.abstractmethod
    def wait_at_most(self, seconds: float) -> None:
        """Set the time limit of `receive` for the next byte."""

    @abc.abstractmethod
    def receive(self) -> bytes:
        """Wait for bytes and return them; empty if the other side closed."""

    @abc.abstractmethod
    def receive_into(self, buffer: memoryview) -> int:
        """As `receive`, into memory."""

    @abc.abstractmethod
    def send(self, parts: Iterable[Part]) -> None:
        """Send everything, in as few packets as possible. Raises `BrokenResponseError` if a file is too short."""

    def shut_down(self) -> None:
        """End both directions now, from any thread; wakes a thread that waits."""
        with contextlib.suppress(OSError):
            # Of the plain socket: that of a TLS socket also ends its TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def linger(self) -> None:
        """End sending, and let the other side read everything: an abrupt close could discard it.

        Receives and discards for a moment, however much it is: a client sends the whole body before it reads a refusal.
        """
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            until = time.monotonic() + _LINGER_SECONDS
            while (left := until - time.monotonic()) > 0.01:
                self.wait_at_most(left)
                if not self.receive():
                    return

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._socket.close()


class PlainTransport(Transport):
    """A plain TCP connection; files are sent by `sendfile`."""

    def __init__(self, connection: socket.socket, *, send_seconds: float) -> None:
        super().__init__(connection)
        self._descriptor = connection.fileno()
        self._limit = 0.0
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(send_seconds))

    def wait_at_most(self, seconds: float) -> None:
        if seconds != self._limit:
            self._limit = seconds
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(seconds))

    def receive(self) -> bytes:
        try:
            return self._socket.recv(_HEAD_BYTES)
        except BlockingIOError:
            raise TimeoutError("nothing arrived") from None

    def receive_into(self, buffer: memoryview) -> int:
        try:
            return self._socket.recv_into(buffer)
        except BlockingIOError:
            raise TimeoutError("nothing arrived") from None

    def send(self, parts: Iterable[Part]) -> None:
        if isinstance(parts, tuple) and len(parts) == 3:
            before, part, after = parts
            if isinstance(part, FilePart) and isinstance(before, bytes) and isinstance(after, bytes):
                self._send_memory([before], len(before), socket.MSG_MORE)  # nearly every large response
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
            # Only if the kernel was interrupted.
            rest = memoryview(b"".join(bytes(part) for part in parts))
            while sent < nbytes:
                sent += self._socket.send(rest[sent:], flags)
        except BlockingIOError:
            raise TimeoutError("nothing was accepted") from None

    def _send_file(self, part: FilePart) -> None:
        source, offset, stop = part.file.descriptor, part.offset, part.offset + part.nbytes
        try:
            while offset < stop:
                try:
                    sent = os.sendfile(self._descriptor, source, offset, stop - offset)
                except OSError as error:
                    data = _instead_of_unreadable(error, stop - offset)
                    self._send_memory([data], len(data), socket.MSG_MORE)
                    sent = len(data)
                if not sent:
                    raise BrokenResponseError("a file was truncated")
                offset += sent
        except BlockingIOError:
            raise TimeoutError("nothing was accepted") from None


class TlsTransport(Transport):
    """A TLS connection; every byte passes through this process."""

    def __init__(self, connection: ssl.SSLSocket, *, send_seconds: float) -> None:
        super().__init__(connection)
        self._send_seconds = send_seconds
        self._limit = send_seconds

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
        small = b""  # a head is sent in one record with the next part
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
            wanted = min(_TLS_CHUNK_BYTES, stop - offset)
            try:
                data = os.pread(part.file.descriptor, wanted, offset)
            except OSError as error:
                data = _instead_of_unreadable(error, wanted)
            if not data:
                raise BrokenResponseError("a file was truncated")
            self._send_all(before + data if before else data)
            before = b""
            offset += len(data)

    def _send_all(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self._socket.send(view) :]


def _instead_of_unreadable(error: OSError, nbytes: int) -> bytes:
    """Zeros in the place of bytes that the disk cannot read, which the receiver's checksum detects. It then requests the
    block verified, and the error is reported. A closed connection would count as the loss of this node.

    Raises other errors: the connection's.
    """
    if error.errno not in FAILING_ERRNOS:
        raise error
    return bytes(min(nbytes, _TLS_CHUNK_BYTES))
