"""A test bench for eviction: the policies of the literature and Millrace's own, by byte hit ratio.

    for name, policy in POLICIES.items():
        print(name, simulate(policy, epochs(2, shuffled=True)))

The traces are in `tests.support.eviction_traces`. All is deterministic. Units are admitted whole, if they fit at all.
Sources: Belady 1966 (the optimum, here also free not to admit); SIEVE: Zhang et al., NSDI 2024; S3-FIFO: Yang et al.,
SOSP 2023. Both are written from the papers. LRU and the rest are folklore.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Protocol

from tests.support.eviction_traces import Trace

from millrace.cache.eviction.keep_policy import (
    choose,
    group_touched,
    least_promising,
    touched,
)
from millrace.cache.eviction.policy import GHOSTS_PER_RESIDENT, SAMPLE_SIZE, SHRINK_SAMPLE_SIZE, Group, Unit

_END = -1


class Policy(Protocol):
    """A cache under simulation. Not thread-safe."""

    def access(self, unit: int) -> bool:
        """Read a unit, admitting and evicting as the policy likes; whether it was there."""
        ...


def simulate(policy: Callable[[Trace], Policy], trace: Trace) -> float:
    """The share of the bytes, from `measured_from` on, that were hits."""
    cache = policy(trace)
    hits = total = 0
    for number, unit in enumerate(trace.accesses):
        hit = cache.access(unit)
        if number >= trace.measured_from:
            total += trace.nbytes[unit]
            hits += trace.nbytes[unit] if hit else 0
    return hits / total


# --- policies ---------------------------------------------------------------------------------------


class NeverEvict:
    """Keeps the first units."""

    def __init__(self, trace: Trace) -> None:
        self._nbytes, self._free = trace.nbytes, trace.capacity_bytes
        self._here: set[int] = set()

    def access(self, unit: int) -> bool:
        if unit in self._here:
            return True
        if self._nbytes[unit] <= self._free:
            self._here.add(unit)
            self._free -= self._nbytes[unit]
        return False


class LeastRecentlyUsed:
    """LRU."""

    def __init__(self, trace: Trace) -> None:
        self._nbytes, self._free = trace.nbytes, trace.capacity_bytes
        self._limit = trace.capacity_bytes
        self._here: OrderedDict[int, None] = OrderedDict()

    def access(self, unit: int) -> bool:
        if unit in self._here:
            self._here.move_to_end(unit)
            return True
        if self._nbytes[unit] <= self._limit:
            self._here[unit] = None
            self._free -= self._nbytes[unit]
            while self._free < 0:
                self._free += self._nbytes[self._here.popitem(last=False)[0]]
        return False


class Belady:
    """Uses the future: evicts or refuses the unit with the latest next use. The optimum for units of one size."""

    def __init__(self, trace: Trace) -> None:
        self._nbytes, self._free = trace.nbytes, trace.capacity_bytes
        self._next = [0] * len(trace.accesses)
        coming: dict[int, int] = {}
        for number in range(len(trace.accesses) - 1, -1, -1):
            unit = trace.accesses[number]
            self._next[number] = coming.get(unit, len(trace.accesses))
            coming[unit] = number
        self._now = 0
        self._here: dict[int, int] = {}
        self._latest: list[tuple[int, int]] = []

    def access(self, unit: int) -> bool:
        following = self._next[self._now]
        self._now += 1
        hit = unit in self._here
        self._here[unit] = following
        heapq.heappush(self._latest, (-following, unit))
        self._free -= 0 if hit else self._nbytes[unit]
        while self._free < 0:
            negative, victim = heapq.heappop(self._latest)
            if self._here.get(victim) == -negative:
                del self._here[victim]
                self._free += self._nbytes[victim]
        return hit


class Sieve:
    """SIEVE: a queue that is never reordered, a bit for each unit, and a hand that looks for one without it."""

    def __init__(self, trace: Trace) -> None:
        self._nbytes, self._free = trace.nbytes, trace.capacity_bytes
        self._limit = trace.capacity_bytes
        self._visited: dict[int, bool] = {}
        self._newer: dict[int, int] = {}  # a ring through _END, from the oldest to the newest
        self._older: dict[int, int] = {}
        self._newer[_END] = self._older[_END] = _END
        self._hand = _END

    def access(self, unit: int) -> bool:
        if unit in self._visited:
            self._visited[unit] = True
            return True
        if self._nbytes[unit] > self._limit:
            return False
        self._free -= self._nbytes[unit]
        while self._free < 0:
            self._evict()
        newest = self._older[_END]
        self._newer[newest] = self._older[_END] = unit
        self._older[unit], self._newer[unit] = newest, _END
        self._visited[unit] = False
        return False

    def _evict(self) -> None:
        hand = self._hand
        while hand == _END or self._visited[hand]:
            if hand != _END:
                self._visited[hand] = False
            hand = self._newer[hand]
        before, self._hand = self._older.pop(hand), self._newer.pop(hand)
        self._newer[before], self._older[self._hand] = self._hand, before
        del self._visited[hand]
        self._free += self._nbytes[hand]


class S3Fifo:
    """S3-FIFO: a small queue for candidates (a tenth), the main one, and a ghost queue as large as the main one."""

    def __init__(self, trace: Trace) -> None:
        self._nbytes, self._limit = trace.nbytes, trace.capacity_bytes
        self._small_limit = trace.capacity_bytes // 10
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._small_bytes = self._main_bytes = self._ghost_bytes = 0

    def access(self, unit: int) -> bool:
        for queue in (self._small, self._main):
            if unit in queue:
                queue[unit] = min(3, queue[unit] + 1)
                return True
        nbytes = self._nbytes[unit]
        if nbytes > self._limit:
            return False
        while self._small_bytes + self._main_bytes + nbytes > self._limit:
            if self._small_bytes > self._small_limit or not self._main:
                self._evict_small()
            else:
                self._evict_main()
        if unit in self._ghosts:
            del self._ghosts[unit]
            self._ghost_bytes -= nbytes
            self._main[unit] = 0
            self._main_bytes += nbytes
        else:
            self._small[unit] = 0
            self._small_bytes += nbytes
        return False

    def _evict_small(self) -> None:
        unit, uses = self._small.popitem(last=False)
        self._small_bytes -= self._nbytes[unit]
        if uses > 1:
            self._main[unit] = 0
            self._main_bytes += self._nbytes[unit]
            return
        self._ghosts[unit] = None
        self._ghost_bytes += self._nbytes[unit]
        while self._ghost_bytes > self._limit - self._small_limit:
            self._ghost_bytes -= self._nbytes[self._ghosts.popitem(last=False)[0]]

    def _evict_main(self) -> None:
        unit, uses = self._main.popitem(last=False)
        if uses:
            self._main[unit] = uses - 1
        else:
            self._main_bytes -= self._nbytes[unit]


class Millrace:
    """`millrace.cache.eviction.keep_policy`, called as the store calls it."""

    def __init__(self, trace: Trace, *, seed: int = 1) -> None:
        self._trace, self._capacity = trace, trace.capacity_bytes
        self._free = trace.capacity_bytes
        self._random = random.Random(seed)
        self._records: dict[int, Unit] = {}
        self._groups: dict[int, Group] = {}
        self._residents, self._ghosts = _Bag(), _Bag()
        self._clock = 0

    def access(self, unit: int) -> bool:
        nbytes, number = self._trace.nbytes[unit], self._trace.groups[unit]
        self._clock += nbytes
        hit = unit in self._residents
        before = self._records.get(unit)
        group = self._groups.get(number, Group(last=self._clock))
        group = group_touched(
            group, clock=self._clock, nbytes=nbytes, capacity_bytes=self._capacity, before=before, hit=hit
        )
        if before is None:
            group = group._replace(bytes=group.bytes + nbytes, units=group.units + 1)
            record = Unit(key=unit.to_bytes(8, "big"), nbytes=nbytes, group=number, last=self._clock)
        else:
            record = touched(before, clock=self._clock, capacity_bytes=self._capacity)
        self._records[unit], self._groups[number] = record, group
        if not hit:
            if self._make_room(record):
                self._ghosts.discard(unit)
                self._residents.add(unit)
                self._free -= nbytes
            else:
                self._ghosts.add(unit)
            self._forget()
        return hit

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity; a smaller one evicts at once."""
        self._free += capacity_bytes - self._capacity
        self._capacity = capacity_bytes
        self._make_room(None)

    def resident_bytes(self, group: int) -> int:
        """How much of a group is here."""
        units = (self._records[unit] for unit in self._residents)
        return sum(unit.nbytes for unit in units if unit.group == group)

    def _make_room(self, candidate: Unit | None) -> bool:
        needed = candidate.nbytes if candidate else 0
        if needed > self._capacity:
            return False
        victims: list[int] = []
        freed = 0
        while self._free + freed < needed:
            drawn = self._residents.draw(self._random, SAMPLE_SIZE if candidate else SHRINK_SAMPLE_SIZE)
            sample = [unit for unit in drawn if unit not in victims]
            victim = choose(
                [self._records[unit] for unit in sample],
                candidate,
                self._groups,
                clock=self._clock,
                capacity_bytes=self._capacity,
            )
            if victim is None:
                if candidate is None and not sample:
                    continue  # all of the draw were chosen before
                return False
            victims.append(int.from_bytes(victim.key, "big"))
            freed += victim.nbytes
        for unit in victims:
            self._residents.discard(unit)
            self._ghosts.add(unit)
        self._free += freed
        return True

    def _forget(self) -> None:
        while len(self._ghosts) > GHOSTS_PER_RESIDENT * max(1, len(self._residents)):
            sample = [self._records[unit] for unit in self._ghosts.draw(self._random, SAMPLE_SIZE)]
            record = least_promising(sample, clock=self._clock, capacity_bytes=self._capacity)
            unit = int.from_bytes(record.key, "big")
            self._ghosts.discard(unit)
            del self._records[unit]
            group = self._groups[record.group]
            self._groups[record.group] = group._replace(bytes=group.bytes - record.nbytes, units=group.units - 1)


