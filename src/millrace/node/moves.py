"""The moves of blocks to this node when members join, leave or fail. `cluster/moving.py` does the copying."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from millrace.cache.node import CacheNode
from millrace.cluster.cluster import Cluster
from millrace.cluster.membership import Member, MemberState, View
from millrace.cluster.moving import Mover, MoveReport
from millrace.errors import MillraceError, PeerError
from millrace.events import Event, emit
from millrace.runtime.failures import DEFECT

_log = logging.getLogger("millrace.node")

_T = TypeVar("_T")

_DEADLINE_SECONDS = 5.0
_REPORT_TRIES, _REPORT_PAUSE_SECONDS = 10, 1.0
_RESTORE_PAUSES_SECONDS = (5.0, 15.0, 45.0, 135.0, 405.0)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes of other members between two views: `came` own shares now, `leaving` leave as planned, `lost` failed.

    If any leave or failed, `still_leaving` are those that were leaving before: their shares have other next owners now.
    """

    came: tuple[Member, ...] = ()
    leaving: tuple[Member, ...] = ()
    lost: tuple[Member, ...] = ()
    still_leaving: tuple[Member, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.came or self.leaving or self.lost)


def changes(old: View, new: View, me: str) -> Changes:
    """Compare two views as the member `me`. Pure."""
    before = {member.id: member for member in old.members if member.id != me}
    now = {member.id: member for member in new.members if member.id != me}

    def newly(state: MemberState) -> tuple[Member, ...]:
        return tuple(
            member
            for name, member in sorted(now.items())
            if member.state is state and (name not in before or before[name].state is not state)
        )

    lost = [member for name, member in sorted(before.items()) if name not in now and member.state is MemberState.HERE]
    leaving = newly(MemberState.LEAVING)
    leaving_before = [member for member in new.members if member.state is MemberState.LEAVING and member.id != me]
    still_leaving = [member for member in leaving_before if member not in leaving] if leaving or lost else []
    return Changes(came=newly(MemberState.HERE), leaving=leaving, lost=tuple(lost), still_leaving=tuple(still_leaving))


class Moves:
    """Follows the views of one node, in a thread of its own. Thread-safe."""

    def __init__(self, node: CacheNode, cluster: Cluster, *, me: str) -> None:
        self._cluster = cluster
        self._me = me
        self._mover = Mover(node, cluster)
        self._view = View(())
        self._copying: dict[str, threading.Lock] = {}  # by the leaving member
        self._restoring = threading.Lock()
        self._restores = 0  # that have begun
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._work: queue.SimpleQueue[Changes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="millrace-moves", daemon=True)
        self._thread.start()

    def fill(self) -> bool:
        """Copy this node's share from the members that have it cached. Missing blocks are fetched when they are read.

        Returns False when blocks were left out, for example because a member did not respond.
        """
        filled = self._try("filling", lambda: self._mover.fill(self._me))
        return filled is not None and not filled.missed

    def refill(self) -> None:
        """As `fill`, in a thread of its own, and waits for members that do not respond."""
        with suppress(RuntimeError):  # no more threads: missing blocks are fetched when they are read
            threading.Thread(target=self._restore, name="millrace-refill", daemon=True).start()

    def view_changed(self, view: View) -> None:
        """Start the moves that follow from a new view. Returns at once."""
        with self._lock:
            found = changes(self._view, view, self._me)
            is_first, self._view = not self._view.members, view
        if found:
            for what, members in (("here", found.came), ("leaving", found.leaving), ("lost", found.lost)):
                for member in () if is_first else members:
                    emit(Event(name=f"cluster.member.{what}", subject=member.address))
            self._work.put(found)

    def stop(self) -> None:
        """Stop all moves. Idempotent."""
        self._stopped.set()
        self._mover.stop()
        self._work.put(None)

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        self._thread.join(10.0)

    def _run(self) -> None:
        while (found := self._work.get()) is not None:
            # In parallel: a leaving member must not wait for another, or for the copies of a lost one.
            acts: list[Callable[[], None]] = [
                partial(self._take_over, member) for member in (*found.leaving, *found.still_leaving)
            ]
            if found.lost and self._cluster.link.replicas > 1:
                acts.append(self._restore)
            for act in acts:
                try:
                    threading.Thread(target=act, daemon=True).start()
                except RuntimeError:  # no more threads: one after the other
                    act()
            if found.came:
                self._try("marking copies", self._mover.mark_copies)

    def _restore(self) -> None:
        """Copy missing blocks of this node's share, and repeat that for ten minutes while it fails or blocks are left out.

        A repetition is skipped while all members that would have to respond are unreachable. Every call copies the
        same, so only the newest one repeats.
        """
        if threading.current_thread() is self._thread:  # no thread could start, and later views must not wait
            self._restore_once()
            return
        with self._lock:
            self._restores += 1
            number = self._restores
        is_unreachable = self._cluster.breakers.is_known_open
        moved: MoveReport | None = None
        for pause in (0.0, *_RESTORE_PAUSES_SECONDS):
            if self._stopped.wait(pause) or (pause and number != self._restores):
                return
            if moved is not None and not moved.failed_bytes and all(map(is_unreachable, moved.unread)):
                continue
            moved = self._restore_once()
            if moved is not None and not moved.missed:
                return

    def _restore_once(self) -> MoveReport | None:
        """Returns None after an error, and when this node has stopped its moves."""
        with self._restoring:
            return (
                None if self._stopped.is_set() else self._try("restoring copies", lambda: self._mover.restore(self._me))
            )

    def _take_over(self, leaver: Member) -> None:
        """Copy this node's new share from a leaving member, then report that it need not wait, complete or not.

        What the member did not return is copied from the other holders.
        """
        with self._lock:
            copying = self._copying.setdefault(leaver.id, threading.Lock())
        with copying:  # two threads would copy the same blocks
            # Before the copies: these may already be placed by a newer view.
            members = self._cluster.link.views.view().members
            owners = [member.id for member in members if member.state is MemberState.HERE]
            moved = self._try(f"taking over from {leaver.address}", lambda: self._mover.take_over(leaver))
            if not self._stopped.is_set():
                report = {"member": self._me, "owners": owners}
                self._try(f"reporting to {leaver.address}", lambda: self._report(leaver, report))
        # A member that fails while it leaves is not lost in any later view.
        if self._cluster.link.replicas > 1 and (moved is None or moved.missed):
            self._restore()

    def _report(self, leaver: Member, report: Mapping[str, object]) -> None:
        """Send a report to a leaving member, which waits for it: again after a failure, until the member has left.

        Raises `PeerError` after the last try.
        """
        for left in reversed(range(_REPORT_TRIES)):
            try:
                self._cluster.client.call(
                    leaver.address, "POST", "/v1/drained", report, deadline=_DEADLINE_SECONDS, working_seconds=0
                )
                return
            except PeerError:
                if not left:
                    raise
            if self._stopped.wait(_REPORT_PAUSE_SECONDS):
                return
            if all(each.id != leaver.id for each in self._cluster.link.views.view().members):
                return

    def _try(self, what: str, act: Callable[[], _T]) -> _T | None:
        """The result of `act`; None after an error, which is reported."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - missing blocks are fetched again; the node must continue
            if not isinstance(error, MillraceError):
                _log.exception("a defect: %s", what)
            reason = str(error) if isinstance(error, MillraceError) else DEFECT
            subject = self._cluster.link.address_of(self._me)
            emit(Event(name="cluster.move.failed", subject=subject, detail=f"{what}: {reason}"))
            return None
