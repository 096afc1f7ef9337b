"""Frees space in a store: executes the decisions of the eviction policy (`policy.py`), one evictor at a time in a node.

Two occasions. A read that finds no free space calls `reserve`: the units that the policy selects are removed, or the read
is served without being kept. And maintenance brings a store inside its limits again (`enforce`) when these were lowered,
when another program fills the disk, when a time to live is over or a prefix exceeds its quota. In both cases copies that
other nodes own, and checkpoint files, are evicted first (`copies.py`). Nothing is evicted for a copy, and for a checkpoint
file only an older one.

A refusal is valid for a second for its object, and for thirty times as long as its decision took for every other one:
reads that may not be kept cost a thread at most 3 % of its time, whatever their number. Free space is checked again as soon
as any process removes something, or the limits or rules change; space that another program frees is found a second later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from millrace.cache.eviction.audit import Audit
from millrace.cache.eviction.copies import Copies, Keep
from millrace.cache.eviction.holdings import Holdings, Survey, Surveyor, is_expired
from millrace.cache.eviction.policy import SAMPLE_SIZE, SHRINK_SAMPLE_SIZE, EvictionPolicy, Unit
from millrace.cache.eviction.retention import AppliedRule, Place, Rules
from millrace.cache.eviction.usage import FindGroup
from millrace.cache.eviction.usage_records import Draw, UnitRecord, UsageRecords, group_number
from millrace.config import Amount
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.runtime.failures import FailingDiskError
from millrace.runtime.locks import NamedLocks, lock_number
from millrace.store.environment import DamagedIndexError
from millrace.store.records import ObjectName
from millrace.store.signals import REMOVALS
from millrace.store.space import FreeSpace
from millrace.store.store import Store

_LOCK = lock_number(b"eviction")
_LOOKOUT_LOCK = lock_number(b"lookout")  # of the process that checks the disk frequently
_CHORES = b"chores"
_CHORES_SECONDS = 0.45  # a little less than between two ticks
_PAGE = 1000
_REFUSAL_FACTOR = 30.0
_REFUSED_SECONDS = 1.0
_MOST_REFUSALS = 4096
_TURN_SECONDS = 0.05
_SHORT_TURN_SECONDS, _LONG_TURN_SECONDS = 2.0, 10.0
_TURN_PAUSES = (0.0005, 0.02)  # first and longest pause between two attempts
_DRAWS = 8  # consecutive draws that may contain nothing to evict, each twice as large as the one before
_TAKEN_OF_A_DRAW = 4  # this fraction (1/n) of a large draw is evicted before the next draw
_PIN_ATTEMPTS = 5
_PIN_SECONDS = 1.0  # for which a pin waits for others that evict or write
_PIN_PAUSE_SECONDS = 0.005
_PINS_REFUSED_SECONDS = 1.0
_EXTREMES_SECONDS = 5.0


class Candidate(NamedTuple):
    """An object with bytes that are about to be stored. `key` is its id, `nbytes` its whole size.

    For a copy that another node owns nothing is evicted, if copies are distinguished at all. For a file of a checkpoint only
    older ones are evicted, unless it is pinned.
    """

    key: bytes
    nbytes: int
    name: Callable[[], ObjectName]
    group: FindGroup
    keep: Keep = Keep.OWNED


class _Resident(NamedTuple):
    """A unit that may go, as the policy sees it, and the bytes that it has here."""

    unit: Unit
    segment: int
    nbytes: int
    rule: AppliedRule


class _State(NamedTuple):
    """What the free space depends on, except for other programs: as long as it is equal, a refusal holds."""

    removals: int
    rules: Rules
    limits: tuple[Amount, Amount]


class _Refusal(NamedTuple):
    """A request for `nbytes` that was refused in a state; None: because of a quota, so there may be free space."""

    nbytes: int = 0
    state: _State | None = None
    until: float = 0.0

    def holds(self, nbytes: int, state: _State) -> bool:
        """Whether a request for `nbytes` has the same result."""
        return nbytes >= self.nbytes and time.monotonic() < self.until and state == self.state


class Evictor:
    """Evicts from one store. Thread-safe, any number of processes at once; not usable after a fork.

    `current_rules` returns the retention rules. `feed` writes down this process's uses. `remove_object` and
    `remove_segment` remove a unit and return whether it was removed: a segment in use by a writer stays. `report` gets the
    failures of a disk.
    """

    def __init__(
        self,
        store: Store,
        current_rules: Callable[[], Rules],
        records: UsageRecords,
        locks: NamedLocks,
        *,
        feed: Callable[[], None],
        remove_object: Callable[[bytes], bool],
        remove_segment: Callable[[int], bool],
        report: Callable[[StorageError], None],
        copies: Copies,
        audit: Audit,
        policy: EvictionPolicy,
    ) -> None:
        self._store = store
        self._policy = policy
        self._current_rules = current_rules
        self._records = records
        self._locks = locks
        self._feed = feed
        self._remove_object = remove_object
        self._remove_segment = remove_segment
        self._report = report
        self._holdings = Holdings(store)
        self._surveyor = Surveyor(records, self._holdings)
        self._turn = threading.RLock()
        self._quota_lock = threading.Lock()
        self._refused_until = 0.0  # the policy is not called before
        self._refused = _Refusal()  # the last one, of any object
        self._refused_objects: dict[tuple[bytes, Keep], _Refusal] = {}
        self._pins_refused_until = 0.0
        self._space = FreeSpace(store.space, store.index)
        self._over_reported = False
        self._extremes_at = 0.0
        self._copies = copies
        self._audit = audit
        self.wanted: dict[object, set[bytes]] = {}
        """The keys of objects that callers in this process must store, by the caller: they are treated as pinned."""

    # --- for a read that found something to keep ----------------------------------------------------

    def reserve(self, nbytes: int, candidate: Candidate) -> bool:
        """Calls `Store.reserve`, and evicts for it if the policy allows. The caller releases the granted bytes."""
        wanted = self.is_wanted(candidate.key)
        if wanted:
            candidate = candidate._replace(keep=Keep.OWNED)
        try:
            rules = self._current_rules()
            rule = self._rule_of(rules, candidate) if rules.by_place or wanted else None
            # Before the decision: a removal during the decision ends a refusal.
            state = _State(self._store.index.signals.numbers[REMOVALS], rules, self._store.space.limits)
            pinned = rule is not None and rule.pinned
            if not wanted and self._is_refused(nbytes, candidate, state, pinned=pinned):
                return False
            place = None if rule is None else rule.quota_place
            excess = self._count_what_fits(place, nbytes, candidate, rules)
        except StorageError as error:
            self._report(error)
            return False
        if excess <= 0:
            if self._reserve(nbytes):
                return True
            self.give_back(nbytes, candidate)
        if candidate.keep is Keep.COPY and self._copies.still_a_copy is not None:
            self._refuse(nbytes, candidate, state)
            return False
        if candidate.keep is Keep.CHECKPOINT and not (rule is not None and rule.pinned):
            if excess <= 0 and self._replace_checkpoints(nbytes, candidate) and self._reserve(nbytes):
                return self._count(place, nbytes, candidate)
            self._refuse(nbytes, candidate, state)
            return False
        if pinned and (wanted or time.monotonic() >= self._pins_refused_until):
            # A block that is stored without the evictors' lock may take the space that was freed.
            attempts, deadline = _PIN_ATTEMPTS, time.monotonic() + _PIN_SECONDS
            while attempts and time.monotonic() < deadline:
                found = self._reserve_exclusively(nbytes, candidate, place, state, wait=True)
                if found:
                    return True
                attempts -= found is not None
                time.sleep(_PIN_PAUSE_SECONDS)
            self._pins_refused_until = time.monotonic() + _PINS_REFUSED_SECONDS
            return False
        if time.monotonic() < self._refused_until:
            return False
        return bool(self._reserve_exclusively(nbytes, candidate, place, state))

    def _rule_of(self, rules: Rules, candidate: Candidate) -> AppliedRule:
        rule = rules.rule_of(candidate.name())
        return rule._replace(pinned=True) if self.is_wanted(candidate.key) else rule

    def is_wanted(self, key: bytes) -> bool:
        """Whether a caller in this process must store this object."""
        return any(key in keys for keys in list(self.wanted.values()))

    def _is_refused(self, nbytes: int, candidate: Candidate, state: _State, *, pinned: bool) -> bool:
        """Whether an equal request was refused a moment ago. A pin is not refused because of another object."""
        if not pinned and self._refused.holds(nbytes, state):
            return True
        mine = self._refused_objects.get((candidate.key, candidate.keep))
        return mine is not None and mine.holds(nbytes, state)

    def _refuse(self, nbytes: int, candidate: Candidate, state: _State) -> None:
        if len(self._refused_objects) >= _MOST_REFUSALS:
            self._refused_objects.clear()
        refusal = _Refusal(nbytes, state, time.monotonic() + _REFUSED_SECONDS)
        self._refused_objects[candidate.key, candidate.keep] = refusal

    def give_back(self, nbytes: int, candidate: Candidate) -> None:
        """Remove bytes from the quota that `reserve` granted and that were not written."""
        try:
            rules = self._current_rules()
            place = rules.rule_of(candidate.name()).quota_place if rules.by_place else None
            self._uncount(place, nbytes)
        except StorageError as error:
            self._report(error)

    def _uncount(self, place: Place | None, nbytes: int) -> None:
        """Remove bytes from the quota of `place`."""
        if place is not None:
            with self._quota_lock:
                used = self._surveyor.current(self._current_rules()).used
                used[place] = max(0, used.get(place, 0) - nbytes)

    def _reserve(self, nbytes: int, *, wait: bool = True) -> bool:
        """Reserve the free space beyond the headroom."""
        try:
            return self._space.short_of_headroom(nbytes) <= 0 and self._store.space.reserve(nbytes, wait=wait)
        except StorageError as error:
            self._report(error)
            return False

    def _count_what_fits(self, place: Place | None, nbytes: int, candidate: Candidate, rules: Rules) -> int:
        """Count `nbytes` for the quota of `place` if they fit. Returns how many bytes do not: at most 0 if all fit."""
        if place is None:
            return 0
        with self._quota_lock:  # or concurrent threads would all fit, and later most would be evicted
            survey = self._surveyor.current(rules)
            excess = self._excess(survey, rules, place) + nbytes
            if excess <= 0:
                survey.add(place, candidate.key, nbytes)
        return excess

    def _count(self, place: Place | None, nbytes: int, candidate: Candidate) -> bool:
        """Count reserved bytes for the quota of `place`. An error is only reported: the next survey counts them."""
        if place is not None:
            try:
                with self._quota_lock:
                    self._surveyor.current(self._current_rules()).add(place, candidate.key, nbytes)
            except StorageError as error:
                self._report(error)
        return True

    def _reserve_exclusively(
        self,
        nbytes: int,
        candidate: Candidate,
        place: Place | None,
        state: _State,
        *,
        wait: bool = False,
    ) -> bool | None:
        """Evict if needed, reserve the space and count it for the quota of `place`, under the lock of the node's evictors.

        None if that may succeed a moment later: another evictor has the lock, another thread took the space or, if `wait`, a
        block that is being written counts twice.
        """
        is_final = made = False

        def reserve() -> bool:
            nonlocal is_final, made
            started = time.thread_time()
            # Computed for each attempt: an earlier one may have made room, and other threads may have used it.
            excess = self._excess_with(place, nbytes)
            over = place if excess > 0 else None
            shortage = max(excess, self._shortage(nbytes))
            made = shortage <= 0 or self._replace(shortage, candidate, over)
            is_final = not made and not (wait and self._store.space.is_in_doubt(nbytes))
            if is_final:
                pause = _REFUSAL_FACTOR * (time.thread_time() - started)
                now = time.monotonic()
                self._refused_until = now + pause
                until = now + min(pause, _REFUSED_SECONDS)
                self._refused = _Refusal(nbytes, state if over is None else None, until)
                self._refuse(nbytes, candidate, state)
            return made and self._reserve(nbytes, wait=False) and self._count(place, nbytes, candidate)

        try:
            if self._exclusively(reserve, _TURN_SECONDS):
                return True
            # Another block took the space, or counts twice. This waits without the lock, so that others can evict.
            if made and self._reserve(nbytes):
                return self._count(place, nbytes, candidate)
            return False if is_final else None
        except StorageError as error:
            self._report(error)
            return False

    def _replace(self, shortage: int, candidate: Candidate, over: Place | None) -> bool:
        """Collect victims until there is enough, and only then remove them."""
        self._feed()
        self._audit.adopt()
        rules = self._current_rules()
        places = _places(rules)
        rule = self._rule_of(rules, candidate)
        unit = self._unit_of(candidate, 0 if rule.quota_place is None else places[rule.quota_place])
        victims = {} if over is not None else self._copies_to_go(shortage, candidate, rules, places)
        empty = 0
        while shortage > sum(victim.nbytes for victim in victims.values()):
            draw = self._draw(SAMPLE_SIZE << empty, rules, over)
            sample = self._evictable(draw, rules, places, but={candidate.key, *victims})
            if not sample:
                empty += 1
                if empty == _DRAWS:
                    return False
                continue
            chosen = self._policy.choose(
                [found.unit for found in sample.values()],
                None if rule.pinned else unit,  # a pin is evidence enough
                {**draw.groups, unit.group: draw.groups.get(unit.group) or self._records.group(unit.group)},
                clock=draw.clock,
                capacity_bytes=self._store.space.capacity_bytes(),
                over_quota=self._over_quota(rules, places) | ({places[over]} if over is not None else set()),
            )
            if chosen is None:
                return False
            victims[chosen.key] = sample[chosen.key]
        return self._remove(victims.values()) >= shortage

    def _replace_checkpoints(self, nbytes: int, candidate: Candidate) -> bool:
        """Evict files of checkpoints that are not being restored."""

        def replace() -> bool:
            shortage = self._shortage(nbytes)
            if shortage <= 0:
                return True
            self._feed()
            rules = self._current_rules()
            may_go = self._copies.is_idle_checkpoint
            victims = self._copies_to_go(shortage, candidate, rules, _places(rules), may_go)
            if shortage > sum(victim.nbytes for victim in victims.values()):
                return False
            return self._remove(victims.values()) >= shortage

        try:
            return self._exclusively(replace, _TURN_SECONDS)
        except StorageError as error:
            self._report(error)
            return False

    def _copies_to_go(
        self,
        shortage: int,
        candidate: Candidate,
        rules: Rules,
        places: Mapping[Place, int],
        may_go: Callable[[UnitRecord], bool] = lambda record: True,
    ) -> dict[bytes, _Resident]:
        """Copies that cover the shortage, or all copies that `may_go`: no candidate has to be better than these."""
        victims: dict[bytes, _Resident] = {}
        empty = 0
        while empty < _DRAWS and (draw := self._copies.draw(SAMPLE_SIZE)).records:
            draw = Draw([record for record in draw.records if may_go(record)], draw.groups, draw.clock)
            sample = self._evictable(draw, rules, places, but={candidate.key, *victims})
            empty = 0 if sample else empty + 1
            while sample:
                if shortage <= sum(victim.nbytes for victim in victims.values()):
                    return victims
                chosen = self._least_useful(sample, draw, ())
                victims[chosen.unit.key] = sample.pop(chosen.unit.key)
        return victims

    def _unit_of(self, candidate: Candidate, prefix: int) -> Unit:
        record = self._records.get(candidate.key)
        if record is not None:
            return record.unit._replace(prefix=prefix)
        group = group_number(candidate.group())
        return Unit(key=candidate.key, nbytes=candidate.nbytes, group=group, last=self._records.clock, prefix=prefix)

    # --- bringing the store inside its limits -------------------------------------------------------

    def look(self) -> float | None:
        """Check the disk, and evict if another program is about to take it below `min_free`.

        Returns the seconds until the next check; None: at the next tick. One process of the node checks frequently, for as
        long as that is needed.
        """
        pause = self._space.look()
        if self._space.too_little() + self._space.headroom > 0:
            self.enforce()
            if self._pressing() > 0:
                return None  # nothing to evict, or another process does it
        if pause is None:
            self._locks.release(_LOOKOUT_LOCK)
        elif not self._locks.try_acquire(_LOOKOUT_LOCK):
            return None
        return pause

    def enforce(self, *, wait: bool = False) -> None:
        """Evict expired units, and others until every limit holds. With `wait`, waits for another evictor to end.

        Quick if no limit is exceeded. For the capacity, pins are never evicted; for `min_free` they are evicted last. Checks
        of every unit are done by one process of the node at a time, which also continues the audit.
        """
        rules = self._current_rules()
        chores = self._records.claim(_CHORES, _CHORES_SECONDS)
        survey = self._surveyor.current(rules) if chores or wait else Survey()
        over = [place for place in survey.used if self._excess(survey, rules, place) > 0]
        if not chores and not wait and self._pressing_soon() <= 0:
            return

        def enforce() -> bool:
            if chores:
                self._audit.go_on()
            if not over and not survey.expired and self._pressing_soon() <= 0:
                return True
            self._feed()
            self._audit.adopt()
            for record in self._records.find(survey.expired).records:
                holding = self._holdings.of(record, rules)
                if holding is not None and is_expired(record, holding.rule, time.time()):
                    self._remove([_resident(record, holding.nbytes, holding.rule, {}, 0.0)])
            for place in over:
                draw_of_place = partial(self._draw, SHRINK_SAMPLE_SIZE, rules, place)
                self._shrink(rules, partial(self._excess_now, rules, place), draw_of_place)
            for draw in (self._copies.draw, self._records.draw):
                self._shrink(rules, self._pressing_soon, partial(draw, SHRINK_SAMPLE_SIZE))
            self._go_to_extremes(rules, wait=wait)
            return True

        self._exclusively(enforce, _LONG_TURN_SECONDS if wait else 0.0)

    def reserve_without_candidate(self, nbytes: int) -> bool:
        """Reserve space for bytes that are not cached data, and evict anything but pins for it. The caller releases it."""
        if self._reserve(nbytes):
            return True

        def evict() -> bool:
            self._feed()
            self._audit.adopt()
            for draw in (self._copies.draw, self._records.draw):
                pressing = partial(self._shortage, nbytes)
                self._shrink(self._current_rules(), pressing, partial(draw, SHRINK_SAMPLE_SIZE))
            return True

        self._exclusively(evict, _SHORT_TURN_SECONDS)
        return self._reserve(nbytes)

    def _shortage(self, nbytes: int) -> int:
        return max(self._store.space.shortage(nbytes), self._space.short_of_headroom(nbytes))

    def _excess_with(self, place: Place | None, nbytes: int) -> int:
        """The bytes by which `nbytes` more would exceed the quota of `place`."""
        if place is None:
            return 0
        with self._quota_lock:
            return self._excess_now(self._current_rules(), place) + nbytes

    def _excess(self, survey: Survey, rules: Rules, place: Place) -> int:
        return survey.used.get(place, 0) - _quota_of(self._store, rules, place)

    def _excess_now(self, rules: Rules, place: Place) -> int:
        """Uses the survey that counts the removals: another survey may be due during the removals."""
        return self._excess(self._surveyor.current(rules), rules, place)

    def _pressing(self) -> int:
        """Bytes to evict now."""
        return max(self._over_capacity(), self._space.too_little())

    def _pressing_soon(self) -> int:
        """Bytes to evict now, including space for the next writes of other programs."""
        return max(self._over_capacity(), self._space.too_little() + self._space.headroom)

    def _over_capacity(self) -> int:
        return self._store.index.used_bytes() - self._store.space.capacity_bytes()

    def _shrink(self, rules: Rules, pressing: Callable[[], int], draw_some: Callable[[], Draw]) -> None:
        """Evict without a candidate until no limit is exceeded, or nothing evictable is found."""
        places = _places(rules)
        empty = 0
        while (needed := pressing()) > 0 and empty < _DRAWS:
            draw = draw_some()
            if not draw.records:
                return
            sample = self._evictable(draw, rules, places)
            freed = 0
            for _ in range(max(1, len(sample) // _TAKEN_OF_A_DRAW)):
                if not sample or freed >= needed:
                    break
                chosen = self._least_useful(sample, draw, self._over_quota(rules, places))
                freed += self._remove([sample.pop(chosen.unit.key)])
            empty = 0 if freed else empty + 1

    def _least_useful(self, sample: Mapping[bytes, _Resident], draw: Draw, over_quota: Collection[int]) -> _Resident:
        """The unit of a sample to evict first. The sample is not empty."""
        chosen = self._policy.choose(
            [found.unit for found in sample.values()],
            None,
            draw.groups,
            clock=draw.clock,
            capacity_bytes=self._store.space.capacity_bytes(),
            over_quota=over_quota,
        )
        assert chosen is not None, "without a candidate something of every sample goes"
        return sample[chosen.key]

    def _go_to_extremes(self, rules: Rules, *, wait: bool) -> None:
        """Victims that no draw has found: check every unit, and if the disk runs full evict pins too.

        If this frees nothing it is not repeated for a while.
        """
        started = time.monotonic()
        if self._pressing() <= 0 or (started < self._extremes_at and not wait):
            return
        self._audit.adopt(again=True)
        self._shrink_all(rules, self._pressing, pinned=False)
        if self._space.too_little() > 0:
            self._shrink_all(rules, self._space.too_little, pinned=True)
        over = self._over_capacity()
        if over > 0 and not self._over_reported:
            emit(Event(name="cache.over_capacity", subject=str(self._store.directory), nbytes=over))
        self._over_reported = over > 0
        if self._pressing() > 0:
            ended = time.monotonic()
            self._extremes_at = ended + max(_EXTREMES_SECONDS, _REFUSAL_FACTOR * (ended - started))

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
                freed = self._remove([_resident(record, holding.nbytes, holding.rule, {}, 0.0)])
                if freed and pinned:
                    subject, detail = str(self._store.directory), "another program fills the disk up to 'min_free'"
                    emit(Event(name="cache.pinned.evicted", subject=subject, nbytes=freed, detail=detail))

    # --- candidates ---------------------------------------------------------------------------------

    def _draw(self, count: int, rules: Rules, place: Place | None) -> Draw:
        if place is None:
            return self._records.draw(count)
        return self._records.find(self._surveyor.some_of(self._surveyor.current(rules), place, count))

    def _evictable(
        self, draw: Draw, rules: Rules, places: Mapping[Place, int], *, but: Collection[bytes] = ()
    ) -> dict[bytes, _Resident]:
        """The cached units of a draw that are not pinned, by their keys, without those in `but`."""
        residents = {found.unit.key: found for found in self._residents(draw, rules, places)}
        return {key: found for key, found in residents.items() if key not in but and not found.rule.pinned}

    def _residents(self, draw: Draw, rules: Rules, places: Mapping[Place, int]) -> Iterator[_Resident]:
        """The cached units of a draw, with their rules. The records of other units are corrected."""
        now = time.time()
        gone = []
        for record in draw.records:
            holding = self._holdings.of(record, rules)
            if holding is None:
                gone.append(record.unit.key)
            else:
                copy = self._copies.is_copy(record)
                rule = holding.rule._replace(pinned=True) if self.is_wanted(record.unit.key) else holding.rule
                yield _resident(record, holding.nbytes, rule, places, now, copy=copy)
        if gone:
            self._records.gone(gone)

    def _over_quota(self, rules: Rules, places: Mapping[Place, int]) -> set[int]:
        if not places:
            return set()
        used = self._surveyor.current(rules).used
        return {places[place] for place in places if used.get(place, 0) > _quota_of(self._store, rules, place)}

    def _remove(self, victims: Iterable[_Resident]) -> int:
        """Remove units. Returns their bytes. A unit that cannot be removed is reported and skipped."""
        freed = 0
        gone = []
        for victim in victims:
            key = victim.unit.key
            before = self._store.space.free_bytes()
            try:
                went = self._remove_segment(victim.segment) if victim.segment else self._remove_object(key)
            except (FailingDiskError, DamagedIndexError):
                raise  # every other unit would fail, too
            except StorageError as error:
                self._report(error)
                continue
            if not went:
                continue
            freed += victim.nbytes
            gone.append(key)
            self._space.removed(victim.nbytes, self._store.space.free_bytes() - before)
            self._uncount(victim.rule.quota_place, victim.nbytes)
        if gone:
            self._records.gone(gone)
        return freed

    # --- one at a time ------------------------------------------------------------------------------

    def _exclusively(self, work: Callable[[], bool], seconds: float) -> bool:
        """The result of `work`, which runs while no other evictor of this node does; False if one does for `seconds`.

        False as well if the other one is in a stopped process, at the latest after `SILENCE_SECONDS`.

        A function and not a context manager, which an interrupt (Ctrl-C) could leave with its locks held.
        """
        deadline = time.monotonic() + seconds
        try:
            if not self._turn.acquire(timeout=seconds):
                return False
            if not self._locks.acquire(_LOCK, limit=deadline - time.monotonic(), pauses=_TURN_PAUSES):
                return False
            return work()
        finally:
            try:
                self._release_locks()
            except BaseException:
                self._release_locks()
                raise

    def _release_locks(self) -> None:
        """Release both locks unless another thread has them. An interrupt leaves open which of them this thread has."""
        if self._turn.acquire(blocking=False):
            try:
                self._locks.let_go(_LOCK)
            finally:
                with suppress(RuntimeError):  # it is free
                    while True:
                        self._turn.release()


def _resident(
    record: UnitRecord, nbytes: int, rule: AppliedRule, places: Mapping[Place, int], now: float, *, copy: bool = False
) -> _Resident:
    prefix = 0 if rule.quota_place is None else places.get(rule.quota_place, 0)
    unit = record.unit._replace(prefix=prefix, expired=is_expired(record, rule, now), copy=copy)
    return _Resident(unit, record.segment, nbytes, rule)


def _places(rules: Rules) -> Mapping[Place, int]:
    """A number for each prefix with a quota."""
    return {
        place: number
        for number, place in enumerate(sorted(place for place, rule in rules.by_place.items() if rule.quota), 1)
    }


def _quota_of(store: Store, rules: Rules, place: Place) -> int:
    quota = rules.at(place).quota
    return store.space.disk_bytes() if quota is None else store.space.size_of(quota)
