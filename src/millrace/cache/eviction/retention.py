"""The retention rules of a store: its size, and pins, quotas and TTLs of URL prefixes; and the file that contains them.

A rule is for a *prefix*: an object of exactly that name, and everything below it as a directory. `b/train` is a prefix of
`b/train` and `b/train/x`, not of `b/training`. Where several prefixes match an object, each kind of rule (pin, quota, time
to live) is taken from the longest prefix that has one; so an object counts to one quota only.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config import Amount
from millrace.errors import MillraceError, StorageError, UnsupportedFormatError
from millrace.events import Event, emit
from millrace.runtime.directories import locked_directory
from millrace.runtime.failures import disk_errors
from millrace.runtime.private_files import read_file, replace_file
from millrace.store.records import ObjectName
from millrace.store.setup import RULES_NAME, RULES_TEXT

FORMAT_VERSION = 1

_LOOK_EVERY_SECONDS = 0.5

_log = logging.getLogger("millrace.cache")

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


# --- the file -----------------------------------------------------------------------------------------


class RulesFile:
    """The file `rules.json` of the store in `directory`. Thread- and process-safe. Nothing is open between two calls.

    The file is next to the index, not in it, since the index is rebuilt from data files after a crash. A change is written
    to a new file and renamed, under a lock of the directory, so a reader gets either the old rules or the new ones. An
    unreadable file is reported once, and the last readable rules stay in force. A file that is empty or all zeros is
    replaced by the next change; any other unreadable file is left for repair.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._path = directory / RULES_NAME
        self._clock = clock
        self._lock = threading.Lock()
        self._rules = NO_RULES
        self._seen: tuple[int, ...] | None = None
        self._look_at = -1.0

    def current(self) -> Rules:
        """The rules, at most half a second old; reads the disk at most that often."""
        if self._clock() < self._look_at:
            return self._rules
        with self._lock:
            self._look_at = self._clock() + _LOOK_EVERY_SECONDS
            self._look()
        return self._rules

    def exists(self) -> bool:
        """Whether rules were ever set."""
        return os.path.lexists(self._path)

    def change(self, edit: Callable[[Rules], Rules]) -> Rules:
        """Replace the rules by `edit` of the newest ones; returns them. Writes nothing if nothing changes.

        Raises `UnsupportedFormatError` or `StorageError` when the file cannot be read, and `StorageError` when it cannot be
        written; the old rules then hold.
        """
        # Excludes the other threads as well. `current` must not wait for it: reads use the rules.
        with disk_errors(self._path), locked_directory(self._directory, fcntl.LOCK_EX) as directory:
            blank = self._is_blank()
            old = self._rules if blank else self._read()
            new = edit(old)
            if new != old or blank:
                replace_file(self._path, encode(new))
                os.fsync(directory)
            with self._lock:
                self._rules, self._seen, self._look_at = new, None, -1.0
        return new

    def _look(self) -> None:
        try:
            about = os.stat(self._path)
            seen: tuple[int, ...] = (about.st_ino, about.st_mtime_ns, about.st_size)
        except FileNotFoundError:
            seen = ()
        except OSError as error:
            seen = (error.errno or 0,)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            with disk_errors(self._path):
                self._rules = self._read()
        except MillraceError as error:
            emit(Event(name="cache.rules.unreadable", subject=str(self._path), detail=str(error)))
            _log.warning(
                "%s: not in force until it is mended, unless this process has read them before: %s", error, RULES_TEXT
            )

    def _is_blank(self) -> bool:
        """Whether the file exists, but is empty or all zeros, so that there is nothing to repair."""
        try:
            return not read_file(self._path).strip(b"\0")
        except FileNotFoundError:
            return False

    def _read(self) -> Rules:
        try:
            data = read_file(self._path)
        except FileNotFoundError:
            return NO_RULES
        return decode(data, source=str(self._path))
