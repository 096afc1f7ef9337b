"""Asynchronous saves of two ranks in their saver processes: killed savers, killed and late ranks, node disks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support import ranks
from tests.support.savers import first_upload_fails, is_gone, pid_of, savers_with
from tests.support.waiting import wait_until
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.reading.reader import CheckpointReader
from millrace.checkpoint.run.claims import Claim
from millrace.checkpoint.run.run_layout import checkpoint_name, open_run
from millrace.errors import MillraceError, RetryableError, SaverDiedError, UsageError
from millrace.events import Event, add_hook
from millrace.testing.s3 import S3Server

ROWS = 300_000


def state(value: float, rows: int = ROWS) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(rows, generator=generator) * value
    return {
        "sharded": distribute_tensor(weight, mesh, [Shard(0)]),
        "frozen": distribute_tensor(torch.randn(ROWS, generator=generator.manual_seed(6)), mesh, [Shard(0)]),
        "replicated": torch.full((1000,), float(value)),
        "note": value,
    }


def check(run: CheckpointManager, step: int, value: float, rows: int = ROWS) -> None:
    found, expected = state(0.0, rows), state(value, rows)
    assert run.restore(found, step) == step
    for key in ("sharded", "frozen"):
        assert torch.equal(found[key].to_local(), expected[key].to_local())
    assert torch.equal(found["replicated"], expected["replicated"])
    assert found["note"] == value


def is_first() -> bool:
    return dist.get_rank() == 0


# --- what each rank does --------------------------------------------------------------------------


def save_in_both_ways(root: Path) -> None:
    """Synchronous and asynchronous saves alternate, and the structure changes."""
    with CheckpointManager(root / "run") as run:
        kinds = []
        for step in range(1, 9):
            rows = ROWS if step < 6 else ROWS + 7
            if step % 3:
                result = run.save_async(step, state(step, rows)).result()
            else:
                result = run.save(step, state(step, rows))
            assert result is not None
            kinds.append(result.kind)
            if result.kind == "delta":
                assert result.chunks_referenced > 0
        assert kinds[:5] == ["full", "full", *["delta"] * 3]
        # The default group and one more: nothing in the background makes a collective call.
        assert len(dist.distributed_c10d._world.pg_map) == 2
        with pytest.raises(UsageError, match="step 1 is not beyond step 8"):
            run.save_async(1, state(1)).result()
        for step in (2, 4, 5, 6, 8):
            check(run, step, step, ROWS if step < 6 else ROWS + 7)
        assert run.save_async(9, state(9)).exception() is None
    names = {path.name for path in (root / "run").glob("step-*/*")}
    assert not [name for name in names if name.startswith(("part-", "failed-"))]


def kill_the_saver_of_rank_1(root: Path) -> None:
    with CheckpointManager(root / "run", keep=10) as run:
        assert run.save_async(1, state(1)).exception() is None
        if not is_first():
            os.kill(pid_of(run), signal.SIGSTOP)
        pending = run.save_async(2, state(2))
        if not is_first():
            os.kill(pid_of(run), signal.SIGKILL)
        error = pending.exception()
        assert isinstance(error, SaverDiedError)
        assert "step 2" in error.message
        assert run.save_async(3, state(3)).exception() is None
        assert run.steps() == [1, 3]
        check(run, 1, 1)
        check(run, 3, 3)
    dist.barrier()
    assert {path.parent.name for path in (root / "run").glob("step-*/*")} == {checkpoint_name(1), checkpoint_name(3)}


def kill_the_saver_of_rank_0(root: Path) -> None:
    killed = """
