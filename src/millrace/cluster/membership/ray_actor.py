"""The actor that runs the node of a Ray node: started once, restarted by Ray, and ended with its Ray node.

The actor receives the function that starts its node (`StartNode`).
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from millrace.cluster.membership.protocol import Membership
from millrace.cluster.membership.ray_control import ControlPlane
from millrace.cluster.membership.ray_members import RayMembers
from millrace.cluster.membership.ray_records import NodeRecord, origin_key
from millrace.config import CacheOptions
from millrace.errors import MillraceError, OriginUnavailableError
from millrace.metrics import Metric, Sample, flat_samples

_log = logging.getLogger("millrace.cluster")

ACTOR_NAMESPACE = "millrace"
"""The Ray namespace of the actors."""

IDLE_SECONDS = 120.0
"""Idle time of a Ray node after which its actor ends. An autoscaler does not remove nodes with actors."""

FEED_SECONDS = 10.0
"""The interval between two reports of metrics to Ray; that of Ray's own reports."""

_LOOK_SECONDS = 2.0
GIVE_UP_SECONDS = 60.0
_DRAIN_MARGIN_SECONDS = 5.0


class RunningNode(Protocol):
    """The node of an actor, as far as the actor uses it."""

    @property
    def directory(self) -> Path:
        """The node's folder."""
        ...

    @property
    def member_id(self) -> str: ...

    def drain(self, seconds: float) -> object:
        """Leave as planned, within `seconds`."""
        ...

    def samples(self) -> Sequence[Sample]:
        """The metrics of the node."""
        ...


class StartNode(Protocol):
    """Starts a node on `host` that joins `membership`. `find_origin` returns the origin of an identity.

    `tag` names the node, so that it claims the same folder after a restart. Raises `MillraceError`.
    The actor's process must be able to import the function.
    """

    def __call__(
        self,
        options: CacheOptions,
        *,
        host: str,
        membership: Membership,
        tag: str,
        find_origin: Callable[[str], Any],
    ) -> RunningNode: ...


