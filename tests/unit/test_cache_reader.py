import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millrace.cache.blocks import BLOCK_BYTES
from millrace.cache.node import CacheNode, cache_node
from millrace.config import resolve
from millrace.errors import ObjectChangedError, OriginUnavailableError
from millrace.events import Event, add_hook
from millrace.origin import ObjectInfo
from millrace.testing.origins import MemoryOrigin


@pytest.fixture
def make_node(tmp_path: Path) -> Callable[..., CacheNode]:
    def make(**options: object) -> CacheNode:
        return cache_node(
            resolve({"cache_dir": str(tmp_path / "cache"), "min_free": 0, **options}, environ={}, file={})
        )

    return make


@pytest.fixture
def origin() -> MemoryOrigin:
    origin = MemoryOrigin()
    origin.put("b/large", os.urandom(BLOCK_BYTES * 6 + 123))
    origin.put("b/small", b"hello")
    return origin


def content(origin: MemoryOrigin, key: str) -> bytes:
    return origin._objects[key][0]


def read_all(node: CacheNode, origin: MemoryOrigin, info: ObjectInfo) -> bytes:
    reader = node.open_reader(origin, info)
    try:
        return bytes(reader.read(0, info.size))
    finally:
        reader.close()


def test_each_byte_is_read_once_then_the_file_is_native(
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
    file = node.open_native(origin, info)
    assert file is not None
    assert file.read() == data
    assert origin.bytes_read() == info.size


def test_fetches_are_coalesced(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    read_all(make_node(), origin, origin.head("b/large"))
    assert origin.count("read") == 2  # 7 blocks in runs of 4


@pytest.mark.parametrize("native", [True, False])
def test_many_threads_one_fetch_a_block(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, native: bool
) -> None:
    origin.before_read = lambda *_: time.sleep(0.05)
    node = make_node(native=native)
    info = origin.head("b/large")
    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda _: read_all(node, origin, info), range(32)))
    assert all(result == content(origin, "b/large") for result in results)
    assert origin.bytes_read() == info.size


def test_an_overwritten_object_is_never_mixed(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
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


def test_an_error_reaches_every_waiting_reader_and_the_next_read_tries_again(
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


def test_without_room_reads_go_on_uncached(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node(capacity=BLOCK_BYTES)
    info = origin.head("b/large")
    assert read_all(node, origin, info) == content(origin, "b/large")
    assert read_all(node, origin, info) == content(origin, "b/large")
    assert node.open_native(origin, info) is None
    assert node.disks()[0][1] <= BLOCK_BYTES
    assert node.counters()["uncached_bytes"] > 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "reads go on uncached" in caplog.text


def test_small_reads_without_room_fetch_a_block_once(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    node = make_node(capacity=0)
    info = origin.head("b/large")
    reader = node.open_reader(origin, info)
    step = BLOCK_BYTES // 16
    data = b"".join(bytes(reader.read(start, start + step)) for start in range(0, info.size, step))
    reader.close()
    assert data == content(origin, "b/large")
    assert origin.bytes_read() == info.size


def test_a_truncated_or_corrupt_file_is_fetched_again(
    make_node: Callable[..., CacheNode], origin: MemoryOrigin
) -> None:
    node = make_node(native=False)
    info = origin.head("b/large")
    read_all(node, origin, info)
    path = next(path for path in node.disks()[0][0].glob("objects/*/*"))
    with open(path, "r+b") as file:
        file.seek(BLOCK_BYTES * 2 + 7)
        file.write(b"\xff\x00")
        file.truncate(BLOCK_BYTES * 5)
    events: list[Event] = []
    remove = add_hook(events.append)
    assert read_all(node, origin, info) == content(origin, "b/large")
    remove()
    assert {event.name for event in events} == {"cache.block.corrupt"}
    assert node.counters()["corrupt_blocks"] == len(events)


def test_a_file_deleted_by_hand_is_fetched_again(make_node: Callable[..., CacheNode], origin: MemoryOrigin) -> None:
    node = make_node()
    info = origin.head("b/small")
    read_all(node, origin, info)
    next(path for path in node.disks()[0][0].glob("objects/*/*")).unlink()
    assert node.open_native(origin, info) is None
    assert read_all(node, origin, info) == b"hello"


def test_objects_are_spread_over_disks(make_node: Callable[..., CacheNode], tmp_path: Path) -> None:
    origin = MemoryOrigin()
    node = make_node(cache_dir=[str(tmp_path / "d0"), str(tmp_path / "d1")])
    for number in range(32):
        origin.put(f"b/{number}", f"data {number}".encode())
        assert read_all(node, origin, origin.head(f"b/{number}")) == f"data {number}".encode()
    used = [used for _, used, _ in node.disks()]
    assert all(used)
    assert len(node.entries()) == 32


def test_empty_object(make_node: Callable[..., CacheNode]) -> None:
    origin = MemoryOrigin()
    origin.put("b/empty", b"")
    node = make_node()
    assert read_all(node, origin, origin.head("b/empty")) == b""
    assert origin.count("read") == 0
