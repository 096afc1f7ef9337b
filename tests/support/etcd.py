"""A real etcd on loopback: `EtcdServer`. The binary is Debian's (package `etcd-server`), on the PATH or in the clone.

It has neither password nor TLS: for tests, on a machine whose users may see the members of a cluster.
"""

from __future__ import annotations

import functools
import http.client
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.server_process import HOST, ServerProcess, get, runs_here

from millrace.errors import MissingDependencyError


@functools.cache
def find_etcd() -> Path:
    """Return the path of an etcd 3.4 or newer: on the PATH, or where `tools/debian-packages.sh` unpacks it in the clone.

    Raises `MissingDependencyError`.
    """
    clone = Path(__file__).parents[2]
    candidates = [shutil.which("etcd"), clone / ".deps" / "debian" / "usr" / "bin" / "etcd"]
    for path in (Path(candidate) for candidate in candidates if candidate):
        if os.access(path, os.X_OK) and path.is_file() and runs_here(path):
            return path.resolve()
    raise MissingDependencyError("no etcd", next_step="install Debian's package etcd-server")


class EtcdServer:
    """One etcd with its log in `directory`, on 127.0.0.1 and a free port that stays over restarts.

    Its data is there, too, or below the folder TEST_MEMORY_DIR, which `tools/test.sh` makes in memory.
    A context manager; `start`, `stop` and `kill` may alternate. It dies with this process. Not thread-safe; the server is.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.log_path = self.directory / "etcd.log"
        memory = os.environ.get("TEST_MEMORY_DIR")
        self._data = Path(tempfile.mkdtemp(dir=memory) if memory else self.directory) / "data"
        # Its other settings come from ETCD_* variables.
        self._process = ServerProcess("etcd", self.log_path, port_count=2, not_inherited=("ETCD_",))

    @property
    def address(self) -> str:
        """`host:port` for clients."""
        return f"{HOST}:{self._process.ports[0]}"

    @property
    def members(self) -> str:
        """The option `members` of a cluster that is kept here."""
        return f"etcd://{self.address}"

    def start(self) -> None:
        """Start it, with the data that the last one left, and wait until it answers.

        Raises `MissingDependencyError` and `RetryableError`.
        """
        binary = find_etcd()
        self._process.start(lambda ports: self._command(binary, ports), _is_healthy)

    def _command(self, binary: Path, ports: Sequence[int]) -> list[str | Path]:
        client, peer = (f"http://{HOST}:{port}" for port in ports)
        return [
            binary,
            "--name=test",
            f"--data-dir={self._data}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=test={peer}",
        ]

    def stop(self) -> None:
        """End it in order. Idempotent."""
        self._process.stop()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()

    def wipe(self) -> None:
        """Remove its data; it must not run."""
        self._process.check_ended()
        shutil.rmtree(self._data)

    def pause(self) -> None:
        """Have it be silent, with its connections open, until `go_on`."""
        self._process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """The end of `pause`."""
        self._process.signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._data, ignore_errors=True)


def _is_healthy(port: int) -> bool:
    return b'"true"' in get(http.client.HTTPConnection(HOST, port, timeout=20), "/health")
