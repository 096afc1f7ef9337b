"""Pruning over random runs, killed at random moments: kept checkpoints stay complete, and the next pruning finishes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.runs import add_checkpoint, assert_whole, complete, is_whole, local_run, object_run, own_paths, tree

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.run.prune_plan import plan_pruning
from millrace.checkpoint.run.pruning import prune
from millrace.checkpoint.run.retention import (
    AnyOf,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepNewerThan,
    as_policy,
    parse_policy,
)
from millrace.checkpoint.run.run_info import CheckpointInfo, paths_of
from millrace.checkpoint.run.run_layout import Run
from millrace.checkpoint.run.timeline import timeline
from millrace.origin.object_store import ObjectStoreOrigin

RUNS = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Save:
    """One checkpoint of a random run: `bases` choose earlier files by number, among those that the one at `base` names."""

    step: int
    revision: int
    files: int
    base: int | None
    bases: tuple[int, ...]
    full: int | None
    loss: float | None
    foreign: bool


numbers = st.integers(min_value=0, max_value=50)
saves = st.builds(
    Save,
    step=st.integers(min_value=0, max_value=12),
    revision=st.integers(min_value=0, max_value=2),
    files=st.integers(min_value=0, max_value=3),
    base=st.none() | numbers,
    bases=st.lists(numbers, max_size=4).map(tuple),
    full=st.none() | numbers,
    loss=st.none() | st.floats(allow_nan=True, allow_infinity=True),
    foreign=st.booleans(),
)
runs = st.lists(saves, min_size=1, max_size=8, unique_by=lambda save: (save.step, save.revision))
counts = st.integers(min_value=1, max_value=5)
single = st.one_of(
    st.builds(KeepLast, counts),
    st.builds(KeepEvery, counts),
    st.builds(KeepBest, st.sampled_from(["loss", "no such"]), counts, st.sampled_from(["min", "max"])),
    st.builds(KeepNewerThan, st.floats(min_value=0.5, max_value=20.0)),
)
policies = single | st.lists(single, min_size=2, max_size=3).map(lambda members: AnyOf(tuple(members)))


def build(run: Run, plan: list[Save]) -> None:
    """Make the run. A checkpoint names files of its base, and of those that the base names: chains through siblings."""
    names: list[str] = []
    named: list[list[str]] = []
    for number, save in enumerate(plan):
        siblings: set[str] = set()
        if save.base is not None and names:
            choice = named[save.base % len(named)]
            siblings = {choice[each % len(choice)] for each in save.bases if choice}
        full = names[save.full % len(names)] if save.full is not None and names else None
        metrics = {} if save.loss is None else {"loss": save.loss}
        found = add_checkpoint(
            run,
            save.step,
            revision=save.revision,
            files=save.files,
            siblings=sorted(siblings),
            metrics=metrics,
            full=full,
            created=1e9 + number,
        )
        if save.foreign:
            run.checkpoint(found.name).publish("notes.txt", b"mine", replace=True)
        names.append(found.name)
        named.append([path for path in own_paths(found) if not path.endswith("notes.txt")] + sorted(siblings))


def infos_of(run: Run) -> list[CheckpointInfo]:
    return list(run.describe_all([found for found in run.scan() if found.complete]).values())


@contextlib.contextmanager
def directory():
    place = tempfile.mkdtemp()
    try:
        yield Path(place)
    finally:
        shutil.rmtree(place)


class Killed(BaseException):
    """The process ends here."""


@contextlib.contextmanager
def killed_after(deletions: int):
    """Every removal of a file after so many raises, as nothing happens after a kill."""
    unlink, left = os.unlink, [deletions]

    def dying(path, *args, **options):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        unlink(path, *args, **options)

    with mock.patch.object(os, "unlink", dying):
        yield


class DyingOrigin(ObjectStoreOrigin):
    """Deletes some keys of a request, in no order, and dies."""

    def __init__(self) -> None:
        super().__init__("file")
        self.left: int | None = None

    def delete(self, keys):
        for key in sorted(keys, key=hash):
            if self.left == 0:
                raise Killed
            if self.left is not None:
                self.left -= 1
            super().delete([key])


def settled(root: Path) -> dict[str, int]:
    """Every file, but for a small one of the run that was being published at a death: it goes when it is a day old."""
    return {path: size for path, size in tree(root).items() if not path.startswith(".pruning-")}


def assert_finished(run: Run, root: Path, expected: list[CheckpointInfo]) -> None:
    """Exactly the expected checkpoints, their files, and foreign ones are there."""
    paths = frozenset().union(*(paths_of(info) for info in expected))
    there = {path for path in settled(root) if not path.endswith("notes.txt")}
    if run.is_remote:
        there = {path for path in there if not path.endswith("/")}
    assert there == paths
    assert sorted(complete(run)) == sorted(info.name for info in expected)


@pytest.mark.slow
@RUNS
@given(runs, policies, st.lists(st.integers(0, 12), max_size=4), st.booleans())
def test_killed_pruning_is_harmless_and_completed_by_the_next(plan, policy, deaths, is_local):
    with directory() as root:
        origin = DyingOrigin()
        run = local_run(root / "run") if is_local else object_run(root / "run", origin)
        build(run, plan)
        foreign = {path: size for path, size in tree(root / "run").items() if path.endswith("notes.txt")}
        infos = infos_of(run)
        now = 1e9 + len(plan)
        with mock.patch("millrace.checkpoint.run.pruning.time.time", return_value=now):
            kept = plan_pruning(infos, policy, now=now).keep
            before = tree(root / "run")
            rehearsal = prune(run, policy, dry_run=True)
            assert tree(root / "run") == before
            for death in deaths:
                with contextlib.suppress(Killed):
                    if is_local:
                        with killed_after(death):
                            prune(run, policy)
                    else:
                        origin.left = death
                        prune(run, policy)
                origin.left = None
                assert_whole(run)
                assert kept <= set(complete(run))
            report = prune(run, policy)
        # A policy that counts may keep more, not less, when those are gone that it would have dropped.
        expected = [info for info in infos if info.name in kept]
        assert_finished(run, root / "run", expected)
        assert set(report.kept) == kept
        freed = sum(before.values()) - sum(settled(root / "run").values())
        assert freed == rehearsal.freed_bytes
        assert set(rehearsal.removed) == {info.name for info in infos} - kept
        if not deaths:
            assert (report.freed_bytes, report.removed) == (rehearsal.freed_bytes, rehearsal.removed)
        assert {path: size for path, size in tree(root / "run").items() if path.endswith("notes.txt")} == foreign


@RUNS
@given(runs, policies, policies, st.integers(0, 12))
def test_two_policies_in_sequence_keep_their_common_checkpoints(plan, first, second, death):
    """The second pruning finds the files that the killed one left."""
    with directory() as root:
        run = local_run(root)
        build(run, plan)
        with contextlib.suppress(Killed), killed_after(death):
            prune(run, first)
        infos = infos_of(run)
        report = prune(run, second)
        assert all(is_whole(run.checkpoint(name)) for name in report.kept)
        assert_finished(run, root, [info for info in infos if info.name in report.kept])


@RUNS
@given(runs, policies, st.lists(numbers, max_size=3))
def test_plan_keeps_the_invariants_of_retention(plan, policy, protected):
    with directory() as root:
        run = local_run(root)
        build(run, plan)
        infos = infos_of(run)
    chosen = {infos[each % len(infos)].name for each in protected}
    now = 1e9 + len(plan)
    pruned = plan_pruning(infos, policy, now=now, protected=chosen)
    by_name = {info.name: info for info in infos}
    assert policy.keep(infos, now=now) | chosen <= pruned.keep
    newest = timeline(infos)[-1]
    assert {newest.name, newest.full} & by_name.keys() <= pruned.keep
    assert set(pruned.remove) == by_name.keys() - pruned.keep
    needed = frozenset().union(*(paths_of(by_name[name]) for name in pruned.keep))
    gone = {f"{place}/{name}" for place, names in pruned.files_of_removed_to_delete.items() for name in names}
    gone |= {f"{name}/{MANIFEST_NAME}" for name in pruned.remove}
    assert not gone & needed
    assert gone | needed == frozenset().union(*(paths_of(info) for info in infos))
    kept_for_others = {f"{place}/{name}" for place, names in pruned.files_kept_for_others.items() for name in names}
    assert kept_for_others <= needed
    # Pruning again changes nothing.
    again = plan_pruning([by_name[name] for name in pruned.keep], policy, now=now, protected=chosen)
    assert again.keep == pruned.keep


texts = st.text(min_size=1, max_size=20).filter(lambda text: "\0" not in text)
any_policy = st.one_of(
    st.just(KeepAll()),
    policies,
    st.builds(KeepBest, texts, st.integers(1, 10**6), st.sampled_from(["min", "max"])),
    st.builds(KeepNewerThan, st.floats(min_value=1e-9, max_value=1e15)),
)


@given(any_policy)
def test_policy_text_roundtrip_is_equal(policy):
    assert parse_policy(str(policy)) == policy
    assert as_policy(str(policy)) == policy
    assert eval(repr(policy)) == policy
