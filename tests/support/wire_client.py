"""The smallest thing that speaks with a node's data plane, for tests and benchmarks: one socket, and no second thought."""

from __future__ import annotations

import socket
import ssl
from typing import Any

from millrace.cluster.dataplane import wire
from millrace.cluster.dataplane.wire import GetMode, ObjectDescription, ResponseHead

TOKEN = "a-token-of-tests"


def connect(address: str, *, timeout: float = 60.0, context: ssl.SSLContext | None = None) -> socket.socket:
    """A connection to `host:port`."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection if context is None else context.wrap_socket(connection, server_hostname=host)


class WireClient:
    """One keep-alive connection. `interims` counts the received 102s."""

    def __init__(self, address: str, *, token: str = TOKEN, context: ssl.SSLContext | None = None) -> None:
        self.address = address
        self.token = token
        self.socket = connect(address, context=context)
        self.interims = 0
        self._buffer = bytearray()

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def get(self, what: ObjectDescription, span: tuple[int, int], **more: Any) -> tuple[ResponseHead, bytes]:
        """A framed request; the body comes without its checksums, which are compared."""
        self.socket.sendall(wire.build_get(what, span, host=self.address, token=self.token, **more))
        head, body = self.answer()
        return head, unframed(body, span) if head.status == 206 else body

    def cached(self, what: ObjectDescription, span: tuple[int, int], **more: Any) -> tuple[ResponseHead, bytes]:
        """`get` of cached data only."""
        return self.get(what, span, mode=GetMode.CACHED, **more)

    def put(self, what: ObjectDescription, start: int, data: bytes) -> ResponseHead:
        """Bring whole blocks."""
        stop = start + len(data)
        parts = [wire.build_put(what, start, stop, host=self.address, token=self.token)]
        for begin, end in wire.pieces(start, stop):
            piece = data[begin - start : end - start]
            parts += [piece, wire.sum_of(piece)]
        self.socket.sendall(b"".join(parts))
        return self.answer()[0]

    def plain(self, method: str, path: str, **headers: str) -> tuple[ResponseHead, bytes]:
        """Any request without a body."""
        lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {self.token}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        return self.answer(method)

    def receive(self, nbytes: int) -> bytes:
        """Exactly so many bytes, and none of what may have arrived after them."""
        while len(self._buffer) < nbytes:
            self._receive()
        data = bytes(self._buffer[:nbytes])
        del self._buffer[:nbytes]
        return data

    def answer(self, method: str = "GET") -> tuple[ResponseHead, bytes]:
        """The next final response. Raises `ConnectionError` if it ends too early."""
        while True:
            while not (end := wire.head_bytes(self._buffer)):
                self._receive()
            head = wire.parse_response_head(self._buffer[:end])
            del self._buffer[:end]
            if not head.is_interim:
                break
            self.interims += 1
        nbytes = 0 if method == "HEAD" else head.length
        while len(self._buffer) < nbytes:
            self._receive()
        body = bytes(self._buffer[:nbytes])
        del self._buffer[:nbytes]
        return head, body

    def _receive(self) -> None:
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionResetError("the answer ended too early")
        self._buffer += data


def unframed(body: bytes, span: tuple[int, int]) -> bytes:
    """The bytes of a framed body; asserts that every checksum is right."""
    found, position = [], 0
    for begin, end in wire.pieces(*span):
        piece = body[position : position + end - begin]
        position += end - begin
        assert body[position : position + wire.SUM_BYTES] == wire.sum_of(piece)
        position += wire.SUM_BYTES
        found.append(piece)
    assert position == len(body)
    return b"".join(found)
