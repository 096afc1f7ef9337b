"""The interface of eviction policies, and the usage records that they decide from. Pure: no I/O, no state, no clock.

A *unit* is evicted as a whole: one large object, or one segment of small objects. A *resident* unit is cached. A *ghost* is
the record of an evicted unit, or of one that was not admitted. A *group* is a data set (a listing root; for an object that
was opened without a listing, its directory). The *clock* counts bytes of traffic, hits and misses alike, so that every
duration is in bytes.

`disk.py` selects the policy. How `evictor.py` and `usage_records.py` use it, with a handful of lookups per decision:

1. After a read they add its bytes to the clock, and store `group_touched(...)` with the unit's record from before the read,
   and then `touched(...)`. Records may be written late and in batches, and two processes that write at once may lose one
   use: a second of delay does no harm. A unit without a record starts as `Unit(key=..., nbytes=..., group=..., last=clock)`,
   and its group grows by it.
2. After a miss without free space they draw about `SAMPLE_SIZE` residents at random (copies, as long as there are any),
   leave out pinned units and the candidate itself, and call `choose`. None: the read is served without storing. Victims are
   collected until their bytes suffice, and only then removed, so that a candidate that is too large evicts nothing. An
   object that is fetched block by block is a resident: it needs only the space of the next request.
3. The record of an evicted or not admitted unit stays as a ghost. When there are more than `GHOSTS_PER_RESIDENT` ghosts per
   resident, a few ghosts are drawn at random and `least_promising` selects the one whose record is deleted.
4. To shrink (a resize, a disk that fills up, a lower quota) they draw `SHRINK_SAMPLE_SIZE` residents and call `choose`
   without a candidate, again and again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

SAMPLE_SIZE = 8
"""Residents that are compared in one decision: enough that the worst of them is nearly the worst of all."""

SHRINK_SAMPLE_SIZE = 64
"""Residents that are compared when the cache shrinks: one is evicted in any case, and no read waits for it."""

GHOSTS_PER_RESIDENT = 4
"""Records of units that are not cached, for each one that is."""


class Unit(NamedTuple):
    """The usage record of a unit, resident or ghost.

    `key` is its id. `nbytes` is the size of the whole unit, even if only a part of it is cached. `last` is the clock at its
    last use. `uses` counts runs of reads, each fading with time. `gap` is the usual time between two runs, 0 after only one
    run. `prefix` is the number of the URL prefix whose quota it counts against (0: none). `expired`: its TTL is over.
    `copy`: another node owns it, and it uses space that no owned unit has needed so far.
    """

    key: bytes
    nbytes: int
    group: int
    last: int
    uses: float = 1.0
    gap: int = 0
    prefix: int = 0
    expired: bool = False
    copy: bool = False


class Group(NamedTuple):
    """The usage record of a data set.

    `bytes` and `units` count all residents and ghosts. `longest_gap` is the longest pause between two accesses to any unit;
    it fades slowly. The averages weigh by bytes: most times between two uses of a unit are shorter than `gap` (an expectile;
    0: not measured yet), `hits` is the share of uses that were hits, and `recent` the share of uses that came soon enough
    after the previous use for an LRU cache to hit.
    """

    last: int
    bytes: int = 0
    units: int = 0
    longest_gap: int = 0
    gap: float = 0.0
    hits: float = 0.0
    recent: float = 0.0


class EvictionPolicy(Protocol):
    """Decides which units stay. A module with these functions is a policy, see `keep_policy.py`."""

    def touched(self, unit: Unit, *, clock: int, capacity_bytes: int) -> Unit:
        """The record after a read of the unit at `clock`."""
        ...

    def group_touched(
        self, group: Group, *, clock: int, nbytes: int, capacity_bytes: int, before: Unit | None, hit: bool
    ) -> Group:
        """The record of the group after a read at `clock` of a unit of `nbytes`.

        `before` is the unit's record from before this use, None when it had none.
        """
        ...

    def choose(
        self,
        sample: Sequence[Unit],
        candidate: Unit | None,
        groups: Mapping[int, Group],
        *,
        clock: int,
        capacity_bytes: int,
        over_quota: Collection[int] = (),
    ) -> Unit | None:
        """The unit of `sample` that is evicted for `candidate`; None serves the candidate without storing it.

        Without a candidate a unit must be evicted in any case, and the result is None only for an empty sample. `groups`
        contains the group of every unit. `over_quota` are the prefixes that exceed their quota, including the candidate:
        such a candidate may only replace units of its own prefix. Copies go first, then expired units, then units of
        prefixes over quota.
        """
        ...

    def least_promising(self, ghosts: Sequence[Unit], *, clock: int, capacity_bytes: int) -> Unit:
        """The ghost whose record is deleted first. Raises ValueError for an empty sequence."""
        ...