import os, signal
from millrace.checkpoint.run import run_saver
run_saver.complete = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
"""
    with CheckpointManager(root / "run", keep=10) as run:
        run.save(1, state(1))
        with savers_with(killed if is_first() else ""):
            error = run.save_async(2, state(2)).exception()
        assert isinstance(error, SaverDiedError)
        assert run.save_async(2, state(4)).exception() is None
        check(run, 2, 4)
        check(run, 1, 1)


def interrupt_rank_1_before_its_save(root: Path) -> None:
    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("millrace-save-"):
            raise KeyboardInterrupt
        begin(thread)

    begin = threading.Thread.start
    with CheckpointManager(root / "run") as run:
        if is_first():
            error = run.save_async(1, state(1)).exception(timeout=60)
            assert isinstance(error, RetryableError)
            assert "did not begin" in error.message
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(threading.Thread, "start", start)
                with pytest.raises(KeyboardInterrupt):
                    run.save_async(1, state(1))
        assert run.save_async(2, state(2)).exception() is None
        check(run, 2, 2)


def cancel_a_save_of_rank_1(root: Path) -> None:
    def cancelled(*arguments: object) -> None:
        raise asyncio.CancelledError

    with CheckpointManager(root / "run", timeout="60s") as run:
        run.save(1, state(1))
        if not is_first():
            run._engine._saver.write = cancelled
        if is_first():
            with pytest.raises(UsageError, match=r"a rank failed \(CancelledError"):
                run.save(2, state(2))
        else:
            with pytest.raises(asyncio.CancelledError):
                run.save(2, state(2))


def kill_rank_1_in_a_restore(root: Path) -> None:
    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with CheckpointManager(root / "run") as run:
        run.save(1, state(1))
        if not is_first():
            CheckpointReader.read_data = die  # type: ignore[method-assign]
        with pytest.raises(RetryableError, match="another rank has ended"):
            run.restore(state(0))
        os._exit(0)  # without the barrier of all ranks


def end_after_a_save_that_failed_on_rank_1(root: Path) -> None:
    killed = """
import os, signal
from millrace.checkpoint.run import run_saver
run_saver.complete = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
"""
    with CheckpointManager(root / "run") as run:
        run.watch_preemption()
        with savers_with("" if is_first() else killed):
            error = run.save_async(1, state(1)).exception()
        assert error is None if is_first() else isinstance(error, SaverDiedError)
        if is_first():
            os.kill(os.getpid(), signal.SIGTERM)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert run.preempted(1, state(2))
        check(run, 1, 2)


def end_while_the_saver_of_rank_1_dies(root: Path) -> None:
    """The upload of the first save is in flight, so that the savers save the last one, too."""
    waits = f"""
import os, time
from millrace.checkpoint.run import uploading
copy = uploading.copy_files
def wait(*arguments, **options):
    while not os.path.exists({str(root / "died")!r}):
        time.sleep(0.01)
    copy(*arguments, **options)
uploading.copy_files = wait
"""
    dies = f"""
