"""Processes forked from one that has loaded their modules: each would take .5 s of CPU for that by itself, 3 s with torch.

`ForkServer` starts this file as a script, which forks a child for each request, runs a program there as `__main__`, and
reports how the child ended. The children end with it, and it ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import pathlib
import queue
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self

_ROOT = pathlib.Path(__file__).resolve().parents[2]
PATH = f"{_ROOT}/src:{_ROOT}:{_ROOT}/examples/speech"
_SET_PARENT_DEATH_SIGNAL = 1
_GRACE_SECONDS = 5.0


class ForkServer:
    """The process that forks, with these modules loaded. Thread-safe."""

    def __init__(self, *modules: str) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": PATH},
                start_new_session=True,
            )
        self._requesting = threading.Lock()
        self._started: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._statuses: dict[int, int] = {}
        self._has_ended = False
        self._receiver = threading.Thread(target=self._receive, name="fork-server", daemon=True)
        self._receiver.start()
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        """Whether it can fork."""
        return not self._has_ended

    def close(self) -> None:
        """End it and its children."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._receiver.join()
        self._socket.close()

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> tuple[int, int]:
        """Fork a child with these descriptors as 0, 1 and 2; returns its number, which no other child gets, and its pid."""
        data = json.dumps(request).encode("utf-8")
        with self._requesting:
            socket.send_fds(self._socket, [b"%20d" % len(data)], descriptors)
            self._socket.sendall(data)
            started = self._started.get()
        if started is None:
            raise RuntimeError(f"the process that forks ended with {self._process.wait()}")
        return started

    def exit_status(self, number: int, timeout: float = 0.0) -> int | None:
        """How a child ended, below 0 for a signal; None if it has not ended after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._statuses or self._has_ended, timeout)
            if self._has_ended:
                return self._statuses.get(number, -signal.SIGKILL)  # it has killed the others
            return self._statuses.get(number)

    def _receive(self) -> None:
        with self._socket.makefile("rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                kind, number, value = json.loads(line)
                if kind == "started":
                    self._started.put((number, value))
                else:
                    with self._changed:
                        self._statuses[number] = value
                        self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._started.put(None)


class ForkedProcess:
    """A child of a `ForkServer`, used as `millrace.testing.process.ChildProcess` is. Not thread-safe.

    `program` is the path of a script or, with a line break, a program's text. Signals for the group of the process that
    started the server do not reach it. The end of a `with` block kills it.
    """

    def __init__(
        self,
        server: ForkServer,
        program: str,
        *arguments: str,
        log: pathlib.Path,
        cwd: pathlib.Path | None = None,
        env: Mapping[str, str] | None = None,
        pipes: bool = False,
    ) -> None:
        self._server = server
        self._log = log
        self._pipes: tuple[IO[bytes], ...] = ()
        request = {
            "program": program,
            "arguments": arguments,
            "directory": str(cwd or pathlib.Path.cwd()),
            "environment": dict(os.environ if env is None else env),
        }
        with contextlib.ExitStack() as theirs:
            output = theirs.enter_context(log.open("ab")).fileno()
            if pipes:
                from_here, to_stdin = os.pipe()
                from_stdout, to_here = os.pipe()
                self._pipes = (os.fdopen(to_stdin, "wb"), os.fdopen(from_stdout, "rb"))
                theirs.callback(os.close, from_here)
                theirs.callback(os.close, to_here)
            else:
                from_here, to_here = theirs.enter_context(open(os.devnull, "rb")).fileno(), output
            self._number, self.pid = server.start(request, [from_here, to_here, output])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def stdin(self) -> IO[bytes]:
        """Its standard input; only with `pipes=True`."""
        return self._pipes[0]

    @property
    def stdout(self) -> IO[bytes]:
        """Its standard output; only with `pipes=True`."""
        return self._pipes[1]

    def exit_status(self) -> int | None:
        """The exit status, below 0 for a signal, or None while it runs."""
        return self._server.exit_status(self._number)

    def output(self, code: int = 0) -> str:
        """Wait for its end, which must be with `code`; returns its standard output. Only with `pipes=True`."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        text = self.stdout.read().decode()
        assert self.wait(timeout=300) == code, self._log.read_text(errors="replace")
        return text

    def wait(self, timeout: float) -> int:
        """Wait for its end; returns the exit status. Raises `TimeoutError`."""
        status = self._server.exit_status(self._number, timeout)
        if status is None:
            raise TimeoutError(f"process {self.pid} has not ended in {timeout} s")
        return status

    def stop(self) -> None:
        """End it: SIGTERM, and after five seconds SIGKILL."""
        self._signal(signal.SIGTERM)
        if self._server.exit_status(self._number, _GRACE_SECONDS) is None:
            self._signal(signal.SIGKILL)
        self._close()

    def kill(self) -> None:
        """End it as a crash would."""
        self._signal(signal.SIGKILL)
        self._close()

    def _signal(self, number: signal.Signals) -> None:
        if self.exit_status() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _close(self) -> None:
        self.wait(timeout=60)
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # what was not written yet has no reader any more
                pipe.close()


