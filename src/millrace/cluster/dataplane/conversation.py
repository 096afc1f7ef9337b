"""One connection of the data plane's server: requests one after the other, each with the token, and their responses."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote

from millrace.cluster.dataplane import wire as protocol
from millrace.cluster.dataplane.responses import BrokenResponseError, Content, Exchange, Refusal, Response
from millrace.cluster.dataplane.transport import PlainTransport, Transport
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

if TYPE_CHECKING:
    from millrace.cluster.dataplane.server import PlaneServer

_log = logging.getLogger("millrace.cluster")

BODY_SECONDS = 30.0
PROCESSING_SECONDS = 0.3
"""Interval of interim responses while a response is in progress."""


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
    """Responds to requests for blocks, see `serving.BlockService`. Thread-safe; raises `WireError` for a malformed one."""

    def get(self, get: protocol.Get, exchange: Exchange) -> Response: ...

    def put(self, put: protocol.Put, exchange: Exchange) -> Response: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A command for its handler: the rest of the path after the route, the query, and the JSON body, if any."""

    path_rest: str
    query: Mapping[str, str]
    body: Any


Handle = Callable[[Call], Any]
"""Executes a command and returns a JSON value. Raises `MillraceError`, which the client receives as one line."""


class Replicas(Protocol):
    """Responds to requests for files of replicas, see `replicas.ReplicaFiles`. Thread-safe."""

    def get(self, name: protocol.ReplicaName, span: protocol.Span) -> Response: ...

    def put(self, put: protocol.ReplicaPut, exchange: Exchange) -> Response: ...


class Page(NamedTuple):
    """What a browser or a monitor receives: a status, the type of the content, the content, and additional headers."""

    status: int
    content_type: str
    body: bytes
    fields: tuple[tuple[str, str], ...] = ()


MakePage = Callable[[], Page]
"""Returns a page. Thread-safe and fast: it may be called for a client without the token."""


