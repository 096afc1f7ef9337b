"""How a process of a Ray job finds its Ray node's part in the cluster, and starts it at the first use.

There is nothing to set up: one actor a Ray node, which reserves nothing, is found by its name, outlives the job, and ends
with the Ray cluster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.config import CacheOptions, resolve
from millrace.errors import ConfigurationError, MillraceError, OriginUnavailableError
from millrace.events import Event, emit
from millrace.members.ray_actor import ACTOR_NAMESPACE, IDLE_SECONDS, NodeActor, introduce
from millrace.members.ray_control import ControlPlane
from millrace.members.ray_members import RayMembers, parse_members
from millrace.members.ray_records import NodeRecord, actor_name, cluster_name

__all__ = ["ACTOR_NAMESPACE", "NODE_START", "RayMembers", "find_node", "ray_nodes", "start_everywhere"]

NODE_START = "millrace.filesystem.ray_node:start"
"""The `StartNode` that actors run."""

_START_SECONDS = 60.0
_CALLS_AT_ONCE = 8


def find_node(
    options: CacheOptions,
    origin: Any = None,
    *,
    is_alive: Callable[[Path], bool] = lambda directory: False,
    start: str = NODE_START,
    idle_seconds: float = IDLE_SECONDS,
) -> NodeRecord | None:
    """The node of the Ray node that this process runs on, started if there is none; None on a mere client of Ray (`ray://`).

    `is_alive` says whether the node with this directory lives; where it does its actor need not be asked. `origin` is made
    known to the other nodes. Where nothing has run for `idle_seconds` on a Ray node that an autoscaler may take away, its
    node leaves and its actor ends.

    Thread-safe; not to be called in a forked child. Raises `OriginUnavailableError` when the control plane does not answer
    or the actor does not start within a minute, and what starting the node raises.
    """
    import ray

    if ray.util.client.ray.is_connected():
        return None  # the disks of this machine are not the cluster's
    runtime = ray.get_runtime_context()
    ray_node = str(runtime.get_node_id())
    control = _connections.to(str(runtime.gcs_address))
    cluster = cluster_name(options, _default_dirs())
    if origin is not None:
        introduce(control, cluster, origin)
    name = actor_name(cluster, options, ray_node)
    told = control.get(f"{cluster}/node/{name}")
    if told is not None:
        record = NodeRecord.from_bytes(told)
        # Before its actor is asked for: that costs a process several times as much, and Ray starts new ones all the time.
        if is_alive(record.directory):
            return record
    return _record_from(_actor(name, ray_node, start, options, cluster, idle_seconds))


def start_everywhere(options: CacheOptions, *, start: str = NODE_START) -> set[str]:
    """Start a node on every Ray node that lives, where there is none; gives the ids of the members that run.

    One that does not start within a minute is left out, with an event. Raises `OriginUnavailableError` when the control
    plane does not answer.
    """
    import ray

    cluster = cluster_name(options, _default_dirs())
    started = time.monotonic()
    asked = []
    for node in ray.nodes():
        if node["Alive"]:
            ray_node = str(node["NodeID"])
            actor = _actor(actor_name(cluster, options, ray_node), ray_node, start, options, cluster)
            asked.append((ray_node, actor.record.remote()))
    found = set()
    for ray_node, record in asked:
        try:
            left = max(0.1, started + _START_SECONDS - time.monotonic())
            found.add(NodeRecord.from_bytes(ray.get(record, timeout=left)).member_id)
        except (MillraceError, ray.exceptions.RayError) as error:
            emit(Event(name="cluster.node.failed", subject=ray_node, detail=str(error)))
    return found


def ray_nodes(options: CacheOptions) -> dict[str, str]:
    """The ids of the Ray nodes that members of the cluster run on, by the members' ids.

    Raises `OriginUnavailableError` when the control plane does not answer.
    """
    import ray

    control = _connections.to(str(ray.get_runtime_context().gcs_address))
    found = {}
    for record in parse_members(control.scan(f"{cluster_name(options, _default_dirs())}/member/")).values():
        found[record.member.id] = record.ray_node
    return found


def _actor(
    name: str, ray_node: str, start: str, options: CacheOptions, cluster: str, idle_seconds: float = IDLE_SECONDS
) -> Any:
    """The actor of this name, made where there is none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor_class = ray.remote(NodeActor).options(
        name=name,
        namespace=ACTOR_NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=_CALLS_AT_ONCE,
        # Also keeps it out of the placement group of the task that happens to be the first.
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node, soft=False),
    )
    return actor_class.remote(name, start, options, cluster, idle_seconds)


def _record_from(actor: Any) -> NodeRecord:
    import ray

    try:
        return NodeRecord.from_bytes(ray.get(actor.record.remote(), timeout=_START_SECONDS))
    except MillraceError as error:
        # Ray gives an error of the actor's as one of two classes, which would not be pickled as what it is.
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, MillraceError) else error from None
    except ray.exceptions.RayError as error:
        raise OriginUnavailableError(
            f"the actor that runs this Ray node's cache does not start: {error}",
            next_step="look at its log in Ray's dashboard, or set members='none'",
        ) from error


def _default_dirs() -> tuple[Path, ...] | None:
    """This node's cache directories where nobody asks for others; None where its configuration cannot be used."""
    try:
        return resolve({}).cache_dirs
    except ConfigurationError:
        return None


class _Connections:
    """This process's connection to the control plane of the Ray cluster that it is in. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: ControlPlane | None = None

    def to(self, address: str) -> ControlPlane:
        with self._lock:
            if self._control is None or self._control.address != address:
                self._control = ControlPlane(address)
            return self._control


_connections = _Connections()
