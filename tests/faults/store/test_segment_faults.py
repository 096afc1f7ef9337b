"""Segments with many processes, kills and full disks: every record verifies, and no acknowledged object is lost.

Damaged segments: reads are right, no read waits, and other segments are evicted as before."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import xxhash
from tests.faults.store import segment_appender
from tests.faults.store.segment_appender import data_of
from tests.support.fork_server import ForkedProcess, node_server
from tests.support.harms import (
    and_set_back_the_times,
    empty,
    replace_by_a_fifo,
    replace_by_a_folder,
    replace_by_a_full_folder,
    replace_by_noise,
    zeros,
)
from tests.support.harms import flip as flip_byte
from tests.support.small_disks import small_disk
from tests.support.waiting import wait_until

import millrace
from millrace.cache.node import close_nodes
from millrace.events import Event
from millrace.store.segment_files import data_path, generations, scan


class Appender:
    """A process that appends the objects `numbers`, in three groups, and acknowledges each."""

    def __init__(self, directory: Path, numbers: range) -> None:
        arguments = (str(directory), str(numbers.start), str(numbers.stop))
        log = directory.with_suffix(".log")
        self._process = ForkedProcess(node_server(), segment_appender.__file__, *arguments, log=log, pipes=True)

    def wait_for_the_first(self) -> None:
        """Wait until it has acknowledged an object; fails when it does not get there in five minutes."""
        blocked = Path(f"/proc/{self._process.pid}/wchan")
        assert wait([self._process.stdout.fileno()], 300), f"nothing yet, blocked in {blocked.read_text()}"

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)

    def end(self) -> tuple[int, set[int]]:
        """Wait for its end; returns the exit status and the acknowledged writes."""
        with self._process:
            data = self._process.stdout.read()
            status = self._process.wait(timeout=60)
        return status, {int.from_bytes(data[at : at + 8], "big") for at in range(0, len(data), 8)}


def check(directory: Path) -> set[int]:
    """Verify every object that any record names; returns their numbers."""
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


def test_appends_of_eight_concurrent_processes_are_all_kept(tmp_path: Path) -> None:
    appenders = [Appender(tmp_path / "s", range(number * 1000, number * 1000 + 300)) for number in range(8)]
    ends = [appender.end() for appender in appenders]
    assert [status for status, _ in ends] == [0] * 8
    written = set().union(*(numbers for _, numbers in ends))
    assert len(written) == 8 * 300
    assert check(tmp_path / "s") == written
    # One process continues after all of them stopped.
    before = generations(tmp_path / "s")
    status, more = Appender(tmp_path / "s", range(9000, 9030)).end()
    assert status == 0
    assert generations(tmp_path / "s") == before
    assert check(tmp_path / "s") == written | more


@pytest.mark.slow
def test_appenders_killed_lose_no_acknowledged_object(tmp_path: Path) -> None:
    chooser = random.Random(5)
    written: set[int] = set()
    for attempt in range(50):
        pair = [
            Appender(tmp_path / "s", range(start, start + 100_000))
            for start in (attempt * 10**6, attempt * 10**6 + 500_000)
        ]
        if attempt % 2:
            pair[0].wait_for_the_first()  # where the disk is busy, all else may be killed before
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


@pytest.fixture(name="small_disk")
def disk_of_8_mb(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=8m") as disk:
        yield disk


@pytest.mark.root
def test_disk_filled_and_freed_is_used_again(small_disk: Path) -> None:
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
def test_small_objects_on_disk_filled_and_freed_are_stored_again(small_disk: Path, tmp_path: Path) -> None:
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
    [disk] = fs.node.open_disks
    # A refusal is remembered for a while: what is refused is held in memory, and not stored later.
    wait_until(lambda: time.monotonic() > max(disk.evictor._refused_until, disk.evictor._refused.until))
    for _ in range(2):
        for number in range(90):
            assert fs.cat_file(f"{tmp_path}/{number}.bin") == data_of(number)
    assert len(fs.node.entries()) >= 30  # those that are held in memory from before are not kept yet
    assert fs.cache_counters()["corrupt_blocks"] == 0


@pytest.mark.slow
def test_killed_readers_of_small_objects_leave_a_working_store(tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    for number in range(300):
        (source / f"{number}.bin").write_bytes(data_of(number))
    code = (
        "import sys, random, millrace; fs = millrace.filesystem('file', cache_dir=sys.argv[1], min_free=0)\n"
        "print('ready', flush=True)\n"
        "[fs.cat_file(f'{sys.argv[2]}/{n}.bin') for n in random.sample(range(300), 300)]"
    )
    chooser = random.Random(3)
    for _ in range(6):
        log, arguments = tmp_path / "log", (str(cache), str(source))
        pair = [ForkedProcess(node_server(), code, *arguments, log=log, pipes=True) for _ in range(2)]
        for process in pair:
            assert process.stdout.readline() == b"ready\n", log.read_text()
        time.sleep(chooser.uniform(0, 0.1))  # the moment is to be any
        for process in pair:
            process.kill()
    for native in (False, True):
        fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0, native=native)
        for number in range(300):
            assert fs.cat_file(f"{source}/{number}.bin") == data_of(number)
        assert fs.cache_counters()["corrupt_blocks"] == 0
    assert len(fs.node.entries()) == 300


# --- damage to the files ------------------------------------------------------------------------------


def flip(path: Path) -> None:
    flip_byte(path, path.stat().st_size // 3)  # between two objects or records there may be unused bytes


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_a_symlink(path: Path) -> None:
    elsewhere = path.parents[4] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def move_away_and_make_a_folder(path: Path) -> None:
    path.rename(path.parents[4] / "elsewhere")
    path.mkdir()


IN_PLACE: list[Callable[[Path], None]] = [flip, and_set_back_the_times(flip), cut, empty, zeros]
REPLACED: list[Callable[[Path], None]] = [
    Path.unlink,
    replace_by_noise,
    replace_by_a_folder,
    replace_by_a_full_folder,
    replace_by_a_symlink,
    replace_by_a_fifo,
    move_away_and_make_a_folder,
]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Small objects in two folders, which are listed: so they are in two segments."""
    folder = tmp_path / "small"
    for number in range(8):
        path = folder / f"g{number % 2}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(number).randbytes(20_000 + number))
    return folder


