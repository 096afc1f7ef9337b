"""The one process of a server program on loopback: started on free ports, waited for, ended.

`EtcdServer` and `AzuriteServer` have one. `S3Server`, which keeps a lock and whose errors are for people, has its own ways.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from millrace.errors import RetryableError, UsageError
from millrace.testing.process import ChildProcess, free_ports, log_tail

HOST = "127.0.0.1"
_ATTEMPTS = 3
_START_SECONDS = 180.0
_LOOK_SECONDS = 0.02


class ServerProcess:
    """A server called `name` in messages, whose log is the file `log`. Its `port_count` ports stay over restarts.

    It runs in the log's folder, without the variables of the environment that begin with one of `not_inherited`: they would
    be those of another server of its kind. It dies with this process. Not thread-safe.
    """

    def __init__(self, name: str, log: Path, *, port_count: int = 1, not_inherited: tuple[str, ...] = ()) -> None:
        self._name = name
        self._log = log
        self._port_count = port_count
        self._not_inherited = not_inherited
        self._ports: tuple[int, ...] = ()
        self._process: ChildProcess | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports, from the first start on. Raises `UsageError` before."""
        if not self._ports:
            raise UsageError(f"{self._name} has not been started", next_step="call start()")
        return self._ports

    def start(
        self,
        command: Callable[[Sequence[int]], Sequence[str | Path]],
        answers: Callable[[int], bool],
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Run `command(ports)`, with the additional variables `env`, and wait until `answers(ports[0])`.

        That may raise `OSError` or `http.client.HTTPException` as long as the server is not up. Raises `UsageError` when it
        runs, and `RetryableError` with the end of its log when it ends by itself, or has not answered after three minutes.
        """
        self.check_ended()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(self._not_inherited)}
        for _ in range(1 if self._ports else _ATTEMPTS):
            ports = self._ports or tuple(free_ports(self._port_count))
            process = ChildProcess(
                command(ports),
                log=self._log,
                cwd=self._log.parent,
                env={**inherited, **(env or {})},
                grace_seconds=3.0,
            )
            self._process = process
            if self._wait(process, ports[0], answers):
                self._ports = ports
                return
            self.kill()  # another process took a port
        raise RetryableError(f"{self._name} did not start; its log ends: {log_tail(self._log)}", next_step="try again")

    def _wait(self, process: ChildProcess, port: int, answers: Callable[[int], bool]) -> bool:
        """True when it answers, False when it has ended. Raises `RetryableError` at the deadline."""
        deadline = time.monotonic() + _START_SECONDS
        while process.exit_status() is None:
            try:
                if answers(port):
                    return True
            except (OSError, http.client.HTTPException):
                pass  # not up yet: asked again until the deadline, whose error shows its log
            if time.monotonic() > deadline:
                raise RetryableError(f"{self._name} does not respond; its log ends: {log_tail(self._log)}")
            time.sleep(_LOOK_SECONDS)
        return False

    def check_ended(self) -> None:
        """Raises `UsageError` while it runs."""
        if self._process is not None:
            raise UsageError(f"{self._name} runs", next_step="call stop() or kill() first")

    def stop(self) -> None:
        """End it in order. Idempotent."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def kill(self) -> None:
        """Kill the process, as a crash would. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal. Raises `UsageError` where it does not run."""
        if self._process is None:
            raise UsageError(f"{self._name} does not run", next_step="call start() first")
        os.kill(self._process.pid, number)


def get(connection: http.client.HTTPConnection, path: str) -> bytes:
    """The body of an answer, whatever its status; ends the connection."""
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def runs_here(program: Path) -> bool:
    """Whether `program --version` works: what was unpacked or installed might be of another machine."""
    try:
        return subprocess.run([program, "--version"], capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
