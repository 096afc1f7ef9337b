"""Nodes of a cluster in this process, to which a `CheckpointManager` of this process copies replicas."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers import steady_ports

from millrace.cluster.attach import close_all
from millrace.config import address_text, resolve
from millrace.node.process import NodeProcess

TOKEN = "a-token-for-tests-only"


class ReplicaNodes:
    """`count` nodes with a cache directory each, static ones without `members`. `on` puts managers on one.

    `tls` is a folder with a certificate, for all; `options` are further ones of all nodes. A context manager.
    """

    def __init__(
        self, directory: Path, count: int = 3, *, members: str | None = None, tls: Path | None = None, **options: Any
    ) -> None:
        self.directory = directory
        self._options = options if tls is None else {**options, "tls": str(tls)}
        self._tls = tls
        self._ports = steady_ports(count)
        static = "static://" + ",".join(address_text("127.0.0.1", port) for port in self._ports)
        self.members = members or static
        self._running: dict[int, NodeProcess] = {}

    def __enter__(self) -> ReplicaNodes:
        for number in range(len(self._ports)):
            self.start(number)
        return self

    def __exit__(self, *_: object) -> None:
        close_all()
        for number in list(self._running):
            self.stop(number)

    def start(self, number: int, **options: Any) -> NodeProcess:
        """Start a node, with further options of its own."""
        given = {
            "cache_dir": str(self.cache_dir(number)),
            "members": self.members,
            "cluster_token": TOKEN,
            "min_free": 0,
            **self._options,
            **options,
        }
        node = NodeProcess(resolve(given, environ={}, file={}), port=self._ports[number])
        node.start()
        self._running[number] = node
        return node

    def stop(self, number: int) -> None:
        """End a node; its disk stays."""
        self._running.pop(number).close()

    def node(self, number: int) -> NodeProcess:
        """A running node."""
        return self._running[number]

    def cache_dir(self, number: int) -> Path:
        """The cache directory of a node."""
        return self.directory / f"node-{number}"

    @contextlib.contextmanager
    def on(self, number: int) -> Iterator[None]:
        """Managers of this process are on the machine of this node."""
        close_all()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MILLRACE_CACHE_DIR", str(self.cache_dir(number)))
            patch.setenv("MILLRACE_MEMBERS", self.members)
            patch.setenv("MILLRACE_CLUSTER_TOKEN", TOKEN)
            if self._tls is not None:
                patch.setenv("MILLRACE_TLS", str(self._tls))
            yield
        close_all()

    def replicas(self) -> dict[int, list[Path]]:
        """The files of all replicas by node, also of nodes that do not run, without the parts of files."""
        found = {}
        for number in range(len(self._ports)):
            # Not Path.glob, which raises when the node deletes a directory meanwhile.
            paths = glob.glob("millrace/*/replicas/*/*/*", root_dir=self.cache_dir(number))
            found[number] = sorted(self.cache_dir(number) / path for path in paths)
        return found

    def holders(self, checkpoint: str) -> list[int]:
        """The nodes with files of a checkpoint."""
        return [number for number, paths in self.replicas().items() if any(p.parent.name == checkpoint for p in paths)]