class Connection:
    """One connection and its thread; also the `Exchange` of the request in progress."""

    def __init__(self, server: PlaneServer, accepted: socket.socket) -> None:
        self.accepted = accepted
        self.since = time.monotonic()
        """Time of the connect, then of the last response."""
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
        """Whether it can be closed without losing a member's request."""
        return self._idle or not self.trusted

    def end_if_idle(self) -> None:
        """Close it unless a request is in progress."""
        if self._idle:
            self.transport.shut_down()

    # --- Exchange -----------------------------------------------------------------------------------

    def processing(self) -> None:
        if self._server.ended.is_set():
            raise ConnectionAbortedError("the server stops")
        now = time.monotonic()
        if self._interim and now - self._last_interim >= 0.9 * PROCESSING_SECONDS:
            self._last_interim = now
            self.transport.send((protocol.PROCESSING,))

    def read_body(self, nbytes: int) -> bytearray:
        if nbytes > self._body_left:
            raise WireError("the body ends too early")
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
            pass  # the other side is gone, too slow, or not a member
        except BrokenResponseError as error:
            emit(Event(name="peer.answer.broken", subject=self._server.address, detail=str(error)))
        except Exception:  # noqa: BLE001 - an error in one connection must not end the server
            _log.exception("a defect in the data plane")
            emit(Event(name="peer.server.failed", subject=self._server.address))
        finally:
            self._server.remove(self)
            self.transport.shut_down()  # a child forked just now may have the descriptor, too
            self.transport.close()
            self.accepted.close()

    def _serve_one(self) -> bool:
        """Respond to the next request; returns whether another one may follow."""
        try:
            head = self._read_head()
            if head is None:
                return False
            get = self._server.repeated.find(head)
            if get is not None and self._server.is_authorized_head(head):
                return self._respond_again(get)
            request = protocol.parse_request(head)
            headers = request.headers
            if not self._server.is_authorized(headers.get("authorization", "")):
                return self._respond_without_token(request)
            self.trusted = True
        except WireError as error:
            return self._refuse_and_end(error.status)
        self._interim = "millrace-wire" in headers
        self._last_interim = 0.0
        keep = headers.get("connection", "").lower() != "close"
        try:
            self._body_left = self._announced_body(request)
            if request.path.startswith(protocol.OBJECTS_PATH):
                self._respond_with_object(request, head)
            elif request.path.startswith(protocol.REPLICA_FILES_PATH):
                self._respond_with_replica(request)
            else:
                self._respond_to_command(request)
        except WireError as error:
            self._send_refusal(Refusal(status=error.status, message=str(error), code=error.code), request)
            keep = keep and error.status in (404, 405, 416, 421)
        except MillraceError as error:  # of the handler: it ends this request only
            self._send_refusal(Refusal(status=_status_of(error), message=str(error), code=error.code), request)
        if self._body_left:
            keep = False
        if not keep:
            self.transport.linger()
        return keep

    def _read_head(self) -> bytes | None:
        """The next head; None if the other side closed. Raises `TimeoutError` if it does not arrive in time."""
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
                return data  # exactly one head: the usual case
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
                    raise TimeoutError("the head does not end")
                self.transport.wait_at_most(left)
                data = self.transport.receive()
        head = bytes(memoryview(received)[:end])
        del received[:end]
        return head

    def _announced_body(self, request: protocol.Request) -> int:
        """The length of the request's body. Raises `WireError` if it is too large, or not allowed."""
        text = request.headers.get("content-length")
        nbytes = 0 if text is None else protocol.parse_number(text, "Content-Length")
        if nbytes and request.method in ("GET", "HEAD"):
            raise WireError(f"{request.method} must not have a body")
        has_pieces = request.path.startswith((protocol.OBJECTS_PATH, protocol.REPLICA_FILES_PATH))
        most = protocol.MAX_ORDER_BYTES if request.path == protocol.LOAD_PATH else protocol.MAX_BODY_BYTES
        if nbytes > most and not (request.method == "PUT" and has_pieces):
            raise WireError("the body is too large", status=413)
        if "expect" in request.headers:
            raise WireError("Expect is not supported", status=417)
        return nbytes

    # --- blocks -------------------------------------------------------------------------------------

    def _respond_with_object(self, request: protocol.Request, head: bytes) -> None:
        service = self._server.service
        if request.method == "GET":
            get = protocol.parse_get(request)
            self._server.repeated.keep(head, request, get)
            response = service.get(get, self)
        elif request.method == "PUT":
            response = service.put(protocol.parse_put(request), self)
        else:
            raise WireError("objects support GET and PUT", status=405)
        self._send_response(response, request)

    def _respond_with_replica(self, request: protocol.Request) -> None:
        replicas = self._server.replicas
        if replicas is None:
            raise WireError("this node stores no replicas", status=404)
        if request.method == "GET":
            response = replicas.get(*protocol.parse_replica_get(request))
        elif request.method == "PUT":
            response = replicas.put(protocol.parse_replica_put(request), self)
        else:
            raise WireError("files of replicas support GET and PUT", status=405)
        self._send_response(response, request)

    def _respond_again(self, get: protocol.Get) -> bool:
        """Respond to a request that equals an earlier one except for its range and fetch."""
        self._interim, self._last_interim = True, 0.0
        try:
            response = self._server.service.get(get, self)
        except MillraceError as error:
            status = error.status if isinstance(error, WireError) else _status_of(error)
            response = Refusal(status=status, message=str(error), code=error.code)
        self._send_response(response, None)
        return True

    def _send_response(self, response: Response, request: protocol.Request | None) -> None:
        if isinstance(response, Content):
            head, parts = response
            try:
                self.transport.send((head, *parts) if isinstance(parts, tuple) else chain((head,), parts))
            except MillraceError as error:  # raised while sending: a refusal would be taken for content
                raise BrokenResponseError(str(error)) from error
        elif isinstance(response, Refusal):
            self._send_refusal(response, request)
        else:
            self.transport.send((protocol.build_response(204),))

    def _send_refusal(self, refusal: Refusal, request: protocol.Request | None) -> None:
        body = b""
        if (request is None or request.method != "HEAD") and refusal.message:
            body = protocol.error_body(refusal.message, refusal.code)
        head = protocol.build_response(refusal.status, refusal.fields, length=len(body))
        self.transport.send((head, body))

    def _respond_without_token(self, request: protocol.Request) -> bool:
        """Respond to a request without the token: with a public page, or with 401. Ends the connection."""
        page = self._server.page_of(request.path, authorized=False)
        if page is None or request.method not in ("GET", "HEAD"):
            return self._refuse_and_end(401)
        self._send_page(page, request, [("Connection", "close")])
        self.transport.linger()
        return False

    def _send_page(self, page: MakePage, request: protocol.Request, fields: list[tuple[str, str]]) -> None:
        try:
            status, content_type, body, more = page()
        except Exception:  # noqa: BLE001 - the client receives no detail, and the server continues
            _log.exception("a defect in the page %s", request.path)
            status, content_type, body, more = Page(500, "text/plain; charset=utf-8", b"error\n")
        head = protocol.build_response(status, [("Content-Type", content_type), *more, *fields], length=len(body))
        self.transport.send((head,) if request.method == "HEAD" else (head, body))

    def _refuse_and_end(self, status: int) -> bool:
        self.transport.send((protocol.build_response(status, [("Connection", "close")], length=0),))
        self.transport.linger()
        return False

    # --- commands -----------------------------------------------------------------------------------

    def _respond_to_command(self, request: protocol.Request) -> None:
        page = self._server.page_of(request.path, authorized=True)
        if page is not None and request.method in ("GET", "HEAD"):
            self._send_page(page, request, [])
            return
        found = self._server.handler_of("GET" if request.method == "HEAD" else request.method, unquote(request.path))
        if found is None:
            raise WireError("unknown path", status=404)
        handle, rest = found
        call = Call(path_rest=rest, query=_parse_query(request.query), body=self._read_json())
        status, body = 200, b""
        outcome = self._outcome(handle, call)
        try:
            body = json.dumps(outcome.result()).encode()
        except MillraceError as error:
            status, body = _status_of(error), protocol.error_body(str(error), error.code)
        except Exception as error:  # noqa: BLE001 - the client receives it, and the server continues
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
            raise WireError("the body is not JSON") from error

    def _outcome(self, handle: Handle, call: Call) -> Future[Any]:
        """The outcome of a handler. Sends interim responses while it runs, if the client supports them."""
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(handle(call))
            except BaseException as error:  # noqa: BLE001 - raised again by `result()`
                result.set_exception(error)

        if self._interim:
            threading.Thread(target=run, name="millrace-command", daemon=True).start()
            while not wait((result,), PROCESSING_SECONDS).done:
                self.processing()
        else:
            run()
        return result


