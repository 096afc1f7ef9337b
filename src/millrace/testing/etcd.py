"""A real etcd on loopback: `EtcdServer`. The binary is Debian's (package `etcd-server`), on the PATH or in the clone.

It asks for no password and speaks no TLS: for tests, on a machine whose users may see who is in a cluster.
"""

from __future__ import annotations

import functools
import http.client
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from millrace.errors import MissingDependencyError, RetryableError, UsageError
from millrace.testing.process import ChildProcess, free_ports, log_tail

_HOST = "127.0.0.1"
_ATTEMPTS = 3


@functools.cache
def find_etcd() -> Path:
    """Return the path of an etcd 3.4 or newer: on the PATH, or where `tools/debian-packages.sh` unpacks it in the clone.

    Raises `MissingDependencyError`.
    """
    clone = Path(__file__).parents[3]
    candidates = [shutil.which("etcd"), clone / ".deps" / "debian" / "usr" / "bin" / "etcd"]
    for path in (Path(candidate) for candidate in candidates if candidate):
        if os.access(path, os.X_OK) and path.is_file() and _runs(path):
            return path.resolve()
    raise MissingDependencyError("no etcd", next_step="install Debian's package etcd-server")


def _runs(path: Path) -> bool:
    """Whether it starts here: an unpacked one might be of another machine."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class EtcdServer:
    """One etcd with its data in `directory`, on 127.0.0.1 and a free port that stays over restarts.

    A context manager; `start`, `stop` and `kill` may alternate. It dies with this process. Not thread-safe; the server is.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.log_path = self.directory / "etcd.log"
        self._ports: tuple[int, int] | None = None
        self._process: ChildProcess | None = None

    @property
    def address(self) -> str:
        """`host:port` for clients."""
        if self._ports is None:
            raise UsageError("etcd has not been started", next_step="call start()")
        return f"{_HOST}:{self._ports[0]}"

    @property
    def members(self) -> str:
        """The option `members` of a cluster that is kept here."""
        return f"etcd://{self.address}"

    def start(self) -> None:
        """Start it, with the data that the last one left, and wait until it answers. Raises `RetryableError`."""
        if self._process is not None:
            raise UsageError("etcd runs already", next_step="call stop() or kill() first")
        binary = find_etcd()
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS if self._ports is None else 1):
            ports = self._ports or tuple(free_ports(2))
            self._launch(binary, ports[0], ports[1])
            if self._wait(ports[0]):
                self._ports = (ports[0], ports[1])
                return
            self._end(kill=True)  # somebody else took a port
        raise RetryableError(f"etcd did not start; its log ends: {log_tail(self.log_path)}", next_step="try again")

    def _launch(self, binary: Path, client_port: int, peer_port: int) -> None:
        client, peer = f"http://{_HOST}:{client_port}", f"http://{_HOST}:{peer_port}"
        command: list[str | Path] = [
            binary,
            "--name=test",
            f"--data-dir={self.directory / 'data'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=test={peer}",
        ]
        # Its other settings come from ETCD_* variables, which are those of another etcd.
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        self._process = ChildProcess(command, log=self.log_path, cwd=self.directory, env=env, grace_seconds=3.0)

    def _wait(self, port: int) -> bool:
        """True when it answers, False when it has ended. Raises `RetryableError` after half a minute."""
        deadline = time.monotonic() + 30
        while self._process is not None and self._process.exit_status() is None:
            connection = http.client.HTTPConnection(_HOST, port, timeout=2)
            try:
                connection.request("GET", "/health")
                if b'"true"' in connection.getresponse().read():
                    return True
            except (OSError, http.client.HTTPException):
                pass  # not up yet: asked again until the deadline, whose error shows its log
            finally:
                connection.close()
            if time.monotonic() > deadline:
                raise RetryableError(f"etcd does not answer; its log ends: {log_tail(self.log_path)}")
            time.sleep(0.02)
        return False

    def stop(self) -> None:
        """End it in order. Idempotent."""
        self._end(kill=False)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(kill=True)

    def wipe(self) -> None:
        """Remove its data; it must not run."""
        if self._process is not None:
            raise UsageError("etcd runs", next_step="call stop() or kill() first")
        shutil.rmtree(self.directory / "data")

    def pause(self) -> None:
        """Have it be silent, with its connections open, until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """The end of `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is None:
            raise UsageError("etcd does not run", next_step="call start() first")
        os.kill(self._process.pid, number)

    def _end(self, *, kill: bool) -> None:
        if self._process is not None:
            self._process.kill() if kill else self._process.stop()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
