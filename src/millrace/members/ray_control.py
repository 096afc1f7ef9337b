"""Ray's control plane (the GCS) as far as members need it: a small key-value store, and which Ray nodes live or are to go.

Ray offers no public interface to either from every process and with deadlines; this is the only place that knows the inner
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

    Every method raises `OriginUnavailableError` when the GCS does not answer within seconds; it connects anew by itself.
    """

    def __init__(self, address: str) -> None:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        self.address = address
        self._client: Any = _told(address, lambda: GcsClient(address=address))

    def get(self, key: str) -> bytes | None:
        """The value of `key`; None where it has none."""
        value: bytes | None = self._ask(
            lambda: self._client.internal_kv_get(key.encode(), _NAMESPACE, timeout=_DEADLINE_SECONDS)
        )
        return value

    def put(self, key: str, value: bytes) -> None:
        """Set `key`, whatever it was."""
        self._ask(
            lambda: self._client.internal_kv_put(key.encode(), value, True, _NAMESPACE, timeout=_DEADLINE_SECONDS)
        )

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        """Set `key` where it has no value yet; gives the value that it has then. Of several callers all get the same."""
        self._ask(
            lambda: self._client.internal_kv_put(key.encode(), value, False, _NAMESPACE, timeout=_DEADLINE_SECONDS)
        )
        kept = self.get(key)
        return value if kept is None else kept

    def delete(self, key: str) -> None:
        """Remove `key`, if it is there."""
        self._ask(lambda: self._client.internal_kv_del(key.encode(), False, _NAMESPACE, timeout=_DEADLINE_SECONDS))

    def scan(self, prefix: str) -> dict[str, bytes]:
        """All that begins with `prefix`, in two requests."""
        keys = self._ask(lambda: self._client.internal_kv_keys(prefix.encode(), _NAMESPACE, timeout=_DEADLINE_SECONDS))
        if not keys:
            return {}
        found: Mapping[bytes, bytes] = self._ask(
            lambda: self._client.internal_kv_multi_get(list(keys), _NAMESPACE, timeout=_DEADLINE_SECONDS)
        )
        return {key.decode(): value for key, value in found.items()}

    def living_nodes(self) -> set[str]:
        """The ids of the Ray nodes that live, as the GCS knows: it takes some seconds to find out that one does not."""
        nodes = self._ask(lambda: self._client.get_all_node_info(timeout=_DEADLINE_SECONDS, state_filter=_ALIVE))
        return {node_id.hex() for node_id, node in nodes.items() if node.state == _ALIVE}

    def seconds_to_drain(self, node_id: str) -> float | None:
        """How long a Ray node is still to be there, if Ray is to take it away: a preemption or a planned leave; else None.

        Where Ray gives no deadline, `30.0`.
        """
        # This one has no deadline of its own; the request before says that the GCS answers.
        self.get("-")
        draining: Mapping[str, int] = self._ask(self._client.get_draining_nodes)
        if node_id not in draining:
            return None
        deadline_ms = draining[node_id]
        return max(1.0, deadline_ms / 1000 - time.time()) if deadline_ms else _DRAIN_SECONDS

    def is_spare(self, node_id: str) -> bool:
        """Whether an autoscaler may take this Ray node away because no task or actor holds any of its resources.

        Nodes that were started by hand have no type, and stay; so does the head.
        """
        from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply

        reply = GetClusterResourceStateReply.FromString(
            self._ask(lambda: self._client.get_cluster_resource_state(timeout_s=_DEADLINE_SECONDS))
        )
        for node in reply.cluster_resource_state.node_states:
            if node.node_id.hex() == node_id:
                is_head = _HEAD_RESOURCE in node.total_resources
                is_used = dict(node.available_resources) != dict(node.total_resources)
                return bool(node.ray_node_type_name) and not is_head and not is_used
        return False

    def _ask(self, request: Callable[[], _T]) -> _T:
        return _told(self.address, request)


def _told(address: str, request: Callable[[], _T]) -> _T:
    """Errors of Ray's as those of Millrace."""
    from ray.exceptions import RayError

    try:
        return request()
    except (RayError, RuntimeError) as error:
        raise OriginUnavailableError(
            f"Ray's control plane at {address} does not answer", next_step="look whether the head node lives"
        ) from error
