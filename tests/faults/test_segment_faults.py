"""Segments under many processes, kills and full disks: what a record names verifies, and what was acknowledged is there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

import millrace
from millrace.cache.node import close_nodes
from millrace.cache.records import ObjectName
from millrace.cache.segments import Segments, data_path, generations, scan
from millrace.errors import DiskFullError


class Table:
    """Gives generations as a store's index does: no two alike, in any process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def new_generation(self) -> int:
        while True:
            number = time.monotonic_ns()
            try:
                os.close(os.open(self._directory / f"taken-{number}", os.O_CREAT | os.O_EXCL))
                return number
            except FileExistsError:
                pass

    def add_segment(self, generation: int, group: str) -> None:
        pass


def data_of(number: int) -> bytes:
    return random.Random(number).randbytes(100 + number * 97 % 3_000)


class Appender:
    """A process that appends the objects `numbers`, in three groups, and acknowledges each."""

    def __init__(self, directory: Path, numbers: range) -> None:
        self._acknowledged, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                signal.alarm(60)
                segments = Segments(directory, Table(directory.parent), max_open=2)
                for number in numbers:
                    name = ObjectName("o", f"b/{number}", "v")
                    segments.append(f"g{number % 3}", number.to_bytes(16, "big"), name, data_of(number))
                    os.write(theirs, number.to_bytes(8, "big"))
                code = 0
            except DiskFullError:
                code = 28
            finally:
                os._exit(code)
        os.close(theirs)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> tuple[int, set[int]]:
        """Wait for its end; gives the exit status and what it acknowledged."""
        with open(self._acknowledged, "rb") as pipe:
            data = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return status, {int.from_bytes(data[at : at + 8], "big") for at in range(0, len(data), 8)}


def check(directory: Path) -> set[int]:
    """Verify every object that any record names; gives their numbers."""
    numbers = set()
    for generation in generations(directory):
        with open(data_path(directory, generation), "rb") as file:
            for record in scan(directory, generation):
                number = int.from_bytes(record.object_id, "big")
                data = os.pread(file.fileno(), record.size, record.offset)
                assert xxhash.xxh3_64_intdigest(data) == record.checksum
                assert data == data_of(number)
                numbers.add(number)
    return numbers


def test_eight_processes_append_at_once(tmp_path: Path) -> None:
    appenders = [Appender(tmp_path / "s", range(number * 1000, number * 1000 + 300)) for number in range(8)]
    ends = [appender.end() for appender in appenders]
    assert [status for status, _ in ends] == [0] * 8
    written = set().union(*(numbers for _, numbers in ends))
    assert len(written) == 8 * 300
    assert check(tmp_path / "s") == written
    # One process goes on where all of them stopped.
    before = generations(tmp_path / "s")
    status, more = Appender(tmp_path / "s", range(9000, 9030)).end()
    assert status == 0
    assert generations(tmp_path / "s") == before
    assert check(tmp_path / "s") == written | more


def test_appenders_that_are_killed_lose_nothing_that_they_acknowledged(tmp_path: Path) -> None:
    chooser = random.Random(5)
    written: set[int] = set()
    for attempt in range(50):
        pair = [
            Appender(tmp_path / "s", range(start, start + 100_000))
            for start in (attempt * 10**6, attempt * 10**6 + 500_000)
        ]
        time.sleep(chooser.uniform(0, 0.05))  # the moment is to be any
        for appender in pair:
            appender.kill()
        for appender in pair:
            status, numbers = appender.end()
            assert status == -signal.SIGKILL
            written |= numbers
    assert written
    assert written <= check(tmp_path / "s")
    # The dead hold no segment. Two processes with three groups need six, and a few more when they look for one at once.
    assert len(generations(tmp_path / "s")) <= 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "disk"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(directory)], check=True)
    yield directory
    close_nodes()
    subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.root
def test_a_disk_that_fills_up_and_is_freed_again(small_disk: Path) -> None:
    with open(small_disk / "ballast", "wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, 5 << 20)
    status, written = Appender(small_disk / "s", range(4000)).end()  # 6 MB
    assert status == 28
    assert 0 < len(written) < 4000
    assert check(small_disk / "s") == written
    (small_disk / "ballast").unlink()
    status, more = Appender(small_disk / "s", range(10_000, 10_100)).end()
    assert status == 0
    assert check(small_disk / "s") == written | more
    assert len(generations(small_disk / "s")) == 3


@pytest.mark.root
def test_small_objects_on_a_disk_that_is_full_and_then_is_not(small_disk: Path, tmp_path: Path) -> None:
    for number in range(90):
        (tmp_path / f"{number}.bin").write_bytes(data_of(number))
    fs = millrace.filesystem("file", cache_dir=str(small_disk / "cache"), min_free=0)
    assert fs.cat_file(f"{tmp_path}/0.bin") == data_of(0)
    with open(small_disk / "ballast", "wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(1 << 12))
        except OSError:
            pass
    for _ in range(2):
        for number in range(60):
            assert fs.cat_file(f"{tmp_path}/{number}.bin") == data_of(number)
            with fs.open_input_stream(f"{tmp_path}/{number}.bin") as stream:
                assert stream.read() == data_of(number)
    (small_disk / "ballast").unlink()
    for _ in range(2):
        for number in range(90):
            assert fs.cat_file(f"{tmp_path}/{number}.bin") == data_of(number)
    assert len(fs.node.entries()) >= 30  # those that are held in memory from before are not kept yet
    assert fs.cache_counters()["corrupt_blocks"] == 0


@pytest.mark.slow
def test_readers_of_small_objects_that_are_killed_leave_nothing_wrong(tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    for number in range(300):
        (source / f"{number}.bin").write_bytes(data_of(number))
    code = (
        "import sys, random, millrace; fs = millrace.filesystem('file', cache_dir=sys.argv[1], min_free=0);"
        "print('ready', flush=True);"
        "[fs.cat_file(f'{sys.argv[2]}/{n}.bin') for n in random.sample(range(300), 300)]"
    )
    chooser = random.Random(3)
    for _ in range(6):
        command = [sys.executable, "-c", code, str(cache), str(source)]
        pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for process in pair:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(chooser.uniform(0, 0.1))  # the moment is to be any
        for process in pair:
            process.kill()
            with process:
                process.wait(30)
    for native in (False, True):
        fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0, native=native)
        for number in range(300):
            assert fs.cat_file(f"{source}/{number}.bin") == data_of(number)
        assert fs.cache_counters()["corrupt_blocks"] == 0
    assert len(fs.node.entries()) == 300
