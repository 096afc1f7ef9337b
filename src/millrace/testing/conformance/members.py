"""What Millrace requires of a cluster's membership, as tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from millrace.cluster.membership import Member, Membership, MemberState, View, ViewSource


def eventually(condition: Callable[[], bool], *, seconds: float = 180.0) -> None:
    """Wait until the condition is true; fail after a long timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not true in time"
        time.sleep(0.01)


def wait_for(views: ViewSource, *members: Member) -> None:
    """Wait until the view has exactly these members."""
    eventually(lambda: views.view() == View.of(members))


Open = Callable[[], Membership]


class MembershipConformance:
    """The guarantees of any `Membership`. Subclass it with the fixture `connect`, which returns another `Membership`."""

    joinable: tuple[str, str, str] = ("127.0.0.1:7001", "127.0.0.1:7002", "[::1]:7003")
    """Addresses with which members join."""

    @pytest.fixture
    def connect(self) -> Open:
        raise NotImplementedError("give a `connect` fixture")

    @pytest.fixture
    def opened(self, connect: Open) -> Iterator[Open]:
        """Calls `connect`, and closes its results at the end."""
        memberships: list[Membership] = []

        def one_more() -> Membership:
            memberships.append(connect())
            return memberships[-1]

        yield one_more
        for membership in memberships:
            membership.leave()
            membership.close()

    @pytest.fixture
    def membership(self, opened: Open) -> Membership:
        return opened()

    def member(self, number: int, **fields: object) -> Member:
        """The member with the first, second or third address."""
        address = self.joinable[number]
        values: dict[str, object] = {"id": address, "address": address, **fields}
        return Member(**values)  # type: ignore[arg-type]

    # --- any membership ---------------------------------------------------------------------------

    def test_joined_member_is_in_all_views(self, membership: Membership, opened: Open) -> None:
        client = opened()
        me = self.member(0)
        membership.join(me)
        eventually(lambda: membership.view().member(me.id) == me)
        eventually(lambda: client.view().member(me.id) == me)

    def test_several_members_have_the_same_view(self, opened: Open) -> None:
        everybody = [opened() for _ in self.joinable]
        for number, each in enumerate(everybody):
            each.join(self.member(number))
        expected = [self.member(number) for number in range(len(self.joinable))]
        for each in everybody:
            wait_for(each, *expected)
        assert len({each.view().version for each in everybody}) == 1

    def test_second_join_with_same_state_changes_nothing(self, membership: Membership) -> None:
        membership.join(self.member(0))
        eventually(lambda: membership.view().member(self.joinable[0]) is not None)
        before = membership.view()
        membership.join(self.member(0))
        assert membership.view() == before

    def test_leave_and_close_twice_do_not_raise(self, membership: Membership) -> None:
        membership.leave()
        membership.join(self.member(0))
        membership.leave()
        membership.leave()
        membership.close()
        membership.close()
        membership.leave()

    def test_view_after_close_is_the_last_one(self, membership: Membership) -> None:
        membership.join(self.member(0))
        eventually(lambda: membership.view().member(self.joinable[0]) is not None)
        view = membership.view()
        membership.close()
        assert membership.view() == view

    def test_close_ends_all_threads(self, opened: Open) -> None:
        before = set(threading.enumerate())
        membership = opened()
        membership.join(self.member(0))
        membership.leave()
        membership.close()
        eventually(lambda: set(threading.enumerate()) <= before)

    def test_view_is_read_by_many_threads(self, membership: Membership) -> None:
        membership.join(self.member(0))
        eventually(lambda: membership.view().member(self.joinable[0]) is not None)
        views: list[View] = []
        threads = [threading.Thread(target=lambda: views.append(membership.view())) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert views == [membership.view()] * 16


class LivingMembershipConformance(MembershipConformance):
    """The further guarantees when members join, change and leave. The cluster of `connect` is empty at first."""

    @pytest.fixture
    def expire(self) -> Callable[[Membership], None]:
        """End a membership as if its process was killed, without `leave`."""
        return lambda dead: dead.close()

    def test_new_cluster_has_no_members(self, membership: Membership) -> None:
        assert membership.view() == View(())

    def test_late_member_has_all_members_in_its_view(self, membership: Membership, opened: Open) -> None:
        membership.join(self.member(0))
        late = opened()
        wait_for(late, self.member(0))

    def test_member_state_is_published_to_others(self, membership: Membership, opened: Open) -> None:
        me = Member(id="an id / with ünïcode", address="[::1]:1", weight=1.5e12, state=MemberState.JOINING, wire=7)
        membership.join(me)
        other = opened()
        wait_for(other, me)

    def test_changed_state_and_weight_are_published(self, membership: Membership, opened: Open) -> None:
        other = opened()
        me = self.member(0, state=MemberState.JOINING)
        for now in (
            me,
            replace(me, state=MemberState.HERE),
            replace(me, state=MemberState.HERE, weight=5e9),
            replace(me, state=MemberState.LEAVING, weight=5e9),
        ):
            membership.join(now)
            wait_for(other, now)
            wait_for(membership, now)

    def test_member_that_leaves_is_not_in_the_view(self, membership: Membership, opened: Open) -> None:
        other = opened()
        other.join(self.member(1))
        membership.join(self.member(0))
        wait_for(other, self.member(0), self.member(1))
        membership.leave()
        wait_for(other, self.member(1))
        wait_for(membership, self.member(1))
        other.leave()
        wait_for(membership)

    def test_member_that_left_joins_again(self, membership: Membership, opened: Open) -> None:
        other = opened()
        for weight in (1.0, 2.0):
            me = self.member(0, weight=weight)
            membership.join(me)
            wait_for(other, me)
            membership.leave()
            wait_for(other)

    def test_killed_member_is_removed_after_its_lease(
        self, membership: Membership, opened: Open, expire: Callable[[Membership], None]
    ) -> None:
        other = opened()
        other.join(self.member(1))
        membership.join(self.member(0))
        eventually(lambda: len(other.view().members) == 2)
        expire(membership)
        wait_for(other, self.member(1))

    def test_watch_receives_every_change(self, membership: Membership, opened: Open) -> None:
        other = opened()
        received: list[View] = []
        deaf: list[View] = []
        stop = other.watch(received.append)
        other.watch(deaf.append)()  # ended at once
        membership.join(self.member(0, state=MemberState.JOINING))
        eventually(lambda: len(received) == 1)
        membership.join(self.member(0))
        eventually(lambda: len(received) == 2)
        assert received[-1] == View.of([self.member(0)]) == other.view()
        stop()
        stop()
        membership.join(self.member(0, weight=2.0))
        wait_for(other, self.member(0, weight=2.0))
        assert (len(received), deaf) == (2, [])

    def test_listener_that_fails_does_not_affect_others(self, membership: Membership, opened: Open) -> None:
        other = opened()
        received: list[View] = []

        def fail(view: View) -> None:
            raise RuntimeError(f"a fault in a listener at {len(view.members)} members")

        other.watch(fail)
        other.watch(received.append)
        membership.join(self.member(0))
        eventually(lambda: len(received) == 1)
        membership.leave()
        wait_for(other)
