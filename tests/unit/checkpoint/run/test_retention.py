"""The checkpoints that policies keep, their text, and the files that stay."""

from __future__ import annotations

import functools
import math
from datetime import timedelta

import pytest

from millrace.checkpoint.run.prune_plan import plan_pruning
from millrace.checkpoint.run.retention import (
    AnyOf,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepNewerThan,
    Policy,
    as_policy,
    parse_policy,
)
from millrace.checkpoint.run.run_info import CheckpointInfo
from millrace.checkpoint.run.run_layout import checkpoint_name
from millrace.errors import ConfigurationError

NOW = 1e9
# The selection of the policy, without the independent checkpoint.
exact_plan = functools.partial(plan_pruning, independent=False)


def info(step: int, revision: int = 0, *, age: float = 0.0, **fields) -> CheckpointInfo:
    name = checkpoint_name(step, revision)
    given = {
        "name": name, "url": name, "step": step, "revision": revision, "complete": True, "created": NOW - age,
        "raw_bytes": 1, "stored_bytes": 1, "restore_bytes": 1, "kind": "full", "published": NOW - age,
        "files": frozenset({f"data-{step}-{revision}.millrace"}),
    }  # fmt: skip
    return CheckpointInfo(**{**given, **fields})


def steps(policy: Policy, checkpoints: list[CheckpointInfo]) -> list[str]:
    kept = policy.keep(checkpoints, now=NOW)
    short = {each.name: f"{each.step}" + (f"r{each.revision}" if each.revision else "") for each in checkpoints}
    return [short[each.name] for each in checkpoints if each.name in kept]


RUN = [info(step) for step in (10, 20, 30, 40)]
# Restored at 20, and 30 was saved again.
REWOUND = [info(10), info(20), info(30, superseded=True), info(30, 1), info(40)]


@pytest.mark.parametrize(
    ("policy", "checkpoints", "kept"),
    [
        (KeepLast(1), RUN, ["40"]),
        (KeepLast(3), RUN, ["20", "30", "40"]),
        (KeepLast(9), RUN, ["10", "20", "30", "40"]),
        (KeepLast(1), REWOUND, ["30r1"]),
        (KeepLast(2), REWOUND, ["30r1", "40"]),
        (KeepLast(4), REWOUND, ["20", "30", "30r1", "40"]),
        (KeepEvery(20), RUN, ["20", "40"]),
        (KeepEvery(7), RUN, []),
        (KeepEvery(30), REWOUND, ["30r1"]),
        (KeepEvery(10), [info(0), *RUN], ["0", "10", "20", "30", "40"]),
        (KeepAll(), REWOUND, ["10", "20", "30", "30r1", "40"]),
        (KeepLast(1) | KeepEvery(20), RUN, ["20", "40"]),
        (KeepLast(3), [], []),
        (KeepBest("loss"), [], []),
        (KeepBest("loss", 2), RUN, ["30", "40"]),
        (KeepBest("loss", 2), [info(10), info(20, metrics={"loss": 1.0}), info(30)], ["20"]),
        (KeepBest("loss", 2), [info(10), info(20, metrics={"loss": math.nan}), info(30)], ["20", "30"]),
    ],
)
def test_policies_keep_their_selection(policy, checkpoints, kept):
    assert steps(policy, checkpoints) == kept


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepBest("loss"), ["20"]),
        (KeepBest("loss", 2), ["20", "50"]),
        (KeepBest("loss", 2, "max"), ["10", "40"]),
        (KeepBest("loss", 9), ["10", "20", "40", "50"]),
        (KeepBest("other"), ["60"]),
        (KeepBest("other", 3), ["40", "50", "60"]),
    ],
)
def test_best_policy_keeps_the_best_checkpoints(policy, kept):
    losses = {
        10: {"loss": 3.0},
        20: {"loss": -math.inf},
        30: {"loss": math.nan},
        40: {"loss": 2.0},
        50: {"loss": 1},
        60: {},
    }
    assert steps(policy, [info(step, metrics=metrics) for step, metrics in losses.items()]) == kept


def test_best_policy_with_equal_metrics_keeps_the_newest():
    checkpoints = [info(step, metrics={"loss": 1.0}) for step in (10, 20, 30)]
    assert steps(KeepBest("loss", 2), checkpoints) == ["20", "30"]


@pytest.mark.parametrize("age", [3600, 3600.0, timedelta(hours=1)])
def test_newer_policy_keeps_recent_checkpoints(age):
    checkpoints = [info(1, age=7200), info(2, age=3600), info(3, age=3599), info(4, age=-60)]
    assert steps(KeepNewerThan(age), checkpoints) == ["3", "4"]


class Odd:
    """A policy of a user's own."""

    def keep(self, checkpoints, *, now):
        return frozenset(each.name for each in checkpoints if each.step % 20) | {"step-of-nobody"}


