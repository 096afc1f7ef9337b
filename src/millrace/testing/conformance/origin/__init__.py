"""The suite of tests that every origin must pass: reads, writes, listings, names and processes.

Key terms:
- origin: the implementation of `millrace.origin.Origin` under test, which the subclass provides as a fixture.
- root: an empty key prefix, one for each test.
- capability: a class attribute such as `writes` or `lists`; False skips the tests of a feature, which must
  then raise `UsageError`.

Start reading in `base.py` (capabilities and fixtures), then `reads.py`. The guide is
docs/contributing/new-origin.md.
"""

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

    The attributes of `base.OriginSuite` (`writes`, `lists`, `ordered`, ...) declare the operations that the origin does not
    support. If it cannot write, the fixture `contents` creates the objects through the server that the origin reads from.
    """
