"""One request to one peer: what to send, what its answer means, and that every byte is what the peer had checked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from typing_extensions import Buffer

from millrace.cache.blocks import BLOCK_BYTES
from millrace.config import Tls
from millrace.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    PeerError,
    PeerRefusedError,
    PeerSilentError,
    WireError,
)
from millrace.events import Event, emit
from millrace.members import WIRE_VERSIONS, Member
from millrace.peers.connections import Connection, ConnectionPool
from millrace.peers.wire import (
    MAX_BODY_BYTES,
    SUM_BYTES,
    Ask,
    ObjectDescription,
    ResponseHead,
    Span,
    build_command,
    build_get,
    build_head,
    build_put,
    error_message,
    format_ranges,
    framed_bytes,
    parse_blocks,
    pieces,
    sum_of,
)

READ_DEADLINE_SECONDS = 1.0
"""So long may a peer be silent while somebody waits for bytes."""

_WORKING_SECONDS = 180.0
"""So long may a peer say that it is still at work: an origin's client gives up before."""

_MAX_JSON_BYTES = 64 << 20

_FIRST_BYTE = b"\r\nRange: bytes=0-0\r\n"
_MOST_REQUESTS = 1024

_NOT_UNDERSTOOD, _CHANGED, _GONE = 400, 409, 410

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PeerBytes:
    """The bytes of all ranges that were asked for, one after the other, and whether the owner says that they are hot."""

    data: memoryview
    hot: bool


