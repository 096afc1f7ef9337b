"""Saves in flight: one at a time, errors reported once, progress, and the threads that do the work."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import weakref

import pytest
from tests.support.interrupts import interrupted_at
from tests.support.waiting import wait_until

from millrace import events
from millrace.checkpoint.run import saving
from millrace.checkpoint.run.saving import PendingSave, SaveProgress, SaveResult, SaveRunner
from millrace.errors import DiskFullError, MillraceError, UsageError
from millrace.runtime.pipeline import default_threads, run_in_order


def result(step: int) -> SaveResult:
    return SaveResult(
        step=step, url="run", kind="full", raw_bytes=10, stored_bytes=7, restore_bytes=7, staged_seconds=0.1,
        waited_seconds=0.0, seconds=1.0, chunks_full=1, chunks_delta=0, chunks_referenced=0,
    )  # fmt: skip


def saves(step: int):
    return lambda report: result(step)


def fails(step: int):
    def work(report):
        raise DiskFullError(f"no room for step {step}", next_step="free some")

    return work


class Gate:
    """A save that ends when the test releases it."""

    def __init__(self, step: int) -> None:
        self.step, self.began, self.opened = step, threading.Event(), threading.Event()

    def __call__(self, report) -> SaveResult:
        self.began.set()
        assert self.opened.wait(300)
        return result(self.step)


# --- one save -------------------------------------------------------------------------------------


def test_submitted_save_runs_in_the_background():
    runner, gate = SaveRunner(), Gate(5)
    pending = runner.submit(5, gate)
    assert gate.began.wait(300)
    assert (pending.step, pending.done(), pending.skipped, runner.busy) == (5, False, False, True)
    assert "in flight" in repr(pending)
    with pytest.raises(TimeoutError, match="step 5"):
        pending.result(0.01)
    with pytest.raises(TimeoutError):
        pending.exception(0)
    assert runner.drain(0.01) > 0
    assert runner.busy
    gate.opened.set()
    assert pending.result(300) == result(5)
    assert pending.exception() is None
    assert pending.done()
    assert "saved" in repr(pending)
    assert runner.drain() == 0.0


def test_second_save_waits_for_the_first():
    runner, gates, order = SaveRunner(), [Gate(0), Gate(1)], []
    first = runner.submit(0, gates[0])
    assert gates[0].began.wait(300)

    def second() -> None:
        order.append(runner.submit(1, gates[1]))

    thread = threading.Thread(target=second)
    thread.start()
    assert not gates[1].began.wait(0.05)
    gates[0].opened.set()
    thread.join()
    assert first.done()
    gates[1].opened.set()
    assert order[0].result(300).step == 1


def test_closed_runner_waits_for_its_save_and_refuses_new_ones():
    runner, gate = SaveRunner(), Gate(0)
    pending = runner.submit(0, gate)
    threading.Timer(0.02, gate.opened.set).start()
    runner.close()
    runner.close()
    assert pending.done()
    with pytest.raises(UsageError, match="step 1"):
        runner.submit(1, saves(1))


# --- errors ---------------------------------------------------------------------------------------


def test_unseen_error_is_raised_once_by_the_next_check():
    runner = SaveRunner()
    runner.submit(0, fails(0))
    runner.drain()
    with pytest.raises(DiskFullError, match="step 0"):
        runner.check()
    runner.check()


def test_seen_error_is_not_raised_again():
    runner = SaveRunner()
    pending = runner.submit(0, fails(0))
    for _ in range(2):
        with pytest.raises(DiskFullError, match="step 0"):
            pending.result()
    assert isinstance(runner.submit(1, fails(1)).exception(), DiskFullError)
    assert "DiskFullError" in repr(pending)
    runner.check()


def test_each_error_of_several_is_raised():
    runner = SaveRunner()
    for step in range(3):
        runner.submit(step, fails(step))
    runner.drain()
    for step in range(3):
        with pytest.raises(DiskFullError, match=f"step {step}"):
            runner.check()
    runner.check()


def test_error_keeps_no_state_in_memory():
    class State:
        pass

    held = []

    def work(report):
        state = State()
        held.append(weakref.ref(state))
        raise DiskFullError(f"no room for {type(state).__name__}")

    pending = SaveRunner().submit(0, work)
    assert isinstance(pending.exception(300), DiskFullError)
    gc.collect()
    assert held[0]() is None


def test_save_that_raises_system_exit_has_it_as_its_error():
    def work(report):
        raise SystemExit(3)

    assert isinstance(SaveRunner().submit(0, work).exception(300), SystemExit)


def test_save_without_a_free_thread_runs_in_the_caller(monkeypatch):
    def refuse(thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    runner = SaveRunner()
    pending = runner.submit(0, saves(0))
    assert pending.done()
    assert pending.result().step == 0
    assert runner.submit(1, fails(1)).done()
    with pytest.raises(DiskFullError):
        runner.check()


# --- progress -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [ValueError("not my day"), SystemExit("not my day"), KeyboardInterrupt("not my day")])
def test_progress_reaches_the_callback_and_its_errors_end_nothing(fault):
    seen, reported = [], []

    def work(report) -> SaveResult:
        for done in (0, 5, 10):
            report(SaveProgress(step=4, phase="writing", done_bytes=done, total_bytes=10))
        return result(4)

    def callback(progress: SaveProgress) -> None:
        seen.append(progress.done_bytes)
        raise fault

    remove = events.add_hook(reported.append)
    try:
        assert SaveRunner().submit(4, work, on_progress=callback).result(300).step == 4
    finally:
        remove()
    assert seen == [0, 5, 10]
    named = [event for event in reported if event.name == "checkpoint.progress.failed"]
    assert [event.subject for event in named] == ["step 4"] * 3
    assert "not my day" in named[0].detail
    assert SaveRunner().submit(4, work).result(300).step == 4


# --- forked processes -----------------------------------------------------------------------------


def in_child(check) -> int:
    """Fork, run `check` in the child, and give its exit status."""
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException as error:  # noqa: BLE001 - reported by the exit status
            sys.stderr.write(repr(error))
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_saver_in_forked_child_waits_for_nothing_and_refuses():
    runner, gate = SaveRunner(), Gate(3)
    ended = runner.submit(2, saves(2))
    ended.result(300)
    pending = runner.submit(3, gate)
    assert gate.began.wait(300)

    def check() -> None:
        assert ended.result().step == 2
        assert pending.done()
        assert not runner.busy
        runner.drain()
        runner.check()
        for call in (pending.result, lambda: runner.submit(4, saves(4))):
            with pytest.raises(UsageError, match="fork"):
                call()
        runner.close()
        # One of its own works.
        assert SaveRunner().submit(5, saves(5)).result(300).step == 5

    assert in_child(check) == 0
    gate.opened.set()
    assert pending.result(300).step == 3


# --- the threads ----------------------------------------------------------------------------------


def pipeline_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("millrace-checkpoint")}


def test_pipeline_results_are_in_order():
    gates = [threading.Event() for _ in range(3)]

    def work(number: int) -> int:
        if number < 2:
            assert gates[number + 1].wait(300)
        gates[number].set()
        return number * 10

    assert list(run_in_order(range(3), work, 3)) == [0, 10, 20]
    assert list(run_in_order([], work, 2)) == []


def test_pipeline_raises_the_first_error_in_order():
    done = []

    def work(number: int) -> int:
        if number == 3:
            raise MillraceError("third")
        done.append(number)
        return number

    given, numbers, before = [], iter(range(1000)), pipeline_threads()
    running = run_in_order(numbers, work, 2)
    given.extend(next(running) for _ in range(3))
    with pytest.raises(MillraceError, match="third"):
        next(running)
    assert given == [0, 1, 2]
    assert next(numbers) <= 10
    assert not pipeline_threads() - before


def test_pipeline_takes_bounded_work_and_cancels_the_rest():
    begun, before = [], pipeline_threads()
    running = run_in_order(range(100), lambda number: begun.append(number) or number, 2)
    assert next(running) == 0
    assert len(begun) <= 6
    running.close()
    count = len(begun)
    assert count <= 6
    assert not pipeline_threads() - before


def test_default_threads_are_the_cores_up_to_eight(monkeypatch):
    for cores in (1, 2, 4, 7, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert default_threads() == min(8, cores)


def test_skipped_save_has_its_step_and_no_result():
    skipped = PendingSave(7, skipped=True)
    assert (skipped.step, skipped.skipped, skipped.result()) == (7, True, None)


def test_save_that_was_interrupted_before_it_began_has_ended():
    """Else closing, the next save, and the end of the process would wait for it."""
    for number in itertools.count():
        runner, go_on = SaveRunner(), threading.Event()
        # The thread outlives the call, which would otherwise also be interrupted in destructors.
        interrupt = interrupted_at(
            number, lambda runner=runner, go_on=go_on: runner.submit(1, lambda _: go_on.wait(300))
        )
        go_on.set()
        runner.drain(300)
        assert runner._current is None or runner._current.done(), f"interrupted at {number}"
        assert not runner._lock.locked()
        wait_until(lambda: not saving._registry._in_flight)
        if interrupt is None:
            return


def test_save_that_a_signal_handlers_own_exception_stops_before_it_began_has_ended(monkeypatch):
    class PreemptedError(Exception):
        def __init__(self, number, frame):
            super().__init__("preempted")

    def start(thread):
        raise PreemptedError(15, None)

    runner = SaveRunner()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(PreemptedError):
            runner.submit(1, lambda _: None)
    runner.drain(0)
    assert not saving._registry._in_flight
    runner.close()
