"""The signals of a preemption, and the end of the grace period."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from millrace.checkpoint.run.preemption import PreemptionWatch

END = """
import os, signal, sys, threading
from millrace.checkpoint.run.preemption import PreemptionWatch
if sys.argv[1] == "closed":
    os.close(2)
else:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
    os.dup2(writer, 2)
PreemptionWatch(grace_seconds=0.01)
os.kill(os.getpid(), signal.SIGTERM)
while True:
    threading.Event().wait(1)
"""


@pytest.mark.parametrize("stderr", ["closed", "full"])
def test_process_without_usable_stderr_ends_after_its_grace_period(stderr: str) -> None:
    ended = subprocess.run([sys.executable, "-c", END, stderr], timeout=120, check=False)
    assert ended.returncode == 128 + signal.SIGTERM


def test_signal_without_a_name_is_recorded() -> None:
    watch = PreemptionWatch([signal.SIGRTMIN + 1])
    try:
        os.kill(os.getpid(), signal.SIGRTMIN + 1)
        assert watch.noted
    finally:
        watch.close()


def test_signal_that_comes_twice_is_one_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler sends it to all processes, and torchrun sends it on to its workers."""
    now, before = [1000.0], []
    monkeypatch.setattr("millrace.checkpoint.run.preemption.time", SimpleNamespace(monotonic=lambda: now[0]))
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: before.append(number))
    watch = PreemptionWatch([signal.SIGUSR1], grace_seconds=3600)
    try:
        for after, passed_on in ((0, 0), (0.1, 0), (1.8, 0), (0.2, 1)):
            now[0] += after
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (watch.noted, len(before)) == (True, passed_on)
    finally:
        watch.close()
        signal.signal(signal.SIGUSR1, handler)


def test_signal_is_recorded_by_the_watches_of_all_managers() -> None:
    first, second = PreemptionWatch([signal.SIGUSR1]), PreemptionWatch([signal.SIGUSR1])
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (first.noted, second.noted) == (True, True)
    finally:
        second.close()
        first.close()


def test_signal_after_watches_were_closed_in_the_order_of_their_creation_has_its_former_effect() -> None:
    received: list[int] = []
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        first, second = PreemptionWatch([signal.SIGUSR1] * 2), PreemptionWatch([signal.SIGUSR1])
        first.close()
        second.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, handler)


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_signal_after_one_of_three_watches_was_closed_is_only_recorded_by_the_others(closed: int) -> None:
    received: list[int] = []
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    watches = [PreemptionWatch([signal.SIGUSR1]) for _ in range(3)]
    try:
        watches[closed].close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [watch.noted for watch in watches] == [index != closed for index in range(3)]
        assert received == []
    finally:
        for watch in reversed(watches):
            watch.close()
        signal.signal(signal.SIGUSR1, handler)


def test_end_of_the_grace_period_after_close_has_no_effect() -> None:
    """The timer has started its function when `close` cancels it."""
    watch = PreemptionWatch([signal.SIGUSR1])
    watch.close()
    child = os.fork()
    if not child:
        watch._give_up(signal.SIGUSR1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