def _status_of(error: MillraceError) -> int:
    return next((status for cls, status in _STATUS_OF if isinstance(error, cls)), 500)


def _parse_query(text: str) -> dict[str, str]:
    try:
        return dict(
            parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=_MAX_QUERY_FIELDS)
        )
    except ValueError as error:
        raise WireError("malformed query") from error


# --- repeated requests ------------------------------------------------------------------------------

# Parsing a head costs more than sending 64 KiB. Therefore a valid framed `GET` is kept under the bytes of its head without
# the lines `Range` and `Millrace-Fetch`. A later head with the same bytes is not parsed again.

_MAX_KEPT = 4096

_LINE = b"\r\nRange: bytes="
_RANGE = re.compile(rb"(\d{1,18})-(\d{1,18})\r\n(?:Millrace-Fetch: ([0-9a-f-]{1,40})\r\n)?")

# Requests with one of these headers need more than blocks.
_SPECIAL = frozenset(("connection", "content-length", "expect"))


class RepeatedRequests:
    """Recent requests of all connections of a server. Thread-safe. Contains whole heads, including tokens."""

    def __init__(self, *, max_kept: int = _MAX_KEPT) -> None:
        self._known: dict[bytes, protocol.Get] = {}
        self._max_kept = max_kept

    def __len__(self) -> int:
        return len(self._known)

    def find(self, head: bytes) -> protocol.Get | None:
        """The parsed request for a head that was kept with another range or fetch; None if it must be parsed."""
        place = head.find(_LINE)
        if place < 0:
            return None
        match = _RANGE.match(head, place + len(_LINE))
        if match is None:
            return None
        get = self._known.get(head[:place] + head[match.end() - 2 :])
        if get is None:
            return None
        start, stop = int(match[1]), int(match[2]) + 1
        if stop <= start:
            return None
        fetch_id = "" if match[3] is None else match[3].decode("ascii")
        return protocol.Get(get[0], (start, stop), get[2], get[3], get[4], get[5], fetch_id)

    def keep(self, head: bytes, request: protocol.Request, get: protocol.Get) -> None:
        """Keep a parsed request, if it is for a framed range and nothing else."""
        if _SPECIAL & request.headers.keys():
            return
        place = head.find(_LINE)
        match = None if place < 0 else _RANGE.match(head, place + len(_LINE))
        if match is None or (match[3] is None and "millrace-fetch" in request.headers):
            return
        if len(self._known) >= self._max_kept:
            self._known = {}
        self._known[head[:place] + head[match.end() - 2 :]] = get
