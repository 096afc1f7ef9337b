"""Members whose states are told by themselves: what static members need to leave without harm."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from millrace.members.protocol import Member, Membership, MemberState, View


class ToldMembers:
    """A `Membership` over one that knows no states. Thread-safe.

    `tell` says what state a member is in from now on; that of the own node comes by `join`. Who passes it on between the
    nodes is another matter (`POST /v1/state`). Nothing is kept: a node that starts takes everybody for what `inner` says.
    """

    def __init__(self, inner: Membership) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._told: dict[str, MemberState] = {}
        self._watchers: dict[object, Callable[[View], None]] = {}
        self._view = inner.view()

    def view(self) -> View:
        return self._view

    def tell(self, member_id: str, state: MemberState) -> None:
        """Say in what state a member is."""
        with self._lock:
            self._told[member_id] = state
            members = self._inner.view().members
            view = View.of(replace(member, state=self._told.get(member.id, member.state)) for member in members)
            if view == self._view:
                return
            self._view = view
            watchers = list(self._watchers.values())
        for watcher in watchers:
            watcher(view)

    def watch(self, on_change: Callable[[View], None]) -> Callable[[], None]:
        """Have `on_change` called with every new view, in the thread that tells of it."""
        name = object()
        with self._lock:
            self._watchers[name] = on_change

        def end() -> None:
            with self._lock:
                self._watchers.pop(name, None)

        return end

    def join(self, me: Member) -> None:
        self._inner.join(me)
        # Nobody fills a member that was there all the time as far as the others know.
        self.tell(me.id, MemberState.LEAVING if me.state is MemberState.LEAVING else MemberState.HERE)

    def leave(self) -> None:
        self._inner.leave()

    def close(self) -> None:
        self._inner.close()