def test_custom_policies_are_combined():
    assert steps(KeepLast(1) | Odd(), RUN) == ["10", "30", "40"]
    assert steps(Odd() | KeepLast(1), RUN) == ["10", "30", "40"]
    assert as_policy(Odd()).keep(RUN, now=NOW) > {checkpoint_name(10)}
    assert exact_plan(RUN, Odd(), now=NOW).keep == {checkpoint_name(step) for step in (10, 30, 40)}
    with pytest.raises(TypeError):
        KeepLast(1) | 3
    joined = KeepLast(1) | KeepEvery(2) | (KeepEvery(3) | KeepAll())
    assert joined == AnyOf((KeepLast(1), KeepEvery(2), KeepEvery(3), KeepAll()))
    assert repr(joined) == "KeepLast(n=1) | KeepEvery(steps=2) | KeepEvery(steps=3) | KeepAll()"


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepLast(-(10**5000)),
        lambda: KeepNewerThan(10**5000),
        lambda: KeepLast(-1),
        lambda: KeepLast(True),
        lambda: KeepLast(2.0),
        lambda: KeepEvery(0),
        lambda: KeepBest(""),
        lambda: KeepBest(5),
        lambda: KeepBest(b"loss"),
        lambda: KeepEvery(10**5000),
        lambda: as_policy(10**5000),
        lambda: KeepBest("loss", 0),
        lambda: KeepBest("loss", mode="best"),
        lambda: KeepNewerThan(0),
        lambda: KeepNewerThan(math.inf),
        lambda: KeepNewerThan(math.nan),
        lambda: KeepNewerThan("7d"),
        lambda: KeepNewerThan(timedelta(days=-1)),
        lambda: AnyOf(()),
        lambda: as_policy(0),
        lambda: as_policy(2.5),
        lambda: as_policy([KeepLast(1)]),
    ],
)
def test_invalid_settings_are_refused(make):
    with pytest.raises(ConfigurationError):
        make()


# --- as text --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("last=5", KeepLast(5)),
        ("every=1000", KeepEvery(1000)),
        ("best=loss", KeepBest("loss")),
        ("best=loss:3", KeepBest("loss", 3)),
        ("best=acc:max", KeepBest("acc", 1, "max")),
        ("best=val/loss:min:2", KeepBest("val/loss", 2)),
        ("best=a%3Ab%2Cc:max", KeepBest("a:b,c", 1, "max")),
        ("best=%ED%A0%80", KeepBest("\ud800")),
        ("newer=7d", KeepNewerThan(timedelta(days=7))),
        ("newer=1.5h", KeepNewerThan(5400)),
        ("newer=90s", KeepNewerThan(90)),
        ("newer=30m", KeepNewerThan(1800)),
        ("newer=2w", KeepNewerThan(14 * 86400)),
        ("all", KeepAll()),
        ("5", KeepLast(5)),
        ("5,every=1000", KeepLast(5) | KeepEvery(1000)),
        ("last=5, every=1000", KeepLast(5) | KeepEvery(1000)),
    ],
)
def test_policies_are_parsed_from_text(text, policy):
    assert parse_policy(text) == policy
    assert as_policy(text) == policy
    assert parse_policy(str(policy)) == policy


def test_policy_shorthands_are_accepted():
    assert as_policy(3) == KeepLast(3)
    assert as_policy(None) == KeepAll()
    assert str(KeepNewerThan(3 * 86400)) == "newer=3d"
    assert str(KeepLast(5) | KeepBest("a,b", mode="max")) == "last=5,best=a%2Cb:max:1"


@pytest.mark.parametrize(
    "text",
    ["", ",", "last", "last=", "last=x", "last=0", "last=-1", "every=1.5", "best=", "best=loss:most", "best=loss:min:0",
     "best=loss:min:2:3", "newer=7", "newer=7y", "newer=-1d", "newer=0d", "first=3", "last=3,", "all=1",
     "0", "-1", "1.5", "\u0665", "9" * 5000, "last=" + "9" * 5000, "best=%FF"],
)  # fmt: skip
def test_invalid_policy_text_is_refused(text):
    with pytest.raises(ConfigurationError) as caught:
        parse_policy(text)
    assert caught.value.next_step


# --- what follows ---------------------------------------------------------------------------------


def chain() -> list[CheckpointInfo]:
    """A full save, two deltas to it one after the other, and a full one with a delta."""
    a, b, d = (checkpoint_name(step) for step in (1, 2, 4))
    return [
        info(1, files=frozenset({"data-a.millrace", "data-a2.millrace"}), full=a),
        info(2, files=frozenset({"data-b.millrace", f"../{a}/data-a.millrace"}), full=a),
        info(3, files=frozenset({f"../{b}/data-b.millrace", f"../{a}/data-a.millrace", "data-c.millrace"}), full=a),
        info(4, files=frozenset({"data-d.millrace"}), full=d),
        info(5, files=frozenset({"data-e.millrace", f"../{d}/data-d.millrace"}), full=d, metrics={"loss": 1.0}),
    ]


def test_plan_keeps_the_files_of_a_kept_delta():
    a, b, c, d, e = (each.name for each in chain())
    plan = exact_plan(chain(), KeepLast(3), now=NOW)
    assert plan.keep == {c, d, e}
    # The newest manifests first, so that at no moment one names files that are gone.
    assert plan.remove == (b, a)
    assert plan.files_of_removed_to_delete == {a: ("data-a2.millrace",)}
    assert plan.files_kept_for_others == {a: ("data-a.millrace",), b: ("data-b.millrace",)}


