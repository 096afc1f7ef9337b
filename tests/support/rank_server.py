"""Forks processes that have loaded torch: a process of its own would take seconds of CPU for that.

`RankServer` starts this file as a script, which forks a child for each request, runs a script there as `__main__`, and
reports how the child ended. The children end with it, and it ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

_ROOT = pathlib.Path(__file__).resolve().parents[2]
PATH = f"{_ROOT}/src:{_ROOT}:{_ROOT}/examples/speech"
_LOOK_SECONDS, _MORE_SECONDS = 0.02, 10.0


class RankProcess:
    """A forked process."""

    def __init__(self, server: RankServer, pid: int, stderr: IO[str]) -> None:
        self._server, self.pid = server, pid
        self._status: int | None = None
        self._text = ""
        self._reader = threading.Thread(target=self._read, args=(stderr,), daemon=True)
        self._reader.start()

    def wait(self, timeout: float) -> tuple[str, int]:
        """What it wrote to stderr, and its exit status, below 0 for a signal. Raises `TimeoutError`."""
        if self._status is None:
            self._status = self._server.wait_for(self.pid, timeout)
        self._reader.join(_MORE_SECONDS)  # a process that it started may keep stderr open
        return self._text, self._status

    def kill(self) -> None:
        """End the process, unless it has ended."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _read(self, stderr: IO[str]) -> None:
        with stderr:
            for line in stderr:
                self._text += line


class RankServer:
    """The process that forks. For one thread."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": PATH},
            )
        self._ended: dict[int, int] = {}
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it and its children."""
        with self._socket, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> RankProcess:
        """Run a script with its arguments in a forked process."""
        reading, writing = os.pipe()
        self._socket.settimeout(None)
        try:
            request = json.dumps({"arguments": arguments, "environment": dict(environment), "directory": os.getcwd()})
            socket.send_fds(self._socket, [b"%20d" % len(request)], [writing])
            self._socket.sendall(request.encode("utf-8"))
        finally:
            os.close(writing)
        return RankProcess(self, self._next("started"), os.fdopen(reading, encoding="utf-8", errors="replace"))

    def wait_for(self, pid: int, timeout: float) -> int:
        """How a child ended. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout
        while pid not in self._ended:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._receive()
        return self._ended.pop(pid)

    def _next(self, kind: str) -> int:
        while True:
            message = self._receive()
            if kind in message:
                return int(message[kind])

    def _receive(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            byte = self._socket.recv(1)
            if not byte:
                raise RuntimeError(f"the process that forks ended with {self._process.wait()}")
            line += byte
        message: dict[str, Any] = json.loads(line)
        if "ended" in message:
            self._ended[message["ended"]] = message["status"]
        return message


# --- in the process that forks --------------------------------------------------------------------


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request; returns the request in the child. Ends the process at the end of the connection."""
    children: set[int] = set()

    def report(**message: int) -> None:
        connection.sendall(json.dumps(message).encode("utf-8") + b"\n")

    while True:
        if select.select([connection], [], [], _LOOK_SECONDS if children else None)[0]:
            length, descriptors, _, _ = socket.recv_fds(connection, 20, 1)
            if not length:
                for child in children:
                    os.kill(child, signal.SIGKILL)
                os._exit(0)
            data = b""
            while len(data) < int(length):
                data += connection.recv(int(length) - len(data))
            request: dict[str, Any] = json.loads(data)
            child = os.fork()
            if not child:
                connection.close()
                os.dup2(descriptors[0], 2)
                os.close(descriptors[0])
                return request
            os.close(descriptors[0])
            children.add(child)
            report(started=child)
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                children.discard(child)
                report(ended=child, status=os.waitstatus_to_exitcode(status))


def _main() -> None:
    import pytest  # noqa: F401 - as the scripts, which are test modules
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401 - its first use loads `torch._dynamo`: a second of CPU

    import millrace.checkpoint.run.manager
    import millrace.filesystem  # noqa: F401

    gc.freeze()  # a child does not collect what is loaded here

    descriptor = os.dup(int(sys.argv[1]))  # a low number, which `select` needs: the one given may be above 1,023
    os.close(int(sys.argv[1]))
    request = _serve(socket.socket(fileno=descriptor))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    tempfile.tempdir = None
    sys.argv = request["arguments"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
