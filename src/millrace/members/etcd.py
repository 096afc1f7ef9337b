"""Members kept by etcd: a key with a lease for each, below one prefix that everybody watches.

The key of a member is `/millrace/<cluster>/members/<id>`, its value the member as JSON. A member renews its lease three
times in its length; one that dies is gone when the lease is over. Every process watches the keys, and asks twice in a lease
whether it has missed anything, by which it also notices that etcd is silent, was restarted, or was wiped.
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

from millrace.config import DEFAULT_CLUSTER, address_text, parse_addresses, parse_etcd
from millrace.errors import ConfigurationError, DamagedError, MillraceError, OriginUnavailableError
from millrace.members.etcd_gateway import (
    NOT_FOUND,
    EtcdDownError,
    EtcdGateway,
    EtcdRefusedError,
    EtcdStream,
    decode,
    encode,
    prefix_range,
)
from millrace.members.protocol import Member, MemberState, View
from millrace.members.roster import Roster

_log = logging.getLogger("millrace")

LEASE_SECONDS = 10.0

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0


class EtcdMembers:
    """The `Membership` of the nodes that name the same etcd and the same `cluster`. Thread-safe; not usable after a fork.

    Two threads at most: one watches, and once this process has joined another keeps its lease. Both live until `close`,
    whatever etcd does. A client does not join.
    """

    def __init__(
        self, endpoints: Iterable[str], *, cluster: str = DEFAULT_CLUSTER, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        """`endpoints` are `host:port`, tried in turn. Knows the members when it returns, where etcd answers.

        `lease_seconds` (2 and more) is how long a member that says nothing any more stays. Raises `ConfigurationError` for
        an address that is none, and where etcd says no.
        """
        if lease_seconds < 2:
            raise ConfigurationError(f"a lease of {lease_seconds:g} s", next_step="etcd gives none below 2 s")
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
        self._listeners: tuple[Callable[[View], None], ...] = ()
        self._stream: EtcdStream | None = None
        self._silent = False
        self._closed = threading.Event()
        self._registration = _Registration(self)
        try:
            self._read_all()
        except EtcdDownError as error:
            self._say_trouble(error)
        self._watcher = threading.Thread(target=self._watch_always, name="millrace-etcd-watch", daemon=True)
        self._watcher.start()

    @classmethod
    def parse(cls, members: str) -> EtcdMembers:
        """Of the option `members`, `etcd://host:port,.../name`. Raises `ConfigurationError`."""
        addresses, cluster = parse_etcd(members)
        return cls((address_text(*address) for address in addresses), cluster=cluster)

    # --- what a Membership does -------------------------------------------------------------------

    def view(self) -> View:
        """The newest known members; empty until etcd has answered once."""
        return self._view

    def watch(self, on_change: Callable[[View], None]) -> Callable[[], None]:
        """Have `on_change` called with every new view; gives what ends that."""

        def listener(view: View) -> None:  # one of its own, so that the same function may be given twice
            on_change(view)

        with self._lock:
            self._listeners = (*self._listeners, listener)

        def remove() -> None:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

        return remove

    def join(self, me: Member) -> None:
        """Publish a member until `leave`; a second time, change it. See `Membership.join`."""
        self._registration.set(me)

    def leave(self) -> None:
        """Take the member out now, or have its lease run out where etcd does not answer."""
        self._registration.end()

    def close(self) -> None:
        """End both threads. Idempotent."""
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
                self._say_trouble(error)
            except Exception as error:  # noqa: BLE001 - nothing that etcd says may end the views of a node
                _log.exception("the watch of etcd's members begins anew after %r", error)
            pause = _FIRST_PAUSE_SECONDS if time.monotonic() - began > 5 else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._closed.wait(pause)

    def _follow(self) -> None:
        """Apply what etcd tells, until its stream ends or says that too much was missed."""
        request = {**prefix_range(self._prefix), "start_revision": str(self._revision + 1)}
        with self.gateway.stream("/v3/watch", {"create_request": request}) as stream:
            with self._lock:
                self._stream = stream
                if self._closed.is_set():
                    return
            try:
                self._apply_all(stream)
            finally:
                with self._lock:
                    self._stream = None

    def _apply_all(self, stream: EtcdStream) -> None:
        next_read = time.monotonic() + self._lease_seconds / 2
        while not self._closed.is_set():
            change = self._roster.next_change()
            answer = stream.next(max(0.0, min(next_read, change or next_read) - time.monotonic()))
            if self._closed.is_set():
                return
            if answer is not None:
                result = answer.get("result", {})
                if result.get("canceled"):
                    return  # what we asked for was compacted: all is read anew
                self._apply(result.get("events", []))
            if time.monotonic() >= next_read:
                self._check()
                next_read = time.monotonic() + self._lease_seconds / 2
            self._publish_view()

    def _check(self) -> None:
        """Read all again if the watch has missed something. A small question, whose answer is one key."""
        newest = {"limit": "1", "sort_order": "DESCEND", "sort_target": "MOD", "keys_only": True}
        answer = self.gateway.call("/v3/kv/range", {**prefix_range(self._prefix), **newest})
        revisions = [_number(pair.get("mod_revision")) for pair in answer.get("kvs", [])]
        with self._lock:
            same = _revision(answer) >= self._revision and _number(answer.get("count")) == self._keys
            if same and max(revisions, default=0) <= self._revision:
                self._hear()
                return
        self._read_all()

    def _hear(self) -> None:
        """etcd answers. The lock is held."""
        self._roster.answered(time.monotonic())
        if self._silent:
            self._silent = False
            _log.warning("etcd answers again")

    def _read_all(self) -> None:
        """What etcd has now. Raises `EtcdDownError`, `EtcdRefusedError`."""
        answer = self.gateway.call("/v3/kv/range", prefix_range(self._prefix))
        revision = _revision(answer)
        members = {}
        for pair in answer.get("kvs", []):
            member = self._member(pair)
            if member is not None:
                members[member.id] = member
        with self._lock:
            if revision < self._revision:
                _log.warning("etcd lost its data, or is another: members publish themselves again")
                self._roster.trouble()
                self._registration.forget()
            self._hear()
            self._roster.replace(members, time.monotonic())
            self._revision = revision
            self._keys = _number(answer.get("count"))
        self._publish_view()

    def _apply(self, events: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        for event in events:
            pair = event.get("kv", {})
            revision = _number(pair.get("mod_revision"))
            with self._lock:
                if revision <= self._revision:
                    continue  # a reading of everything was quicker
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
        """Tell the listeners where the view is another than before, and our own half where it is not in it."""
        with self._lock:
            view = View.of(self._roster.members(time.monotonic()))
            changed = view != self._view
            self._view = view
            listeners = self._listeners
            self._registration.seen(self._roster, self._revision)
        for listener in listeners if changed else ():
            try:
                listener(view)
            except Exception:  # noqa: BLE001 - a listener's fault, of any kind, must not end the watch
                _log.exception("a listener to the cluster's members failed")

    def _say_trouble(self, error: MillraceError) -> None:
        with self._lock:
            self._roster.trouble()
            first = not self._silent and not self._closed.is_set()
            self._silent = True
        if first:
            _log.warning("the members known last stay, until etcd answers again: %s", error)

    def _id_of(self, pair: dict[str, Any]) -> str:
        return decode(pair.get("key")).decode("utf-8", "replace").removeprefix(self._prefix)

    def _member(self, pair: dict[str, Any]) -> Member | None:
        """The member under a key; None where somebody put something else there."""
        try:
            value = json.loads(decode(pair.get("value")))
            if not isinstance(value, dict):
                raise DamagedError("no description of a member")
            member = Member.from_json(value)
            if member.id != self._id_of(pair):
                raise DamagedError(f"the member {member.id} under the key of another")
        except (ValueError, RecursionError, DamagedError) as error:
            _log.warning("etcd has something else below %s than members: %s", self._prefix, error)
            return None
        return member


class _Registration:
    """Our own half: the member that is published, and its lease."""

    def __init__(self, members: EtcdMembers) -> None:
        self.thread: threading.Thread | None = None
        self._members = members
        self._asking = threading.RLock()  # around every request of ours: they must not overtake each other
        self._me: Member | None = None
        self._published: Member | None = None
        self._published_at = 0  # etcd's revision
        self._lease: str | None = None
        self._woken = threading.Event()

    def set(self, me: Member) -> None:
        """See `Membership.join`."""
        with self._asking:
            before, self._me = self._me, me
            try:
                self._publish()
            except OriginUnavailableError as error:
                if before is None:
                    self._me = None
                    raise
                self._members._say_trouble(error)  # published when etcd is back
            except ConfigurationError:
                self._me = before
                raise
            if self.thread is None:
                self.thread = threading.Thread(target=self._keep_always, name="millrace-etcd-lease", daemon=True)
                self.thread.start()
        self.wake()

    def end(self) -> None:
        """See `Membership.leave`."""
        with self._asking:
            me, lease = self._me, self._lease
            self._me = self._published = self._lease = None
            if me is None or lease is None:
                return
            try:
                if me.state is not MemberState.LEAVING:
                    # Who is gone without a word might only be forgotten.
                    self._put(replace(me, state=MemberState.LEAVING), lease)
                self._call("/v3/lease/revoke", {"ID": lease})
            except MillraceError as error:
                _log.warning("etcd is not told that %s leaves, its lease runs out instead: %s", me.id, error)

    def wake(self) -> None:
        """Look again at what is to be done."""
        self._woken.set()

    def forget(self) -> None:
        """What was published is gone, and etcd counts anew."""
        self._published_at = 0

    def seen(self, roster: Roster, revision: int) -> None:
        """Publish again what etcd had and has no more."""
        published = self._published
        if published is not None and revision > self._published_at and not roster.says(published.id):
            self._published = None
            self.wake()

    def _keep_always(self) -> None:
        closed = self._members._closed
        lease_seconds = self._members._lease_seconds
        while not closed.is_set():
            pause = lease_seconds / 3
            try:
                with self._asking:
                    if self._me is not None and not closed.is_set():
                        self._renew()
                        self._publish()
            except MillraceError as error:
                self._members._say_trouble(error)
                pause = min(1.0, lease_seconds / 6)
            except Exception as error:  # noqa: BLE001 - a node that does not renew its lease any more is lost
                _log.exception("the lease of etcd is tried again after %r", error)
            # Not more often than that, whatever wakes us.
            closed.wait(min(_FIRST_PAUSE_SECONDS, pause))
            self._woken.wait(pause)
            self._woken.clear()

    def _renew(self) -> None:
        """Prolong the lease; without it, nothing is published."""
        if self._lease is not None:
            answer = self._call("/v3/lease/keepalive", {"ID": self._lease})
            if _number(answer.get("result", {}).get("TTL")) <= 0:
                self._lease = None

    def _publish(self) -> None:
        """Put the member where it is not, or not so, with a lease that lives."""
        if self._me is None or (self._lease is not None and self._published == self._me):
            return
        if self._lease is not None:
            try:
                self._put(self._me, self._lease)
                return
            except EtcdRefusedError as error:
                if error.status != NOT_FOUND:
                    raise
        self._lease = None
        answer = self._call("/v3/lease/grant", {"TTL": str(round(self._members._lease_seconds))})
        lease = str(answer.get("ID", ""))
        self._put(self._me, lease)
        self._lease = lease

    def _put(self, member: Member, lease: str) -> None:
        key = f"{self._members._prefix}{member.id}"
        body = {"key": encode(key), "value": encode(json.dumps(member.to_json())), "lease": lease}
        answer = self._call("/v3/kv/put", body)
        self._published_at = _revision(answer)
        self._published = member

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._members.gateway.call(path, body)


def _revision(answer: dict[str, Any]) -> int:
    return _number(answer.get("header", {}).get("revision"))


def _number(text: Any) -> int:
    """Of the gateway: 64-bit numbers are strings, and zeros are left out."""
    with contextlib.suppress(TypeError, ValueError):
        return int(text or 0)
    raise EtcdDownError(f"etcd's answer has {text!r} for a number")
