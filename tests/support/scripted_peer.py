"""A server of the data plane with scripted responses, for failures that a real peer rarely has."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Callable

from millrace.cluster.dataplane.wire import ObjectDescription, build_response, pieces, sum_of
from millrace.cluster.membership import WIRE_VERSION, Member
from millrace.store.records import BLOCK_BYTES

TOKEN = "a-secret-of-the-cluster"
SIZE = 3 * BLOCK_BYTES + 1000
DATA = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)
WHAT = ObjectDescription("memory", "bucket/key", "v1", SIZE)

Handle = Callable[["Visit"], None]


class Visit:
    """One connection to the scripted server."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.connection = connection
        self.number = number
        self.requests = 0

    def request(self) -> str:
        """The head of the next request; "" at the end."""
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            more = self.connection.recv(1)
            if not more:
                return ""
            received += more
        self.requests += 1
        return received.decode("latin-1")

    def send(self, *parts: bytes) -> None:
        self.connection.sendall(b"".join(parts))

    def wait_for_end(self) -> None:
        """Until the client has ended the connection."""
        while self.connection.recv(1000):
            pass


class Peer:
    """A server on 127.0.0.1 that calls `handle` for each connection."""

    def __init__(self, handle: Handle, context: ssl.SSLContext | None = None) -> None:
        self.visits: list[Visit] = []
        self.handle = handle
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def requests(self) -> int:
        return sum(visit.requests for visit in self.visits)

    def member(self, wire: int = WIRE_VERSION) -> Member:
        return Member(id="peer", address=self.address, wire=wire)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            visit = Visit(connection, len(self.visits))
            self.visits.append(visit)
            threading.Thread(target=self._serve, args=(visit,), daemon=True).start()

    def _serve(self, visit: Visit) -> None:
        try:
            if self._context is not None:
                visit.connection = self._context.wrap_socket(visit.connection, server_side=True)
            self.handle(visit)
        except OSError:
            pass  # the client has disconnected, as in some of these tests
        finally:
            visit.connection.close()

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def range_of(request: str) -> tuple[int, int]:
    found = re.search(r"Range: bytes=(\d+)-(\d+)\r\n", request)
    assert found is not None
    return int(found[1]), int(found[2]) + 1


def framed(request: str, *, wrong: bool = False) -> bytes:
    body = bytearray()
    for first, end in pieces(*range_of(request)):
        body += DATA[first:end] + sum_of(DATA[first:end])
    if wrong:
        body[0] ^= 1
    return bytes(body)


def head_of(body: bytes, *fields: tuple[str, str]) -> bytes:
    return build_response(206, fields, length=len(body))


def silent(visit: Visit) -> None:
    visit.request()
    visit.wait_for_end()


def honest(visit: Visit) -> None:
    while request := visit.request():
        body = framed(request)
        visit.send(head_of(body), body)
