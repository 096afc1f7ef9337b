"""A run against a model: saves, deltas, prunes, crashes and restores in any order.

A restore always returns exactly one saved state: the newest durable one. A crash is an
operation of the storage that raises. Every later operation of that manager raises too, so its leftovers stay.
A second machine saves asynchronously in saver processes, in which the operation kills the process.
"""

from __future__ import annotations

import copy
import mmap
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.savers import savers_with

from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.storage import storage
from millrace.errors import MillraceError, SaverDiedError

pytestmark = pytest.mark.filterwarnings("ignore:save_async")  # waits where there is no saver

_ELEMENTS = 150_000


class SimulatedCrash(BaseException):
    """The process is dead from here on."""


_NONE = -1


class _Fuse:
    """Counts operations on local storage in this process and in the savers, and ends them all from one of them on."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as long as this object
        self._file.write(struct.pack("q", _NONE))
        self._file.flush()
        self._memory = mmap.mmap(self._file.fileno(), 8)
        self.name = self._file.name

    @property
    def left(self) -> int | None:
        (left,) = struct.unpack("q", self._memory[:])
        return None if left == _NONE else int(left)

    @left.setter
    def left(self, operations: int | None) -> None:
        self._memory[:] = struct.pack("q", _NONE if operations is None else operations)

    def burn(self) -> None:
        left = self.left
        if left is None:
            return
        if left == 0:
            raise SimulatedCrash
        self.left = left - 1


_FUSE = _Fuse()
_USES_SAVER = [False]
_GUARDED = (
    (storage.LocalWriter, ("__init__", "write", "close", "abort")),
    (storage.LocalStorage, ("publish", "delete", "prepare")),
)
# The same in a saver, which ends there as a process that is killed.
_IN_SAVER = f"""
import mmap, os, signal, struct
from millrace.checkpoint.storage import storage
memory = mmap.mmap(os.open({_FUSE.name!r}, os.O_RDWR), 8)
def guard(owner, name):
    method = getattr(owner, name)
    def guarded(*arguments, **options):
        (left,) = struct.unpack("q", memory[:])
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if left > 0:
            memory[:] = struct.pack("q", left - 1)
        return method(*arguments, **options)
    setattr(owner, name, guarded)
for owner, names in ((storage.LocalWriter, {_GUARDED[0][1]}), (storage.LocalStorage, {_GUARDED[1][1]})):
    for name in names:
        guard(owner, name)
