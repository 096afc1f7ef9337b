"""The content of a node's cache by name: list it, free it, and change its retention rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from millrace.cache.disk import Disk
from millrace.cache.eviction.retention import Place, Rule, Rules, covers, prefixes_of
from millrace.cache.eviction.usage import url_of
from millrace.cache.node import CacheNode
from millrace.config import Amount
from millrace.errors import UsageError
from millrace.store.records import Entry, ObjectName
from millrace.store.space import bytes_of

_REPORTED_OBJECTS = 1000


class CachedObject(NamedTuple):
    """One object version with cached bytes.

    `origin` is the identity of its origin, `key` its name at the origin. `cached_bytes` of its `size` are cached.
    `last_used` is in Unix seconds, about a second late. For a small object it is that of its segment, of which others may
    have been used. None where it is not known.
    """

    origin: str
    key: str
    version: str
    size: int
    cached_bytes: int
    pinned: bool
    last_used: float | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it is cached."""
        return self.cached_bytes == self.size

    @property
    def url(self) -> str:
        """The URL of the object. Two services with the same scheme have the same URLs."""
        return url_of(self.origin, self.key)


class Freed(NamedTuple):
    """The result of `free`. `pinned_objects` were also requested, and kept."""

    objects: int = 0
    nbytes: int = 0
    pinned_objects: int = 0


class PlacedRule(NamedTuple):
    """A rule with its prefix, and the objects that it covers on all disks of the node.

    `quota_bytes` is the quota in bytes; None without one. `used_bytes` are those that count to the rule's quota, or
    are below its prefix where it has none.
    """

    origin: str
    prefix: str
    pinned: bool
    quota_bytes: int | None
    ttl_seconds: float | None
    used_bytes: int
    objects: int

    @property
    def url(self) -> str:
        """The URL of the prefix."""
        return url_of(self.origin, self.prefix)


def origins(node: CacheNode) -> set[str]:
    """The identities of all origins with cached objects or retention rules."""
    found = {place[0] for disk in node.open_disks for place in disk.rules.current().by_place}
    return found | {entry.name.origin for disk in node.open_disks for entry in _entries(disk, None)}


# --- cached objects -----------------------------------------------------------------------------------


def cached_objects(node: CacheNode, place: Place | None = None) -> Iterator[CachedObject]:
    """Every object with cached bytes at or below `place`. Not a snapshot: the cache changes in the meantime."""
    _some_disk(node)
    for disk in node.open_disks:
        rules = disk.rules.current()
        for entry in _entries(disk, place):
            name = entry.name
            yield CachedObject(
                origin=name.origin,
                key=name.key,
                version=name.version,
                size=entry.size,
                cached_bytes=entry.cached_bytes,
                pinned=rules.rule_of(name).pinned,
                last_used=disk.last_used(entry),
            )


def _entries(disk: Disk, place: Place | None) -> Iterator[Entry]:
    """The records of objects with cached bytes."""
    for entry in disk.store.index.entries():
        if entry.cached_bytes and (place is None or _is_at(entry.name, place)):
            yield entry


def _is_at(name: ObjectName, place: Place) -> bool:
    return name.origin == place[0] and covers(place[1], name.key)


# --- free ---------------------------------------------------------------------------------------------


def free(node: CacheNode, place: Place | None, *, on_freed: Callable[[Freed], None] = lambda _: None) -> Freed:
    """Drop everything at or below `place` (None: everything) from the cache, except for pinned objects and those in folders.

    Open readers continue. `on_freed` is called with the sums now and then.
    """
    _some_disk(node)
    freed = Freed()
    for disk in node.open_disks:
        for entry in _entries(disk, place):
            # With the newest rules: another caller may pin objects meanwhile.
            if disk.rules.current().rule_of(entry.name).pinned or disk.store.is_linked(entry):
                freed = freed._replace(pinned_objects=freed.pinned_objects + 1)
                continue
            nbytes = entry.cached_bytes
            disk.remove(entry.object_id)
            freed = freed._replace(objects=freed.objects + 1, nbytes=freed.nbytes + nbytes)
            if freed.objects % _REPORTED_OBJECTS == 0:
                on_freed(freed)
        disk.drop_empty_segments()
    return freed


