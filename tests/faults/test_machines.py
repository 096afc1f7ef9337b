"""The machines that other tests run on: their separate and shared parts, and that no process survives its test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.machines.namespaces import ROOT, Machine, Machines
from tests.support.waiting import wait_until

import millrace

pytestmark = pytest.mark.root

_LISTEN = (
    "import socket; s = socket.create_server(('', 7000)); print(flush=True)\nwhile True: s.accept()[0].sendall(b'hi')"
)
_CALL = "import socket, sys; print(socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])).recv(2))"
_OWNER = """
import json, sys
from pathlib import Path
from tests.support.machines.namespaces import Machines

machines = Machines(Path(sys.argv[1]), 1).__enter__()
sleeping = machines[0].start("sh", "-c", "sleep 1000 & sleep 1000")
while len(machines[0].processes()) < 3:
    pass
print(json.dumps([machines.gateway, [machines[0].pid, *machines[0].processes()]]), flush=True)
input()
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(tmp_path / "machines", 2, environment={"COLOUR": "blue"}) as made:
        yield made


def test_each_machine_has_separate_directories_name_and_processes(machines: Machines, tmp_path: Path) -> None:
    first, second = machines
    first.run("sh", "-c", "echo mine > /tmp/file; echo mine > /dev/shm/file; echo mine > ~/file")
    assert (first.directory / "tmp" / "file").read_text() == (first.directory / "root" / "file").read_text() == "mine\n"
    for path in ("/tmp/file", "/dev/shm/file", "~/file"):
        assert "No such file" in second.run("sh", "-c", f"cat {path}", check=False)
    assert first.run("sh", "-c", "hostname; hostname -i; echo $COLOUR").split() == [first.name, first.address, "blue"]
    (machines.directory / "for all").write_text("seen")
    assert second.run("cat", machines.directory / "for all") == "seen"
    assert second.run("python", "-c", "import millrace; print(millrace.__file__)") == f"{millrace.__file__}\n"
    with second.start("sleep", "1000") as sleeping:
        wait_until(lambda: ["sleep", "1000"] in second.processes().values(), "no process")
        assert second.processes()[sleeping.pid or 0] == ["sleep", "1000"]
        assert "sleep" not in first.run("sh", "-c", "cat /proc/[0-9]*/cmdline")
    assert second.processes() == {}
    assert sleeping.exit_status() is not None


def test_failed_machine_command_raises(machines: Machines) -> None:
    with pytest.raises(AssertionError, match="sh -c echo why; exit 3: 3: why"):
        machines[0].run("sh", "-c", "echo why; exit 3")


@pytest.mark.slow
def test_machine_that_is_cut_suspended_or_killed_is_unreachable(machines: Machines, tmp_path: Path) -> None:
    first, second = machines

    def call(caller: Machine, seconds: float = 30.0) -> bool:
        return "hi" in caller.run("python", "-I", "-S", "-c", _CALL, first.address, str(seconds), check=False)

    log = tmp_path / "log"
    first.start("python", "-I", "-S", "-c", _LISTEN, log=log)
    wait_until(lambda: log.exists() and log.read_bytes() == b"\n", "does not listen")
    assert call(second)
    first.cut()
    assert not call(second, 1.0)
    first.mend()
    wait_until(lambda: call(second), "the link stays down")
    first.suspend()
    assert not call(second, 1.0)
    first.resume()
    assert call(machines.add("third"))
    first.kill()
    assert not first.is_running
    assert first.processes() == {}
    assert not call(second, 1.0)


@pytest.mark.slow
def test_machines_end_with_a_killed_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path / "machines")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with owner:
        assert owner.stdout is not None
        gateway, pids = json.loads(owner.stdout.readline())
        link = Path(f"/sys/class/net/millrace{gateway.split('.')[2]}")
        assert link.exists()
        assert len(pids) >= 4
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "processes stay")
    wait_until(lambda: not link.exists(), "the link stays")
