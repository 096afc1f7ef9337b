"""Finds the node of this Ray node for a process in a Ray job, and starts it at the first use.

No setup is needed: there is one actor for each Ray node, found by its name. It reserves no resources, outlives the job, and
ends with the Ray cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from millrace.cluster.membership.ray_actor import ACTOR_NAMESPACE, IDLE_SECONDS, NodeActor, StartNode, introduce
from millrace.cluster.membership.ray_control import ControlPlane
from millrace.cluster.membership.ray_members import RayMembers, parse_members
from millrace.cluster.membership.ray_records import NodeRecord, actor_name, cluster_name
from millrace.config import CacheOptions, resolve
from millrace.errors import ConfigurationError, MillraceError, OriginUnavailableError
from millrace.events import Event, emit
from millrace.runtime.failures import reason_of

__all__ = ["ACTOR_NAMESPACE", "RayMembers", "find_node", "ray_nodes", "start_everywhere"]

_START_SECONDS = 60.0
_CALLS_AT_ONCE = 8


def find_node(
    options: CacheOptions,
    origins: Iterable[Any] = (),
    *,
    start: StartNode,
    is_alive: Callable[[Path], bool] = lambda directory: False,
    idle_seconds: float = IDLE_SECONDS,
) -> NodeRecord | None:
    """The node on this process's Ray node, started by `start` if there is none; None on a Ray client (`ray://`).

    `is_alive` returns whether the node with a directory runs; if it does, no request is sent to its actor. The other nodes
    get access to `origins`. If nothing has run for `idle_seconds` on a Ray node that an autoscaler may remove, its node
    leaves and its actor ends.

    Thread-safe; must not be called in a forked child. Raises `OriginUnavailableError` if the control plane does not respond
    or the actor does not start within a minute, and the errors of `start`.
    """
    if _is_client():
        return None
    control, ray_node = _here()
    cluster = cluster_name(options, _default_dirs())
    for origin in origins:
        introduce(control, cluster, origin)
    name = actor_name(cluster, options, ray_node)
    record = _record(control, cluster, name)
    # A lookup of the actor costs several times as much, and Ray starts new processes all the time.
    if record is not None and is_alive(record.directory):
        return record
    return _record_from(_actor(name, ray_node, start, options, cluster, idle_seconds))


def start_on_only_node(
    options: CacheOptions, origins: Iterable[Any] = (), *, start: StartNode
) -> Callable[[], NodeRecord | None] | None:
    """Start the node of a Ray cluster's only Ray node without waiting for it, if it was not started before.

    Otherwise returns None and starts nothing. Returns a function that requests the node's record from the control plane, and
    uses nothing else of Ray; its result is None before the node runs. Raises as `find_node`.
    """
    if _is_client():
        return None
    control, ray_node = _here()
    cluster = cluster_name(options, _default_dirs())
    name = actor_name(cluster, options, ray_node)
    if _record(control, cluster, name) is not None or control.living_nodes() != {ray_node}:
        return None
    for origin in origins:
        introduce(control, cluster, origin)
    _actor(name, ray_node, start, options, cluster)
    return partial(_record, control, cluster, name)


def start_everywhere(options: CacheOptions, *, start: StartNode) -> set[str]:
    """Start a node on every living Ray node that has none; returns the member ids of the running ones.

    Leaves out nodes that do not start within a minute, with an event. Raises `OriginUnavailableError` if the control plane
    does not respond.
    """
    import ray

    cluster = cluster_name(options, _default_dirs())
    started = time.monotonic()
    started_actors = []
    for node in ray.nodes():
        if node["Alive"]:
            ray_node = str(node["NodeID"])
            actor = _actor(actor_name(cluster, options, ray_node), ray_node, start, options, cluster)
            started_actors.append((str(node["NodeManagerAddress"]), actor.record.remote()))
    found = set()
    for address, record in started_actors:
        try:
            left = max(0.1, started + _START_SECONDS - time.monotonic())
            found.add(NodeRecord.from_bytes(ray.get(record, timeout=left)).member_id)
        except (MillraceError, ray.exceptions.RayError) as error:
            reason = reason_of(error).partition("\n")[0]
            emit(Event(name="cluster.node.failed", subject=address, detail=reason))
    return found


def ray_nodes(options: CacheOptions) -> dict[str, str]:
    """The ids of the members' Ray nodes, by member id.

    Raises `OriginUnavailableError` if the control plane does not respond.
    """
    import ray

    control = _control_plane(str(ray.get_runtime_context().gcs_address))
    records = parse_members(control.scan(f"{cluster_name(options, _default_dirs())}/member/"))
    return {record.member.id: record.ray_node for record in records.values()}


def _is_client() -> bool:
    """Whether this process uses Ray through a Ray client: the disks of its machine are not the cluster's."""
    import ray

    return bool(ray.util.client.ray.is_connected())


def _here() -> tuple[ControlPlane, str]:
    """The control plane of this process's Ray cluster, and the id of its Ray node."""
    import ray

    runtime = ray.get_runtime_context()
    return _control_plane(str(runtime.gcs_address)), str(runtime.get_node_id())


def _record(control: ControlPlane, cluster: str, name: str) -> NodeRecord | None:
    """The record that an actor has written; None before that."""
    data = control.get(f"{cluster}/node/{name}")
    return None if data is None else NodeRecord.from_bytes(data)


def _actor(
    name: str,
    ray_node: str,
    start: StartNode,
    options: CacheOptions,
    cluster: str,
    idle_seconds: float = IDLE_SECONDS,
) -> Any:
    """The actor with this name, created if there is none."""
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
        # Also keeps it out of the placement group of the task that creates it.
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node, soft=False),
    )
    return actor_class.remote(name, start, options, cluster, idle_seconds)


def _record_from(actor: Any) -> NodeRecord:
    import ray

    record = actor.record.remote()
    try:
        return NodeRecord.from_bytes(ray.get(record, timeout=_START_SECONDS))
    except SystemExit:
        # Another thread called `ray.shutdown`. To release a reference meanwhile would end the process.
        _references_at_shutdown.extend((actor, record))
        raise
    except MillraceError as error:
        # Ray wraps the actor's error in a class of its own, which does not pickle as the original.
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, MillraceError) else error from None
    except ray.exceptions.RayError as error:
        raise OriginUnavailableError(
            f"the actor of this Ray node's cache does not start: {error}",
            next_step="look at its log in Ray's dashboard, or set members='none'",
        ) from error


def _default_dirs() -> tuple[Path, ...] | None:
    """This node's default cache directories; None if its configuration is invalid."""
    try:
        return resolve({}).cache_dirs
    except ConfigurationError:
        return None


@lru_cache(1)
def _control_plane(address: str) -> ControlPlane:
    """This process's connection to the control plane of its Ray cluster. Two threads at the first use may open two."""
    return ControlPlane(address)


_references_at_shutdown: list[Any] = []