# --- rules --------------------------------------------------------------------------------------------


def rules(node: CacheNode) -> Rules:
    """The rules of the node, from its first disk."""
    return _some_disk(node).rules.current()


def pin(node: CacheNode, place: Place) -> None:
    """Protect cached and future objects at or below `place` from being evicted or freed."""
    _change(node, lambda rules: rules.with_pin(place))


def unpin(node: CacheNode, named: Sequence[tuple[str, Sequence[Place]]]) -> None:
    """Remove every pin at or below the places of each URL. Raises `UsageError` for a URL without any, before any change."""
    for url, places in named:
        held = [disk.rules.current() for disk in node.open_disks]
        if not any(each.at(other).pinned for each in held for place in places for other in each.below(place)):
            above = any(rules(node).rule_for(*place).pinned for place in places)
            raise UsageError(
                f"{url} has no pin of its own" + (", a prefix above it has" if above else ""),
                next_step="'millrace status' shows every pin",
            )
    for place in dict.fromkeys(place for _, places in named for place in places):
        _change(node, partial(Rules.without_pins, place=place))


def limit(node: CacheNode, place: Place, *, quota: Amount | None, ttl_seconds: float | None) -> None:
    """Set the quota and the TTL of objects at or below `place`; None removes it.

    A quota in bytes is for the node: each of its disks gets the share that it gets of the objects.
    """
    _some_disk(node)
    disks = node.open_disks
    weights = [max(1, disk.store.space.size_of(node.options.capacity)) for disk in disks]
    ends = [0, *accumulate(weights)]
    for disk, before, after in zip(disks, ends[:-1], ends[1:], strict=True):
        share = quota
        if quota is not None and quota.nbytes is not None:
            share = Amount(nbytes=quota.nbytes * after // ends[-1] - quota.nbytes * before // ends[-1])
        disk.rules.change(partial(_with_limits, place=place, quota=share, ttl_seconds=ttl_seconds))


def _with_limits(rules: Rules, *, place: Place, quota: Amount | None, ttl_seconds: float | None) -> Rules:
    return rules.with_rule(place, rules.at(place)._replace(quota=quota, ttl_seconds=ttl_seconds))


def resize(node: CacheNode, capacity: Amount | None) -> None:
    """Set the capacity of each disk, for every process and permanently; None restores the `capacity` option.

    Objects over a lower capacity are evicted, except for pinned objects.
    """
    _change(node, lambda rules: rules.with_capacity(capacity))
    for disk in node.open_disks:
        disk.evictor.enforce(wait=True)


def placed_rules(node: CacheNode) -> list[PlacedRule]:
    """Every rule with the bytes that it covers, summed over the disks. If there is any rule, this reads every object."""
    places: dict[Place, Rule] = {}
    quotas: dict[Place, int] = {}
    for disk in node.open_disks:
        size = disk.store.space.disk_bytes()
        for place, rule in disk.rules.current().by_place.items():
            places[place] = rule
            if rule.quota is not None:
                quotas[place] = quotas.get(place, 0) + bytes_of(rule.quota, size)
    used = dict.fromkeys(places, (0, 0))
    for disk in node.open_disks if places else ():
        held = disk.rules.current()
        for entry in _entries(disk, None):
            name = entry.name
            quota_place = held.rule_of(name).quota_place
            for prefix in prefixes_of(name.key):
                place = (name.origin, prefix)
                # Of several quotas an object counts to one only.
                if (found := places.get(place)) and (found.quota is None or place == quota_place):
                    nbytes, objects = used[place]
                    used[place] = (nbytes + entry.cached_bytes, objects + 1)
    return [
        PlacedRule(
            origin=place[0],
            prefix=place[1],
            pinned=rule.pinned,
            quota_bytes=quotas.get(place),
            ttl_seconds=rule.ttl_seconds,
            used_bytes=used[place][0],
            objects=used[place][1],
        )
        for place, rule in sorted(places.items())
    ]


def _change(node: CacheNode, edit: Callable[[Rules], Rules]) -> None:
    _some_disk(node)
    for disk in node.open_disks:
        disk.rules.change(edit)


def _some_disk(node: CacheNode) -> Disk:
    if not node.open_disks:
        raise node.unusable()
    return node.open_disks[0]
