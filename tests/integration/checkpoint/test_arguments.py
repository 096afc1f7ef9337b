"""Wrong arguments and empty values are one line that names the argument and the next step, before anything is written."""

from __future__ import annotations

import copy
import pickle
import signal
from types import MappingProxyType

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from millrace.checkpoint import (
    CheckpointLoadPlanner,
    CheckpointManager,
    CheckpointReader,
    CheckpointSavePlanner,
    CheckpointWriter,
)
from millrace.errors import MillraceError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process:UserWarning")

ANYTHING = [None, 0, -1, 1.5, True, "", "x", b"x", [], {}, float("nan"), object()]
# Of those, what each argument may be. Whatever else is there is refused.
NUMBERS = {"replicas": [0], "full_every": [], "local_keep": [], "base_memory": [None, 0], "thread_count": [None]}
FLAGS = {"rewind": [True], "independent": [True], "save_process": [None, True]}
OTHERS = {
    "url": ["x"],
    "keep": [None],
    "local": [None, "x"],
    "on_busy": [],
    "on_progress": [None],
    "compression": [],
    "target_options": [None, {}],
    "trusted_types": [[]],
}
MANAGER = {**NUMBERS, **FLAGS, **OTHERS}
WRITER = {
    "path": ["x"],
    "sync_files": [True],
    "thread_count": [None],
    "overwrite": [True],
    "_extensions": [None, []],
    "compression": [],
    "target_options": [None, {}],
    "trusted_types": [[]],
    "user_metadata": [None, {}],
    "base": [None],
    "restore_limit": [1.5],
    "keep_base": [True],
}
READER = {
    "path": ["x"],
    "_extension_registry": [None],
    "target_options": [None, {}],
    "origin": [None],
    "trusted_types": [[]],
    "thread_count": [None],
}


def is_one_line(error: MillraceError) -> bool:
    return bool(error.next_step) and "\n" not in str(error) and str(error).endswith(error.next_step)


def unaccepted(make, arguments: dict, place: str) -> list[str]:
    """The values that do not do what they should: those that are refused, or accepted, by mistake."""
    wrong = []
    for name, good in arguments.items():
        for value in ANYTHING:
            may_be = any(type(value) is type(each) and value == each for each in good)
            try:
                make(**{place: "here", name: value})
                refused = False
            except MillraceError as error:
                refused = is_one_line(error)
            except Exception as error:  # noqa: BLE001 - what the test looks for
                wrong.append(f"{name}={value!r}: {type(error).__name__}: {error}")
                continue
            if refused == may_be:
                wrong.append(f"{name}={value!r}: {'refused' if refused else 'accepted'}")
    return wrong


def made_manager(**options) -> None:
    with CheckpointManager(**{"url": "here", **options}) as run:
        assert run.steps() == []


def used_writer(**options) -> None:
    CheckpointWriter(**options).prepare_local_plan(None)


def used_reader(**options) -> None:
    assert CheckpointReader(**options).validate_checkpoint_id("here")
    CheckpointReader(**options)._storage()


@pytest.mark.parametrize(
    ("make", "arguments", "place"),
    [(made_manager, MANAGER, "url"), (used_writer, WRITER, "path"), (used_reader, READER, "path")],
    ids=["manager", "writer", "reader"],
)
@pytest.mark.filterwarnings("ignore:save_process has no effect:FutureWarning")
def test_argument_of_wrong_type_raises_in_one_line(tmp_path, monkeypatch, make, arguments, place):
    monkeypatch.chdir(tmp_path)
    assert unaccepted(make, arguments, place) == []


@pytest.fixture
def run(tmp_path):
    with CheckpointManager(tmp_path / "run") as run:
        run.save(1, {"w": torch.ones(2), "deep": {"v": torch.ones(3)}})
        yield run


def state() -> dict:
    return {"w": torch.zeros(2), "deep": {"v": torch.zeros(3)}}


@pytest.mark.parametrize("step", ["1", True, False, 1.0, -1, b"1", [1], 10**30, np.float64(1)])
def test_step_that_is_not_an_integer_is_refused(run, step):
    run.watch_preemption((signal.SIGUSR1,))
    for call in (
        lambda: run.restore(state(), step),
        lambda: run.metadata(step),
        lambda: run.save(step, state()),
        lambda: run.save_async(step, state()),
        lambda: run.preempted(step, state()),
    ):
        with pytest.raises(UsageError, match="give a whole number from 0 to") as caught:
            call()
        assert is_one_line(caught.value)
    assert run.steps() == [1]


