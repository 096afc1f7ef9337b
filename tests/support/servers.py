"""Ports of servers that a test stops and starts again."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def steady_port() -> int:
    """A free port that no other process takes while the server is away: below those that the kernel gives to others."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def steady_ports(count: int) -> list[int]:
    """So many of them."""
    found: set[int] = set()
    while len(found) < count:
        found.add(steady_port())
    return list(found)
