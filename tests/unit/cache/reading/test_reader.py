import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest
from tests.support.interrupts import interrupted_at
from tests.support.native import open_native
from tests.support.origins import MemoryOrigin, content
from tests.support.reading import read_all
from tests.support.small_disks import small_disk
from tests.support.waiting import in_other_thread, wait_until

from millrace.cache import catalog
from millrace.cache.eviction.evictor import Candidate
from millrace.cache.node import CacheNode
from millrace.cache.reading.locations import FileLocation
from millrace.errors import ObjectChangedError, OriginUnavailableError
from millrace.events import Event, add_hook, fetch_id
from millrace.filesystem.files import CachedFile
from millrace.runtime.locks import Flights, Outcome
from millrace.store.records import BLOCK_BYTES, PAGE_BYTES, RUN_BLOCKS, ObjectName, object_id

pytestmark = pytest.mark.usefixtures("no_maintenance")


@pytest.fixture
def origin() -> MemoryOrigin:
    origin = MemoryOrigin()
    origin.put("b/large", os.urandom(BLOCK_BYTES * 6 + 123))
    origin.put("b/small", b"hello")
    return origin


def test_each_byte_is_fetched_once_then_the_file_is_native(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    node = make_node()
    info = origin.head("b/large")
    data = content(origin, "b/large")
    reader = node.open_reader(origin, info)
    for start, stop in [
        (10, 20),
        (BLOCK_BYTES - 5, BLOCK_BYTES + 5),
        (0, info.size),
        (info.size - 3, info.size + 10),
        (9, 9),
    ]:
        assert bytes(reader.read(start, stop)) == data[start:stop]
    reader.close()
    assert origin.bytes_read() == info.size
    file = open_native(node, origin, info)
    assert file is not None
    assert file.read() == data
    assert origin.bytes_read() == info.size


def test_cold_read_of_adjacent_blocks_sends_one_request_per_run(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    read_all(make_node(), origin, origin.head("b/large"))
    assert origin.count("read") == -(-7 // RUN_BLOCKS)


@pytest.mark.parametrize("native", [True, False])
def test_many_threads_fetch_each_block_once(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, native: bool
) -> None:
    origin.before_read = lambda *_: time.sleep(0.05)
    node = make_node(native=native)
    info = origin.head("b/large")
    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda _: read_all(node, origin, info), range(32)))
    assert all(result == content(origin, "b/large") for result in results)
    assert origin.bytes_read() == info.size


def test_open_readers_are_counted_right_by_threads_that_open_and_close_them(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    """Threads switch after every step of the interpreter, also in the middle of a change."""
    node, info = make_node(), origin.head("b/large")
    watched = (FileLocation.__init__.__code__, FileLocation.close.__code__)

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        if frame.f_code not in watched:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            time.sleep(0)
        return trace

    def open_and_close() -> None:
        sys.settrace(trace)
        try:
            for _ in range(50):
                node.open_reader(origin, info).close()
        finally:
            sys.settrace(None)

    before = set(FileLocation.open_descriptors)
    node.open_reader(origin, info).close()
    threads = [threading.Thread(target=open_and_close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert FileLocation.open_descriptors == before
    with contextlib.closing(node.open_reader(origin, info)), contextlib.closing(node.open_reader(origin, info)):
        assert len(FileLocation.open_descriptors) == len(before) + 2


def test_overwritten_object_is_never_mixed(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    node = make_node()
    old = content(origin, "b/large")
    info = origin.head("b/large")
    reader = node.open_reader(origin, info)
    assert bytes(reader.read(0, 100)) == old[:100]
    origin.put("b/large", os.urandom(info.size))
    assert bytes(reader.read(0, 200)) == old[:200]  # still here
    with pytest.raises(ObjectChangedError):
        reader.read(BLOCK_BYTES * 5, BLOCK_BYTES * 5 + 1)
    reader.close()
    assert read_all(node, origin, origin.head("b/large")) == content(origin, "b/large")


def test_fetch_error_reaches_all_waiting_readers_and_next_read_retries(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    def fail(*_: object) -> None:
        time.sleep(0.1)
        raise OriginUnavailableError("memory:// is down", next_step="wait")

    node = make_node()
    info = origin.head("b/large")
    origin.before_read = fail
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            read_all(node, origin, info)
        except OriginUnavailableError as error:
            errors.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 8
    origin.before_read = None
    assert read_all(node, origin, info) == content(origin, "b/large")


def test_reads_without_space_continue_uncached(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node(capacity=BLOCK_BYTES)
    info = origin.head("b/large")
    assert read_all(node, origin, info) == content(origin, "b/large")
    assert read_all(node, origin, info) == content(origin, "b/large")
    assert open_native(node, origin, info) is None
    assert node.disks()[0][1] <= BLOCK_BYTES
    assert node.counters()["uncached_bytes"] > 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "reads continue uncached" in caplog.text


def test_full_cache_is_reported_once_by_two_threads(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node(capacity=BLOCK_BYTES)
    both = threading.Barrier(2, timeout=30)
    [disk] = node.open_disks
    name = ObjectName(origin.identity, "b/large", "version")
    candidate = Candidate(b"", BLOCK_BYTES, lambda: name, lambda: None)
    capacity = disk.store.space.capacity_bytes

    def meet() -> int:
        both.wait()
        return capacity()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(disk.store.space, "capacity_bytes", meet)
        reports = [pool.submit(disk.report_full, 1, candidate) for _ in range(2)]
        for report in reports:
            report.result()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_small_reads_without_room_fetch_a_block_once(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    node = make_node(capacity=0)
    info = origin.head("b/large")
    reader = node.open_reader(origin, info)
    step = BLOCK_BYTES // 16
    data = b"".join(bytes(reader.read(start, start + step)) for start in range(0, info.size, step))
    reader.close()
    assert data == content(origin, "b/large")
    assert origin.bytes_read() == info.size


def test_random_reads_without_space_fetch_only_their_ranges(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    node = make_node(capacity=0)
    info = origin.head("b/large")
    reader = node.open_reader(origin, info)
    starts = [5 * BLOCK_BYTES + 77, 2 * BLOCK_BYTES - 300, BLOCK_BYTES // 2, 4 * BLOCK_BYTES, 3 * BLOCK_BYTES + 1]
    for start in starts:
        assert bytes(reader.read(start, start + 1000)) == content(origin, "b/large")[start : start + 1000]
    reader.close()
    assert origin.bytes_read() == 1000 * len(starts)


def test_random_reads_are_kept_where_the_policy_makes_room(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    """A cache full of unused data admits a new data set that is read in pieces."""
    node = make_node(capacity=12 * BLOCK_BYTES)
    for number in range(4):
        origin.put(f"b/old/{number}", os.urandom(3 * BLOCK_BYTES))
        read_all(node, origin, origin.head(f"b/old/{number}"))
    info = origin.head("b/large")
    starts = [block * BLOCK_BYTES + 1000 * block + 77 for block in (4, 1, 5, 2, 3)]
    deadline = time.monotonic() + 120
    while True:
        before = origin.bytes_read()
        reader = node.open_reader(origin, info)
        for start in starts:
            assert bytes(reader.read(start, start + 100)) == content(origin, "b/large")[start : start + 100]
        reader.close()
        if origin.bytes_read() == before:
            break
        assert time.monotonic() < deadline, "never kept"
    assert node.disks()[0][1] <= 12 * BLOCK_BYTES


def test_random_reads_next_to_pins_fetch_only_their_ranges(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    """There is space for the requested range, but not for its page, and nothing may be evicted."""
    node = make_node(capacity=2 * BLOCK_BYTES + PAGE_BYTES // 2)
    origin.put("b/pinned", os.urandom(2 * BLOCK_BYTES))
    catalog.pin(node, (origin.identity, "b/pinned"))
    read_all(node, origin, origin.head("b/pinned"))
    info, before = origin.head("b/large"), origin.bytes_read()
    reader = node.open_reader(origin, info)
    for block in (4, 1, 3):
        start = block * BLOCK_BYTES + 77
        assert bytes(reader.read(start, start + 1000)) == content(origin, "b/large")[start : start + 1000]
    reader.close()
    assert origin.bytes_read() - before == 3000


def test_block_in_flight_without_space_is_not_requested_again(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    node = make_node(capacity=0)
    info = origin.head("b/large")
    on_its_way, go_on = threading.Event(), threading.Event()

    def hold_up(key: str, start: int, stop: int) -> None:
        on_its_way.set()
        assert go_on.wait(120)

    origin.before_read = hold_up
    reader = node.open_reader(origin, info)
    reader.prefetch(range(2, 3))
    assert on_its_way.wait(120)
    start = 2 * BLOCK_BYTES + 77
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read, start, start + 1000)
        wait_until(lambda: Outcome.wait.__code__ in {frame.f_code for frame in sys._current_frames().values()})
        go_on.set()
        assert bytes(reading.result(120)) == content(origin, "b/large")[start : start + 1000]
    assert bytes(reader.read(start + 2000, start + 3000)) == content(origin, "b/large")[start + 2000 : start + 3000]
    reader.close()
    assert origin.bytes_read() == BLOCK_BYTES


def seal(node: CacheNode) -> None:
    """Wait until all complete objects are sealed."""
    for disk in node._disks:
        for entry in disk.store.index.entries():
            if entry.complete and not entry.place:
                assert disk.sealer.sealed(entry) is not None


def data_file(node: CacheNode) -> Path:
    directory = node.disks()[0][0]
    return next(path for place in ("objects/*/*[0-9]", "segments/*.data") for path in directory.glob(place))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("harm", ["delete", "truncate", "empty"])
@pytest.mark.parametrize("key", ["b/large", "b/small"])
def test_damaged_file_is_fetched_again(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, native: bool, harm: str, key: str
) -> None:
    node = make_node(native=native)
    info = origin.head(key)
    read_all(node, origin, info)
    seal(node)
    path = data_file(node)
    if harm == "delete":
        path.unlink()
    else:
        os.truncate(path, info.size // 2 if harm == "truncate" else 0)
    events: list[Event] = []
    remove = add_hook(events.append)
    assert read_all(node, origin, info) == content(origin, key)
    remove()
    assert [event.name for event in events] == ["cache.file.lost"]
    if native:
        file = open_native(node, origin, info)
        assert file is not None
        assert file.read() == content(origin, key)


@pytest.mark.parametrize("harm", ["delete", "truncate"])
@pytest.mark.parametrize("key", ["b/large", "b/small"])
def test_damaged_file_does_not_open_natively(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, harm: str, key: str
) -> None:
    node = make_node()
    info = origin.head(key)
    read_all(node, origin, info)
    seal(node)
    if harm == "delete":
        data_file(node).unlink()
    else:
        os.truncate(data_file(node), info.size - 1)
    assert open_native(node, origin, info) is None
    assert read_all(node, origin, info) == content(origin, key)


def test_file_truncated_under_open_reader_is_fetched_again(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    node = make_node()
    info = origin.head("b/large")
    reader = node.open_reader(origin, info)
    reader.read(0, info.size)
    os.truncate(data_file(node), BLOCK_BYTES + 5)
    assert bytes(reader.read(0, info.size)) == content(origin, "b/large")
    reader.close()


def test_truncated_file_does_not_grow_under_its_readers(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    """A block written after the truncation point would leave zeros before it, which other readers regard as verified."""
    node = make_node()
    info = origin.head("b/large")
    first, second = node.open_reader(origin, info), node.open_reader(origin, info)
    data = content(origin, "b/large")
    for reader in (first, second):
        assert bytes(reader.read(0, info.size)) == data
    seal(node)
    os.truncate(data_file(node), 5)
    assert bytes(first.read(info.size - 10, info.size)) == data[-10:]
    for reader in (second, first):
        assert bytes(reader.read(0, info.size)) == data
        reader.close()
    assert read_all(node, origin, info) == data


def test_corrupt_block_is_fetched_again(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    node = make_node(native=False)
    info = origin.head("b/large")
    read_all(node, origin, info)
    seal(node)
    with open(data_file(node), "r+b") as file:
        file.seek(BLOCK_BYTES * 2 + 7)
        file.write(b"\xff\x00")
    events: list[Event] = []
    remove = add_hook(events.append)
    assert read_all(node, origin, info) == content(origin, "b/large")
    remove()
    assert [event.name for event in events] == ["cache.file.changed", "cache.block.corrupt"]
    assert node.counters()["corrupt_blocks"] == 1


def test_objects_are_spread_over_disks(make_node: Callable[..., CacheNode], tmp_path: Path) -> None:
    origin = MemoryOrigin()
    node = make_node(cache_dir=[str(tmp_path / "d0"), str(tmp_path / "d1")])
    for number in range(32):
        origin.put(f"b/{number}", f"data {number}".encode())
        assert read_all(node, origin, origin.head(f"b/{number}")) == f"data {number}".encode()
    used = [used for _, used, _ in node.disks()]
    assert all(used)
    assert len(node.entries()) == 32


def test_empty_object_is_read(make_node: Callable[..., CacheNode]) -> None:
    origin = MemoryOrigin()
    origin.put("b/empty", b"")
    node = make_node()
    assert read_all(node, origin, origin.head("b/empty")) == b""
    assert origin.count("read") == 0


def test_sequential_readers_without_space_fetch_about_once(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    node = make_node(capacity=0)
    keys = [f"b/{number}" for number in range(8)]
    for key in keys:
        origin.put(key, os.urandom(BLOCK_BYTES * 12))

    def scan(key: str) -> bytes:
        fs_file = CachedFile(node.open_reader(origin, origin.head(key)), path=key, sequential=True)
        with fs_file:
            return b"".join(iter(lambda: fs_file.read(1 << 20), b""))

    with ThreadPoolExecutor(8) as pool:
        for key, data in zip(keys, pool.map(scan, keys), strict=True):
            assert data == content(origin, key)
    # A reader that is stopped for a moment is not in time for the blocks that were fetched ahead for it, an eighth of all.
    assert origin.bytes_read() <= 1.6 * 8 * 12 * BLOCK_BYTES


def test_file_systems_of_different_options_share_their_fetches(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    origin.before_read = lambda *_: time.sleep(0.1)
    info = origin.head("b/small")
    nodes = [make_node(consistency="immutable"), make_node(consistency="always"), make_node(native=False)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda node: read_all(node, origin, info), nodes)) == [b"hello"] * 3
    assert origin.count("read") == 1


def test_threads_together_stay_inside_the_capacity(make_node: Callable[..., CacheNode]) -> None:
    origin = MemoryOrigin(before_read=lambda *_: time.sleep(0.02))
    node = make_node(capacity=BLOCK_BYTES * 2)
    for number in range(16):
        origin.put(f"b/{number}", bytes(BLOCK_BYTES))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: read_all(node, origin, origin.head(f"b/{number}")), range(16)))
    assert node.disks()[0][1] == BLOCK_BYTES * 2


def test_open_reader_in_forked_child_reads(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    node = make_node()
    info = origin.head("b/large")
    reader = node.open_reader(origin, info)
    reader.read(0, 10)
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        os._exit(0 if bytes(reader.read(0, info.size)) == content(origin, "b/large") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bytes(reader.read(0, info.size)) == content(origin, "b/large")
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read(0, 1)


def test_reader_of_an_object_that_is_removed_many_times_holds_one_other_reader(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    node = make_node()
    info = origin.head("b/large")
    reader = node.open_reader(origin, info)
    for number in range(6):
        start = number * BLOCK_BYTES
        assert bytes(reader.read(start, start + 10)) == content(origin, "b/large")[start : start + 10]
        catalog.free(node, (origin.identity, "b/large"))
    assert bytes(reader.read(0, info.size)) == content(origin, "b/large")
    assert reader._reopened is not None
    assert reader._reopened._reopened is None
    reader.close()


def test_open_reader_of_removed_object_continues(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    node = make_node()
    info = origin.head("b/large")
    reader = node.open_reader(origin, info)
    reader.read(0, BLOCK_BYTES * 2)
    node.discard(origin, info)
    assert bytes(reader.read(0, info.size)) == content(origin, "b/large")
    reader.close()
    assert node.entries() == []


def test_fetch_of_stopped_process_is_repeated_by_another(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.runtime.locks.SILENCE_SECONDS", 0.3)
    node = make_node()
    info = origin.head("b/large")
    directory = node.disks()[0][0]
    name = object_id(origin.identity, info.key, info.version, info.size)
    code = (
        "import sys, pathlib; from millrace.runtime.locks import NamedLocks, lock_number;"
        "locks = NamedLocks(pathlib.Path(sys.argv[1])); assert locks.try_acquire(lock_number(bytes.fromhex(sys.argv[2])));"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(directory / "locks"), name.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        other.send_signal(signal.SIGSTOP)
        assert read_all(node, origin, info) == content(origin, "b/large")
        other.kill()


def test_waiting_for_another_process_takes_no_thread_from_other_reads(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    """More reads wait for another process than there are threads to fetch in."""
    node = make_node()
    names = [f"b/{number}" for number in range(40)]
    for name in names:
        origin.put(name, content(origin, "b/large"))
    infos = [origin.head(name) for name in names]
    ids = [object_id(origin.identity, info.key, info.version, info.size).hex() for info in infos]
    code = (
        "import sys, pathlib; from millrace.runtime.locks import NamedLocks, lock_number;"
        "locks = NamedLocks(pathlib.Path(sys.argv[1]));"
        "assert all(locks.try_acquire(lock_number(bytes.fromhex(name))) for name in sys.argv[2:]);"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(node.disks()[0][0] / "locks"), *ids]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
        ThreadPoolExecutor(len(names)) as pool,
    ):
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        readers = [node.open_reader(origin, info) for info in infos]
        waiting = [pool.submit(reader.read, 0, 100) for reader in readers]
        info = origin.head("b/large")
        last = object_id(origin.identity, info.key, info.version, info.size), 0
        while len(node._disks[0].flights._flights) < len(names):
            time.sleep(0.01)
        assert read_all(node, origin, info) == content(origin, "b/large")
        assert last not in node._disks[0].flights
        assert not any(read.done() for read in waiting)
        other.kill()  # its locks end with it
        assert all(read.result(300) == content(origin, "b/large")[:100] for read in waiting)
        for reader in readers:
            reader.close()


def test_fetch_ends_only_its_own_flights() -> None:
    flights, key = Flights(), (bytes(16), 0)
    first = flights.join(bytes(16), [0])[0][0]
    flights.complete(key, first, b"1")
    second = flights.join(bytes(16), [0])[0][0]
    flights.fail(key, first, RuntimeError("late"))
    assert first.result() == b"1"
    assert flights.join(bytes(16), [0])[1] == {0: second}
    flights.fail(key, second, RuntimeError("own"))
    with pytest.raises(RuntimeError, match="own"):
        second.result()


@pytest.fixture(name="small_disk")
def disk_of_24_mb(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=24m") as disk:
        yield disk


@pytest.mark.root
@pytest.mark.parametrize("native", [True, False])
def test_disk_filled_by_others_fails_no_read(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, small_disk: Path, native: bool
) -> None:
    node = make_node(cache_dir=str(small_disk), native=native)
    small = origin.head("b/small")
    assert read_all(node, origin, small) == b"hello"
    with open(small_disk / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(1 << 12))
    assert os.statvfs(small_disk).f_bavail == 0
    for _ in range(2):
        for key in ("b/large", "b/small"):
            assert node.metadata.stat(origin, key).size == len(content(origin, key))
            assert read_all(node, origin, origin.head(key)) == content(origin, key)
        if native:
            assert open_native(node, origin, small) is not None
    node.counters()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("key", ["b/large", "b/small"])
def test_disk_without_statistics_fails_no_read(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch, key: str, code: int
) -> None:
    def failing(_: object) -> None:
        raise OSError(code, "no answer")

    info = origin.head(key)
    reader = make_node().open_reader(origin, info)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", failing)
        reader.prefetch(range(1))
        assert bytes(reader.read(0, info.size)) == content(origin, key)
        patch.setattr(FileLocation, "open_descriptors", set(range(10_000, 11_000)))
        assert bytes(reader.read(0, 5)) == content(origin, key)[:5]
    reader.close()


@pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*__del__:pytest.PytestUnraisableExceptionWarning"
)  # an interrupt
@pytest.mark.parametrize(
    ("nbytes", "span"),
    [
        (1000, (0, 1000)),
        (BLOCK_BYTES // 2, (0, BLOCK_BYTES // 2)),
        pytest.param((1 << 20) + 1, (PAGE_BYTES, 2 * PAGE_BYTES), marks=pytest.mark.slow),
    ],
    ids=["small", "block", "page"],
)
def test_interrupt_at_any_moment_of_a_read_leaves_the_blocks_readable(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, nbytes: int, span: tuple[int, int]
) -> None:
    node = make_node()
    for number in itertools.count():
        origin.put(f"b/{number}", os.urandom(nbytes))
        info = origin.head(f"b/{number}")
        reader = node.open_reader(origin, info)
        interrupt = interrupted_at(number, lambda reader=reader: reader.read(*span))
        wait_until(lambda: not node._disks[0].locks._held)  # a thread of a pool may still fetch
        assert fetch_id.get() == ""  # else all later reads would seem to be part of this one
        for _ in range(2):
            assert in_other_thread(lambda info=info: read_all(node, origin, info)) == content(origin, info.key)
        assert bytes(reader.read(0, info.size)) == content(origin, info.key)
        reader.close()
        if interrupt is None:
            break
    assert number > 10
