"""Moves after membership changes, as plain values: the amount, the givers, and that nothing else moves."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from millrace.cluster.dataplane.wire import ObjectDescription
from millrace.cluster.inventory import as_seen
from millrace.cluster.membership import Member, MemberState, View
from millrace.cluster.moving import MoveReport, Rate, Run, runs_to_pull
from millrace.cluster.placement import WHOLE_BYTES, Placement, stripe_count, stripe_span
from millrace.store.records import BLOCK_BYTES, block_count, blocks_of

CLUSTERS = 50
Blocks = dict[ObjectDescription, set[int]]


def member(name: str, weight: float = 1.0, state: MemberState = MemberState.HERE) -> Member:
    return Member(id=name, address=f"{name}:1", weight=weight, state=state)


def objects(seed: int) -> list[ObjectDescription]:
    """Four hundred objects of one to three blocks, and one of nine stripes."""
    choice = random.Random(seed)
    sizes = [choice.randint(1, 3 * BLOCK_BYTES) for _ in range(400)]
    return [ObjectDescription("o", f"{seed}/{number}", "1", size) for number, size in enumerate(sizes)] + [
        ObjectDescription("o", f"{seed}/large", "1", 2 * WHOLE_BYTES + 1)
    ]


def blocks_in(what: ObjectDescription, stripes: list[int]) -> set[int]:
    return {block for stripe in stripes for block in blocks_of(*stripe_span(stripe, what.size), BLOCK_BYTES)}


def held(placement: Placement, name: str, every: list[ObjectDescription]) -> Blocks:
    """The share of a member if all members have their complete shares."""
    found = {what: blocks_in(what, placement.stripes_of(name, what.object_id(), what.size)) for what in every}
    return {what: blocks for what, blocks in found.items() if blocks}


def as_runs(blocks: set[int]) -> list[range]:
    return [range(block, block + 1) for block in sorted(blocks)]


def pulled(
    view: View, taker: str, holdings: Mapping[str, Blocks], *, replicas: int = 1, leaver: str | None = None
) -> Iterator[tuple[ObjectDescription, int, tuple[str, ...]]]:
    """Every block that `taker` brings, and its givers, as nodes agree on it in `view`."""
    placement = Placement(as_seen(view, taker, [leaver] if leaver else []), replicas=replicas)
    asked = [leaver] if leaver else [each.id for each in view.members if each.id != taker]
    offers: dict[ObjectDescription, dict[str, list[range]]] = {}
    for name in asked:
        for what, blocks in holdings.get(name, {}).items():
            offers.setdefault(what, {})[name] = as_runs(blocks)
    for what, offered in offers.items():
        mine = holdings.get(taker, {}).get(what, set())
        for run in runs_to_pull(what, offered, placement=placement, me=taker):
            yield from ((what, block, run.givers) for block in run.blocks if block not in mine)


def weights(seed: int, count: int) -> list[float]:
    choice = random.Random(seed)
    return [1.0] * count if seed % 2 else [choice.uniform(0.5, 2.0) for _ in range(count)]


def of_all(found: list[tuple[ObjectDescription, int, tuple[str, ...]]], every: list[ObjectDescription]) -> float:
    return len(found) / sum(block_count(what.size, BLOCK_BYTES) for what in every)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_join_moves_only_the_new_share(replicas: int) -> None:
    moved = ideal = 0.0
    for seed in range(CLUSTERS):
        every = objects(seed)
        count = 3 + seed % 6
        *old, newcomer = (member(f"{seed}-{n}", weight) for n, weight in enumerate(weights(seed, count + 1)))
        before = Placement(View.of(old), replicas=replicas)
        after = Placement(View.of([*old, newcomer]), replicas=replicas)
        joining = View.of([*old, replace(newcomer, state=MemberState.JOINING)])
        holdings = {each.id: held(before, each.id, every) for each in old}
        found = list(pulled(joining, newcomer.id, holdings, replicas=replicas))
        # Each block of its future share once, from the former holder.
        assert max(Counter((what, block) for what, block, _ in found).values()) == 1
        wanted = held(after, newcomer.id, every)
        assert {(what, block) for what, block, _ in found} == {(w, b) for w, blocks in wanted.items() for b in blocks}
        assert all(block in holdings[givers[0]][what] for what, block, givers in found)
        if replicas == 1:
            assert all(len(givers) == 1 for _, _, givers in found)
        # Surviving members pull nothing.
        for each in old if seed < 5 else []:
            assert not list(pulled(View.of([*old, newcomer]), each.id, holdings, replicas=replicas))
        moved += of_all(found, every)
        ideal += min(1.0, replicas * newcomer.weight / sum(each.weight for each in [*old, newcomer]))
    assert 0.85 * ideal <= moved <= 1.1 * ideal


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_leave_moves_only_the_leavers_share(replicas: int) -> None:
    moved = ideal = 0.0
    for seed in range(CLUSTERS):
        every = objects(seed)
        count = 4 + seed % 6
        leaver, *others = (member(f"{seed}-{n}", weight) for n, weight in enumerate(weights(seed, count)))
        before = Placement(View.of([leaver, *others]), replicas=replicas)
        leaving = View.of([replace(leaver, state=MemberState.LEAVING), *others])
        holdings = {each.id: held(before, each.id, every) for each in (leaver, *others)}
        found = [
            one for each in others for one in pulled(leaving, each.id, holdings, replicas=replicas, leaver=leaver.id)
        ]
        had = holdings[leaver.id]
        assert {(what, block) for what, block, _ in found} == {(w, b) for w, blocks in had.items() for b in blocks}
        assert {givers for _, _, givers in found} == {(leaver.id,)}
        # A member with the old view returns the same.
        same = [
            one
            for each in others
            for one in pulled(before.view, each.id, holdings, replicas=replicas, leaver=leaver.id)
        ]
        assert same == found
        moved += of_all(found, every)
        ideal += min(1.0, replicas * leaver.weight / sum(each.weight for each in [leaver, *others]))
    assert 0.85 * ideal <= moved <= 1.1 * ideal


def test_crash_with_replicas_leaves_a_giver_for_every_copy() -> None:
    for seed in range(CLUSTERS // 5):
        every = objects(seed)
        lost, *others = (member(f"{seed}-{n}", weight) for n, weight in enumerate(weights(seed, 5)))
        before = Placement(View.of([lost, *others]), replicas=2)
        after = View.of(others)
        holdings = {each.id: held(before, each.id, every) for each in others}
        found = [one for each in others for one in pulled(after, each.id, holdings, replicas=2)]
        had = held(before, lost.id, every)
        assert {(what, block) for what, block, _ in found} == {(w, b) for w, blocks in had.items() for b in blocks}
        assert max(Counter((what, block) for what, block, _ in found).values()) == 1


def test_runs_to_pull_prefer_the_former_holder() -> None:
    view = View.of([*map(member, "abcd"), member("new", state=MemberState.JOINING)])
    placement = Placement(as_seen(view, "new"))
    for what in objects(1)[:100]:
        owner = Placement(view).order(what.object_id())[0].id
        blocks = [range(block_count(what.size, BLOCK_BYTES))]
        for run in runs_to_pull(what, dict.fromkeys("abcd", blocks), placement=placement, me="new"):
            assert run.givers[0] == owner
            assert sorted(run.givers) == list("abcd")
        # A member outside of this view may have it as well.
        for run in runs_to_pull(what, {"a": blocks, "unknown": blocks}, placement=placement, me="new"):
            assert run.givers == ("a", "unknown")


def test_runs_to_pull_have_two_blocks_inside_one_stripe() -> None:
    placement = Placement(as_seen(View.of([member("a")]), "a"))
    what = ObjectDescription("o", "k", "1", 6 * BLOCK_BYTES)
    offers = {"x": [range(3)], "y": [range(2, 4), range(5, 6)]}
    assert runs_to_pull(what, offers, placement=placement, me="a") == [
        Run(range(2), ("x",)),
        Run(range(2, 3), ("x", "y")),
        Run(range(3, 4), ("y",)),
        Run(range(5, 6), ("y",)),
    ]
    large = ObjectDescription("o", "k", "1", 2 * WHOLE_BYTES)
    runs = runs_to_pull(large, {"x": [range(63, 66)]}, placement=placement, me="a")
    assert [run.blocks for run in runs] == [range(63, 64), range(64, 66)]
    assert stripe_count(large.size) > 1


def test_runs_to_pull_contain_offered_blocks_only() -> None:
    placement = Placement(as_seen(View.of([member("a")]), "a"))
    what = ObjectDescription("o", "k", "1", BLOCK_BYTES + 1)
    assert [run.blocks for run in runs_to_pull(what, {"x": [range(9)]}, placement=placement, me="a")] == [range(2)]
    assert runs_to_pull(replace(what, size=0), {"x": []}, placement=placement, me="a") == []


def test_rate_limits_all_moves_together() -> None:
    now = 100.0
    rate = Rate(10.0, clock=lambda: now)
    assert [rate.pause_before(20) for _ in range(3)] == [0.0, 2.0, 4.0]
    now = 103.0
    assert rate.pause_before(10) == 3.0
    now = 200.0
    assert rate.pause_before(10) == 0.0


@pytest.mark.parametrize(
    ("report", "complete"),
    [
        (MoveReport(moved_bytes=5), True),
        (MoveReport(skipped_bytes=1), False),
        (MoveReport(failed_bytes=1), False),
        (MoveReport(unread=("a",)), False),
        (MoveReport(stopped=True), False),
    ],
)
def test_move_report_without_leftovers_is_complete(report: MoveReport, complete: bool) -> None:
    assert report.complete is complete
