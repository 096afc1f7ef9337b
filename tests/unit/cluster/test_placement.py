"""Placement in a cluster: the order is stable, moves as little as possible, and follows the weights."""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.cluster.membership import Member, MemberState, View
from millrace.cluster.placement import STRIPE_BYTES, WHOLE_BYTES, Placement, stripe_count, stripe_of, stripe_span

_RANDOM = random.Random(7)
KEYS = [_RANDOM.randbytes(16) for _ in range(20_000)]


def member(name: object, weight: float = 1.0, state: MemberState = MemberState.HERE) -> Member:
    return Member(id=f"node-{name}", address="127.0.0.1:1", weight=weight, state=state)


def placement(*members: Member, replicas: int = 1) -> Placement:
    return Placement(View.of(members), replicas=replicas)


def names(members: tuple[Member, ...]) -> list[str]:
    return [each.id.removeprefix("node-") for each in members]


def owners(*members: Member) -> list[str]:
    order = placement(*members).order
    return [order(key)[0].id for key in KEYS]


def _even(number: int) -> float:
    return 1.0


def _uneven(number: int) -> float:
    return 1e11 * (1 + number % 7)


GOLDEN = [  # fixed: another order would empty every cache, and differ in a rolling upgrade
    (3, _even, b"\0" * 16, 0, "2 1 0"),
    (3, _even, bytes(range(16)), 0, "2 1 0"),
    (3, _even, bytes(range(16)), 3, "2 0 1"),
    (5, _uneven, b"\0" * 16, 0, "3 2 1 4 0"),
    (5, _uneven, bytes(range(16)), 0, "2 1 4 3 0"),
    (5, _uneven, bytes(range(16)), 3, "2 4 3 1 0"),
    (1000, _even, b"\0" * 16, 0, "368 188 685 16 246 969 941 955"),
    (1000, _even, bytes(range(16)), 3, "21 374 599 990 442 429 280 345"),
    (1000, _uneven, b"\0" * 16, 0, "368 188 685 16 650 782 397 969"),
    (1000, _uneven, bytes(range(16)), 0, "918 834 414 745 208 148 757 993"),
]


@pytest.mark.parametrize(("count", "weight", "key", "stripe", "expected"), GOLDEN)
def test_order_is_stable_over_versions(
    count: int, weight: Callable[[int], float], key: bytes, stripe: int, expected: str
) -> None:
    members = [member(number, weight(number)) for number in range(count)]
    assert " ".join(names(placement(*members).order(key, stripe))) == expected
    random.Random(1).shuffle(members)
    again = placement(*members)
    assert " ".join(names(again.order(key, stripe))) == expected
    assert " ".join(names(again.order(key, stripe))) == expected  # from its memory


