"""The inventory of a node: pages of cached objects that another member is to hold, requested when members join or leave.

Pages list the objects in the order of their ids, which is the same on every node. So a member that requests several
inventories sees all offers of one object together, and can request a lost page again by its start.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.cache.disk import Disk
from millrace.cache.node import CacheNode
from millrace.cluster.dataplane.server import Call, PlaneServer
from millrace.cluster.dataplane.wire import ObjectDescription
from millrace.cluster.membership import MemberState, View
from millrace.cluster.placement import Placement, stripe_span
from millrace.errors import DamagedError, PeerError, UsageError, WireError
from millrace.store.records import BLOCK_BYTES, Entry, block_count, blocks_of

PAGE_OBJECTS = 2000
"""The most objects of a page."""

_MOST_SCANNED = 20_000  # objects per page; a page may end without any offer
_MOST_RUNS = 20_000
_MOST_CACHED = 1 << 20
_ID_BYTES = 16
_SAME_VERSION = "use the same version on all nodes"


# --- pure: holders and givers ---------------------------------------------------------------------------


def as_seen(view: View, member_id: str, without: Collection[str] = ()) -> View:
    """The view after a change in progress: `member_id` already owns its share, and the members of `without` leave."""

    def after(state: MemberState, name: str) -> MemberState:
        if name in without:
            return MemberState.LEAVING
        return MemberState.HERE if name == member_id and state is MemberState.JOINING else state

    return View.of(replace(member, state=after(member.state, member.id)) for member in view.members)


def givers(placement: Placement, object_id: bytes, stripe: int, offering: Collection[str]) -> tuple[str, ...]:
    """The members that offer a stripe, in the order of requests: the first former holder, then the others."""
    ranked = [*placement.former(object_id, stripe), *placement.order(object_id, stripe)]
    names = dict.fromkeys([*(member.id for member in ranked), *sorted(offering)])
    return tuple(name for name in names if name in offering)


@dataclass(frozen=True, slots=True)
class Offer:
    """Cached blocks of an object on one member, as ascending runs that do not touch."""

    what: ObjectDescription
    blocks: tuple[range, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**self.what.to_json(), "blocks": [[run.start, run.stop] for run in self.blocks]}

    @classmethod
    def from_json(cls, value: Any) -> Offer:
        """The reverse of `to_json`; ignores unknown names. Raises `PeerError`."""
        try:
            what = ObjectDescription.from_json(value)
            runs = tuple(range(start, stop) for start, stop in value["blocks"])
        except (KeyError, TypeError, ValueError, WireError) as error:
            raise PeerError(f"malformed inventory: {error!r}") from error
        count = block_count(what.size, BLOCK_BYTES)
        if any(not 0 <= run.start < run.stop <= count for run in runs):
            raise PeerError("malformed inventory: blocks that an object of this size does not have")
        return cls(what, runs)


@dataclass(frozen=True, slots=True)
class InventoryPage:
    """Offers in the order of their objects' ids. The next page begins after the id `after`; None on the last page."""

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
            raise PeerError("malformed inventory")
        after = value.get("after")
        return cls(tuple(map(Offer.from_json, value["objects"])), None if after is None else _id_of(after, PeerError))


# --- the pages of this node -----------------------------------------------------------------------------


def inventory_page(
    node: CacheNode, placement: Placement, member_id: str, after: bytes = b"", limit: int = PAGE_OBJECTS
) -> InventoryPage:
    """The cached blocks of `node` in the stripes that a member holds by `placement`, for objects after the id `after`.

    At most `limit` objects; fewer, or none, if many are skipped. The next page begins after the returned `after`. Raises
    `StorageError`.
    """
    offers: list[Offer] = []
    scanned = runs = 0
    for disk, entry in _entries(node, after):
        if len(offers) >= limit or scanned >= _MOST_SCANNED or runs >= _MOST_RUNS:
            return InventoryPage(tuple(offers), after)
        scanned += 1
        after = entry.object_id
        if not entry.cached_bytes or not (entry.place or entry.block_bytes == BLOCK_BYTES):
            continue
        stripes = placement.stripes_of(member_id, entry.object_id, entry.size)
        blocks = _cached_runs(disk, entry, stripes) if stripes else ()
        if blocks:
            runs += len(blocks)
            offers.append(Offer(ObjectDescription(*entry.name, entry.size), blocks))
    return InventoryPage(tuple(offers), None)


def _entries(node: CacheNode, after: bytes) -> Iterator[tuple[Disk, Entry]]:
    """The objects of all disks in the order of their ids."""

    def of(disk: Disk) -> Iterator[tuple[bytes, Disk, Entry]]:
        return ((entry.object_id, disk, entry) for entry in disk.store.index.entries(after))

    disks = node.open_disks
    merged = of(disks[0]) if len(disks) == 1 else heapq.merge(*map(of, disks), key=lambda found: found[0])
    for _, disk, entry in merged:
        yield disk, entry


def _cached_runs(disk: Disk, entry: Entry, stripes: Sequence[int]) -> tuple[range, ...]:
    """The runs of cached blocks in these stripes."""
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


class CachedPlacement(Placement):
    """A placement that caches the holders of up to a million stripes, at some 150 bytes each.

    When a node leaves, all other members request all of its objects.
    """

    def __init__(self, view: View, *, replicas: int = 1) -> None:
        super().__init__(view, replicas=replicas)
        self._names: dict[tuple[bytes, int], tuple[str, ...]] = {}
        self._same: dict[tuple[str, ...], tuple[str, ...]] = {}

    def is_holder(self, member_id: str, object_id: bytes, stripe: int = 0) -> bool:
        names = self._names.get((object_id, stripe))
        if names is None:
            names = tuple(member.id for member in self.holders(object_id, stripe))
            if len(self._names) < _MOST_CACHED:
                # There are few combinations of members: equal tuples are shared.
                self._names[object_id, stripe] = self._same.setdefault(names, names)
        return member_id in names


class Inventory:
    """Serves pages to other members. Thread-safe.

    The request has the view by which the future holder determined its share: this node's own may be older, and would omit
    the share of a member that leaves according to the newer view only.
    """

    def __init__(self, node: CacheNode, *, replicas: int) -> None:
        self._node = node
        self._replicas = replicas
        self._placement = CachedPlacement(View(()))

    def add_routes(self, server: PlaneServer) -> None:
        """Register `POST /v1/inventory/<member id>` at `server`."""
        server.route("POST", "/v1/inventory", self.page)

    def page(self, call: Call) -> Any:
        """The page after `after` (hexadecimal) of the blocks that the member holds by `view`. Raises `UsageError`."""
        body = call.body if isinstance(call.body, Mapping) else {}
        try:
            view = View.from_json(body.get("view", {}))
        except DamagedError as error:
            raise UsageError("inventory: the request lacks a view", next_step=_SAME_VERSION) from error
        placement = self._placement
        if placement.view.version != view.version:
            placement = self._placement = CachedPlacement(view, replicas=self._replicas)
        after = body.get("after")
        start = b"" if after is None else _id_of(after, UsageError)
        return inventory_page(self._node, placement, call.path_rest, start).to_json()


def _id_of(text: Any, error_class: type[PeerError | UsageError]) -> bytes:
    try:
        value = bytes.fromhex(text)
    except (TypeError, ValueError) as error:
        raise error_class("not the id of an object", next_step=_SAME_VERSION) from error
    if len(value) != _ID_BYTES:
        raise error_class("not the id of an object", next_step=_SAME_VERSION)
    return value
