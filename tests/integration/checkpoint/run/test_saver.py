"""Asynchronous saves through the saver process: what is saved, what the training process does, and what comes back."""

from __future__ import annotations

import enum
import gc
import logging
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fork_server import ForkedProcess, torch_server
from tests.support.savers import FEW_TRIES, is_gone, no_files_in, pid_of, savers_with
from tests.support.servers import steady_port
from tests.support.states import assert_same_state
from tests.support.waiting import wait_until

from millrace.checkpoint import CheckpointManager, load_weights
from millrace.checkpoint.run import manager as manager_module
from millrace.checkpoint.run import saver_process
from millrace.checkpoint.run.uploading import TieredSave
from millrace.checkpoint.state.arena import regions
from millrace.checkpoint.writing.state_plan import PlannedState
from millrace.errors import (
    DeniedError,
    DiskFullError,
    MillraceError,
    OriginUnavailableError,
    UnsupportedObjectError,
    UsageError,
)
from millrace.events import Event
from millrace.testing.s3 import S3Server


def empty_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: empty_like(each) for key, each in value.items()}
    if isinstance(value, list):
        return type(value)(empty_like(each) for each in value)
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def training_state(seed: int = 0) -> dict[str, Any]:
    """Large, small, tied, empty, foreign-strided tensors, and values of several kinds."""
    torch.manual_seed(seed)
    weight = torch.randn(700, 900)
    return {
        "model": {"weight": weight, "tied": weight, "transposed": torch.randn(30, 50).t(), "scalar": torch.tensor(3.5)},
        "bf16": torch.randn(4097).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "bool": torch.rand(77) > 0.5,
        "step": seed,
        "groups": [{"lr": 0.1 / (seed + 1), "betas": (0.9, 0.999), "params": [0, 1]}],
        "in a tuple": (1, torch.full((5,), float(seed))),
        "text": "x" * seed,
        "numbers": list(range(seed)),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        7: {"a number as key": seed},
    }


def test_states_of_all_kinds_are_restored_as_they_were(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        states = [training_state(seed) for seed in range(4)]
        for step, state in enumerate(states):
            run.save_async(step, state).result()
        for step, state in enumerate(states):
            found = empty_like(state)
            assert run.restore(found, step) == step
            assert_same_state(found, state)


def test_structure_is_planned_once_and_again_after_each_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[list[str]] = []
    original = PlannedState.of.__func__

    def counted(cls: Any, state: Any, *rest: Any) -> Any:
        planned.append(list(state))
        return original(cls, state, *rest)

    monkeypatch.setattr(PlannedState, "of", classmethod(counted))
    first = {"a": torch.ones(10), "b": {"c": torch.zeros(3), "n": 1}}
    changed: list[dict[str, Any]] = [
        {"a": torch.ones(10), "b": {"c": torch.zeros(3), "n": 1, "m": 2}},
        {"a": torch.ones(10), "b": {"c": torch.zeros(4), "n": 1, "m": 2}},
        {"a": torch.ones(10, dtype=torch.float16), "b": {"c": torch.zeros(4), "n": 1, "m": 2}},
        {"a": torch.ones(10, dtype=torch.float16), "b": [torch.zeros(4), 1, 2]},
        {"a": torch.ones(10, dtype=torch.float16), "c": [torch.zeros(4), 1, 2]},
        {"a": torch.ones(10, dtype=torch.float16), "c": [torch.zeros(4), 1, [2, torch.ones(1)]]},
        {"a": torch.ones(10, dtype=torch.float16), "c": (torch.zeros(4), 1, [2, torch.ones(1)])},
    ]
    tied = torch.ones(10)
    changed += [{"a": tied, "b": tied.clone()}, {"a": tied, "b": tied}]
    saved: list[dict[str, Any]] = []
    with CheckpointManager(tmp_path / "run", full_every=1) as run:
        for state in (first, *changed):
            before = len(planned)
            for number in range(3):
                for value in (state.get("b"), state.get("a")):
                    if isinstance(value, torch.Tensor):
                        value.add_(1)
                    elif isinstance(value, dict):
                        value["n"] = number
                saved.append({key: _copied(value) for key, value in state.items()})
                run.save_async(len(saved), state).result()
            assert len(planned) == before + 1, list(state)
        for step, expected in enumerate(saved, 1):
            found = empty_like(expected)
            run.restore(found, step)
            assert_same_state(found, expected, f"step {step}")


class Buffers(list[Any]):
    pass


A, B = torch.arange(3.0), torch.arange(3.0, 6.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # Two buffers of which one is empty.
        ({"front": torch.empty(0), "back": A}, {"front": A, "back": torch.empty(0)}),
        ({"a": A, "value": B, "b": 5}, {"a": 5, "b": A, "value": B}),
        ({"a": A, "end": B, "b": {"c": 1}}, {"a": A, "b": {"c": 1}, "end": B}),
        # Tensors outside of the shared memory.
        ({"buffers": Buffers([A.clone()])}, {"buffers": Buffers([B.clone()])}),
    ],
)
def test_structure_that_resembles_the_former_one_is_saved_as_it_is(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    with CheckpointManager(tmp_path / "run", trusted_types=(Buffers,)) as run:
        for step, state in enumerate((one, other), 1):
            run.save_async(step, state).result()
        found = empty_like(other)
        run.restore(found, 2)
        assert_same_state(found, other)


class Part(str, enum.Enum):  # noqa: UP042 - the text of a member is not its value
    HEAD = "head"


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, False), (0.0, -0.0), (Part.HEAD, "head")])
def test_key_that_equals_the_former_one_is_saved_with_its_own_text(tmp_path: Path, one: Any, other: Any) -> None:
    states: list[dict[str, Any]] = [{"m": {key: torch.full((4,), number)}} for number, key in enumerate((one, other))]
    with CheckpointManager(tmp_path / "run") as run:
        for step, state in enumerate(states):
            run.save_async(step, state).result()
        for step, state in enumerate(states):
            found = empty_like(state)
            run.restore(found, step)
            assert_same_state(found, state)
            assert list(load_weights(run.metadata(step).url)) == [f"m.{next(iter(state['m']))!s}"]


