"""The actor that runs a Ray node's part of the cluster: started once, restarted by Ray, gone with its Ray node.

What it runs is put together elsewhere: the actor is given the name of a function that starts it.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from millrace.config import CacheOptions
from millrace.errors import MillraceError, OriginUnavailableError
from millrace.members.protocol import Membership
from millrace.members.ray_control import ControlPlane
from millrace.members.ray_members import RayMembers
from millrace.members.ray_records import NodeRecord, origin_key

_log = logging.getLogger("millrace")

ACTOR_NAMESPACE = "millrace"
"""The Ray namespace of the actors."""

IDLE_SECONDS = 120.0
"""How long nothing runs on a Ray node before its actor makes way for the autoscaler, which spares nodes with actors."""

_LOOK_SECONDS = 2.0
GIVE_UP_SECONDS = 60.0
_DRAIN_MARGIN_SECONDS = 5.0


class RunningNode(Protocol):
    """What the actor has to know of the node that it runs."""

    folder: str
    directory: Path
    member_id: str

    def drain(self, seconds: float) -> object:
        """Leave as planned, within so many seconds."""
        ...


class StartNode(Protocol):
    """Starts a node on `host` that is a member by `membership`, and gets at origins by `find_origin`.

    `tag` is what the node is called, so that it finds its folder again. Raises `MillraceError`.
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
    """The actor's class. `start` is `module:function` of a `StartNode`, `cluster` the name of the cluster.

    A node that could not be started is tried again whenever somebody asks for it.
    """

    def __init__(
        self, name: str, start: str, options: CacheOptions, cluster: str, idle_seconds: float = IDLE_SECONDS
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
        try:
            self._started()
        except MillraceError as error:
            _log.warning("no node of the cache here yet: %s", error)

    def record(self) -> bytes:
        """The `NodeRecord` of the node, started if it is not there. Raises `MillraceError`."""
        return _record_of(self._started()).to_bytes()

    def pid(self) -> int:
        """The process that the node is in."""
        return os.getpid()

    def _started(self) -> RunningNode:
        with self._starting:
            if self._node is None:
                control = ControlPlane(self._address)
                # A membership of its own, because the node closes it when it cannot start.
                membership = RayMembers(control, cluster=self._cluster, ray_node=self._ray_node)
                options = replace(self._options, cluster_token=token_of(control, self._cluster, self._options))
                node = self._node = _function(self._start)(
                    options,
                    host=self._host,
                    membership=membership,
                    tag=self._ray_node,
                    find_origin=lambda identity: find_origin(control, self._cluster, identity),
                )
                control.put(f"{self._cluster}/node/{self._name}", _record_of(node).to_bytes())
                threading.Thread(
                    target=self._follow_ray, args=(control, node), name="millrace-ray-actor", daemon=True
                ).start()
            return self._node

    def _follow_ray(self, control: ControlPlane, node: RunningNode) -> None:
        """Leave as planned when Ray says that the Ray node is to go; make way where it could go but for this actor."""
        idle, failed = 0.0, False
        pause = threading.Event()
        while not pause.wait(_LOOK_SECONDS):
            seconds = None
            try:
                seconds = control.seconds_to_drain(self._ray_node)
                idle = idle + _LOOK_SECONDS if control.is_spare(self._ray_node) else 0.0
            except OriginUnavailableError:
                pass  # the membership, which asks more often, says so
            except Exception:  # noqa: BLE001 - whatever Ray raises: a node that looks no more leaves without a word
                if not failed:
                    _log.exception("Ray cannot be asked what becomes of this node, which is tried again")
                failed = True
            if seconds is not None:
                _log.warning("Ray takes this node away in %.0f s: its part of the cache moves to the others", seconds)
                node.drain(max(1.0, seconds - min(_DRAIN_MARGIN_SECONDS, seconds / 3)))
                return
            if idle >= self._idle_seconds:
                _log.warning("nothing has run on this Ray node for %.0f s: its part of the cache makes way", idle)
                node.drain(GIVE_UP_SECONDS)
                self._end()
                return

    def _end(self) -> None:
        """End this actor for good; the next use of a file system here starts another, which finds what lies on the disk."""
        import ray

        ray.kill(ray.get_actor(self._name, namespace=ACTOR_NAMESPACE), no_restart=True)


def token_of(control: ControlPlane, cluster: str, options: CacheOptions) -> str:
    """The secret of a cluster: the option, else one that is made up once and lies in the control plane."""
    if options.cluster_token is not None:
        return options.cluster_token
    key = f"{cluster}/token"
    kept = control.get(key) or control.put_if_absent(key, secrets.token_urlsafe(32).encode())
    return kept.decode()


def introduce(control: ControlPlane, cluster: str, origin: Any) -> None:
    """Give the cluster's nodes access to an origin, with the credentials that were given to it explicitly, if any were.

    What was told last holds. What is local is not made known: on another node the same path is another file. What has
    options that cannot be pickled each reader reads itself.
    """
    if origin.head_is_local:
        return
    try:
        told = pickle.dumps(origin)
    except Exception as error:  # noqa: BLE001 - what a user gave as an option can fail in any way
        _log.warning("the cluster's nodes get no access to %s: %s", origin.identity, type(error).__name__)
        return
    key = origin_key(cluster, origin.identity)
    if control.get(key) != told:
        control.put(key, told)


def find_origin(control: ControlPlane, cluster: str, identity: str) -> Any:
    """The origin that some process of the cluster has introduced; None where none did. Never raises."""
    try:
        told = control.get(origin_key(cluster, identity))
        origin = None if told is None else pickle.loads(told)
    except Exception as error:  # noqa: BLE001 - what a job has put there can fail in any way
        _log.warning("no access to %s from Ray's control plane: %s", identity, error)
        return None
    # Without an explicit endpoint it is this node's environment that says which one is meant.
    return origin if origin is not None and origin.identity == identity else None


def _record_of(node: RunningNode) -> NodeRecord:
    return NodeRecord(folder=node.folder, directory=node.directory, member_id=node.member_id)


def _function(name: str) -> StartNode:
    module, _, function = name.partition(":")
    found: StartNode = getattr(importlib.import_module(module), function)
    return found
