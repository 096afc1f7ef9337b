"""Connections to peers: blocking sockets that give up on silence, and a pool that keeps them open between requests."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence

from millrace.config import Tls, parse_addresses
from millrace.errors import ConfigurationError, PeerError, PeerSilentError, WireError
from millrace.peers.wire import MAX_HEAD_BYTES, ResponseHead, parse_framed_head, parse_response_head

_IDLE_CONNECTIONS = 32  # a peer: as many as a process has threads that fetch
_IDLE_SECONDS = 50.0  # the server ends a connection after 64 s
_FRESH_SECONDS = 0.5  # one that was just used is not looked at: should it have ended, it is replaced all the same

_HEAD_END = b"\r\n\r\n"
_RECEIVE_BYTES = 32 << 10  # a small answer arrives with its head, in one call
_LEAST_PROGRESS_BYTES = 64 << 10
_LOOKS = 4  # so often in a deadline does a thread that waits look at the clock
_BUFFERS = 64  # one call takes so many at most


class Connection:
    """One connection to a peer, for one request at a time; `drop` may be called from any thread.

    Everything else raises `PeerSilentError` when the peer is silent for the deadline given last, sends a body at less than
    64 KiB in that time, or breaks off; then the connection is of no use any more.
    """

    def __init__(self, address: str, context: ssl.SSLContext | None, deadline: float) -> None:
        self.address = address
        self.used = False
        """Whether an earlier request was answered on it."""
        self.answered = False
        """Whether anything has come since the last request was sent."""
        self.idle_since = 0.0
        # What came and was not taken yet lies in the chunk from `_begin` to `_end`.
        self._chunk = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._chunk)
        self._begin = self._end = 0
        self._deadline = 0.0
        self._last_head = 0.0  # when the peer last said that it is there, or was asked
        self.is_dropped = False
        host, port = _split(address)
        try:
            self._socket = socket.create_connection((host, port), timeout=deadline)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                self._socket = context.wrap_socket(self._socket)
        except ssl.SSLError as error:
            raise PeerSilentError(
                f"{address}: no TLS with this node: {error.reason or error}", next_step="check 'tls' on both sides"
            ) from error
        except UnicodeError as error:  # a host that cannot be one
            raise _no_address(address) from error
        except OSError as error:
            raise _silent(address, error) from error
        self._is_plain = context is None

    def fileno(self) -> int:
        """To wait for an answer with `select`; -1 once it is dropped."""
        return self._socket.fileno()

    def is_stale(self) -> bool:
        """Whether the peer has ended it, or sent what nobody asked for, while it was idle."""
        idle = time.monotonic() - self.idle_since
        if not _FRESH_SECONDS < idle < _IDLE_SECONDS:
            return idle >= _IDLE_SECONDS
        return self._is_plain and self.wait(0)  # with TLS there may be tickets, which say nothing

    def wait(self, seconds: float) -> bool:
        """Wait until something has come; whether it has."""
        if self._begin < self._end:
            return True
        if self._socket.fileno() < 0:
            return True  # dropped: whoever reads on will hear of it
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def send(self, request: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send a request, in parts."""
        self.answered = False
        self._begin = self._end = 0
        self._set_deadline(deadline)
        try:
            if len(request) == 1 or not self._is_plain:
                for part in request:
                    self._socket.sendall(part)
            else:
                self._send_parts(request)
        except OSError as error:
            raise _silent(self.address, error) from error
        self._last_head = time.monotonic()

    def receive_head(self) -> ResponseHead:
        """The next head. It must be there as a whole within the deadline, which begins with the request, or the head before.

        Raises `PeerError` when it is none.
        """
        until = self._last_head + self._deadline
        while (end := self._chunk.find(_HEAD_END, self._begin, self._end)) < 0:
            if self._end - self._begin >= MAX_HEAD_BYTES or (self._begin < self._end and time.monotonic() > until):
                raise PeerSilentError(f"{self.address}: the head of an answer does not end")
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
            raise PeerError(f"{self.address}: no answer of a node: {error.message}") from error

    def receive_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill all `buffers` (of bytes) with what comes, one after the other, without a copy of what has yet to come."""
        waiting = [buffer for buffer in buffers if len(buffer)]
        while waiting and self._begin < self._end:
            count = min(len(waiting[0]), self._end - self._begin)
            waiting[0][:count] = self._view[self._begin : self._begin + count]
            self._begin += count
            _advance(waiting, count)
        begun, came = time.monotonic(), 0
        now = begun
        while waiting:
            count = self._receive(waiting[:_BUFFERS], now + self._deadline)
            _advance(waiting, count)
            came += count
            now = time.monotonic()
            if now - begun > self._deadline:
                if waiting and came < _LEAST_PROGRESS_BYTES:
                    raise PeerSilentError(f"{self.address}: sent {came} bytes in {now - begun:.1f} s")
                begun, came = now, 0

    def at_end(self) -> bool:
        """Whether nothing has come beyond what was received: the next answer on it will be to the next request."""
        return self._begin == self._end

    def drop(self) -> None:
        """End it, whoever waits for it. Idempotent."""
        self.is_dropped = True
        with contextlib.suppress(OSError):  # it may not be connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back."""
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):  # there was a connection
            self._socket.close()

    # --- inside -----------------------------------------------------------------------------------

    def _set_deadline(self, deadline: float) -> None:
        if deadline == self._deadline:
            return
        self._deadline = deadline
        if not self._is_plain:
            self._socket.settimeout(deadline / _LOOKS)
            return
        # The kernel's own clock: one call waits and receives, where Python's would poll before each.
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(deadline / _LOOKS))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(deadline))

    def _receive(self, buffers: list[memoryview], until: float) -> int:
        """What comes first, into `buffers`; raises `PeerSilentError` when nothing does until then (monotonic)."""
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
                raise PeerSilentError(f"{self.address}: ended the connection")
            self.answered = True
            return count

    def _send_parts(self, request: Sequence[bytes | memoryview]) -> None:
        waiting = [memoryview(part).cast("B") for part in request if len(part)]
        while waiting:
            _advance(waiting, self._socket.sendmsg(waiting[:_BUFFERS]))