def test_order_is_the_same_in_another_process() -> None:
    program = (
        "from millrace.cluster.membership import Member, View\n"
        "from millrace.cluster.placement import Placement\n"
        "view = View.of(Member(id=f'node-{n}', address='x:1', weight=1.0 + n) for n in range(50))\n"
        "print([member.id for n in range(200) for member in Placement(view).order(bytes([n]) * 16, n)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert "node-" in outputs.pop()


@pytest.mark.parametrize(
    ("offset", "size", "stripe", "span", "count"),
    [
        (0, 0, 0, (0, 0), 1),
        (5, 10, 0, (0, 10), 1),
        (WHOLE_BYTES - 1, WHOLE_BYTES, 0, (0, WHOLE_BYTES), 1),
        (0, WHOLE_BYTES + 1, 0, (0, STRIPE_BYTES), 5),
        (STRIPE_BYTES - 1, WHOLE_BYTES + 1, 0, (0, STRIPE_BYTES), 5),
        (STRIPE_BYTES, WHOLE_BYTES + 1, 1, (STRIPE_BYTES, 2 * STRIPE_BYTES), 5),
        (WHOLE_BYTES, WHOLE_BYTES + 1, 4, (WHOLE_BYTES, WHOLE_BYTES + 1), 5),
    ],
)
def test_stripes_cover_an_object(offset: int, size: int, stripe: int, span: tuple[int, int], count: int) -> None:
    assert stripe_of(offset, size) == stripe
    assert stripe_span(stripe, size) == span
    assert stripe_count(size) == count


HERE, JOINING, LEAVING = MemberState.HERE, MemberState.JOINING, MemberState.LEAVING


@pytest.mark.parametrize(
    ("states", "owning", "known"),
    [
        ({}, "", ""),
        ({"a": HERE}, "a", "a"),
        ({"a": JOINING}, "a", ""),
        ({"a": LEAVING}, "", "a"),
        ({"a": HERE, "b": JOINING}, "a", "a"),
        ({"a": JOINING, "b": JOINING}, "ab", ""),
        ({"a": JOINING, "b": LEAVING}, "a", "b"),
        ({"a": HERE, "b": LEAVING, "c": JOINING, "d": HERE}, "ad", "abd"),
    ],
)
def test_order_and_former_holders_follow_the_states(states: dict[str, MemberState], owning: str, known: str) -> None:
    one = placement(*(member(name, state=state) for name, state in states.items()))
    for key in KEYS[:50]:
        assert sorted(names(one.order(key))) == sorted(owning)
        assert sorted(names(one.former(key))) == sorted(known)
        assert one.holders(key) == one.order(key)[:1]


def test_former_holders_are_the_order_before_a_leave() -> None:
    members = [member(number) for number in range(6)]
    before = placement(*members)
    after = placement(*members[1:], member(0, state=LEAVING))
    for key in KEYS[:300]:
        assert after.former(key) == tuple(after.view.member(each.id) for each in before.order(key)[:4])
        assert names(after.order(key)) == [name for name in names(before.order(key)) if name != "0"]


def test_holders_are_the_first_members_of_the_order() -> None:
    one = placement(*(member(number) for number in range(20)), replicas=3)
    for key in KEYS[:100]:
        assert one.holders(key) == one.order(key)[:3]
        assert len(one.order(key)) == 8
        held = [each for each in one.view.members if one.is_holder(each.id, key)]
        assert sorted(names(one.holders(key))) == sorted(each.id.removeprefix("node-") for each in held)
    assert len(placement(*(member(number) for number in range(20)), replicas=12).holders(KEYS[0])) == 12


@pytest.mark.parametrize("weights", [[1, 1], [1, 1, 1, 1], [1, 2, 4], [5e11, 1e12], [1, 0.1]])
def test_shares_are_proportional_to_weights(weights: list[float]) -> None:
    counts = Counter(owners(*(member(number, weight) for number, weight in enumerate(weights))))
    for number, weight in enumerate(weights):
        assert counts[f"node-{number}"] / len(KEYS) == pytest.approx(weight / sum(weights), abs=0.015)


def test_stripes_of_one_object_have_different_owners() -> None:
    order = placement(*(member(number) for number in range(4))).order
    counts = Counter(order(KEYS[0], stripe)[0].id for stripe in range(4000))
    assert all(count == pytest.approx(1000, abs=100) for count in counts.values())
    assert len(counts) == 4


_WEIGHTS = st.lists(st.floats(0.01, 1e15), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(weights=_WEIGHTS, newcomer=st.floats(0.01, 1e15), keys=st.lists(st.binary(min_size=16, max_size=16), min_size=1))
def test_join_or_leave_moves_one_share_only(weights: list[float], newcomer: float, keys: list[bytes]) -> None:
    members = [member(number, weight) for number, weight in enumerate(weights)]
    without, with_it = placement(*members, replicas=16), placement(*members, member("new", newcomer), replicas=16)
    for key in keys:
        assert names(without.order(key)) == [name for name in names(with_it.order(key)) if name != "new"]


def test_joined_member_owns_its_share() -> None:
    members = [member(number, 1.0 + number % 2) for number in range(6)]
    before, after = owners(*members), owners(*members, member("new", 2.0))
    moved = {new for old, new in zip(before, after, strict=True) if old != new}
    assert moved == {"node-new"}
    assert sum(new == "node-new" for new in after) / len(KEYS) == pytest.approx(2 / 11, abs=0.015)


@pytest.mark.parametrize("count", [31, 32, 33, 40, 200])
def test_order_of_many_members_equals_a_full_sort(count: int) -> None:
    members = [member(number, 1.0 + number % 3) for number in range(count)]
    few, all_of_them = placement(*members), placement(*members, replicas=count)
    for key in KEYS[:200]:
        assert few.order(key) == all_of_them.order(key)[:8]


def test_order_cache_is_bounded_and_consistent() -> None:
    one = placement(member("a"), member("b"), member("c"))
    first = [one.order(key) for key in KEYS]
    assert [one.order(key) for key in KEYS] == first
