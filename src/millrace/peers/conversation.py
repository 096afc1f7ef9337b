"""One connection of the data plane's server: requests one after the other, each with the token, and their answers."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote

from millrace.errors import (
    ChangedError,
    DeniedError,
    MillraceError,
    MissingError,
    OriginUnavailableError,
    RetryableError,
    StorageError,
    UsageError,
    WireError,
)
from millrace.events import Event, emit
from millrace.peers import wire as protocol
from millrace.peers.answers import Answer, BrokenAnswerError, Content, Done, Exchange, Refusal
from millrace.peers.repeated import RepeatedRequests
from millrace.peers.transport import PlainTransport, Transport

_log = logging.getLogger("millrace")

BODY_SECONDS = 30.0
PROCESSING_SECONDS = 0.3
"""Who has to wait for an answer hears so often that somebody is at it."""


_MAX_QUERY_FIELDS = 32

_STATUS_OF: tuple[tuple[type[MillraceError], int], ...] = (
    (UsageError, 400),
    (DeniedError, 403),
    (MissingError, 404),
    (ChangedError, 409),
    (OriginUnavailableError, 502),
    (RetryableError, 503),
    (StorageError, 507),
)


class Blocks(Protocol):
    """Answers requests for blocks, see `serving.BlockService`. Thread-safe; raises `WireError` for a wrong request."""

    def get(self, get: protocol.Get, exchange: Exchange) -> Answer: ...

    def head(self, get: protocol.Get) -> Answer: ...

    def put(self, put: protocol.Put, exchange: Exchange) -> Answer: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A command as its handler sees it: what follows the route in the path, the query, and the JSON of the body, if any."""

    path_rest: str
    query: Mapping[str, str]
    body: Any


Handle = Callable[[Call], Any]
"""Does what a command says and gives a JSON value. Raises `MillraceError`, which the caller gets as one line."""


class Host(Protocol):
    """What a connection asks of its server. Thread-safe."""

    service: Blocks
    wire: tuple[int, int]
    address: str
    repeated: RepeatedRequests
    ended: threading.Event
    idle_seconds: float
    send_seconds: float
    head_seconds: float

    def secured(self, accepted: socket.socket) -> Transport: ...

    def forget(self, connection: Connection) -> None: ...

    def is_authorized(self, value: str) -> bool: ...

    def is_authorized_head(self, head: bytes) -> bool: ...

    def handler_of(self, method: str, path: str) -> tuple[Handle, str] | None: ...


