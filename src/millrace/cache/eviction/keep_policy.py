"""The eviction policy: keep cached units unless there is evidence against them. Pure functions of usage records.

*Keep what you have unless there is evidence.* Epochs are loops. In a loop larger than the cache every candidate is needed
exactly as soon as the unit that it would replace: an exchange costs a hit and wins none. Evidence is: a unit is dead (idle
for much longer than is usual, or its whole data set is); the candidate is used far more often; or the data set's accesses
show that recency pays there (`recency_pays`). Design page 0005 has the reasons and the figures.

The value of a unit is its uses per byte of space and of time. One use reads all of it, so its size cancels out, and only
rates are compared. `policy.py` defines the terms and the interface.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from millrace.cache.eviction.policy import Group, Unit

_HALF_LIFE = 8  # in capacities of traffic: a use counts half after that
_DEAD_GAPS = 1.5  # `Group.gap` is about 1.7 loops in shuffled ones, which leave up to two between two uses of a unit
_LONG_GAPS = 16  # a gap above `Group.gap` moves it this many times more than one below
_GROUP_PAUSE = 4  # a group that is idle for a capacity divided by this has ended, unless it is known to pause
_FEW_UNITS = 4  # a pause of a group with at most this many units is not evidence
_RUN = 64  # reads of a unit within a capacity divided by this are one use,
_RUN_SIZES = 4  # or within this many times its size,
_LONGEST_RUN = 4  # but not more than a capacity divided by this
_MEMORY = 2  # in capacities of a group's own traffic: how far its averages look back
_PAUSE_MEMORY = 8  # likewise, or in sizes of the group: how long a pause is recorded
_RECENT = 0.9  # of a capacity: the part that an LRU by samples certainly keeps
_CLEARLY = 1.1  # without this, every access would decide a tie again
_LRU_LEAD = 1.2  # `recent` is less than LRU would reach, by about this


def continues(unit: Unit, clock: int, capacity_bytes: int) -> bool:
    """Whether a read at `clock` belongs to the same run of reads as the last one."""
    # Readers are interleaved, so while one unit is read once, several times its size may be read.
    own = min(_RUN_SIZES * unit.nbytes, capacity_bytes // _LONGEST_RUN)
    return clock - unit.last < max(capacity_bytes // _RUN, own)


def touched(unit: Unit, *, clock: int, capacity_bytes: int) -> Unit:
    """The record after a read of the unit at `clock`."""
    if continues(unit, clock, capacity_bytes):
        return unit._replace(last=max(unit.last, clock))
    gap = clock - unit.last
    return unit._replace(
        last=clock,
        uses=aged(unit, clock=clock, capacity_bytes=capacity_bytes) + 1.0,
        gap=(unit.gap + gap) // 2 if unit.gap else gap,
    )


def group_touched(
    group: Group, *, clock: int, nbytes: int, capacity_bytes: int, before: Unit | None, hit: bool
) -> Group:
    """The group's record after a read at `clock` of a unit of `nbytes`.

    `before` is the unit's record from before this use, None when it was unknown.
    """
    pause, last = clock - group.last, max(group.last, clock)
    if before is not None and continues(before, clock, capacity_bytes):
        return group._replace(last=last, longest_gap=max(pause, group.longest_gap))
    forgotten = nbytes / max(1, _PAUSE_MEMORY * max(capacity_bytes, group.bytes))
    longest_gap = max(pause, int(group.longest_gap * max(0.0, 1.0 - forgotten)))
    weight = min(1.0, nbytes / max(1, _MEMORY * capacity_bytes))
    passed = None if before is None else clock - before.last
    recent = passed is not None and passed <= _RECENT * capacity_bytes
    gap = group.gap
    if passed is not None:
        # The first gaps are not a fair sample: early in an epoch only short gaps are possible.
        gap = gap or 2.0 * group.bytes
        gap += min(1.0, weight * (_LONG_GAPS if passed > gap else 1)) * (passed - gap)
    return group._replace(
        last=last,
        longest_gap=longest_gap,
        gap=gap,
        hits=group.hits + weight * (hit - group.hits),
        recent=group.recent + weight * (recent - group.recent),
    )


def aged(unit: Unit, *, clock: int, capacity_bytes: int) -> float:
    """The weight of the unit's uses at `clock`: each has half its weight after eight capacities of traffic."""
    return unit.uses * math.exp2(-max(0, clock - unit.last) / (_HALF_LIFE * max(1, capacity_bytes)))


