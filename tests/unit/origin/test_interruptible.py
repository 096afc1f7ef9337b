"""Ctrl-C while an origin stalls: a real process, a real socket that sends no response."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.support.interrupts import interrupted_at
from tests.support.waiting import wait_until

from millrace.origin.store_access import interruptible

_PROGRAM = """
import sys
import millrace
options = {"endpoint_url": sys.argv[1], "key": "k", "secret": "s"}
fs = millrace.filesystem("s3", options, cache_dir=sys.argv[2], members="none")
try:
    fs.cat("s3://bucket/key") if sys.argv[3] == "cat" else fs.find("s3://bucket/")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
# A try of a request ends by itself after 17 to 20 seconds, and is made again after that.
_DEADLINE_SECONDS = 15


def interrupted(what: str, cache: Path) -> tuple[str, int] | None:
    """The output and exit code of a process that receives SIGINT during a request; None where it continues for long."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", _PROGRAM, url, str(cache), what]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(120)
                    assert connection.recv(1)  # it has sent its request, and waits
                    child.send_signal(signal.SIGINT)
                    output, _ = child.communicate(timeout=_DEADLINE_SECONDS)
                    return output, child.returncode
            except subprocess.TimeoutExpired:
                return None
            finally:
                child.kill()


@pytest.mark.parametrize("what", ["cat", "find"])
def test_ctrl_c_during_a_stalled_request_interrupts_it(what: str, tmp_path: Path) -> None:
    # A busy machine may delay one; a request that is not interrupted is always too long.
    ends = (interrupted(what, tmp_path / str(number)) for number in range(3))
    assert next((end for end in ends if end), None) == ("interrupted\n", 0)


def test_interruptible_call_returns_results_and_raises_errors() -> None:
    assert interruptible(lambda: 5) == 5
    with pytest.raises(ValueError, match="no"):
        interruptible(lambda: int("no"))
    assert interruptible(threading.get_ident) != threading.get_ident()


def test_signal_handler_with_its_own_call_gets_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[int] = []
    entered, left = threading.Event(), threading.Event()

    def handler(*_: object) -> None:
        received.append(interruptible(lambda: 1))
        left.set()

    def action() -> bool:
        entered.set()
        os.kill(os.getpid(), signal.SIGUSR1)
        return left.wait(120)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert interruptible(action)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [1]


def test_interruptible_call_in_forked_child_succeeds() -> None:
    assert interruptible(lambda: 1) == 1
    child = os.fork()
    if child == 0:
        os._exit(interruptible(lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def threads_of_calls() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "millrace-origin-call" and each.is_alive()}


def test_interrupt_at_any_moment_leaves_at_most_one_thread() -> None:
    before = threads_of_calls()  # also of stalled requests of other tests
    for number in itertools.count():
        interrupt = interrupted_at(number, lambda: interruptible(lambda: None))
        if interrupt is None:
            break
    assert number > 5
    wait_until(lambda: len(threads_of_calls() - before) <= 1)
