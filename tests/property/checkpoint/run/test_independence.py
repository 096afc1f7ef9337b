"""Retention over any saves, restores and policies: kept checkpoints survive a damaged file. Plans and real saves."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.run.prune_plan import PrunePlan, plan_pruning
from millrace.checkpoint.run.retention import (
    AnyOf,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepNewerThan,
    Policy,
)
from millrace.checkpoint.run.run_info import CheckpointInfo, paths_of
from millrace.checkpoint.run.run_layout import checkpoint_name, open_run
from millrace.checkpoint.run.timeline import age_of, next_revision, timeline
from millrace.errors import UsageError

counts = st.integers(1, 4)
# Positions, relative to a number that only the running test has.
fractions = st.floats(0.0, 1.0, exclude_max=True)
single = st.one_of(
    st.builds(KeepLast, counts),
    st.builds(KeepEvery, counts),
    st.builds(KeepBest, st.sampled_from(["loss", "misspelt"]), counts, st.sampled_from(["min", "max"])),
    st.builds(KeepNewerThan, st.floats(0.5, 9.0)),
    st.just(KeepAll()),
)
policies = single | st.lists(single, min_size=2, max_size=3).map(lambda members: AnyOf(tuple(members)))


@dataclass(frozen=True)
class Save:
    """One save: `go_back` restores an earlier checkpoint first; `delta` builds on the chain where that is allowed."""

    ahead: int
    go_back: int | None
    delta: bool
    on_anchor: bool
    loss: float | None


saves = st.lists(
    st.builds(
        Save,
        ahead=st.integers(1, 3),
        go_back=st.none() | st.none() | st.integers(0, 9),
        delta=st.sampled_from([True, True, True, False]),
        on_anchor=st.booleans(),
        loss=st.none() | st.floats(allow_nan=True),
    ),
    min_size=1,
    max_size=12,
)


@dataclass
class Model:
    """A run as a manager leaves it, without any file: `here` are the checkpoints, `chain` the saves since a full one."""

    here: list[CheckpointInfo] = field(default_factory=list)
    chain: list[CheckpointInfo] = field(default_factory=list)
    saved: int = 0

    def save(self, save: Save) -> None:
        self.saved += 1
        live = timeline(self.here)
        step = live[-1].step + save.ahead if live else save.ahead
        if save.go_back is not None and live:
            step = live[save.go_back % len(live)].step + save.ahead - 1
            self.chain = []
        revision = next_revision(step, self.here)
        files = {f"data-{self.saved}.millrace"}
        chained = {info.name for info in self.chain}
        if save.delta and self.chain and any(info.name not in chained for info in self.here):
            base = self.chain[0 if save.on_anchor else -1]
            files |= {name if name.startswith("../") else f"../{base.name}/{name}" for name in base.files}
        else:
            self.chain = []
        name = checkpoint_name(step, revision)
        info = CheckpointInfo(
            name=name, url=name, step=step, revision=revision, complete=True, created=float(self.saved), raw_bytes=1,
            stored_bytes=1, restore_bytes=1, kind="delta" if len(files) > 1 else "full", published=float(self.saved),
            files=frozenset(files), full=self.chain[0].name if self.chain else name,
            metrics={} if save.loss is None else {"loss": save.loss},
        )  # fmt: skip
        self.chain.append(info)
        self.here.append(info)

    def prune(self, policy: Policy) -> PrunePlan:
        return plan_pruning(self.here, policy, now=float(self.saved))


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(saves, st.lists(policies, min_size=1, max_size=2))
def test_plan_after_any_saves_keeps_the_files_of_restores(plan: list[Save], chosen: list[Policy]) -> None:
    model = Model()
    for save, policy in zip(plan, itertools.cycle(chosen), strict=False):
        model.save(save)
        pruned = model.prune(policy)
        by_name = {info.name: info for info in model.here}
        kept = [by_name[name] for name in pruned.keep]
        removed = [by_name[name] for name in pruned.remove]
        # The newest stays, and so does every file of what stays.
        newest = max(model.here, key=age_of)
        assert newest.name in pruned.keep
        gone = {f"{place}/{name}" for place, names in pruned.files_of_removed_to_delete.items() for name in names}
        gone |= {f"{info.name}/{MANIFEST_NAME}" for info in removed}
        assert not any(paths_of(info) & gone for info in kept)
        # From the second save on no single file is needed by all that stay.
        if len(model.here) > 1:
            assert any(not paths_of(info) & paths_of(newest) for info in kept), (pruned, model.here)
        # No checkpoint goes that was saved later than one that a number of checkpoints keeps.
        if isinstance(policy, KeepLast):
            counted = [by_name[name] for name in policy.keep(model.here, now=float(model.saved))]
            assert len(counted) == min(policy.n, len(model.here))
            assert all(age_of(info) < age_of(each) for info in removed for each in counted)
        # A new manager, which finds only the remaining checkpoints, decides the same.
        model.here = [info for info in model.here if info.name in pruned.keep]
        assert model.prune(policy).keep == pruned.keep


def state_of(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {"w": torch.randn(20_000, generator=generator) * (1 + 1e-4 * number), "n": torch.tensor(number)}


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(saves.map(lambda plan: plan[:7]), st.integers(1, 3), st.integers(1, 4), fractions, fractions, st.integers(0, 7))
def test_real_saves_in_any_order_survive_one_flipped_bit(
    plan: list[Save], keep: int, full_every: int, which: float, where: float, bit: int
) -> None:
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        manager = CheckpointManager(place, keep=keep, full_every=full_every)
        values: dict[str, int] = {}
        own: int | None = None  # the step that this manager saved last, which it may save again
        for number, save in enumerate(plan):
            steps = manager.steps()
            step = steps[-1] + save.ahead if steps else save.ahead
            if save.go_back is not None and steps:
                target = steps[save.go_back % len(steps)]
                step = target + save.ahead - 1
                if step < steps[-1] or (step == steps[-1] and step != own):
                    refused = None
                    try:
                        manager.save(step, state_of(number))
                    except UsageError as error:
                        refused = error
                    assert refused is not None
                    assert manager.steps() == steps
                manager.restore(state_of(0), target)
            result = manager.save(step, state_of(number))
            values[Path(result.url).name] = number
            own = step
            assert manager.latest() == step
            if not save.delta:
                own = None
                manager.close()
                manager = CheckpointManager(place, keep=keep, full_every=full_every)
        manager.close()
        infos = [each for each in open_run(place).describe_all(open_run(place).scan()).values() if each.complete]
        for info in infos:
            found = state_of(0)
            with CheckpointManager(Path(place)) as reader:
                assert reader.restore(found, info.step) == info.step
        files = sorted(Path(place).glob("step-*/*.millrace"))
        damaged = files[int(which * len(files))]
        content = bytearray(damaged.read_bytes())
        content[int(where * len(content))] ^= 1 << bit
        damaged.write_bytes(content)
        if len(values) > 1:
            found = state_of(0)
            with CheckpointManager(place) as reader:
                assert reader.restore(found, fallback=True) is not None
            assert torch.equal(found["w"], state_of(int(found["n"]))["w"])
