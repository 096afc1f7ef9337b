"""A port of this machine that belongs to one test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections. The kernel assigns it to no other socket until the end of the block.

    A server that sets SO_REUSEADDR, as most do, may listen on it meanwhile, and end, and listen again. A port that was only
    free a moment ago may be the one that the server of another test gets.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))  # without `listen`: connections are refused
        yield int(holder.getsockname()[1])
