"""The data plane's server: connections, tokens, limits and commands. `cluster/serving.py` serves the cached blocks.

There is one thread per connection. With at most 512 connections this is cheaper than an event loop, and a thread that sends
a file does not hold the interpreter's lock. Nothing is processed before the token was compared. No path of a request
becomes the name of a file, except those of replicas, which are matched against patterns first (`wire.parse_replica_name`).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import socket
import ssl
import threading
import time
from collections import deque

from millrace.cluster.dataplane import wire as protocol
from millrace.cluster.dataplane.connections import tls_context
from millrace.cluster.dataplane.conversation import (
    Blocks,
    Call,
    Connection,
    Handle,
    MakePage,
    Page,
    RepeatedRequests,
    Replicas,
)
from millrace.cluster.dataplane.transport import PlainTransport, TlsTransport, Transport
from millrace.config import Tls
from millrace.errors import ConfigurationError, WireError
from millrace.events import Event, emit
from millrace.runtime import forks
from millrace.runtime.failures import reason_of

__all__ = ["Blocks", "Call", "Handle", "MakePage", "Page", "PlaneServer"]

MAX_CONNECTIONS = 512
IDLE_SECONDS = 64.0
SEND_SECONDS = 30.0
"""A client that accepts no byte for this long is disconnected."""
HEAD_SECONDS = 10.0
"""Longest time from the first byte of a head to its end; without a valid token yet, from the connect."""

_CLOSE_SECONDS = 1.0
_ROOM_SECONDS = 0.2  # for the end of a connection in favour of another
_BACKLOG = 512
_TURNED_AWAY = 64  # refused connections whose client may still read the response
_TURNED_AWAY_SECONDS = 1.0


class PlaneServer:
    """Serves the blocks of a node, and commands, on one address. Thread-safe; ends in a forked child.

    `port` 0 uses any free one, see `address`. With `tls`, both sides present certificates. Raises `ConfigurationError` if it
    cannot listen there, or the certificates are invalid.
    """

    def __init__(
        self,
        service: Blocks,
        *,
        host: str,
        port: int = 0,
        token: str,
        tls: Tls | None = None,
        max_connections: int = MAX_CONNECTIONS,
        idle_seconds: float = IDLE_SECONDS,
        send_seconds: float = SEND_SECONDS,
        head_seconds: float = HEAD_SECONDS,
    ) -> None:
        self.service = service
        self.replicas: Replicas | None = None
        self.idle_seconds = idle_seconds
        self.send_seconds = send_seconds
        self.head_seconds = head_seconds
        self._authorization = f"Bearer {token}".encode("latin-1")
        self._tls = None if tls is None else tls_context(tls, ssl.PROTOCOL_TLS_SERVER)
        self._max_connections = max_connections
        self.repeated = RepeatedRequests()
        self._routes: dict[tuple[str, str], Handle] = {}
        self._pages: dict[str, tuple[MakePage, bool]] = {}
        self._connections: set[Connection] = set()
        self._turned_away: deque[tuple[float, socket.socket]] = deque(maxlen=_TURNED_AWAY)
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self._acceptor: threading.Thread | None = None
        self._listener = _listen(host, port)
        found = self._listener.getsockname()
        self.address = f"[{found[0]}]:{found[1]}" if ":" in found[0] else f"{found[0]}:{found[1]}"
        _servers.add(self)

    def route(self, method: str, path: str, handle: Handle) -> None:
        """Call `handle` for `method` of `path` and of everything below it. The longest matching route holds."""
        self._routes[method, path.rstrip("/")] = handle

    def page(self, path: str, page: MakePage, *, public: bool = False) -> None:
        """Respond to GET of exactly `path` with `page()`. Only a `public` one is served without the token."""
        self._pages[path] = (page, public)

    def start(self) -> None:
        """Start to accept connections."""
        self._acceptor = threading.Thread(target=self._accept, name="millrace-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Stop accepting; requests in progress have a second to end. Idempotent."""
        with self._lock:
            if self.ended.is_set():
                return
            self.ended.set()
            connections = list(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor is not None:
            self._acceptor.join(_CLOSE_SECONDS)
        self._listener.close()
        until = time.monotonic() + _CLOSE_SECONDS
        for connection in connections:
            connection.end_if_idle()
        for connection in connections:
            connection.thread.join(max(0.0, until - time.monotonic()))
        for connection in connections:
            connection.transport.shut_down()
        for connection in connections:
            connection.thread.join(max(0.1, until - time.monotonic()))
        self.service.close()
        self._close_turned_away(everyone=True)

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    # --- connections ------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self.ended.is_set():
            self._listener.settimeout(_TURNED_AWAY_SECONDS if self._turned_away else None)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._close_turned_away()
                continue
            except OSError as error:
                if self.ended.is_set():
                    return
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    emit(Event(name="peer.server.exhausted", subject=self.address, detail=reason_of(error)))
                    time.sleep(0.1)  # wait until some are closed
                continue
            self._close_turned_away()
            try:
                self._take(connection)
            except Exception as error:  # noqa: BLE001 - no thread or no memory: only this connection ends
                emit(Event(name="peer.server.exhausted", subject=self.address, detail=reason_of(error)))
                connection.close()

    def _take(self, accepted: socket.socket) -> None:
        if len(self._connections) >= self._max_connections and not self._make_room():
            self._turn_away(accepted)
            return
        connection = Connection(self, accepted)
        with self._lock:
            if self.ended.is_set():
                connection.transport.shut_down()
                accepted.close()
                return
            self._connections.add(connection)
        try:
            connection.thread.start()
        except RuntimeError:
            self.remove(connection)
            raise

    def _make_room(self) -> bool:
        """Close a connection without a token for a second, or else the longest idle one.

        A client whose idle connection was closed opens another and repeats its request.
        """
        now = time.monotonic()
        with self._lock:
            spare = [each for each in self._connections if each.is_spare and now - each.since >= 1.0]
        if not spare:
            return False
        oldest = min(spare, key=lambda each: (each.trusted, each.since))
        oldest.transport.shut_down()
        oldest.thread.join(_ROOM_SECONDS)
        return len(self._connections) < self._max_connections

    def _turn_away(self, accepted: socket.socket) -> None:
        """Refuse a connection with 503, without waiting, and leave the client time to read it."""
        if self._tls is not None:
            accepted.close()
            return
        accepted.setblocking(False)
        with contextlib.suppress(OSError):
            accepted.send(protocol.build_response(503, [("Connection", "close")], length=0))
            accepted.shutdown(socket.SHUT_WR)
        if len(self._turned_away) == self._turned_away.maxlen:
            self._turned_away[0][1].close()
        self._turned_away.append((time.monotonic() + _TURNED_AWAY_SECONDS, accepted))

    def _close_turned_away(self, *, everyone: bool = False) -> None:
        now = time.monotonic()
        while self._turned_away and (everyone or self._turned_away[0][0] < now):
            self._turned_away.popleft()[1].close()

    def remove(self, connection: Connection) -> None:
        """Remove an ended connection."""
        with self._lock:
            self._connections.discard(connection)

    def secured(self, accepted: socket.socket) -> Transport:
        """The transport of a connection; with TLS, the handshake is part of the first `receive`. Raises `OSError`."""
        if self._tls is None:
            return PlainTransport(accepted, send_seconds=self.send_seconds)
        # No handshake here: until this returns, the connection of a silent client could not be closed.
        secured = self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        return TlsTransport(secured, send_seconds=self.send_seconds)

    def is_authorized(self, value: str) -> bool:
        """Whether the header `Authorization` contains the token. Takes constant time."""
        return hmac.compare_digest(value.encode("latin-1"), self._authorization)

    def is_authorized_head(self, head: bytes) -> bool:
        """`is_authorized` for a head in the exact form of our own client."""
        start = head.find(b"\r\nAuthorization: ") + 17
        return start > 16 and hmac.compare_digest(head[start : head.find(b"\r\n", start)], self._authorization)

    def page_of(self, path: str, *, authorized: bool) -> MakePage | None:
        """The page at `path` for a request with or without the token."""
        page, public = self._pages.get(path, (None, False))
        return page if authorized or public else None

    def handler_of(self, method: str, path: str) -> tuple[Handle, str] | None:
        """The handler of a command and the rest of its path. Raises `WireError` if the path has other methods only."""
        prefix, rest = path.rstrip("/"), ""
        while prefix:
            handle = self._routes.get((method, prefix))
            if handle is not None:
                return handle, rest
            if any(known == prefix for _, known in self._routes):
                raise WireError(f"{prefix} does not support {method}", status=405)
            prefix, _, last = prefix.rpartition("/")
            rest = f"{last}/{rest}" if rest else last
        return None

    def abandon(self) -> None:
        """In a forked child: close this copy of the parent's sockets, so that they end with the parent."""
        # Threads of the parent may have held the old locks.
        self._lock, self.ended = threading.Lock(), threading.Event()
        self.ended.set()
        self._listener.close()
        for connection in self._connections:
            connection.transport.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            next_step="stop the program that listens there, or choose another port"
            if in_use
            else "name an address of this machine",
        ) from error
    return listener


_servers = forks.objects_reset_in_child(PlaneServer.abandon)
