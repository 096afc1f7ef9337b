"""The function that starts a node in a Ray actor. `import millrace` sets it, because `millrace.node` is above this package.

This module imports nothing else of Millrace, so that `import millrace` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.cluster.membership.ray_actor import StartNode

_start_node: StartNode | None = None


def set_node_starter(start: StartNode) -> None:
    """Set the function with which Ray actors start their nodes."""
    global _start_node
    _start_node = start


def node_starter() -> StartNode:
    """The function that was set."""
    assert _start_node is not None, "`import millrace` sets it"
    return _start_node
