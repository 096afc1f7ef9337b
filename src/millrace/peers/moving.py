"""Pulls what a node is to hold from those that have it: when it joins, when another leaves, when copies were lost.

Who is to hold something asks everybody what they have of it (`inventory.py`). The answers come in the order of the objects'
ids, so that for each block all givers are known before one is asked: the one that held it before the change, and the others
when that fails. What is here already is not asked for, so whatever ends a move, the next one goes on where it stopped.
Nothing is ever fetched from the origin.
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

from millrace.cache.blocks import BLOCK_BYTES, RUN_BLOCKS, blocks_of, span_of
from millrace.cache.node import CacheNode
from millrace.errors import (
    ChangedError,
    MillraceError,
    MissingError,
    PeerError,
    PeerRefusedError,
    PeerSilentError,
    StorageError,
)
from millrace.events import Event, emit
from millrace.members import Member, MemberState, View
from millrace.peers.bringing import Bringing
from millrace.peers.cluster import Cluster
from millrace.peers.copies import know_copies, stripes_of
from millrace.peers.inventory import InventoryPage, Offer, as_seen, givers
from millrace.peers.placement import Placement, stripe_span
from millrace.peers.wire import Ask, ObjectDescription

_log = logging.getLogger("millrace")

BYTES_PER_SECOND = 64e6

_PARALLEL = 4
_PASSES = 3  # each brings what came, or did not answer, during the one before
_PAGE_SECONDS = 3.0  # of silence
_PAGE_ATTEMPTS = 8
_PAGE_PAUSE_SECONDS = 0.25
_READ_SECONDS = 2.0
_FULL_SECONDS = 1.0
_NOT_KNOWN_YET = 404


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """What a move came to. `skipped_bytes` found no room here, `failed_bytes` no giver that had them and answered.

    `unheard` are the ids of members whose inventory could not be read to its end. `complete` says that nothing was left
    over for any of these reasons, nor because of `Mover.stop`.
    """

    moved_bytes: int = 0
    moved_objects: int = 0
    skipped_bytes: int = 0
    failed_bytes: int = 0
    unheard: tuple[str, ...] = ()
    stopped: bool = False
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether everything that was offered is here."""
        return not (self.skipped_bytes or self.failed_bytes or self.unheard or self.stopped)


class Mover:
    """What a node brings to its own disks. Thread-safe; several moves at a time share the rate. Not usable after a fork.

    `bytes_per_second` bounds all of them together. From the making of it on the node's disks know what they hold as copies.
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
        know_copies(node, cluster)

    def fill(self, me: str) -> MoveReport:
        """Pull everything that is to be `me`'s, which is joining, from whoever has it."""
        return self._pull(me)

    def restore(self, me: str) -> MoveReport:
        """Pull what `me` is to hold by the present view and lacks: copies that went with a member that is gone."""
        return self._pull(me)

    def take_over(self, leaver: Member) -> MoveReport:
        """Pull what becomes this node's when `leaver` goes."""
        me = self.cluster.link.member_id
        return MoveReport() if me is None else self._pull(me, leaver)

    def mark_copies(self) -> int:
        """After others have taken over a part of what is here: let that go first from now on; gives how many units."""
        marked = 0
        for disk in self.node.open_disks:
            try:
                marked += disk.mark_copies()
            except StorageError as error:
                disk.report(error)
        return marked

    def stop(self) -> None:
        """End what is under way, and all that is asked for later."""
        self.stopped.set()

    def _pull(self, me: str, leaver: Member | None = None) -> MoveReport:
        started = time.monotonic()
        move = _Move(self, me, leaver)
        for _ in range(_PASSES):
            before = move.report.moved_bytes
            move.go_through(self.cluster.link.views.view())
            if self.stopped.is_set() or (move.report.moved_bytes == before and not move.report.failed_bytes):
                break
        report = replace(move.report, stopped=self.stopped.is_set(), seconds=time.monotonic() - started)
        emit(Event(name="cluster.moved", subject=me, nbytes=report.moved_bytes, detail=_text(report)))
        return report


