"""A process is stopped (Ctrl-Z, a debugger, a paused container) while it writes to the store: the others continue."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.fork_server import ForkedProcess, node_server
from tests.support.waiting import wait_until

import millrace
from millrace.cache.node import close_nodes
from millrace.config import SILENCE_SECONDS
from millrace.errors import StorageError
from millrace.runtime.locks import FileLock

WRITER = """
import signal, sys
import millrace

fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0)
fs.cat_file(sys.argv[2] + "/small.bin")
def write(txn):
    print("writing", flush=True)
    signal.pause()


fs.node.open_disks[0].store.index.write(write)
"""

READER = """
import sys
import millrace

fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0)
for name in ("small.bin", "large.bin", "another.bin"):
    expected = open(sys.argv[2] + "/" + name, "rb").read()
    assert fs.cat_file(sys.argv[2] + "/" + name) == expected
    assert fs.open_input_file(sys.argv[2] + "/" + name).read() == expected
print("right", flush=True)
"""

COMMAND = """
import sys
from millrace.cli import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for number, (name, size) in enumerate((("small", 100_000), ("large", 9_000_000), ("another", 5_000_000))):
        (tmp_path / f"{name}.bin").write_bytes(random.Random(number).randbytes(size))
    return tmp_path


@contextmanager
def stopped_writer(cache: Path, data: Path) -> Iterator[ForkedProcess]:
    """A process that is stopped in the middle of a transaction, until the end of the block."""
    log = data / "writer.log"
    with ForkedProcess(node_server(), WRITER, str(cache), str(data), log=log, pipes=True) as writer:
        assert writer.stdout.readline() == b"writing\n", log.read_text()
        os.kill(writer.pid, signal.SIGSTOP)
        yield writer


@pytest.fixture
def stopped(data: Path) -> Iterator[Path]:
    cache = data / "cache"
    with stopped_writer(cache, data):
        yield cache


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_new_process_with_stopped_writer_reads_without_the_cache(stopped: Path, data: Path) -> None:
    ended = run(READER, stopped, data)
    assert ended.stdout == "right\n", ended.stderr
    assert "does not continue" in ended.stderr  # reported once, with the next step


@pytest.mark.slow
def test_open_process_with_stopped_writer_reads_and_stores_again_later(data: Path) -> None:
    cache = data / "cache"
    fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0)
    small, large = (data / "small.bin").read_bytes(), (data / "large.bin").read_bytes()
    assert fs.cat_file(f"{data}/small.bin") == small
    with stopped_writer(cache, data):
        assert fs.cat_file(f"{data}/small.bin") == small
        assert fs.cat_file(f"{data}/large.bin") == large
        assert fs.open_input_file(f"{data}/large.bin").read() == large
    deadline = time.monotonic() + 120
    while True:  # another thread may just be waiting for the turn
        before = fs.cache_counters()["origin_bytes"]
        assert fs.cat_file(f"{data}/large.bin") == large
        if fs.cache_counters()["origin_bytes"] == before:
            break
        assert time.monotonic() < deadline, "nothing is stored in the cache any more"
    close_nodes()


@pytest.mark.slow
def test_process_that_starts_next_to_a_stopped_writer_uses_the_cache_later(data: Path) -> None:
    """It read without the cache until its end. The index has older metadata than what the process writes meanwhile."""
    path, large = f"{data}/small.bin", (data / "large.bin").read_bytes()
    with stopped_writer(data / "cache", data):
        fs = millrace.filesystem("file", cache_dir=str(data / "cache"), min_free=0, consistency="immutable")
        assert fs.cat_file(f"{data}/large.bin") == large
        assert fs.node.open_disks == []
        fs.pipe_file(path, b"new")
        assert fs.cat_file(path) == b"new"
    # One that opens the cache before `fs` tries again.
    other = millrace.filesystem("file", cache_dir=str(data / "cache"), min_free=0, consistency=3600)
    assert other.cat_file(path) == b"new"
    assert other.node.open_disks
    wait_until(lambda: fs.node.open_disks)
    assert fs.cat_file(path) == b"new"
    assert fs.cat_file(f"{data}/large.bin") == large
    before = fs.cache_counters()["origin_bytes"]
    for _ in range(2):
        assert fs.cat_file(f"{data}/large.bin") == large
        assert fs.open_input_file(path).read() == b"new"
    assert fs.cache_counters()["origin_bytes"] == before
    close_nodes()


@pytest.mark.slow
def test_process_that_starts_next_to_a_stopped_writer_uses_its_other_disk_and_later_both(data: Path) -> None:
    path, directories = f"{data}/small.bin", [str(data / name) for name in ("cache", "other")]
    with stopped_writer(data / "cache", data):
        fs = millrace.filesystem("file", cache_dir=directories, min_free=0, consistency="immutable")
        (other,) = fs.node.open_disks
        assert fs.cat_file(path) == (data / "small.bin").read_bytes()
        fs.pipe_file(path, b"new")
        assert fs.cat_file(path) == b"new"
    wait_until(lambda: len(fs.node.open_disks) == 2)
    assert other in fs.node.open_disks
    assert fs.cat_file(path) == b"new"
    close_nodes()