def opened(cache: Path, *, native: bool = True) -> millrace.MillraceFileSystem:
    return millrace.filesystem("file", cache_dir=str(cache), min_free=0, native=native)


def read_all(small: Path, fs: millrace.MillraceFileSystem) -> int:
    """Read everything in every way; returns how many bytes came from the origin for it."""
    before = fs.cache_counters()["origin_bytes"]
    for folder in small.iterdir():
        fs.ls(str(folder))
    for path in sorted(small.glob("*/*")):
        expected = path.read_bytes()
        assert fs.cat_file(str(path), start=10, end=500) == expected[10:500]
        assert fs.open_input_stream(str(path)).read() == expected
        assert fs.open_input_file(str(path)).read() == expected
        assert fs.cat_file(str(path)) == expected
        assert fs.open(str(path)).read() == expected
    return fs.cache_counters()["origin_bytes"] - before


def size_of(small: Path) -> int:
    return sum(path.stat().st_size for path in small.glob("*/*"))


def file_of_a_segment(cache: Path, suffix: str) -> Path:
    paths = sorted(cache.glob(f"millrace/local/segments/*.{suffix}"))
    assert len(paths) == 2
    return paths[0]


def evict_all_and_fill_again(small: Path, cache: Path, native: bool) -> None:
    """After any damage to a segment, others are evicted, and objects read again are stored, also for other processes."""
    fs = opened(cache, native=native)
    fs.free([str(small / "g0" / "0.bin")])
    fs.resize("0")
    assert list(fs.node.entries()) == []
    fs.free([str(small)])
    fs.resize("1GB")
    read_all(small, fs)
    close_nodes()
    assert read_all(small, opened(cache, native=native)) == 0
    assert len(fs.node.entries()) == 8
    close_nodes()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("suffix", ["data", "idx"])