import signal
from millrace.checkpoint.run import engine
save = engine.SaveEngine.save
def killed(self, request, *arguments):
    if request.step == 2:
        open({str(root / "died")!r}, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return save(self, request, *arguments)
engine.SaveEngine.save = killed
"""
    with savers_with(waits if is_first() else waits + dies), on_nodes(root) as run:
        assert run.save_async(1, state(1)).near.exception() is None
        run.watch_preemption(grace_seconds=300)
        if is_first():
            os.kill(os.getpid(), signal.SIGTERM)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert run.preempted(2, state(2))
    with CheckpointManager(root / "run") as run:
        check(run, 2, 2)


def kill_rank_1(root: Path) -> None:
    hangs = """
import signal
from millrace.checkpoint.run import engine
engine.SaveEngine.save = lambda *arguments: signal.pause()
"""
    with savers_with("" if is_first() else hangs):
        run = CheckpointManager(root / "run", timeout="5s")
        pending = run.save_async(1, state(1))
    if not is_first():
        wait_until(lambda: run._saver is not None and run._saver.pid is not None)
        (root / "pid").write_text(str(pid_of(run)))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    error = pending.exception()
    assert isinstance(error, RetryableError)
    assert "did not arrive within 5 s: 1" in error.message
    os._exit(0)  # without the barrier of all ranks


def arrive_late(root: Path) -> None:
    """The saver of rank 1 begins to write when rank 0 has failed."""
    late = f"""
import os, time
from millrace.checkpoint.run import engine
save = engine.SaveEngine.save
def wait(*arguments):
    while not os.path.exists({str(root / "failed")!r}):
        time.sleep(0.05)
    return save(*arguments)
engine.SaveEngine.save = wait
"""
    with savers_with("" if is_first() else late), CheckpointManager(root / "run", timeout="3s") as run:
        pending = run.save_async(1, state(1))
        error = None
        if is_first():
            error = pending.exception()
            (root / "failed").touch()
        error = error or pending.exception()
        assert isinstance(error, RetryableError)
        assert "did not arrive within 3 s: 1" in error.message
        assert run.latest() is None
        dist.barrier()
        assert not list((root / "run").glob("step-*/data-*")), "both ranks have removed their files"
    with CheckpointManager(root / "run") as run:
        assert run.save_async(2, state(2)).exception() is None
        check(run, 2, 2)
    dist.barrier()
    assert not list((root / "run").glob("step-*/failed-*"))


def cannot_start_on_rank_1(root: Path) -> None:
    seen: list[Event] = []
    remove = add_hook(seen.append)
    if not is_first():
        sys.executable = str(root / "no python")
    with warnings.catch_warnings(record=True) as warned, CheckpointManager(root / "run") as run:
        warnings.simplefilter("always")
        pending = [run.save_async(step, state(step)) for step in (1, 2, 3)]
        # From the second one on each call waits.
        assert pending[2].done()
        assert all(each.exception() is None for each in pending)
        for step in (1, 2, 3):
            check(run, step, step)
    remove()
    assert [event.name for event in seen].count("run.saver.unavailable") == 1
    assert len([each for each in warned if "waits for the end of each save" in str(each.message)]) == int(is_first())


def on_nodes(root: Path) -> CheckpointManager:
    return CheckpointManager(root / "run", local=root / f"node{dist.get_rank()}")


def save_near(root: Path) -> None:
    with on_nodes(root) as run:
        for step in range(1, 5):
            pending = run.save_async(step, state(step))
            near = pending.near.result()
            assert near is not None
            result = pending.result()
            assert result is not None
            assert result.kind == ("full" if step < 3 else "delta")
            assert result.raw_bytes > near.raw_bytes > 0
        check(run, 4, 4)


def kill_the_saver_of_rank_1_in_an_upload(root: Path) -> None:
    killed = """
import os, signal
from millrace.checkpoint.run.uploading import Uploader
Uploader.upload = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
"""
    with on_nodes(root) as run:
        with savers_with("" if is_first() else killed):
            pending = run.save_async(1, state(1))
            assert pending.near.exception() is None
            assert isinstance(pending.exception(), SaverDiedError)
        run.save_async(2, state(2)).result()
    with CheckpointManager(root / "run") as run:
        assert run.steps() == [1, 2], "the next save uploads both"
        check(run, 1, 1)
        check(run, 2, 2)


OUTAGE = first_upload_fails("OriginUnavailableError")


def save_in_an_outage(run: CheckpointManager) -> None:
    pending = run.save_async(1, state(1))
    assert pending.near.exception() is None
    assert isinstance(pending.exception(), RetryableError)


def restore_again_after_an_outage(root: Path) -> None:
    with savers_with(OUTAGE), on_nodes(root) as run:
        assert run.restore(state(0)) is None
        save_in_an_outage(run)
        check(run, 1, 1)
        assert run.save_async(2, state(2)).exception() is None


def restore_after_another_job_took_the_run(root: Path) -> None:
    with savers_with(OUTAGE), on_nodes(root) as run:
        save_in_an_outage(run)
        if is_first():
            Claim.take(open_run(root / "run"))
        dist.barrier()
        with contextlib.suppress(MillraceError):
            check(run, 1, 1)


def die_before_the_upload(root: Path) -> None:
    """Both ranks on one node, whose disk has their parts."""
    from millrace.checkpoint.run import uploading

    def die(*arguments: object, **options: object) -> None:
        os._exit(9)

    uploading.copy_files = die  # type: ignore[assignment]
    CheckpointManager(root / "run", local=root / "node").save(1, state(3))


def fill_the_disk_of_node_1(root: Path) -> None:
    (root / "node1").touch()  # not a directory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with on_nodes(root) as run:
            pending = run.save_async(1, state(1))
            assert pending.exception() is None
            assert pending.result() is not None
    with CheckpointManager(root / "run") as run:
        check(run, 1, 1)


def save_to_s3(root: Path) -> None:
    options = json.loads((root / "options").read_text())
    with CheckpointManager("s3://runs/two", keep=10, target_options=options, timeout="3min") as run:
        for step in range(1, 5):
            result = run.save_async(step, state(step)).result()
            assert result is not None
            assert result.kind == ("full" if step < 3 else "delta")
        assert run.steps() == [1, 2, 3, 4]
        check(run, 1, 1)
        check(run, 4, 4)
    names = {file.name for found in open_run("s3://runs/two", options).scan() for file in found.files}
    assert not [name for name in names if name.startswith(("part-", "failed-"))]


PROGRAMS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        save_in_both_ways,
        kill_the_saver_of_rank_1,
        kill_the_saver_of_rank_0,
        interrupt_rank_1_before_its_save,
        cancel_a_save_of_rank_1,
        kill_rank_1_in_a_restore,
        end_after_a_save_that_failed_on_rank_1,
        end_while_the_saver_of_rank_1_dies,
        kill_rank_1,
        arrive_late,
        cannot_start_on_rank_1,
        save_near,
        kill_the_saver_of_rank_1_in_an_upload,
        restore_again_after_an_outage,
        restore_after_another_job_took_the_run,
        die_before_the_upload,
        fill_the_disk_of_node_1,
        save_to_s3,
    )
}


# --- the tests ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_synchronous_and_asynchronous_saves_of_two_ranks_continue_each_other(tmp_path: Path) -> None:
    ranks.run(__file__, "save_in_both_ways", 2, tmp_path)


@pytest.mark.slow
def test_saver_of_rank_1_killed_during_a_save_fails_it_on_all_ranks(tmp_path: Path) -> None:
    ranks.run(__file__, "kill_the_saver_of_rank_1", 2, tmp_path)


@pytest.mark.slow
def test_saver_of_rank_0_killed_before_the_manifest_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    ranks.run(__file__, "kill_the_saver_of_rank_0", 2, tmp_path)


def test_rank_that_is_interrupted_before_its_save_fails_it_on_all_ranks(tmp_path: Path) -> None:
    ranks.run(__file__, "interrupt_rank_1_before_its_save", 2, tmp_path)


def test_rank_whose_save_an_exception_of_any_kind_ends_fails_it_on_all_ranks(tmp_path: Path) -> None:
    ranks.run(__file__, "cancel_a_save_of_rank_1", 2, tmp_path)


def test_rank_killed_during_a_restore_is_a_retryable_error_of_the_others(tmp_path: Path) -> None:
    ranks.run(__file__, "kill_rank_1_in_a_restore", 2, tmp_path, codes=(0, -signal.SIGKILL))


def test_ranks_that_differ_about_the_last_save_save_once_more_before_they_end(tmp_path: Path) -> None:
    ranks.run(__file__, "end_after_a_save_that_failed_on_rank_1", 2, tmp_path)


@pytest.mark.slow
def test_killed_rank_ends_its_saver_and_fails_the_save_after_the_timeout(tmp_path: Path) -> None:
    ranks.run(__file__, "kill_rank_1", 2, tmp_path, codes=(0, -signal.SIGKILL))
    wait_until(lambda: is_gone(int((tmp_path / "pid").read_text())))
    with CheckpointManager(tmp_path / "run") as run:
        assert run.latest() is None
        run.save(2, {"w": torch.ones(3)})
        assert run.steps() == [2]


@pytest.mark.slow
def test_rank_that_is_late_gets_the_error_of_the_first_rank(tmp_path: Path) -> None:
    ranks.run(__file__, "arrive_late", 2, tmp_path)


def test_saver_that_cannot_start_on_one_rank_makes_all_ranks_save_themselves(tmp_path: Path) -> None:
    ranks.run(__file__, "cannot_start_on_rank_1", 2, tmp_path)


def test_near_saves_of_two_ranks_are_uploaded_by_their_savers(tmp_path: Path) -> None:
    ranks.run(__file__, "save_near", 2, tmp_path)
    near = [{path.name for path in (tmp_path / f"node{node}").rglob("data-*")} for node in (0, 1)]
    assert near[0]
    assert near[1]
    assert not near[0] & near[1]
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"node{node}")
    with CheckpointManager(tmp_path / "run") as run:
        found = {
            "sharded": torch.zeros(ROWS),
            "frozen": torch.zeros(ROWS),
            "replicated": torch.zeros(1000),
            "note": 0.0,
        }
        assert run.restore(found) == 4
        generator = torch.Generator().manual_seed(5)
        assert torch.equal(found["sharded"], torch.randn(ROWS, generator=generator) * 4)


def test_saver_of_rank_1_killed_in_an_upload_fails_it_on_all_ranks(tmp_path: Path) -> None:
    ranks.run(__file__, "kill_the_saver_of_rank_1_in_an_upload", 2, tmp_path)


def test_last_save_is_repeated_on_all_ranks_when_the_saver_of_rank_1_dies(tmp_path: Path) -> None:
    ranks.run(__file__, "end_while_the_saver_of_rank_1_dies", 2, tmp_path)


def test_second_restore_of_a_job_uploads_what_its_savers_left_on_the_nodes(tmp_path: Path) -> None:
    ranks.run(__file__, "restore_again_after_an_outage", 2, tmp_path)


def test_restore_uploads_nothing_after_another_job_took_the_run_from_the_savers(tmp_path: Path) -> None:
    ranks.run(__file__, "restore_after_another_job_took_the_run", 2, tmp_path)
    assert list(tmp_path.glob("node*/*/step-*/data-*"))
    assert not list(tmp_path.glob("run/step-*/manifest.millrace"))


def test_one_process_restores_the_parts_that_two_ranks_left_on_its_disk(tmp_path: Path) -> None:
    ranks.run(__file__, "die_before_the_upload", 2, tmp_path, codes=(9, 9))
    assert not list(tmp_path.glob("node/*/step-*/manifest.millrace"))
    with CheckpointManager(tmp_path / "run", local=tmp_path / "node") as run:
        found = {
            "sharded": torch.zeros(ROWS),
            "frozen": torch.zeros(ROWS),
            "replicated": torch.zeros(1000),
            "note": 0.0,
        }
        assert run.restore(found) == 1
        generator = torch.Generator().manual_seed(5)
        assert torch.equal(found["sharded"], torch.randn(ROWS, generator=generator) * 3)
    with CheckpointManager(tmp_path / "run") as run:
        assert run.steps() == [1], "it was uploaded, too"


def test_rank_whose_disk_refuses_its_part_writes_it_to_the_origin(tmp_path: Path) -> None:
    ranks.run(__file__, "fill_the_disk_of_node_1", 2, tmp_path)


def test_savers_of_two_ranks_meet_in_an_object_store(tmp_path: Path) -> None:
    with S3Server(tmp_path / "s3") as server:
        server.create_bucket("runs")
        (tmp_path / "options").write_text(json.dumps(server.target_options))
        ranks.run(__file__, "save_to_s3", 2, tmp_path)


if __name__ == "__main__":
    ranks.main(PROGRAMS)