"""


@pytest.fixture(autouse=True, scope="module")
def _guarded_storage() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, savers_with(_IN_SAVER):
        patch.setattr("millrace.checkpoint.run.manager.is_supported", lambda url: _USES_SAVER[0])
        for owner, names in _GUARDED:
            for name in names:
                patch.setattr(owner, name, _guarded(getattr(owner, name)))
        yield


def _guarded(method: Any) -> Any:
    def guarded(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            _FUSE.burn()
        except SimulatedCrash:
            if isinstance(self, storage.LocalWriter) and hasattr(self, "_file"):
                self._file.close()  # as the kernel does; written bytes stay
            raise
        return method(self, *arguments, **options)

    return guarded


def _new_state() -> dict[str, Any]:
    return {
        "layer": {"weight": torch.randn(_ELEMENTS), "frozen": torch.ones(_ELEMENTS, dtype=torch.bfloat16)},
        "moment": torch.zeros(_ELEMENTS // 10),
        "counter": 0,
    }


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(
        one["counter"] == other["counter"]
        and torch.equal(one["layer"]["weight"], other["layer"]["weight"])
        and torch.equal(one["layer"]["frozen"], other["layer"]["frozen"])
        and torch.equal(one["moment"], other["moment"])
    )


class RunMachine(RuleBasedStateMachine):
    """`saved`: every state that was given to a save; `durable`: those that are known to be there, oldest first."""

    uses_saver = False

    def __init__(self) -> None:
        super().__init__()
        _USES_SAVER[0] = self.uses_saver
        torch.manual_seed(7)
        self.folder = tempfile.TemporaryDirectory()
        self.url = Path(self.folder.name) / "run"
        self.state = _new_state()
        self.step = 0
        self.durable: list[tuple[int, dict[str, Any]]] = []
        self.doubtful: tuple[int, dict[str, Any]] | None = None  # in flight when the process died
        self.pending: tuple[Any, int, dict[str, Any]] | None = None
        self.manager: CheckpointManager | None = None

    @initialize(full_every=st.sampled_from([1, 2, 4, 10]), keep=st.sampled_from([None, 1, 2, 4]))
    def options(self, full_every: int, keep: int | None) -> None:
        self.settings: dict[str, Any] = {"full_every": full_every, "keep": keep}
        self.manager = CheckpointManager(self.url, **self.settings)

    def teardown(self) -> None:
        _FUSE.left = None
        if self.manager is not None:
            self._drop_manager()
        self.folder.cleanup()

    # --- what training does -----------------------------------------------------------------------

    @rule(kind=st.sampled_from(["little", "much", "nothing", "other shape"]))
    def train(self, kind: str) -> None:
        weight = self.state["layer"]["weight"]
        if kind == "little":
            weight.mul_(1.0001)
            self.state["moment"].add_(0.001)
        elif kind == "much":
            weight.normal_()
        elif kind == "other shape":
            size = 20_000 if len(self.state["moment"]) != 20_000 else 30_000
            self.state["moment"] = torch.randn(size)
        self.state["counter"] += 1

    @rule(ahead=st.integers(1, 3))
    def save(self, ahead: int) -> None:
        self._settle()
        self.step += ahead
        result = self._run().save(self.step, self.state, {"loss": 1.0})
        assert result.restore_bytes <= 2.2 * result.raw_bytes + 100_000
        self._add(self.step, copy.deepcopy(self.state))

    @rule(ahead=st.integers(1, 3))
    def save_async(self, ahead: int) -> None:
        self._settle()
        self.step += ahead
        expected = copy.deepcopy(self.state)
        self.pending = (self._run().save_async(self.step, self.state), self.step, expected)

    @rule()
    def settle(self) -> None:
        self._settle()

    @rule(operations=st.integers(0, 12), asynchronous=st.booleans())
    def crash_in_a_save(self, operations: int, asynchronous: bool) -> None:
        self._settle()
        self.step += 1
        expected = copy.deepcopy(self.state)
        _FUSE.left = operations
        try:
            pending = self._run().save_async(self.step, self.state)
            if asynchronous:
                self.state["layer"]["weight"].add_(1)
            error = pending.exception()
        except SimulatedCrash as crash:
            error = crash
        finally:
            survived = _FUSE.left is not None and _FUSE.left > 0
        if error is None and survived:
            _FUSE.left = None
            self._add(self.step, expected)
            return
        self.doubtful = (self.step, expected)
        self._drop_manager()
        _FUSE.left = None
        self._begin()

    @rule(operations=st.integers(0, 6))
    def crash_in_a_prune(self, operations: int) -> None:
        self._settle()
        _FUSE.left = operations
        try:
            self._run().prune(2)
        except SimulatedCrash:
            self._drop_manager()
            _FUSE.left = None
            self._begin()
        finally:
            _FUSE.left = None
        self._drop_pruned()

    @rule(keep=st.integers(1, 3))
    def prune(self, keep: int) -> None:
        self._settle()
        self._run().prune(keep)
        self._drop_pruned()
        # The full one that the newest builds on stays, as does the one that was published last with its own.
        assert len(self.durable) <= keep + 3

    @rule()
    def new_process(self) -> None:
        self._settle()
        self._run().close()
        self._begin()

    @precondition(lambda self: self.durable)
    @rule(which=st.integers(0, 100))
    def go_back(self, which: int) -> None:
        """Restore an older one and continue from there: later saves are abandoned."""
        self._settle()
        self._clear_doubt()
        self._drop_pruned()
        step, expected = self.durable[which % len(self.durable)]
        found = _empty_like(expected)
        assert self._run().restore(found, step) == step
        assert _same(found, expected)
        self.state, self.step = found, step

    # --- what must be true ------------------------------------------------------------------------

    @invariant()
    def the_newest_durable_state_is_what_restore_gives(self) -> None:
        if self.manager is None or self.pending is not None:
            return
        self._clear_doubt()
        reader = CheckpointManager(self.url)
        if not self.durable:
            assert reader.restore(_new_state()) is None
        else:
            step, expected = self.durable[-1]
            found = _empty_like(expected)
            assert reader.restore(found) == step
            assert _same(found, expected)
        reader.close()

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A new process. Where the dead one had gone back and not saved since, a save without a restore would be refused."""
        self.manager = CheckpointManager(self.url, **self.settings)
        self._clear_doubt()
        if self.durable and self.durable[-1][0] > self.step:
            self.step, expected = self.durable[-1]
            self.state = _empty_like(expected)
            assert self.manager.restore(self.state) == self.step
            assert _same(self.state, expected)

    def _run(self) -> CheckpointManager:
        assert self.manager is not None
        return self.manager

    def _add(self, step: int, state: dict[str, Any]) -> None:
        self.durable = [(before, kept) for before, kept in self.durable if before < step]
        self.durable.append((step, state))
        self._drop_pruned()

    def _settle(self) -> None:
        if self.pending is not None:
            pending, step, expected = self.pending
            self.pending = None
            pending.result()
            self._add(step, expected)

    def _drop_manager(self) -> None:
        manager, self.manager, self.pending = self.manager, None, None
        try:
            if manager is not None:
                manager.close()
        except (SimulatedCrash, MillraceError):
            pass  # it is as dead as its process

    def _clear_doubt(self) -> None:
        """A save in flight when its process died exists or not: the listed checkpoints can be restored."""
        if self.doubtful is None:
            return
        (step, expected), self.doubtful = self.doubtful, None
        if self._run().latest() == step and (not self.durable or self.durable[-1][0] != step):
            self._add(step, expected)
        elif self._run().latest() == step:
            found = _empty_like(expected)
            self._run().restore(found)
            if _same(found, expected):
                self._add(step, expected)

    def _drop_pruned(self) -> None:
        """The checkpoints that `keep` removed; never the newest."""
        there = self._run().steps()
        newest = self.durable[-1:]
        self.durable = [(step, state) for step, state in self.durable if step in there]
        assert self.durable[-1:] == newest