def simulate_in_pieces(trace: Trace, *, readers: int = 8, pieces: int = 16, seed: int = 1) -> float:
    """The byte hit ratio of Millrace when `readers` read at once, each a unit of its own in `pieces`, in random turns.

    Misses are stored piece by piece, so a unit may be cached in part, as in the store. It is evicted as a whole.
    """
    generator = random.Random(seed)
    capacity, free, clock = trace.capacity_bytes, trace.capacity_bytes, 0
    records: dict[int, Unit] = {}
    groups: dict[int, Group] = {}
    present: dict[int, set[int]] = {}
    residents = _Bag()
    hits = total = 0
    coming = iter(enumerate(trace.accesses))
    reading = [[*access, 0] for access in islice(coming, readers)]
    while reading:
        reader = generator.choice(reading)
        number, unit, piece = reader
        reader[2] += 1
        if reader[2] == pieces:
            reading.remove(reader)
            reading += [[*access, 0] for access in islice(coming, 1)]
        nbytes, name = trace.nbytes[unit], trace.groups[unit]
        clock += nbytes // pieces
        hit = piece in present.get(unit, ())
        before = records.get(unit)
        group = groups.get(name, Group(last=clock))
        group = group_touched(group, clock=clock, nbytes=nbytes, capacity_bytes=capacity, before=before, hit=hit)
        if before is None:
            group = group._replace(bytes=group.bytes + nbytes, units=group.units + 1)
            records[unit] = Unit(key=unit.to_bytes(8, "big"), nbytes=nbytes, group=name, last=clock)
        else:
            records[unit] = touched(before, clock=clock, capacity_bytes=capacity)
        groups[name] = group
        if number >= trace.measured_from:
            total += nbytes // pieces
            hits += nbytes // pieces if hit else 0
        while not hit and free < nbytes // pieces:
            sample = [records[drawn] for drawn in residents.draw(generator, SAMPLE_SIZE) if drawn != unit]
            victim = choose(sample, records[unit], groups, clock=clock, capacity_bytes=capacity)
            if victim is None:
                break
            gone = int.from_bytes(victim.key, "big")
            residents.discard(gone)
            free += len(present.pop(gone)) * (victim.nbytes // pieces)
        if not hit and free >= nbytes // pieces:
            residents.add(unit)
            present.setdefault(unit, set()).add(piece)
            free -= nbytes // pieces
    return hits / total


class _Bag:
    """A set that units can be drawn from at random."""

    def __init__(self) -> None:
        self._units: list[int] = []
        self._places: dict[int, int] = {}

    def __contains__(self, unit: int) -> bool:
        return unit in self._places

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[int]:
        return iter(self._units)

    def add(self, unit: int) -> None:
        if unit not in self._places:
            self._places[unit] = len(self._units)
            self._units.append(unit)

    def discard(self, unit: int) -> None:
        place = self._places.pop(unit, None)
        if place is not None:
            last = self._units.pop()
            if last != unit:
                self._units[place] = last
                self._places[last] = place

    def draw(self, generator: random.Random, count: int) -> list[int]:
        """At most `count` different units."""
        size = len(self._units)
        return list({self._units[int(generator.random() * size)]: None for _ in range(count)}) if size else []


POLICIES: Mapping[str, Callable[[Trace], Policy]] = {
    "optimum (Belady)": Belady,
    "never evict": NeverEvict,
    "LRU": LeastRecentlyUsed,
    "SIEVE": Sieve,
    "S3-FIFO": S3Fifo,
    "Millrace": Millrace,
}
"""Every policy, by the name that tables use."""
