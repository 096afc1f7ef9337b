"""etcd's HTTP and JSON gateway (`/v3/...`, etcd 3.4 and newer): one request, or one stream of answers, to the first endpoint
that answers. No more of it than members need.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from millrace.errors import ConfigurationError, MillraceError, OriginUnavailableError

_T = TypeVar("_T")

_LONGEST_HEAD = 64 << 10
_LONGEST_LINE = 64 << 20
_RECEIVE_BYTES = 64 << 10

# What a gRPC status says of another endpoint: it may be able to. Unknown, deadline exceeded, resource exhausted, internal,
# unavailable (also: no leader).
_ELSEWHERE = (2, 4, 8, 13, 14)

NOT_FOUND = 5


class EtcdRefusedError(ConfigurationError):
    """etcd answered, and said no. `status` is that of gRPC."""

    code = "etcd-refused"
    status = 0


class EtcdDownError(OriginUnavailableError):
    """No endpoint answers, or none can do it now."""

    code = "etcd-down"


class EtcdGateway:
    """Requests to a cluster of etcd. Thread-safe: each request has a connection of its own.

    `timeout_seconds` is how long one endpoint may be silent. `requests` counts what was sent.
    """

    def __init__(self, endpoints: Sequence[tuple[str, int]], *, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.requests = 0
        self._endpoints = tuple(endpoints)
        self._first = 0  # who answered last
        self._counting = threading.Lock()

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request; of a stream its first. Raises `EtcdRefusedError`, `EtcdDownError`."""

        def ask(stream: EtcdStream) -> dict[str, Any]:
            with stream:
                stream.open(path, json.dumps(body).encode(), self.timeout_seconds)
                answer = stream.next(self.timeout_seconds)
            if answer is None:
                raise EtcdDownError(f"etcd at {stream.name}: timed out")
            return answer

        return self._first_that_can(ask)

    def stream(self, path: str, body: Mapping[str, Any]) -> EtcdStream:
        """An open stream of answers, which the caller closes. Raises as `call` does."""

        def ask(stream: EtcdStream) -> EtcdStream:
            try:
                stream.open(path, json.dumps(body).encode(), self.timeout_seconds)
            except BaseException:
                stream.close()
                raise
            return stream

        return self._first_that_can(ask)

    def _first_that_can(self, ask: Callable[[EtcdStream], _T]) -> _T:
        """What one endpoint answers: first the one that did so last."""
        failures = []
        first = self._first
        for turn in range(len(self._endpoints)):
            place = (first + turn) % len(self._endpoints)
            with self._counting:
                self.requests += 1
            try:
                answer = ask(EtcdStream(self._endpoints[place]))
            except EtcdDownError as error:
                failures.append(error.message)
            else:
                self._first = place
                return answer
        raise EtcdDownError("; ".join(failures), next_step="check that etcd runs and can be reached")


