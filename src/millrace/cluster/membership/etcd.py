"""Members stored in etcd: one key with a lease for each, below a prefix that all processes watch.

The key of a member is `/millrace/<cluster>/members/<id>`, its value the member as JSON. A member renews its lease three
times per lease; that of a dead member expires. Every process watches the keys. Twice per lease it also checks whether it
missed a change, which detects an etcd that is silent, was restarted, or lost its data.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from millrace.cluster.membership.etcd_gateway import (
    NOT_FOUND,
    EtcdDownError,
    EtcdGateway,
    EtcdRefusedError,
    EtcdStream,
    decode,
    encode,
    prefix_range,
)
from millrace.cluster.membership.protocol import Member, MemberState, View, Watchers
from millrace.cluster.membership.roster import Roster
from millrace.config import DEFAULT_CLUSTER, address_text, parse_addresses, parse_etcd
from millrace.errors import ConfigurationError, DamagedError, MillraceError, OriginUnavailableError

_log = logging.getLogger("millrace.cluster")

LEASE_SECONDS = 10.0

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0


class EtcdMembers:
    """The `Membership` of the nodes that name the same etcd and the same `cluster`. Thread-safe; not usable after a fork.

    It has at most two threads: one watches; after `join` another renews the lease. Both run until `close`, even during an
    outage. A client does not join.
    """

    def __init__(
        self, endpoints: Iterable[str], *, cluster: str = DEFAULT_CLUSTER, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        """`endpoints` are `host:port`, tried in turn. Reads the members once before it returns.

        `lease_seconds` (at least 2) is how long a silent member stays. Raises `ConfigurationError` for a malformed address,
        and if etcd refuses.
        """
        if lease_seconds < 2:
            raise ConfigurationError(
                f"a lease of {lease_seconds:g} s is too short for etcd", next_step="use at least 2 s"
            )
        self._prefix = f"/millrace/{cluster}/members/"
        self._lease_seconds = lease_seconds
        self.gateway = EtcdGateway(
            parse_addresses(",".join(endpoints), option="etcd"),
            timeout_seconds=max(1.0, min(3.0, lease_seconds / 4)),
        )
        self._lock = threading.Lock()
        self._roster = Roster(lease_seconds=lease_seconds)
        self._view = View(())
        self._revision = 0
        self._keys = 0
        self._watchers = Watchers()
        self._stream: EtcdStream | None = None
        self._in_outage = False
        self._closed = threading.Event()
        self._registration = _Registration(self)
        try:
            self._read_all()
        except EtcdDownError as error:
            self._report_outage(error)
        self._watcher = threading.Thread(target=self._watch_always, name="millrace-etcd-watch", daemon=True)
        self._watcher.start()

    @classmethod
    def parse(cls, members: str) -> EtcdMembers:
        """From the option `members`, `etcd://host:port,.../name`. Raises `ConfigurationError`."""
        addresses, cluster = parse_etcd(members)
        return cls((address_text(*address) for address in addresses), cluster=cluster)

    # --- Membership -------------------------------------------------------------------------------

    def view(self) -> View:
        """The newest known members; empty until etcd has responded once."""
        return self._view

    def watch(self, on_change: Callable[[View], None]) -> Callable[[], None]:
        """See `Membership.watch`."""
        return self._watchers.add(on_change)

    def join(self, me: Member) -> None:
        """See `Membership.join`."""
        self._registration.set(me)

    def leave(self) -> None:
        """Remove the member now; its lease expires if etcd does not respond."""
        self._registration.end()

    def absences(self) -> int:
        """See `Membership.absences`."""
        return self._registration.absences

    def close(self) -> None:
        """Stop both threads. Idempotent."""
        self._closed.set()
        self._registration.wake()
        with self._lock:
            if self._stream is not None:
                self._stream.interrupt()
        for thread in (self._watcher, self._registration.thread):
            if thread is not None and thread is not threading.current_thread():
                thread.join(2 * self.gateway.timeout_seconds)

    # --- watching ---------------------------------------------------------------------------------

    def _watch_always(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._read_all()
                self._follow()
            except MillraceError as error:
                self._report_outage(error)
            except Exception as error:  # noqa: BLE001 - no response of etcd may end the views of a node
                _log.exception("the watch of etcd's members is restarted after %r", error)
            pause = _FIRST_PAUSE_SECONDS if time.monotonic() - began > 5 else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._closed.wait(pause)

    def _follow(self) -> None:
        """Apply changes, until the watch is canceled because etcd compacted the changes that it needs."""
        until = time.monotonic() + self._lease_seconds / 2
        while not self._closed.is_set():
            request = {**prefix_range(self._prefix), "start_revision": str(self._revision + 1)}
            with self.gateway.stream("/v3/watch", {"create_request": request}) as stream:
                with self._lock:
                    self._stream = stream
                try:
                    if not self._apply_until(stream, until):
                        return
                finally:
                    with self._lock:
                        self._stream = None
            if time.monotonic() >= until:
                self._check()
                self._publish_view()
                until = time.monotonic() + self._lease_seconds / 2

    def _apply_until(self, stream: EtcdStream, until: float) -> bool:
        """Apply the changes that arrive before a time (monotonic) or a silence; returns False if the watch is canceled."""
        while not self._closed.is_set() and (now := time.monotonic()) < until:
            response = stream.next(max(0.0, min(until, self._roster.next_change() or until) - now))
            if self._closed.is_set():
                break
            if response is not None:
                result = response.get("result", {})
                if result.get("canceled"):
                    return False
                self._apply(result.get("events", []))
            self._publish_view()
            if response is None:
                break
        return True

    def _check(self) -> None:
        """Read all members again if the watch missed a change. A small request: its response is one key."""
        newest = {"limit": "1", "sort_order": "DESCEND", "sort_target": "MOD", "keys_only": True}
        response = self.gateway.call("/v3/kv/range", {**prefix_range(self._prefix), **newest})
        revisions = [_number(pair.get("mod_revision")) for pair in response.get("kvs", [])]
        with self._lock:
            same = _revision(response) >= self._revision and _number(response.get("count")) == self._keys
            if same and max(revisions, default=0) <= self._revision:
                self._end_outage()
                return
        self._read_all()

    def _end_outage(self) -> None:
        """etcd responds. The lock is held."""
        self._roster.responded(time.monotonic())
        if self._in_outage:
            self._in_outage = False
            _log.warning("etcd responds again")

    def _read_all(self) -> None:
        """Read all members. Raises `EtcdDownError`, `EtcdRefusedError`."""
        response = self.gateway.call("/v3/kv/range", prefix_range(self._prefix))
        revision = _revision(response)
        members = {}
        for pair in response.get("kvs", []):
            member = self._member(pair)
            if member is not None:
                members[member.id] = member
        with self._lock:
            if revision < self._revision:
                _log.warning("etcd lost its data, or is another one: members publish themselves again")
                self._roster.outage()
                self._registration.restart()
            self._end_outage()
            self._roster.replace(members, time.monotonic())
            self._revision = revision
            self._keys = _number(response.get("count"))
        self._publish_view()

    def _apply(self, events: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        for event in events:
            pair = event.get("kv", {})
            revision = _number(pair.get("mod_revision"))
            with self._lock:
                if revision <= self._revision:
                    continue  # a complete read was faster
                if event.get("type") == "DELETE":
                    self._keys -= 1
                    self._roster.remove(self._id_of(pair), now)
                else:
                    self._keys += pair.get("create_revision") == pair.get("mod_revision")
                    member = self._member(pair)
                    if member is not None:
                        self._roster.put(member)
        with self._lock:
            numbers = [_number(event.get("kv", {}).get("mod_revision")) for event in events]
            self._revision = max([self._revision, *numbers])

    def _publish_view(self) -> None:
        """Update the view, notify the watchers of a change, and publish our own member again if it is missing."""
        with self._lock:
            view = View.of(self._roster.members(time.monotonic()))
            changed = view != self._view
            self._view = view
            self._registration.check(self._roster, self._revision)
        if changed:
            self._watchers.notify(view)

    def _report_outage(self, error: MillraceError) -> None:
        with self._lock:
            self._roster.outage()
            first = not self._in_outage and not self._closed.is_set()
            self._in_outage = True
        if first:
            _log.warning("etcd does not respond; the last known members stay: %s", error)

    def _id_of(self, pair: dict[str, Any]) -> str:
        return decode(pair.get("key")).decode("utf-8", "replace").removeprefix(self._prefix)

    def _member(self, pair: dict[str, Any]) -> Member | None:
        """The member under a key; None if the value is something else."""
        try:
            value = json.loads(decode(pair.get("value")))
            if not isinstance(value, dict):
                raise DamagedError("not a description of a member")
            member = Member.from_json(value)
            if member.id != self._id_of(pair):
                raise DamagedError(f"the key of another member than {member.id}")
        except (ValueError, RecursionError, DamagedError) as error:
            _log.warning("etcd: ignored a value below %s: %s", self._prefix, error)
            return None
        return member


class _Registration:
    """The publication of our own member, and its lease."""

    def __init__(self, members: EtcdMembers) -> None:
        self.thread: threading.Thread | None = None
        self._members = members
        self._requesting = threading.RLock()  # around every request: they must not overtake each other
        self._me: Member | None = None
        self._published: Member | None = None
        self._published_at = 0  # etcd's revision
        self._lease: str | None = None
        self.absences = 0
        self._woken = threading.Event()

    def set(self, me: Member) -> None:
        """See `Membership.join`."""
        with self._requesting:
            before, self._me = self._me, me
            try:
                self._publish()
            except OriginUnavailableError as error:
                if before is None:
                    self._me = None
                    raise
                self._members._report_outage(error)  # published when etcd responds again
            except ConfigurationError:
                self._me = before
                raise
            if self.thread is None:
                self.thread = threading.Thread(target=self._keep_always, name="millrace-etcd-lease", daemon=True)
                self.thread.start()
        self.wake()

    def end(self) -> None:
        """See `Membership.leave`."""
        with self._requesting:
            me, lease, published = self._me, self._lease, self._published
            self._me = self._published = self._lease = None
            if me is None or lease is None:
                return
            try:
                if published is None or published.state is not MemberState.LEAVING:
                    # Without this state, a leave looks like lost data. An outage may have kept it from etcd. An etcd that is
                    # full refuses it, but not the next request.
                    with contextlib.suppress(EtcdDownError):
                        self._put(replace(me, state=MemberState.LEAVING), lease)
                self._members.gateway.call("/v3/lease/revoke", {"ID": lease})
            except MillraceError as error:
                _log.warning("%s: cannot remove it from etcd; its lease expires instead: %s", me.id, error)

    def wake(self) -> None:
        """Make the thread check its tasks now."""
        self._woken.set()

    def restart(self) -> None:
        """etcd lost its data; its revisions begin again."""
        self._published_at = 0

    def check(self, roster: Roster, revision: int) -> None:
        """Publish the member again if etcd no longer lists it."""
        published = self._published
        if published is not None and revision > self._published_at and not roster.is_listed(published.id):
            self._published = None
            self.wake()

    def _keep_always(self) -> None:
        closed = self._members._closed
        lease_seconds = self._members._lease_seconds
        while not closed.is_set():
            pause = lease_seconds / 3
            try:
                with self._requesting:
                    if self._me is not None and not closed.is_set():
                        self._renew()
                        self._publish()
            except MillraceError as error:
                self._members._report_outage(error)
                pause = min(1.0, lease_seconds / 6)
            except Exception as error:  # noqa: BLE001 - a node that no longer renews its lease is lost
                _log.exception("the lease in etcd is renewed again after %r", error)
            # An upper limit of the rate, however often the thread is woken.
            closed.wait(min(_FIRST_PAUSE_SECONDS, pause))
            self._woken.wait(pause)
            self._woken.clear()

    def _renew(self) -> None:
        """Renew the lease. If it has expired, the member is no longer published."""
        if self._lease is not None:
            response = self._members.gateway.call("/v3/lease/keepalive", {"ID": self._lease})
            if _number(response.get("result", {}).get("TTL")) <= 0:
                self._lease = self._published = None

    def _publish(self) -> None:
        """Write the member if it is missing or differs, with a valid lease."""
        if self._me is None or (self._lease is not None and self._published == self._me):
            return
        if self._lease is not None:
            try:
                self._put(self._me, self._lease)
                return
            except EtcdRefusedError as error:
                if error.status != NOT_FOUND:
                    raise
        self._lease = self._published = None
        response = self._members.gateway.call("/v3/lease/grant", {"TTL": str(round(self._members._lease_seconds))})
        lease = str(response.get("ID", ""))
        self._put(self._me, lease)
        self._lease = lease

    def _put(self, member: Member, lease: str) -> None:
        key = f"{self._members._prefix}{member.id}"
        body = {"key": encode(key), "value": encode(json.dumps(member.to_json())), "lease": lease}
        # In an outage, or after a pause of this process, the roster never shows that the key was missing.
        is_missing = self._published is None
        if is_missing and self.absences % 2 == 0:  # odd while it is missing
            self.absences += 1
        response = self._members.gateway.call("/v3/kv/put", body)
        self.absences += is_missing
        self._published_at = _revision(response)
        self._published = member


def _revision(response: dict[str, Any]) -> int:
    return _number(response.get("header", {}).get("revision"))


def _number(text: Any) -> int:
    """A number in a response: 64-bit numbers are strings, and zeros are omitted."""
    with contextlib.suppress(TypeError, ValueError):
        return int(text or 0)
    raise EtcdDownError(f"etcd returned {text!r} instead of a number")
