"""Members listed in the configuration: `static://host:port,host:port`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from millrace.cluster.membership.protocol import Member, MemberState, View, Watchers
from millrace.config import address_text, parse_addresses
from millrace.errors import ConfigurationError

SCHEME = "static://"


class StaticMembers:
    """A `Membership` of fixed members, each with weight 1 and its address as id. Thread-safe, without threads.

    Without a service it does not detect whether a member runs; breakers skip members that do not respond. All are
    `here` until they report another state (`set_state`). The nodes send each other these states (`POST /v1/state`). They
    are not stored: a node that starts regards all others as `here`.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        """`addresses` are `host:port`. Raises `ConfigurationError`."""
        pairs = parse_addresses(",".join(addresses), option=SCHEME)
        self._listed = [Member(id=address, address=address) for address in (address_text(*pair) for pair in pairs)]
        self._states: dict[str, MemberState] = {}
        self._view = View.of(self._listed)
        self._lock = threading.Lock()
        self._watchers = Watchers()

    @classmethod
    def parse(cls, members: str) -> StaticMembers:
        """From the option `members`. Raises `ConfigurationError`."""
        if not members.startswith(SCHEME):
            raise ConfigurationError(
                f"members={members!r} is not a list of members", next_step=f"write {SCHEME}host:port"
            )
        return cls(members.removeprefix(SCHEME).split(","))

    def view(self) -> View:
        return self._view

    def watch(self, on_change: Callable[[View], None]) -> Callable[[], None]:
        """Calls `on_change` in the thread that reports a state."""
        return self._watchers.add(on_change)

    def join(self, me: Member) -> None:
        """Checks that the list contains this address, and sets the member's own state; there is no state `joining`.

        Raises `ConfigurationError` for another address.
        """
        addresses = [member.address for member in self._view.members]
        if me.address not in addresses:
            raise ConfigurationError(
                f"{me.address} is not among the cluster's members {', '.join(addresses)}",
                next_step="serve one of these addresses, or name this one in 'members' on every node",
            )
        self.set_state(me.id, MemberState.LEAVING if me.state is MemberState.LEAVING else MemberState.HERE)

    def set_state(self, member_id: str, state: MemberState) -> None:
        """Set the state that a member reported. Ignores members that are not in the list."""
        with self._lock:
            self._states[member_id] = state
            view = View.of(replace(member, state=self._states.get(member.id, member.state)) for member in self._listed)
            if view == self._view:
                return
            self._view = view
        self._watchers.notify(view)

    def leave(self) -> None:
        """Does nothing: breakers of the other members skip this one."""

    def absences(self) -> int:
        """0: the list does not change."""
        return 0

    def close(self) -> None:
        """Does nothing."""
