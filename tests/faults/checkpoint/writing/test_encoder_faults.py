"""The encoder process of a manager: its death costs a save nothing, and it never outlives its parent."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from tests.support.waiting import wait_until

from millrace.checkpoint import CheckpointManager


def state(seed=0, count=4_000_000):
    generator = torch.Generator().manual_seed(seed)
    return {"model": {"w": torch.randn(count, generator=generator) * 0.02, "b": torch.ones(7)}}


def check(run, step, wanted):
    found = {"model": {key: torch.zeros_like(value) for key, value in wanted["model"].items()}}
    run.restore(found, step)
    for key, value in wanted["model"].items():
        assert torch.equal(found["model"][key], value)


def is_gone(pid):
    """Whether a process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_save_with_killed_encoder_continues(tmp_path, events):
    before, after = state(), state(1)
    with CheckpointManager(tmp_path, full_every=1, save_process=True, thread_count=1) as run:
        run.save(1, before)
        child = run._process.pid
        # Stopped: whatever is submitted from now on is under way when it dies.
        os.kill(child, signal.SIGSTOP)
        pending = run.save_async(2, after)
        wait_until(lambda: run._process._slot_of)
        os.kill(child, signal.SIGKILL)
        pending.result(300)
        assert "checkpoint.encoder.lost" in [event.name for event in events]
        check(run, 2, after)
        run.save(3, before)
        assert run._process.pid not in (None, child)
        check(run, 3, before)


def test_manager_without_save_process_starts_no_process(tmp_path):
    with CheckpointManager(tmp_path) as run:
        run.save(1, state())
        assert run._process is None
        check(run, 1, state())


def test_two_managers_have_separate_encoders(tmp_path):
    with (
        CheckpointManager(tmp_path / "a", save_process=True) as one,
        CheckpointManager(tmp_path / "b", save_process=True) as other,
    ):
        first, second = one.save_async(1, state(1)), other.save_async(1, state(2))
        first.result(300)
        second.result(300)
        children = {one._process.pid, other._process.pid}
        assert len(children) == 2
        check(one, 1, state(1))
        check(other, 1, state(2))
    assert all(is_gone(child) for child in children)


def test_fork_during_save_does_not_affect_it(tmp_path):
    values = state()
    with CheckpointManager(tmp_path, full_every=1, save_process=True) as run:
        run.save(1, values)
        os.kill(run._process.pid, signal.SIGSTOP)
        pending = run.save_async(2, values)
        wait_until(lambda: run._process._slot_of)
        worker = os.fork()
        if worker == 0:
            # As a data loader's worker that ends with all its objects.
            del run, pending
            os._exit(0)
        os.kill(run._process.pid, signal.SIGCONT)
        assert os.waitpid(worker, 0)[1] == 0
        pending.result(300)
        check(run, 2, values)


@pytest.mark.parametrize("forks", [False, True])
def test_encoder_of_killed_parent_ends(tmp_path, forks):
    code = f"""
        import os, sys, time, torch
        from millrace.checkpoint import CheckpointManager
        run = CheckpointManager({str(tmp_path / "run")!r}, save_process=True)
        run.save(1, {{"w": torch.ones(500_000)}})
        if {forks} and os.fork() == 0:
            # Holds the parent's end of the socket.
            os.close(1)
            time.sleep(60)
            os._exit(0)
        print(run._process.pid, flush=True)
        time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        child = int(parent.stdout.readline())
        assert not is_gone(child)
        parent.kill()
        parent.wait()
        try:
            wait_until(lambda: is_gone(child))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)


def test_save_from_thread_keeps_the_encoder_for_the_next(tmp_path):
    """The thread that starts the process ends; the process does not."""
    with CheckpointManager(tmp_path, full_every=1, save_process=True) as run:
        thread = threading.Thread(target=run.save, args=(1, state()))
        thread.start()
        thread.join()
        child = run._process.pid
        run.save(2, state())
        assert run._process.pid == child
