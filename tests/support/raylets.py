"""A real Ray cluster on this machine: several raylets, each with a loopback address of its own."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.ray_sessions import without_monitors

import millrace
from millrace.cache.counters import totals
from millrace.cache.node import store_directory
from millrace.filesystem import MillraceFileSystem
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_STORE_BYTES = 80 << 20
_PATIENCE_SECONDS = 180.0
_IMPATIENT = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
}
"""A node is dead two seconds after `kill -9`, by default after 15; after 22 s of silence, for on a busy machine healthy ones
are silent for a while, too.
"""
_PREEMPTION = 2  # autoscaler_pb2.DrainNodeReason


class Raylets:
    """A cluster that this process is connected to as a driver on its first node. Nodes are known by their Ray ids."""

    def __init__(self, directory: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._directory = directory
        self._count = 0
        # Without this every `ray.init()` on the machine would find this cluster.
        ray._private.utils.write_ray_address, write = _nothing, ray._private.utils.write_ray_address
        try:
            self._cluster = Cluster()
            self._nodes = {}
            with without_monitors():
                self.head = self.add()
        finally:
            ray._private.utils.write_ray_address = write

    def ids(self) -> list[str]:
        """Of the nodes that run."""
        return list(self._nodes)

    def add(self, *, kind: str = "") -> str:
        """Start another node; returns its id. An autoscaler's has a `kind`."""
        self._count += 1
        head_only = {
            "temp_dir": str(self._directory),
            "include_dashboard": False,
            "_system_config": _IMPATIENT,
        }
        environment = {"env_vars": {"RAY_NODE_TYPE_NAME": kind}} if kind else {}
        node = self._cluster.add_node(
            **environment,
            num_cpus=1,
            object_store_memory=_STORE_BYTES,
            node_ip_address=f"127.0.0.{self._count + 1}",
            **(head_only if self._count == 1 else {}),
        )
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, node_id: str) -> None:
        """`kill -9` of a raylet and its other processes."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def drain(self, node_id: str, *, seconds: float) -> None:
        """Have Ray announce that the node is taken away, as a spot notice does."""
        from ray._raylet import GcsClient

        deadline_ms = int((time.time() + seconds) * 1000)
        client = GcsClient(address=self._cluster.address)
        accepted, why = client.drain_node(node_id, _PREEMPTION, "spot notice", deadline_ms)
        assert accepted, why

    def is_idle(self, node_id: str) -> bool:
        """Whether an autoscaler would take the node away in a while."""
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply, NodeStatus

        client = GcsClient(address=self._cluster.address)
        state = GetClusterResourceStateReply.FromString(client.get_cluster_resource_state()).cluster_resource_state
        (status,) = [node.status for node in state.node_states if node.node_id.hex() == node_id]
        return status == NodeStatus.IDLE

    @contextmanager
    def silent_control_plane(self) -> Iterator[None]:
        """Stop the GCS for a while."""
        (server,) = self._cluster.head_node.all_processes["gcs_server"]
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(server.process.pid, signal.SIGCONT)

    def connect(self) -> None:
        import ray

        ray.init(
            address=self._cluster.address,
            _node_ip_address="127.0.0.2",
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=True,
        )

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def raylets(nodes: int) -> Iterator[Raylets]:
    """So many nodes, with this process connected; everything is gone at the end."""
    directory = Path(tempfile.mkdtemp(prefix="mr-"))  # short: the path of a socket has 107 bytes
    try:
        cluster = Raylets(directory)
        try:
            for _ in range(nodes - 1):
                cluster.add()
            cluster.connect()
            yield cluster
        finally:
            cluster.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def through_region(s3: S3Server, region: EmulatedRegion, cache_dir: Path, *, capacity: str) -> MillraceFileSystem:
    """All that a user writes: `members` is left to its default."""
    return millrace.filesystem(
        "s3",
        target_options={**s3.target_options, "endpoint_url": region.endpoint_url},
        cache_dir=str(cache_dir),
        capacity=capacity,
        min_free=0,
        consistency="immutable",
    )


def peer_failures(fs: MillraceFileSystem) -> int:
    """Requests that any node of this machine did not answer as it should, so far; its readers count, too."""
    return sum(
        totals(folder / "counters")["peer_failures"]
        for cache_dir in fs._options.cache_dirs
        for folder in store_directory(cache_dir).parent.iterdir()
        if (folder / "counters").is_dir()
    )


def on(node_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function as a task on a node of the cluster."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return ray.get(task.remote(*arguments), timeout=_PATIENCE_SECONDS)


def _nothing(*_: Any) -> None:
    pass