@pytest.mark.slow
@pytest.mark.parametrize("command", [["status"], ["ls"], ["free", "file:///nothing"], ["resize", "1GB"]])
def test_command_with_stopped_writer_ends_with_the_cause(stopped: Path, command: list[str]) -> None:
    ended = run(COMMAND, *command, "--cache-dir", stopped)
    assert "continue or end processes that are stopped" in ended.stderr
    assert len(ended.stderr.splitlines()) <= 2  # the cause, and that the command failed


@pytest.mark.slow
def test_write_that_fails_next_to_a_stopped_writer_leaves_no_older_bytes(data: Path) -> None:
    """The origin has the new bytes when the index cannot be changed. Reads returned the old ones, here without limit."""
    path, small = f"{data}/small.bin", (data / "small.bin").read_bytes()
    fs, other = (
        millrace.filesystem("file", cache_dir=str(data / "cache"), min_free=0, consistency="immutable", timeout=seconds)
        for seconds in (60, 61)
    )
    assert fs is not other
    for each in (fs, fs, fs, other):
        assert each.open_input_file(path).read() == small  # from a map, and the lookup is kept
    with stopped_writer(data / "cache", data):
        with pytest.raises(StorageError, match="does not continue"):
            fs.pipe_file(path, b"new")
        for each in (other, fs):
            assert each.open_input_file(path).read() == b"new"
        assert fs.cat_file(path) == b"new"
        assert fs.info(path)["size"] == 3
        assert fs.cat_file(f"{data}/large.bin", end=10) == (data / "large.bin").read_bytes()[:10]
    assert fs.cat_file(path) == b"new"
    with stopped_writer(data / "cache", data):
        with pytest.raises(StorageError, match="does not continue"):
            fs.rm_file(path)
        with pytest.raises(FileNotFoundError):
            fs.cat_file(path)
    close_nodes()


REPEATED_READER = """
import sys
import millrace

fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0, consistency="immutable")
for line in sys.stdin:
    print(len(fs.open_input_file(sys.argv[2]).read()), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("has_cache", [False, True])
def test_write_next_to_a_stopped_writer_leaves_no_older_bytes_to_other_processes(
    data: Path, has_cache: bool, is_killed: bool
) -> None:
    """They returned them as long as their metadata was fresh, here without limit."""
    path, cache, log = f"{data}/small.bin", data / "cache", data / "reader.log"

    def length(reader: ForkedProcess) -> int:
        reader.stdin.write(b"\n")
        reader.stdin.flush()
        return int(reader.stdout.readline())

    def write() -> None:
        fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0, consistency="immutable")
        assert bool(fs.node.open_disks) == has_cache
        if has_cache:
            with pytest.raises(StorageError, match="does not continue"):
                fs.pipe_file(path, b"new")
        else:
            fs.pipe_file(path, b"new")

    if has_cache:
        assert millrace.filesystem("file", cache_dir=str(cache), min_free=0, consistency="immutable").node.open_disks
    program = (node_server(), REPEATED_READER, str(cache), path)
    with ForkedProcess(*program, log=log, pipes=True) as first, ForkedProcess(*program, log=log, pipes=True) as other:
        for reader in (first, first, first, other):
            assert length(reader) == 100_000
        with stopped_writer(cache, data) as writer:
            write()
            assert length(first) == 3
            if is_killed:
                writer.kill()
        with ForkedProcess(*program, log=log, pipes=True) as later:
            assert length(later) == 3
        assert [length(reader) for reader in (other, first, first)] == [3, 3, 3], log.read_text()
    close_nodes()


SETTER_UP = """
import os, signal, sys
from pathlib import Path
from millrace.runtime.locks import FileLock

lock = FileLock(Path(sys.argv[1]) / "millrace/local/setup.lock", "this process")
lock.threads.acquire()
lock.__enter__()
print("setting up", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_new_process_during_stopped_setup_reads_without_the_cache(data: Path) -> None:
    cache = data / "cache"
    assert run(READER, cache, data).stdout == "right\n"
    with subprocess.Popen([sys.executable, "-c", SETTER_UP, str(cache)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "setting up\n"
        ended = run(READER, cache, data)
        assert ended.stdout == "right\n", ended.stderr
        assert "the process that sets up the cache" in ended.stderr
        other.kill()
    ended = run(READER, cache, data)
    assert (ended.stdout, ended.stderr) == ("right\n", "")


@pytest.mark.slow
def test_process_waits_for_a_running_rebuild(data: Path) -> None:
    """The holder of the lock writes heartbeats for longer than the wait for a stopped holder."""
    cache = data / "cache"
    assert run(READER, cache, data).stdout == "right\n"
    lock = FileLock(cache / "millrace/local/setup.lock", "this process")
    lock.threads.acquire()
    lock.__enter__()
    command = [sys.executable, "-c", READER, str(cache), str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        time.sleep(2 * SILENCE_SECONDS + 1)
        assert reader.poll() is None
        lock.__exit__()
        assert reader.communicate(timeout=300) == ("right\n", "")
    lock.close()


def test_cache_recreated_within_a_second_mixes_no_bytes(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