def test_plan_removes_files_with_their_last_manifest():
    a, b, _, d, e = (each.name for each in chain())
    plan = exact_plan(chain()[2:], KeepLast(1), now=NOW)
    assert plan.files_kept_for_others == {}
    assert plan.keep == {d, e}  # a delta that is being saved may be against the last full one
    assert plan.files_of_removed_to_delete == {
        a: ("data-a.millrace",),
        b: ("data-b.millrace",),
        chain()[2].name: ("data-c.millrace",),
    }


def test_plan_keeps_all_files_in_the_directory_of_a_kept_checkpoint():
    shared = info(2, files=frozenset({f"../{checkpoint_name(1)}/data-1-0.millrace", "data-b.millrace"}))
    plan = exact_plan([info(1), shared, info(3)], KeepLast(1), now=NOW, protected=[checkpoint_name(1)])
    assert plan.remove == (checkpoint_name(2),)
    assert plan.files_kept_for_others == {}
    assert plan.files_of_removed_to_delete == {checkpoint_name(2): ("data-b.millrace",)}


def test_plan_keeps_newest_and_protected_checkpoints():
    a, b, *_ = (each.name for each in chain())
    assert exact_plan(RUN, KeepBest("none"), now=NOW).keep == {checkpoint_name(40)}
    assert exact_plan(chain()[:3], KeepEvery(100), now=NOW).keep == {chain()[2].name, a}
    assert exact_plan(chain(), KeepLast(1), now=NOW, protected=[b, "gone"]).keep >= {b}
    assert exact_plan([], KeepLast(1), now=NOW).keep == frozenset()


def test_newest_after_restore_of_earlier_step_is_the_later_save():
    plan = exact_plan([info(10, age=50), info(20, 1, age=10), info(90, age=20)], KeepLast(1), now=NOW)
    assert plan.keep == {checkpoint_name(20, 1)}
    # The checkpoint that was published last stays as well, even if the names have another order.
    plan = exact_plan([info(10, age=50), info(20, age=10), info(90, age=20)], KeepLast(1), now=NOW)
    assert plan.keep == {checkpoint_name(20), checkpoint_name(90)}


def test_plan_skips_incomplete_checkpoints():
    checkpoints = [*RUN, info(50, complete=False, kind=None, files=frozenset())]
    plan = exact_plan(checkpoints, KeepLast(1), now=NOW)
    assert plan.keep == {checkpoint_name(40)}
    assert checkpoint_name(50) not in plan.remove


def test_plan_keeps_spared_files_and_their_manifests():
    _, b, c, d, e = (each.name for each in chain())
    plan = exact_plan(chain(), KeepLast(1), now=NOW, spared=[f"{b}/data-b.millrace"])
    assert plan.keep == {b, c, d, e}


def test_plan_removes_no_file_outside_the_run():
    foreign = info(10, files=frozenset({"../imported/data-x.millrace", "data-a.millrace"}))
    plan = exact_plan([foreign, info(20)], KeepLast(1), now=NOW)
    assert plan.files_of_removed_to_delete == {checkpoint_name(10): ("data-a.millrace",)}


# --- what stays in addition -------------------------------------------------------------------------


def test_plan_keeps_the_newest_independent_checkpoint():
    _, _, c, d, e = (each.name for each in chain())
    assert plan_pruning(chain(), KeepLast(1), now=NOW).keep == {c, d, e}
    assert plan_pruning(chain()[:3], KeepLast(1), now=NOW).keep == {chain()[0].name, c}
    assert plan_pruning(RUN, KeepLast(1), now=NOW).keep == {checkpoint_name(30), checkpoint_name(40)}
    assert plan_pruning(RUN, KeepLast(2), now=NOW).keep == {checkpoint_name(30), checkpoint_name(40)}


def test_plan_prefers_an_independent_checkpoint_of_the_timeline():
    # 30 and 40 were given up by a restore of 20.
    assert plan_pruning(REWOUND, KeepLast(1), now=NOW).keep == {checkpoint_name(20), checkpoint_name(30, 1)} | {
        checkpoint_name(40)  # published last, though the names have another order
    }


def test_plan_does_not_count_damaged_checkpoint_as_independent():
    a, b, c, d, e = (each.name for each in chain())
    # The chain of the newest is damaged: one that can be read stays, and one apart from it where there is any.
    assert plan_pruning(chain(), KeepLast(1), now=NOW, damaged=[d, e]).keep == {c, d, e}
    newer = [*chain(), info(6, files=frozenset({"data-f.millrace"}))]
    assert plan_pruning(newer, KeepLast(1), now=NOW, damaged=[d, e]).keep == {c, checkpoint_name(6)}
    assert plan_pruning(newer, KeepLast(1), now=NOW, damaged=[a, b, c, d, e]).keep == {checkpoint_name(6)}
