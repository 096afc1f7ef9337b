"""Ctrl-C while an origin stalls: a real process, a real socket that answers nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millrace.origin.interruptible import interruptible

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
_DEADLINE_SECONDS = 12


@pytest.mark.parametrize("what", ["cat", "find"])
def test_ctrl_c_is_heard_while_an_origin_stalls(what: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", _PROGRAM, url, str(tmp_path), what]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(60)
                    assert connection.recv(1)  # it has asked, and waits
                    child.send_signal(signal.SIGINT)
                    output, _ = child.communicate(timeout=_DEADLINE_SECONDS)
            finally:
                child.kill()
    assert output == "interrupted\n"
    assert child.returncode == 0


def test_errors_and_results_come_through() -> None:
    assert interruptible(lambda: 5) == 5
    with pytest.raises(ValueError, match="no"):
        interruptible(lambda: int("no"))
    assert interruptible(threading.get_ident) != threading.get_ident()


def test_a_handler_that_makes_a_call_of_its_own_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    entered, left = threading.Event(), threading.Event()

    def handler(*_: object) -> None:
        heard.append(interruptible(lambda: 1))
        left.set()

    def action() -> bool:
        entered.set()
        os.kill(os.getpid(), signal.SIGUSR1)
        return left.wait(30)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert interruptible(action)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [1]


def test_a_forked_child_makes_calls() -> None:
    assert interruptible(lambda: 1) == 1
    child = os.fork()
    if child == 0:
        os._exit(interruptible(lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
