"""Eviction: the decision as tables, and its hit ratio over traces, compared with the optimum and other policies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.eviction_simulation import (
    POLICIES,
    Belady,
    LeastRecentlyUsed,
    Millrace,
    NeverEvict,
    S3Fifo,
    Sieve,
    simulate,
    simulate_in_pieces,
)
from tests.support.eviction_traces import (
    Trace,
    drifting_zipf,
    epochs,
    mixed_epochs,
    new_data_set,
    new_subset,
    scan_over_hot_set,
    training_and_validation,
    two_jobs,
    zipf,
)

from millrace.cache.eviction.keep_policy import (
    aged,
    choose,
    continues,
    group_touched,
    is_dead,
    least_promising,
    recency_pays,
    touched,
)
from millrace.cache.eviction.policy import Group, Unit

CAPACITY = 6400
NOW = 1_000_000
TRAIN = Group(last=NOW, bytes=2 * CAPACITY, units=100, gap=2.0 * CAPACITY)


def unit(name: str = "v", *, idle: int = 1000, uses: float = 1.0, group: int = 0, **more: object) -> Unit:
    return Unit(key=name.encode(), nbytes=25, group=group, last=NOW - idle, uses=uses)._replace(**more)


def chosen(
    sample: list[Unit], candidate: Unit | None, groups: dict[int, Group] | None = None, **more: object
) -> str | None:
    victim = choose(sample, candidate, groups or {0: TRAIN}, clock=NOW, capacity_bytes=CAPACITY, **more)  # type: ignore[arg-type]
    return None if victim is None else victim.key.decode()


# --- records ----------------------------------------------------------------------------------------


def test_use_counts_and_updates_the_gap() -> None:
    once = touched(unit(idle=3000), clock=NOW, capacity_bytes=CAPACITY)
    assert (once.last, once.gap) == (NOW, 3000)
    assert once.uses == pytest.approx(2, abs=0.1)
    twice = touched(once, clock=NOW + 1000, capacity_bytes=CAPACITY)
    assert twice.gap == 2000
    assert 2.7 < twice.uses < 3


def test_reads_that_follow_closely_are_one_use() -> None:
    before = unit(idle=CAPACITY // 64 - 1, uses=3.0, gap=500)
    after = touched(before, clock=NOW, capacity_bytes=CAPACITY)
    assert (after.uses, after.gap, after.last) == (3.0, 500, NOW)
    assert continues(before, NOW, CAPACITY)
    assert not continues(before, NOW + 1, CAPACITY)
    large = before._replace(nbytes=CAPACITY // 40)
    assert continues(large, NOW + CAPACITY // 12, CAPACITY)  # several readers take turns
    assert not continues(large, NOW + CAPACITY // 9, CAPACITY)
    assert not continues(large._replace(nbytes=CAPACITY), NOW + CAPACITY // 4, CAPACITY)
    assert touched(after, clock=NOW - 50, capacity_bytes=CAPACITY) == after  # a record that is written late


def test_uses_decay_with_traffic() -> None:
    assert aged(unit(idle=8 * CAPACITY, uses=4.0), clock=NOW, capacity_bytes=CAPACITY) == pytest.approx(2)
    assert aged(unit(idle=-5, uses=4.0), clock=NOW, capacity_bytes=CAPACITY) == 4


def test_group_averages_are_weighted_by_bytes() -> None:
    group = Group(last=NOW - 10, bytes=CAPACITY, units=64)

    def after(nbytes: int, idle: int, hit: bool) -> Group:
        return group_touched(group, clock=NOW, nbytes=nbytes, capacity_bytes=CAPACITY, before=unit(idle=idle), hit=hit)

    hit = after(1280, 1000, True)
    assert (hit.hits, hit.recent) == (pytest.approx(0.1), pytest.approx(0.1))
    assert after(12800, 1000, True).hits == 1
    missed = after(1280, CAPACITY, False)
    assert (missed.hits, missed.recent) == (0, 0)
    assert 0 < hit.gap < 2 * CAPACITY < after(1280, 3 * CAPACITY, True).gap
    in_a_run = after(1280, 10, True)
    assert (in_a_run.hits, in_a_run.recent, in_a_run.gap, in_a_run.last) == (0, 0, 0, NOW)
    first = group_touched(group, clock=NOW, nbytes=100, capacity_bytes=CAPACITY, before=None, hit=False)
    assert first.gap == 0


def test_longest_pause_of_a_group_fades_slowly() -> None:
    group = group_touched(
        Group(last=NOW - 5000), clock=NOW, nbytes=100, capacity_bytes=CAPACITY, before=None, hit=False
    )
    assert group.longest_gap == 5000
    for step in range(1, 20 * CAPACITY // 100):
        group = group_touched(
            group, clock=NOW + 100 * step, nbytes=100, capacity_bytes=CAPACITY, before=None, hit=False
        )
        assert step > CAPACITY // 100 or group.longest_gap > 4000
    assert group.longest_gap < 1000


@pytest.mark.parametrize(
    ("idle", "gap", "group", "dead"),
    [
        (int(2.9 * CAPACITY), 0, TRAIN, False),  # a shuffled loop leaves up to two epochs between two uses
        (int(3.1 * CAPACITY), 0, TRAIN, True),
        (int(3.1 * CAPACITY), 2 * CAPACITY, TRAIN, False),  # this one is used less often than most
        (100 * CAPACITY, 0, TRAIN._replace(gap=0.0), False),  # the first epoch: nothing is known yet
        (1000, 0, TRAIN._replace(last=NOW - CAPACITY // 4 - 1), True),  # the data set is no longer used
        (1000, 0, TRAIN._replace(last=NOW - CAPACITY // 4), False),
        (1000, 0, TRAIN._replace(last=NOW - CAPACITY // 2, longest_gap=CAPACITY // 4), False),  # it does pause
        (1000, 0, TRAIN._replace(last=NOW - CAPACITY // 2 - 1, longest_gap=CAPACITY // 4), True),
        (1000, 0, TRAIN._replace(last=NOW - CAPACITY, units=3), False),  # a lone object is always idle but once
    ],
)
def test_unit_idle_beyond_its_limits_is_dead(idle: int, gap: int, group: Group, dead: bool) -> None:
    assert is_dead(unit(idle=idle, gap=gap), group, clock=NOW, capacity_bytes=CAPACITY) is dead


def test_recency_pays_only_where_it_beats_the_share_that_fits() -> None:
    assert not recency_pays(TRAIN._replace(recent=0.5), CAPACITY)
    assert not recency_pays(TRAIN._replace(recent=0.54), CAPACITY)  # a tie, nearly
    assert recency_pays(TRAIN._replace(recent=0.6), CAPACITY)
    assert not recency_pays(Group(last=NOW, bytes=CAPACITY, recent=1.0), CAPACITY)  # all of it fits


# --- the decision -----------------------------------------------------------------------------------


def test_candidate_of_equal_value_is_not_admitted() -> None:
    residents = [unit(uses=3.0, idle=idle) for idle in (200, 4000, 12000)]
    assert chosen(residents, unit("n", uses=4.0, idle=0)) is None
    assert chosen([], unit("n", uses=100.0, idle=0)) is None


def test_candidate_with_more_uses_replaces_the_least_used() -> None:
    residents = [unit("two", uses=2.0), unit("one", uses=1.0), unit("three", uses=3.0)]
    assert chosen(residents, unit("n", uses=4.0, idle=0)) == "one"
    assert chosen(residents, unit("n", uses=3.5, idle=0)) is None


def test_dead_unit_is_evicted_for_any_candidate() -> None:
    groups = {0: TRAIN, 1: TRAIN._replace(last=NOW - CAPACITY)}
    residents = [unit("alive", uses=1.0), unit("dead", uses=40.0, group=1)]
    assert chosen(residents, unit("n", idle=0), groups) == "dead"


def test_unit_in_a_run_of_reads_is_not_evicted() -> None:
    reading = unit("reading", idle=5)
    assert chosen([reading], unit("n", uses=50.0, idle=0)) is None
    assert chosen([reading, unit("idle")], unit("n", uses=50.0, idle=0)) == "idle"


def test_group_with_recency_evicts_least_used_or_longest_idle() -> None:
    residents = [unit("old", uses=4.0, idle=9000), unit("rare", uses=1.0, idle=500), unit("other", group=1)]
    well = {0: TRAIN._replace(recent=0.7, hits=0.9), 1: TRAIN._replace(gap=0.0)}
    assert chosen(residents, unit("n", uses=2.0, idle=0), well) == "rare"
    assert chosen(residents, unit("n", uses=1.2, idle=0), well) is None
    badly = {0: TRAIN._replace(recent=0.7, hits=0.7), 1: TRAIN._replace(gap=0.0)}
    assert chosen(residents, unit("n", idle=0), badly) == "old"
    # Units of another data set are not evicted for that.
    assert chosen(residents[2:], unit("n", uses=2.0, idle=0), badly) is None


def test_expired_units_are_evicted_before_units_over_quota() -> None:
    groups = {0: TRAIN, 1: TRAIN._replace(last=NOW - CAPACITY)}
    dead, greedy, expired = (
        unit("dead", group=1),
        unit("greedy", prefix=7, uses=9.0),
        unit("expired", expired=True, uses=9.0),
    )
    candidate = unit("n", idle=0)
    assert chosen([dead, greedy, expired], candidate, groups, over_quota={7}) == "expired"
    assert chosen([dead, greedy], candidate, groups, over_quota={7}) == "greedy"
    assert chosen([dead, greedy], candidate, groups) == "dead"


def test_copies_are_evicted_first_for_any_candidate() -> None:
    groups = {0: TRAIN, 1: TRAIN._replace(last=NOW - CAPACITY)}
    copy = unit("copy", copy=True, uses=9.0, idle=0)
    dead, greedy = unit("dead", group=1), unit("greedy", prefix=7)
    expired = unit("expired", expired=True)
    candidate = unit("n", idle=0)
    assert chosen([dead, greedy, expired, copy], candidate, groups, over_quota={7}) == "copy"
    assert chosen([dead, greedy, expired, copy], None, groups, over_quota={7}) == "copy"
    assert chosen([copy, unit("rare", copy=True, uses=1.0)], candidate) == "rare"
    # But for one over its quota only copies of its own prefix do.
    greedy_one = unit("n", prefix=7, idle=0)
    assert chosen([copy, unit("own", prefix=7)], greedy_one, over_quota={7}) is None
    own_copy = unit("own", prefix=7, copy=True)
    assert chosen([copy, own_copy], greedy_one, over_quota={7}) == "own"


def test_candidate_over_quota_replaces_only_its_prefix() -> None:
    groups = {0: TRAIN, 1: TRAIN._replace(last=NOW - CAPACITY)}
    dead, own = unit("dead", group=1), unit("own", prefix=7)
    assert chosen([dead, own], unit("n", prefix=7, idle=0), groups, over_quota={7}) is None
    assert chosen([dead, own], unit("n", prefix=7, idle=0, uses=5.0), groups, over_quota={7}) == "own"
    assert chosen([dead], unit("n", prefix=7, idle=0, uses=5.0), groups, over_quota={7}) is None


def test_choose_without_candidate_always_evicts() -> None:
    groups = {0: TRAIN, 1: TRAIN._replace(last=NOW - 50), 2: TRAIN._replace(last=NOW - CAPACITY)}
    assert chosen([], None) is None
    assert chosen([unit("reading", idle=0, uses=50.0)], None) == "reading"
    assert chosen([unit("often", uses=8.0), unit("rare", uses=1.0)], None) == "rare"
    assert chosen([unit("rare", uses=1.0), unit("dead", uses=8.0, group=2)], None, groups) == "dead"
    # Equal data sets are evicted one after the other, not a part of each.
    equals = [unit("a", uses=3.0), unit("b", uses=3.2, group=1), unit("c", uses=3.1, idle=5000)]
    assert chosen(equals, None, groups) == "b"


def test_least_promising_returns_ghost_with_fewest_uses() -> None:
    ghosts = [unit("a", uses=2.0), unit("b", uses=1.0, idle=2000), unit("c", uses=1.0)]
    assert least_promising(ghosts, clock=NOW, capacity_bytes=CAPACITY).key == b"b"
    with pytest.raises(ValueError, match="empty"):
        least_promising([], clock=NOW, capacity_bytes=CAPACITY)


# --- the test bench itself ---------------------------------------------------------------------------


def tiny(accesses: str, room: int) -> Trace:
    numbers = [ord(letter) - ord("a") for letter in accesses]
    count = max(numbers) + 1
    return Trace(
        name=accesses,
        accesses=numbers,
        nbytes=[1] * count,
        groups=[0] * count,
        capacity_bytes=room,
        measured_from=0,
    )


@pytest.mark.parametrize(
    ("policy", "accesses", "room", "hits"),
    [
        (Belady, "abcabcabc", 2, 4),
        (Belady, "abacab", 2, 3),
        (NeverEvict, "abcabcabc", 2, 4),
        (LeastRecentlyUsed, "abcabcabc", 2, 0),
        (LeastRecentlyUsed, "abacab", 2, 2),
        (Sieve, "abacab", 2, 2),  # a is marked and survives c, which takes b's place
        (Sieve, "abcabcabc", 3, 6),
        (S3Fifo, "abcabcabc", 3, 6),
        (S3Fifo, "aabaca", 2, 3),
    ],
)
def test_peer_policies_match_results_by_hand(policy: type, accesses: str, room: int, hits: int) -> None:
    assert simulate(policy, tiny(accesses, room)) * len(accesses) == pytest.approx(hits)


def test_policies_stay_within_the_optimum_and_the_capacity() -> None:
    trace = zipf(0.8, units=30)
    best = simulate(Belady, trace)
    for name, policy in POLICIES.items():
        assert simulate(policy, trace) <= best, name
    whole = replace(trace, capacity_bytes=sum(trace.nbytes))
    assert len({simulate(policy, whole) for policy in POLICIES.values()}) == 1


# --- over traces -------------------------------------------------------------------------------------

UNITS = 200
SKEWED = 100  # these need longer traces


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("ratio", [1.25, 2, 4])
def test_policy_with_looping_access_reaches_the_optimum(ratio: float, shuffled: bool) -> None:
    assert simulate(Millrace, epochs(ratio, shuffled=shuffled, units=UNITS)) >= 0.99 / ratio


@pytest.mark.parametrize(
    ("trace", "optimum"),
    [
        (epochs(10, shuffled=True, count=4, units=UNITS), 0.1),  # more than the ghosts remember
        (epochs(2, shuffled=True, units=UNITS, lone=True), 0.5),  # without a known data set
        (epochs(2, shuffled=True, units=20, count=20), 0.5),  # few and large units
        (mixed_epochs(2, units=UNITS), 0.5),
        (training_and_validation(units=UNITS), 0.4),
        (two_jobs(lag=0.5, units=UNITS), 0.5),
    ],
    ids=lambda value: value.name if isinstance(value, Trace) else "",
)
def test_policy_with_other_loops_nearly_reaches_the_optimum(trace: Trace, optimum: float) -> None:
    assert simulate(Millrace, trace) >= 0.95 * optimum


@pytest.mark.parametrize("units", [25, 50])
def test_policy_with_loops_over_partial_units_nearly_reaches_the_optimum(units: int) -> None:
    assert simulate_in_pieces(epochs(2, units=units)) >= 0.95 * 0.5
    assert simulate_in_pieces(epochs(1.25, shuffled=True, units=units)) >= 0.95 * 0.8
    assert simulate_in_pieces(new_data_set(2, units=units)) >= 0.95 * 0.5
    assert simulate_in_pieces(training_and_validation(units=units)) >= 0.95 * 0.4


@pytest.mark.parametrize(
    "trace",
    [zipf(0.8, units=SKEWED), zipf(1.1, units=SKEWED), zipf(0.8, mixed=True, units=UNITS)],
    ids=lambda trace: trace.name,
)
def test_policy_with_skewed_access_hits_as_often_as_the_best_peer(trace: Trace) -> None:
    best = max(simulate(policy, trace) for policy in (LeastRecentlyUsed, Sieve, S3Fifo))
    assert simulate(Millrace, trace) >= best - 0.01


@pytest.mark.parametrize(
    "trace",
    [
        drifting_zipf(1.1, lifetime=3, units=SKEWED),
        drifting_zipf(1.1, lifetime=10, units=SKEWED),
        drifting_zipf(1.1, lifetime=30, units=SKEWED),
        drifting_zipf(0.8, lifetime=10, units=SKEWED),
    ],
    ids=lambda trace: trace.name,
)
def test_policy_with_drifting_access_hits_nearly_as_often_as_the_best_peer(trace: Trace) -> None:
    best = max(simulate(policy, trace) for policy in (LeastRecentlyUsed, Sieve, S3Fifo))
    assert simulate(Millrace, trace) >= best - 0.02


def test_new_data_set_fills_the_cache_after_one_epoch() -> None:
    assert simulate(Millrace, new_data_set(2, units=UNITS)) >= 0.95 * 0.5
    assert simulate(Millrace, new_data_set(1, units=UNITS)) >= 0.75  # accesses before the change was certain miss once
    assert simulate(Millrace, new_subset(units=UNITS)) >= 0.9


def test_scan_keeps_the_hot_set() -> None:
    trace = scan_over_hot_set(units=UNITS)
    undisturbed = simulate(NeverEvict, trace)
    assert simulate(Millrace, trace) >= 0.95 * undisturbed
    assert simulate(LeastRecentlyUsed, trace) < 0.9 * undisturbed


def test_candidate_larger_than_evictable_bytes_evicts_nothing() -> None:
    # Beyond a quarter of the cache it would look like a change of data set.
    loop = epochs(1, count=4, units=UNITS)
    huge = max(loop.accesses) + 1
    accesses = [*loop.accesses[: 3 * UNITS], huge, *loop.accesses[3 * UNITS :]]
    trace = replace(
        loop,
        accesses=accesses,
        nbytes=[*loop.nbytes, loop.capacity_bytes // 5],
        groups=[*loop.groups, 1],
        measured_from=3 * UNITS + 1,
    )
    assert simulate(Millrace, trace) == 1


def test_shrunk_cache_keeps_the_data_set_in_use() -> None:
    half = UNITS // 2
    trace = new_data_set(0.5, units=UNITS)
    cache = Millrace(trace)
    for accessed in trace.accesses[: 7 * half]:
        cache.access(accessed)
    held = cache.resident_bytes(1)
    assert cache.resident_bytes(0) + held == trace.capacity_bytes
    cache.resize(trace.capacity_bytes // 2)
    assert cache.resident_bytes(1) >= 0.95 * held  # drawn at random, but from many
    cache.resize(trace.capacity_bytes // 4)
    assert 0 < cache.resident_bytes(1) <= trace.capacity_bytes // 4
