"""What a node has of what another is to hold: the pages that members ask each other for when somebody comes or goes.

Pages go through the objects in the order of their ids, which is the same on every node. So whoever asks several members sees
all that is offered of one object at once, and a page that was lost is asked for again by where it began.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.cache.blocks import BLOCK_BYTES, block_count, blocks_of
from millrace.cache.disk import Disk
from millrace.cache.node import CacheNode
from millrace.cache.records import Entry
from millrace.errors import ObjectNotFoundError, PeerError, UsageError
from millrace.members import MemberState, View, ViewSource
from millrace.peers.copies import stripes_of
from millrace.peers.placement import Placement, stripe_span
from millrace.peers.server import Call, PlaneServer
from millrace.peers.wire import ObjectDescription

PAGE_OBJECTS = 2000
"""So many objects a page names at most."""

_LOOKED_AT = 20_000  # objects, of which one that asks for little may want none: then the page ends and says where
_MOST_RUNS = 20_000
_REMEMBERED = 1 << 20
_INDEX_PAGE = 1000
_ID_BYTES = 16


# --- pure: who is to hold what, and who gives it --------------------------------------------------------


def as_seen(view: View, member_id: str, without: Collection[str] = ()) -> View:
    """The view after a change that is under way: `member_id` owns its share already, and those of `without` leave."""

    def after(state: MemberState, name: str) -> MemberState:
        if name in without:
            return MemberState.LEAVING
        return MemberState.HERE if name == member_id and state is MemberState.JOINING else state

    return View.of(replace(member, state=after(member.state, member.id)) for member in view.members)


def givers(placement: Placement, object_id: bytes, stripe: int, offering: Collection[str]) -> tuple[str, ...]:
    """Those of the members that offer a stripe, the one to ask first in front.

    That is the first holder from before the change; what others have are copies, for when it fails.
    """
    ranked = [*placement.former(object_id, stripe), *placement.order(object_id, stripe)]
    names = dict.fromkeys([*(member.id for member in ranked), *sorted(offering)])
    return tuple(name for name in names if name in offering)


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks of an object that somebody has, as ascending runs that do not touch."""

    what: ObjectDescription
    blocks: tuple[range, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        what = self.what
        return {
            "origin": what.origin,
            "key": what.key,
            "version": what.version,
            "size": what.size,
            "blocks": [[run.start, run.stop] for run in self.blocks],
        }

    @classmethod
    def from_json(cls, value: Any) -> Offer:
        """The reverse of `to_json`; unknown names are ignored. Raises `PeerError`."""
        try:
            origin, key, version, size = (value[name] for name in ("origin", "key", "version", "size"))
            runs = tuple(range(start, stop) for start, stop in value["blocks"])
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"no inventory of a node: {error!r}") from error
        texts = isinstance(origin, str) and isinstance(key, str) and isinstance(version, str)
        if not texts or type(size) is not int or size < 0:
            raise PeerError("no inventory of a node: an object without a name or size")
        count = block_count(size, BLOCK_BYTES)
        if any(not 0 <= run.start < run.stop <= count for run in runs):
            raise PeerError("no inventory of a node: blocks that an object of this size does not have")
        return cls(ObjectDescription(origin, key, version, size), runs)


@dataclass(frozen=True, slots=True)
class InventoryPage:
    """Some offers in the order of their objects' ids, and after which id the next page begins; None: there is none."""

    offers: tuple[Offer, ...]
    after: bytes | None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "objects": [offer.to_json() for offer in self.offers],
            "after": None if self.after is None else self.after.hex(),
        }

    @classmethod
    def from_json(cls, value: Any) -> InventoryPage:
        """The reverse of `to_json`. Raises `PeerError`."""
        if not isinstance(value, Mapping) or not isinstance(value.get("objects"), list):
            raise PeerError("no inventory of a node")
        after = value.get("after")
        return cls(tuple(map(Offer.from_json, value["objects"])), None if after is None else _id_of(after, PeerError))


# --- the pages of this node -----------------------------------------------------------------------------


