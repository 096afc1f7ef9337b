"""A cluster of real nodes on one machine: a process, an address (127.0.0.x) and a cache directory each, over one origin.

For tests and benchmarks. Nodes can be killed, suspended, drained and started again; file systems and processes that read
on a node's machine use that node's cache directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.support import cluster_reader, patience
from tests.support.fork_server import ForkedProcess, node_server

from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.membership import Member
from millrace.errors import OriginUnavailableError
from millrace.testing.process import ChildProcess, free_ports, log_tail

TOKEN = "a-token-for-tests-only"

_START_SECONDS = 180.0
_MAIN = "import sys; from millrace.cli import main\nsys.exit(main())"

_Process = ChildProcess | ForkedProcess


class LocalNode:
    """One node: `millrace node run` in a process of its own."""

    def __init__(
        self,
        number: int,
        host: str,
        port: int,
        directory: Path,
        start: Callable[[LocalNode], _Process],
    ):
        self.number = number
        self.host = host
        self.port = port
        self.directory = directory
        self.cache_dir = directory / "cache"
        self.log = directory / "node.log"
        self.options: Sequence[str] = ()
        """Its command-line arguments, in addition to those of all nodes."""
        self._start = start
        self._process: _Process | None = None

    @property
    def address(self) -> str:
        """Where its data plane listens."""
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process of a running node."""
        return self._running().pid

    def start(self) -> None:
        """Start its process; returns at once, see `LocalCluster.wait`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._process = self._start(self)

    def kill(self) -> None:
        """Kill it, as a crash would."""
        self._running().kill()
        self._process = None

    def suspend(self) -> None:
        """Make it silent, but alive."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it continue."""
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """Start a planned leave; returns at once."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        """Wait until its process has ended; returns its exit code. Raises `OriginUnavailableError` when it does not end."""
        process = self._running()
        deadline = time.monotonic() + seconds
        while (code := process.exit_status()) is None:
            if time.monotonic() > deadline:
                raise OriginUnavailableError(f"node {self.number} did not end: {log_tail(self.log)}")
            time.sleep(0.05)
        process.stop()
        self._process = None
        return code

    def stop(self) -> None:
        """End it in whatever state it is."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.resume()
            self._process.kill()
            self._process = None

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.exit_status() is None

    def _running(self) -> _Process:
        if self._process is None:
            raise OriginUnavailableError(f"node {self.number} does not run")
        return self._process