def test_step_of_numpy_or_torch_is_accepted(run):
    assert run.restore(state(), np.int64(1)) == run.restore(state(), torch.tensor(1)) == 1
    assert run.save(np.uint8(2), state()).step == 2
    assert run.metadata(np.int32(2)).step == 2


@pytest.mark.parametrize("keys", [1, [], "", [1], ["", "w"], b"w", (), {"w": 1}, [None]])
def test_patterns_that_are_not_text_are_refused(run, keys):
    with pytest.raises(UsageError, match="keys=") as caught:
        run.restore(state(), keys=keys)
    assert is_one_line(caught.value)


def test_restore_of_empty_state_raises(run):
    with pytest.raises(UsageError, match="the state is empty, so nothing would be restored: give what was saved"):
        run.restore({})
    for empty in ({"deep": {}}, {"deep": {"v": {}}}, {"deep": {}, "w": {}}):
        with pytest.raises(UsageError, match=r"the state has no values, so keys=.* loads nothing: give the tensors"):
            run.restore(empty, keys="deep.*")


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda run: run.restore(state(), fallback="yes"), "fallback"),
        (lambda run: run.prune(1, dry_run="yes"), "dry_run"),
        (lambda run: run.save(2, state(), user=[1]), "user"),
        (lambda run: run.save(2, state(), user="text"), "user"),
        (lambda run: run.save(2, state(), user=5), "user"),
        (lambda run: run.save(2, state(), user={"x": 10**5000}), "user= contains an integer"),
        (lambda run: run.save(2, state(), metrics=[1]), "metrics"),
        (lambda run: run.save(2, None), "state"),
        (lambda run: run.restore([state()]), "state"),
        (lambda run: run.restore(MappingProxyType(state())), "the state is a mappingproxy"),
        (lambda run: pickle.dumps(run), "cannot be pickled or copied: create one in the process"),
        (lambda run: copy.deepcopy(run), "cannot be pickled or copied"),
        (lambda run: run.watch_preemption(5), "signals"),
        (lambda run: run.watch_preemption("TERM"), "signals"),
        (lambda run: run.watch_preemption(["TERM"]), "signals"),
        (lambda run: run.watch_preemption(()), "signals"),
        (lambda run: run.watch_preemption([99999]), "signals"),
        (lambda run: run.watch_preemption([signal.SIGKILL]), "signals"),
        (lambda run: run.watch_preemption(grace_seconds="x"), "grace_seconds"),
        (lambda run: run.watch_preemption(grace_seconds=-1), "grace_seconds"),
        (lambda run: run.watch_preemption(grace_seconds=None), "grace_seconds"),
        (lambda run: run.watch_preemption(grace_seconds=float("nan")), "grace_seconds"),
    ],
)
def test_invalid_arguments_of_manager_methods_raise_in_one_line(run, call, names):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UsageError, match=names) as caught:
        call(run)
    assert is_one_line(caught.value)
    assert run.steps() == [1]
    assert signal.getsignal(signal.SIGTERM) == before


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_stateful_below_another_key_is_named(run, tmp_path):
    model, optimizer = trained()
    nested = {"model": model, "train": {"optimizer": optimizer}}
    plain = {"train": {"optimizer": optimizer}}
    for call in (
        lambda: run.save(2, nested),
        lambda: run.restore(nested),
        lambda: dcp.save(
            plain, storage_writer=CheckpointWriter(tmp_path / "c"), planner=CheckpointSavePlanner(), no_dist=True
        ),
    ):
        with pytest.raises((UsageError, CheckpointException)) as caught:
            call()
        error = caught.value.failures[0][0] if isinstance(caught.value, CheckpointException) else caught.value
        assert str(error) == (
            "'train.optimizer' is a AdamW inside another value, where its state_dict() is not used: "
            "make it a direct member of the state dict, as {'optimizer': optimizer}"
        )
    with pytest.raises(UsageError, match="inside another value"):
        CheckpointLoadPlanner().set_up_planner(plain)
    assert run.steps() == [1]


def test_second_manager_of_same_process_is_named_in_the_error(tmp_path):
    with CheckpointManager(tmp_path / "run") as first:
        first.save(1, state())
        with CheckpointManager(tmp_path / "run", rewind=True) as second:
            second.save(2, state())
            with pytest.raises(MillraceError, match="another manager in this process saves into") as caught:
                first.save(3, state())
            assert is_one_line(caught.value)
            assert "another process" not in str(caught.value)
