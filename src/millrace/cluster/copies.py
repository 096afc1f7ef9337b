"""Marks a node's cached data as copies where the present placement assigns it to other nodes."""

from __future__ import annotations

from millrace.cache.node import CacheNode
from millrace.cluster.cluster import Cluster
from millrace.cluster.placement import Placement, stripe_count


def know_copies(node: CacheNode, cluster: Cluster) -> None:
    """Make the disks of `node` evict first the data that other members hold by the newest view.

    A client owns nothing; on its disks all data competes as in a single node.
    """
    me = cluster.link.member_id

    def still_a_copy(object_id: bytes, size: int) -> bool:
        return me is not None and not stripes_of(cluster.placement(), me, object_id, size)

    for disk in node.open_disks:
        disk.still_a_copy = None if me is None else still_a_copy


def stripes_of(placement: Placement, member_id: str, object_id: bytes, size: int) -> list[int]:
    """The stripes of an object whose holders include a member."""
    return [stripe for stripe in range(stripe_count(size)) if placement.is_holder(member_id, object_id, stripe)]
