"""A real Prometheus on loopback: `PrometheusServer`. The binaries are Debian's (package `prometheus`)."""

from __future__ import annotations

import functools
import http.client
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from tests.support.server_process import HOST, ServerProcess, get, runs_here

from millrace.errors import MissingDependencyError


@functools.cache
def find_prometheus(name: str = "prometheus") -> Path:
    """The path of `prometheus` or `promtool`: on the PATH, or where `tools/debian-packages.sh` unpacks it in the clone.

    Raises `MissingDependencyError`.
    """
    clone = Path(__file__).parents[2]
    candidates = [shutil.which(name), clone / ".deps" / "debian" / "usr" / "bin" / name]
    for path in (Path(candidate) for candidate in candidates if candidate):
        if os.access(path, os.X_OK) and path.is_file() and runs_here(path):
            return path.resolve()
    raise MissingDependencyError(f"no {name}", next_step="install Debian's package prometheus")


class PrometheusServer:
    """One Prometheus with its data and its configuration in `directory`. A context manager; it dies with this process."""

    def __init__(self, directory: Path, configuration: dict[str, Any]) -> None:
        self._directory = directory
        self._configuration = configuration
        self._process = ServerProcess("prometheus", directory / "prometheus.log")

    def query(self, expression: str) -> list[Any]:
        """The result of an expression now. Raises `ValueError` with the error of Prometheus."""
        connection = http.client.HTTPConnection(HOST, self._process.ports[0], timeout=300)
        answer = json.loads(get(connection, f"/api/v1/query?{urlencode({'query': expression})}"))
        if answer["status"] != "success":
            raise ValueError(f"{expression}: {answer['error']}")
        found: list[Any] = answer["data"]["result"]
        return found

    def __enter__(self) -> Self:
        binary = find_prometheus()
        self._directory.mkdir(parents=True, exist_ok=True)
        file = self._directory / "prometheus.json"
        file.write_text(json.dumps(self._configuration))  # JSON is YAML

        def command(ports: Sequence[int]) -> list[str | Path]:
            return [
                binary,
                f"--config.file={file}",
                f"--storage.tsdb.path={self._directory / 'data'}",
                f"--web.listen-address={HOST}:{ports[0]}",
            ]

        self._process.start(command, lambda port: b"Ready" in get(http.client.HTTPConnection(HOST, port), "/-/ready"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
