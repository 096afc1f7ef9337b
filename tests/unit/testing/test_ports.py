"""Ports for servers of tests are reserved until the server listens."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.testing import process
from millrace.testing.process import free_ports


def test_free_ports_are_distinct_and_not_among_those_that_the_kernel_gives() -> None:
    ports = free_ports(20)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 20
    assert lowest < process._LOWEST_PORT + process._LEAST_CHOICE or max(ports) < lowest


def test_port_that_another_process_was_given_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys; from millrace.testing.process import free_ports\n"
        "print(*free_ports(1), flush=True); sys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        with socket.socket() as free:
            free.bind(("127.0.0.1", theirs))  # nothing listens there yet
        (mine,) = free_ports(1)
        candidates = iter([theirs, mine, 0])
        monkeypatch.setattr(process, "_candidate", lambda: next(candidates))
        assert free_ports(1)[0] not in (theirs, mine)
        other.communicate()


def test_last_ports_only_are_kept() -> None:
    for _ in range(5):
        free_ports(30)
    assert len(process._claims) == process._KEPT_CLAIMS
