"""etcd's HTTP and JSON gateway (`/v3/...`, etcd 3.4 and newer), as far as members need it.

A request goes to the first endpoint that responds. Each request has a connection of its own.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any, Self, TypeVar

from urllib3 import BaseHTTPResponse
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, ReadTimeoutError

from millrace.errors import ConfigurationError, MillraceError, OriginUnavailableError

_T = TypeVar("_T")

_LONGEST_LINE = 64 << 20
_RECEIVE_BYTES = 64 << 10

# gRPC statuses after which another endpoint may succeed: unknown, deadline exceeded, resource exhausted, internal,
# unavailable (also: no leader).
_TRY_ANOTHER = (2, 4, 8, 13, 14)

NOT_FOUND = 5


class EtcdRefusedError(ConfigurationError):
    """etcd refused the request. `status` is the gRPC status."""

    code = "etcd-refused"
    status = 0


class EtcdDownError(OriginUnavailableError):
    """No endpoint responds, or none can handle the request now."""

    code = "etcd-down"


class EtcdGateway:
    """Requests to an etcd cluster. Thread-safe.

    `timeout_seconds` is the longest silence of one endpoint. `requests` counts the requests sent.
    """

    def __init__(self, endpoints: Sequence[tuple[str, int]], *, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.requests = 0
        self._endpoints = tuple(endpoints)
        self._first = 0  # the endpoint that responded last
        self._counting = threading.Lock()

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The response to one request; of a stream the first. Raises `EtcdRefusedError`, `EtcdDownError`."""

        def request(endpoint: tuple[str, int]) -> dict[str, Any]:
            with EtcdStream(endpoint, path, body, self.timeout_seconds) as stream:
                response = stream.next(self.timeout_seconds)
            if response is None:
                raise EtcdDownError(f"etcd at {stream.name}: timed out")
            return response

        return self._first_success(request)

    def stream(self, path: str, body: Mapping[str, Any]) -> EtcdStream:
        """An open stream of responses, which the caller closes. Raises as `call` does."""
        return self._first_success(lambda endpoint: EtcdStream(endpoint, path, body, self.timeout_seconds))

    def _first_success(self, request: Callable[[tuple[str, int]], _T]) -> _T:
        """The result from the first endpoint that succeeds, starting with the one that did so last."""
        failures = []
        first = self._first
        for offset in range(len(self._endpoints)):
            place = (first + offset) % len(self._endpoints)
            with self._counting:
                self.requests += 1
            try:
                result = request(self._endpoints[place])
            except EtcdDownError as error:
                failures.append(error.message)
            else:
                self._first = place
                return result
        raise EtcdDownError("; ".join(failures), next_step="check that etcd runs and can be reached")


class EtcdStream:
    """The responses to one request, one per line of an HTTP body. For one thread, except `interrupt`."""

    def __init__(self, endpoint: tuple[str, int], path: str, body: Mapping[str, Any], timeout_seconds: float) -> None:
        """Connects, sends the request, and reads the head of the response. Raises `EtcdRefusedError`, `EtcdDownError`."""
        self.name = f"{endpoint[0]}:{endpoint[1]}"
        keepalive = (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = [*HTTPConnection.default_socket_options, keepalive]
        self._response: BaseHTTPResponse | None = None
        self._connection = HTTPConnection(*endpoint, timeout=timeout_seconds, socket_options=options)
        try:
            with self._errors():
                self._connection.request("POST", path, body=json.dumps(body).encode(), preload_content=False)
                self._socket = self._connection.sock
                response = self._response = self._connection.getresponse()
                self._lines = _lines(response)
                if response.status != 200:
                    self._refuse(response.status, next(self._lines, b""))
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises errors of HTTP, of the network and of parsing as `EtcdDownError`."""
        try:
            yield
        except MillraceError:
            raise  # some are ValueErrors or OSErrors
        except (HTTPError, HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise EtcdDownError(f"etcd at {self.name}: {reason}") from error

    def _refuse(self, status: int, line: bytes) -> None:
        """Raise the error that a status other than 200 stands for."""
        try:
            body = json.loads(line)
            code, message = int(body["code"]), str(body.get("message") or body.get("error"))
        except (ValueError, KeyError, TypeError):
            if status >= 500:  # of a proxy
                raise EtcdDownError(f"etcd at {self.name}: HTTP {status}") from None
            raise EtcdRefusedError(
                f"{self.name}: the server is not etcd (HTTP {status})",
                next_step="name the client port of etcd 3.4 or newer, without TLS",
            ) from None
        self._raise(code, message)

    def _raise(self, code: int, message: str) -> None:
        if code in _TRY_ANOTHER:
            raise EtcdDownError(f"etcd at {self.name}: {message}")
        error = EtcdRefusedError(f"etcd at {self.name} refuses: {message}", next_step="check its configuration")
        error.status = code
        raise error

    def next(self, timeout_seconds: float) -> dict[str, Any] | None:
        """The next response; None if none arrived in time, after which the stream is of no further use.

        Raises `EtcdDownError` at the end of the stream, `EtcdRefusedError`.
        """
        with self._errors():
            self._socket.settimeout(max(0.001, timeout_seconds))
            try:
                line = next(self._lines)
            except ReadTimeoutError:
                return None
            except StopIteration:
                raise ValueError("it closed the stream") from None
            response = json.loads(line)
            if not isinstance(response, dict):
                raise ValueError("the response is not a JSON object")
        if "error" in response:  # inside a stream
            error: dict[str, Any] = response["error"] if isinstance(response["error"], dict) else response
            code = error.get("grpc_code", error.get("code"))
            self._raise(code if isinstance(code, int) else 2, str(error.get("message", "")))
        return response

    def interrupt(self) -> None:
        """Called by another thread: ends a `next` in progress and every later one."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lines(response: BaseHTTPResponse) -> Iterator[bytes]:
    """The lines of a body as they arrive, without empty ones. Raises `ValueError` for one of more than 64 MiB."""
    rest = b""
    for data in response.stream(_RECEIVE_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        yield from (line for line in lines if line.strip())
        if len(rest) > _LONGEST_LINE:
            raise ValueError("a response of more than 64 MiB")
    if rest.strip():
        yield rest


def encode(text: str | bytes) -> str:
    """Bytes as the gateway expects them."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode("ascii")


def decode(text: Any) -> bytes:
    """The reverse of `encode`; None, which stands for an empty value, returns empty bytes. Raises `ValueError`."""
    return base64.b64decode(text or "", validate=True)


def prefix_range(prefix: str) -> dict[str, str]:
    """The range of all keys that begin with `prefix`, whose last character must not be the last of ASCII."""
    return {"key": encode(prefix), "range_end": encode(prefix[:-1] + chr(ord(prefix[-1]) + 1))}
