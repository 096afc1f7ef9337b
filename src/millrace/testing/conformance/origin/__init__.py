"""What Millrace requires of remote storage, as tests."""

from __future__ import annotations

from millrace.testing.conformance.origin.base import Contents, FromEnvironment
from millrace.testing.conformance.origin.listings import Listings
from millrace.testing.conformance.origin.names import HOSTILE_NAMES, ODD_NAMES, Names
from millrace.testing.conformance.origin.processes import Processes
from millrace.testing.conformance.origin.reads import Reads
from millrace.testing.conformance.origin.writes import Writes

__all__ = ["HOSTILE_NAMES", "ODD_NAMES", "Contents", "FromEnvironment", "OriginConformance"]


class OriginConformance(Reads, Writes, Listings, Names, Processes):
    """Subclass it with the fixtures `origin` (an `Origin`) and `root` (an empty key prefix, one per test).

    The attributes of `base.OriginSuite` (`writes`, `lists`, `ordered`, ...) declare what the origin does not support. If it
    cannot write, the fixture `contents` creates the objects through the server that the origin reads from.
    """
