"""What the Ray actor runs: a node whose members find each other through Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config import CacheOptions
from millrace.errors import StorageError
from millrace.filesystem.node_process import NodeProcess
from millrace.members import Membership
from millrace.peers.folder import live_nodes


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A running node, its folder's name and path. See `millrace.members.ray_actor.RunningNode`."""

    process: NodeProcess
    folder: str
    directory: Path
    member_id: str

    def drain(self, seconds: float) -> object:
        """See `NodeProcess.drain`."""
        return self.process.drain(seconds)


def start(
    options: CacheOptions, *, host: str, membership: Membership, tag: str, find_origin: Callable[[str], Any]
) -> RayNode:
    """See `millrace.members.ray_actor.StartNode`. Raises what `NodeProcess.start` raises."""
    process = NodeProcess(options, host=host, membership=membership, tag=tag, find_origin=find_origin)
    process.start()
    for node in live_nodes(options):
        if node.facts.member_id == process.member_id:
            return RayNode(process=process, folder=node.name, directory=node.directory, member_id=process.member_id)
    process.close()
    raise StorageError("the node's own folder cannot be read", next_step="'millrace doctor' says why")
