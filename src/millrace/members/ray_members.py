"""Members that find each other through the control plane of their Ray cluster."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping

from millrace.errors import DamagedError, OriginUnavailableError
from millrace.members.protocol import Member, View
from millrace.members.ray_control import ControlPlane
from millrace.members.ray_records import Beats, MemberRecord, pause

_log = logging.getLogger("millrace")

_SHORTEST_PAUSE_SECONDS = 1.0
_CLOSE_SECONDS = 5.0


class RayMembers:
    """A `Membership` in a Ray cluster. Thread-safe, with one thread; not usable after a fork.

    Each member writes itself down again and again. One that stops is taken out: at once when the GCS says that its Ray node
    is gone, else after five beats (6 s in small clusters), so that an actor which Ray restarts keeps its place. While the
    GCS does not answer, nobody is taken out.
    """

    def __init__(
        self, control: ControlPlane, *, cluster: str, ray_node: str, seconds: float = _SHORTEST_PAUSE_SECONDS
    ) -> None:
        """`cluster` names the cluster, `ray_node` is the id of the Ray node here, `seconds` between two looks at least.

        The first look is at once; where the GCS does not answer, the view is empty until it does.
        """
        self._control = control
        self._prefix = f"{cluster}/member/"
        self._ray_node = ray_node
        self._shortest = seconds
        self._every = seconds
        self._boot = uuid.uuid4().hex
        self._count = 0
        self._me: Member | None = None
        self._view = View(())
        self._told = self._view
        self._watchers: dict[object, Callable[[View], None]] = {}
        self._beats = Beats()
        self._known_nodes: set[str] = set()
        self._lock = threading.Lock()  # of what is above
        self._looking = threading.Lock()  # one look at a time; taken before the other
        self._writing = threading.Lock()  # what is written last holds; taken before the other two
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._out = False
        self._look()
        self._told = self._view
        self._thread = threading.Thread(target=self._run, name="millrace-ray-members", daemon=True)
        self._thread.start()

    def view(self) -> View:
        return self._view

    def watch(self, on_change: Callable[[View], None]) -> Callable[[], None]:
        name = object()
        with self._lock:
            self._watchers[name] = on_change

        def end() -> None:
            with self._lock:
                self._watchers.pop(name, None)

        return end

    def join(self, me: Member) -> None:
        with self._writing:
            self._write(me)
            with self._lock:
                self._me = me
        self._look()
        self._wake.set()

    def leave(self) -> None:
        with self._writing:
            with self._lock:
                me, self._me = self._me, None
            if me is None:
                return
            try:
                self._control.delete(self._prefix + me.id)
            except OriginUnavailableError as error:
                _log.warning("cannot say that member %s leaves; the others find out: %s", me.id, error)
        self._look()
        self._wake.set()

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
                self._look()
                self._tell()
            except Exception:  # noqa: BLE001 - whatever Ray raises: a node that beats no more is taken for dead
                if not self._out:
                    self._out = True
                    _log.exception("the last known members hold; Ray's control plane is asked again")

    def _beat(self) -> None:
        with self._writing:
            me = self._me
            if me is None:
                return
            try:
                self._write(me)
            except OriginUnavailableError as error:
                self._say(error)

    def _write(self, me: Member) -> None:
        self._count += 1
        record = MemberRecord(member=me, ray_node=self._ray_node, beat=f"{self._boot}-{self._count}", every=self._every)
        self._control.put(self._prefix + me.id, record.to_bytes())

    def _look(self) -> None:
        with self._looking:
            try:
                records = parse_members(self._control.scan(self._prefix))
                self._beats.read(records, time.monotonic())
                gone = self._gone(records)
            except OriginUnavailableError as error:
                self._beats.not_read()
                self._say(error)
                return
            if self._out:
                self._out = False
                _log.warning("Ray's control plane answers again")
            there = [record.member for name, record in records.items() if name not in gone]
            self._every = pause(len(there), shortest=self._shortest)
            self._view = View.of(there)

    def _gone(self, records: Mapping[str, MemberRecord]) -> set[str]:
        """The names of those that are written down and no members any more; what dead Ray nodes have left is removed."""
        silent = {name for name, record in records.items() if self._beats.is_over(name, record)}
        # Of a Ray node that was never seen alive, a record may be an old one.
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
            self._control.delete(name)
        return silent | dead

    def _tell(self) -> None:
        with self._lock:
            view = self._view
            if view == self._told:
                return
            self._told = view
            watchers = list(self._watchers.values())
        for watcher in watchers:
            try:
                watcher(view)
            except Exception:  # noqa: BLE001 - what a listener does must not end the views of a node
                _log.exception("a listener failed at a new view of the members")

    def _say(self, error: OriginUnavailableError) -> None:
        if not self._out:
            self._out = True
            _log.warning("%s; the last known members hold meanwhile", error)


def parse_members(found: Mapping[str, bytes]) -> dict[str, MemberRecord]:
    """What members have written down, by the names of the records; what cannot be read is left out, with a warning."""
    records = {}
    for name, data in found.items():
        try:
            records[name] = MemberRecord.from_bytes(data)
        except DamagedError as error:
            _log.warning("%s is left out: %s", name, error)
    return records
