"""The process behind `millrace.testing.region.EmulatedRegion`: an HTTP/1.1 proxy that delays, paces, counts and fails.

It runs as a program of its own, so that its CPU time and memory are not those of the client under test, and imports
nothing but the standard library. It relays messages as they are: the Host header stays, because the client signed it.
Commands come as JSON lines on stdin and have their results, in order, as JSON lines on stdout; the first line out is
`{"port": N}`. It ends when stdin does.

It is one file because it is started by its path: neither millrace nor any installed package is importable in it.

One thread a client connection, with an upstream connection of its own: a delayed or paced request holds up no other.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import Any

_BUFFER_BYTES = 256 << 10
_BODILESS = (204, 304)
_CODES = {403: "AccessDenied", 404: "NoSuchKey", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}


class Pacer:
    """Spreads bytes over time for all connections together: a token bucket. Thread-safe.

    It keeps an absolute schedule. A sleep that lasts too long is made up for, up to `burst_seconds`, so that the rate
    comes out right although no sleep is exact.
    """

    def __init__(self, bytes_per_second: float | None, burst_seconds: float = 0.005) -> None:
        self.bytes_per_second = bytes_per_second
        self._burst_seconds = burst_seconds
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, now: float) -> float:
        """Book `nbytes` and return how many seconds from `now` the caller has to wait before sending them."""
        if self.bytes_per_second is None:
            return 0.0
        with self._lock:
            self._free_at = max(self._free_at, now - self._burst_seconds) + nbytes / self.bytes_per_second
            return self._free_at - now

    def wait(self, nbytes: int) -> None:
        delay = self.reserve(nbytes, time.monotonic())
        if delay > 0.0005:  # shorter ones cost more than they slow down; the schedule includes them
            time.sleep(delay)


class Rule:
    """One fault to inject, and how often it still may. `take` is called under the proxy's lock."""

    def __init__(self, fault: Mapping[str, Any]) -> None:
        self.fault = fault
        self.kind: str = fault["kind"]
        self.skip: int = fault["skip"]
        self.left: int | None = fault["count"]
        self.hits = 0
        self._free_at = 0.0

    def take(self, method: str, path: str, in_flight: int, now: float) -> bool:
        if self.fault["method"] not in (None, method) or not fnmatch.fnmatchcase(path, self.fault["path"]):
            return False
        if self.left == 0:
            return False
        if self.fault["above_in_flight"] is not None and in_flight <= self.fault["above_in_flight"]:
            return False
        if self.fault["above_rate"] is not None and not self._is_too_fast(now):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.left is not None:
            self.left -= 1
        self.hits += 1
        return True

    def _is_too_fast(self, now: float) -> bool:
        """Whether requests come faster than `above_rate`, with a second's worth at once; those that are hit do not count."""
        rate = self.fault["above_rate"]
        if self._free_at - now > 1.0:
            return True
        self._free_at = max(self._free_at, now) + 1.0 / rate
        return False


def kind_of(method: str, query: str) -> str:
    """The HTTP method, or LIST for a GET that lists a bucket, by the parameters that only such a request has."""
    parameters = urllib.parse.parse_qs(query, keep_blank_values=True)
    return "LIST" if method == "GET" and parameters.keys() & {"list-type", "prefix", "delimiter"} else method


class Counters:
    """Requests and body bytes by kind and path. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], list[int]] = {}

    def add(self, kind: str, path: str, *, requests: int = 0, down: int = 0, up: int = 0) -> None:
        with self._lock:
            row = self._rows.setdefault((kind, path), [0, 0, 0])
            row[0] += requests
            row[1] += down
            row[2] += up

    def by_kind(self, prefix: str) -> dict[str, list[int]]:
        with self._lock:
            rows = [(kind, list(row)) for (kind, path), row in self._rows.items() if path.startswith(prefix)]
        totals: dict[str, list[int]] = {}
        for kind, row in rows:
            total = totals.setdefault(kind, [0, 0, 0])
            for column, value in enumerate(row):
                total[column] += value
        return totals

    def reset(self) -> None:
        with self._lock:
            self._rows.clear()


class Head:
    """The start line and the headers of one message, and its bytes as they came."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        first, *lines = raw.decode("latin-1").split("\r\n")
        self.start = first.split(" ", 2)
        self.headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if colon:
                self.headers[name.strip().lower()] = value.strip()

    @property
    def length(self) -> int | None:
        """Bytes of the body by its Content-Length, None without one."""
        value = self.headers.get("content-length")
        return None if value is None else int(value)

    @property
    def chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower().endswith("chunked")

    @property
    def closes(self) -> bool:
        connection = self.headers.get("connection", "").lower()
        old = "HTTP/1.0" in (self.start[0], self.start[-1])
        return "close" in connection or (old and "keep-alive" not in connection)


