"""Ray on machines, started by hand: `ray start` on each, and the job server of the first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.request import ProxyHandler, build_opener

from tests.support.machines.namespaces import Command, Machine
from tests.support.waiting import wait_until

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
"""The environment of every Ray command: no tokens, no usage reports, and no process that waits for drained nodes."""
_IMPATIENT = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 8000,
    "health_check_failure_threshold": 3,
}
"""A node is dead after 27 s of silence, by default after over a minute. With less, healthy ones die on busy machines."""
_STORE_BYTES = 100 << 20


class RayOnMachines:
    """A head on one machine, and workers on others. Its processes end with the machines."""

    def __init__(self, head: Machine, *, cpus: int = 1, system_config: Mapping[str, Any] | None = None) -> None:
        self.head = head
        self.commands: dict[str, Command] = {}
        """By name of machine: the `ray start` that waits there for its processes."""
        config = json.dumps({**_IMPATIENT, **(system_config or {})})
        self._arguments: dict[str, list[str]] = {}
        self._start(head, cpus, "--head", "--port=6379", "--dashboard-host=0.0.0.0", f"--system-config={config}")
        wait_until(lambda: self._runs(head) and self.state("/api/version") is not None, "no dashboard")
        wait_until(lambda: self._runs(head) and len(self.alive()) == 1, "no head")

    @property
    def address(self) -> str:
        """The address for `ray.init(address=...)` on one of the machines."""
        return f"{self.head.address}:6379"

    @property
    def dashboard(self) -> str:
        """Address of the dashboard and the job server, here and on the machines."""
        return f"http://{self.head.address}:8265"

    def join(self, *machines: Machine, cpus: int = 1) -> None:
        """Start a worker on each; returns when all have joined."""
        for machine in machines:
            self._start(machine, cpus, f"--address={self.address}")
        wanted = {machine.address for machine in machines}
        wait_until(lambda: all(map(self._runs, machines)) and wanted <= self.alive().keys(), "a worker did not join")

    def alive(self) -> dict[str, str]:
        """The ids of the nodes that Ray lists as alive, by address."""
        nodes = (self.state("/api/v0/nodes?limit=100") or {"data": {"result": {"result": []}}})["data"]["result"][
            "result"
        ]
        return {node["node_ip"]: node["node_id"] for node in nodes if node["state"] == "ALIVE"}

    def state(self, path: str) -> Any:
        """The response of the dashboard to a GET; None without one."""
        return get_json(f"{self.dashboard}{path}")

    def _start(self, machine: Machine, cpus: int, *arguments: str) -> None:
        own = (
            *(f"--num-cpus={cpus}", f"--object-store-memory={_STORE_BYTES}", "--block", "--disable-usage-stats"),
            "--include-log-monitor=false",  # it sends the workers' output to drivers, of which none prints it
        )
        self._arguments[machine.name] = [*arguments, *own]
        self._run(machine)

    def _run(self, machine: Machine) -> None:
        self.commands[machine.name] = machine.start("ray", "start", *self._arguments[machine.name], env=ENVIRONMENT)

    def _runs(self, machine: Machine) -> bool:
        """Whether `ray start` is at it. One that has given up begins again: it waits for its raylet for 30 s only."""
        if self.commands[machine.name].exit_status() is None:
            return True
        self._run(machine)
        return False


def get_json(url: str, *, seconds: float = 10.0) -> Any:
    """GET without any proxy; None without an answer, or without JSON."""
    with suppress(OSError, ValueError), build_opener(ProxyHandler({})).open(url, timeout=seconds) as answer:
        return json.load(answer)
    return None