def test_value_is_found_by_its_key_next_to_one_with_the_same_text(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        for step in (1, 2):
            run.save_async(step, {"a": {"1": {}, 1: step}}).result()
        found = {"a": {1: 0}}
        run.restore(found)
    assert found == {"a": {1: 2}}


def _copied(value: Any) -> Any:
    import copy

    return copy.deepcopy(value)


def test_twenty_thousand_tensors_are_saved_and_use_no_descriptor_each(tmp_path: Path) -> None:
    values = torch.randn(20_000, 16)
    state = {"model": {f"layers.{number}.bias": row.clone() for number, row in enumerate(values)}}
    with CheckpointManager(tmp_path / "run", full_every=1) as run:
        before = len(os.listdir("/proc/self/fd"))
        run.save_async(1, state).result()
        state["model"]["layers.7.bias"].zero_()
        run.save_async(2, state).result()
        assert len(os.listdir("/proc/self/fd")) < before + 20
        found = empty_like(state)
        assert run.restore(found) == 2
        assert_same_state(found, state)


def test_saver_writes_the_bytes_of_a_synchronous_save(tmp_path: Path) -> None:
    stored = []
    for name in ("sync", "async"):
        state = training_state(3)
        with CheckpointManager(tmp_path / name, independent=False) as run:
            for step in (1, 2):
                if name == "sync":
                    result = run.save(step, state)
                else:
                    result = run.save_async(step, state).result()
                assert result is not None
                state["model"]["weight"].mul_(1.0001)
        data = [path.read_bytes() for path in sorted((tmp_path / name).glob("step-*/data-*"))]
        stored.append((data, result.kind, result.chunks_delta, result.chunks_full, result.raw_bytes))
    assert stored[0] == stored[1]
    assert stored[0][1] == "delta"


def test_synchronous_and_asynchronous_saves_continue_each_other(s3: S3Server, bucket: str) -> None:
    """The copy of the last state is passed on, without which a run in an object store would save in full."""
    state = training_state()
    with CheckpointManager(f"s3://{bucket}/run", target_options=s3.target_options, independent=False) as run:
        results = []
        for step in range(1, 8):
            if step in (3, 4, 7):
                results.append(run.save(step, state))
            else:
                results.append(run.save_async(step, state).result())
            state["model"]["weight"].mul_(1.0001)
            state["step"] = step
        # The third and the fifth save continue from the copy of the other process. Two deltas cost as much as a full save.
        assert [result.kind for result in results if result] == ["full", "delta", "delta"] * 2 + ["full"]
        assert run.steps() == list(range(1, 8))
        claims = [info.key for page in _pages(s3, bucket) for info in page if "writer-" in info.key]
        assert len(claims) == 1
        assert claims[0].endswith("writer-000000000001.json")
    with CheckpointManager(f"s3://{bucket}/run", target_options=s3.target_options) as again:
        found = empty_like(state)
        assert again.restore(found) == 7
        assert found["step"] == 6


def _pages(s3: S3Server, bucket: str) -> Any:
    from millrace.origin import open_origin

    return open_origin("s3", s3.target_options).list_all(bucket)


# --- errors, events, warnings and log lines ---------------------------------------------------------


def test_errors_arrive_with_their_types(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    state = {"w": torch.ones(1000)}
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state).result()
        with no_files_in(run), pytest.raises(DiskFullError):
            run.save_async(2, state).result()
        with pytest.raises(UnsupportedObjectError, match="'sparse'"):
            run.save_async(2, {"sparse": torch.eye(3).to_sparse()}).result()
        with pytest.raises(UnsupportedObjectError, match=r"'handlers\.one\.set'.*contains object"):
            run.save_async(2, {"handlers": {"one": {"set": object}}, **state}).result()
        with pytest.raises(UsageError, match="two values"):
            run.save_async(2, {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}).result()
        with pytest.raises(UsageError, match="step 0 is not beyond"):
            run.save_async(0, state).result()
        assert run.save_async(2, state).exception() is None
        assert run.steps() == [1, 2]
    wrong = {**s3.target_options, "secret": "wrong"}
    with CheckpointManager(f"s3://{bucket}/run", target_options=wrong) as run, pytest.raises(DeniedError):
        run.save_async(1, state).result()


@pytest.mark.slow
def test_origin_that_is_down_is_an_error_of_its_type(tmp_path: Path) -> None:
    server = S3Server(tmp_path / "s3", port=steady_port())
    with server:
        server.create_bucket("runs")
        options = server.target_options
        with savers_with(FEW_TRIES), CheckpointManager("s3://runs/run", target_options=options) as run:
            run.save_async(1, {"w": torch.ones(10)}).result()
            server.stop()
            error = run.save_async(2, {"w": torch.ones(10)}).exception()
            assert isinstance(error, OriginUnavailableError)
            server.start()
            run.save_async(2, {"w": torch.ones(10)}).result()
            assert run.steps() == [1, 2]


def test_events_warnings_and_log_lines_reach_the_training_process(
    tmp_path: Path, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a directory")
    seen = []
    state = {"w": torch.ones(10)}
    with (
        caplog.at_level(logging.INFO, "millrace"),
        CheckpointManager(
            tmp_path / "run", local=tmp_path / "file", on_progress=seen.append, keep=1, full_every=1
        ) as run,
    ):
        with pytest.warns(RuntimeWarning, match="goes to the origin directly"):
            run.save_async(1, state).result()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for step in (2, 3):
                run.save_async(step, state).result()
    names = [event.name for event in events]
    assert names.count("run.saved") == 3
    assert "checkpoint.tier.refused" in names
    assert "checkpoint.pruned" in names
    saved = next(event for event in events if event.name == "run.saved")
    assert saved.values is not None
    assert saved.values["save_raw_bytes"] > 0
    assert {each.phase for each in seen} == {"writing", "done"}
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert any("a checkpoint was saved" in record.getMessage() for record in caplog.records)


def test_warning_that_is_an_error_does_not_block_the_upload(tmp_path: Path) -> None:
    warns = """
import warnings
from millrace.checkpoint.run import run_saver
original = run_saver.RunSaver._keep_base
def keep(self, *rest):
    warnings.warn("of the saver", RuntimeWarning)
    original(self, *rest)
run_saver.RunSaver._keep_base = keep
"""
    done: list[int] = []
    with CheckpointManager(
        tmp_path / "run", local=tmp_path / "near", on_progress=lambda progress: done.append(progress.done_bytes)
    ) as run:
        with savers_with(warns), warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in (1, 2):
                error = run.save_async(step, {"w": torch.ones(300_000)}).exception(timeout=100)
                assert isinstance(error, RuntimeWarning)
                assert "of the saver" in str(error)
        assert run.steps() == [1, 2]
    assert done


def test_log_line_of_the_saver_is_handled_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tests.support.savers import savers_with

    noisy = """
import logging
from millrace.checkpoint.run import run_saver
def fails(*arguments):
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("millrace.checkpoint").exception("a line of %s", "the saver")
    raise KeyError("x")
run_saver.RunSaver.order = fails
"""
    with CheckpointManager(tmp_path / "run") as run, savers_with(noisy):
        assert isinstance(run.save_async(1, {"w": torch.ones(3)}).exception(), KeyError)
    (line,) = [each for each in caplog.records if "a line of the saver" in each.getMessage()]
    assert line.name == "millrace.checkpoint"
    assert "ZeroDivisionError" in line.getMessage()


# --- the process ------------------------------------------------------------------------------------


def test_saver_starts_with_the_first_asynchronous_save_and_ends_with_the_manager(tmp_path: Path) -> None:
    run, other = CheckpointManager(tmp_path / "one"), CheckpointManager(tmp_path / "other")
    run.save(1, {"w": torch.ones(3)})
    assert run._saver is not None
    assert run._saver.pid is None
    run.save_async(2, {"w": torch.ones(3)}).result()
    other.save_async(1, {"w": torch.ones(3)}).result()
    first, second = pid_of(run), pid_of(other)
    assert first != second
    run.save_async(3, {"w": torch.ones(3)}).result()
    assert pid_of(run) == first
    run.close()
    assert is_gone(first)
    assert not is_gone(second)
    # Also without `close`.
    del other
    wait_until(lambda: gc.collect() >= 0 and is_gone(second))  # the thread of its save may still refer to it


def test_upload_continues_without_a_reference_to_the_manager(tmp_path: Path) -> None:
    def save() -> TieredSave:
        run = CheckpointManager(tmp_path / "run", local=tmp_path / "near")
        pending = run.save_async(1, {"w": torch.randn(2_000_000)})
        assert isinstance(pending, TieredSave)
        return pending

    pending = save()
    pending.near.result()
    gc.collect()
    assert pending.result() is not None
    assert CheckpointManager(tmp_path / "run").steps() == [1]


def test_save_process_is_accepted_and_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "_has_warned_of_save_process", False)
    with pytest.warns(FutureWarning, match="save_process has no effect"):
        CheckpointManager(tmp_path / "run", save_process=True).close()
    CheckpointManager(tmp_path / "run", save_process=False).close()


def test_options_that_no_other_process_can_import_save_in_this_process(tmp_path: Path, events: list[Event]) -> None:
    class KeepAllOfThem:  # local to this function
        def keep(self, checkpoints: Any, *, now: float) -> Any:
            return {each.name for each in checkpoints}

    with CheckpointManager(tmp_path / "run", keep=KeepAllOfThem()) as run:
        run.save_async(1, {"w": torch.full((3,), 1.0)}).result()
        with pytest.warns(RuntimeWarning, match="waits for the end of each save: the options cannot be pickled"):
            assert run.save_async(2, {"w": torch.full((3,), 2.0)}).done()
        assert run.steps() == [1, 2]
    assert [event.name for event in events].count("run.saver.unavailable") == 1


def test_save_continues_in_this_process_where_the_interpreter_cannot_start(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, {"w": torch.ones(3)}).result()
        assert run.steps() == [1]
    assert "run.saver.unavailable" in {event.name for event in events}


def test_save_continues_in_this_process_where_the_interpreter_ends_at_its_start(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its child is not a child of this process, and ends.
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\n{sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrapper))
    with CheckpointManager(tmp_path / "run") as run:
        assert run.save_async(1, {"w": torch.ones(3)}).exception() is None
        with pytest.warns(RuntimeWarning, match="waits for the end of each save"):
            assert run.save_async(2, {"w": torch.ones(3)}).exception() is None
        assert run.steps() == [1, 2]
    assert [event.name for event in events].count("run.saver.unavailable") == 1


def test_run_in_the_memory_of_this_process_is_saved_before_the_call_returns() -> None:
    with CheckpointManager("memory://saver/run") as run:
        with pytest.warns(RuntimeWarning, match="waits for the end of each save"):
            assert run.save_async(1, {"w": torch.ones(3)}).done()
        assert run.steps() == [1]


def test_executable_of_a_frozen_application_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with CheckpointManager(tmp_path / "run") as run:
        assert run._saver is None
        with pytest.warns(RuntimeWarning, match="waits for the end of each save"):
            assert run.save_async(1, {"w": torch.ones(3)}).exception() is None


def test_system_without_shared_memory_saves_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_process.os, "memfd_create", lambda *_: (_ for _ in ()).throw(OSError("refused")))
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, {"w": torch.ones(3)}).result()
        assert run._saver is None
        assert run.steps() == [1]