class PeerClient:
    """Requests to all peers, over connections that are kept. Thread-safe, and usable after a fork: the child opens its own.

    Every method raises `PeerSilentError` when a peer cannot be reached, breaks off, or is silent for `deadline` seconds, and
    `PeerRefusedError` with the status when it says no. A connection that the peer had ended while it was idle is replaced
    unseen.
    """

    def __init__(self, *, token: str, tls: Tls | None = None, wire: tuple[int, int] = WIRE_VERSIONS) -> None:
        self._token = token
        self._wire = wire
        self._pool = ConnectionPool(tls)
        self._requests: dict[tuple[object, ...], tuple[bytes, bytes]] = {}

    def read(
        self,
        member: Member,
        what: ObjectDescription,
        ranges: Sequence[Span],
        *,
        ask: Ask,
        rank: int = 0,
        view_version: str = "",
        verify: bool = False,
        deadline: float = READ_DEADLINE_SECONDS,
    ) -> PeerBytes:
        """The bytes of non-empty ranges, 64 MiB in all at most; each piece was checked against its checksum.

        `rank` says how many before this member in the order did not answer; `verify` has it check its disk first. Raises
        `ObjectChangedError` or `ObjectNotFoundError` when the peer heard so from the origin, and `PeerError` for bytes
        that are wrong twice.
        """
        singly = [[one] for one in ranges]

        def read_each(each: Sequence[Sequence[Span]]) -> list[PeerBytes]:
            return [
                self.begin(
                    member, what, some, ask=ask, rank=rank, view_version=view_version, verify=verify, deadline=deadline
                ).finish()
                for some in each
            ]

        if len(ranges) == 1 or self.wire_version(member) < 2:
            read = read_each(singly)
        else:
            try:
                read = read_each([ranges])
            except PeerRefusedError as error:
                if error.status != _NOT_UNDERSTOOD:
                    raise
                read = read_each(singly)  # a static member that is older than everybody takes it for
        if len(read) == 1:
            return read[0]
        return PeerBytes(memoryview(b"".join(one.data for one in read)), any(one.hot for one in read))

    def begin(
        self,
        member: Member,
        what: ObjectDescription,
        ranges: Sequence[Span],
        *,
        ask: Ask,
        rank: int = 0,
        view_version: str = "",
        verify: bool = False,
        deadline: float = READ_DEADLINE_SECONDS,
    ) -> Reading:
        """As `read`, only that the answer is waited for later; several ranges need a peer of wire version 2."""
        newest = self.wire_version(member)
        # In the oldest version that can say it: of a static member nobody knows which ones it speaks.
        wire = newest if len(ranges) > 1 else self._oldest(member)

        def request(verify: bool) -> bytes:
            return self._get(what, ranges, member.address, wire, ask, rank, view_version, verify)

        exchange = _Exchange(self._pool, member.address, [request(verify)], deadline)
        again = None if verify else lambda: _Exchange(self._pool, member.address, [request(True)], deadline)
        return Reading(member, what, ranges, exchange, again)

    def has(self, member: Member, what: ObjectDescription, *, deadline: float = READ_DEADLINE_SECONDS) -> list[range]:
        """The runs of blocks of an object that a peer has."""
        self.wire_version(member)
        request = build_head(what, host=member.address, token=self._token)
        exchange = _Exchange(self._pool, member.address, [request], deadline)
        head = exchange.head()
        exchange.done()  # an answer to HEAD has no body, whatever its length says
        if head.status == 404:
            return []
        if head.status != 200:
            raise _refusal(member.address, head.status, b"")
        try:
            return parse_blocks(head.headers.get("millrace-blocks", ""))
        except WireError as error:
            raise PeerError(f"{member.address}: no answer of a node: {error.message}") from error

    def put(self, member: Member, what: ObjectDescription, start: int, data: Buffer, *, deadline: float = 5.0) -> bool:
        """Give whole blocks to a holder, `data` from the byte `start` on; whether it had room for them."""
        view = memoryview(data).cast("B")
        head = build_put(
            what, start, start + len(view), host=member.address, token=self._token, wire=self._oldest(member)
        )
        request: list[bytes | memoryview] = [head]
        for first, stop in pieces(start, start + len(view)):
            piece = view[first - start : stop - start]
            request += [piece, sum_of(piece)]
        exchange = _Exchange(self._pool, member.address, request, deadline)
        answer, body = exchange.answer(MAX_BODY_BYTES)
        if answer.status in (204, 507):
            return answer.status == 204
        raise _refusal(member.address, answer.status, body, what)

    def call(
        self,
        member: Member,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        deadline: float = 5.0,
    ) -> Any:
        """Run a JSON command on a peer; gives what it answers."""
        return self.call_address(member.address, method, path, body, query=query, deadline=deadline)

    def call_address(
        self,
        address: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        deadline: float = 5.0,
    ) -> Any:
        """As `call`, of a node of which no more than `host:port` is known."""
        encoded = None if body is None else json.dumps(body).encode()
        head = build_command(method, path, host=address, token=self._token, query=query, body=encoded)
        request = [head] if encoded is None else [head, encoded]
        # Only what may be done twice goes over a connection that may have ended already.
        exchange = _Exchange(self._pool, address, request, deadline, fresh=method not in ("GET", "PUT"))
        answer, text = exchange.answer(_MAX_JSON_BYTES)
        if not 200 <= answer.status < 300:
            raise _refusal(address, answer.status, text)
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError) as error:
            raise PeerError(f"{address}: answered {path} with what is no JSON") from error

    def _oldest(self, member: Member) -> int:
        """The oldest version that both speak. Raises as `wire_version` does."""
        self.wire_version(member)
        return max(self._wire[0], member.wire[0])

    def _get(
        self,
        what: ObjectDescription,
        ranges: Sequence[Span],
        address: str,
        wire: int,
        ask: Ask,
        rank: int,
        view_version: str,
        verify: bool,
    ) -> bytes:
        """The request for ranges. A reader asks for one range of an object after the other: only that is made anew."""
        key = (what.object_id(), address, wire, ask, rank, view_version, verify)
        cut = self._requests.get(key)
        if cut is None:
            made = build_get(
                what,
                [(0, 1)],
                host=address,
                token=self._token,
                wire=wire,
                ask=ask,
                rank=rank,
                view_version=view_version,
                verify=verify,
            )
            before, _, after = made.partition(_FIRST_BYTE)
            if len(self._requests) >= _MOST_REQUESTS:
                self._requests.clear()
            cut = self._requests[key] = before + b"\r\nRange: ", b"\r\n" + after
        return b"%b%b%b" % (cut[0], format_ranges(ranges).encode("ascii"), cut[1])

    def wire_version(self, member: Member) -> int:
        """The newest version that both sides speak. Raises `PeerRefusedError` when there is none."""
        version = min(self._wire[1], member.wire[1])
        if version < max(self._wire[0], member.wire[0]):
            raise PeerRefusedError(
                f"{member.address} speaks the versions {member.wire[0]} to {member.wire[1]}, this program {self._wire[0]} "
                f"to {self._wire[1]}",
                next_step="upgrade the older one",
            )
        return version

    def idle_connections(self) -> int:
        """How many connections are kept open now."""
        return self._pool.idle_connections()

    def close(self) -> None:
        """End all connections; requests under way fail."""
        self._pool.close()