def rewritten(response: Head, fault: Mapping[str, Any] | None) -> bytes:
    """The head of a response as the client shall see it."""
    kind = fault["kind"] if fault else None
    change: dict[str, str | None] = {}
    start = list(response.start)
    partial = response.headers.get("content-range")
    if kind == "shorten" and fault and response.length is not None and fault["after_bytes"] < response.length:
        change["content-length"] = str(fault["after_bytes"])
    elif kind == "range" and partial:
        first, last, total = re.findall(r"\d+|\*", partial)
        change["content-range"] = f"bytes {int(first) + 1}-{int(last) + 1}/{total}"
    elif kind == "whole" and partial:
        start[1:] = ["200", "OK"]
        change["content-range"] = None
    elif kind == "version":
        change["etag"] = '"0123456789abcdef0123456789abcdef"'
    if not change:
        return response.raw
    lines = response.raw.decode("latin-1").split("\r\n")[1:-2]
    kept = [line for line in lines if line.partition(":")[0].strip().lower() not in change]
    new = [f"{name}: {value}" for name, value in change.items() if value is not None]
    return "\r\n".join([" ".join(start), *kept, *new, "", ""]).encode("latin-1")


class Stream:
    """A socket with a read buffer, for heads and lines; bodies pass through the same buffer without another copy."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._stop = 0

    def take(self, limit: int) -> memoryview:
        """Up to `limit` bytes, at least one unless the other side has closed; valid until the next read."""
        if self._start == self._stop:
            self._start, self._stop = 0, self.socket.recv_into(self._buffer[: min(limit, _BUFFER_BYTES)])
        stop = min(self._stop, self._start + limit)
        view = self._buffer[self._start : stop]
        self._start = stop
        return view

    def read_until(self, end: bytes) -> bytes:
        """Bytes up to and including `end`; empty when the other side closed before the first byte."""
        if self._start == self._stop:
            self._start = self._stop = 0
        while True:
            held = bytes(self._buffer[self._start : self._stop])
            found = held.find(end)
            if found >= 0:
                self._start += found + len(end)
                return held[: found + len(end)]
            if self._start:  # make room at the end
                self._buffer[: len(held)] = held
                self._start, self._stop = 0, len(held)
            if self._stop == _BUFFER_BYTES:
                raise ConnectionError("a message head that does not fit the buffer")
            received = self.socket.recv_into(self._buffer[self._stop :])
            if not received:
                if held:
                    raise ConnectionError("closed in the middle of a message")
                return b""
            self._stop += received

    @property
    def alive(self) -> bool:
        """Whether an idle connection is still open on the other side."""
        return not wait([self.socket], 0)

    def close(self) -> None:
        self.socket.close()


def _reset(connection: socket.socket) -> None:
    """Close so that the other side sees 'connection reset by peer'."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Proxy:
    """State that all connections share."""

    def __init__(self, host: str, port: int, *, round_trip_seconds: float, bytes_per_second: float | None) -> None:
        self.upstream = (host, port)
        self.round_trip_seconds = round_trip_seconds
        self.down, self.up = Pacer(bytes_per_second), Pacer(bytes_per_second)
        self.counters = Counters()
        self.rules: list[Rule] = []
        self.lock = threading.Lock()
        self._in_flight = self._most_in_flight = 0

    def begin(self) -> None:
        """One request more is in flight."""
        with self.lock:
            self._in_flight += 1
            self._most_in_flight = max(self._most_in_flight, self._in_flight)

    def end(self) -> None:
        """And one less."""
        with self.lock:
            self._in_flight -= 1

    def fault_for(self, method: str, path: str) -> Mapping[str, Any] | None:
        """The fault that hits a request which is in flight."""
        now = time.monotonic()
        with self.lock:
            for rule in self.rules:
                if rule.take(method, path, self._in_flight, now):
                    return rule.fault
        return None

    def accept_forever(self, listener: socket.socket) -> None:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        # A side that goes away ends this connection and nothing else; the other side notices by the close.
        connection = _Connection(self, client)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            time.sleep(self.round_trip_seconds)  # the handshake, which loopback made too quick
            while connection.exchange():
                pass

    def command(self, given: dict[str, Any]) -> dict[str, Any]:
        """Run one command of the owner and return the response."""
        what = given.pop("do")
        if what == "stats":
            return {
                "by_kind": self.counters.by_kind(given["prefix"]),
                "cpu_seconds": time.process_time(),
                "most_in_flight": self._most_in_flight,
            }
        if what == "reset":
            self.counters.reset()
            with self.lock:
                self._most_in_flight = self._in_flight
        elif what == "shape":
            self.round_trip_seconds = given["round_trip_seconds"]
            self.down.bytes_per_second = self.up.bytes_per_second = given["bytes_per_second"]
        elif what == "fail":
            with self.lock:
                self.rules.append(Rule(given))
        elif what == "faults":
            with self.lock:
                return {"hits": [rule.hits for rule in self.rules]}
        elif what == "clear":
            with self.lock:
                self.rules.clear()
        else:
            return {"error": f"unknown command {what!r}"}
        return {}


