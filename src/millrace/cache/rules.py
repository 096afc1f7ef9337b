"""What somebody decided about a store: its size, and pins, quotas and times to live of URL prefixes. Pure.

A rule is for a *prefix*: an object of exactly that name, and everything below it as a directory. `b/train` is a prefix of
`b/train` and `b/train/x`, not of `b/training`. Where several prefixes match an object, each kind of rule (pin, quota, time
to live) is taken from the longest prefix that has one; so an object counts to one quota only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.config import Amount
from millrace.errors import StorageError, UnsupportedFormatError

FORMAT_VERSION = 1

Place = tuple[str, str]
"""The identity of an origin, and a prefix of its keys without a slash at the end (`""` is everything)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What holds for one prefix.

    `pinned`: never evicted. `quota`: at most so much on this disk. `ttl_seconds`: gone when nobody used it for so long.
    """

    pinned: bool = False
    quota: Amount | None = None
    ttl_seconds: float | None = None

    @property
    def empty(self) -> bool:
        """Says nothing."""
        return self == Rule()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRule:
    """What holds for one object. `quota_place` is the prefix whose quota the object counts to, if there is one."""

    pinned: bool = False
    quota: Amount | None = None
    quota_place: Place | None = None
    ttl_seconds: float | None = None


NO_RULE = AppliedRule()


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Everything that was decided about one store. Immutable: the `with_...` methods return another one.

    `capacity` is what `resize` set; None leaves it to the `capacity` option.
    """

    capacity: Amount | None = None
    by_place: Mapping[Place, Rule] = field(default_factory=dict)

    def rule_for(self, origin_identity: str, key: str) -> AppliedRule:
        """What holds for the object `key`; costs a look-up for each slash in it."""
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

    def at(self, place: Place) -> Rule:
        """The rule of exactly this prefix; an empty one where there is none."""
        return self.by_place.get(place, Rule())

    def below(self, place: Place) -> Iterator[Place]:
        """Every place with a rule that lies at or below `place`."""
        return (other for other in self.by_place if other[0] == place[0] and covers(place[1], other[1]))

    def with_rule(self, place: Place, rule: Rule) -> Rules:
        """With `rule` in place of the one that was there; an empty rule is left out."""
        others = {other: kept for other, kept in self.by_place.items() if other != place}
        return replace(self, by_place=others if rule.empty else {**others, place: rule})

    def with_pin(self, place: Place) -> Rules:
        """With `place` pinned."""
        return self.with_rule(place, replace(self.at(place), pinned=True))

    def without_pins(self, place: Place) -> Rules:
        """Without any pin at or below `place`. A pin above it goes on holding."""
        rules = self
        for other in list(self.below(place)):
            rules = rules.with_rule(other, replace(rules.at(other), pinned=False))
        return rules

    def with_capacity(self, capacity: Amount | None) -> Rules:
        """Resized."""
        return replace(self, capacity=capacity)


NO_RULES = Rules()


def prefixes_of(key: str) -> Iterator[str]:
    """Every prefix that a rule for `key` may have, the longest first: `a/b/c`, `a/b`, `a`, and the empty one."""
    while key:
        yield key
        key = key.rpartition("/")[0]
    yield ""


def covers(prefix: str, key: str) -> bool:
    """Whether `key` is the object `prefix` or lies below it. The empty prefix covers everything."""
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

    Raises `UnsupportedFormatError` for a later version, `StorageError` for what is no such file.
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
    raise ValueError(f"{value!r} is no amount")


def _decode_seconds(value: Any) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf):
        return value
    raise ValueError(f"{value!r} is no time")