class EtcdStream:
    """Answers to one request, as they come. For one thread, but for `interrupt`."""

    def __init__(self, endpoint: tuple[str, int]) -> None:
        self.name = f"{endpoint[0]}:{endpoint[1]}"
        self._endpoint = endpoint
        self._socket: socket.socket | None = None
        self._lines = LineDecoder()
        self._answers: deque[bytes] = deque()

    def open(self, path: str, content: bytes, timeout_seconds: float) -> None:
        """Connect, send, and read the head of the answer."""
        host, port = self._endpoint
        try:
            self._socket = socket.create_connection((host, port), timeout=timeout_seconds)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {self.name}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
            )
            self._socket.sendall(head.encode("ascii") + content)
            self._read_head(time.monotonic() + timeout_seconds)
        except MillraceError:
            raise  # among them are ValueErrors and OSErrors
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise EtcdDownError(f"etcd at {self.name}: {reason}") from error

    def _read_head(self, deadline: float) -> None:
        received = b""
        while b"\r\n\r\n" not in received:
            data = self._receive(deadline - time.monotonic())
            if data is None:
                raise ValueError("timed out")
            if not data:
                raise ValueError("it closed the connection")
            received += data
            if len(received) > _LONGEST_HEAD:
                raise ValueError("the answer is no HTTP")
        head, _, body = received.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = status.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError("the answer is no HTTP")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._lines = LineDecoder(
            chunked=fields.get("transfer-encoding", "").lower() == "chunked",
            length=int(fields.get("content-length", "-1")),
        )
        self._answers.extend(self._lines.feed(body))
        if rest[:3] != "200":
            self._refuse(rest[:3], deadline)

    def _refuse(self, status: str, deadline: float) -> None:
        """Raise what an answer other than 200 means."""
        while not self._answers and not self._lines.finished and (data := self._receive(deadline - time.monotonic())):
            self._answers.extend(self._lines.feed(data))
        text = self._answers[0] if self._answers else b""
        try:
            said = json.loads(text)
            code, message = int(said["code"]), str(said.get("message") or said.get("error"))
        except (ValueError, KeyError, TypeError):
            if status.startswith("5"):  # of something between us
                raise EtcdDownError(f"etcd at {self.name}: HTTP {status}") from None
            raise EtcdRefusedError(
                f"what answers at {self.name} is not etcd (HTTP {status})",
                next_step="name the client port of etcd 3.4 or newer, without TLS",
            ) from None
        self._raise(code, message)

    def _raise(self, code: int, message: str) -> None:
        if code in _ELSEWHERE:
            raise EtcdDownError(f"etcd at {self.name}: {message}")
        error = EtcdRefusedError(f"etcd at {self.name} refuses: {message}", next_step="check its configuration")
        error.status = code
        raise error

    def next(self, timeout_seconds: float) -> dict[str, Any] | None:
        """The next answer; None when none came in time. Raises `EtcdDownError` at the end, `EtcdRefusedError`."""
        deadline = time.monotonic() + timeout_seconds
        try:
            while not self._answers:
                if self._lines.finished:
                    raise ValueError("it ended its answer")
                data = self._receive(max(0.0, deadline - time.monotonic()))
                if data is None:
                    return None
                if not data:
                    self._answers.extend(self._lines.end())
                else:
                    self._answers.extend(self._lines.feed(data))
            answer = json.loads(self._answers.popleft())
            if not isinstance(answer, dict):
                raise ValueError("the answer is no JSON object")
        except (OSError, ValueError) as error:
            raise EtcdDownError(f"etcd at {self.name}: {error}") from error
        if "error" in answer:  # inside a stream
            said: dict[str, Any] = answer["error"] if isinstance(answer["error"], dict) else answer
            self._raise(_status(said.get("grpc_code", said.get("code"))), str(said.get("message", "")))
        return answer

    def _receive(self, timeout_seconds: float) -> bytes | None:
        """What has arrived; empty at the end, None when nothing did in time."""
        if self._socket is None:
            return b""
        self._socket.settimeout(max(0.001, timeout_seconds))
        try:
            return self._socket.recv(_RECEIVE_BYTES)
        except TimeoutError:
            return None

    def interrupt(self) -> None:
        """By another thread: have a `next` under way end, and every later one."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the other side was quicker
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LineDecoder:
    """The lines of an HTTP body, chunked or not, from pieces of any size. `length` is what its head says, or -1."""

    def __init__(self, *, chunked: bool = False, length: int = -1) -> None:
        self.finished = length == 0 and not chunked
        self._chunked = chunked
        self._left = length  # of the body, or of the present chunk
        self._raw = bytearray()
        self._text = bytearray()
        if chunked:
            self._left = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Lines that are complete now; the last one also without an end where the body ends. Raises `ValueError`."""
        if not self._chunked:
            self._text += data
            if self._left >= 0:
                self._left -= len(data)
                self.finished = self._left <= 0
        else:
            self._raw += data
            self._unpack()
        if max(len(self._text), len(self._raw)) > _LONGEST_LINE:
            raise ValueError("an answer of more than 64 MiB")
        *lines, rest = bytes(self._text).split(b"\n")
        if self.finished:
            lines.append(rest)
            rest = b""
        self._text = bytearray(rest)
        return [line for line in lines if line.strip()]

    def end(self) -> list[bytes]:
        """The connection was closed: what is left is a line where the body says nothing of its length."""
        if self._chunked or self._left >= 0:
            raise ValueError("it closed the connection")
        self.finished = True
        return self.feed(b"")

    def _unpack(self) -> None:
        while True:
            if self._left:
                piece = self._raw[: self._left]
                self._text += piece
                del self._raw[: len(piece)]
                self._left -= len(piece)
                if self._left:
                    return
            # The end of the chunk before, if any, and the size of the next.
            start = 2 if self._raw.startswith(b"\r\n") else 0
            stop = self._raw.find(b"\r\n", start)
            if stop < 0:
                if len(self._raw) > 1024:
                    raise ValueError("no size of a chunk")
                return
            self._left = int(bytes(self._raw[start:stop]).split(b";")[0], 16)
            if self._left < 0:
                raise ValueError("no size of a chunk")
            del self._raw[: stop + 2]
            if not self._left:
                self.finished = True
                return


def _status(code: Any) -> int:
    return code if isinstance(code, int) else 2


def encode(text: str | bytes) -> str:
    """Bytes as the gateway wants them."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode("ascii")


def decode(text: Any) -> bytes:
    """Bytes as the gateway gives them; it leaves out what is empty. Raises `ValueError`."""
    return base64.b64decode(text or "", validate=True)


def prefix_range(prefix: str) -> dict[str, str]:
    """All keys that begin with `prefix`, which ends with a character below the last of ASCII."""
    return {"key": encode(prefix), "range_end": encode(prefix[:-1] + chr(ord(prefix[-1]) + 1))}