SCRIPT = """
import os, sys, torch
sys.path.append({modules!r})
import policies
from millrace.checkpoint import CheckpointManager
os.chdir({work!r})
class Settings:
    pass
run = CheckpointManager("run", keep=policies.KeepEven())
os.chdir("/")
for step in range(1, 5):
    run.save_async(step, {{"w": torch.full((3,), float(step))}}).result()
print(run._saver is not None, run.steps())
run.close()
"""


def test_script_with_changed_paths_and_without_a_guard_saves_through_the_process(tmp_path: Path) -> None:
    modules, work = tmp_path / "modules", tmp_path / "work"
    modules.mkdir()
    work.mkdir()
    (modules / "policies.py").write_text(
        textwrap.dedent("""
        class KeepEven:
            def keep(self, checkpoints, *, now):
                return {each.name for each in checkpoints if each.step % 2 == 0}
        """)
    )
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(modules=str(modules), work=str(work)))
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (ended.stderr, ended.returncode) == ("", 0)
    assert ended.stdout.startswith("True [")
    assert ended.stdout.rstrip().endswith("4]")
    assert (work / "run").is_dir()


SHARDED = """
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.writing.state_plan import PlannedState
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
planned, original = [], PlannedState.of.__func__
PlannedState.of = classmethod(lambda *arguments: planned.append(1) or original(*arguments))
def state(value):
    return {"w": distribute_tensor(torch.arange(1000.0) * value, mesh, [Shard(0)]), "plain": torch.ones(3) * value}
with CheckpointManager(sys.argv[1], independent=False) as run:
    kinds = [run.save_async(step, state(step)).result().kind for step in (1, 2, 3)]
    assert run._saver.pid is not None
    for step in (1, 2, 3):
        found = state(0)
        assert run.restore(found, step) == step
        assert torch.equal(found["w"].full_tensor(), torch.arange(1000.0) * step)
        assert torch.equal(found["plain"], torch.ones(3) * step)
print(kinds[0], len(planned))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_tensors_are_saved_without_a_process_group_in_the_saver(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ForkedProcess(torch_server(), SHARDED, str(tmp_path / "run"), log=log, pipes=True) as process:
        assert process.output().split() == ["full", "1"]


def test_fifty_saves_do_not_grow_the_saver(tmp_path: Path) -> None:
    state = {"w": torch.randn(500_000), "b": [torch.ones(40) for _ in range(200)], "n": 0}

    def resident() -> int:
        text = Path(f"/proc/{pid_of(run)}/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) << 10

    with CheckpointManager(tmp_path / "run", keep=3) as run:
        sizes, descriptors = [], []
        for step in range(50):
            state["w"].mul_(1.0001)
            state["n"] = step
            run.save_async(step, state).result()
            sizes.append(resident())
            descriptors.append(len(os.listdir(f"/proc/{pid_of(run)}/fd")))
        assert min(sizes[-10:]) < max(sizes[8:18]) + (8 << 20)
        assert min(descriptors[-10:]) <= max(descriptors[8:18])
        assert len(regions()) <= 3
        # A state that grows takes new memory, and gives the old one back.
        for step in range(50, 56):
            run.save_async(step, {"w": torch.ones(step * 40_000)}).result()
        mapped = Path(f"/proc/{pid_of(run)}/maps").read_text().count("memfd:millrace-staged")
        assert mapped <= 4
    wait_until(
        lambda: gc.collect() >= 0 and regions() == ()
    )  # the thread of the last save may still refer to its state


def test_error_is_a_millrace_error_for_a_state_that_contains_itself(tmp_path: Path) -> None:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    with CheckpointManager(tmp_path / "run") as run, pytest.raises(MillraceError, match="contains itself"):
        run.save_async(1, circle).result()
