"""Retention rules of units: pins, quotas and TTLs are set for names, but units are evicted.

A segment is pinned if any object in it is. It expires with its last object. It counts to a quota if all of
its objects do: later objects of a prefix with a quota get their own segments.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.cache.eviction.retention import NO_RULE, AppliedRule, Place, Rules
from millrace.cache.eviction.usage_records import UnitRecord, UsageRecords
from millrace.store.records import SegmentRecord
from millrace.store.store import Store

_PAGE = 1000
_SHARE = 20  # a survey takes at most this fraction (1/n) of a thread's time
_LEAST_PAUSE_SECONDS = 1.0
_MAX_SEGMENTS = 4096


class Holding(NamedTuple):
    """The cached bytes of a unit, and its rule."""

    nbytes: int
    rule: AppliedRule


class Holdings:
    """Looks up units of a store, with their retention rules. Thread-safe. Objects in folders count as pinned."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index = store.index
        self._rules: Rules | None = None
        self._segments: dict[tuple[int, int], AppliedRule] = {}

    def of(self, record: UnitRecord, rules: Rules) -> Holding | None:
        """The cached bytes of a unit and its rule; None if it was removed."""
        if record.segment:
            segment = self._index.segment(record.segment)
            return None if segment is None else Holding(segment.written_bytes, self._rule_of(segment, rules))
        entry = self._index.get(record.unit.key)
        if entry is None or entry.place or not entry.cached_bytes:
            return None
        rule = rules.rule_of(entry.name)
        if self._store.is_linked(entry):
            rule = rule._replace(pinned=True)
        return Holding(entry.cached_bytes, rule)

    def _rule_of(self, segment: SegmentRecord, rules: Rules) -> AppliedRule:
        if not rules.by_place:
            return NO_RULE
        if self._rules is not rules:
            self._rules, self._segments = rules, {}
        key = segment.generation, segment.live_bytes
        rule = self._segments.get(key)
        if rule is None:
            entries = self._index.entries_in(segment.generation)
            rule = _combined(rules.rule_of(entry.name) for entry in entries)
            if len(self._segments) >= _MAX_SEGMENTS:
                self._segments = {}
            self._segments[key] = rule
        return rule


def _combined(rules: Iterable[AppliedRule]) -> AppliedRule:
    every = list(rules)
    if not every:
        return NO_RULE
    lives = [rule.ttl_seconds for rule in every]
    places = {rule.quota_place for rule in every}
    return AppliedRule(
        pinned=any(rule.pinned for rule in every),
        quota=every[0].quota if len(places) == 1 else None,
        quota_place=every[0].quota_place if len(places) == 1 else None,
        ttl_seconds=None if None in lives else max(life for life in lives if life is not None),
    )


@dataclass(slots=True)
class Survey:
    """The result of a check of every unit: bytes and units of each prefix with a quota, and the expired units."""

    used: dict[Place, int] = field(default_factory=dict)
    units: dict[Place, list[bytes]] = field(default_factory=dict)
    expired: list[bytes] = field(default_factory=list)

    def add(self, place: Place, key: bytes, nbytes: int) -> None:
        """Count bytes of a unit that are about to be stored."""
        self.used[place] = self.used.get(place, 0) + nbytes
        units = self.units.setdefault(place, [])
        if units[-1:] != [key]:  # most are stored block by block
            units.append(key)


class Surveyor:
    """Keeps a survey of a store, at most one second or twenty times its duration old; none if no rule needs one.

    Changes by this process are counted in between; changes by others are in the next survey.
    """

    def __init__(self, records: UsageRecords, holdings: Holdings, *, seed: int | None = None) -> None:
        self._records = records
        self._holdings = holdings
        self._random = random.Random(seed)
        self._survey = Survey()
        self._due = 0.0
        self._rules: Rules | None = None

    def current(self, rules: Rules) -> Survey:
        """The survey, repeated if it is due or the rules have changed."""
        if not any(rule.quota is not None or rule.ttl_seconds is not None for rule in rules.by_place.values()):
            return Survey()
        started = time.monotonic()
        if started >= self._due or rules is not self._rules:
            self._survey, self._rules = self._look(rules), rules
            ended = time.monotonic()
            self._due = ended + max(_LEAST_PAUSE_SECONDS, _SHARE * (ended - started))
        return self._survey

    def some_of(self, survey: Survey, place: Place, count: int) -> list[bytes]:
        """The keys of up to `count` units that count to the quota of `place`, at random."""
        keys = survey.units.get(place, [])
        return self._random.sample(keys, min(count, len(keys)))

    def _look(self, rules: Rules) -> Survey:
        survey = Survey()
        now = time.time()
        after = b""
        while page := self._records.page(after, _PAGE):
            after = page[-1].unit.key
            for record in page:
                holding = self._holdings.of(record, rules)
                if holding is None:
                    continue
                rule = holding.rule
                if rule.quota_place is not None:
                    survey.add(rule.quota_place, record.unit.key, holding.nbytes)
                if is_expired(record, rule, now):
                    survey.expired.append(record.unit.key)
        return survey


def is_expired(record: UnitRecord, rule: AppliedRule, now: float) -> bool:
    """Whether a unit was not used for longer than its TTL. Pinned units never expire."""
    return rule.ttl_seconds is not None and not rule.pinned and now - record.used_at > rule.ttl_seconds
