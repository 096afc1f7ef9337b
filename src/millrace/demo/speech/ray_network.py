"""The network interface on which the workers of Ray Train talk."""

from __future__ import annotations

import os
from typing import Any

import ray.util
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

from millrace.demo.speech.interfaces import interface_of

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class NodeNetwork(TorchConfig):  # type: ignore[misc]
    """Torch as Ray Train sets it up, on the interface that has the address by which Ray knows the node.

    Left alone, gloo takes the address of the host's own name, which other nodes need not be able to reach, nor the host
    itself; and what fails there is no failure that `FailureConfig` counts.
    """

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _Backend


class _Backend(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(use_node_interface)
        super().on_start(worker_group, backend_config)


def use_node_interface() -> None:
    """Have this process talk on its node's interface, unless its environment names one."""
    name = interface_of(ray.util.get_node_ip_address())
    for variable in _VARIABLES:
        if name is not None:
            os.environ.setdefault(variable, name)
