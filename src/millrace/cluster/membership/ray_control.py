"""Ray's control plane (the GCS), as far as members need it: a small key-value store, and the state of the Ray nodes.

Ray has no public interface to either for every process and with deadlines. This is the only module that uses the private
one (`ray._raylet.GcsClient`, Ray 2.60).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from millrace.errors import OriginUnavailableError

_T = TypeVar("_T")

_NAMESPACE = b"millrace"
_DEADLINE_SECONDS = 3.0
_ALIVE = 0  # GcsNodeInfo.GcsNodeState
_DRAIN_SECONDS = 30.0
_HEAD_RESOURCE = "node:__internal_head__"


class ControlPlane:
    """A connection to the GCS at `address` (`host:port`). Thread-safe; not usable after a fork.

    Every method raises `OriginUnavailableError` if the GCS does not respond within seconds. It reconnects by itself.
    """

    def __init__(self, address: str) -> None:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        self.address = address
        self._client: Any = self._request(lambda: GcsClient(address=address))

    def get(self, key: str) -> bytes | None:
        """The value of `key`; None without one."""
        value: bytes | None = self._stored(self._client.internal_kv_get, key.encode())
        return value

    def put(self, key: str, value: bytes) -> None:
        """Set `key`."""
        self._stored(self._client.internal_kv_put, key.encode(), value, True)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        """Set `key` unless it has a value; returns its value, which is the same for all concurrent callers."""
        self._stored(self._client.internal_kv_put, key.encode(), value, False)
        kept = self.get(key)
        return value if kept is None else kept

    def delete(self, key: str) -> None:
        """Remove `key`, if it exists."""
        self._stored(self._client.internal_kv_del, key.encode(), False)

    def scan(self, prefix: str) -> dict[str, bytes]:
        """All keys that begin with `prefix`, with their values, in two requests."""
        keys = self._stored(self._client.internal_kv_keys, prefix.encode())
        if not keys:
            return {}
        found: Mapping[bytes, bytes] = self._stored(self._client.internal_kv_multi_get, list(keys))
        return {key.decode(): value for key, value in found.items()}

    def living_nodes(self) -> set[str]:
        """The ids of the living Ray nodes. The GCS detects a dead one after some seconds."""
        nodes = self._request(lambda: self._client.get_all_node_info(timeout=_DEADLINE_SECONDS, state_filter=_ALIVE))
        return {node_id.hex() for node_id, node in nodes.items() if node.state == _ALIVE}

    def seconds_to_drain(self, node_id: str) -> float | None:
        """Seconds until Ray removes a Ray node (a preemption or a planned removal); None if it does not.

        30.0 if Ray sets no deadline.
        """
        # The second request has no deadline of its own; the first checks that the GCS responds.
        self.get("-")
        draining: Mapping[str, int] = self._request(self._client.get_draining_nodes)
        if node_id not in draining:
            return None
        deadline_ms = draining[node_id]
        return max(1.0, deadline_ms / 1000 - time.time()) if deadline_ms else _DRAIN_SECONDS

    def is_spare(self, node_id: str) -> bool:
        """Whether an autoscaler may remove this Ray node, because no task or actor holds any of its resources.

        False for the head, and for nodes started by hand, which have no type.
        """
        from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply

        reply = GetClusterResourceStateReply.FromString(
            self._request(lambda: self._client.get_cluster_resource_state(timeout_s=_DEADLINE_SECONDS))
        )
        for node in reply.cluster_resource_state.node_states:
            if node.node_id.hex() == node_id:
                is_head = _HEAD_RESOURCE in node.total_resources
                is_used = dict(node.available_resources) != dict(node.total_resources)
                return bool(node.ray_node_type_name) and not is_head and not is_used
        return False

    def _stored(self, operation: Callable[..., Any], *arguments: object) -> Any:
        """The result of an operation of the key-value store."""
        return self._request(lambda: operation(*arguments, _NAMESPACE, timeout=_DEADLINE_SECONDS))

    def _request(self, request: Callable[[], _T]) -> _T:
        """The result of `request`; raises errors of Ray as those of Millrace."""
        from ray.exceptions import RayError

        try:
            return request()
        except (RayError, RuntimeError) as error:
            raise OriginUnavailableError(
                f"Ray's control plane at {self.address} does not respond", next_step="check that the head node runs"
            ) from error
