"""Which cached bytes give way to others. Pure: it decides from records that the caller keeps; no I/O, no state, no clock.

*Keep what you have unless there is evidence.* Epochs are loops, and in a loop larger than the cache every newcomer is needed
exactly as soon as what it would replace: an exchange costs a hit and wins none. Evidence is: a unit is dead (idle for much
longer than is usual, or its whole data set is); the newcomer is used far more often; or the data set's accesses show that
recency pays there (`recency_pays`). Design page 0005 has the reasons and the figures.

A *unit* is what is evicted as a whole: one large object, or one segment of small ones. A *group* is a data set (a listing
root; for an object that was opened without a listing, its folder). The *clock* counts bytes of traffic, hits and misses
alike, so that every duration here is in bytes. What a unit is worth is its uses a byte of its room and of time, and one use
reads all of it: so its size cancels out, and only rates are compared.

How a caller that keeps the records in an index uses it, with a handful of look-ups a decision:

1. On a read it adds the bytes to the clock and stores `group_touched(...)`, told the unit's record from before, and then
   `touched(...)`. Reads of a unit that follow each other closely are one use. Records may be written late and in batches,
   and two processes that do so at once may lose a use of one: a second of delay does no harm. An unknown unit starts as
   `Unit(key=..., nbytes=..., group=..., last=clock)`, and its group grows by it.
2. On a miss without room it draws about `SAMPLE_SIZE` residents at random (of the copies, as long as there are any), leaves
   out those that are pinned or being filled (the newcomer itself, too), and calls `choose`. None means: serve the read
   without keeping it. A victim is set aside and the draw repeated until enough bytes are together; only then are they
   removed, so a newcomer that is too large for what may go costs nothing. An object that is filled block by block is a
   resident: it needs only the next request's room at a time, and may stay a part.
3. An evicted unit's record stays as a *ghost*; so does that of a unit that was not admitted. When there are more than
   `GHOSTS_PER_RESIDENT` for each resident, a few are drawn at random and `least_promising` says which to forget. `bytes` and
   `units` of a group count residents and ghosts.
4. To shrink (a resize, a disk that fills, a quota that was lowered) it draws `SHRINK_SAMPLE_SIZE` and calls `choose` with
   no newcomer, again and again.

A record fits 40 bytes: nbytes, last and gap as 64-bit integers, group, prefix and time of expiry as 32-bit ones, uses as a
32-bit float.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

SAMPLE_SIZE = 8
"""So many residents are compared in one decision: enough that the worst of them is nearly the worst of all."""

SHRINK_SAMPLE_SIZE = 64
"""Likewise when the cache shrinks: something goes in any case, so what is of no use should be found, and no one waits."""

GHOSTS_PER_RESIDENT = 4
"""So many records of units that are not here are kept for each one that is."""

_HALF_LIFE = 8  # in capacities of traffic: a use counts half after that
_DEAD_GAPS = 1.5  # `Group.gap` is about 1.7 loops in shuffled ones, which leave up to two between two uses of a unit
_LONG_GAPS = 16  # a gap above `Group.gap` moves it so many times more than one below
_GROUP_PAUSE = 4  # a group that is idle for a capacity divided by this has ended, unless it is known to pause
_FEW_UNITS = 4  # that a group of so few is idle says nothing
_RUN = 64  # reads of a unit within a capacity divided by this are one use,
_RUN_SIZES = 4  # or within so many times its size,
_LONGEST_RUN = 4  # but not more than a capacity divided by this
_MEMORY = 2  # in capacities of a group's own traffic: how far its averages look back
_PAUSE_MEMORY = 8  # likewise, or in sizes of the group: how long a pause is remembered
_RECENT = 0.9  # of a capacity: what an LRU by samples surely keeps
_CLEARLY = 1.1  # or a tie would be decided anew by every access
_LRU_LEAD = 1.2  # `recent` is less than LRU would reach, by about this


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What is known of a unit, resident or ghost.

    `key` is the caller's. `nbytes` is the size of the whole, even if only a part of it is here. `uses` counts runs of reads,
    each fading with time. `gap` is the usual time between two runs, 0 when there was only one. `prefix` numbers the URL
    prefix whose quota it counts against (0: none), and `expired` says that its time to live is over. A `copy` is of what
    another node owns: it lies in room that nothing else has needed so far.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What is known of a data set.

    `bytes` and `units` count what has a record; `longest_gap` is the longest pause between two accesses to any of it, slowly
    forgotten. The averages weigh by bytes: `gap` is what most times between two uses of a unit stay below (an expectile; 0:
    not known yet), `hits` the share of uses that were hits, and `recent` the share that came so soon after the use before
    that an LRU cache would have hit.
    """

    last: int
    bytes: int = 0
    units: int = 0
    longest_gap: int = 0
    gap: float = 0.0
    hits: float = 0.0
    recent: float = 0.0


