"""Reads from another node, compared with nginx that serves the same files: processor time of both sides, and latency.

Everything is warm, over loopback, one connection. Our client compares a checksum of every piece, and gives memory of its own
for every answer; nginx's gets the same bytes by the leanest client that can be written in Python (a request, `recv_into`
the same memory again and again, no checksum). "ours, lean" is that client with our server: what our client costs.
Ranges of 16 and 256 KiB are parts of blocks, for which our server has to make a checksum the first time; 4 MiB are whole
blocks; "objects" are whole small ones. "aiohttp" serves the same files with that library, to the same lean client: what a
server in Python costs. Needs nginx: of this machine, or downloaded from Debian.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import ROOT, Case, ContenderError, Measure, Options, Prepared
from millrace.cluster.dataplane import wire
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.dataplane.wire import GetMode, ObjectDescription
from millrace.cluster.membership import Member
from millrace.testing.process import ChildProcess, free_ports, log_tail

_TOKEN = "a-token-of-benchmarks"
_LARGE_BYTES = 256 << 20
_SMALL_BYTES = 256 << 10
_SIZES = {"16 KiB": 16 << 10, "256 KiB": 256 << 10, "4 MiB": 4 << 20, "objects of 256 KiB": 0}

_NGINX = """
daemon off; master_process off; worker_processes 1; pid {place}/pid; error_log {place}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off; sendfile on; sendfile_max_chunk 2m; tcp_nopush on; tcp_nodelay on; keepalive_requests 100000000;
  open_file_cache max=1000; max_ranges 1;
  client_body_temp_path {place}; proxy_temp_path {place}; fastcgi_temp_path {place}; uwsgi_temp_path {place};
  scgi_temp_path {place};
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    files = options.scratch / "files"
    files.mkdir()
    source = random.Random(0)
    large = (32 << 20) if options.quick else _LARGE_BYTES
    small = 20 if options.quick else 200
    with open(files / "large.bin", "wb") as file:
        for _ in range(large >> 22):
            file.write(source.randbytes(4 << 20))
    for number in range(small):
        (files / f"small-{number:04}.bin").write_bytes(source.randbytes(_SMALL_BYTES))
    names = sorted(str(file) for file in files.iterdir())
    log = options.scratch / "log"
    command = [sys.executable, "-m", "benchmarks.peers_server", str(options.scratch / "cache"), _TOKEN, *names]
    aiohttp_command = [sys.executable, "-m", "benchmarks.aiohttp_server", str(files)]
    aiohttp_log = options.scratch / "aiohttp.log"
    with (
        ChildProcess(command, log=log, cwd=ROOT, pipes=True) as ours,
        ChildProcess(aiohttp_command, log=aiohttp_log, cwd=ROOT, pipes=True) as aiohttp,
        _nginx(options.scratch, files) as (nginx, port),
    ):
        facts = json.loads(ours.stdout.readline())
        line = aiohttp.stdout.readline()
        if not line:
            raise ContenderError(f"peers: aiohttp does not start, install it: {log_tail(aiohttp_log)}")
        _await_port(port)
        yield Prepared(
            {
                "ours": {"address": facts["address"], "pid": ours.pid, "objects": facts["objects"]},
                "nginx": {"address": f"127.0.0.1:{port}", "pid": nginx.pid},
                "aiohttp": {"address": f"127.0.0.1:{json.loads(line)['port']}", "pid": aiohttp.pid},
                "names": [Path(name).name for name in names],
                "large_bytes": large,
                "total_bytes": (64 << 20) if options.quick else (2 << 30),
                "least": 20 if options.quick else 2000,
            },
            notes=(
                f"one file of {large >> 20} MiB, {small} of {_SMALL_BYTES >> 10} KiB; warm, over loopback; CPU of both "
                "sides together; latencies are medians of all requests.",
            ),
        )


@contextmanager
def _nginx(scratch: Path, root: Path) -> Iterator[tuple[ChildProcess, int]]:
    program = shutil.which("nginx") or _download(scratch)
    place = scratch / "nginx"
    place.mkdir()
    (port,) = free_ports(1)
    configuration = place / "nginx.conf"
    configuration.write_text(_NGINX.format(place=place, port=port, root=root))
    log = place / "log"
    with ChildProcess([program, "-c", str(configuration), "-e", str(place / "error.log")], log=log) as process:
        yield process, port


