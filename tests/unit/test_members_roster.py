"""Who is a member while the service comes and goes."""

from millrace.members import Member, MemberState
from millrace.members.roster import Roster


def member(name: str, state: MemberState = MemberState.HERE) -> Member:
    return Member(id=name, address=f"{name}:1", state=state)


def ids(roster: Roster, now: float) -> list[str]:
    return sorted(each.id for each in roster.members(now))


def roster_of(*names: str) -> Roster:
    roster = Roster(lease_seconds=10)
    roster.answered(0)
    roster.replace({name: member(name) for name in names}, 0)
    return roster


def test_a_service_without_trouble_is_believed() -> None:
    roster = roster_of("a", "b", "c")
    roster.remove("a", 1)
    assert ids(roster, 1) == ["b", "c"]
    roster.replace({"c": member("c"), "d": member("d")}, 2)
    assert ids(roster, 2) == ["c", "d"]
    assert roster.next_change() is None


def test_the_last_one_stays_for_a_lease() -> None:
    roster = roster_of("a", "b")
    roster.remove("a", 1)
    roster.remove("b", 1)
    assert ids(roster, 10.9) == ["b"]
    assert roster.next_change() == 11
    assert ids(roster, 11) == []
    assert roster.next_change() is None


def test_the_last_one_goes_when_it_says_so() -> None:
    roster = roster_of("a")
    roster.put(member("a", MemberState.LEAVING))
    roster.remove("a", 1)
    assert ids(roster, 1) == []


def test_a_wiped_service_loses_nobody_who_comes_back_within_a_lease() -> None:
    roster = roster_of("a", "b", "c")
    roster.trouble()
    roster.answered(100)
    roster.replace({}, 100)
    assert ids(roster, 100) == ["a", "b", "c"]
    roster.put(member("b"))
    assert not roster.says("a")
    assert roster.says("b")
    assert ids(roster, 109) == ["a", "b", "c"]
    assert ids(roster, 110) == ["b"]


def test_leases_that_ran_out_in_silence_do_not_count_at_once() -> None:
    roster = roster_of("a", "b", "c")
    roster.trouble()
    roster.remove("a", 50)  # before anything else is heard
    roster.answered(51)
    roster.remove("b", 52)
    assert ids(roster, 59) == ["a", "b", "c"]
    assert ids(roster, 60) == ["b", "c"]
    assert ids(roster, 62) == ["c"]
    roster.put(member("a"))
    roster.remove("a", 63)  # a lease after the trouble its word counts again
    assert ids(roster, 63) == ["c"]


def test_who_leaves_in_trouble_is_gone_at_once() -> None:
    roster = roster_of("a", "b")
    roster.put(member("a", MemberState.LEAVING))
    roster.trouble()
    roster.remove("a", 1)
    assert ids(roster, 1) == ["b"]


def test_who_was_never_there_is_not_missed() -> None:
    roster = roster_of("a")
    roster.trouble()
    roster.remove("z", 1)
    assert ids(roster, 1) == ["a"]
