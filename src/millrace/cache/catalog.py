"""What is in a node's cache, by name, and what its keeper does with it: list, free, check, and make rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from millrace.cache.disk import Disk
from millrace.cache.node import CacheNode
from millrace.cache.records import Entry, ObjectName
from millrace.cache.rules import Place, Rule, Rules, covers, prefixes_of
from millrace.cache.unit_rules import held_bytes
from millrace.config import Amount
from millrace.errors import StorageError

_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedObject:
    """One object version of which something is here.

    `origin` is the identity of where it came from, `key` its name there. `cached_bytes` of its `size` are here.
    `last_used` is in Unix seconds, about a second late; of a small object it is that of its segment, of which others may
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
        """All of it is here."""
        return self.cached_bytes == self.size

    @property
    def url(self) -> str:
        """What a user calls it. Two services with the same scheme have the same URLs."""
        return url_of(self.origin, self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What `free` did. `pinned_objects` were asked for too, and kept."""

    objects: int = 0
    nbytes: int = 0
    pinned_objects: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRule:
    """A rule with its place, and what it holds for: over all disks of the node.

    `quota_bytes` is the quota in bytes; None where there is none. `used_bytes` are those that count to the rule's quota, or
    lie below its prefix where it has none.
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
        """What a user calls the prefix."""
        return url_of(self.origin, self.prefix)


def url_of(origin: str, key: str) -> str:
    """The URL of a key at the origin of this identity."""
    kind = origin.partition("+")[0]
    scheme = kind.removeprefix("fsspec-")
    # With an empty host, for the libraries that read one from a URL.
    return f"{scheme}:///{key}" if scheme != kind else f"{scheme}://{key}"


def origins(node: CacheNode) -> set[str]:
    """The identities of all origins of which something is cached, or for which there is a rule."""
    found = {place[0] for disk in node.open_disks for place in disk.store.rules.current().by_place}
    return found | {entry.name.origin for disk in node.open_disks for entry in _entries(disk, None)}


# --- what is here -------------------------------------------------------------------------------------


def cached_objects(node: CacheNode, place: Place | None = None) -> Iterator[CachedObject]:
    """Every object of which something is here, at or below `place`. No view of one moment: others go on meanwhile."""
    for disk in node.open_disks:
        rules = disk.store.rules.current()
        for entry in _entries(disk, place):
            name = entry.name
            yield CachedObject(
                origin=name.origin,
                key=name.key,
                version=name.version,
                size=entry.size,
                cached_bytes=held_bytes(disk.store.index, entry),
                pinned=rules.rule_for(name.origin, name.key).pinned,
                last_used=disk.last_used(entry),
            )


def _entries(disk: Disk, place: Place | None) -> Iterator[Entry]:
    """The records of objects with anything here, in pages, so that no transaction stays open while the caller thinks."""
    after = b""
    while page := disk.store.index.page(after, _PAGE):
        after = page[-1].object_id
        for entry in page:
            if entry.present and (place is None or _is_at(entry, place)):
                yield entry


def _is_at(entry: Entry, place: Place) -> bool:
    name = entry.name
    return name.origin == place[0] and covers(place[1], name.key)


# --- free ---------------------------------------------------------------------------------------------


def free(node: CacheNode, place: Place | None, *, on_freed: Callable[[Freed], None] = lambda _: None) -> Freed:
    """Drop everything at or below `place` (None: everything) from the cache, but for what is pinned.

    Whoever has it open reads on. `on_freed` hears of the sums now and then.
    """
    freed = Freed()
    for disk in node.open_disks:
        rules = disk.store.rules.current()
        for entry in _entries(disk, place):
            name = entry.name
            if rules.rule_for(name.origin, name.key).pinned:
                freed = replace(freed, pinned_objects=freed.pinned_objects + 1)
                continue
            nbytes = held_bytes(disk.store.index, entry)
            disk.remove(entry.object_id)
            freed = replace(freed, objects=freed.objects + 1, nbytes=freed.nbytes + nbytes)
            if freed.objects % _PAGE == 0:
                on_freed(freed)
        disk.drop_empty_segments()
    return freed


# --- rules --------------------------------------------------------------------------------------------


def rules(node: CacheNode) -> Rules:
    """The rules of the node, as its first disk has them; those of a disk that was added later are not looked at."""
    return _some_disk(node).store.rules.current()


def pin(node: CacheNode, place: Place) -> None:
    """Keep what lies at or below `place` from being evicted or freed, now and when it comes."""
    _change(node, lambda rules: rules.with_pin(place))


def unpin(node: CacheNode, place: Place) -> bool:
    """Take back every pin at or below `place`; gives whether there was any."""
    there = any(rule.pinned for disk in node.open_disks for rule in _rules_below(disk, place))
    _change(node, lambda rules: rules.without_pins(place))
    return there


def limit(node: CacheNode, place: Place, *, quota: Amount | None, ttl_seconds: float | None) -> None:
    """Set the quota and the time to live of what lies at or below `place`; None for none.

    A quota in bytes is for the node: each of its disks gets the share that it gets of the objects.
    """
    _some_disk(node)
    disks = node.open_disks
    weights = [max(1, node.options.capacity.of(disk.store.disk_bytes())) for disk in disks]
    ends = [0, *accumulate(weights)]
    for disk, before, after in zip(disks, ends[:-1], ends[1:], strict=True):
        share = quota
        if quota is not None and quota.nbytes is not None:
            share = Amount(nbytes=quota.nbytes * after // ends[-1] - quota.nbytes * before // ends[-1])
        disk.store.rules.change(partial(_with_limits, place=place, quota=share, ttl_seconds=ttl_seconds))


def _with_limits(rules: Rules, *, place: Place, quota: Amount | None, ttl_seconds: float | None) -> Rules:
    return rules.with_rule(place, replace(rules.at(place), quota=quota, ttl_seconds=ttl_seconds))


def resize(node: CacheNode, capacity: Amount | None) -> None:
    """Set the capacity of each disk, for every process and for good; None gives it back to the `capacity` option.

    What is over a lower capacity is evicted, except for what is pinned.
    """
    _change(node, lambda rules: rules.with_capacity(capacity))
    for disk in node.open_disks:
        disk.enforce_limits()


def placed_rules(node: CacheNode) -> list[PlacedRule]:
    """Every rule with what it holds for, summed over the disks. Looks at every object when there is a rule at all."""
    places: dict[Place, Rule] = {}
    quotas: dict[Place, int] = {}
    for disk in node.open_disks:
        size = disk.store.disk_bytes()
        for place, rule in disk.store.rules.current().by_place.items():
            places[place] = rule
            if rule.quota is not None:
                quotas[place] = quotas.get(place, 0) + rule.quota.of(size)
    used = dict.fromkeys(places, (0, 0))
    if places:
        for disk in node.open_disks:
            held = disk.store.rules.current()
            for entry in _entries(disk, None):
                quota_place = held.rule_for(entry.name.origin, entry.name.key).quota_place
                _count(used, places, entry.name, held_bytes(disk.store.index, entry), quota_place)
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


def _count(
    used: dict[Place, tuple[int, int]],
    places: dict[Place, Rule],
    name: ObjectName,
    held: int,
    quota_place: Place | None,
) -> None:
    """Count an object to every rule that holds for it; of several quotas only to the one that it counts to."""
    for prefix in prefixes_of(name.key):
        place = (name.origin, prefix)
        if (rule := places.get(place)) and (rule.quota is None or place == quota_place):
            nbytes, objects = used[place]
            used[place] = (nbytes + held, objects + 1)


def _rules_below(disk: Disk, place: Place) -> list[Rule]:
    held = disk.store.rules.current()
    return [held.at(other) for other in held.below(place)]


def _change(node: CacheNode, edit: Callable[[Rules], Rules]) -> None:
    _some_disk(node)
    for disk in node.open_disks:
        disk.store.rules.change(edit)


def _some_disk(node: CacheNode) -> Disk:
    if not node.open_disks:
        raise StorageError("no cache directory can be used", next_step="'millrace doctor' says why")
    return node.open_disks[0]