class Reading:
    """A read that was sent and not answered yet. For one thread; finish or drop it."""

    def __init__(
        self,
        member: Member,
        what: ObjectDescription,
        ranges: Sequence[Span],
        exchange: _Exchange,
        again: Callable[[], _Exchange] | None,
    ) -> None:
        self.member = member
        self._what = what
        self._ranges = ranges
        self._exchange = exchange
        self._again = again

    @property
    def seconds_to_answer(self) -> float | None:
        """How long the peer took to begin its answer; None when it had to fetch first, or has not begun."""
        return self._exchange.seconds_to_answer

    def fileno(self) -> int:
        """To wait for several with `select`."""
        return self._exchange.fileno()

    def wait(self, seconds: float) -> bool:
        """Wait until the peer has begun to answer; whether it has."""
        return self._exchange.wait(seconds)

    def finish(self) -> PeerBytes:
        """Receive and check the bytes. Raises what `PeerClient.read` does."""
        data, hot, wrong = self._receive()
        if wrong and self._again is not None:
            self._say(wrong)
            self._exchange = self._again()  # its disk is checked before it answers again
            data, hot, wrong = self._receive()
        if wrong:
            self._say(wrong)
            raise PeerError(f"{self.member.address}: sent wrong bytes of {self._what.key} twice")
        return PeerBytes(data, hot)

    def drop(self) -> None:
        """Give up waiting, and end the connection."""
        self._exchange.fail()

    def _receive(self) -> tuple[memoryview, bool, list[Span]]:
        """The bytes, whether they are hot, and the pieces that are wrong."""
        exchange, address = self._exchange, self.member.address
        head = exchange.head()
        if head.status != 206:
            body = exchange.body(head, MAX_BODY_BYTES)
            raise _refusal(address, head.status, body, self._what, lease=head.has_lease)
        if exchange.length(head) != framed_bytes(self._ranges):
            exchange.fail()
            raise PeerError(f"{address}: sent another number of bytes of {self._what.key} than it was asked for")
        if not head.is_of(self._ranges, self._what.size):
            exchange.fail()
            raise PeerError(f"{address}: sent another range of {self._what.key} than it was asked for")
        cut = list(_cut(self._ranges))
        total = cut[-1][1] + cut[-1][2]
        # Not set to zero before it is filled. The checksums come behind; that of a single piece in one go with it.
        received = memoryview(np.empty(total + SUM_BYTES * len(cut), np.uint8).data)
        data, sums = received[:total], received[total:]
        if len(cut) == 1:
            exchange.receive_into([received])
        else:
            buffers: list[memoryview] = []
            for number, (_, place, nbytes) in enumerate(cut):
                buffers += [data[place : place + nbytes], sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]]
            exchange.receive_into(buffers)
        wrong = [
            span
            for number, (span, place, nbytes) in enumerate(cut)
            if sum_of(data[place : place + nbytes]) != sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]
        ]
        if wrong:
            exchange.fail()
        else:
            exchange.done()
        return data, head.is_hot, wrong

    def _say(self, wrong: Sequence[Span]) -> None:
        emit(
            Event(
                name="peer.corrupt",
                subject=self.member.id,
                nbytes=sum(stop - start for start, stop in wrong),
                detail=f"{self._what.key}: wrong bytes from {wrong[0][0]} on",
            )
        )