def inventory_page(
    node: CacheNode, placement: Placement, member_id: str, after: bytes = b"", limit: int = PAGE_OBJECTS
) -> InventoryPage:
    """What `node` has of the stripes that `placement` gives to a member, from the object behind `after` on.

    At most `limit` objects; fewer, or none, when many had to be passed over: go on after `after` until it is None. Raises
    `StorageError`.
    """
    offers: list[Offer] = []
    looked_at = runs = 0
    for disk, entry in _entries(node, after):
        if len(offers) >= limit or looked_at >= _LOOKED_AT or runs >= _MOST_RUNS:
            return InventoryPage(tuple(offers), after)
        looked_at += 1
        after = entry.object_id
        if not entry.present or not (entry.place or entry.block_bytes == BLOCK_BYTES):
            continue
        stripes = stripes_of(placement, member_id, entry.object_id, entry.size)
        blocks = _here(disk, entry, stripes) if stripes else ()
        if blocks:
            runs += len(blocks)
            offers.append(Offer(ObjectDescription(*entry.name, entry.size), blocks))
    return InventoryPage(tuple(offers), None)


def _entries(node: CacheNode, after: bytes) -> Iterator[tuple[Disk, Entry]]:
    """The objects of all disks in the order of their ids."""

    def of(disk: Disk) -> Iterator[tuple[bytes, Disk, Entry]]:
        start = after
        while page := disk.store.index.page(start, _INDEX_PAGE):
            start = page[-1].object_id
            yield from ((entry.object_id, disk, entry) for entry in page)

    disks = node.open_disks
    merged = of(disks[0]) if len(disks) == 1 else heapq.merge(*map(of, disks), key=lambda found: found[0])
    for _, disk, entry in merged:
        yield disk, entry


def _here(disk: Disk, entry: Entry, stripes: Sequence[int]) -> tuple[range, ...]:
    """The runs of blocks in these stripes that are here."""
    runs: list[range] = []
    for stripe in stripes:
        blocks = blocks_of(*stripe_span(stripe, entry.size), BLOCK_BYTES)
        if entry.complete:
            present = [blocks] if blocks else []
        else:
            sums = disk.store.index.checksums(entry, blocks)
            present = [range(block, block + 1) for block, value in zip(blocks, sums, strict=True) if value is not None]
        for run in present:
            if runs and runs[-1].stop == run.start:
                runs[-1] = range(runs[-1].start, run.stop)
            else:
                runs.append(run)
    return tuple(runs)


class RememberingPlacement(Placement):
    """A placement that remembers whom it gave each stripe to: when a node leaves, all others ask it for all of its objects.

    Up to a million stripes, at some 150 bytes each.
    """

    def __init__(self, view: View, *, replicas: int = 1) -> None:
        super().__init__(view, replicas=replicas)
        self._names: dict[tuple[bytes, int], tuple[str, ...]] = {}
        self._same: dict[tuple[str, ...], tuple[str, ...]] = {}

    def is_holder(self, member_id: str, object_id: bytes, stripe: int = 0) -> bool:
        names = self._names.get((object_id, stripe))
        if names is None:
            names = tuple(member.id for member in self.holders(object_id, stripe))
            if len(self._names) < _REMEMBERED:
                # Members come in few combinations: one tuple stands for all that are equal.
                self._names[object_id, stripe] = self._same.setdefault(names, names)
        return member_id in names


class Inventory:
    """Answers other members' requests for pages. Thread-safe."""

    def __init__(self, node: CacheNode, views: ViewSource, *, replicas: int) -> None:
        self._node = node
        self._views = views
        self._replicas = replicas
        self._placement = RememberingPlacement(View(()))

    def add_routes(self, server: PlaneServer) -> None:
        """Have `server` answer `GET /v1/inventory/<member id>`."""
        server.route("GET", "/v1/inventory", self.page)

    def page(self, call: Call) -> Any:
        """The page behind `after` (hexadecimal); `without` names a member that is to be counted as leaving."""
        view = self._views.view()
        if view.member(call.path_rest) is None:
            raise ObjectNotFoundError(
                f"this node knows no member {call.path_rest} yet", next_step="ask again when it has the newest view"
            )
        after = call.query.get("after", "")
        without = [call.query["without"]] if "without" in call.query else []
        seen = as_seen(view, call.path_rest, without)
        placement = self._placement
        if placement.view.version != seen.version:
            placement = self._placement = RememberingPlacement(seen, replicas=self._replicas)
        start = _id_of(after, UsageError) if after else b""
        return inventory_page(self._node, placement, call.path_rest, start).to_json()


def _id_of(text: Any, error_class: type[PeerError | UsageError]) -> bytes:
    try:
        value = bytes.fromhex(text)
    except (TypeError, ValueError) as error:
        raise error_class("this is no id of an object", next_step="use the same version on all nodes") from error
    if len(value) != _ID_BYTES:
        raise error_class("this is no id of an object", next_step="use the same version on all nodes")
    return value
