"""Reads of parts of blocks: right bytes, each page fetched once, and little more than what was requested."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.support.harms import flip
from tests.support.native import open_native
from tests.support.origins import MemoryOrigin

from millrace.cache import catalog
from millrace.cache.node import CacheNode, cache_node, close_nodes
from millrace.cache.reading.fetching import bridged
from millrace.cache.reading.pages import without
from millrace.cache.reading.reader import CachedReader, read_ranges
from millrace.config import resolve
from millrace.errors import OriginUnavailableError
from millrace.events import Event, add_hook
from millrace.store.records import BLOCK_BYTES, PAGE_BYTES

SIZE = 4 * BLOCK_BYTES + 3 * PAGE_BYTES + 123
DATA = random.Random(0).randbytes(SIZE)
KEY = "b/wide"


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., CacheNode]]:
    def make(**options: object) -> CacheNode:
        given = {"cache_dir": str(tmp_path / "cache"), "min_free": 0, **options}
        return cache_node(resolve(given, environ={}, file={}))

    yield make
    close_nodes()


@pytest.fixture
def origin() -> MemoryOrigin:
    origin = MemoryOrigin()
    origin.put(KEY, DATA)
    return origin


def opened(node: CacheNode, origin: MemoryOrigin) -> CachedReader:
    reader = node.open_reader(origin, origin.head(KEY))
    assert isinstance(reader, CachedReader)
    return reader


def most_fetches_of_a_byte(origin: MemoryOrigin) -> int:
    """Of all bytes of the object: how often was one fetched at most?"""
    changes = np.zeros(SIZE + 1, np.int32)
    for operation, _, start, stop in origin.requests:
        if operation == "read":
            changes[start] += 1
            changes[stop] -= 1
    return int(np.cumsum(changes).max())


def random_ranges(seed: int, count: int) -> list[tuple[int, int]]:
    """Ranges of all lengths, many of them at the boundaries of pages and blocks."""
    chooser, found = random.Random(seed), []
    for _ in range(count):
        start = chooser.choice(
            (chooser.randrange(1, SIZE), chooser.randrange(1, SIZE // PAGE_BYTES) * PAGE_BYTES, BLOCK_BYTES - 7)
        )
        length = chooser.choice((1, 300, PAGE_BYTES, 5 * PAGE_BYTES + 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 9))
        found.append((start, min(SIZE, start + length)))
    return found


def test_read_inside_a_block_fetches_its_pages_only(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    reader = opened(make_node(), origin)
    start = BLOCK_BYTES + 5 * PAGE_BYTES + 10
    assert bytes(reader.read(start, start + PAGE_BYTES)) == DATA[start : start + PAGE_BYTES]
    assert origin.bytes_read() == 2 * PAGE_BYTES
    assert bytes(reader.read(start + 5, start + 9)) == DATA[start + 5 : start + 9]
    assert origin.bytes_read() == 2 * PAGE_BYTES
    reader.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("native", [True, False])
def test_random_ranges_are_right_and_each_byte_is_fetched_once(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, seed: int, native: bool
) -> None:
    node = make_node(native=native)
    for number in range(3):  # readers that know nothing of each other
        reader = opened(node, origin)
        for start, stop in random_ranges(10 * seed + number, 12):
            assert bytes(reader.read(start, stop)) == DATA[start:stop]
        reader.close()
    reader = opened(node, origin)
    assert bytes(reader.read(0, SIZE)) == DATA
    reader.close()
    assert origin.bytes_read() == SIZE
    assert most_fetches_of_a_byte(origin) == 1
    assert node.disks()[0][1] == SIZE
    file = open_native(node, origin, origin.head(KEY))
    assert not native or (file is not None and file.read() == DATA)


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_read_random_ranges_fetch_each_byte_once(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, seed: int
) -> None:
    node, together = make_node(), threading.Barrier(8)

    def read(number: int) -> None:
        reader = opened(node, origin)
        together.wait(120)
        for start, stop in random_ranges(100 * seed + number, 10):
            assert bytes(reader.read(start, stop)) == DATA[start:stop]
        reader.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    assert most_fetches_of_a_byte(origin) == 1


def test_whole_read_after_a_column_fetches_only_the_rest(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    node, chunk = make_node(), 10 * PAGE_BYTES
    reader = opened(node, origin)
    spans = [(start, start + chunk) for start in range(PAGE_BYTES + 100, SIZE - chunk, 20 * chunk)]
    for start, stop in spans:
        assert bytes(reader.read(start, stop)) == DATA[start:stop]
    assert origin.bytes_read() <= 1.2 * len(spans) * chunk
    reader.close()
    reader = opened(node, origin)
    assert bytes(reader.read(0, SIZE)) == DATA
    reader.close()
    assert (origin.bytes_read(), most_fetches_of_a_byte(origin)) == (SIZE, 1)


def test_pages_survive_the_end_of_the_process(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    reader = opened(make_node(), origin)
    reader.read(BLOCK_BYTES + 1, BLOCK_BYTES + 100_000)
    reader.close()
    close_nodes()
    fetched = origin.bytes_read()
    reader = opened(make_node(), origin)
    assert bytes(reader.read(BLOCK_BYTES + 1, BLOCK_BYTES + 100_000)) == DATA[BLOCK_BYTES + 1 : BLOCK_BYTES + 100_000]
    assert origin.bytes_read() == fetched
    reader.close()


@pytest.mark.parametrize("native", [True, False])
def test_damaged_page_is_found_dropped_and_fetched_again(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, native: bool, tmp_path: Path
) -> None:
    start = BLOCK_BYTES + PAGE_BYTES + 7
    reader = opened(make_node(native=native), origin)
    reader.read(start, start + 50_000)
    reader.close()
    close_nodes()
    (file,) = [path for path in (tmp_path / "cache").rglob("objects/*/*") if path.stat().st_size == SIZE]
    flip(file, start + 20_000)
    events: list[Event] = []
    remove = add_hook(events.append)
    node = make_node(native=native)
    reader = opened(node, origin)
    assert bytes(reader.read(start, start + 50_000)) == DATA[start : start + 50_000]
    remove()
    assert [event.name for event in events if "corrupt" in event.name] == ["cache.block.corrupt"]
    fetched = origin.bytes_read()
    assert bytes(reader.read(0, SIZE)) == DATA
    assert origin.bytes_read() > fetched
    assert node.disks()[0][1] == SIZE
    reader.close()


def test_pages_are_counted_and_freed(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    node = make_node()
    reader = opened(node, origin)
    reader.read(PAGE_BYTES, 3 * PAGE_BYTES)
    reader.read(SIZE - 5, SIZE)
    last = (SIZE - 1) % PAGE_BYTES + 1
    assert node.disks()[0][1] == 2 * PAGE_BYTES + last
    assert [entry.cached_bytes for entry in catalog.cached_objects(node)] == [2 * PAGE_BYTES + last]
    catalog.free(node, (origin.identity, KEY))
    assert node.disks()[0][1] == 0
    assert bytes(reader.read(PAGE_BYTES, 3 * PAGE_BYTES)) == DATA[PAGE_BYTES : 3 * PAGE_BYTES]
    reader.close()


def test_pages_stay_within_the_capacity(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    node = make_node(capacity=BLOCK_BYTES)
    reader = opened(node, origin)
    for start, stop in random_ranges(5, 30):
        assert bytes(reader.read(start, stop)) == DATA[start:stop]
        assert node.disks()[0][1] <= BLOCK_BYTES
    reader.close()


def test_failed_fetch_of_pages_is_raised_and_the_next_read_succeeds(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    def fail(key: str, start: int, stop: int) -> None:
        raise OriginUnavailableError("no", next_step="wait")

    reader = opened(make_node(), origin)
    origin.before_read = fail
    with pytest.raises(OriginUnavailableError):
        reader.read(BLOCK_BYTES + 1, BLOCK_BYTES + 2)
    origin.before_read = None
    assert bytes(reader.read(BLOCK_BYTES + 1, BLOCK_BYTES + 2)) == DATA[BLOCK_BYTES + 1 : BLOCK_BYTES + 2]
    reader.close()


def test_whole_block_and_page_of_it_are_fetched_once_at_the_same_time(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    node = make_node()
    in_flight, proceed = threading.Event(), threading.Event()

    def hold(key: str, start: int, stop: int) -> None:
        in_flight.set()
        assert proceed.wait(120)

    origin.before_read = hold
    pages, blocks = opened(node, origin), opened(node, origin)
    with ThreadPoolExecutor(2) as pool:
        part = pool.submit(pages.read, BLOCK_BYTES + 10, BLOCK_BYTES + 20)
        assert in_flight.wait(120)
        whole = pool.submit(blocks.read, 0, SIZE)
        proceed.set()
        assert bytes(part.result(120)) == DATA[BLOCK_BYTES + 10 : BLOCK_BYTES + 20]
        assert bytes(whole.result(120)) == DATA
    assert (origin.bytes_read(), most_fetches_of_a_byte(origin)) == (SIZE, 1)
    pages.close()
    blocks.close()


def test_scattered_ranges_of_a_batch_are_not_widened_to_blocks(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    reader = opened(make_node(), origin)
    ranges = [(start, start + 3 * PAGE_BYTES) for start in range(PAGE_BYTES, SIZE, 40 * PAGE_BYTES)]
    wanted = [DATA[start:stop] for start, stop in ranges]
    assert read_ranges(reader, ranges) == wanted
    assert origin.bytes_read() <= 1.2 * sum(map(len, wanted))
    reader.close()


def test_many_small_ranges_in_one_block_need_few_requests(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    reader = opened(make_node(), origin)
    ranges = [(start, start + 100) for start in range(7, BLOCK_BYTES, 3 * PAGE_BYTES)]
    assert read_ranges(reader, ranges) == [DATA[start:stop] for start, stop in ranges]
    assert origin.count("read") <= 10
    reader.close()


def test_interrupted_processes_hold_no_pages_back(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    """A forked child that ends in the middle of a fetch frees its locks."""
    node, info = make_node(), origin.head(KEY)
    ready, proceed = os.pipe()
    pid = os.fork()
    if pid == 0:
        origin.before_read = lambda *_: os._exit(0 if os.write(proceed, b"x") else 1)
        child = make_node().open_reader(origin, info)
        child.read(BLOCK_BYTES + 10, BLOCK_BYTES + 20)
        os._exit(2)
    assert os.read(ready, 1) == b"x"
    reader = node.open_reader(origin, info)
    assert bytes(reader.read(BLOCK_BYTES + 10, BLOCK_BYTES + 20)) == DATA[BLOCK_BYTES + 10 : BLOCK_BYTES + 20]
    reader.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(ready)
    os.close(proceed)


def test_bridged_ranges_join_across_the_smallest_holes() -> None:
    assert bridged([], 10, most=8) == []
    assert bridged([(0, 10), (12, 20), (50, 60)], 5, most=8) == [(0, 20), (50, 60)]
    assert bridged([(0, 10), (12, 20), (50, 60)], 0, most=8) == [(0, 10), (12, 20), (50, 60)]
    many = [(100 * number, 100 * number + 90 - number) for number in range(20)]
    joined = bridged(many, 0, most=8)
    assert len(joined) == 8
    assert (joined[0][0], joined[-1][1]) == (0, 1971)


def test_range_without_its_cached_pieces_leaves_the_gaps() -> None:
    assert without((5, 10), {}) == [(5, 10)]
    assert without((0, 10), {2: b"ab", 6: b"c"}) == [(0, 2), (4, 6), (7, 10)]
    assert without((3, 6), {0: bytes(100)}) == []


def test_page_damaged_after_its_first_read_is_fetched_again_when_the_block_is_completed(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    """The checksum of a complete block must not be computed over bytes that were not verified."""
    node = make_node()
    reader = opened(node, origin)
    damaged = 5 * PAGE_BYTES
    for _ in range(2):  # fetched, and read from the disk
        assert bytes(reader.read(damaged, damaged + 10)) == DATA[damaged : damaged + 10]
    [disk] = node.open_disks
    entry = reader._location.entry
    with open(disk.store.path(entry), "r+b") as file:
        file.seek(damaged)
        file.write(bytes(10))
    assert bytes(reader.read(0, SIZE)) == DATA
    reader.close()
    reader = opened(make_node(native=False), origin)
    assert bytes(reader.read(0, SIZE)) == DATA
    reader.close()
