"""Which nodes are members of the cluster: one Protocol, and one module for each backend (static, etcd, Ray).

Key terms:
- member: a live node, with its address, weight and state.
- view: the members at one moment, in the order of their ids.
- lease: a member whose lease ends without renewal leaves the view.

Start reading in `protocol.py`, then `static.py`, the smallest backend.
"""

from millrace.cluster.membership.protocol import (
    WIRE_VERSION,
    Member,
    Membership,
    MemberState,
    NodeLink,
    View,
    ViewSource,
)

__all__ = ["WIRE_VERSION", "Member", "MemberState", "Membership", "NodeLink", "View", "ViewSource"]
