import os
import threading
import time
from itertools import pairwise

import pytest

from millrace.errors import StorageError
from millrace.events import Event, add_hook
from millrace.runtime import maintenance


def test_task_is_called_until_unregistered() -> None:
    done = threading.Event()
    every = maintenance.register_periodic
    every(done.set)
    every(done.set)
    assert done.wait(300)  # by the thread
    maintenance.unregister(done.set)
    done.clear()
    maintenance.run_tasks()
    assert not done.is_set()
    maintenance.unregister(done.set)


def test_task_that_raises_is_reported_and_called_again() -> None:
    events: list[Event] = []
    remove = add_hook(events.append)
    calls = []

    def task() -> None:
        calls.append(1)
        raise StorageError("no index")

    maintenance.register_periodic(task)
    try:
        maintenance.run_tasks()
        maintenance.run_tasks()
    finally:
        maintenance.unregister(task)
        remove()
    assert len(calls) >= 2
    assert (events[0].name, events[0].subject, events[0].detail) == ("cache.maintenance.failed", "", "no index")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_has_neither_tasks_nor_thread() -> None:
    done = threading.Event()
    maintenance.register_periodic(done.set)
    try:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                fresh = threading.Event()
                maintenance.run_tasks()
                alone = threading.active_count() == 1
                maintenance.register_periodic(fresh.set)
                code = 0 if alone and fresh.wait(300) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        maintenance.unregister(done.set)


def test_task_with_a_defect_does_not_end_the_others(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def broken() -> None:
        raise ValueError("a defect")

    maintenance.register_periodic(broken)
    maintenance.register_periodic(done.set)
    try:
        assert done.wait(300)
        done.clear()
        assert done.wait(300)  # the thread is still there
    finally:
        maintenance.unregister(broken)
        maintenance.unregister(done.set)
    assert "because of a defect" in caplog.text


def test_task_that_returns_an_interval_is_called_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "TICK_SECONDS", 0.2)
    often, rarely = [], []
    enough = threading.Event()

    def asks() -> float | None:
        often.append(time.monotonic())
        if len(often) == 20:
            enough.set()
        return 0.001

    def does_not_ask() -> None:
        rarely.append(time.monotonic())

    maintenance.register_periodic(asks)
    maintenance.register_periodic(does_not_ask)
    try:
        assert enough.wait(120)
    finally:
        maintenance.unregister(asks)
        maintenance.unregister(does_not_ask)
    # However slow the machine is, there are pauses between two, and one of these is shorter than a tick.
    assert min(later - sooner for sooner, later in pairwise(often)) < 0.2
    assert len(rarely) < len(often)
    assert all(later - sooner >= 0.2 for sooner, later in pairwise(rarely))
