"""Suites that every implementation of a seam must pass. Subclass one in a test module and give its fixtures; needs pytest.

`OriginConformance` is for remote storage (`millrace.origin.Origin`), `FileSystemConformance` for the file system over any
origin and store, `MembershipConformance` and, where members come and go,
`LivingMembershipConformance` for the members of a cluster (`millrace.cluster.membership.Membership`).
"""

from millrace.testing.conformance.filesystem import FileSystemConformance
from millrace.testing.conformance.members import LivingMembershipConformance, MembershipConformance
from millrace.testing.conformance.origin import HOSTILE_NAMES, ODD_NAMES, Contents, FromEnvironment, OriginConformance

__all__ = [
    "HOSTILE_NAMES",
    "ODD_NAMES",
    "Contents",
    "FileSystemConformance",
    "FromEnvironment",
    "LivingMembershipConformance",
    "MembershipConformance",
    "OriginConformance",
]
