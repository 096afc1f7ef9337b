"""A process is stopped (Ctrl-Z, a debugger, a paused container) while it writes to the store: the others go on."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import millrace
from millrace.cache.flight import ProcessLocks
from millrace.cache.node import close_nodes

# What others wait for is made shorter than it is, for the tests' sake.
IMPATIENT = "import millrace.cache.write_turn as turn; turn.PATIENCE_SECONDS = 1.0;"

WRITER = """
import signal, sys
import millrace
from millrace.cache.node import cache_node

fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0)
fs.cat_file(sys.argv[2] + "/small.bin")
node = cache_node(fs._options)
with node._disks[0].store.index.writing():
    print("writing", flush=True)
    signal.pause()
"""

READER = f"""
{IMPATIENT}
import sys
import millrace

fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0)
for name in ("small.bin", "large.bin", "another.bin"):
    expected = open(sys.argv[2] + "/" + name, "rb").read()
    assert fs.cat_file(sys.argv[2] + "/" + name) == expected
    assert fs.open_input_file(sys.argv[2] + "/" + name).read() == expected
print("right", flush=True)
"""

COMMAND = f"""
{IMPATIENT}
import sys
from millrace.cli import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for number, (name, size) in enumerate((("small", 100_000), ("large", 9_000_000), ("another", 5_000_000))):
        (tmp_path / f"{name}.bin").write_bytes(random.Random(number).randbytes(size))
    return tmp_path


@pytest.fixture
def stopped(data: Path) -> Iterator[Path]:
    """The cache of a process that is stopped in the middle of a transaction."""
    cache = data / "cache"
    command = [sys.executable, "-c", WRITER, str(cache), str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            writer.send_signal(signal.SIGSTOP)
            yield cache
        finally:
            writer.kill()


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_new_process_reads_without_the_cache(stopped: Path, data: Path) -> None:
    ended = run(READER, stopped, data)
    assert ended.stdout == "right\n", ended.stderr
    assert "does not go on" in ended.stderr  # said once, with the next step


def test_an_open_process_reads_on_and_keeps_again_when_it_can(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.cache.write_turn.PATIENCE_SECONDS", 1.0)
    cache = data / "cache"
    fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0)
    small, large = (data / "small.bin").read_bytes(), (data / "large.bin").read_bytes()
    assert fs.cat_file(f"{data}/small.bin") == small
    command = [sys.executable, "-c", WRITER, str(cache), str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        writer.send_signal(signal.SIGSTOP)
        assert fs.cat_file(f"{data}/small.bin") == small
        assert fs.cat_file(f"{data}/large.bin") == large
        assert fs.open_input_file(f"{data}/large.bin").read() == large
        writer.kill()
    deadline = time.monotonic() + 60
    while True:  # another thread may just be waiting for the turn
        before = fs.cache_counters()["origin_bytes"]
        assert fs.cat_file(f"{data}/large.bin") == large
        if fs.cache_counters()["origin_bytes"] == before:
            break
        assert time.monotonic() < deadline, "nothing is kept any more"
    close_nodes()


@pytest.mark.parametrize("command", [["status"], ["ls"], ["free", "file:///nothing"], ["resize", "1GB"]])
def test_commands_end(stopped: Path, command: list[str]) -> None:
    ended = run(COMMAND, *command, "--cache-dir", stopped)
    assert "continue or end processes that are stopped" in ended.stderr
    assert len(ended.stderr.splitlines()) <= 2  # what is the matter, and that the command could not do its work


SETTER_UP = """
import fcntl, signal, sys

lock = open(sys.argv[1] + "/millrace/local/setup.lock", "a")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("setting up", flush=True)
signal.pause()
"""


def test_a_new_process_goes_without_a_cache_that_is_not_set_up(data: Path) -> None:
    cache = data / "cache"
    assert run(READER, cache, data).stdout == "right\n"
    with subprocess.Popen([sys.executable, "-c", SETTER_UP, str(cache)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "setting up\n"
        ended = run("import millrace.cache.setup as setup; setup._PATIENCE_SECONDS = 1.0;" + READER, cache, data)
        assert ended.stdout == "right\n", ended.stderr
        assert "the process that sets up the cache" in ended.stderr
        other.kill()
    ended = run(READER, cache, data)
    assert (ended.stdout, ended.stderr) == ("right\n", "")


def test_who_waits_for_a_rebuild_that_goes_on_waits(data: Path) -> None:
    """Each touch of the lock says that its holder goes on; together they take longer than anybody's patience."""
    cache = data / "cache"
    assert run(READER, cache, data).stdout == "right\n"
    with open(cache / "millrace/local/setup.lock", "a", encoding="ascii") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        code = "import millrace.cache.setup as setup; setup._PATIENCE_SECONDS = 3.0;" + READER
        command = [sys.executable, "-c", code, str(cache), str(data)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
            for _ in range(25):
                os.utime(lock.fileno())
                time.sleep(0.2)
            fcntl.lockf(lock, fcntl.LOCK_UN)
            assert reader.communicate(timeout=60) == ("right\n", "")


def test_many_blocks_of_a_stopped_process_cost_its_patience_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.cache.flight.PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr("millrace.cache.flight._LITTLE_PATIENCE_SECONDS", 0.0)
    locks = ProcessLocks(data / "locks")
    assert locks.patience_seconds() == 2.0
    locks.overtook()
    assert locks.patience_seconds() == 0.0
    monkeypatch.setattr("millrace.cache.flight._REMEMBERED_SECONDS", 0.0)
    assert locks.patience_seconds() == 2.0
    locks.close()


def test_a_cache_that_is_removed_and_made_again_in_one_second_mixes_nothing(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that still has the removed index must not take the new store's files for its own."""
    cache = data / "cache"
    large = (data / "large.bin").read_bytes()
    now = time.time()  # the same second for all, however slow the machine
    monkeypatch.setattr("time.time", lambda: now)
    second = f"import time; time.time = lambda: {now}"
    fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0)
    with fs.open(f"{data}/large.bin") as file:
        assert file.read(70_000) == large[:70_000]
    shutil.rmtree(cache)
    other = f"""
{second}
import sys
import millrace

fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0)
with fs.open(sys.argv[2] + "/large.bin") as file:
    file.seek(-100, 2)
    file.read()
"""
    assert run(other, cache, data).returncode == 0
    for _ in range(2):
        with fs.open(f"{data}/large.bin") as file:
            assert file.read(70_000) == large[:70_000]
        with fs.open_input_file(f"{data}/large.bin") as file:
            assert file.read_at(70_000, 0) == large[:70_000]
    close_nodes()
