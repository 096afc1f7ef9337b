"""Members that find each other through the control plane of their Ray cluster."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping

from millrace.cluster.membership.protocol import Member, View, Watchers
from millrace.cluster.membership.ray_control import ControlPlane
from millrace.cluster.membership.ray_records import Beats, MemberRecord, pause, shortest_lease
from millrace.errors import DamagedError, OriginUnavailableError

_log = logging.getLogger("millrace.cluster")

_SHORTEST_PAUSE_SECONDS = 1.0
_CLOSE_SECONDS = 5.0


class RayMembers:
    """A `Membership` in a Ray cluster. Thread-safe, with one thread; not usable after a fork.

    Each member writes its record at regular intervals (*beats*). A member that stops is removed: at once if the GCS reports
    that its Ray node is gone, else after five beats (6 s in small clusters), so that an actor which Ray restarts keeps its
    place. No member is removed while the GCS does not respond.
    """

    def __init__(
        self, control: ControlPlane, *, cluster: str, ray_node: str, seconds: float = _SHORTEST_PAUSE_SECONDS
    ) -> None:
        """`cluster` is the cluster's name, `ray_node` the id of this Ray node, `seconds` the shortest interval of reads.

        Reads the members once before it returns. If the GCS does not respond, the view is empty until it does.
        """
        self._control = control
        self._prefix = f"{cluster}/member/"
        self._ray_node = ray_node
        self._shortest = seconds
        self._every = seconds
        self._boot = uuid.uuid4().hex
        self._count = 0
        self._absences = 0
        self._kept_until = 0.0
        self._me: Member | None = None
        self._view = View(())
        self._watchers = Watchers()
        self._beats = Beats()
        self._known_nodes: set[str] = set()
        self._reading = threading.Lock()  # one read at a time
        self._writing = threading.Lock()  # the last write holds; taken before the other
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._in_outage = False
        self._read()
        self._notified = self._view
        self._thread = threading.Thread(target=self._run, name="millrace-ray-members", daemon=True)
        self._thread.start()

    def view(self) -> View:
        return self._view

    def watch(self, on_change: Callable[[View], None]) -> Callable[[], None]:
        return self._watchers.add(on_change)

    def join(self, me: Member) -> None:
        with self._writing:
            self._write(me)
            self._me = me
        self._read()
        self._wake.set()

    def leave(self) -> None:
        with self._writing:
            me, self._me = self._me, None
            if me is None:
                return
            try:
                self._control.delete(self._prefix + me.id)
            except OriginUnavailableError as error:
                _log.warning("member %s: cannot remove its record, which expires instead: %s", me.id, error)
        self._read()
        self._wake.set()

    def absences(self) -> int:
        return self._absences

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(self._every)
            self._wake.clear()
            if self._closed.is_set():
                return
            try:
                self._beat()
                self._read()
                view = self._view
                if view != self._notified:
                    self._notified = view
                    self._watchers.notify(view)
            except Exception:  # noqa: BLE001 - any error of Ray: a node without beats counts as dead
                if not self._in_outage:
                    self._in_outage = True
                    _log.exception("Ray's control plane failed; the last known members stay, and it is read again")

    def _beat(self) -> None:
        with self._writing:
            me = self._me
            if me is None:
                return
            try:
                self._write(me)
            except OriginUnavailableError as error:
                self._report_outage(error)

    def _write(self, me: Member) -> None:
        self._count += 1
        now = time.monotonic()
        record = MemberRecord(member=me, ray_node=self._ray_node, beat=f"{self._boot}-{self._count}", every=self._every)
        # Others count the beats without this process's outages and pauses, in which it did not read that it was gone.
        is_missing = now > self._kept_until
        if is_missing and self._absences % 2 == 0:  # odd while it is missing
            self._absences += 1
        self._control.put(self._prefix + me.id, record.to_bytes())
        self._absences += is_missing
        self._kept_until = now + shortest_lease(record)

    def _read(self) -> None:
        with self._reading:
            try:
                records = parse_members(self._control.scan(self._prefix))
                self._beats.read(records, time.monotonic())
                gone = self._gone(records)
            except OriginUnavailableError as error:
                self._beats.not_read()
                self._report_outage(error)
                return
            if self._in_outage:
                self._in_outage = False
                _log.warning("Ray's control plane responds again")
            members = [record.member for name, record in records.items() if name not in gone]
            self._every = pause(len(members), shortest=self._shortest)
            self._view = View.of(members)

    def _gone(self, records: Mapping[str, MemberRecord]) -> set[str]:
        """The names of records whose members are gone; deletes the records of dead Ray nodes."""
        silent = {name for name, record in records.items() if self._beats.is_over(name, record)}
        # The record of a Ray node that was never seen alive may be an old one.
        doubtful = {
            name
            for name, record in records.items()
            if record.ray_node not in self._known_nodes or self._beats.is_late(name, record)
        }
        if not doubtful:
            return silent
        living = self._control.living_nodes()
        self._known_nodes = living & {record.ray_node for record in records.values()}
        dead = {name for name in doubtful if records[name].ray_node not in living}
        for name in dead:
            # A node with the same disks may have begun on another Ray node since the records were read.
            data = self._control.get(name)
            if data is not None and parse_members({name: data}).get(name) == records[name]:
                self._control.delete(name)
        return silent | dead

    def _report_outage(self, error: OriginUnavailableError) -> None:
        if not self._in_outage:
            self._in_outage = True
            _log.warning("%s; the last known members stay", error)


def parse_members(found: Mapping[str, bytes]) -> dict[str, MemberRecord]:
    """The records of members, by their names; leaves out unreadable ones with a warning."""
    records = {}
    for name, data in found.items():
        try:
            records[name] = MemberRecord.from_bytes(data)
        except DamagedError as error:
            _log.warning("%s: ignored: %s", name, error)
    return records
