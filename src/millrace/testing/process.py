"""Helper processes that end with their owner, and do not receive signals that are sent to it.

A helper must end when its owner is killed with `kill -9`, and must *not* end when the user presses Ctrl-C, because the owner
still needs it while it cleans up. The first uses Linux' parent-death signal, the second a separate session.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from millrace.errors import UsageError
from millrace.runtime import forks

# Runs in the new process, then becomes the helper. As a program of its own it needs no `preexec_fn`, which is unsafe in
# a process with threads. The check of the parent closes the gap in which the owner died before prctl took effect.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


class _Spawner:
    """Starts processes from one thread that lives as long as this process.

    The kernel sends the parent-death signal when the *thread* that forked ends, so a helper started from a short-lived
    worker thread would die with that.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]]
        self._work = queue.SimpleQueue()
        threading.Thread(target=self._run, name="millrace-spawner", daemon=True).start()

    def _run(self) -> None:
        while True:
            start, future = self._work.get()
            try:
                future.set_result(start())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
                future.set_exception(error)

    def __call__(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        future: Future[subprocess.Popen[bytes]] = Future()
        self._work.put((start, future))
        return future.result()


_spawner: _Spawner | None = None
_spawner_lock = threading.Lock()


def _reset_spawner() -> None:
    # Threads do not survive a fork, and the lock may have been held.
    global _spawner, _spawner_lock
    _spawner, _spawner_lock = None, threading.Lock()


forks.reset_in_child(_reset_spawner)


def _spawn(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    global _spawner
    with _spawner_lock:
        if _spawner is None:
            _spawner = _Spawner()
        spawner = _spawner
    return spawner(start)


def _end(popen: subprocess.Popen[bytes], owner_pid: int, grace_seconds: float) -> None:
    if os.getpid() != owner_pid:  # a forked child inherits the object, but the process is not its own
        return
    if popen.poll() is None:
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(grace_seconds)
    if popen.poll() is None:
        popen.kill()
    popen.wait()
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # the rest of the output has no reader any more
                pipe.close()


class ChildProcess:
    """One running helper process; a context manager that ends it. Not thread-safe.

    Its output goes to the file `log`, or with `pipes=True` its stdin and stdout are pipes (`stdin`, `stdout`) and only
    stderr goes to `log`. `pass_fds` stay open in it. It also ends when this object is collected, when the interpreter
    exits, or when this process dies by any means.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        pipes: bool = False,
        grace_seconds: float = 5.0,
    ) -> None:
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *map(str, command)]
        with log.open("ab") as output:

            def start() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    launch,
                    stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if pipes else output,
                    stderr=output,
                    cwd=cwd,
                    env=None if env is None else dict(env),
                    pass_fds=pass_fds,
                    start_new_session=True,
                )

            self._popen = _spawn(start)
        self._end = weakref.finalize(self, _end, self._popen, os.getpid(), grace_seconds)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def stdin(self) -> IO[bytes]:
        """What the helper reads as its standard input; only with `pipes=True`."""
        return self._pipe(self._popen.stdin)

    @property
    def stdout(self) -> IO[bytes]:
        """The helper's standard output; only with `pipes=True`."""
        return self._pipe(self._popen.stdout)

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise UsageError("the helper process has no pipes", next_step="start it with pipes=True")
        return pipe

    def exit_status(self) -> int | None:
        """The exit status (negative: the signal that ended it), or None while it runs."""
        return self._popen.poll()

    def stop(self) -> None:
        """End it: SIGTERM, and after the grace period SIGKILL, to this one process. Idempotent."""
        self._end()

    def kill(self) -> None:
        """Kill the process, as a crash would."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGKILL)
        self._end()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_LOWEST_PORT = 20_000  # Ray's workers use those from 10002 to 19999
_LEAST_CHOICE = 4_000
_MOST_ATTEMPTS = 10_000
_KEPT_CLAIMS = 64
_random = random.SystemRandom()
_claims: deque[int] = deque()  # descriptors


def free_ports(count: int) -> list[int]:
    """Return `count` distinct TCP ports that are free on 127.0.0.1.

    A server needs some time until it listens on its port. Until then no other process gets the port by chance: the ports
    are below the range from which the kernel chooses, where that leaves room, and each one stays claimed. A claim ends with
    this process, or when it has received 64 more ports. Until then this function returns the port to no process.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for _ in range(_MOST_ATTEMPTS):
            if len(found) == count:
                return found
            one = stack.enter_context(socket.socket())
            try:
                one.bind(("127.0.0.1", _candidate()))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            port = int(one.getsockname()[1])
            if _claim(port):
                found.append(port)
    raise OSError(errno.EADDRINUSE, "no free ports on 127.0.0.1")


def _candidate() -> int:
    """A port outside the range from which the kernel chooses; 0 (any port) where that leaves few."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    return _random.randrange(_LOWEST_PORT, lowest) if lowest - _LOWEST_PORT >= _LEAST_CHOICE else 0


def _claim(port: int) -> bool:
    """Claim a port among all processes that use this module; False if another has it. A claim ends with its process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        try:
            name.bind(f"\0millrace-port-{port}")  # in no directory
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        _claims.append(name.detach())
    if len(_claims) > _KEPT_CLAIMS:
        os.close(_claims.popleft())
    return True


def log_tail(path: Path, lines: int = 3) -> str:
    """The last non-empty lines of a log file on one line, for an error message."""
    try:
        text = path.read_bytes()[-8192:].decode("utf-8", "replace")
    except FileNotFoundError:
        return "(no log)"
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-lines:]) or "(empty log)"
