"""A small HTTP/1.1 server in threads of this process, for tests that observe the server's side.

It keeps every request that came, and `interfere` changes answers on their way out: another status, fewer bytes than
announced, a pause, a reset. A function of the request returns each answer; `web_server.py` and `hub_server.py` have two.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client. Names of headers are in lower case; `path` is decoded and without the query."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def path(self) -> str:
        return unquote(self.raw_path)

    @property
    def raw_path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> Mapping[str, list[str]]:
        return parse_qs(urlsplit(self.target).query, keep_blank_values=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply to the client. Content-Length is that of `body`, unless `headers` has another one or it is `chunked`.

    `stop_after` bytes of the body the connection is closed, or with `reset` torn down. The body comes in `pieces` with a
    pause of `pause_seconds` between them.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    chunked: bool = False
    stop_after: int | None = None
    reset: bool = False
    pause_seconds: float = 0.0
    pieces: int = 2


Interference = Callable[[Request, Reply], Reply | None]
"""Changes a reply; None leaves it as it is."""


class HttpService:
    """The server; a context manager that ends it. Thread-safe.

    `requests` grows in the order in which they came; `connections_made` counts what they came over.
    """

    def __init__(self, answer: Callable[[Request], Reply], *, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self.connections_made = 0
        self._answer = answer
        self._interferences: list[tuple[Interference, list[int | None]]] = []
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closing = threading.Event()
        self._server = _server(self)
        self.scheme = "http" if tls is None else "https"
        if tls is not None:
            # Not when the connection is accepted: a silent client would block all others.
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.url = f"{self.scheme}://{self.host}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def interfere(self, change: Interference, *, count: int | None = None) -> None:
        """Let `change` see every reply from now on; after it has changed `count` of them, no more."""
        with self._lock:
            self._interferences.append((change, [count]))

    def leave_alone(self) -> None:
        """End every interference."""
        with self._lock:
            self._interferences.clear()

    def count(self, method: str, path: str = "") -> int:
        """How many requests of this method came for a path that ends so."""
        return sum(1 for each in list(self.requests) if each.method == method and each.path.endswith(path))

    def reply_to(self, request: Request) -> Reply:
        """The reply to one request, noted and interfered with."""
        self.requests.append(request)
        reply = self._answer(request)
        with self._lock:
            interferences = list(self._interferences)
        for change, left in interferences:
            if left[0] != 0 and (changed := change(request, reply)) is not None:
                reply = changed
                left[0] = None if left[0] is None else left[0] - 1
        return reply

    def wait(self, seconds: float) -> None:
        """A pause that ends with the server."""
        self._closing.wait(seconds)

    def track(self, connection: socket.socket, is_open: bool) -> None:
        with self._lock:
            self.connections_made += is_open
            (self._connections.add if is_open else self._connections.discard)(connection)

    def close(self) -> None:
        """End the server and every connection. Idempotent."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):  # the client was faster
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(120)
        deadline = time.monotonic() + 5
        while self._connections and time.monotonic() < deadline:
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _ThreadingServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    service: HttpService

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects is not reported."""


def _server(service: HttpService) -> _ThreadingServer:
    server = _ThreadingServer(("127.0.0.1", 0), _Handler)
    server.service = service
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _ThreadingServer

    def setup(self) -> None:
        self.server.service.track(self.request, True)
        super().setup()

    def finish(self) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):  # the rest of the body has no reader
                super().finish()
        finally:
            self.server.service.track(self.request, False)
            with contextlib.suppress(OSError):
                self.request.close()

    def log_message(self, format: str, *args: object) -> None:
        """Tests look at `requests`."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, body)
        service = self.server.service
        self._send(service.reply_to(request), service)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - http.server's names

    def _send(self, reply: Reply, service: HttpService) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif "Content-Length" not in reply.headers and reply.status not in (204, 304):
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command == "HEAD":
            self.wfile.flush()
            return
        body = reply.body if reply.stop_after is None else reply.body[: reply.stop_after]
        if reply.pause_seconds:
            for piece in range(1, reply.pieces):
                at = len(body) // (reply.pieces - piece + 1)
                self.wfile.write(body[:at])
                self.wfile.flush()
                service.wait(reply.pause_seconds)
                body = body[at:]
        if reply.chunked:
            for at in range(0, len(body), 100_000):
                part = body[at : at + 100_000]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            if reply.stop_after is None:
                self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(body)
        self.wfile.flush()
        if reply.stop_after is not None or reply.reset:
            if reply.reset:
                self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