class Rate:
    """Lets so many bytes a second through, in the order of asking. Thread-safe."""

    def __init__(self, bytes_per_second: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def pause_before(self, nbytes: int) -> float:
        """How many seconds to wait before `nbytes` more; they count from now on."""
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._bytes_per_second
            return start - now


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks of an object that the same members have: `givers`, the one to ask first in front."""

    blocks: range
    givers: tuple[str, ...]


def runs_to_pull(
    what: ObjectDescription, offers: Mapping[str, Sequence[range]], *, placement: Placement, me: str
) -> list[Run]:
    """What to ask whom for, of an object and everything that is offered of it. Pure.

    Only stripes that `me` is to hold, in runs of two blocks at most that lie in one stripe.
    """
    object_id = what.object_id()
    runs: list[Run] = []
    for stripe in stripes_of(placement, me, object_id, what.size):
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
    """Who offers each of the blocks within a range."""
    found: dict[int, set[str]] = {}
    for name, blocks in offers.items():
        for run in blocks:
            for block in range(max(run.start, inside.start), min(run.stop, inside.stop)):
                found.setdefault(block, set()).add(name)
    return {block: frozenset(names) for block, names in found.items()}


class _Move:
    """One move. `go_through` may be called again: what is here by then is passed over."""

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

    def go_through(self, view: View) -> None:
        """Ask everybody in a view for everything, once."""
        others = [self._leaver] if self._leaver is not None else view.members
        self._members = {
            each.id: each for each in others if each.id != self._me and each.state is not MemberState.JOINING
        }
        without = [] if self._leaver is None else [self._leaver.id]
        self._placement = Placement(as_seen(view, self._me, without), replicas=self._cluster.link.replicas)
        # What was skipped, failed or not heard before is met again now.
        self.report = replace(self.report, skipped_bytes=0, failed_bytes=0, unheard=())
        waiting = threading.Semaphore(2 * self._mover.parallel)
        with ThreadPoolExecutor(self._mover.parallel, thread_name_prefix="millrace-move") as pool:
            for what, offers in self._offered():
                waiting.acquire()
                if self._stopped.is_set():
                    break
                pool.submit(self._bring, what, offers).add_done_callback(lambda _: waiting.release())

    # --- what is offered ----------------------------------------------------------------------------

    def _offered(self) -> Iterator[tuple[ObjectDescription, dict[str, Sequence[range]]]]:
        """Every object that somebody offers, with who has which of its blocks."""
        streams = [self._offers_of(member) for member in self._members.values()]
        merged = heapq.merge(*streams, key=lambda found: found[0])
        for _, found in itertools.groupby(merged, key=lambda found: found[0]):
            every = list(found)
            yield every[0][2].what, {name: offer.blocks for _, name, offer in every}

    def _offers_of(self, member: Member) -> Iterator[tuple[bytes, str, Offer]]:
        """All that one member offers; ends early, which is noted, when it does not answer any more."""
        after = b""
        while not self._stopped.is_set():
            page = self._page(member, after)
            if page is None:
                self._note(unheard=member.id)
                return
            # Of one that does not keep to the order the rest would be passed over.
            yield from sorted(((offer.what.object_id(), member.id, offer) for offer in page.offers), key=lambda f: f[0])
            if page.after is None or page.after <= after:
                return
            after = page.after

    def _page(self, member: Member, after: bytes) -> InventoryPage | None:
        query = {"after": after.hex()} if after else {}
        if self._leaver is not None:
            query["without"] = self._leaver.id
        for attempt in range(_PAGE_ATTEMPTS):
            if attempt and self._stopped.wait(_PAGE_PAUSE_SECONDS):
                return None
            try:
                path = f"/v1/inventory/{self._me}"
                answer = self._cluster.client.call(member, "GET", path, query=query, deadline=_PAGE_SECONDS)
                return InventoryPage.from_json(answer)
            except PeerSilentError:
                self._cluster.breakers.failed(member.id)
                if attempt:
                    return None
            except PeerRefusedError as error:
                self._cluster.heard_refusal(member, error)
                if error.status != _NOT_KNOWN_YET:  # its view is older than this node's: a matter of a moment
                    return None
            except PeerError:
                return None
        return None

    # --- bringing an object, in a thread of the pool ------------------------------------------------

    def _bring(self, what: ObjectDescription, offers: Mapping[str, Sequence[range]]) -> None:
        disk = self._mover.node.disk_of(what.object_id())
        if disk is None:
            return
        moved = 0
        try:
            runs = runs_to_pull(what, offers, placement=self._placement, me=self._me)
            with Bringing(self._mover.node, disk, what) as store:
                for run in runs:
                    if self._stopped.is_set():
                        break
                    moved += self._bring_run(store, what, run)
        except Exception:  # noqa: BLE001 - logged; a node that joins must come to be `here` all the same
            _log.exception("a defect while %s was moved", what.key)
            self._note(failed_bytes=what.size)
        if moved:
            disk.counters.add("moved_bytes", moved)
            self._note(moved_bytes=moved, moved_objects=1)

    def _bring_run(self, store: Bringing, what: ObjectDescription, run: Run) -> int:
        """Bring what is missing of a run; gives the bytes of it that are here now, and were not."""
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
        data = self._ask(what, run.givers, start, stop)
        if data is None:
            self._note(failed_bytes=stop - start)
            return 0
        try:
            kept = store.keep(blocks, start, data)
        except MillraceError as error:  # of a reader that was at the same blocks, and failed
            self._tell(run.givers[0], what, error)
            self._note(failed_bytes=stop - start)
            return 0
        if kept:
            return stop - start
        self._full_until = time.monotonic() + _FULL_SECONDS
        self._note(skipped_bytes=stop - start)
        return 0

    def _ask(self, what: ObjectDescription, names: Sequence[str], start: int, stop: int) -> Buffer | None:
        """The bytes from the first giver that has them, checked; None when none of them does."""
        cluster = self._cluster
        for name in names:
            if cluster.breakers.is_open(name):
                continue
            try:
                found = cluster.client.read(
                    self._members[name],
                    what,
                    [(start, stop)],
                    ask=Ask.CACHED,
                    view_version=self._placement.view.version,
                    deadline=_READ_SECONDS,
                )
            except PeerSilentError as error:
                cluster.breakers.failed(name)
                self._tell(name, what, error)
            except PeerRefusedError as error:
                cluster.breakers.worked(name)
                if error.status != _NOT_KNOWN_YET:  # it was evicted meanwhile
                    self._tell(name, what, error)
            except (PeerError, ChangedError, MissingError) as error:
                self._tell(name, what, error)
            else:
                cluster.breakers.worked(name)
                return found.data
        return None

    def _tell(self, name: str, what: ObjectDescription, error: Exception) -> None:
        emit(Event(name="peer.failed", subject=name, detail=f"moving {what.key}: {error}"))

    def _note(
        self,
        *,
        moved_bytes: int = 0,
        moved_objects: int = 0,
        skipped_bytes: int = 0,
        failed_bytes: int = 0,
        unheard: str | None = None,
    ) -> None:
        with self._lock:
            report = self.report
            self.report = replace(
                report,
                moved_bytes=report.moved_bytes + moved_bytes,
                moved_objects=report.moved_objects + moved_objects,
                skipped_bytes=report.skipped_bytes + skipped_bytes,
                failed_bytes=report.failed_bytes + failed_bytes,
                unheard=report.unheard if unheard is None else (*report.unheard, unheard),
            )


def _text(report: MoveReport) -> str:
    rest = f", {report.skipped_bytes} bytes found no room" if report.skipped_bytes else ""
    rest += f", {report.failed_bytes} bytes had no giver" if report.failed_bytes else ""
    rest += f", not heard: {', '.join(report.unheard)}" if report.unheard else ""
    return f"{report.moved_objects} objects in {report.seconds:.1f} s{rest}"
