"""Makes room in a store: carries out what `eviction.py` decides, one evictor at a time in a node.

Two occasions. A read that finds no room asks for some (`reserve`): what the policy gives up for it is removed, or the read
is served without being kept. And housekeeping brings a store inside its limits again (`enforce`) when these were lowered,
when another program fills the disk, when a time to live is over or a prefix takes more than its quota. In both, copies of
what other nodes own go first (`copies.py`), and nothing goes for a copy.

A refusal is remembered for thirty times as long as it took to find: reads that may not be kept cost a thread at most 3 %
of its time, however many there are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from millrace.cache.audit import Audit
from millrace.cache.copies import Copies
from millrace.cache.environment import DamagedIndexError
from millrace.cache.eviction import SAMPLE_SIZE, SHRINK_SAMPLE_SIZE, Group, Unit, choose
from millrace.cache.failures import FailingDiskError
from millrace.cache.flight import ProcessLocks
from millrace.cache.free_space import FreeSpace
from millrace.cache.records import ObjectName
from millrace.cache.rules import AppliedRule, Place, Rules
from millrace.cache.source import Keep
from millrace.cache.store import Store
from millrace.cache.unit_rules import Holdings, Survey, Surveyor, is_expired, rule_of
from millrace.cache.usage import FindGroup
from millrace.cache.usage_records import Draw, UnitRecord, UsageRecords, group_number
from millrace.errors import StorageError
from millrace.events import Event, emit

_LOCK = (b"eviction", 0)
_LOOKOUT_LOCK = (b"lookout", 0)  # of the process that looks at the disk closely
_CHORES = b"chores"
_CHORES_SECONDS = 0.45  # a little less than between two ticks
_PAGE = 1000
_REFUSAL_FACTOR = 30.0
_TURN_SECONDS = 0.05
_LONG_TURN_SECONDS = 10.0
_DRAWS = 8  # in a row that may hold nothing that can go
_TAKEN_OF_A_DRAW = 4  # one in so many of a large draw goes before the next
_PIN_ATTEMPTS = 5
_PIN_PAUSE_SECONDS = 0.005
_PINS_REFUSED_SECONDS = 1.0
_EXTREMES_SECONDS = 5.0

_NO_PLACES: Mapping[Place, int] = {}


@dataclass(frozen=True, slots=True)
class Newcomer:
    """An object of which something is about to be kept. `key` is its id, `nbytes` its whole size.

    For a copy of what another node owns nothing is evicted, where copies are told apart at all.
    """

    key: bytes
    nbytes: int
    name: Callable[[], ObjectName]
    group: FindGroup
    keep: Keep = Keep.OWNED


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A unit that may go, as the policy sees it, and the bytes that it has here."""

    unit: Unit
    segment: int
    nbytes: int
    rule: AppliedRule