class _Exchange:
    """One request and its answer on one connection. Whatever goes wrong ends the connection."""

    def __init__(
        self,
        pool: ConnectionPool,
        address: str,
        request: Sequence[bytes | memoryview],
        deadline: float,
        *,
        fresh: bool = False,
    ) -> None:
        self._pool = pool
        self._address = address
        self._request = request
        self._deadline = deadline
        self.seconds_to_answer: float | None = None
        self._connection = self._send(fresh)

    def _send(self, fresh: bool) -> Connection:
        connection = self._pool.take(self._address, self._deadline, fresh=fresh)
        self._sent = time.monotonic()
        try:
            connection.send(self._request, self._deadline)
        except PeerSilentError:
            self._pool.discard(connection)
            if not connection.used:
                raise
            return self._send(True)
        return connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def wait(self, seconds: float) -> bool:
        return self._connection.wait(seconds)

    def head(self) -> ResponseHead:
        """The head of the answer, after those that say that it is being worked on."""
        connection = self._connection
        try:
            head = connection.receive_head()
        except PeerSilentError as error:
            self.fail()
            waited = isinstance(error.__cause__, TimeoutError | BlockingIOError)
            if not connection.used or connection.answered or connection.is_dropped or waited:
                raise
            # The peer had ended a connection that was idle just when this request was sent: that says nothing of it.
            self._connection = connection = self._send(True)
            head = self._guarded(connection.receive_head)
        except BaseException:
            self.fail()
            raise
        if not head.is_interim:
            self.seconds_to_answer = time.monotonic() - self._sent
        while head.is_interim:
            if time.monotonic() - self._sent > _WORKING_SECONDS:
                self.fail()
                raise PeerSilentError(f"{self._address}: at work for more than {_WORKING_SECONDS:.0f} s")
            head = self._guarded(connection.receive_head)
        return head

    def length(self, head: ResponseHead) -> int:
        """Bytes of the body."""
        try:
            return head.length
        except WireError as error:
            self.fail()
            raise PeerError(f"{self._address}: no answer of a node: {error.message}") from error

    def body(self, head: ResponseHead, most: int) -> bytes:
        """The body of an answer, of `most` bytes at most; ends the exchange."""
        length = self.length(head)
        if length > most:
            self.fail()
            raise PeerError(f"{self._address}: sends {length} bytes where {most} are the most")
        received = bytearray(length)
        self.receive_into([memoryview(received)])
        self.done()
        return bytes(received)

    def answer(self, most: int) -> tuple[ResponseHead, bytes]:
        """Head and body of the answer; ends the exchange."""
        head = self.head()
        return head, self.body(head, most)

    def receive_into(self, buffers: Sequence[memoryview]) -> None:
        self._guarded(lambda: self._connection.receive_into(buffers))

    def done(self) -> None:
        """The answer is here as a whole: the connection may serve the next request."""
        if self._connection.at_end():
            self._pool.give(self._connection)
        else:
            self.fail()

    def fail(self) -> None:
        """End the connection: nobody knows what comes next on it."""
        self._pool.discard(self._connection)

    def _guarded(self, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except BaseException:
            self.fail()
            raise


def _cut(ranges: Sequence[Span]) -> Iterator[tuple[Span, int, int]]:
    """The pieces of a framed body: the span, where its bytes go, and how many they are."""
    place = 0
    for start, stop in ranges:
        for first, end in pieces(start, stop, BLOCK_BYTES):
            yield (first, end), place, end - first
            place += end - first


def _refusal(
    address: str, status: int, body: bytes, what: ObjectDescription | None = None, *, lease: bool = False
) -> Exception:
    message, code = error_message(body)
    name = "" if what is None else f"{what.origin.partition('+')[0]}://{what.key}"
    if what is not None and status == _CHANGED:
        return ObjectChangedError(f"{name} was overwritten, as {address} says", next_step="open it again")
    if what is not None and status == _GONE:
        return ObjectNotFoundError(f"{name} does not exist, as {address} says", next_step="check the name")
    error = PeerRefusedError(
        f"{address}: {message or f'answered {status}'}",
        next_step="give it the cluster's token" if status == 401 else "",
        status=status,
    )
    error.reason, error.has_lease = code, lease
    return error
