"""Ray's node provider for the machines of a test: it uses the `Cloud` at `provider: {cloud: URL}` of the cluster file."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import TAG_RAY_CLUSTER_NAME

_SECONDS = 300.0
"""Enough to make some machines on a very busy one."""


class MachineProvider(NodeProvider):
    """Keeps nothing: `ray up` on one machine and the autoscaler on another see the same. Thread-safe."""

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        wanted = {**tag_filters, TAG_RAY_CLUSTER_NAME: self.cluster_name}.items()
        return [name for name, machine in self._machines().items() if wanted <= machine["tags"].items()]

    def is_running(self, node_id: str) -> bool:
        return node_id in self._machines()

    def is_terminated(self, node_id: str) -> bool:
        return node_id not in self._machines()

    def node_tags(self, node_id: str) -> dict[str, str]:
        tags: dict[str, str] = self._machines()[node_id]["tags"]
        return tags

    def internal_ip(self, node_id: str) -> str:
        return str(self._machines()[node_id]["address"])

    def external_ip(self, node_id: str) -> str:
        return self.internal_ip(node_id)

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        tags = {**tags, TAG_RAY_CLUSTER_NAME: self.cluster_name}
        return {name: {} for name in self._ask("POST", "/machines", {"tags": tags, "count": count})}

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        self._ask("PATCH", f"/machines/{node_id}", tags)

    def terminate_node(self, node_id: str) -> None:
        self._ask("DELETE", f"/machines/{node_id}")

    def _machines(self) -> dict[str, Any]:
        machines: dict[str, Any] = self._ask("GET", "/machines")
        return machines

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.provider_config["cloud"] + path, data, method=method)
        with build_opener(ProxyHandler({})).open(request, timeout=_SECONDS) as answer:
            return json.load(answer)