def continues(unit: Unit, clock: int, capacity_bytes: int) -> bool:
    """Whether a read at `clock` belongs to the same run of reads as the last one."""
    # Several readers take turns, so while one unit is read once, several times its size may pass.
    own = min(_RUN_SIZES * unit.nbytes, capacity_bytes // _LONGEST_RUN)
    return clock - unit.last < max(capacity_bytes // _RUN, own)


def touched(unit: Unit, *, clock: int, capacity_bytes: int) -> Unit:
    """The record after a read of the unit at `clock`."""
    if continues(unit, clock, capacity_bytes):
        return replace(unit, last=max(unit.last, clock))
    gap = clock - unit.last
    return replace(
        unit,
        last=clock,
        uses=aged(unit, clock=clock, capacity_bytes=capacity_bytes) + 1.0,
        gap=(unit.gap + gap) // 2 if unit.gap else gap,
    )


def group_touched(
    group: Group, *, clock: int, nbytes: int, capacity_bytes: int, before: Unit | None, hit: bool
) -> Group:
    """The group's record after a read at `clock` of a unit that has `nbytes` in all.

    `before` is the unit's record from before this use, None when it was unknown.
    """
    pause, last = clock - group.last, max(group.last, clock)
    if before is not None and continues(before, clock, capacity_bytes):
        return replace(group, last=last, longest_gap=max(pause, group.longest_gap))
    forgotten = nbytes / max(1, _PAUSE_MEMORY * max(capacity_bytes, group.bytes))
    longest_gap = max(pause, int(group.longest_gap * max(0.0, 1.0 - forgotten)))
    weight = min(1.0, nbytes / max(1, _MEMORY * capacity_bytes))
    passed = None if before is None else clock - before.last
    recent = passed is not None and passed <= _RECENT * capacity_bytes
    gap = group.gap
    if passed is not None:
        # The first ones are no fair sample: early in an epoch whatever comes again comes soon.
        gap = gap or 2.0 * group.bytes
        gap += min(1.0, weight * (_LONG_GAPS if passed > gap else 1)) * (passed - gap)
    return replace(
        group,
        last=last,
        longest_gap=longest_gap,
        gap=gap,
        hits=group.hits + weight * (hit - group.hits),
        recent=group.recent + weight * (recent - group.recent),
    )


def aged(unit: Unit, *, clock: int, capacity_bytes: int) -> float:
    """The unit's uses as they count at `clock`: each has half its weight after eight capacities of traffic."""
    return unit.uses * math.exp2(-max(0, clock - unit.last) / (_HALF_LIFE * max(1, capacity_bytes)))


def is_dead(unit: Unit, group: Group, *, clock: int, capacity_bytes: int) -> bool:
    """Whether there is evidence that the unit will not be used again soon."""
    if group.units >= _FEW_UNITS and clock - group.last > max(capacity_bytes / _GROUP_PAUSE, 2 * group.longest_gap):
        return True
    # Of lone units only their own gaps are known, of which two in a row may differ by anything: hence twice.
    return group.gap > 0 and clock - unit.last > _DEAD_GAPS * max(group.gap, group.bytes, 2 * unit.gap)


def recency_pays(group: Group, capacity_bytes: int) -> bool:
    """Whether LRU would hit clearly more than the share of the group that fits, which is what keeping gives in any loop."""
    return group.recent * group.bytes > _CLEARLY * capacity_bytes


def choose(
    sample: Sequence[Unit],
    newcomer: Unit | None,
    groups: Mapping[int, Group],
    *,
    clock: int,
    capacity_bytes: int,
    over_quota: Collection[int] = (),
) -> Unit | None:
    """Which of `sample` gives way to `newcomer`; None to serve the newcomer without keeping it.

    Without a newcomer room is needed in any case, and it is None only for an empty sample. `groups` has the group of every
    unit. `over_quota` names the prefixes that take more than their quota, the newcomer counted in: such a newcomer may only
    replace units of its own prefix (so draw from those); else units of these prefixes go first, after copies and what has
    expired.
    """
    if newcomer is not None and newcomer.prefix in over_quota:
        sample = [unit for unit in sample if unit.prefix == newcomer.prefix]
        over_quota = ()
    now = _Moment(groups, clock, capacity_bytes)
    forfeited = (
        [unit for unit in sample if unit.copy]
        or [unit for unit in sample if unit.expired]
        or [unit for unit in sample if unit.prefix in over_quota]
        or [unit for unit in sample if now.dead(unit)]
    )
    if forfeited or newcomer is None:
        return min(forfeited or sample, key=now.usefulness, default=None)
    idle = [unit for unit in sample if not continues(unit, clock, capacity_bytes)]
    return _by_recency(idle, newcomer, now) or _by_frequency(idle, newcomer, now)


@dataclass(frozen=True, slots=True)
class _Moment:
    """What one decision looks at."""

    groups: Mapping[int, Group]
    clock: int
    capacity_bytes: int

    def dead(self, unit: Unit) -> bool:
        return is_dead(unit, self.groups[unit.group], clock=self.clock, capacity_bytes=self.capacity_bytes)

    def uses(self, unit: Unit) -> float:
        return aged(unit, clock=self.clock, capacity_bytes=self.capacity_bytes)

    def usefulness(self, unit: Unit) -> tuple[int, int, int]:
        """Uses count by powers of two, so that among equals one group goes after the other, and not a bit of each."""
        return (math.frexp(self.uses(unit))[1], self.groups[unit.group].last, unit.last)


def _by_recency(idle: Sequence[Unit], newcomer: Unit, now: _Moment) -> Unit | None:
    """Within a group that shows that recency pays: a unit that is used less often, or, where that finds too little, LRU."""
    group = now.groups[newcomer.group]
    own = [unit for unit in idle if unit.group == newcomer.group]
    if not own or not recency_pays(group, now.capacity_bytes):
        return None
    if group.hits < _LRU_LEAD * group.recent:
        return min(own, key=lambda unit: unit.last)
    victim = min(own, key=now.uses)
    return victim if newcomer.uses >= now.uses(victim) + 0.5 else None


def _by_frequency(idle: Sequence[Unit], newcomer: Unit, now: _Moment) -> Unit | None:
    """A unit with so few uses that chance, or where in the epoch it stands, does not explain it."""
    victim = min(idle, key=now.uses, default=None)
    if victim is None or newcomer.uses < 2 * now.uses(victim) + 2:
        return None
    return victim


def least_promising(ghosts: Sequence[Unit], *, clock: int, capacity_bytes: int) -> Unit:
    """Which of a few ghosts to forget. Raises ValueError when there are none."""
    return min(ghosts, key=lambda unit: (aged(unit, clock=clock, capacity_bytes=capacity_bytes), unit.last))