def _empty_like(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "layer": {key: torch.empty_like(value) for key, value in state["layer"].items()},
        "moment": torch.empty_like(state["moment"]),
        "counter": -1,
    }


class SaverMachine(RunMachine):
    """Asynchronous saves in saver processes, and savers that die while the training continues."""

    uses_saver = True

    @rule(kinds=st.lists(st.sampled_from(["little", "much", "nothing", "other shape"]), min_size=2, max_size=4))
    def train_and_save(self, kinds: list[str]) -> None:
        """Several asynchronous saves by one saver, which share a plan where the structure stays."""
        for kind in kinds:
            self.train(kind)
            self.save_async(1)
        self._settle()

    @rule(operations=st.integers(0, 12))
    def crash_of_the_saver(self, operations: int) -> None:
        self._settle()
        # In the saver alone: the claim and a state that it takes over from this process are not counted.
        self._run().save_async(self.step + 1, self.state).result()
        self._add(self.step + 1, copy.deepcopy(self.state))
        self.step += 2
        expected = copy.deepcopy(self.state)
        _FUSE.left = operations
        error = self._run().save_async(self.step, self.state).exception()
        _FUSE.left = None
        if error is None:
            self._add(self.step, expected)
            return
        assert isinstance(error, SaverDiedError)
        self.doubtful = (self.step, expected)
        self._clear_doubt()
        # The same step, whether or not the dead saver has published it.
        assert self._run().save_async(self.step, self.state).exception() is None
        self.durable = [(step, state) for step, state in self.durable if step != self.step]
        self._add(self.step, expected)


_SETTINGS = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a shorter history is not worth minutes
)
TestRun = RunMachine.TestCase
TestRun.settings = _SETTINGS
TestSaver = SaverMachine.TestCase
# Each manager with an asynchronous save starts a process.
TestSaver.settings = settings(_SETTINGS, max_examples=4, stateful_step_count=12)
