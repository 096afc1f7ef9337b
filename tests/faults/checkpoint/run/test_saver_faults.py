"""The saver process of a manager that dies, whose training process dies, or that receives signals."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.support.fork_server import ForkedProcess, torch_server
from tests.support.interrupts import interrupted_inside
from tests.support.runs import assert_whole, local_run
from tests.support.savers import (
    KILLED_AFTER,
    child_has_died,
    child_of,
    first_upload_fails,
    is_gone,
    pid_of,
    savers_with,
)
from tests.support.waiting import in_other_thread, wait_until

from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.run import saver_process, uploading
from millrace.checkpoint.run.processes import is_stopped
from millrace.checkpoint.run.run_layout import parse_name
from millrace.checkpoint.run.save_values import RunState
from millrace.checkpoint.run.saver_protocol import Channel, Save
from millrace.checkpoint.run.saving import SaveProgress
from millrace.errors import CorruptCheckpointError, RunTakenError, SaverDiedError, UsageError
from millrace.events import Event, add_hook


def state(value: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"w": torch.randn(400_000, generator=generator) * value, "b": torch.full((7,), value), "note": value}


def check(run: CheckpointManager, step: int, value: float) -> None:
    found = {"w": torch.zeros(400_000), "b": torch.zeros(7), "note": 0.0}
    assert run.restore(found, step) == step
    wanted = state(value)
    assert torch.equal(found["w"], wanted["w"])
    assert torch.equal(found["b"], wanted["b"])
    assert found["note"] == value


@pytest.mark.parametrize("operations", [0, 2, 4, 5, 6, 8])
def test_saver_killed_during_a_save_fails_it_and_the_next_save_works(tmp_path: Path, operations: int) -> None:
    with CheckpointManager(tmp_path / "run", keep=2) as run:
        run.save(1, state(1.0))
        run.save(2, state(1.5))
        with savers_with(KILLED_AFTER.format(operations=operations)):
            pending = run.save_async(3, state(2.0))
            error = pending.exception()
        died = error is not None
        if died:
            assert isinstance(error, SaverDiedError)
            assert "SIGKILL" in error.message
            assert f"{tmp_path}/run ended during the save of step 3" in error.message
            again = pickle.loads(pickle.dumps(error))
            assert (type(again), str(again)) == (type(error), str(error))
        assert_whole(local_run(tmp_path / "run"))
        # The same step: whether it was published just before the end is not known.
        assert run.save_async(3, state(3.0)).exception() is None
        assert run.save_async(4, state(4.0)).result() is not None
        check(run, 3, 3.0)
        check(run, 4, 4.0)
        assert run.steps()[-2:] == [3, 4]
        assert_whole(local_run(tmp_path / "run"))
    names = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
    complete = {path.parent.name for path in (tmp_path / "run").glob("step-*/manifest.millrace")}
    needed = {file.parts[0] for name in complete for file in _siblings(tmp_path / "run" / name)}
    assert names == complete | needed, "the files of the killed save were removed"
    assert died or operations == 8


def _siblings(place: Path) -> list[Path]:
    from millrace.checkpoint.storage.manifests import read_manifest
    from millrace.checkpoint.storage.storage import open_storage

    files = read_manifest(open_storage(place)).manifest.files
    return [Path(file.name.removeprefix("../")) for file in files if file.name.startswith("../")]


def test_killed_saver_does_not_take_the_run_back(tmp_path: Path, events: list[Event]) -> None:
    old = CheckpointManager(tmp_path / "run")
    old.save_async(1, state(1.0)).result()
    with CheckpointManager(tmp_path / "run") as new:
        new.save(2, state(2.0))
        os.kill(pid_of(old), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises((SaverDiedError, RunTakenError)) as caught:
                old.save_async(3, state(3.0)).result()
            if isinstance(caught.value, RunTakenError):
                break
        assert isinstance(caught.value, RunTakenError)
        new.save(3, state(4.0))
        check(new, 3, 4.0)
    old.close()
    assert "run.save.ended" in {event.name for event in events}


def test_stopped_saver_is_killed_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_process, "_LOOK_SECONDS", 0.1)
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        os.kill(pid_of(run), signal.SIGSTOP)
        assert isinstance(run.save_async(2, state(2.0)).exception(timeout=100), SaverDiedError)
        assert run.save_async(2, state(2.0)).exception() is None
        check(run, 2, 2.0)
        os.kill(pid_of(run), signal.SIGSTOP)
    (claim,) = (tmp_path / "run").glob("writer-*")
    assert json.loads(claim.read_bytes())["released"]


# A signal to the process would be taken by another thread, and this one could publish before it stops.
STOP_BEFORE_THE_MANIFEST = """
import signal, threading
from millrace.checkpoint.storage import replicating, storage
replicating._AT_ONCE_SECONDS = 0
publish = storage.LocalStorage.publish
def stop_first(self, name, data, *, replace):
    if name == "manifest.millrace" and self.url.endswith("run/step-000000000004"):
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    publish(self, name, data, replace=replace)
storage.LocalStorage.publish = stop_first
"""


@pytest.mark.parametrize("is_tiered", [False, True])
@pytest.mark.parametrize("keep", [1, "all"])
def test_saver_stopped_before_the_manifest_while_the_run_is_taken_publishes_no_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int | str, is_tiered: bool
) -> None:
    monkeypatch.setattr(saver_process, "_MAX_STOPPED_LOOKS", 1000)

    def slowly_changing(step: int) -> dict[str, Any]:
        return {**state(1.0), "b": torch.full((7,), float(step))}

    with savers_with(STOP_BEFORE_THE_MANIFEST):
        run = CheckpointManager(tmp_path / "run", local=tmp_path / "near" if is_tiered else None)
        for step in (1, 2, 3):
            run.save_async(step, slowly_changing(step)).result()
        pending = run.save_async(4, slowly_changing(4))
        wait_until(lambda: is_stopped(pid_of(run)))
    with CheckpointManager(tmp_path / "run", full_every=1, keep=keep) as other:
        for step in (5, 6, 7):
            other.save(step, slowly_changing(step))
        os.kill(pid_of(run), signal.SIGCONT)
        error = pending.exception(timeout=100)
        steps = other.steps()
        for step in steps:
            found = {"w": torch.zeros(400_000), "b": torch.zeros(7), "note": 0.0}
            assert other.restore(found, step) == step
            assert all(torch.equal(found[name], slowly_changing(step)[name]) for name in ("w", "b"))
        if keep == "all":
            assert error is None
            assert 4 in steps
        else:
            assert isinstance(error, RunTakenError)
            assert 4 not in steps
    run.close()


def test_saver_that_stopped_before_a_long_message_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_process, "_LOOK_SECONDS", 0.1)
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, {"data": bytes(2 << 20)}).result()
        os.kill(pid_of(run), signal.SIGSTOP)
        assert isinstance(run.save_async(2, {"data": bytes(2 << 20)}).exception(timeout=100), SaverDiedError)
        assert run.save_async(2, {"data": bytes(2 << 20)}).exception() is None


def test_ctrl_c_inside_a_long_message_ends_the_saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the next messages for the rest, and never answer."""

    def interrupt(look: object) -> None:
        raise KeyboardInterrupt

    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        saver, stopped = run._saver, pid_of(run)
        assert saver is not None
        os.kill(stopped, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(saver_process._Looks, "__call__", interrupt)
            with pytest.raises(KeyboardInterrupt):
                saver.take_state(RunState(versions={"data": "v" * (2 << 20)}), None)
        os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: child_has_died(run))
        assert run.save_async(2, state(2.0)).exception() is None


