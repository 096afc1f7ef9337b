"""Ranges of many objects at once, through `cat_ranges` and `cat`, and the read-ahead of an opened stream."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.origins import MemoryOrigin
from tests.support.waiting import wait_until

import millrace
from millrace.cache.node import CacheNode
from millrace.cache.reading.reader import bounds
from millrace.config import resolve
from millrace.filesystem.files import CachedFile, as_list, read_batch
from millrace.store.records import PAGE_BYTES

Make = Callable[..., millrace.MillraceFileSystem]
BLOCK = 4 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CacheNode]:
    node = CacheNode(resolve({"cache_dir": str(tmp_path / "own"), "min_free": 0}, environ={"HOME": "/"}, file={}))
    yield node
    node.close()


@pytest.mark.parametrize(
    ("wanted", "span"),
    [
        ((None, None), (0, 10)),
        ((2, 5), (2, 5)),
        ((-3, None), (7, 10)),
        ((None, -3), (0, 7)),
        ((-30, 99), (0, 10)),
        ((5, 2), (5, 5)),
        ((20, 30), (10, 10)),
    ],
)
def test_bounds_are_those_of_a_slice(wanted: tuple[int | None, int | None], span: tuple[int, int]) -> None:
    assert bounds(wanted, 10) == span
    assert bytes(range(10))[slice(*wanted)] == bytes(range(10))[slice(*span)]


def test_cat_ranges_accepts_one_bound_or_one_per_path() -> None:
    assert as_list(None, 2) == [None, None]
    assert as_list(3, 2) == [3, 3]
    assert as_list([1, None], 2) == [1, None]
    with pytest.raises(ValueError, match="1 bounds for 2 paths"):
        as_list([1], 2)


def test_batch_requests_each_object_once_and_concurrently() -> None:
    together = threading.Barrier(3)
    asked = []

    def read(path: str, ranges: object) -> list[bytes]:
        asked.append((path, ranges))
        together.wait(120)
        if path == "c":
            raise FileNotFoundError(path)
        return [path.encode() + str(each).encode() for each in ranges]  # type: ignore[attr-defined]

    answers = read_batch(["a", "b", "a", "c"], [(0, 1), (0, 2), (0, 3), (0, 4)], read)
    assert answers[:3] == [b"a(0, 1)", b"b(0, 2)", b"a(0, 3)"]
    assert isinstance(answers[3], FileNotFoundError)
    assert sorted(asked) == [("a", [(0, 1), (0, 3)]), ("b", [(0, 2)]), ("c", [(0, 4)])]
    assert read_batch([], [], read) == []


def test_ranges_are_fetched_by_pages_with_few_requests(make: Make, tmp_path: Path) -> None:
    content = os.urandom(6 * BLOCK)
    (tmp_path / "x").write_bytes(content)
    (tmp_path / "y").write_bytes(content[::-1])
    fs = make()
    x, y = f"{tmp_path}/x", f"{tmp_path}/y"
    starts = [0, BLOCK + 5, 5 * BLOCK, -10, 7]
    ends = [10, BLOCK + 50, 5 * BLOCK + 1, None, 3]
    expected = [content[slice(a, b)] for a, b in zip(starts, ends, strict=True)]
    assert fs.cat_ranges([x] * 5, starts, ends) == expected
    counters = fs.cache_counters()
    assert (counters["origin_requests"], counters["origin_bytes"]) == (4, 4 * PAGE_BYTES)
    assert fs.cat_ranges([x, y], 1, 4) == [content[1:4], content[::-1][1:4]]
    fs.cat_file(x)
    for _ in range(2):  # from the map, then from the hot map
        assert fs.cat_ranges([x] * 5, starts, ends) == expected
        assert fs.cat([x, y], end=3) == {x: content[:3], y: content[::-1][:3]}
    assert fs.cat(x, start=-3) == content[-3:]


def test_batch_raises_returns_or_omits_errors(make: Make, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    fs = make()
    paths = [f"{tmp_path}/x", f"{tmp_path}/none"]
    first, second = fs.cat_ranges(paths, 0, 2)
    assert first == b"ab"
    assert isinstance(second, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, 0, 2, on_error="raise")
    with pytest.raises(FileNotFoundError):
        fs.cat(paths)
    assert fs.cat(paths, on_error="omit") == {paths[0]: b"abc"}
    assert isinstance(fs.cat(paths, on_error="return")[paths[1]], FileNotFoundError)
    with pytest.raises(TypeError, match="list"):
        fs.cat_ranges(paths[0], 0, 2)
    with pytest.raises(ValueError, match="bounds"):
        fs.cat_ranges(paths, [0], [2, 3])


def test_first_read_of_stream_waits_only_for_its_block(node: CacheNode) -> None:
    origin = MemoryOrigin()
    origin.put("k", os.urandom(9 * BLOCK))
    go_on = threading.Event()
    origin.before_read = lambda key, start, stop: None if stop <= BLOCK else go_on.wait(120) and None
    info = origin.head("k")
    file = CachedFile(node.open_reader(origin, info), path="k", sequential=True)
    try:
        wait_until(lambda: origin.count("read") > 0)
        time.sleep(0.2)  # for any other request
        assert [(start, stop) for what, _, start, stop in origin.requests if what == "read"] == [(0, BLOCK)]
        assert len(file.read(100)) == 100  # while everything else is blocked
        assert not go_on.is_set()
    finally:
        go_on.set()
    node.close()  # waits for requests in progress
    file.close()
    assert origin.bytes_read() == 9 * BLOCK
    assert node.find_native(origin, info) is not None  # filled in the background


@pytest.mark.slow
def test_first_read_of_stream_is_before_read_ahead_of_others(node: CacheNode) -> None:
    """Other streams prefetch more than there are threads, and none of it completes."""
    origin = MemoryOrigin()
    for number in range(9):
        origin.put(f"k{number}", os.urandom(17 * BLOCK))
    go_on = threading.Event()
    origin.before_read = lambda key, start, stop: None if stop <= BLOCK else go_on.wait(300) and None
    files = []
    try:
        for number in range(9):
            files.append(CachedFile(node.open_reader(origin, origin.head(f"k{number}")), path="k", sequential=True))
            with ThreadPoolExecutor(1) as pool:
                assert len(pool.submit(files[-1].read, 100).result(120)) == 100
        # Blocks that a read waits for by now are also taken out of the queue.
        origin.before_read = None
        with ThreadPoolExecutor(1) as pool:
            files[-1].seek(16 * BLOCK)
            assert len(pool.submit(files[-1].read, 100).result(120)) == 100
        assert not go_on.is_set()
    finally:
        go_on.set()
        for file in files:
            file.close()


def test_columns_that_are_read_in_turn_are_read_ahead(node: CacheNode) -> None:
    origin = MemoryOrigin()
    origin.put("k", os.urandom(12 * BLOCK))
    info = origin.head("k")
    file = CachedFile(node.open_reader(origin, info), path="k", sequential=False)
    file.seek(-8, os.SEEK_END)
    file.read(8)  # the footer
    for place in (0, 2, 1, 3):
        file.seek(place * BLOCK)
        file.read(BLOCK)
    node.close()
    file.close()
    assert origin.bytes_read() > 6 * BLOCK
    ranges = [(start, stop) for verb, _, start, stop in origin.requests if verb == "read"]
    pages = [page for start, stop in ranges for page in range(start, stop, PAGE_BYTES)]
    assert len(pages) == len(set(pages))
