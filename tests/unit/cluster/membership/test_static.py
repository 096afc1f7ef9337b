"""Members listed in the configuration, and the states that they report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.cluster.membership import Member, MemberState, View
from millrace.cluster.membership.static import StaticMembers
from millrace.errors import ConfigurationError

ADDRESSES = ("127.0.0.1:7001", "127.0.0.1:7002")


def test_static_members_are_here_with_their_addresses_as_ids() -> None:
    members = StaticMembers.parse("static://b:2,a:1,[::1]:3")
    assert [(m.id, m.address, m.weight, m.state) for m in members.view().members] == [
        ("[::1]:3", "[::1]:3", 1.0, MemberState.HERE),
        ("a:1", "a:1", 1.0, MemberState.HERE),
        ("b:2", "b:2", 1.0, MemberState.HERE),
    ]


def test_static_members_in_another_order_or_repeated_are_equal() -> None:
    assert StaticMembers(["a:1", "b:2"]).view() == StaticMembers(["b:2", "a:1", "a:1"]).view()


def test_static_member_outside_the_list_cannot_join() -> None:
    members = StaticMembers(["a:1", "b:2"])
    members.join(Member(id="anything", address="b:2", state=MemberState.JOINING))
    with pytest.raises(ConfigurationError, match=r"c:3 is not among .* a:1, b:2"):
        members.join(Member(id="c:3", address="c:3"))
    assert members.view() == StaticMembers(["a:1", "b:2"]).view()


@pytest.mark.parametrize("text", ["etcd://a:1", "static://", "static://a", "static://a:1,,b:2", "a:1"])
def test_static_members_of_a_malformed_option_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        StaticMembers.parse(text)


def states(view: View) -> dict[str, str]:
    return {member.id: str(member.state) for member in view.members}


def test_static_member_that_leaves_and_returns_changes_the_view_twice() -> None:
    members = StaticMembers(ADDRESSES)
    seen: list[View] = []
    end = members.watch(seen.append)
    assert states(members.view()) == dict.fromkeys(ADDRESSES, "here")
    members.set_state(ADDRESSES[1], MemberState.LEAVING)
    members.set_state(ADDRESSES[1], MemberState.LEAVING)
    assert states(members.view()) == {ADDRESSES[0]: "here", ADDRESSES[1]: "leaving"}
    members.set_state(ADDRESSES[1], MemberState.HERE)
    assert [states(view)[ADDRESSES[1]] for view in seen] == ["leaving", "here"]
    end()
    members.set_state(ADDRESSES[1], MemberState.LEAVING)
    assert len(seen) == 2


def test_static_member_joining_reports_its_own_state() -> None:
    members = StaticMembers(ADDRESSES)
    me = Member(id=ADDRESSES[0], address=ADDRESSES[0], state=MemberState.JOINING)
    members.join(me)
    # The other nodes regard it as `here` from the start.
    assert states(members.view())[ADDRESSES[0]] == "here"
    members.join(replace(me, state=MemberState.LEAVING))
    assert states(members.view())[ADDRESSES[0]] == "leaving"
    members.leave()
    members.close()


def test_static_member_outside_the_list_has_no_state() -> None:
    members = StaticMembers(ADDRESSES)
    with pytest.raises(ConfigurationError, match="not among the cluster's members"):
        members.join(Member(id="127.0.0.1:9", address="127.0.0.1:9"))
    members.set_state("127.0.0.1:9", MemberState.LEAVING)
    assert states(members.view()) == dict.fromkeys(ADDRESSES, "here")