class Evictor:
    """Evicts from one store. Thread-safe, any number of processes at once; not usable after a fork.

    `feed` writes down this process's uses. `remove_object` and `remove_segment` remove a unit and give whether it went: a
    segment that somebody appends to stays. `report` hears of a disk that fails.
    """

    def __init__(
        self,
        store: Store,
        records: UsageRecords,
        locks: ProcessLocks,
        *,
        feed: Callable[[], None],
        remove_object: Callable[[bytes], bool],
        remove_segment: Callable[[int], bool],
        report: Callable[[StorageError], None],
        copies: Copies,
        audit: Audit,
    ) -> None:
        self._store = store
        self._records = records
        self._locks = locks
        self._feed = feed
        self._remove_object = remove_object
        self._remove_segment = remove_segment
        self._report = report
        self._holdings = Holdings(store.index)
        self._surveyor = Surveyor(records, self._holdings)
        self._turn = threading.Lock()
        self._quota_lock = threading.Lock()
        self._refused_until = 0.0
        self._pins_refused_until = 0.0
        self._space = FreeSpace(store)
        self._over_told = False
        self._extremes_at = 0.0
        self._copies = copies
        self._audit = audit

    # --- for a read that found something to keep ----------------------------------------------------

    def reserve(self, nbytes: int, newcomer: Newcomer) -> bool:
        """`Store.reserve`, evicting for it where the policy agrees. The caller releases what was granted."""
        try:
            rules = self._store.rules.current()
            rule = rule_of(rules, newcomer.name()) if rules.by_place else None
            place = None if rule is None else rule.quota_place
            if place is None or rule is None:
                excess = 0
            else:
                with self._quota_lock:  # or threads that come together would all fit, and later most would have to go
                    survey = self._surveyor.current(rules)
                    excess = survey.used.get(place, 0) + nbytes - _quota_bytes(self._store, rule)
                    if excess <= 0:
                        survey.add(place, newcomer.key, nbytes)
        except StorageError as error:
            self._report(error)
            return False
        if excess <= 0:
            if self._reserve(nbytes):
                return True
            self.give_back(nbytes, newcomer)
        if newcomer.keep is Keep.COPY and self._copies.are_told_apart:
            return False
        over = place if excess > 0 else None
        if rule is not None and rule.pinned and time.monotonic() >= self._pins_refused_until:
            # Room may be taken by others while it is made, and a block counts twice for the moment after it was written.
            for _ in range(_PIN_ATTEMPTS):
                if self._make_room(nbytes, newcomer, over, excess) and self._reserve(nbytes):
                    return self._count(place, nbytes, newcomer)
                time.sleep(_PIN_PAUSE_SECONDS)
            self._pins_refused_until = time.monotonic() + _PINS_REFUSED_SECONDS
            return False
        if time.monotonic() < self._refused_until:
            return False
        if self._make_room(nbytes, newcomer, over, excess) and self._reserve(nbytes):
            return self._count(place, nbytes, newcomer)
        return False

    def give_back(self, nbytes: int, newcomer: Newcomer) -> None:
        """Count bytes to no quota any more that `reserve` has granted, and that were not written."""
        try:
            rules = self._store.rules.current()
            place = rule_of(rules, newcomer.name()).quota_place if rules.by_place else None
            if place is not None:
                with self._quota_lock:
                    used = self._surveyor.current(rules).used
                    used[place] = max(0, used.get(place, 0) - nbytes)
        except StorageError as error:
            self._report(error)

    def _reserve(self, nbytes: int) -> bool:
        """Reserve what is free beyond the headroom."""
        try:
            return self._space.short_of_headroom(nbytes) <= 0 and self._store.reserve(nbytes)
        except StorageError as error:
            self._report(error)
            return False

    def _count(self, place: Place | None, nbytes: int, newcomer: Newcomer) -> bool:
        if place is not None:
            self._surveyor.current(self._store.rules.current()).add(place, newcomer.key, nbytes)
        return True

    def _make_room(self, nbytes: int, newcomer: Newcomer, over: Place | None, excess: int) -> bool:
        try:
            with self._my_turn(_TURN_SECONDS) as mine:
                if not mine:
                    return False
                started = time.thread_time()
                shortage = max(excess, self._store.shortage(nbytes), self._space.short_of_headroom(nbytes))
                made = shortage <= 0 or self._replace(shortage, newcomer, over)
                if not made:
                    cost = time.thread_time() - started
                    self._refused_until = time.monotonic() + _REFUSAL_FACTOR * cost
                return made
        except StorageError as error:
            self._report(error)
            return False

    def _replace(self, shortage: int, newcomer: Newcomer, over: Place | None) -> bool:
        """Collect victims until there is enough, and only then remove them."""
        self._feed()
        self._audit.adopt()
        rules = self._store.rules.current()
        places = _places(rules)
        rule = rule_of(rules, newcomer.name())
        unit = self._unit_of(newcomer, 0 if rule.quota_place is None else places[rule.quota_place])
        victims = {} if over is not None else self._copies_to_go(shortage, newcomer, rules, places)
        empty = 0
        while shortage > sum(victim.nbytes for victim in victims.values()):
            draw = self._draw(SAMPLE_SIZE, rules, over)
            sample = {
                found.unit.key: found
                for found in self._candidates(draw, rules, places)
                if found.unit.key != newcomer.key and found.unit.key not in victims and not found.rule.pinned
            }
            if not sample:
                empty += 1
                if empty == _DRAWS:
                    return False
                continue
            chosen = choose(
                [found.unit for found in sample.values()],
                None if rule.pinned else unit,  # somebody wants it kept: that is evidence enough
                {**draw.groups, unit.group: self._group_of(unit, draw)},
                clock=draw.clock,
                capacity_bytes=self._store.capacity_bytes(),
                over_quota=self._over_quota(rules, places) | ({places[over]} if over is not None else set()),
            )
            if chosen is None:
                return False
            victims[chosen.key] = sample[chosen.key]
        return self._remove(victims.values()) >= shortage

    def _copies_to_go(
        self, shortage: int, newcomer: Newcomer, rules: Rules, places: Mapping[Place, int]
    ) -> dict[bytes, _Candidate]:
        """Copies that make up for the shortage, or all that there are: no newcomer has to be better than these."""
        victims: dict[bytes, _Candidate] = {}
        empty = 0
        while empty < _DRAWS and (draw := self._copies.draw(SAMPLE_SIZE)).records:
            sample = {
                found.unit.key: found
                for found in self._candidates(draw, rules, places)
                if found.unit.key != newcomer.key and found.unit.key not in victims and not found.rule.pinned
            }
            empty = 0 if sample else empty + 1
            while sample:
                if shortage <= sum(victim.nbytes for victim in victims.values()):
                    return victims
                chosen = self._least_useful(sample, draw, ())
                victims[chosen.unit.key] = sample.pop(chosen.unit.key)
        return victims

    def _unit_of(self, newcomer: Newcomer, prefix: int) -> Unit:
        record = self._records.get(newcomer.key)
        if record is not None:
            return replace(record.unit, prefix=prefix)
        group = group_number(newcomer.group())
        return Unit(key=newcomer.key, nbytes=newcomer.nbytes, group=group, last=self._records.clock, prefix=prefix)

    def _group_of(self, unit: Unit, draw: Draw) -> Group:
        found = draw.groups.get(unit.group)
        return self._records.group(unit.group) if found is None else found

    # --- bringing the store inside its limits -------------------------------------------------------

    def look(self) -> float | None:
        """See how free the disk is and make room where another program is about to take it below `min_free`.

        Gives in how many seconds to look again, None: with the next tick. One process of the node looks closely, for as long
        as that is needed.
        """
        pause = self._space.look()
        if self._space.too_little() + self._space.headroom > 0:
            self.enforce()
            if self._pressing() > 0:
                return None  # there is nothing to evict, or another process is at it
        if pause is None:
            self._locks.release(_LOOKOUT_LOCK)
        elif not self._locks.try_acquire(_LOOKOUT_LOCK):
            return None
        return pause

    def enforce(self, *, patient: bool = False) -> None:
        """Evict what has expired, and whatever else until every limit holds. `patient` waits for another evictor to end.

        Quick when there is nothing to do. Capacity is held by evicting all but pins; to keep `min_free` pins go last. What
        takes a look at every unit is done by one process of the node at a time, which also goes on with the audit.
        """
        rules = self._store.rules.current()
        chores = self._records.claim(_CHORES, _CHORES_SECONDS)
        survey = self._surveyor.current(rules) if chores or patient else Survey()
        over = [place for place in survey.used if self._excess(survey, rules, place) > 0]
        if not chores and not patient and self._pressing_soon() <= 0:
            return
        with self._my_turn(_LONG_TURN_SECONDS if patient else 0.0) as mine:
            if not mine:
                return
            if chores:
                self._audit.go_on()
            if not over and not survey.expired and self._pressing_soon() <= 0:
                return
            self._feed()
            self._audit.adopt()
            for record in self._records.find(survey.expired).records:
                holding = self._holdings.of(record, rules)
                if holding is not None and is_expired(record, holding.rule, time.time()):
                    self._remove([_candidate(record, holding.nbytes, holding.rule, {}, 0.0)])
            for place in over:
                draw_of_place = partial(self._draw, SHRINK_SAMPLE_SIZE, rules, place)
                self._shrink(rules, partial(self._excess_now, rules, place), draw_of_place)
            for draw in (self._copies.draw, self._records.draw):
                self._shrink(rules, self._pressing_soon, partial(draw, SHRINK_SAMPLE_SIZE))
            self._go_to_extremes(rules, patient=patient)

    def _excess(self, survey: Survey, rules: Rules, place: Place) -> int:
        return survey.used.get(place, 0) - _quota_of(self._store, rules, place)

    def _excess_now(self, rules: Rules, place: Place) -> int:
        """By the survey that removals are counted in: another one may be due while they go on."""
        return self._excess(self._surveyor.current(rules), rules, place)

    def _pressing(self) -> int:
        """Bytes that have to go now."""
        return max(self._over_capacity(), self._space.too_little())

    def _pressing_soon(self) -> int:
        """Bytes that have to go now for what another program is about to write as well."""
        return max(self._over_capacity(), self._space.too_little() + self._space.headroom)

    def _over_capacity(self) -> int:
        return self._store.index.used_bytes() - self._store.capacity_bytes()

    def _shrink(self, rules: Rules, pressing: Callable[[], int], draw_some: Callable[[], Draw]) -> None:
        """Evict without a newcomer until nothing is pressing, or nothing that may go is found."""
        places = _places(rules)
        empty = 0
        while (needed := pressing()) > 0 and empty < _DRAWS:
            draw = draw_some()
            if not draw.records:
                return
            sample = {found.unit.key: found for found in self._candidates(draw, rules, places) if not found.rule.pinned}
            freed = 0
            for _ in range(max(1, len(sample) // _TAKEN_OF_A_DRAW)):
                if not sample or freed >= needed:
                    break
                chosen = self._least_useful(sample, draw, self._over_quota(rules, places))
                freed += self._remove([sample.pop(chosen.unit.key)])
            empty = 0 if freed else empty + 1

    def _least_useful(self, sample: Mapping[bytes, _Candidate], draw: Draw, over_quota: Collection[int]) -> _Candidate:
        """Which of a sample, that is not empty, goes first where something has to go."""
        chosen = choose(
            [found.unit for found in sample.values()],
            None,
            draw.groups,
            clock=draw.clock,
            capacity_bytes=self._store.capacity_bytes(),
            over_quota=over_quota,
        )
        assert chosen is not None, "without a newcomer something of every sample goes"
        return sample[chosen.key]

    def _go_to_extremes(self, rules: Rules, *, patient: bool) -> None:
        """What no draw has found: look at every unit, and where the disk runs full take pins as well.

        When that was of no use it is not done again for a while.
        """
        started = time.monotonic()
        if self._pressing() <= 0 or (started < self._extremes_at and not patient):
            return
        self._look_everywhere(rules)
        if self._pressing() > 0:
            ended = time.monotonic()
            self._extremes_at = ended + max(_EXTREMES_SECONDS, _REFUSAL_FACTOR * (ended - started))

    def _look_everywhere(self, rules: Rules) -> None:
        if self._pressing() > 0:
            self._audit.adopt(again=True)
            self._shrink_all(rules, self._pressing, pinned=False)
        if self._space.too_little() > 0:
            self._shrink_all(rules, self._space.too_little, pinned=True)
        over = self._over_capacity()
        if over > 0 and not self._over_told:
            emit(Event(name="cache.over_capacity", subject=str(self._store.directory), nbytes=over))
        self._over_told = over > 0

    def _shrink_all(self, rules: Rules, pressing: Callable[[], int], *, pinned: bool) -> None:
        after = b""
        while page := self._records.page(after, _PAGE):
            after = page[-1].unit.key
            for record in page:
                if pressing() <= 0:
                    return
                holding = self._holdings.of(record, rules)
                if holding is None or holding.rule.pinned != pinned:
                    continue
                freed = self._remove([_candidate(record, holding.nbytes, holding.rule, {}, 0.0)])
                if freed and pinned:
                    emit(
                        Event(
                            name="cache.pinned.evicted",
                            subject=str(self._store.directory),
                            nbytes=freed,
                            detail="another program fills the disk up to 'min_free'",
                        )
                    )

    # --- candidates ---------------------------------------------------------------------------------

    def _draw(self, count: int, rules: Rules, place: Place | None) -> Draw:
        if place is None:
            return self._records.draw(count)
        return self._records.find(self._surveyor.some_of(self._surveyor.current(rules), place, count))

    def _candidates(self, draw: Draw, rules: Rules, places: Mapping[Place, int]) -> Iterator[_Candidate]:
        """Those of a draw that are here, with what the rules say; the records of others are put right."""
        now = time.time()
        gone = []
        for record in draw.records:
            holding = self._holdings.of(record, rules)
            if holding is None:
                gone.append(record.unit.key)
            else:
                copy = self._copies.is_copy(record)
                yield _candidate(record, holding.nbytes, holding.rule, places, now, copy=copy)
        if gone:
            self._records.gone(gone)

    def _over_quota(self, rules: Rules, places: Mapping[Place, int]) -> set[int]:
        if not places:
            return set()
        used = self._surveyor.current(rules).used
        return {places[place] for place in places if used.get(place, 0) > _quota_of(self._store, rules, place)}

    def _remove(self, victims: Iterable[_Candidate]) -> int:
        """Remove units; gives the bytes of those that went. One that cannot be removed is reported, and keeps none."""
        freed = 0
        gone = []
        for victim in victims:
            key = victim.unit.key
            before = self._store.free_bytes()
            try:
                went = self._remove_segment(victim.segment) if victim.segment else self._remove_object(key)
            except (FailingDiskError, DamagedIndexError):
                raise  # so it would be with every other
            except StorageError as error:
                self._report(error)
                continue
            if not went:
                continue
            freed += victim.nbytes
            gone.append(key)
            self._space.removed(victim.nbytes, self._store.free_bytes() - before)
            place = victim.rule.quota_place
            if place is not None:
                used = self._surveyor.current(self._store.rules.current()).used
                used[place] = max(0, used.get(place, 0) - victim.nbytes)
        if gone:
            self._records.gone(gone)
        return freed

    def forget_survey(self) -> None:
        """Look at every unit again before the next decision. For tests."""
        self._surveyor.forget()

    # --- one at a time ------------------------------------------------------------------------------

    @contextmanager
    def _my_turn(self, seconds: float) -> Iterator[bool]:
        """Be the only evictor of this node for the time of the block; gives whether that came about."""
        deadline = time.monotonic() + seconds
        if not self._turn.acquire(timeout=seconds):
            yield False
            return
        try:
            pause = 0.0005
            while not (mine := self._locks.try_acquire(_LOCK)) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
            try:
                yield mine
            finally:
                if mine:
                    self._locks.release(_LOCK)
        finally:
            self._turn.release()


def _candidate(
    record: UnitRecord, nbytes: int, rule: AppliedRule, places: Mapping[Place, int], now: float, *, copy: bool = False
) -> _Candidate:
    prefix = 0 if rule.quota_place is None else places.get(rule.quota_place, 0)
    unit = replace(record.unit, prefix=prefix, expired=is_expired(record, rule, now), copy=copy)
    return _Candidate(unit, record.segment, nbytes, rule)


def _places(rules: Rules) -> Mapping[Place, int]:
    """A number for each prefix with a quota."""
    if not rules.by_place:
        return _NO_PLACES
    return {
        place: number
        for number, place in enumerate(sorted(place for place, rule in rules.by_place.items() if rule.quota), 1)
    }


def _quota_bytes(store: Store, rule: AppliedRule) -> int:
    return store.disk_bytes() if rule.quota is None else rule.quota.of(store.disk_bytes())


def _quota_of(store: Store, rules: Rules, place: Place) -> int:
    quota = rules.at(place).quota
    return store.disk_bytes() if quota is None else quota.of(store.disk_bytes())
