"""The retention rules of a store: its size, and pins, quotas and TTLs of URL prefixes; and the content of their file.

A rule is for a *prefix*: an object of exactly that name, and everything below it as a directory. `b/train` is a prefix of
`b/train` and `b/train/x`, not of `b/training`. Where several prefixes match an object, each kind of rule (pin, quota, time
to live) is taken from the longest prefix that has one; so an object counts to one quota only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from millrace.config import Amount
from millrace.errors import StorageError, UnsupportedFormatError
from millrace.store.records import ObjectName

FORMAT_VERSION = 1

Place = tuple[str, str]
"""The identity of an origin, and a prefix of its keys without a slash at the end (`""` is everything)."""


class Rule(NamedTuple):
    """The rule of one prefix.

    `pinned`: never evicted. `quota`: maximum on this disk. `ttl_seconds`: removed when not used for this time.
    """

    pinned: bool = False
    quota: Amount | None = None
    ttl_seconds: float | None = None


class AppliedRule(NamedTuple):
    """The rule of one object. `quota_place` is the prefix whose quota the object counts to, if any."""

    pinned: bool = False
    quota: Amount | None = None
    quota_place: Place | None = None
    ttl_seconds: float | None = None


NO_RULE = AppliedRule()


@dataclass(frozen=True, kw_only=True)
class Rules:
    """All retention rules of one store. Immutable: the `with_...` methods return another one.

    `capacity` is the value set by `resize`; None leaves it to the `capacity` option.
    """

    capacity: Amount | None = None
    by_place: Mapping[Place, Rule] = field(default_factory=dict)

    def rule_for(self, origin_identity: str, key: str) -> AppliedRule:
        """The rule of the object `key`; one dictionary lookup for each slash in it."""
        if not self.by_place:
            return NO_RULE
        pinned, ttl_seconds = False, None
        quota, quota_place = None, None
        for prefix in prefixes_of(key):
            rule = self.by_place.get((origin_identity, prefix))
            if rule is None:
                continue
            pinned = pinned or rule.pinned
            ttl_seconds = rule.ttl_seconds if ttl_seconds is None else ttl_seconds
            if quota is None and rule.quota is not None:
                quota, quota_place = rule.quota, (origin_identity, prefix)
        return AppliedRule(pinned=pinned, quota=quota, quota_place=quota_place, ttl_seconds=ttl_seconds)

    def rule_of(self, name: ObjectName) -> AppliedRule:
        """The rule of an object version."""
        return self.rule_for(name.origin, name.key)

    def at(self, place: Place) -> Rule:
        """The rule of exactly this prefix; an empty rule without one."""
        return self.by_place.get(place, Rule())

    def below(self, place: Place) -> Iterator[Place]:
        """Every place with a rule at or below `place`."""
        return (other for other in self.by_place if other[0] == place[0] and covers(place[1], other[1]))

    def with_rule(self, place: Place, rule: Rule) -> Rules:
        """These rules with `rule` replaced; an empty rule is removed."""
        others = {other: kept for other, kept in self.by_place.items() if other != place}
        return replace(self, by_place=others if rule == Rule() else {**others, place: rule})

    def with_pin(self, place: Place) -> Rules:
        """These rules with `place` pinned."""
        return self.with_rule(place, self.at(place)._replace(pinned=True))

    def without_pins(self, place: Place) -> Rules:
        """These rules without any pin at or below `place`. A pin above it stays in force."""
        rules = self
        for other in list(self.below(place)):
            rules = rules.with_rule(other, rules.at(other)._replace(pinned=False))
        return rules

    def with_capacity(self, capacity: Amount | None) -> Rules:
        """These rules with another capacity."""
        return replace(self, capacity=capacity)

    def in_proportion(self, part: int, whole: int) -> Rules:
        """These rules of a disk for another one, which gets `part` of the objects for each `whole` of that disk."""

        def scaled(rule: Rule) -> Rule:
            nbytes = None if rule.quota is None else rule.quota.nbytes
            return rule if nbytes is None else rule._replace(quota=Amount(nbytes=max(1, nbytes * part // whole)))

        return replace(self, by_place={place: scaled(rule) for place, rule in self.by_place.items()})


NO_RULES = Rules()


def prefixes_of(key: str) -> Iterator[str]:
    """Every prefix that covers `key`, the longest first: `a/b/c`, `a/b`, `a`, and the empty one."""
    while key:
        yield key
        key = key.rpartition("/")[0]
    yield ""


def covers(prefix: str, key: str) -> bool:
    """Whether `key` is the object `prefix` or is below it. The empty prefix covers everything."""
    return not prefix or key == prefix or (key.startswith(prefix) and key[len(prefix)] == "/")


# --- the file's content -------------------------------------------------------------------------------


def encode(rules: Rules) -> bytes:
    """The content of `rules.json`."""
    rows = [
        {
            "origin": origin,
            "prefix": prefix,
            "pinned": rule.pinned,
            "quota": _encode_amount(rule.quota),
            "ttl_seconds": rule.ttl_seconds,
        }
        for (origin, prefix), rule in sorted(rules.by_place.items())
    ]
    content = {"version": FORMAT_VERSION, "capacity": _encode_amount(rules.capacity), "rules": rows}
    return json.dumps(content, indent=1).encode() + b"\n"


def decode(data: bytes, *, source: str) -> Rules:
    """Parse the content of `rules.json`. `source` names the file in errors.

    Raises `UnsupportedFormatError` for a later version, `StorageError` for any other content.
    """
    try:
        content = json.loads(data)
        version = content["version"]
        if version == FORMAT_VERSION:
            return Rules(
                capacity=_decode_amount(content["capacity"]),
                by_place={
                    (str(row["origin"]), str(row["prefix"])): Rule(
                        pinned=bool(row["pinned"]),
                        quota=_decode_amount(row["quota"]),
                        ttl_seconds=_decode_seconds(row["ttl_seconds"]),
                    )
                    for row in content["rules"]
                },
            )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise StorageError(
            f"{source} cannot be read ({type(error).__name__})",
            next_step="mend or remove it; pins, quotas and sizes are then set anew",
        ) from error
    raise UnsupportedFormatError(
        f"{source} has version {version!r}, this Millrace reads {FORMAT_VERSION}", next_step="use the newer Millrace"
    )


def _encode_amount(amount: Amount | None) -> int | str | None:
    if amount is None or amount.nbytes is not None:
        return None if amount is None else amount.nbytes
    return f"{(amount.share or 0.0) * 100!r}%"


def _decode_amount(value: Any) -> Amount | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Amount(nbytes=value)
    if isinstance(value, str) and value.endswith("%") and 0 <= float(value[:-1]) <= 100:
        return Amount(share=float(value[:-1]) / 100)
    raise ValueError(f"{value!r} is not an amount")


def _decode_seconds(value: Any) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf):
        return value
    raise ValueError(f"{value!r} is not a time")