@pytest.mark.parametrize("harm", IN_PLACE + REPLACED)
def test_segment_damaged_while_unused_is_found(
    small: Path, tmp_path: Path, harm: Callable[[Path], None], suffix: str, native: bool, events: list[Event]
) -> None:
    cache = tmp_path / "cache"
    read_all(small, opened(cache))
    close_nodes()
    harm(file_of_a_segment(cache, suffix))
    fetched = read_all(small, opened(cache, native=native))
    wrong = {event.name for event in events} & {"cache.file.lost", "cache.block.corrupt"}
    assert bool(wrong) == bool(fetched) == (suffix == "data")  # the other file is not read while there is an index
    assert fetched < size_of(small)  # the other segment is here
    close_nodes()
    events.clear()
    assert read_all(small, opened(cache, native=native)) == 0  # it is mended
    assert events == []
    close_nodes()
    evict_all_and_fill_again(small, cache, native)


@pytest.mark.parametrize("suffix", ["data", "idx"])
@pytest.mark.parametrize("harm", IN_PLACE + REPLACED)
def test_segment_damaged_before_a_rebuild_is_found(
    small: Path, tmp_path: Path, harm: Callable[[Path], None], suffix: str, events: list[Event]
) -> None:
    cache = tmp_path / "cache"
    read_all(small, opened(cache))
    close_nodes()
    harm(file_of_a_segment(cache, suffix))
    (cache / "millrace" / "local" / "FORMAT").write_text("millrace-store 4\nthe-boot-before\n")
    assert 0 < read_all(small, opened(cache)) < size_of(small)
    close_nodes()
    events.clear()
    assert read_all(small, opened(cache)) == 0
    assert events == []
    close_nodes()
    evict_all_and_fill_again(small, cache, native=True)


@pytest.mark.parametrize("suffix", ["data", "idx"])
@pytest.mark.parametrize("harm", REPLACED)
def test_segment_replaced_during_use_is_found(
    small: Path, tmp_path: Path, harm: Callable[[Path], None], suffix: str
) -> None:
    """Later writes must be stored where other processes find them."""
    cache = tmp_path / "cache"
    fs = opened(cache)
    read_all(small, fs)
    harm(file_of_a_segment(cache, suffix))
    for path in sorted(small.glob("*/*")):
        (path.parent / f"new-{path.name}").write_bytes(path.read_bytes()[::-1])
    read_all(small, fs)
    close_nodes()
    fs = opened(cache)
    read_all(small, fs)
    assert read_all(small, fs) == 0
    assert len(fs.node.entries()) == 16
    fs.resize("0")
    assert list(fs.node.entries()) == []


@pytest.mark.root
def test_unremovable_segment_does_not_keep_others(small: Path, tmp_path: Path, events: list[Event]) -> None:
    """A file on which something is mounted cannot be unlinked, not even by root."""
    cache = tmp_path / "cache"
    fs = opened(cache)
    read_all(small, fs)
    close_nodes()
    stuck = file_of_a_segment(cache, "data")
    subprocess.run(["mount", "--bind", str(stuck), str(stuck)], check=True)
    try:
        fs = opened(cache)
        fs.resize("0")
        assert list(fs.node.entries()) == []
        assert [event.subject for event in events if event.name == "cache.disk.failed"]
        fs.resize("1GB")
        read_all(small, fs)
        assert len(fs.node.entries()) == 8
    finally:
        subprocess.run(["umount", str(stuck)], check=True)
    assert len(list(stuck.parent.glob("*.data"))) == 3
    close_nodes()
    assert read_all(small, opened(cache)) == 0
