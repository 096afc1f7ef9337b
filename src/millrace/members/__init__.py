"""Who is in the cluster: one Protocol, and one module for each way to find out."""

from millrace.members.protocol import (
    WIRE_VERSIONS,
    Member,
    Membership,
    MemberState,
    NodeLink,
    View,
    ViewSource,
)

__all__ = ["WIRE_VERSIONS", "Member", "MemberState", "Membership", "NodeLink", "View", "ViewSource"]
