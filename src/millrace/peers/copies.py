"""Tells a node's disks what they hold as copies: whatever the present placement gives to other nodes."""

from __future__ import annotations

from millrace.cache.node import CacheNode
from millrace.peers.cluster import Cluster
from millrace.peers.placement import Placement, stripe_count


def know_copies(node: CacheNode, cluster: Cluster) -> None:
    """Have the disks of `node` evict first what other members hold, by whatever view is the newest then.

    Where a client caches, which owns nothing, everything competes as it does in a node alone.
    """
    me = cluster.link.member_id

    def still_a_copy(object_id: bytes, size: int) -> bool:
        return me is not None and not stripes_of(cluster.placement(), me, object_id, size)

    for disk in node.open_disks:
        disk.still_a_copy = None if me is None else still_a_copy


def stripes_of(placement: Placement, member_id: str, object_id: bytes, size: int) -> list[int]:
    """The stripes of an object that a member is to hold."""
    return [stripe for stripe in range(stripe_count(size)) if placement.is_holder(member_id, object_id, stripe)]