class NodeActor:
    """The actor's class. `start` starts the node, `cluster` is the name of the cluster.

    Every call of `record` tries again to start a node that could not be started.
    """

    def __init__(
        self,
        name: str,
        start: StartNode,
        options: CacheOptions,
        cluster: str,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        import ray

        runtime = ray.get_runtime_context()
        self._name = name
        self._start = start
        self._options = options
        self._cluster = cluster
        self._idle_seconds = idle_seconds
        self._ray_node = str(runtime.get_node_id())
        self._host = str(ray.util.get_node_ip_address())
        self._address = str(runtime.gcs_address)
        self._starting = threading.Lock()
        self._node: RunningNode | None = None
        self._unrecorded_in: ControlPlane | None = None
        """The control plane that does not have the node's record yet."""
        try:
            self._started()
        except MillraceError as error:
            _log.warning("the node of this Ray node did not start: %s", error)

    def record(self) -> bytes:
        """The `NodeRecord` of the node, which is started if necessary. Raises `MillraceError`."""
        return _record_of(self._started()).to_bytes()

    def pid(self) -> int:
        """The process id of the node."""
        return os.getpid()

    def _started(self) -> RunningNode:
        with self._starting:
            if self._node is None:
                control = ControlPlane(self._address)
                # A membership of its own, because the node closes it when it cannot start.
                membership = RayMembers(control, cluster=self._cluster, ray_node=self._ray_node)
                options = replace(self._options, cluster_token=token_of(control, self._cluster, self._options))
                node = self._node = self._start(
                    options,
                    host=self._host,
                    membership=membership,
                    tag=self._ray_node,
                    find_origin=lambda identity: find_origin(control, self._cluster, identity),
                )
                self._unrecorded_in = control
                threading.Thread(
                    target=self._follow_ray, args=(control, node), name="millrace-ray-actor", daemon=True
                ).start()
                threading.Thread(target=_feed, args=(node,), name="millrace-ray-metrics", daemon=True).start()
            if self._unrecorded_in is not None:
                self._unrecorded_in.put(f"{self._cluster}/node/{self._name}", _record_of(self._node).to_bytes())
                self._unrecorded_in = None
            return self._node

    def _follow_ray(self, control: ControlPlane, node: RunningNode) -> None:
        """Leave as planned before Ray removes the Ray node, or when this actor is all that keeps it."""
        idle, failed = 0.0, False
        pause = threading.Event()
        while not pause.wait(_LOOK_SECONDS):
            seconds = None
            try:
                seconds = control.seconds_to_drain(self._ray_node)
                idle = idle + _LOOK_SECONDS if control.is_spare(self._ray_node) else 0.0
            except OriginUnavailableError:
                pass  # the membership, which reads more often, reports it
            except Exception:  # noqa: BLE001 - any error of Ray: without this loop the node would not leave as planned
                if not failed:
                    _log.exception("cannot read from Ray whether it removes this node; tried again")
                failed = True
            if seconds is not None:
                _log.warning("Ray removes this node in %.0f s: its part of the cache moves to the other nodes", seconds)
                node.drain(max(1.0, seconds - min(_DRAIN_MARGIN_SECONDS, seconds / 3)))
                return
            if idle >= self._idle_seconds:
                _log.warning("this Ray node was idle for %.0f s: its part of the cache moves to the other nodes", idle)
                node.drain(GIVE_UP_SECONDS)
                while True:
                    try:
                        self._end()
                        return
                    except Exception:  # noqa: BLE001 - any error of Ray: a Ray node with an actor is never removed
                        if not failed:
                            _log.exception("cannot end the actor of this Ray node; tried again")
                        failed = True
                        pause.wait(_LOOK_SECONDS)

    def _end(self) -> None:
        """End this actor for good. The next use of a file system on this Ray node starts another with the same disks."""
        import ray

        ray.kill(ray.get_actor(self._name, namespace=ACTOR_NAMESPACE), no_restart=True)


class RayMetrics:
    """Passes this process's metrics to `ray.util.metrics`, so that Ray's own monitoring has them. For one thread.

    Ray adds "ray_" to the names, and "_total" to those of counters.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def feed(self, samples: Iterable[Sample]) -> None:
        """Set the gauges, and add the growth of the counters. A counter that was reset counts from zero."""
        for metric, labels, value in flat_samples(samples):
            assert isinstance(value, (int, float))
            tags = dict(zip(metric.labels, labels, strict=True))
            if metric.kind == "gauge":
                self._of(metric).set(value, tags)
                continue
            before = self._last.get((metric.name, labels), 0.0)
            self._last[metric.name, labels] = value
            grown = value - before if value >= before else value
            if grown > 0:
                self._of(metric).inc(grown, tags)

    def _of(self, metric: Metric) -> Any:
        made = self._made.get(metric.name)
        if made is None:
            from ray.util import metrics

            make = metrics.Counter if metric.kind == "counter" else metrics.Gauge
            name = metric.name.removesuffix("_total")
            made = self._made[metric.name] = make(name, description=metric.help, tag_keys=metric.labels)
        return made


def _feed(node: RunningNode) -> None:
    """Pass the node's metrics to Ray for as long as this process lives."""
    metrics, failed = RayMetrics(), False
    pause = threading.Event()
    while not pause.wait(FEED_SECONDS):
        try:
            metrics.feed(node.samples())
            failed = False
        except Exception:  # noqa: BLE001 - any error of Ray or of a disk: the next round may succeed
            if not failed:
                _log.exception("cannot pass the metrics to Ray; tried again")
            failed = True


def token_of(control: ControlPlane, cluster: str, options: CacheOptions) -> str:
    """The secret of a cluster: the option, else a random one that is created once and stored in the control plane."""
    if options.cluster_token is not None:
        return options.cluster_token
    key = f"{cluster}/token"
    kept = control.get(key) or control.put_if_absent(key, secrets.token_urlsafe(32).encode())
    return kept.decode()


def introduce(control: ControlPlane, cluster: str, origin: Any) -> None:
    """Give the cluster's nodes access to an origin, with its explicit credentials, if any. The last call holds.

    Skips local origins, because on another node the same path is another file. Skips origins with options that cannot be
    pickled: each reader reads those itself.
    """
    if origin.head_is_local:
        return
    try:
        data = pickle.dumps(origin)
    except Exception as error:  # noqa: BLE001 - a user's option can fail in any way
        _log.warning("%s: the cluster's nodes get no access to it: %s", origin.identity, type(error).__name__)
        return
    key = origin_key(cluster, origin.identity)
    if control.get(key) != data:
        control.put(key, data)


def find_origin(control: ControlPlane, cluster: str, identity: str) -> Any:
    """The origin that a process of the cluster introduced; None without one. Never raises."""
    try:
        data = control.get(origin_key(cluster, identity))
        origin = None if data is None else pickle.loads(data)
    except Exception as error:  # noqa: BLE001 - a job's value can fail in any way
        _log.warning("%s: cannot read its access from Ray's control plane: %s", identity, error)
        return None
    # Without an explicit endpoint, this node's environment determines it.
    return origin if origin is not None and origin.identity == identity else None


def _record_of(node: RunningNode) -> NodeRecord:
    return NodeRecord(directory=node.directory, member_id=node.member_id)
