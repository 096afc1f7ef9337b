"""One request to one peer: builds the request, interprets the response, and verifies every byte of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from typing_extensions import Buffer

from millrace.cluster.dataplane.connections import Connection, ConnectionPool
from millrace.cluster.dataplane.wire import (
    MAX_BODY_BYTES,
    SUM_BYTES,
    GetMode,
    ObjectDescription,
    ReplicaName,
    ReplicaPut,
    ResponseHead,
    Span,
    build_command,
    build_get,
    build_put,
    build_replica_get,
    build_replica_put,
    error_message,
    format_range,
    framed_bytes,
    pieces,
    sum_of,
)
from millrace.cluster.membership import WIRE_VERSION, Member
from millrace.config import SILENCE_SECONDS, WORKING_SECONDS, Tls
from millrace.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    PeerError,
    PeerRefusedError,
    PeerSilentError,
    WireError,
    shown_key,
)
from millrace.events import Event, emit, fetch_id

_MAX_JSON_BYTES = 64 << 20

_FIRST_BYTE = b"\r\nRange: bytes=0-0\r\n"
_MOST_REQUESTS = 1024

_CHANGED, _GONE = 409, 410

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PeerBytes:
    """The bytes of a range, and whether the owner marked them as hot."""

    data: memoryview
    hot: bool


class PeerClient:
    """Requests to all peers over persistent connections. Thread-safe, and usable after a fork: the child opens its own.

    Every method raises `PeerSilentError` if a peer cannot be reached, ends the connection, or is silent for `deadline`
    seconds, and `PeerRefusedError` with the status if it refuses. A connection that the peer ended while idle is replaced.
    """

    def __init__(self, *, token: str, tls: Tls | None = None) -> None:
        self._token = token
        self._pool = ConnectionPool(tls)
        self._requests: dict[tuple[object, ...], tuple[bytes, bytes]] = {}

    def read(
        self,
        member: Member,
        what: ObjectDescription,
        span: Span,
        *,
        mode: GetMode,
        rank: int = 0,
        deadline: float = SILENCE_SECONDS,
    ) -> PeerBytes:
        """The bytes of a range that is not empty, at most 64 MiB; each piece was verified against its checksum.

        `rank` is the number of members before this one in the order that did not respond. After wrong bytes, the peer is
        requested again, and verifies its disk first. Raises `ObjectChangedError` or `ObjectNotFoundError` if the origin
        returned that to the peer, and `PeerError` for bytes that are wrong twice.
        """
        self.require_version(member)
        for verify in (False, True):
            request = self._get(what, span, member.address, mode, rank, verify)
            data, hot, wrong = _receive(_Exchange(self._pool, member.address, [request], deadline), what, span)
            if not wrong:
                return PeerBytes(data, hot)
            _report_wrong(member, what, wrong)
        raise PeerError(f"{member.address}: sent wrong bytes of {shown_key(what.key)} twice")

    def put(self, member: Member, what: ObjectDescription, start: int, data: Buffer, *, deadline: float = 5.0) -> bool:
        """Send whole blocks, `data` from the byte `start` on, to a holder; returns whether it had space for them."""
        view = memoryview(data).cast("B")
        self.require_version(member)
        head = build_put(what, start, start + len(view), host=member.address, token=self._token)
        exchange = _Exchange(self._pool, member.address, _framed(head, start, view), deadline)
        head_received, body = exchange.response(MAX_BODY_BYTES)
        if head_received.status in (204, 507):
            return head_received.status == 204
        raise _refusal(member.address, head_received.status, body, what)

    def read_replica(self, member: Member, name: ReplicaName, span: Span, size: int, *, deadline: float) -> memoryview:
        """The bytes of a range of a replica's file of `size` bytes, at most 64 MiB, verified on arrival."""
        self.require_version(member)
        request = build_replica_get(name, span, host=member.address, token=self._token)
        what = ObjectDescription("replica", "/".join(name), "", size)
        data, _, wrong = _receive(_Exchange(self._pool, member.address, [request], deadline), what, span)
        if wrong:
            _report_wrong(member, what, wrong)
            raise PeerError(f"{member.address}: sent wrong bytes of {shown_key(what.key)}")
        return data

    def put_replica(self, member: Member, put: ReplicaPut, data: Buffer, *, deadline: float) -> None:
        """Send the bytes `[put.start, put.stop)` of a replica's file, which the peer verifies. May be repeated.

        Raises `PeerRefusedError`: with status 409 if the peer has another file of this name, 507 if it has no space.
        """
        self.require_version(member)
        head = build_replica_put(put, host=member.address, token=self._token)
        exchange = _Exchange(self._pool, member.address, _framed(head, put.start, data), deadline)
        head_received, body = exchange.response(MAX_BODY_BYTES)
        if head_received.status != 204:
            raise _refusal(member.address, head_received.status, body)

    def call(
        self,
        address: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        deadline: float = 5.0,
        working_seconds: float | None = None,
    ) -> Any:
        """Run a JSON command on the peer at `address` (`host:port`); returns its result.

        While the peer reports that it works, even on a disk that hangs, this waits longer than `deadline`: up to
        `working_seconds`, by default `WORKING_SECONDS`.
        """
        text = self.page(address, method, path, body, query=query, deadline=deadline, working_seconds=working_seconds)
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError) as error:
            raise PeerError(f"{address}: the response to {path} is not JSON") from error

    def page(
        self,
        address: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        deadline: float = 5.0,
        working_seconds: float | None = None,
    ) -> bytes:
        """As `call`, for a response of any type."""
        encoded = None if body is None else json.dumps(body).encode()
        waits = working_seconds != 0
        head = build_command(method, path, host=address, token=self._token, query=query, body=encoded, waits=waits)
        request = [head] if encoded is None else [head, encoded]
        # A kept connection may have ended, so only repeatable requests use one.
        exchange = _Exchange(
            self._pool,
            address,
            request,
            deadline,
            fresh=method not in ("GET", "PUT"),
            working_seconds=working_seconds,
        )
        head_received, text = exchange.response(_MAX_JSON_BYTES)
        if not 200 <= head_received.status < 300:
            raise _refusal(address, head_received.status, text)
        return text

    def _get(
        self,
        what: ObjectDescription,
        span: Span,
        address: str,
        mode: GetMode,
        rank: int,
        verify: bool,
    ) -> bytes:
        """The request for a range. Only the range and the fetch are built again in repeated requests for one object."""
        key = (what.object_id(), address, mode, rank, verify)
        cut = self._requests.get(key)
        if cut is None:
            request = build_get(
                what,
                (0, 1),
                host=address,
                token=self._token,
                mode=mode,
                rank=rank,
                verify=verify,
            )
            before, _, after = request.partition(_FIRST_BYTE)
            if len(self._requests) >= _MOST_REQUESTS:
                self._requests.clear()
            cut = self._requests[key] = before + b"\r\nRange: ", b"\r\n" + after
        varied = format_range(span)
        if mode is GetMode.FETCH and (found := fetch_id.get()):
            varied = f"{varied}\r\nMillrace-Fetch: {found}"
        return b"%b%b%b" % (cut[0], varied.encode("ascii"), cut[1])

    def require_version(self, member: Member) -> None:
        """Raises `PeerRefusedError` unless the member has this program's wire version."""
        if member.wire != WIRE_VERSION:
            raise PeerRefusedError(
                f"{member.address} has wire version {member.wire}, this program has version {WIRE_VERSION}",
                next_step="use the same version on all nodes",
            )

    def close(self) -> None:
        """Close all connections; requests in progress fail."""
        self._pool.close()


