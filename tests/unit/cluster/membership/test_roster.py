"""The members during and after an outage of the membership service."""

from millrace.cluster.membership import Member, MemberState
from millrace.cluster.membership.roster import Roster


def member(name: str, state: MemberState = MemberState.HERE) -> Member:
    return Member(id=name, address=f"{name}:1", state=state)


def ids(roster: Roster, now: float) -> list[str]:
    return sorted(each.id for each in roster.members(now))


def roster_of(*names: str) -> Roster:
    roster = Roster(lease_seconds=10)
    roster.responded(0)
    roster.replace({name: member(name) for name in names}, 0)
    return roster


def test_roster_without_outage_follows_the_service() -> None:
    roster = roster_of("a", "b", "c")
    roster.remove("a", 1)
    assert ids(roster, 1) == ["b", "c"]
    roster.replace({"c": member("c"), "d": member("d")}, 2)
    assert ids(roster, 2) == ["c", "d"]
    assert roster.next_change() is None


def test_roster_keeps_the_last_member_for_a_lease() -> None:
    roster = roster_of("a", "b")
    roster.remove("a", 1)
    roster.remove("b", 1)
    assert ids(roster, 10.9) == ["b"]
    assert roster.next_change() == 11
    assert ids(roster, 11) == []
    assert roster.next_change() is None


def test_roster_removes_the_last_member_when_it_leaves() -> None:
    roster = roster_of("a")
    roster.put(member("a", MemberState.LEAVING))
    roster.remove("a", 1)
    assert ids(roster, 1) == []


def test_roster_after_lost_data_keeps_members_for_a_lease() -> None:
    roster = roster_of("a", "b", "c")
    roster.outage()
    roster.responded(100)
    roster.replace({}, 100)
    assert ids(roster, 100) == ["a", "b", "c"]
    roster.put(member("b"))
    assert not roster.is_listed("a")
    assert roster.is_listed("b")
    assert ids(roster, 109) == ["a", "b", "c"]
    assert ids(roster, 110) == ["b"]


def test_roster_after_an_outage_keeps_expired_members_for_a_lease() -> None:
    roster = roster_of("a", "b", "c")
    roster.outage()
    roster.remove("a", 50)  # before any other response
    roster.responded(51)
    roster.remove("b", 52)
    assert ids(roster, 59) == ["a", "b", "c"]
    assert ids(roster, 60) == ["b", "c"]
    assert ids(roster, 62) == ["c"]
    roster.put(member("a"))
    roster.remove("a", 63)  # one lease after the outage, removals take effect again
    assert ids(roster, 63) == ["c"]


def test_roster_in_an_outage_removes_a_leaving_member_at_once() -> None:
    roster = roster_of("a", "b")
    roster.put(member("a", MemberState.LEAVING))
    roster.outage()
    roster.remove("a", 1)
    assert ids(roster, 1) == ["b"]


def test_roster_ignores_the_removal_of_an_unknown_member() -> None:
    roster = roster_of("a")
    roster.outage()
    roster.remove("z", 1)
    assert ids(roster, 1) == ["a"]
