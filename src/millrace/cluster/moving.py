"""Copies a node's share from the members that have it cached: when it joins, when another leaves, when copies were lost.

The future holder requests the inventory of all members (`inventory.py`), in the order of the objects' ids. So all members
that offer a block are known before the first request for it: first the holder before the change, then the others. Cached
blocks are skipped, so an interrupted move is continued by the next one. A move never reads the origin.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from typing_extensions import Buffer

from millrace.cache.node import CacheNode
from millrace.cluster.breakers import FIRST_PAUSE_SECONDS
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.wire import GetMode, ObjectDescription
from millrace.cluster.inventory import InventoryPage, Offer, as_seen, givers
from millrace.cluster.membership import Member, MemberState, View
from millrace.cluster.placement import Placement, stripe_span
from millrace.cluster.receiving import ReceivedObject
from millrace.errors import (
    ChangedError,
    MillraceError,
    MissingError,
    PeerError,
    PeerRefusedError,
    PeerSilentError,
    StorageError,
    shown_key,
)
from millrace.events import Event, emit
from millrace.figures import size_text
from millrace.store.records import BLOCK_BYTES, RUN_BLOCKS, blocks_of, span_of

_log = logging.getLogger("millrace.cluster")

BYTES_PER_SECOND = 64e6

_PARALLEL = 4
_PASSES = 3  # each copies what was new, not offered or not returned in the one before
_PAGE_SECONDS = 3.0  # of silence
_PAGE_ATTEMPTS = 2
_PAGE_PAUSE_SECONDS = 0.25
_READ_SECONDS = 2.0
_FULL_SECONDS = 1.0
_NOT_CACHED = 404


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """The result of a move. `skipped_bytes` found no space on this node, `failed_bytes` no member that returned them.

    `unread` are the ids of members whose inventory could not be read completely.
    """

    moved_bytes: int = 0
    moved_objects: int = 0
    skipped_bytes: int = 0
    failed_bytes: int = 0
    unread: tuple[str, ...] = ()
    stopped: bool = False
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether all offered blocks are cached, and the move was not stopped."""
        return not (self.skipped_bytes or self.missed or self.stopped)

    @property
    def missed(self) -> bool:
        """Whether a member did not return the list of its blocks, or a block in it: a repetition may copy more."""
        return bool(self.failed_bytes or self.unread)


class Mover:
    """Copies blocks to the disks of one node. Thread-safe; not usable after a fork.

    `bytes_per_second` limits all concurrent moves together.
    """

    def __init__(
        self,
        node: CacheNode,
        cluster: Cluster,
        *,
        bytes_per_second: float = BYTES_PER_SECOND,
        parallel: int = _PARALLEL,
    ) -> None:
        self.node = node
        self.cluster = cluster
        self.parallel = parallel
        self.rate = Rate(bytes_per_second)
        self.stopped = threading.Event()

    def fill(self, me: str) -> MoveReport:
        """Copy the future share of `me`, which is joining, from the members that have it."""
        # It owns nothing until this ends: members that do not respond may not have started yet.
        return self._pull(me, waits=False)

    def restore(self, me: str) -> MoveReport:
        """Copy missing blocks that `me` holds by the present view: their copies were lost with a member."""
        return self._pull(me)

    def take_over(self, leaver: Member) -> MoveReport:
        """Copy the blocks that this node holds once `leaver` has left."""
        me = self.cluster.link.member_id
        return MoveReport() if me is None else self._pull(me, leaver)

    def mark_copies(self) -> int:
        """Mark the units that other members have taken over as copies, which are evicted first; returns their number."""
        marked = 0
        for disk in self.node.open_disks:
            try:
                marked += disk.mark_copies()
            except StorageError as error:
                disk.report(error)
        return marked

    def stop(self) -> None:
        """Stop all moves, also later ones."""
        self.stopped.set()

    def _pull(self, me: str, leaver: Member | None = None, *, waits: bool = True) -> MoveReport:
        """Copy in several passes. `waits`: repeats a pass in which a member did not respond."""
        started = time.monotonic()
        move = _Move(self, me, leaver)
        is_incomplete = False
        for _ in range(_PASSES):
            # A member that was silent for a moment is skipped for so long.
            if is_incomplete and self.stopped.wait(FIRST_PAUSE_SECONDS):
                break
            before = move.report.moved_bytes
            move.run(self.cluster.link.views.view())
            is_incomplete = bool(move.report.failed_bytes or (waits and move.report.unread))
            if self.stopped.is_set() or (move.report.moved_bytes == before and not is_incomplete):
                break
        report = replace(move.report, stopped=self.stopped.is_set(), seconds=time.monotonic() - started)
        address_of = self.cluster.link.address_of
        unread = ", ".join(map(address_of, report.unread))
        detail = _text(report) + (f", no list of blocks from {unread}" if unread else "")
        emit(Event(name="cluster.moved", subject=address_of(me), nbytes=report.moved_bytes, detail=detail))
        return report