class _Exchange:
    """One request and its response on one connection. Any failure ends the connection."""

    def __init__(
        self,
        pool: ConnectionPool,
        address: str,
        request: Sequence[bytes | memoryview],
        deadline: float,
        *,
        fresh: bool = False,
        working_seconds: float | None = None,
    ) -> None:
        self._pool = pool
        self.address = address
        self._request = request
        self._deadline = deadline
        self._working_seconds = WORKING_SECONDS if working_seconds is None else working_seconds
        self._connection = self._send(fresh)

    def _send(self, fresh: bool) -> Connection:
        connection = self._pool.take(self.address, self._deadline, fresh=fresh)
        self._sent = time.monotonic()
        try:
            connection.send(self._request, self._deadline)
        except PeerSilentError:
            self._pool.discard(connection)
            if not connection.used:
                raise
            return self._send(True)
        return connection

    def head(self) -> ResponseHead:
        """The head of the response, after all interim ones."""
        connection = self._connection
        try:
            head = connection.receive_head()
        except PeerSilentError as error:
            self.fail()
            waited = isinstance(error.__cause__, TimeoutError | BlockingIOError)
            if not connection.used or connection.responded or connection.is_dropped or waited:
                raise
            # The peer ended an idle connection while this request was sent, which is not a failure.
            self._connection = connection = self._send(True)
            head = self._guarded(connection.receive_head)
        except BaseException:
            self.fail()
            raise
        while head.is_interim:
            if time.monotonic() - self._sent > self._working_seconds:
                self.fail()
                raise PeerSilentError(f"{self.address}: no response after {self._working_seconds:.0f} s of work")
            head = self._guarded(connection.receive_head)
        return head

    def length(self, head: ResponseHead) -> int:
        """The length of the body."""
        try:
            return head.length
        except WireError as error:
            self.fail()
            raise PeerError(f"{self.address}: not the response of a node: {error.message}") from error

    def body(self, head: ResponseHead, most: int) -> bytes:
        """The body of a response, at most `most` bytes; ends the exchange."""
        length = self.length(head)
        if length > most:
            self.fail()
            raise PeerError(f"{self.address}: a response of {length} bytes, more than {most}")
        received = bytearray(length)
        self.receive_into([memoryview(received)])
        self.done()
        return bytes(received)

    def response(self, most: int) -> tuple[ResponseHead, bytes]:
        """Head and body of the response; ends the exchange."""
        head = self.head()
        return head, self.body(head, most)

    def receive_into(self, buffers: Sequence[memoryview]) -> None:
        self._guarded(lambda: self._connection.receive_into(buffers))

    def done(self) -> None:
        """The response is complete: the connection can be reused."""
        if self._connection.at_end():
            self._pool.give(self._connection)
        else:
            self.fail()

    def fail(self) -> None:
        """Close the connection, whose next bytes are undefined."""
        self._pool.discard(self._connection)

    def _guarded(self, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except BaseException:
            self.fail()
            raise


def _framed(head: bytes, start: int, data: Buffer) -> list[bytes | memoryview]:
    """The parts of a request with a framed body, `data` from the byte `start` on."""
    view = memoryview(data).cast("B")
    request: list[bytes | memoryview] = [head]
    for first, stop in pieces(start, start + len(view)):
        piece = view[first - start : stop - start]
        request += [piece, sum_of(piece)]
    return request


def _receive(exchange: _Exchange, what: ObjectDescription, span: Span) -> tuple[memoryview, bool, list[Span]]:
    """The bytes, whether they are hot, and the pieces that are wrong."""
    head = exchange.head()
    if head.status != 206:
        body = exchange.body(head, MAX_BODY_BYTES)
        raise _refusal(exchange.address, head.status, body, what, lease=head.has_lease)
    if exchange.length(head) != framed_bytes(span):
        exchange.fail()
        raise PeerError(f"{exchange.address}: returned a wrong number of bytes of {shown_key(what.key)}")
    if not head.is_of(span, what.size):
        exchange.fail()
        raise PeerError(f"{exchange.address}: returned a wrong range of {shown_key(what.key)}")
    start, stop = span
    cut = list(pieces(start, stop))
    # Not zeroed first. The checksums are at the end; that of a single piece is received with the piece.
    received = memoryview(np.empty(stop - start + SUM_BYTES * len(cut), np.uint8).data)
    data, sums = received[: stop - start], received[stop - start :]
    framed = [
        (piece, data[piece[0] - start : piece[1] - start], sums[number * SUM_BYTES : (number + 1) * SUM_BYTES])
        for number, piece in enumerate(cut)
    ]
    if len(cut) == 1:
        exchange.receive_into([received])
    else:
        exchange.receive_into([buffer for _, part, checksum in framed for buffer in (part, checksum)])
    wrong = [piece for piece, part, checksum in framed if sum_of(part) != checksum]
    if wrong:
        exchange.fail()
    else:
        exchange.done()
    return data, head.is_hot, wrong


def _report_wrong(member: Member, what: ObjectDescription, wrong: Sequence[Span]) -> None:
    nbytes = sum(stop - start for start, stop in wrong)
    detail = f"{shown_key(what.key)}: wrong bytes from {wrong[0][0]} on"
    emit(Event(name="peer.corrupt", subject=member.address, nbytes=nbytes, detail=detail))


def _refusal(
    address: str, status: int, body: bytes, what: ObjectDescription | None = None, *, lease: bool = False
) -> Exception:
    message, code = error_message(body)
    name = "" if what is None else f"{what.origin.partition('+')[0]}://{what.key}"
    if what is not None and status == _CHANGED:
        return ObjectChangedError(f"{name} was overwritten, according to {address}", next_step="open it again")
    if what is not None and status == _GONE:
        return ObjectNotFoundError(f"{name} does not exist, according to {address}", next_step="check the name")
    error = PeerRefusedError(
        f"{address}: {message or f'status {status}'}",
        next_step="use the cluster's token" if status == 401 else "",
        status=status,
    )
    error.reason, error.has_lease = code, lease
    return error
