import os
import threading
import time
from itertools import pairwise

import pytest

from millrace.cache import housekeeping
from millrace.errors import StorageError
from millrace.events import Event, add_hook


def test_a_chore_is_done_until_it_is_taken_back() -> None:
    done = threading.Event()
    every = housekeeping.every_tick
    every(done.set)
    every(done.set)
    assert done.wait(10)  # by the thread
    housekeeping.no_more(done.set)
    done.clear()
    housekeeping.tick()
    assert not done.is_set()
    housekeeping.no_more(done.set)


def test_a_disk_in_trouble_is_told_and_looked_at_again() -> None:
    events: list[Event] = []
    remove = add_hook(events.append)
    calls = []

    def chore() -> None:
        calls.append(1)
        raise StorageError("no index")

    housekeeping.every_tick(chore)
    try:
        housekeeping.tick()
        housekeeping.tick()
    finally:
        housekeeping.no_more(chore)
        remove()
    assert len(calls) >= 2
    assert events[0].name == "cache.housekeeping.failed"
    assert "no index" in events[0].detail


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_has_neither_chores_nor_the_thread() -> None:
    done = threading.Event()
    housekeeping.every_tick(done.set)
    try:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                fresh = threading.Event()
                housekeeping.tick()
                alone = threading.active_count() == 1
                housekeeping.every_tick(fresh.set)
                code = 0 if alone and fresh.wait(10) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        housekeeping.no_more(done.set)


def test_a_defect_in_one_chore_does_not_end_the_others(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def broken() -> None:
        raise ValueError("a defect")

    housekeeping.every_tick(broken)
    housekeeping.every_tick(done.set)
    try:
        assert done.wait(10)
        done.clear()
        assert done.wait(10)  # the thread is still there
    finally:
        housekeeping.no_more(broken)
        housekeeping.no_more(done.set)
    assert "a defect in housekeeping" in caplog.text


def test_a_chore_is_done_again_when_it_asks_to_be_and_the_others_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "TICK_SECONDS", 0.2)
    often, rarely = [], []
    enough = threading.Event()

    def asks() -> float | None:
        often.append(time.monotonic())
        if len(often) == 20:
            enough.set()
        return 0.001

    def does_not_ask() -> None:
        rarely.append(time.monotonic())

    housekeeping.every_tick(asks)
    housekeeping.every_tick(does_not_ask)
    try:
        assert enough.wait(20)
    finally:
        housekeeping.no_more(asks)
        housekeeping.no_more(does_not_ask)
    # However slow the machine is, there are pauses between two, and one of these is shorter than a tick.
    assert min(later - sooner for sooner, later in pairwise(often)) < 0.2
    assert len(rarely) < len(often)
    assert all(later - sooner >= 0.2 for sooner, later in pairwise(rarely))