class Rate:
    """A limit of bytes per second, first come, first served. Thread-safe."""

    def __init__(self, bytes_per_second: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def pause_before(self, nbytes: int) -> float:
        """The seconds to wait before `nbytes` more, which are counted from now on."""
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._bytes_per_second
            return start - now


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of an object that the same members (`givers`) offer, in the order of requests."""

    blocks: range
    givers: tuple[str, ...]


def runs_to_pull(
    what: ObjectDescription, offers: Mapping[str, Sequence[range]], *, placement: Placement, me: str
) -> list[Run]:
    """The runs of an object's offered blocks to copy. Pure.

    Only stripes that `me` holds, in runs of at most two blocks inside one stripe.
    """
    object_id = what.object_id()
    runs: list[Run] = []
    for stripe in placement.stripes_of(me, object_id, what.size):
        inside = blocks_of(*stripe_span(stripe, what.size), BLOCK_BYTES)
        orders: dict[frozenset[str], tuple[str, ...]] = {}
        for block, names in sorted(_offered_blocks(offers, inside).items()):
            if names not in orders:
                orders[names] = givers(placement, object_id, stripe, names)
            last = runs[-1] if runs else Run(range(0), ())
            joins = last.blocks.stop == block > inside.start and last.givers == orders[names]
            if joins and len(last.blocks) < RUN_BLOCKS:
                runs[-1] = Run(range(last.blocks.start, block + 1), last.givers)
            else:
                runs.append(Run(range(block, block + 1), orders[names]))
    return runs


def _offered_blocks(offers: Mapping[str, Sequence[range]], inside: range) -> dict[int, frozenset[str]]:
    """The members that offer each block within a range."""
    found: dict[int, set[str]] = {}
    for name, blocks in offers.items():
        for run in blocks:
            for block in range(max(run.start, inside.start), min(run.stop, inside.stop)):
                found.setdefault(block, set()).add(name)
    return {block: frozenset(names) for block, names in found.items()}


class _Move:
    """One move. A repeated `run` skips cached blocks."""

    def __init__(self, mover: Mover, me: str, leaver: Member | None) -> None:
        self._mover = mover
        self._cluster = mover.cluster
        self._stopped = mover.stopped
        self._me = me
        self._leaver = leaver
        self._members: dict[str, Member] = {}
        self._placement = Placement(View(()))
        self._lock = threading.Lock()
        self._full_until = 0.0
        self.report = MoveReport()

    def run(self, view: View) -> None:
        """Request everything from all members of a view, once."""
        others = [self._leaver] if self._leaver is not None else view.members
        self._members = {
            each.id: each for each in others if each.id != self._me and each.state is not MemberState.JOINING
        }
        without = [] if self._leaver is None else [self._leaver.id]
        self._placement = Placement(as_seen(view, self._me, without), replicas=self._cluster.link.replicas)
        # Skipped, failed and unread blocks are counted again.
        self.report = replace(self.report, skipped_bytes=0, failed_bytes=0, unread=())
        waiting = threading.Semaphore(2 * self._mover.parallel)
        with ThreadPoolExecutor(self._mover.parallel, thread_name_prefix="millrace-move") as pool:
            for what, offers in self._offered():
                waiting.acquire()
                if self._stopped.is_set():
                    break
                pool.submit(self._copy, what, offers).add_done_callback(lambda _: waiting.release())

    # --- offers -------------------------------------------------------------------------------------

    def _offered(self) -> Iterator[tuple[ObjectDescription, dict[str, Sequence[range]]]]:
        """Every offered object, with the blocks that each member offers."""
        streams = [self._offers_of(member) for member in self._members.values()]
        merged = heapq.merge(*streams, key=lambda found: found[0])
        for _, found in itertools.groupby(merged, key=lambda found: found[0]):
            every = list(found)
            yield every[0][2].what, {name: offer.blocks for _, name, offer in every}

    def _offers_of(self, member: Member) -> Iterator[tuple[bytes, str, Offer]]:
        """All offers of one member; ends early, and records that, if the member stops responding."""
        after = b""
        while not self._stopped.is_set():
            page = self._page(member, after)
            if page is None:
                self._note(unread=(member.id,))
                return
            # Sorted, because the merge would skip offers in a wrong order.
            yield from sorted(((offer.what.object_id(), member.id, offer) for offer in page.offers), key=lambda f: f[0])
            if page.after is None or page.after <= after:
                return
            after = page.after

    def _page(self, member: Member, after: bytes) -> InventoryPage | None:
        body = {"view": self._placement.view.to_json(), "after": after.hex() if after else None}
        for attempt in range(_PAGE_ATTEMPTS):
            if attempt and self._stopped.wait(_PAGE_PAUSE_SECONDS):
                return None
            try:
                path = f"/v1/inventory/{self._me}"
                response = self._cluster.client.call(member.address, "POST", path, body, deadline=_PAGE_SECONDS)
                self._cluster.breakers.worked(member.id)
                return InventoryPage.from_json(response)
            except PeerSilentError:
                self._cluster.breakers.failed(member.id)
            except PeerRefusedError as error:
                self._cluster.record_refusal(member, error)
                return None
            except PeerError:
                return None
        return None

    # --- copying an object, in a thread of the pool -------------------------------------------------

    def _copy(self, what: ObjectDescription, offers: Mapping[str, Sequence[range]]) -> None:
        disk = self._mover.node.disk_of(what.object_id())
        if disk is None:
            return
        moved = 0
        try:
            runs = runs_to_pull(what, offers, placement=self._placement, me=self._me)
            with ReceivedObject(self._mover.node, disk, what) as store:
                for run in runs:
                    if self._stopped.is_set():
                        break
                    moved += self._copy_run(store, what, run)
        except Exception:  # noqa: BLE001 - logged; a joining node must become `here` nevertheless
            _log.exception("a defect while %s was moved", shown_key(what.key))
            self._note(failed_bytes=what.size)
        if moved:
            disk.counters.add("moved_bytes", moved)
            self._note(moved_bytes=moved, moved_objects=1)

    def _copy_run(self, store: ReceivedObject, what: ObjectDescription, run: Run) -> int:
        """Copy the missing blocks of a run; returns the number of bytes copied."""
        missing = store.missing(run.blocks)
        if not missing:
            return 0
        blocks = range(missing[0], missing[-1] + 1)
        start, stop = span_of(blocks.start, blocks.stop, what.size, BLOCK_BYTES)
        if time.monotonic() < self._full_until and not store.has_room(stop - start):
            self._note(skipped_bytes=stop - start)
            return 0
        if self._stopped.wait(self._mover.rate.pause_before(stop - start)):
            return 0
        data = self._request(what, run.givers, start, stop)
        if data is None:
            self._note(failed_bytes=stop - start)
            return 0
        try:
            kept = store.keep(blocks, start, data)
        except MillraceError as error:  # of a concurrent reader of the same blocks
            self._report(run.givers[0], what, error)
            self._note(failed_bytes=stop - start)
            return 0
        if kept:
            return stop - start
        self._full_until = time.monotonic() + _FULL_SECONDS
        self._note(skipped_bytes=stop - start)
        return 0

    def _request(self, what: ObjectDescription, names: Sequence[str], start: int, stop: int) -> Buffer | None:
        """The verified bytes from the first giver that has them; None without one."""
        cluster = self._cluster
        for name in names:
            if cluster.breakers.is_open(name):
                continue
            try:
                found = cluster.client.read(
                    self._members[name],
                    what,
                    (start, stop),
                    mode=GetMode.CACHED,
                    deadline=_READ_SECONDS,
                )
            except PeerSilentError as error:
                cluster.breakers.failed(name)
                self._report(name, what, error)
            except PeerRefusedError as error:
                cluster.breakers.worked(name)
                if error.status != _NOT_CACHED:  # evicted in the meantime
                    self._report(name, what, error)
            except (PeerError, ChangedError, MissingError) as error:
                self._report(name, what, error)
            else:
                cluster.breakers.worked(name)
                return found.data
        return None

    def _report(self, name: str, what: ObjectDescription, error: Exception) -> None:
        detail = f"moving {shown_key(what.key)}: {error}"
        emit(Event(name="peer.failed", subject=self._members[name].address, detail=detail))

    def _note(self, **more: int | tuple[str, ...]) -> None:
        """Add to fields of the report."""
        with self._lock:
            sums = {name: getattr(self.report, name) + amount for name, amount in more.items()}
            self.report = replace(self.report, **sums)


def _text(report: MoveReport) -> str:
    rest = f", no space for {size_text(report.skipped_bytes)}" if report.skipped_bytes else ""
    rest += f", {size_text(report.failed_bytes)} could not be read from any node" if report.failed_bytes else ""
    return f"{report.moved_objects} objects in {report.seconds:.1f} s{rest}"