class Connection:
    """One connection and its thread; an `Exchange` for the request under way."""

    def __init__(self, server: Host, accepted: socket.socket) -> None:
        self.accepted = accepted
        self.since = time.monotonic()
        """When the other side came, or from then on when its last request was answered."""
        self.trusted = False
        self.transport: Transport = PlainTransport(accepted, send_seconds=server.send_seconds)
        self.thread = threading.Thread(target=self._run, name="millrace-peer", daemon=True)
        self._server = server
        self._received = bytearray()
        self._idle = True
        self._interim = False
        self._last_interim = 0.0
        self._body_left = 0

    @property
    def is_spare(self) -> bool:
        """Whether nothing that a member has asked for would end with it."""
        return self._idle or not self.trusted

    def end_if_idle(self) -> None:
        """End it now unless a request is under way."""
        if self._idle:
            self.transport.shut_down()

    # --- what the maker of an answer asks for -------------------------------------------------------

    def processing(self) -> None:
        if self._server.ended.is_set():
            raise ConnectionAbortedError("the server ends")
        now = time.monotonic()
        if self._interim and now - self._last_interim >= 0.9 * PROCESSING_SECONDS:
            self._last_interim = now
            self.transport.send((protocol.PROCESSING,))

    def read_body(self, nbytes: int) -> bytearray:
        if nbytes > self._body_left:
            raise WireError("a body that ends too early")
        self._body_left -= nbytes
        body = self._received[:nbytes]
        del self._received[:nbytes]
        have = len(body)
        if have < nbytes:
            body.extend(bytes(nbytes - have))
            self.transport.wait_at_most(BODY_SECONDS)
            with memoryview(body) as view:
                while have < nbytes:
                    got = self.transport.receive_into(view[have:])
                    if not got:
                        raise ConnectionResetError("the body ended")
                    have += got
        return body

    # --- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.transport = self._server.secured(self.accepted)
            while not self._server.ended.is_set() and self._serve_one():
                pass
        except OSError:
            pass  # the other side is gone, too slow, or no member: there is nobody to tell
        except BrokenAnswerError as error:
            emit(Event(name="peer.answer.broken", subject=self._server.address, detail=str(error)))
        except Exception as error:  # noqa: BLE001 - one connection's end must not be the server's
            _log.exception("a defect in the data plane")
            emit(Event(name="peer.server.failed", subject=self._server.address, detail=repr(error)))
        finally:
            self._server.forget(self)
            self.transport.shut_down()  # a child that was forked just now may have the descriptor, too
            self.transport.close()
            self.accepted.close()

    def _serve_one(self) -> bool:
        """Answer the next request; gives whether another one may follow."""
        try:
            head = self._read_head()
            if head is None:
                return False
            get = self._server.repeated.find(head)
            if get is not None and self._server.is_authorized_head(head):
                return self._answer_again(get)
            request = protocol.parse_request(head)
            headers = request.headers
            if not self._server.is_authorized(headers.get("authorization", "")):
                return self._refuse_and_end(401)
            self.trusted = True
        except WireError as error:
            return self._refuse_and_end(error.status)
        self._interim = "millrace-wire" in headers
        self._last_interim = 0.0
        keep = headers.get("connection", "").lower() != "close"
        try:
            self._body_left = self._announced_body(request)
            if request.path.startswith(protocol.OBJECTS_PATH):
                self._answer_for_object(request, head)
            else:
                self._answer_command(request)
        except WireError as error:
            self._send_refusal(Refusal(status=error.status, message=str(error), code=error.code), request)
            keep = keep and error.status in (404, 405, 416, 421)
        except MillraceError as error:  # of whoever makes the answer: it ends this request, and nothing else
            self._send_refusal(Refusal(status=_status_of(error), message=str(error), code=error.code), request)
        if self._body_left:
            keep = False
        if not keep:
            self.transport.linger()
        return keep

    def _read_head(self) -> bytes | None:
        """The next head; None when the other side has ended. Raises `TimeoutError` when it does not come in time."""
        received = self._received
        end = protocol.head_bytes(received) if received else 0
        if not end:
            self._idle = not received
            if self.trusted:
                self.since = time.monotonic()
            self.transport.wait_at_most(self._server.idle_seconds if self.trusted else self._server.head_seconds)
            data = self.transport.receive()
            self._idle = False
            if not received and data.endswith(b"\r\n\r\n") and data.find(b"\r\n\r\n") == len(data) - 4:
                return data  # a head and no more, as nearly always
            until = time.monotonic() + self._server.head_seconds
            while True:
                if not data:
                    return None
                received += data
                end = protocol.head_bytes(received)
                if end:
                    break
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError("a head that does not end")
                self.transport.wait_at_most(left)
                data = self.transport.receive()
        head = bytes(memoryview(received)[:end])
        del received[:end]
        return head

    def _announced_body(self, request: protocol.Request) -> int:
        """How many bytes the request's body has. Raises `WireError` for one that is too large, or has no place there."""
        text = request.headers.get("content-length")
        nbytes = 0 if text is None else protocol.parse_number(text, "Content-Length")
        if nbytes and request.method in ("GET", "HEAD"):
            raise WireError(f"a {request.method} has no body")
        is_blocks = request.method == "PUT" and request.path.startswith(protocol.OBJECTS_PATH)
        if nbytes > protocol.MAX_BODY_BYTES and not is_blocks:
            raise WireError("a body that is too large", status=413)
        expected = request.headers.get("expect")
        if expected is not None:
            if expected.lower() != "100-continue":
                raise WireError("an expectation that is not known", status=417)
            if nbytes and not self._received:
                self.transport.send((protocol.build_response(100),))
        return nbytes

    # --- blocks -------------------------------------------------------------------------------------

    def _answer_for_object(self, request: protocol.Request, head: bytes) -> None:
        service = self._server.service
        if request.method in ("GET", "HEAD"):
            get = protocol.parse_get(request)
            oldest, newest = self._server.wire
            if get.wire and not oldest <= get.wire <= newest:
                raise WireError(f"Millrace-Wire {get.wire} is not spoken here, {oldest} to {newest} are")
            if request.method == "GET":
                self._server.repeated.keep(head, request, get)
                answer = service.get(get, self)
            else:
                answer = service.head(get)
        elif request.method == "PUT":
            answer = service.put(protocol.parse_put(request), self)
        else:
            raise WireError("an object is read with GET and HEAD, and brought with PUT", status=405)
        self._send_answer(answer, request)

    def _answer_again(self, get: protocol.Get) -> bool:
        """Answer a request that is like an earlier one; another one may follow."""
        self._interim, self._last_interim = True, 0.0
        try:
            answer = self._server.service.get(get, self)
        except MillraceError as error:
            status = error.status if isinstance(error, WireError) else _status_of(error)
            answer = Refusal(status=status, message=str(error), code=error.code)
        self._send_answer(answer, None)
        return True

    def _send_answer(self, answer: Answer, request: protocol.Request | None) -> None:
        if isinstance(answer, Content):
            head, parts = answer
            try:
                self.transport.send((head, *parts) if isinstance(parts, tuple) else _with_head(answer))
            except MillraceError as error:  # of what is made while it is sent: a refusal now would be taken for bytes
                raise BrokenAnswerError(str(error)) from error
        elif isinstance(answer, Refusal):
            self._send_refusal(answer, request)
        else:
            self._send_done(answer)

    def _send_done(self, done: Done) -> None:
        length = 0 if done.length is None and done.status != 204 else done.length
        self.transport.send((protocol.build_response(done.status, done.fields, length=length),))

    def _send_refusal(self, refusal: Refusal, request: protocol.Request | None) -> None:
        body = b""
        if (request is None or request.method != "HEAD") and refusal.message:
            body = protocol.error_body(refusal.message, refusal.code)
        head = protocol.build_response(refusal.status, refusal.fields, length=len(body))
        self.transport.send((head, body))

    def _refuse_and_end(self, status: int) -> bool:
        self.transport.send((protocol.build_response(status, [("Connection", "close")], length=0),))
        self.transport.linger()
        return False

    # --- commands -----------------------------------------------------------------------------------

    def _answer_command(self, request: protocol.Request) -> None:
        found = self._server.handler_of("GET" if request.method == "HEAD" else request.method, unquote(request.path))
        if found is None:
            raise WireError("there is nothing of this name", status=404)
        handle, rest = found
        call = Call(path_rest=rest, query=_parse_query(request.query), body=self._read_json())
        status, body = 200, b""
        outcome = self._outcome(handle, call)
        try:
            body = json.dumps(outcome.result()).encode()
        except MillraceError as error:
            status, body = _refused(error)
        except Exception as error:  # noqa: BLE001 - the caller has to hear of it, and the server goes on
            _log.exception("a defect in the command %s %s", request.method, request.path)
            status, body = 500, protocol.error_body(f"a defect: {error!r}", "error")
        head = protocol.build_response(status, [("Content-Type", "application/json")], length=len(body))
        self.transport.send((head,) if request.method == "HEAD" else (head, body))

    def _read_json(self) -> Any:
        if not self._body_left:
            return None
        body = self.read_body(self._body_left)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WireError("a body that is no JSON") from error

    def _outcome(self, handle: Handle, call: Call) -> Future[Any]:
        """What came of a handler; who understands that hears meanwhile that it is still at it."""
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(handle(call))
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                result.set_exception(error)

        if self._interim:
            threading.Thread(target=run, name="millrace-command", daemon=True).start()
            while not wait((result,), PROCESSING_SECONDS).done:
                self.processing()
        else:
            run()
        return result


def _with_head(content: Content) -> Any:
    yield content.head
    yield from content.parts


def _status_of(error: MillraceError) -> int:
    return next((status for cls, status in _STATUS_OF if isinstance(error, cls)), 500)


def _refused(error: MillraceError) -> tuple[int, bytes]:
    status = _status_of(error)
    return status, protocol.error_body(str(error), error.code)


def _parse_query(text: str) -> dict[str, str]:
    try:
        return dict(
            parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=_MAX_QUERY_FIELDS)
        )
    except ValueError as error:
        raise WireError("a query that cannot be read") from error
