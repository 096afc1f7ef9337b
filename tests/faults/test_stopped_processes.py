"""A process of the node is stopped at each point where others may wait for it: they read on after one deadline."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.fork_server import ForkedProcess, node_server
from tests.support.held_locks import holding

import millrace
from millrace.cache.node import close_nodes
from millrace.config import SILENCE_SECONDS, WORKING_SECONDS
from millrace.runtime.locks import GRACE_SECONDS, LockWait, SharedLocks, silent_from

MOST_SECONDS = 8 * SILENCE_SECONDS
"""The longest wait of a reader for a stopped process, in addition to its time without one. It was 30 s for one fetch."""

ROUNDS = 5
"""Attempts to read within that time. Other work on the machine may delay one; a wait for the process delays all."""

STOPPING = """
import importlib, os, signal, sys, threading, time
import millrace

module, _, path = sys.argv[3].partition(":")
owner = importlib.import_module(module)
*owners, name = path.split(".")
for each in owners:
    owner = getattr(owner, each)
original = getattr(owner, name)

def stop(*args, **kwargs):
    os.write(1, b"stopped\\n")
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to the process, this thread might go on for a while
    return original(*args, **kwargs)

setattr(owner, name, stop)
fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0, capacity=sys.argv[4])
fs.ls(sys.argv[2])
for number in range(4):
    fs.cat_file(f"{sys.argv[2]}/{number}.bin")
fs.resize("90%")
time.sleep(60)
"""

READER = """
import sys, time
import millrace

began = time.monotonic()
fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0, capacity=sys.argv[3])
assert len(fs.ls(sys.argv[2])) == 4
for number in range(4):
    path = f"{sys.argv[2]}/{number}.bin"
    expected = open(path, "rb").read()
    assert fs.cat_file(path) == expected
    assert fs.open_input_file(path).read() == expected
