"""Static members that say by themselves that they leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.errors import ConfigurationError
from millrace.members import Member, MemberState, View
from millrace.members.static import StaticMembers
from millrace.members.told import ToldMembers

ADDRESSES = ("127.0.0.1:7001", "127.0.0.1:7002")


def states(view: View) -> dict[str, str]:
    return {member.id: str(member.state) for member in view.members}


def test_a_member_that_leaves_and_comes_back() -> None:
    members = ToldMembers(StaticMembers(ADDRESSES))
    seen: list[View] = []
    end = members.watch(seen.append)
    assert states(members.view()) == dict.fromkeys(ADDRESSES, "here")
    members.tell(ADDRESSES[1], MemberState.LEAVING)
    members.tell(ADDRESSES[1], MemberState.LEAVING)
    assert states(members.view()) == {ADDRESSES[0]: "here", ADDRESSES[1]: "leaving"}
    members.tell(ADDRESSES[1], MemberState.HERE)
    assert [states(view)[ADDRESSES[1]] for view in seen] == ["leaving", "here"]
    end()
    members.tell(ADDRESSES[1], MemberState.LEAVING)
    assert len(seen) == 2


def test_the_own_node_says_so_by_joining() -> None:
    members = ToldMembers(StaticMembers(ADDRESSES))
    me = Member(id=ADDRESSES[0], address=ADDRESSES[0], state=MemberState.JOINING)
    members.join(me)
    # The others have it for a member that is here from the start.
    assert states(members.view())[ADDRESSES[0]] == "here"
    members.join(replace(me, state=MemberState.LEAVING))
    assert states(members.view())[ADDRESSES[0]] == "leaving"
    members.leave()
    members.close()


def test_who_is_not_in_the_list_cannot_join_nor_be_told_of() -> None:
    members = ToldMembers(StaticMembers(ADDRESSES))
    with pytest.raises(ConfigurationError, match="not among the cluster's members"):
        members.join(Member(id="127.0.0.1:9", address="127.0.0.1:9"))
    members.tell("127.0.0.1:9", MemberState.LEAVING)
    assert states(members.view()) == dict.fromkeys(ADDRESSES, "here")