class ConnectionPool:
    """Connections to many peers, kept while they are idle. Thread-safe; a forked child makes its own."""

    def __init__(self, tls: Tls | None) -> None:
        self._context = None if tls is None else _context(tls)
        self._lock = threading.Lock()
        self._idle: defaultdict[str, list[Connection]] = defaultdict(list)
        self._next_sweep = 0.0
        # Weak: one whose request was given up without a word is closed, not kept.
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        _after_fork.add(self)

    def take(self, address: str, deadline: float, *, fresh: bool = False) -> Connection:
        """A connection to `host:port`; the caller gives it back or discards it. Raises `PeerSilentError`."""
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
        """Take back a connection whose answer was received as a whole."""
        connection.used = True
        connection.idle_since = time.monotonic()
        with self._lock:
            idle = self._idle[connection.address]
            # The one that is idle for longest is the first; it is looked at here since nobody takes it while others do.
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
        """Take out what is idle since before then, whoever it leads to: nobody asks for a member that has gone."""
        old = [each for kept in self._idle.values() for each in kept if each.idle_since < before]
        for each in old:
            self._idle[each.address].remove(each)
            if not self._idle[each.address]:
                del self._idle[each.address]
        return old

    def discard(self, connection: Connection) -> None:
        """End a connection that cannot be used again."""
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def idle_connections(self) -> int:
        """How many are kept now."""
        with self._lock:
            return sum(map(len, self._idle.values()))

    def close(self) -> None:
        """End all; requests under way fail. The pool may be used again."""
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
        """In a forked child: let go of the parent's connections, which go on there."""
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
    return PeerError(f"{address!r} is no address of a node", next_step="write host:port")


def _timeval(seconds: float) -> bytes:
    microseconds = max(1, int(seconds * 1e6))
    return struct.pack("@ll", microseconds // 1_000_000, microseconds % 1_000_000)


def _context(tls: Tls) -> ssl.SSLContext:
    """Both sides show a certificate of the cluster's own authority; addresses change, so names are not compared."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
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
    """Take what was sent or received off the front of `buffers`."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]


def _silent(address: str, error: OSError) -> PeerSilentError:
    if isinstance(error, TimeoutError | BlockingIOError):
        return PeerSilentError(f"{address}: silent for too long")
    return PeerSilentError(f"{address}: {error.strerror or error}")


_after_fork: weakref.WeakSet[ConnectionPool] = weakref.WeakSet()


def _let_go() -> None:
    for pool in _after_fork:
        pool._abandon()


os.register_at_fork(after_in_child=_let_go)