class LocalCluster:
    """`count` nodes below `directory`, over the S3 server that `target_options` (endpoint_url, key, secret) name.

    `members` is `"static"` or the value of the option `members`; with `"static"` all nodes, also those of `later`, which are
    started by `start_one` only, are in the list from the start. `options` go to every node's command line. `hosts` are the
    nodes' addresses, with or without a port, and `prefixes` stand before the commands of single nodes (`ip netns exec ...`).
    With `patient` the nodes wait for each other as `tests/support/patience.py` describes. A context manager.
    """

    def __init__(
        self,
        directory: Path,
        count: int,
        *,
        target_options: Mapping[str, str],
        members: str = "static",
        later: int = 0,
        options: Sequence[str] = (),
        hosts: Sequence[str] | None = None,
        prefixes: Mapping[int, Sequence[str]] | None = None,
        patient: bool = False,
    ) -> None:
        self.directory = directory
        self.target_options = dict(target_options)
        self._options = list(options)
        self.prefixes = dict(prefixes or {})
        self._program = patience.CODE + _MAIN if patient else _MAIN
        names = list(hosts or (f"127.0.0.{number + 2}" for number in range(count + later)))
        self.nodes = []
        for number, name in enumerate(names):
            host, _, port = name.partition(":")
            port_number = int(port) if port else free_ports(1)[0]
            self.nodes.append(LocalNode(number, host, port_number, directory / f"node-{number}", self._launch))
        self._count = count
        self.members = f"static://{','.join(node.address for node in self.nodes)}" if members == "static" else members
        self.client = PeerClient(token=TOKEN)

    def __enter__(self) -> Self:
        try:
            for node in self.nodes[: self._count]:
                node.start()
            for node in self.nodes[: self._count]:
                self.wait(node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every node."""
        self.client.close()
        for node in self.nodes:
            node.stop()

    def start_one(self, number: int, *options: str) -> LocalNode:
        """Start a node of `later`, or one that ended, with more options than the others; returns when it answers."""
        node = self.nodes[number]
        node.options = options
        node.start()
        self.wait(node)
        return node

    def wait(self, node: LocalNode, state: str = "here") -> None:
        """Wait until a node answers, and is in this state by its own view."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                members = self.client.call(self.member(node).address, "GET", "/v1/view")["members"]
                if any(each["address"] == node.address and each["state"] == state for each in members):
                    return
            if not node.is_running:
                raise OriginUnavailableError(f"node {node.number} ended: {log_tail(node.log, 6)}")
            if time.monotonic() > deadline:
                os.kill(node.pid, signal.SIGABRT)  # it prints where its threads are
                time.sleep(1.0)
                raise OriginUnavailableError(f"node {node.number} did not come up: {log_tail(node.log, 60)}")
            time.sleep(0.05)

    def member(self, node: LocalNode) -> Member:
        """A node as its peers name it."""
        return Member(id=node.address, address=node.address)

    def counters(self) -> dict[str, int]:
        """The sums over the stores of all nodes, also of those that do not run: what their processes and readers counted."""
        from millrace.cache.counters import totals

        sums: dict[str, int] = {}
        for node in self.nodes:
            for directory in (node.cache_dir / "millrace").glob("*/counters"):
                for name, value in totals(directory).items():
                    sums[name] = sums.get(name, 0) + value
        return sums

    def arguments(self, node: LocalNode, **options: Any) -> dict[str, Any]:
        """Arguments of `millrace.filesystem("s3", ...)` for a process on a node's machine."""
        return {
            "target_options": self.target_options,
            "cache_dir": str(node.cache_dir),
            "min_free": 0,
            "members": self.members,
            "cluster_token": TOKEN,
            "consistency": "immutable",
            **options,
        }

    def read_on(self, node: LocalNode, keys: Mapping[str, str], **settings: Any) -> Reading:
        """Start a process on a node's machine that reads whole objects and checks them.

        `keys` maps each key to the hexadecimal xxh3 of its bytes. `settings`: `options` of its file system, `passes` (1),
        `seconds` (instead of passes: until then), `seed` (shuffles), `piece_bytes` (reads in pieces of that size).
        """
        return Reading(
            node, {"keys": dict(keys), **settings, "options": self.arguments(node, **settings.get("options", {}))}
        )

    def _launch(self, node: LocalNode) -> _Process:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "AWS_"))}
        environ.update(
            MILLRACE_CLUSTER_TOKEN=TOKEN,
            AWS_ACCESS_KEY_ID=self.target_options["key"],
            AWS_SECRET_ACCESS_KEY=self.target_options["secret"],
            AWS_ENDPOINT_URL=self.target_options["endpoint_url"],
            XDG_CACHE_HOME=str(node.directory),
            XDG_CONFIG_HOME=str(node.directory),
            PYTHONFAULTHANDLER="1",
        )
        run = ["node", "run", "--listen", node.address, "--members", self.members, "--cache-dir", str(node.cache_dir)]
        run += ["--min-free", "0"]  # whatever else fills this machine's disk
        run += [*self._options, *node.options]
        prefix = self.prefixes.get(node.number)
        if prefix is None:
            return ForkedProcess(node_server(), self._program, *run, log=node.log, cwd=node.directory, env=environ)
        return ChildProcess(
            [*prefix, sys.executable, "-c", self._program, *run], log=node.log, cwd=node.directory, env=environ
        )


class Reading:
    """A process that reads; see `LocalCluster.read_on`."""

    def __init__(self, node: LocalNode, settings: Mapping[str, Any]) -> None:
        node.directory.mkdir(parents=True, exist_ok=True)
        self._log = node.directory / f"reader-{time.monotonic_ns()}.log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "AWS_"))}
        self._process = ForkedProcess(node_server(), cluster_reader.__file__, log=self._log, env=environ, pipes=True)
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def report(self) -> dict[str, Any]:
        """The next pass: `reads`, `nbytes`, `wrong` (keys), `errors`, `longest_seconds` (one read), `seconds`."""
        line = self._process.stdout.readline()
        if not line:
            self._process.stop()
            raise OriginUnavailableError(f"a reader ended with {self._process.exit_status()}: {log_tail(self._log, 6)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def log(self) -> str:
        """Its stderr."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End it."""
        self._process.kill()
