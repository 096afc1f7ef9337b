"""Members that are written down."""

import pytest

from millrace.errors import ConfigurationError
from millrace.members import Member, MemberState
from millrace.members.static import StaticMembers


def test_everyone_in_the_list_is_here_with_its_address_as_id() -> None:
    members = StaticMembers.parse("static://b:2,a:1,[::1]:3")
    assert [(m.id, m.address, m.weight, m.state) for m in members.view().members] == [
        ("[::1]:3", "[::1]:3", 1.0, MemberState.HERE),
        ("a:1", "a:1", 1.0, MemberState.HERE),
        ("b:2", "b:2", 1.0, MemberState.HERE),
    ]


def test_the_order_and_repetition_do_not_matter() -> None:
    assert StaticMembers(["a:1", "b:2"]).view() == StaticMembers(["b:2", "a:1", "a:1"]).view()


def test_who_is_not_in_the_list_does_not_join() -> None:
    members = StaticMembers(["a:1", "b:2"])
    members.join(Member(id="anything", address="b:2", state=MemberState.JOINING))
    with pytest.raises(ConfigurationError, match=r"c:3 is not among .* a:1, b:2"):
        members.join(Member(id="c:3", address="c:3"))
    assert members.view() == StaticMembers(["a:1", "b:2"]).view()


@pytest.mark.parametrize("text", ["etcd://a:1", "static://", "static://a", "static://a:1,,b:2", "a:1"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        StaticMembers.parse(text)
