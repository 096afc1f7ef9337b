"""Connections to peers: blocking sockets with deadlines, and a pool that keeps them open between requests."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence

from millrace.cluster.dataplane.wire import MAX_HEAD_BYTES, ResponseHead, parse_framed_head, parse_response_head
from millrace.config import Tls, parse_addresses
from millrace.errors import ConfigurationError, PeerError, PeerSilentError, WireError
from millrace.runtime import forks

_IDLE_CONNECTIONS = 32  # per peer: as many as a process has fetch threads
_IDLE_SECONDS = 50.0  # the server ends a connection after 64 s
_FRESH_SECONDS = (
    0.5  # a connection used within this time is not checked; if it has ended, the request is repeated on another
)

_HEAD_END = b"\r\n\r\n"
_RECEIVE_BYTES = 32 << 10  # a small response arrives with its head, in one call
_LEAST_PROGRESS_BYTES = 64 << 10
_CHECKS = 4  # per deadline, a waiting thread checks the clock this often
_BUFFERS = 64  # the most that one call accepts


class Connection:
    """One connection to a peer, for one request at a time. `drop` may be called from any thread.

    All other methods raise `PeerSilentError` if the peer is silent for the last given deadline, sends less than 64 KiB of a
    body in that time, or ends the connection. The connection cannot be used afterwards.
    """

    def __init__(self, address: str, context: ssl.SSLContext | None, deadline: float) -> None:
        self.address = address
        self.used = False
        """Whether an earlier request received its response on it."""
        self.responded = False
        """Whether any bytes have arrived since the last request was sent."""
        self.idle_since = 0.0
        # Received bytes that are not consumed yet: the chunk from `_begin` to `_end`.
        self._chunk = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._chunk)
        self._begin = self._end = 0
        self._deadline = 0.0
        self._last_head = 0.0  # time of the last head, or of the request
        self.is_dropped = False
        host, port = _split(address)
        try:
            self._socket = socket.create_connection((host, port), timeout=deadline)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                self._socket = context.wrap_socket(self._socket)
        except ssl.SSLError as error:
            raise PeerSilentError(
                f"{address}: TLS failed: {error.reason or error}", next_step="check 'tls' on both sides"
            ) from error
        except UnicodeError as error:  # an invalid host name
            raise _no_address(address) from error
        except OSError as error:
            raise _silent(address, error) from error
        self._is_plain = context is None

    def is_stale(self) -> bool:
        """Whether the peer ended it, or sent unexpected bytes, while it was idle."""
        idle = time.monotonic() - self.idle_since
        if not _FRESH_SECONDS < idle < _IDLE_SECONDS:
            return idle >= _IDLE_SECONDS
        if not self._is_plain:
            return False  # TLS session tickets may arrive at any time
        return self._has_arrived()

    def send(self, request: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send a request, in parts."""
        self.responded = False
        self._begin = self._end = 0
        self._set_deadline(deadline)
        try:
            if not self._is_plain:
                self._send_by_tls(request)
            elif len(request) == 1:
                self._socket.sendall(request[0])
            else:
                self._send_parts(request)
        except (ConnectionError, ssl.SSLEOFError):
            # A peer that refuses a request ends the connection without reading all of it: its response may have arrived.
            pass
        except OSError as error:
            raise _silent(self.address, error) from error
        self._last_head = time.monotonic()

    def receive_head(self) -> ResponseHead:
        """The next head. It must arrive completely within the deadline, which begins with the request or the previous head.

        Raises `PeerError` for a malformed head.
        """
        until = self._last_head + self._deadline
        while (end := self._chunk.find(_HEAD_END, self._begin, self._end)) < 0:
            if self._end - self._begin >= MAX_HEAD_BYTES or (self._begin < self._end and time.monotonic() > until):
                raise PeerSilentError(f"{self.address}: the head of a response does not end")
            if self._begin:
                rest = bytes(self._view[self._begin : self._end])
                self._begin, self._end = 0, len(rest)
                self._view[: len(rest)] = rest
            self._end += self._receive([self._view[self._end :]], until)
        head = bytes(self._view[self._begin : end + len(_HEAD_END)])
        self._begin += len(head)
        self._last_head = time.monotonic()
        try:
            return parse_framed_head(head) or parse_response_head(head)
        except WireError as error:
            raise PeerError(f"{self.address}: not the response of a node: {error.message}") from error

    def receive_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill all `buffers` (of bytes), one after the other. Only bytes that have already arrived are copied."""
        waiting = [buffer for buffer in buffers if len(buffer)]
        while waiting and self._begin < self._end:
            count = min(len(waiting[0]), self._end - self._begin)
            waiting[0][:count] = self._view[self._begin : self._begin + count]
            self._begin += count
            _advance(waiting, count)
        begun, received = time.monotonic(), 0
        now = begun
        while waiting:
            count = self._receive(waiting[:_BUFFERS], now + self._deadline)
            _advance(waiting, count)
            received += count
            now = time.monotonic()
            if now - begun > self._deadline:
                # If more has arrived, this process was stopped, and the peer was not slow.
                if waiting and received < _LEAST_PROGRESS_BYTES and not self._has_arrived():
                    raise PeerSilentError(f"{self.address}: sent {received} bytes in {now - begun:.1f} s")
                begun, received = now, 0

    def at_end(self) -> bool:
        """Whether all received bytes were consumed, so that the connection can be reused."""
        return self._begin == self._end

    def drop(self) -> None:
        """End the connection and wake threads that wait for it. Idempotent."""
        self.is_dropped = True
        with contextlib.suppress(OSError):  # already disconnected
            # That of a TLS socket also ends its TLS: a thread that uses it would receive, or send, unencrypted bytes.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor."""
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):  # the connection was established
            self._socket.close()

    # --- inside -----------------------------------------------------------------------------------

    def _set_deadline(self, deadline: float) -> None:
        if deadline == self._deadline:
            return
        self._deadline = deadline
        if not self._is_plain:
            return  # see `_send_by_tls`
        # The kernel's timeout: one call waits and receives. With Python's timeout there is a poll before each call.
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(deadline / _CHECKS))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(deadline))

    def _has_arrived(self) -> bool:
        """Whether bytes wait to be received, or the peer has ended the connection."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _receive(self, buffers: list[memoryview], until: float) -> int:
        """Receive the next bytes into `buffers`; raises `PeerSilentError` if none arrive before `until` (monotonic)."""
        while True:
            try:
                if not self._is_plain or len(buffers) == 1:
                    count = self._socket.recv_into(buffers[0])
                else:
                    count = self._socket.recvmsg_into(buffers)[0]
            except (TimeoutError, BlockingIOError) as error:
                if time.monotonic() < until:
                    continue
                raise _silent(self.address, error) from error
            except OSError as error:
                raise _silent(self.address, error) from error
            if not count:
                raise PeerSilentError(f"{self.address}: closed the connection")
            self.responded = True
            return count

    def _send_by_tls(self, request: Sequence[bytes | memoryview]) -> None:
        self._socket.settimeout(self._deadline)
        for part in request:
            self._socket.sendall(part)
        self._socket.settimeout(self._deadline / _CHECKS)

    def _send_parts(self, request: Sequence[bytes | memoryview]) -> None:
        waiting = [memoryview(part).cast("B") for part in request if len(part)]
        while waiting:
            _advance(waiting, self._socket.sendmsg(waiting[:_BUFFERS]))


class ConnectionPool:
    """Connections to all peers, kept open while they are idle. Thread-safe; a forked child opens its own."""

    def __init__(self, tls: Tls | None) -> None:
        self._context = None if tls is None else tls_context(tls, ssl.PROTOCOL_TLS_CLIENT)
        self._lock = threading.Lock()
        self._idle: defaultdict[str, list[Connection]] = defaultdict(list)
        self._next_sweep = 0.0
        # Weak: a connection whose request was dropped is closed, not kept.
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        _after_fork.add(self)

    def take(self, address: str, deadline: float, *, fresh: bool = False) -> Connection:
        """A connection to `host:port`, which the caller returns or discards. Raises `PeerSilentError`."""
        while not fresh:
            with self._lock:
                idle = self._idle.get(address)
                connection = idle.pop() if idle else None
            if connection is None:
                break
            if not connection.is_stale():
                return connection
            self.discard(connection)
        connection = Connection(address, self._context, deadline)
        with self._lock:
            self._open.add(connection)
        return connection

    def give(self, connection: Connection) -> None:
        """Take back a connection whose response was received completely."""
        connection.used = True
        connection.idle_since = time.monotonic()
        with self._lock:
            idle = self._idle[connection.address]
            # The first is the longest idle. It is checked here, because `take` uses the last.
            old = idle and connection.idle_since - idle[0].idle_since > _IDLE_SECONDS
            surplus = [idle.pop(0)] if old or len(idle) >= _IDLE_CONNECTIONS else []
            if connection in self._open:
                idle.append(connection)
            else:
                surplus.append(connection)
            if connection.idle_since >= self._next_sweep:
                self._next_sweep = connection.idle_since + _IDLE_SECONDS
                surplus += self._take_old(connection.idle_since - _IDLE_SECONDS)
        for each in surplus:
            self.discard(each)

    def _take_old(self, before: float) -> list[Connection]:
        """Remove the connections to any peer that are idle since before `before`: a peer may be gone for good."""
        old = [each for kept in self._idle.values() for each in kept if each.idle_since < before]
        for each in old:
            self._idle[each.address].remove(each)
            if not self._idle[each.address]:
                del self._idle[each.address]
        return old

    def discard(self, connection: Connection) -> None:
        """Close a connection that cannot be reused."""
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def close(self) -> None:
        """Close all connections; requests in progress fail. The pool can be used again."""
        with self._lock:
            idle = [connection for kept in self._idle.values() for connection in kept]
            busy = [connection for connection in self._open if connection not in idle]
            self._idle.clear()
            self._open.clear()
        for connection in busy:
            connection.drop()
        for connection in idle:
            connection.close()

    def _abandon(self) -> None:
        """In a forked child: close this copy of the parent's connections, which stay open there."""
        self._lock = threading.Lock()
        for connection in list(self._open):
            connection.close()
        self._open = weakref.WeakSet()
        self._idle = defaultdict(list)