def is_dead(unit: Unit, group: Group, *, clock: int, capacity_bytes: int) -> bool:
    """Whether there is evidence that the unit will not be used again soon."""
    if group.units >= _FEW_UNITS and clock - group.last > max(capacity_bytes / _GROUP_PAUSE, 2 * group.longest_gap):
        return True
    # For lone units only their own gaps are known, and two consecutive gaps may differ widely: hence twice.
    return group.gap > 0 and clock - unit.last > _DEAD_GAPS * max(group.gap, group.bytes, 2 * unit.gap)


def recency_pays(group: Group, capacity_bytes: int) -> bool:
    """Whether LRU would hit clearly more than the share of the group that fits (the hit rate of keeping, in any loop)."""
    return group.recent * group.bytes > _CLEARLY * capacity_bytes


def choose(
    sample: Sequence[Unit],
    candidate: Unit | None,
    groups: Mapping[int, Group],
    *,
    clock: int,
    capacity_bytes: int,
    over_quota: Collection[int] = (),
) -> Unit | None:
    """The unit of `sample` that is evicted for `candidate`; None to serve the candidate without storing it.

    Without a candidate a unit must be evicted; the result is None only for an empty sample. `groups` has the group of each
    unit. `over_quota` names the prefixes that exceed their quota, including the candidate: such a candidate may only replace
    units of its own prefix (so draw from those); else units of these prefixes are evicted first, after copies and expired
    units.
    """
    if candidate is not None and candidate.prefix in over_quota:
        sample = [unit for unit in sample if unit.prefix == candidate.prefix]
        over_quota = ()
    now = _Moment(groups, clock, capacity_bytes)
    forfeited = (
        [unit for unit in sample if unit.copy]
        or [unit for unit in sample if unit.expired]
        or [unit for unit in sample if unit.prefix in over_quota]
        or [unit for unit in sample if now.dead(unit)]
    )
    if forfeited or candidate is None:
        return min(forfeited or sample, key=now.usefulness, default=None)
    idle = [unit for unit in sample if not continues(unit, clock, capacity_bytes)]
    return _by_recency(idle, candidate, now) or _by_frequency(idle, candidate, now)


class _Moment(NamedTuple):
    """The input of one decision."""

    groups: Mapping[int, Group]
    clock: int
    capacity_bytes: int

    def dead(self, unit: Unit) -> bool:
        return is_dead(unit, self.groups[unit.group], clock=self.clock, capacity_bytes=self.capacity_bytes)

    def uses(self, unit: Unit) -> float:
        return aged(unit, clock=self.clock, capacity_bytes=self.capacity_bytes)

    def usefulness(self, unit: Unit) -> tuple[int, int, int]:
        """Uses count in powers of two, so that equal groups are evicted one after the other, not a part of each."""
        return (math.frexp(self.uses(unit))[1], self.groups[unit.group].last, unit.last)


def _by_recency(idle: Sequence[Unit], candidate: Unit, now: _Moment) -> Unit | None:
    """In a group in which recency pays: a unit that is used less often, or else the least recently used one."""
    group = now.groups[candidate.group]
    own = [unit for unit in idle if unit.group == candidate.group]
    if not own or not recency_pays(group, now.capacity_bytes):
        return None
    if group.hits < _LRU_LEAD * group.recent:
        return min(own, key=lambda unit: unit.last)
    victim = min(own, key=now.uses)
    return victim if candidate.uses >= now.uses(victim) + 0.5 else None


def _by_frequency(idle: Sequence[Unit], candidate: Unit, now: _Moment) -> Unit | None:
    """A unit with so few uses that neither chance nor its place in the epoch explains it."""
    victim = min(idle, key=now.uses, default=None)
    if victim is None or candidate.uses < 2 * now.uses(victim) + 2:
        return None
    return victim


def least_promising(ghosts: Sequence[Unit], *, clock: int, capacity_bytes: int) -> Unit:
    """The ghost whose record is deleted first. Raises ValueError for an empty sequence."""
    return min(ghosts, key=lambda unit: (aged(unit, clock=clock, capacity_bytes=capacity_bytes), unit.last))