def test_death_of_a_saver_whose_socket_a_fork_inherited_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = saver_process._spawn
    children: list[int] = []

    def spawn(descriptor: int) -> subprocess.Popen[bytes]:
        process = original(descriptor)
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        children.append(child)
        return process

    monkeypatch.setattr(saver_process, "_spawn", spawn)
    run = CheckpointManager(tmp_path / "run")
    try:
        run.save_async(1, state(1.0)).result()
        saver = child_of(run)
        os.kill(saver.process.pid, signal.SIGKILL)
        wait_until(lambda: saver.death is not None)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    run.close()


def test_idle_saver_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        first = pid_of(run)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: child_has_died(run))
        # Nothing was in flight.
        assert run.save_async(2, state(2.0)).exception() is None
        assert pid_of(run) != first
        with pytest.raises(UsageError, match="step 1 is not beyond step 2"):
            run.save_async(1, state(3.0)).result()
        # A synchronous save after the death of the saver, too.
        os.kill(pid_of(run), signal.SIGKILL)
        assert run.save(3, state(3.0)).step == 3
        check(run, 2, 2.0)
        check(run, 3, 3.0)


def test_close_after_the_death_of_the_saver_releases_the_run(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        (claim,) = (tmp_path / "run").glob("writer-*")
        assert not json.loads(claim.read_bytes())["released"]
        os.kill(pid_of(run), signal.SIGKILL)
    assert json.loads(claim.read_bytes())["released"]


def test_saver_that_cannot_start_again_makes_later_calls_wait(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        saver = child_of(run)
        os.kill(saver.process.pid, signal.SIGKILL)
        wait_until(lambda: saver.death is not None)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
        assert run.save_async(2, state(2.0)).exception() is None
        with pytest.warns(
            RuntimeWarning, match="save_async.. of .*/run waits for the end of each save: it cannot start"
        ):
            pending = run.save_async(3, state(3.0))
        assert pending.done()
        assert pending.exception() is None
        assert run.save_async(4, state(4.0)).exception() is None, "there is one warning"
        check(run, 2, 2.0)
        check(run, 4, 4.0)
    assert [event.name for event in events].count("run.saver.unavailable") == 1
    assert [path.name for path in (tmp_path / "run").glob("writer-*")] == ["writer-000000000001.json"]


def test_saver_killed_during_an_upload_is_an_error_and_the_next_save_uploads_both(tmp_path: Path) -> None:
    stop = """
import os, signal
from millrace.checkpoint.run.uploading import Uploader
Uploader.upload = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
"""
    with CheckpointManager(tmp_path / "run", local=tmp_path / "near") as run:
        with savers_with(stop):
            pending = run.save_async(1, state(1.0))
            assert pending.near.result() is not None
            assert isinstance(pending.exception(), SaverDiedError)
        assert run.save_async(2, state(2.0)).result() is not None
    with CheckpointManager(tmp_path / "run") as far:
        assert far.steps() == [1, 2]
        check(far, 1, 1.0)
        check(far, 2, 2.0)


def test_failed_thread_of_the_saver_ends_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = """
from millrace.checkpoint.run import engine
class Collapse(BaseException): pass
def collapse(*arguments): raise Collapse("a defect")
engine.SaveEngine.save = collapse
"""
    with CheckpointManager(tmp_path / "run") as run, savers_with(broken):
        error = run.save_async(1, state(1.0)).exception()
    assert isinstance(error, SaverDiedError)
    assert "exit status 1" in error.message
    assert "a defect" in capfd.readouterr().err


def test_unexpected_error_in_the_saver_keeps_its_type_and_traceback(tmp_path: Path) -> None:
    broken = """
from millrace.checkpoint.run import run_saver
def fails(*arguments): raise ZeroDivisionError("a defect")
run_saver.RunSaver.order = fails
"""
    with CheckpointManager(tmp_path / "run") as run, savers_with(broken):
        error = run.save_async(1, state(1.0)).exception()
        assert isinstance(error, ZeroDivisionError)
        assert "in fails" in "".join(error.__notes__)


def test_saver_that_ends_while_an_upload_reports_its_progress_fails_the_saves(tmp_path: Path) -> None:
    """It has no descriptor left for the memory of the second save, so that its thread which receives messages fails."""
    uploading, continued = threading.Event(), threading.Event()

    def report(progress: SaveProgress) -> None:
        if progress.phase == "uploading":
            uploading.set()
            continued.wait(300)

    with CheckpointManager(tmp_path / "run", local=tmp_path / "near", on_progress=report) as run:
        first = run.save_async(1, state(1.0))
        assert uploading.wait(300)
        try:
            _, most = resource.prlimit(pid_of(run), resource.RLIMIT_NOFILE)
            resource.prlimit(pid_of(run), resource.RLIMIT_NOFILE, (3, most))
            second = run.save_async(2, {**state(2.0), "more": torch.zeros(2_000_000)})
            assert isinstance(second.near.exception(timeout=100), SaverDiedError)
        finally:
            continued.set()
        assert isinstance(first.exception(timeout=100), SaverDiedError)
        assert run.save_async(2, state(2.0)).exception() is None
    with CheckpointManager(tmp_path / "run") as run:
        assert run.steps() == [1, 2]


def test_saver_that_cannot_map_the_state_reports_it_on_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        used = int(Path(f"/proc/{pid_of(run)}/statm").read_text().split()[0]) * resource.getpagesize()
        _, most = resource.prlimit(pid_of(run), resource.RLIMIT_AS)
        resource.prlimit(pid_of(run), resource.RLIMIT_AS, (used + (16 << 20), most))
        error = run.save_async(2, {"w": torch.zeros(16_000_000)}).exception(timeout=100)
    assert isinstance(error, SaverDiedError)
    assert "exit status 1" in error.message
    assert "64000000 bytes of shared memory cannot be mapped (Cannot allocate memory)" in capfd.readouterr().err


def test_upload_that_an_exception_of_any_kind_ends_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A library may raise a `BaseException`, such as `asyncio.CancelledError`."""
    broken = """
import asyncio
from millrace.checkpoint.run.uploading import Uploader
def cancelled(*arguments): raise asyncio.CancelledError("the upload was cancelled")
Uploader.upload = cancelled
"""
    with CheckpointManager(tmp_path / "run", local=tmp_path / "near") as run:
        with savers_with(broken):
            pending = run.save_async(1, state(1.0))
            assert pending.near.exception() is None
            assert isinstance(pending.exception(timeout=100), SaverDiedError)
        assert "the upload was cancelled" in capfd.readouterr().err
        assert run.save_async(2, state(2.0)).exception() is None
        assert run.steps() == [1, 2]


def test_message_that_the_kernel_refuses_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver runs, and would wait for the message without end."""
    send = Channel.send

    def refuse(self: Channel, message: object, *arguments: Any, **options: Any) -> None:
        if isinstance(message, Save):
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        send(self, message, *arguments, **options)

    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send", refuse)
            assert isinstance(run.save_async(2, state(2.0)).exception(timeout=100), SaverDiedError)
        assert run.save_async(2, state(2.0)).exception() is None


def test_hook_that_ends_the_receiving_thread_fails_the_save(tmp_path: Path) -> None:
    def leave(event: Event) -> None:
        if event.name == "run.saved":
            remove()
            sys.exit("a hook ends the program")

    remove = add_hook(leave)
    with CheckpointManager(tmp_path / "run") as run:
        error = run.save_async(1, state(1.0)).exception(timeout=100)
        assert isinstance(error, SaverDiedError)
        assert "SystemExit: a hook ends the program" in error.message
        assert run.save_async(1, state(2.0)).exception() is None
        check(run, 1, 2.0)


def test_saver_that_a_signal_without_a_name_ends_fails_the_save(tmp_path: Path) -> None:
    number = signal.SIGRTMIN + 5
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        os.kill(pid_of(run), signal.SIGSTOP)
        pending = run.save_async(2, state(2.0))
        os.kill(pid_of(run), number)
        os.kill(pid_of(run), signal.SIGCONT)
        error = pending.exception(timeout=100)
        assert isinstance(error, SaverDiedError)
        assert f"signal {number}" in error.message
        assert run.save_async(2, state(2.0)).exception() is None


# --- the end of the training process --------------------------------------------------------------


@pytest.mark.parametrize("forks", [False, True])
def test_saver_of_a_killed_training_process_ends(tmp_path: Path, forks: bool) -> None:
    code = f"""
        import os, signal, sys, time, torch
        from millrace.checkpoint import CheckpointManager
        run = CheckpointManager({str(tmp_path / "run")!r})
        run.save_async(1, {{"w": torch.ones(500_000)}}).result()
        if {forks} and os.fork() == 0:
            # Holds this process's end of the socket.
            os.close(1)
            time.sleep(600)
            os._exit(0)
        for step in range(2, 50):
            run.save_async(step, {{"w": torch.randn(3_000_000)}})
            print(run._saver.pid, flush=True)
        time.sleep(600)
    """
    log = tmp_path / "log"
    with ForkedProcess(torch_server(), textwrap.dedent(code), log=log, pipes=True) as parent:
        saver = int(parent.stdout.readline() or log.read_text())
        parent.stdout.readline()
        assert not is_gone(saver)
        parent.kill()
        try:
            wait_until(lambda: is_gone(saver))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
    assert_whole(local_run(tmp_path / "run"))
    with CheckpointManager(tmp_path / "run") as run:
        newest = run.latest()
        assert newest is not None
        run.save(newest + 1, {"w": torch.zeros(3)})
        assert run.latest() == newest + 1


@pytest.mark.slow
def test_end_of_the_script_waits_for_the_save_and_ends_the_saver(tmp_path: Path) -> None:
    """Without a guard of the main module, without `close`, and with an exception at the end."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        from millrace.checkpoint import CheckpointManager
        run = CheckpointManager({str(tmp_path / "run")!r})
        run.save_async(1, {{"w": torch.ones(3_000_000)}})
        run.save_async(2, {{"w": torch.randn(3_000_000)}})
        print(run._saver.pid, flush=True)
        raise SystemExit("the loop failed")
        """)
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.stderr == "the loop failed\n"
    assert is_gone(int(ended.stdout))
    with CheckpointManager(tmp_path / "run") as run:
        assert run.steps() == [1, 2]


# --- signals --------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys, time, torch
from millrace.checkpoint import CheckpointManager
run = CheckpointManager(sys.argv[1])
run.save_async(1, {"w": torch.ones(3)}).result()
pending = run.save_async(2, {"w": torch.ones(20_000_000)})
try:
    print(run._saver.pid, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    print(pending.result().step, flush=True)
    run.close()
"""


@pytest.mark.slow
def test_ctrl_c_during_a_save_does_not_end_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ForkedProcess(torch_server(), INTERRUPTED, str(tmp_path / "run"), log=log, pipes=True) as child:
        saver = int(child.stdout.readline() or log.read_text())
        # As a terminal does, to the whole group; and to the saver, as a scheduler does to all processes of a job.
        os.killpg(child.pid, signal.SIGINT)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(saver, number)
        assert child.output().split() == ["interrupted", "2"]
    assert is_gone(saver)


def test_ctrl_c_while_close_waits_for_the_end_of_the_saver_leaves_no_lock_behind(tmp_path: Path) -> None:
    """`Popen.wait` with a timeout keeps its lock if Ctrl-C comes just after it was acquired."""

    def interrupt(frame: FrameType, event: str, function: Any) -> None:
        is_waiting = frame.f_code is subprocess.Popen._wait.__code__
        if is_waiting and event == "c_return" and function.__name__ == "acquire":
            sys.setprofile(None)
            raise KeyboardInterrupt

    run = CheckpointManager(tmp_path / "run")
    run.save_async(1, state(1.0)).result()
    child = child_of(run)
    sys.setprofile(interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            run.close()
        in_other_thread(lambda: child.stop(patience=0.0))
    finally:
        sys.setprofile(None)
        if child.process._waitpid_lock.locked():
            child.process._waitpid_lock.release()
    assert is_gone(child.process.pid)


def test_answer_to_an_interrupted_question_is_not_that_to_the_next_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        saver = run._saver
        assert saver is not None
        os.kill(pid_of(run), signal.SIGSTOP)
        try:
            with pytest.raises(KeyboardInterrupt):
                interrupted_inside(saver_process._Child._next, lambda: saver.order(2))
        finally:
            os.kill(pid_of(run), signal.SIGCONT)
        assert parse_name(saver.order(7).name) == (7, 0)
        assert isinstance(saver.give_state()[0], RunState)


def test_interrupted_move_of_the_run_leaves_no_state_and_no_claim(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        stopped = pid_of(run)
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(KeyboardInterrupt):
            interrupted_inside(saver_process._Child._next, run._move_here)
        assert is_gone(stopped)
        assert run.save(2, state(2.0)).kind == "full"
        assert run.save_async(3, state(3.0)).exception() is None
        assert len(child_of(run)._held) == 1
        check(run, 2, 2.0)


FAIL_FIRST_UPLOAD = first_upload_fails("CorruptCheckpointError")


@pytest.mark.parametrize("where", ["in the training process", "in a saver that dies"])
def test_save_that_never_reached_the_url_counts_for_nothing_also_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with savers_with(FAIL_FIRST_UPLOAD), CheckpointManager(tmp_path / "run", local=tmp_path / "near") as run:
        if where == "in the training process":
            with monkeypatch.context() as patch:
                patch.setattr(uploading, "copy_files", uploading.copy_files)  # restored at the end
                exec(FAIL_FIRST_UPLOAD, {})
                with pytest.raises(CorruptCheckpointError):
                    run.save(1, state(1.0))
        else:
            assert isinstance(run.save_async(1, state(1.0)).exception(), CorruptCheckpointError)
            os.kill(pid_of(run), signal.SIGKILL)
            wait_until(lambda: child_has_died(run))
        results = [run.save_async(step, state(float(step))).result() for step in (2, 3, 4)]
        assert [result and result.kind for result in results] == ["full", "full", "delta"]


def test_saver_does_not_load_torch(tmp_path: Path) -> None:
    """It would take seconds of the first save, and hundreds of MB for each rank."""
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, {**state(1.0), "numbers": [1, 2.0], "path": {"lr": 1e-3, "dtype": torch.bfloat16}}).result()
        assert "libtorch" not in Path(f"/proc/{pid_of(run)}/maps").read_text()


def test_saver_has_a_low_priority(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        assert os.getpriority(os.PRIO_PROCESS, pid_of(run)) == expected


def test_saver_without_a_training_process_ends() -> None:
    """It was killed before the saver had asked the kernel to be ended with it."""
    ended = subprocess.run(
        [sys.executable, "-c", saver_process._CODE, "0", "0", "1"], capture_output=True, timeout=300, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_restore_in_a_fork_during_a_message_to_the_saver_returns(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, {"b": torch.ones(7)}).result()
        with child_of(run)._channel._sending:
            worker = os.fork()
            if worker == 0:
                signal.alarm(300)  # ends a worker that waits for the lock
                found = {"b": torch.zeros(7)}
                os._exit(0 if run.restore(found) == 1 and found["b"].tolist() == [1.0] * 7 else 1)
        assert os.waitpid(worker, 0)[1] == 0
        assert run.save(2, {"b": torch.zeros(7)}).step == 2


def test_fork_during_a_save_does_not_affect_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as run:
        run.save_async(1, state(1.0)).result()
        os.kill(pid_of(run), signal.SIGSTOP)
        pending = run.save_async(2, state(2.0))
        worker = os.fork()
        if worker == 0:
            # As a data loader's worker that ends with all its objects.
            run.close()
            del run, pending
            os._exit(0)
        os.kill(pid_of(run), signal.SIGCONT)
        assert os.waitpid(worker, 0)[1] == 0
        assert pending.result() is not None
        check(run, 2, 2.0)
