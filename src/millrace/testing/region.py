"""The emulated region: the real S3 server seems to be a round trip away, behind a link of limited bandwidth.

    with S3Server(directory) as s3, EmulatedRegion(s3.endpoint_url) as region:
        fs = millrace.filesystem("s3", target_options={**s3.target_options, "endpoint_url": region.endpoint_url})
        ...
        print(region.stats(prefix="/bucket/train/").bytes_down)

It needs no privileges, works in a process of its own (`region_proxy`), and can also break relayed requests: `fail`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Literal, Self, get_args

from millrace.errors import ConfigurationError, OriginUnavailableError, UsageError
from millrace.testing import region_proxy
from millrace.testing.process import ChildProcess, log_tail

FaultKind = Literal["status", "stall", "reset", "truncate", "corrupt", "shorten", "range", "whole", "version"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault, and the requests that it hits.

    ==========  ==================================================================================================
    `status`    The region returns this HTTP `status` itself, with the error `code` of S3 or Azure (None: the usual
                one) and a `Retry-After` of `retry_after` (seconds or a date). The server never gets the request.
    `stall`     The response pauses for `seconds`, after `after_bytes` of its body.
    `reset`     The connection is reset after `after_bytes` of the body. With 0 the server *has* executed the request
                and only the response is lost.
    `truncate`  The connection is closed after `after_bytes` of the body, although more was announced.
    `corrupt`   One bit of the byte at `after_bytes` is wrong.
    `shorten`   The body and its Content-Length have `after_bytes`; all other headers are those of the full response.
    `range`     The Content-Range of a 206 begins one byte after the bytes of the body.
    `whole`     A 206 becomes a 200, as from a server without range support; the body is still the range.
    `version`   The response has another ETag, as from a cache in between that ignores conditions.
    ==========  ==================================================================================================

    `method` None is any; `path` is a shell pattern on the decoded path without the query (`/bucket/train/*`). The first
    `skip` matching requests pass; then `count` are hit (None: all). With `above_in_flight` only those are hit that come
    while more requests than that, itself included, are in flight, and with `above_rate` those that come faster than so
    many a second: an overload, as of a server that protects itself. Faults in the middle of a body need a response with
    a Content-Length of more than `after_bytes`, else the request is hit without effect.
    """

    kind: FaultKind
    method: str | None = None
    path: str = "*"
    count: int | None = 1
    skip: int = 0
    status: int = 503
    seconds: float = 60.0
    after_bytes: int = 0
    code: str | None = None
    retry_after: float | str | None = None
    above_in_flight: int | None = None
    above_rate: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ConfigurationError(f"unknown fault {self.kind!r}", next_step=f"use {', '.join(get_args(FaultKind))}")
        for name in ("count", "skip", "after_bytes", "seconds", "above_in_flight"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(f"a fault's {name} cannot be {value}", next_step="use 0 or more")
        if self.above_rate is not None and self.above_rate <= 0:
            raise ConfigurationError(f"a fault's above_rate cannot be {self.above_rate}", next_step="use more than 0")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests, and bytes of their bodies (no heads) towards the client and towards the server."""

    requests: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


def _total(rows: Iterable[Traffic]) -> Traffic:
    rows = list(rows)
    return Traffic(
        sum(row.requests for row in rows), sum(row.bytes_down for row in rows), sum(row.bytes_up for row in rows)
    )


@dataclass(frozen=True, slots=True)
class RegionStats(Traffic):
    """Totals since the start or the last `reset`, and the same by HTTP method, and by kind of request.

    The kinds are the methods, but a GET that lists a bucket is a `LIST`. `cpu_seconds` is the CPU time of the proxy process
    since its start, for all requests; `most_in_flight` is the largest number of requests, of all paths, that were in
    progress at one time: from the last byte of their head to the last byte of their response.
    """

    by_method: Mapping[str, Traffic] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    by_kind: Mapping[str, Traffic] = field(default_factory=dict)
    most_in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured speed of an emulated region on this machine. `str()` is one line of text."""

    wanted_round_trip_seconds: float
    wanted_bytes_per_second: float | None
    round_trip_seconds: float
    one_connection_bytes_per_second: float
    bytes_per_second: float
    connections: int
    proxy_cores: float

    def __str__(self) -> str:
        wanted = self.wanted_bytes_per_second
        return (
            f"emulated region: round trip {self.round_trip_seconds * 1e3:.1f} ms "
            f"(set {self.wanted_round_trip_seconds * 1e3:g}), "
            f"{self.bytes_per_second / 1e6:.0f} MB/s over {self.connections} connections and "
            f"{self.one_connection_bytes_per_second / 1e6:.0f} MB/s over one "
            f"(set {'unlimited' if wanted is None else f'{wanted / 1e6:g}'}), "
            f"the proxy itself takes {self.proxy_cores:.2f} of a core at that rate"
        )


class EmulatedRegion:
    """A proxy before `upstream_url` (plain HTTP) that adds a round trip and limits the bandwidth.

    `round_trip_seconds` is added to every request, and once more to a connection's first one for its handshake.
    `bytes_per_second` holds in each direction for all connections together; None means no limit. `port` is a free one unless
    given, and `host` the address to listen on. A context manager; the process dies with this one. Methods may be called from
    any thread.
    """

    def __init__(
        self,
        upstream_url: str,
        *,
        round_trip_seconds: float = 0.015,
        bytes_per_second: float | None = 200e6,
        port: int | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        url = urllib.parse.urlsplit(upstream_url)
        if url.scheme != "http" or not url.hostname:
            raise ConfigurationError(f"{upstream_url!r}: is not a plain HTTP address", next_step="use http://host:port")
        if round_trip_seconds < 0 or (bytes_per_second is not None and bytes_per_second <= 0):
            raise ConfigurationError(
                "an emulated region needs a round trip of 0 or more and a bandwidth above 0", next_step="change them"
            )
        self.round_trip_seconds = round_trip_seconds
        self.bytes_per_second = bytes_per_second
        self._listen_port = port or 0
        self._listen_host = host
        self._upstream = (url.hostname, url.port or 80)
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self._resources = contextlib.ExitStack()
        self._log = Path()
        self._port = 0

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the proxy; does nothing when it runs. Raises `OriginUnavailableError` when it does not come up."""
        if self._process is not None:
            return self
        # Without a name of its own, so that not even `kill -9` leaves it behind.
        log = os.memfd_create("millrace-region-log")
        self._resources.callback(os.close, log)
        self._log = Path(f"/proc/self/fd/{log}")
        command = [sys.executable, "-I", "-S", region_proxy.__file__]
        self._process = self._resources.enter_context(
            ChildProcess(command, log=self._log, pipes=True, grace_seconds=1.0)
        )
        host, port = self._upstream
        settings = {
            "host": host,
            "port": port,
            "listen_port": self._listen_port,
            "listen_host": self._listen_host,
            **self._shape(),
        }
        try:
            self._port = self._send(settings)["port"]
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the proxy; its connections break. Idempotent."""
        self._process = None
        self._resources.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- use --------------------------------------------------------------------------------------

    @property
    def endpoint_url(self) -> str:
        self._running()
        return f"http://{self._listen_host}:{self._port}"

    @property
    def pid(self) -> int:
        return self._running().pid

    def stats(self, prefix: str = "/") -> RegionStats:
        """What went through, of paths that begin with `prefix` (`/bucket/train/`), in this region's whole life."""
        response = self._send({"do": "stats", "prefix": prefix})
        kinds = {kind: Traffic(*row) for kind, row in response["by_kind"].items()}
        methods = {kind: row for kind, row in kinds.items() if kind not in ("GET", "LIST")}
        if downloads := [kinds[kind] for kind in ("GET", "LIST") if kind in kinds]:
            methods["GET"] = _total(downloads)
        total = _total(kinds.values())
        return RegionStats(
            total.requests,
            total.bytes_down,
            total.bytes_up,
            methods,
            response["cpu_seconds"],
            by_kind=kinds,
            most_in_flight=response["most_in_flight"],
        )

    def reset(self) -> None:
        """Set the counters to zero."""
        self._send({"do": "reset"})

    def reshape(self, *, round_trip_seconds: float, bytes_per_second: float | None) -> None:
        """Change the latency and the bandwidth while it runs."""
        self.round_trip_seconds, self.bytes_per_second = round_trip_seconds, bytes_per_second
        self._send({"do": "shape", **self._shape()})

    def fail(self, kind: FaultKind, **details: Any) -> None:
        """Add a fault; `details` are the other fields of `Fault`. The first rule that matches a request is used."""
        self._send({"do": "fail", **asdict(Fault(kind=kind, **details))})

    def fault_hits(self) -> list[int]:
        """How many requests each fault has hit so far, in the order in which they were added."""
        hits: list[int] = self._send({"do": "faults"})["hits"]
        return hits

    def clear_faults(self) -> None:
        """Remove all faults, also those that were not used up."""
        self._send({"do": "clear"})

    def calibrate(self, *, connections: int = 8, seconds: float = 1.0) -> Calibration:
        """Measure the speed of a region with these settings on this machine, with a source that takes almost no time.

        Uses a second proxy of the same settings, so the counters and faults of this one are not touched.
        """
        return calibrate(
            round_trip_seconds=self.round_trip_seconds,
            bytes_per_second=self.bytes_per_second,
            connections=connections,
            seconds=seconds,
        )

    def _shape(self) -> dict[str, float | None]:
        return {"round_trip_seconds": self.round_trip_seconds, "bytes_per_second": self.bytes_per_second}

    def _running(self) -> ChildProcess:
        if self._process is None:
            raise UsageError("the emulated region is not running", next_step="use it in a 'with' block")
        return self._process

    def _send(self, command: Mapping[str, Any]) -> dict[str, Any]:
        process = self._running()
        cause: OSError | None = None
        with self._lock:
            try:
                process.stdin.write(json.dumps(command).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError as error:
                line, cause = b"", error
        if not line:
            raise OriginUnavailableError(
                f"the emulated region's proxy has ended; its log ends: {log_tail(self._log)}"
            ) from cause
        response: dict[str, Any] = json.loads(line)
        return response


# --- calibration ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _source() -> Iterator[str]:
    """Serves `GET /N` with N zero bytes; yields its address. Its own time is negligible."""
    block = bytes(1 << 20)

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, connection.makefile("rb") as lines:
            while request := lines.readline():
                while lines.readline() not in (b"\r\n", b""):
                    pass
                left = int(request.split()[1][1:])
                connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {left}\r\n\r\n".encode())
                while left:
                    left -= connection.send(block[:left])

    def accept() -> None:
        with contextlib.suppress(OSError):  # the way this loop ends: the listener is shut down
            while True:
                pool.submit(serve, listener.accept()[0])

    with ThreadPoolExecutor(max_workers=256) as pool, socket.create_server(("127.0.0.1", 0)) as listener:
        pool.submit(accept)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def _download(port: int, nbytes: int, times: int) -> list[float]:
    """Get `nbytes` several times over one connection; returns the seconds that each took (the first: with connecting)."""
    buffer = bytearray(1 << 20)
    seconds: list[float] = []
    started = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection.makefile("rb") as reader:
            for _ in range(times):
                connection.sendall(f"GET /{nbytes} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                while reader.readline() not in (b"\r\n", b""):
                    pass
                left = nbytes
                while left:
                    received = reader.readinto1(memoryview(buffer)[: min(left, len(buffer))])
                    if not received:
                        raise OriginUnavailableError("the emulated region closed a connection during calibration")
                    left -= received
                now = time.perf_counter()
                seconds.append(now - started)
                started = now
    return seconds


def calibrate(
    *,
    round_trip_seconds: float = 0.015,
    bytes_per_second: float | None = 200e6,
    connections: int = 8,
    seconds: float = 1.0,
) -> Calibration:
    """Measure the round trip of a small GET, and the bandwidth over one and over several connections."""
    with (
        _source() as url,
        EmulatedRegion(url, round_trip_seconds=round_trip_seconds, bytes_per_second=bytes_per_second) as region,
    ):
        port = urllib.parse.urlsplit(region.endpoint_url).port or 0
        small = _download(port, 1, 21)[1:]
        amount = int((bytes_per_second or 2e9) * seconds)
        one = _download(port, amount // 4, 2)[1]
        each = amount // connections
        # Threads share the interpreter lock, which at these block sizes costs little: the copying happens outside it.
        with ThreadPoolExecutor(connections) as pool:
            before, started = region.stats().cpu_seconds, time.perf_counter()
            list(pool.map(lambda _: _download(port, each, 1), range(connections)))
            elapsed = time.perf_counter() - started
            cpu = region.stats().cpu_seconds - before
    return Calibration(
        wanted_round_trip_seconds=round_trip_seconds,
        wanted_bytes_per_second=bytes_per_second,
        round_trip_seconds=median(small),
        one_connection_bytes_per_second=(amount // 4) / one,
        bytes_per_second=each * connections / elapsed,
        connections=connections,
        proxy_cores=cpu / elapsed,
    )
