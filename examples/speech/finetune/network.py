"""The network interface of Torch's process groups. Ray Train's controller loads this file without the rest."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import Any

import ray.util
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend


class NodeNetwork(TorchConfig):  # type: ignore[misc]
    """Torch's process group on the network interface that has the node's address in Ray.

    Without it gloo uses the address of the host name, which other nodes often cannot reach (127.0.1.1 on Debian).
    """

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        """The backend of this configuration."""
        return _NodeNetworkBackend


class _NodeNetworkBackend(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(_use_node_interface)
        super().on_start(worker_group, backend_config)


def _use_node_interface() -> None:
    name = interface_of(ray.util.get_node_ip_address())
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name else ():
        os.environ.setdefault(variable, name)


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an IPv4 address (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