def _download(scratch: Path) -> str:
    """nginx out of Debian's package, unpacked next to the data and not installed."""
    try:
        subprocess.run(["apt-get", "download", "nginx"], cwd=scratch, check=True, capture_output=True, timeout=120)
        (package,) = scratch.glob("nginx_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), str(scratch / "debian")], check=True, capture_output=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ContenderError(f"peers: there is no nginx to compare with, install it: {error}") from error
    return str(scratch / "debian" / "usr" / "sbin" / "nginx")


def _await_port(port: int) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise ContenderError("peers: nginx does not start") from None
            time.sleep(0.05)
        else:
            return


case = Case(name="peers", title="Reading from a peer", prepare=prepare, baseline="nginx")

ReadRange = Callable[[int, int, int], memoryview]
"""Gives a range of a file by its number; the memory is good until the next call."""


def _cpu_clock(pid: int) -> int:
    """The kernel's clock of all processor time of another process (see clock_getcpuclockid(3))."""
    return (~pid << 3) | 2


def _run(measure: Measure, context: Mapping[str, Any], pid: int, read: ReadRange) -> list[int]:
    names: list[str] = context["names"]
    large = names.index("large.bin")
    small = [number for number, name in enumerate(names) if name.startswith("small")]
    check = 0
    for number in small:
        check = zlib.crc32(read(number, 0, _SMALL_BYTES), check)
    for start in range(0, context["large_bytes"], 4 << 20):
        check = zlib.crc32(read(large, start, start + (4 << 20)), check)
    for phase, nbytes in _SIZES.items():
        source = random.Random(1)
        size = nbytes or _SMALL_BYTES
        count = max(context["least"], context["total_bytes"] // size) if size >= 65536 else 10 * context["least"]
        if nbytes:
            place = [source.randrange(context["large_bytes"] // size) * size for _ in range(count)]
            asked = [(large, start, start + size) for start in place]
        else:
            asked = [(source.choice(small), 0, size) for _ in range(count)]
        seconds = []
        with measure(phase) as figures:
            clock = time.perf_counter
            theirs, own = time.clock_gettime(_cpu_clock(pid)), time.process_time()
            for number, start, stop in asked:
                began = clock()
                read(number, start, stop)
                seconds.append(clock() - began)
            theirs, own = time.clock_gettime(_cpu_clock(pid)) - theirs, time.process_time() - own
            gigabytes = count * size / 1e9
            figures["both CPU-s/GB"] = (theirs + own) / gigabytes
            figures["server CPU-s/GB"] = theirs / gigabytes
            figures["client CPU-s/GB"] = own / gigabytes
            figures["p50 ms"] = median(seconds) * 1e3
    return [check]


@case.contender("ours")
def ours(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    objects = [ObjectDescription(*fields) for fields in context["ours"]["objects"]]
    client = PeerClient(token=_TOKEN)
    member = Member(id="benchmark", address=context["ours"]["address"])

    def read(number: int, start: int, stop: int) -> memoryview:
        return memoryview(client.read(member, objects[number], (start, stop), mode=GetMode.FETCH).data)

    try:
        return _run(measure, context, context["ours"]["pid"], read)
    finally:
        client.close()


@case.contender("ours, lean")
def ours_lean(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    objects = [ObjectDescription(*fields) for fields in context["ours"]["objects"]]
    address = context["ours"]["address"]
    lean = _Lean(address)

    def read(number: int, start: int, stop: int) -> memoryview:
        request = wire.build_get(objects[number], (start, stop), host=address, token=_TOKEN, mode=GetMode.CACHED)
        return lean.mode(request)[: stop - start]

    return _run(measure, context, context["ours"]["pid"], read)


@case.contender("nginx")
def nginx(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    return _run_http(measure, context, context["nginx"])


@case.contender("aiohttp")
def aiohttp(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    return _run_http(measure, context, context["aiohttp"])


def _run_http(measure: Measure, context: Mapping[str, Any], server: Mapping[str, Any]) -> list[int]:
    """Read with ranges of plain HTTP from a server of files."""
    names, lean = context["names"], _Lean(server["address"])

    def read(number: int, start: int, stop: int) -> memoryview:
        return lean.mode(
            f"GET /{names[number]} HTTP/1.1\r\nHost: x\r\nRange: bytes={start}-{stop - 1}\r\n\r\n".encode()
        )

    return _run(measure, context, server["pid"], read)


class _Lean:
    """The smallest reader of a response: one socket, one piece of memory."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = bytearray(32 << 10)
        self._body = memoryview(bytearray((4 << 20) + 64))

    def mode(self, request: bytes) -> memoryview:
        self._socket.sendall(request)
        count = self._socket.recv_into(self._head)
        end = self._head.index(b"\r\n\r\n") + 4
        marker = self._head.index(b"Content-Length: ") + 16
        nbytes = int(self._head[marker : self._head.index(b"\r", marker)])
        got = count - end
        self._body[:got] = self._head[end:count]
        while got < nbytes:
            got += self._socket.recv_into(self._body[got:nbytes])
        return self._body[:nbytes]