def _split(address: str) -> tuple[str, int]:
    try:
        ((host, port),) = parse_addresses(address, option="a node's address")
    except (ConfigurationError, ValueError) as error:
        raise _no_address(address) from error
    return host, port


def _no_address(address: str) -> PeerError:
    return PeerError(f"{address!r} is not the address of a node", next_step="write host:port")


def timeval(seconds: float) -> bytes:
    """A time limit above 0 as the kernel expects it, `SO_RCVTIMEO` and `SO_SNDTIMEO`."""
    microseconds = max(1, int(seconds * 1e6))
    return struct.pack("@ll", microseconds // 1_000_000, microseconds % 1_000_000)


def tls_context(tls: Tls, protocol: int) -> ssl.SSLContext:
    """The context of a client or a server, by `protocol`. Raises `ConfigurationError` if the files cannot be used.

    Both sides present a certificate of the cluster's authority. Names are not compared, because addresses change.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:  # an SSLError is one
        raise ConfigurationError(
            f"tls: {tls.cert}, {tls.key} and {tls.ca} cannot be used: {error.strerror or error}",
            next_step="name a certificate, its key and the authority that signed it, all as PEM",
        ) from error
    return context


def _advance(buffers: list[memoryview], count: int) -> None:
    """Remove `count` sent or received bytes from the front of `buffers`."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]


def _silent(address: str, error: OSError) -> PeerSilentError:
    if isinstance(error, TimeoutError | BlockingIOError):
        return PeerSilentError(f"{address}: silent for too long")
    return PeerSilentError(f"{address}: {error.strerror or error}")


_after_fork = forks.objects_reset_in_child(ConnectionPool._abandon)