_LOADED_LATER = (
    "millrace.cache.rebuild",
    "millrace.origin.limits.retrying",
    "millrace.origin.object_store",
    "obstore.store",
)
"""Modules that Millrace imports at the first use of a cache or an origin."""


def node_server() -> ForkServer:
    """Forks nodes, and processes that read and write through them."""
    return _server(
        "tests.support.settable_time",
        "millrace.cli.node",
        "millrace.node.process",
        "millrace.filesystem",
        *_LOADED_LATER,
        "xxhash",
    )


def torch_server() -> ForkServer:
    """Forks ranks, and other processes that use torch."""
    return _server(
        "numpy.ma",  # at the first use of `numpy.unique`
        "pytest",  # as the ranks' scripts, which are test modules
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",  # its first use loads `torch._dynamo`: a second of CPU
        "millrace.checkpoint.run.manager",
        "millrace.filesystem",
        *_LOADED_LATER,
    )


_servers: dict[tuple[str, ...], ForkServer] = {}


def _server(*modules: str) -> ForkServer:
    """One for all tests of this process, or another one after its end."""
    server = _servers.get(modules)
    if server is None or not server.is_alive:
        server = _servers[modules] = ForkServer(*modules)
    return server


# --- in the process that forks --------------------------------------------------------------------


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request; returns the request in the child. Ends the process at the end of the connection."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    numbers: dict[int, int] = {}
    libc = ctypes.CDLL(None)
    own = os.getpid()
    count = 0

    def report(kind: str, number: int, value: int) -> None:
        connection.sendall(json.dumps([kind, number, value]).encode("utf-8") + b"\n")

    while True:
        ready = select.select([connection, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
        for child in list(numbers):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                report("ended", numbers.pop(child), os.waitstatus_to_exitcode(status))
        if connection not in ready:
            continue
        length, descriptors, _, _ = socket.recv_fds(connection, 20, 3)
        if not length:
            for child in numbers:
                os.kill(child, signal.SIGKILL)
            os._exit(0)
        data = b""
        while len(data) < int(length):
            data += connection.recv(int(length) - len(data))
        count += 1
        child = os.fork()
        if not child:
            libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != own:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            for descriptor in (*descriptors, woken, wake):
                os.close(descriptor)
            connection.close()
            request: dict[str, Any] = json.loads(data)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        numbers[child] = count
        report("started", count, child)


def _main() -> None:
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a child does not collect what is loaded here

    descriptor = os.dup(int(sys.argv[1]))  # a low number, which `select` needs: the one given may be above 1,023
    os.close(int(sys.argv[1]))
    request = _serve(socket.socket(fileno=descriptor))
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    tempfile.tempdir = None
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    program: str = request["program"]
    if "\n" in program:
        sys.argv = ["-c", *request["arguments"]]
        sys.path[0] = ""
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(program, "<string>", "exec"), vars(module))
    else:
        sys.argv = [program, *request["arguments"]]
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    _main()