class _Connection:
    """One client connection and its connection to the real server."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self.proxy = proxy
        self.client = Stream(client)
        self.server: Stream | None = None
        self.method = self.path = self.kind = ""
        self._in_flight = False

    def close(self) -> None:
        self.client.close()
        if self.server is not None:
            self.server.close()

    def exchange(self) -> bool:
        """Relay one request and its response; False when the connection is over."""
        raw = self.client.read_until(b"\r\n\r\n")
        if not raw:
            return False
        self._in_flight = True
        self.proxy.begin()
        try:
            return self._respond(Head(raw))
        finally:
            self._over()

    def _over(self) -> None:
        """End the request. Called before its last byte is sent: the client may then send the next request."""
        if self._in_flight:
            self._in_flight = False
            self.proxy.end()

    def _respond(self, request: Head) -> bool:
        self.method, target = request.start[0], request.start[1]
        url = urllib.parse.urlsplit(target)
        self.path, self.kind = urllib.parse.unquote(url.path), kind_of(self.method, url.query)
        self.proxy.counters.add(self.kind, self.path, requests=1)
        fault = self.proxy.fault_for(self.method, self.path)
        time.sleep(self.proxy.round_trip_seconds)
        if fault is not None and fault["kind"] == "status":
            return self._refuse(request, fault)

        server = self._connect()
        server.socket.sendall(request.raw)
        waits = request.headers.get("expect", "").lower() == "100-continue"
        response: Head | None = None
        if waits:
            response = self._response_head(server)
            if int(response.start[1]) == 100:
                self.client.socket.sendall(response.raw)
                response = None
        if response is None:
            self._relay_request_body(request, server)
            response = self._response_head(server)
        while int(response.start[1]) // 100 == 1:
            self.client.socket.sendall(response.raw)
            response = self._response_head(server)
        complete = self._relay_response(response, server, fault)
        # After a body that was announced and never sent, the start of the next request is unknown.
        return complete and not (request.closes or response.closes or (waits and int(response.start[1]) >= 300))

    def _connect(self) -> Stream:
        if self.server is not None and not self.server.alive:
            self.server.close()
            self.server = None
        if self.server is None:
            try:
                self.server = Stream(socket.create_connection(self.proxy.upstream, timeout=10))
            except OSError:
                _reset(self.client.socket)
                raise
            self.server.socket.settimeout(None)
        return self.server

    def _response_head(self, server: Stream) -> Head:
        raw = server.read_until(b"\r\n\r\n")
        if not raw:
            raise ConnectionError("the server closed without a response")
        return Head(raw)

    def _relay_request_body(self, request: Head, server: Stream) -> None:
        try:
            if request.chunked:
                self._relay_chunks(self.client, server.socket, "up")
            else:
                self._relay(self.client, server.socket, request.length or 0, "up")
        except (BrokenPipeError, ConnectionResetError):
            # A server may respond before it has read the whole request, and close: its response is still valid.
            if server.alive:
                raise

    def _relay_response(self, response: Head, server: Stream, fault: Mapping[str, Any] | None) -> bool:
        client, status = self.client.socket, int(response.start[1])
        kind = fault["kind"] if fault else None
        after = fault["after_bytes"] if fault else 0
        if fault and not after:
            if kind == "reset":
                self._over()
                _reset(client)
                return False
            if kind == "stall":
                time.sleep(fault["seconds"])
        head = rewritten(response, fault)
        if self.method == "HEAD" or status in _BODILESS or response.length == 0:
            self._over()
            client.sendall(head)
            return True
        client.sendall(head, 0 if kind == "shorten" else socket.MSG_MORE)  # which waits for a body
        if response.chunked:
            self._relay_chunks(server, client, "down")
            return True
        if response.length is None:
            while view := server.take(_BUFFER_BYTES):
                self._pass_on(view, client, "down")
            return False
        if fault is None or after >= response.length:
            self._relay(server, client, response.length, "down", last=True)
            return True
        self._relay(server, client, after, "down", last=kind == "shorten")
        if kind == "truncate":
            return False
        if kind == "shorten":
            self._drain(server, response.length - after)
            return True
        if kind == "reset":
            self._over()
            _reset(client)
            return False
        if kind == "stall" and after:
            time.sleep(fault["seconds"])
        rest = response.length - after
        if kind == "corrupt":
            self._pass_on(memoryview(bytes([server.take(1)[0] ^ 1])), client, "down")
            rest -= 1
        self._relay(server, client, rest, "down", last=True)
        return True

    def _relay(self, source: Stream, sink: socket.socket, length: int, way: str, *, last: bool = False) -> None:
        """`last`: nothing of the message follows."""
        while length:
            view = source.take(length)
            if not view:
                raise ConnectionError("closed in the middle of a body")
            length -= len(view)
            self._pass_on(view, sink, way, last=last and not length)

    def _drain(self, source: Stream, length: int) -> None:
        """Discard bytes."""
        while length:
            view = source.take(length)
            if not view:
                raise ConnectionError("closed in the middle of a body")
            length -= len(view)

    def _relay_chunks(self, source: Stream, sink: socket.socket, way: str) -> None:
        while True:
            line = source.read_until(b"\r\n")
            size = int(line.split(b";")[0], 16)
            sink.sendall(line, socket.MSG_MORE)
            if size == 0:
                break
            self._relay(source, sink, size, way)
            sink.sendall(source.read_until(b"\r\n"))
        while (trailer := source.read_until(b"\r\n")) not in (b"\r\n", b""):
            sink.sendall(trailer, socket.MSG_MORE)
        if way == "down":
            self._over()
        sink.sendall(b"\r\n")

    def _pass_on(self, view: memoryview, sink: socket.socket, way: str, *, last: bool = False) -> None:
        # Counted first: a client that has the last byte may read the counters.
        if way == "down":
            self.proxy.down.wait(len(view))
            self.proxy.counters.add(self.kind, self.path, down=len(view))
        else:
            self.proxy.up.wait(len(view))
            self.proxy.counters.add(self.kind, self.path, up=len(view))
        if last:
            self._over()
        sink.sendall(view)

    def _refuse(self, request: Head, fault: Mapping[str, Any]) -> bool:
        status, code = fault["status"], fault["code"] or _CODES.get(fault["status"], "Error")
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        head = f"HTTP/1.1 {status} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        head += f"x-ms-error-code: {code}\r\n"  # where Azure's clients look
        if fault["retry_after"] is not None:
            head += f"Retry-After: {fault['retry_after']}\r\n"
        bare = request.length in (None, 0) and not request.chunked
        ending = "\r\n" if bare else "Connection: close\r\n\r\n"
        self._over()
        self.client.socket.sendall((head + ending).encode() + (b"" if self.method == "HEAD" else body))
        if not bare:
            # Closing with unread bytes would reset the connection, and the client might lose the response.
            self.client.socket.shutdown(socket.SHUT_WR)
            self.client.socket.settimeout(5.0)
            while self.client.take(_BUFFER_BYTES):
                pass
        return bare


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    listen_on = settings.pop("listen_host"), settings.pop("listen_port")
    proxy = Proxy(**settings)
    with socket.create_server(listen_on, backlog=1024) as listener:
        threading.Thread(target=proxy.accept_forever, args=(listener,), daemon=True).start()
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        for line in sys.stdin:
            print(json.dumps(proxy.command(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