print(time.monotonic() - began)
"""

POINTS = [
    "millrace.origin.object_store:ObjectStoreOrigin.read",  # has the lock of a fetch
    "millrace.cache.metadata.metadata:OriginMetadata.list_level",  # has the lock of a metadata request
    "millrace.store.index:Index._put",  # has the lock to write, and that of LMDB
    "millrace.store.store:Store.write_block",
    "millrace.store.segments:_Segment.append",
    "millrace.store.environment:_open",  # has the lock of setting up, and opens LMDB
    "millrace.store.setup:_write_marker",
    "millrace.cache.counters:Counters._fold",
    "millrace.cache.eviction.evictor:Evictor._replace",
    "millrace.cache.disk:Disk._tidy",
    "millrace.store.seals:SegmentSealer._seal",
    "millrace.cache.disk:replace_file",
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, size in enumerate((5_000_000, 30_000, 9_000_000, 40_000)):
        (folder / f"{number}.bin").write_bytes(random.Random(number).randbytes(size))
    return folder


@contextmanager
def stopped(cache: Path, data: Path, point: str, capacity: str = "1GB") -> Iterator[ForkedProcess]:
    """A process that was stopped at a point of its reading."""
    arguments, log = (str(cache), str(data), point, capacity), cache.with_suffix(".log")
    with ForkedProcess(node_server(), STOPPING, *arguments, log=log, pipes=True) as process:
        assert process.stdout.readline() == b"stopped\n", log.read_text()
        yield process


def seconds_to_read(cache: Path, data: Path, capacity: str = "1GB") -> float:
    """By a new process, which finds every byte right."""
    arguments, log = (str(cache), str(data), capacity), cache.with_suffix(".log")
    with ForkedProcess(node_server(), READER, *arguments, log=log, pipes=True) as process:
        return float(process.output())


def seconds_next_to_stopped(cache: Path, data: Path, point: str) -> float:
    """The longer time of a new process and of one that had the store open before; later ones read everything as well."""
    capacity = "12MB" if "evictor" in point else "1GB"
    fs = None
    if "environment" not in point and "setup" not in point:
        fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0, capacity=capacity)
        assert fs.cache_counters()["origin_bytes"] == 0
    with stopped(cache, data, point, capacity) as process:
        seconds = seconds_to_read(cache, data, capacity)
        if fs is not None:
            began = time.monotonic()
            for path in sorted(data.iterdir()):
                assert fs.cat_file(str(path)) == path.read_bytes()
            seconds = max(seconds, time.monotonic() - began)
        process.kill()
        assert seconds_to_read(cache, data, capacity) > 0
    close_nodes()
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_process_stopped_at_any_point_blocks_no_reader(tmp_path: Path, data: Path, point: str) -> None:
    waited = []
    for number in range(ROUNDS):
        without = seconds_to_read(tmp_path / f"without-{number}", data)
        waited.append(seconds_next_to_stopped(tmp_path / f"cache-{number}", data, point) - without)
        if waited[-1] < MOST_SECONDS:
            return
        if waited[-1] > WORKING_SECONDS / 2:
            break  # not because of other work; five of these would be ended by the limit of a test, without a reason
    pytest.fail(f"readers waited for a stopped process, seconds: {waited}")


@pytest.mark.slow
def test_command_during_stopped_change_of_the_rules_fails_with_the_cause(tmp_path: Path, data: Path) -> None:
    cache = tmp_path / "cache"
    code = "import sys; from millrace.cli import main; sys.exit(main(sys.argv[1:]))"
    with stopped(cache, data, "millrace.cache.disk:replace_file"):
        command = [sys.executable, "-c", code, "resize", "1GB", "--cache-dir", str(cache)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode != 0
        assert "continue or end processes that are stopped" in ended.stderr


HOLDER = """
import sys
from pathlib import Path
from millrace.runtime.locks import SharedLocks
locks = SharedLocks(Path(sys.argv[1]))
assert all(locks.try_acquire(byte) for byte in range(8))
print("held", flush=True)
sys.stdin.read()
"""


def looks_until_silent(wait: LockWait, byte: int) -> int:
    deadline = time.monotonic() + 120
    looks = 1
    while not wait.is_silent(byte):
        assert time.monotonic() < deadline, "the holder never counts as stopped"
        time.sleep(0.02)
        looks += 1
    return looks


@pytest.mark.slow
def test_running_holder_is_never_regarded_as_stopped(tmp_path: Path) -> None:
    with holding(HOLDER, tmp_path / "locks"):
        locks = SharedLocks(tmp_path / "locks")
        wait = LockWait(locks)
        until = time.monotonic() + 2 * SILENCE_SECONDS
        while time.monotonic() < until:
            assert not locks.try_acquire(3)
            assert not wait.is_silent(3)
            time.sleep(0.05)
        locks.close()


@pytest.mark.slow
def test_stopped_holder_of_many_locks_costs_one_deadline(tmp_path: Path) -> None:
    with holding(HOLDER, tmp_path / "locks") as process:
        locks = SharedLocks(tmp_path / "locks")
        process.send_signal(signal.SIGSTOP)
        assert looks_until_silent(LockWait(locks), 0) > 1
        assert LockWait(locks).is_silent(0)  # detected, until there is a newer sign
        before = time.monotonic_ns()
        for byte in range(1, 8):
            sign = locks.sign_of(byte)
            assert silent_from(sign[0], before) <= before + int(GRACE_SECONDS * 1e9)
            looks_until_silent(LockWait(locks), byte)
        process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 120
        while LockWait(locks).is_silent(0):
            assert time.monotonic() < deadline, "a process that continues still counts as stopped"
            time.sleep(0.05)
        locks.close()


@pytest.mark.parametrize("content", [b"", b"\xff" * 4096, b"\0" * 7, random.Random(1).randbytes(8192 * 24)])
def test_damaged_lock_file_changes_no_lock(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "locks"
    first, second = SharedLocks(path), SharedLocks(path)
    key = 3
    assert first.try_acquire(key)
    path.write_bytes(content)
    wait = LockWait(second)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert not second.try_acquire(key)
        wait.is_over(key)  # either, but without an exception
    first.release(key)
    assert second.try_acquire(key)
    second.release(key)
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("stamp", "first_look", "expected"),
    [
        (0, 10_000, 10_000 + 2_000_000_000),  # no sign
        (20_000, 10_000, 10_000 + 2_000_000_000),  # of another clock
        (10_000, 10_000, 10_000 + 2_000_000_000),
        (10_000, 1_000_010_000, 10_000 + 2_000_000_000),
        (10_000, 9_000_000_000, 9_300_000_000),  # silent for long
    ],
)
def test_silence_of_a_holder_begins_with_its_last_stamp(stamp: int, first_look: int, expected: int) -> None:
    assert silent_from(stamp, first_look) == expected
