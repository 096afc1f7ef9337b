from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.harms import flip
from tests.support.native import open_native
from tests.support.origins import MemoryOrigin, content
from tests.support.reading import read_all

from millrace.cache.disk import Disk
from millrace.cache.eviction.usage import group_of
from millrace.cache.node import CacheNode, cache_node, close_nodes
from millrace.cache.reading.locations import stored_object
from millrace.cache.rebuild import rebuild
from millrace.config import Amount
from millrace.errors import ObjectChangedError, OriginUnavailableError
from millrace.events import Event
from millrace.origin import ObjectInfo
from millrace.runtime.failures import LostDataError
from millrace.store.maps import MapCache
from millrace.store.records import Entry, ObjectName, object_id
from millrace.store.seals import SegmentSeals
from millrace.store.segment_files import data_path, generations, group_in
from millrace.store.segment_maps import SegmentMaps
from millrace.store.segments import SMALL_OBJECT_BYTES, Segments
from millrace.store.store import Store

pytestmark = pytest.mark.usefixtures("no_maintenance")

MakeNode = Callable[..., CacheNode]


def filled(number: int = 20, size: int = 5000) -> MemoryOrigin:
    origin = MemoryOrigin()
    for n in range(number):
        origin.put(f"b/set/{n:03}.jpg", os.urandom(size + n))
    return origin


def disk_of(node: CacheNode) -> Disk:
    return node.open_disks[0]


def entry_of(node: CacheNode, origin: MemoryOrigin, key: str) -> Entry:
    info = origin.head(key)
    entry = disk_of(node).store.index.get(object_id(origin.identity, info.key, info.version, info.size))
    assert entry is not None
    return entry


# --- groups -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "root", "group"),
    [
        ("b/x", None, "o b"),
        ("b/a/x", None, "o b/a"),
        ("b/a/b/x", None, "o b/a/b"),
        ("b/a/b/c/d/x", None, "o b/a/b"),
        ("/data/a/b/c/x", None, "o /data/a/b"),
        ("x", None, "o "),
        ("b/a/b/c/d/x", "b/a/b/c", "o b/a/b/c"),
        ("b/a/b/c/d/x", "b/a", "o b/a"),
        ("b/a/b/c/d/x", "b/a/", "o b/a"),
        ("b/a/b/c/d/x", "b", "o b/a/b"),  # a whole bucket is not a data set
        ("b/a/b/c/d/x", "", "o b/a/b"),
        ("b/a/b/c/d/x", "b/other", "o b/a/b"),
        ("b/a/x", "b/a/x", "o b/a"),
        ("/data/a/x", "/data", "o /data/a"),
    ],
)
def test_group_of_object_follows_its_listing(key: str, root: str | None, group: str) -> None:
    assert group_of("o", key, root) == group


# --- reading segments ---------------------------------------------------------------------------------


class Segmented:
    """A few objects in a segment, and their readers."""

    def __init__(self, directory: Path) -> None:
        self.store = Store(directory, capacity=Amount(nbytes=1 << 30), min_free=Amount(nbytes=0), rebuild=rebuild)
        self.segments = Segments(directory / "segments", self.store.index)
        self.maps = MapCache()
        self.segment_maps = SegmentMaps(self.segments.directory, self.maps, SegmentSeals(self.store.index).get)

    def add(self, number: int, data: bytes) -> Entry:
        name = ObjectName("o", f"b/{number}", "v")
        placed = self.segments.append("g", bytes([number]) * 16, name, data)
        entry = self.store.index.add_small(
            bytes([number]) * 16,
            len(data),
            name,
            segment=placed.segment,
            offset=placed.offset,
            checksum=placed.checksum,
        )
        assert entry is not None
        return entry

    def close(self) -> None:
        self.segments.close()
        self.store.close()


@pytest.fixture
def segmented(tmp_path: Path) -> Iterator[Segmented]:
    made = Segmented(tmp_path / "store")
    yield made
    made.close()


def test_first_read_is_verified_copy_and_later_reads_are_slices(segmented: Segmented) -> None:
    datas = [os.urandom(3000 + n) for n in range(50)]
    entries = [segmented.add(n, data) for n, data in enumerate(datas)]
    for entry, data in zip(entries, datas, strict=True):
        first, second = segmented.segment_maps.get(entry), segmented.segment_maps.get(entry)
        assert first is not None
        assert second is not None
        assert first[1] is None
        assert second[1] is segmented.maps.get(entry.place)
        assert first[0].to_pybytes() == second[0].to_pybytes() == data
        assert second[0].address % 64 == 0
    assert len(segmented.maps) == 1


def test_map_grows_with_its_segment(segmented: Segmented) -> None:
    slices = []
    for n in range(30):
        entry = segmented.add(n, bytes([n]) * 10_000)
        segmented.segment_maps.get(entry)
        found = segmented.segment_maps.get(entry)
        assert found is not None
        slices.append(found[0])
    assert [part.to_pybytes() for part in slices] == [bytes([n]) * 10_000 for n in range(30)]  # the old maps stay


def test_tiny_objects_are_always_verified(segmented: Segmented) -> None:
    entries = [segmented.add(n, bytes([n]) * 511) for n in range(8)]
    for entry in entries * 2:
        found = segmented.segment_maps.get(entry)
        assert found is not None
        assert found[1] is None
    flip(data_path(segmented.segments.directory, entries[3].place), entries[3].offset + 100)
    assert segmented.segment_maps.get(entries[3]) is None
    assert segmented.segment_maps.get(entries[4]) is not None


def test_verification_of_object_does_not_cover_its_neighbour(segmented: Segmented) -> None:
    sizes = [512, 513, 575, 576, 640, 1000, 511, 1, 512]
    entries = [segmented.add(n, os.urandom(size)) for n, size in enumerate(sizes)]
    for number, entry in enumerate(entries):
        for other in entries[:number] + entries[number + 1 :]:
            segmented.segment_maps.get(other)
        found = segmented.segment_maps.get(entry)
        assert found is not None
        assert found[1] is None or number  # the first was not requested before
        segmented.segment_maps.drop(entry.place)
    flip(data_path(segmented.segments.directory, entries[4].place), entries[4].offset)
    for number, entry in enumerate(entries):
        assert (segmented.segment_maps.get(entry) is None) == (number == 4)


def test_wrong_bytes_are_found_at_first_use(segmented: Segmented) -> None:
    entry = segmented.add(1, os.urandom(5000))
    flip(data_path(segmented.segments.directory, entry.place), entry.offset + 4999)
    assert segmented.segment_maps.get(entry) is None
    assert segmented.segment_maps.read(entry) is None


def test_truncated_or_removed_segment_raises_lost_data(segmented: Segmented) -> None:
    first, last = segmented.add(1, os.urandom(5000)), segmented.add(2, os.urandom(5000))
    for entry in (first, last):
        segmented.segment_maps.get(entry)
    path = data_path(segmented.segments.directory, first.place)
    os.truncate(path, last.offset + 100)
    with pytest.raises(LostDataError, match="shorter"):  # verified before, and not mapped yet
        segmented.segment_maps.get(last)
    assert segmented.segment_maps.get(first) is not None
    segmented.segment_maps.drop(first.place)
    os.unlink(path)
    with pytest.raises(LostDataError, match="gone"):
        segmented.segment_maps.get(first)


def test_segment_reads_during_appends_return_right_bytes(segmented: Segmented) -> None:
    datas = [os.urandom(2000) for _ in range(200)]
    entries: list[Entry] = []
    done = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                for number, entry in enumerate(list(entries)):
                    found = segmented.segment_maps.get(entry)
                    assert found is not None
                    assert found[0].to_pybytes() == datas[number]
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number, data in enumerate(datas):
        entries.append(segmented.add(number, data))
    done.set()
    for thread in threads:
        thread.join()
    assert errors == []


# --- a node -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
def test_small_object_is_fetched_whole_by_one_request(make_node: MakeNode, native: bool) -> None:
    origin = filled()
    node = make_node(native=native)
    info = origin.head("b/set/003.jpg")
    data = content(origin, info.key)
    reader = node.open_reader(origin, info)
    for start, stop in [(10, 20), (0, 1), (info.size - 5, info.size + 5), (-3, 4), (7, 7), (0, info.size)]:
        assert bytes(reader.read(start, stop)) == data[max(0, start) : stop]
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read(0, 1)
    assert [request for request in origin.requests if request[0] == "read"] == [("read", info.key, 0, info.size)]
    assert read_all(node, origin, info.key) == data
    assert origin.count("read") == 1
    assert node.counters()["origin_bytes"] == info.size
    assert node.counters()["cache_bytes"] == info.size


def test_objects_share_segments_and_not_files(make_node: MakeNode) -> None:
    origin = filled(50)
    node = make_node()
    for n in range(50):
        read_all(node, origin, f"b/set/{n:03}.jpg")
    directory = disk_of(node).store.directory
    assert list(directory.glob("objects/*/*")) == []
    assert len(list(directory.glob("segments/*.data"))) == 1
    assert len(node.entries()) == 50
    assert all(entry.complete for entry in node.entries())
    used = node.disks()[0][1]
    assert used == os.stat(next(directory.glob("segments/*.data"))).st_size


@pytest.mark.parametrize(("size", "small"), [(SMALL_OBJECT_BYTES, True), (SMALL_OBJECT_BYTES + 1, False)])
def test_size_decides_between_segment_and_file(make_node: MakeNode, size: int, small: bool) -> None:
    origin = MemoryOrigin()
    origin.put("b/x", os.urandom(size))
    node = make_node()
    assert read_all(node, origin, "b/x") == content(origin, "b/x")
    assert (entry_of(node, origin, "b/x").place != 0) == small
    file = open_native(node, origin, origin.head("b/x"))
    assert file is not None
    assert file.read() == content(origin, "b/x")


def test_object_with_own_file_stays_in_it(make_node: MakeNode) -> None:
    origin = filled(1)
    node = make_node()
    info = origin.head("b/set/000.jpg")
    name = object_id(origin.identity, info.key, info.version, info.size)
    store = disk_of(node).store
    entry = store.index.create(name, info.size, 4 << 20, ObjectName(origin.identity, info.key, info.version))
    descriptor = store.open_data(entry)
    store.write_block(entry, descriptor, 0, content(origin, info.key))
    os.close(descriptor)
    assert read_all(node, origin, info.key) == content(origin, info.key)
    assert origin.count("read") == 0
    file = open_native(node, origin, info)
    assert file is not None
    assert file.read() == content(origin, info.key)


def test_empty_object_needs_no_segment(make_node: MakeNode) -> None:
    origin = MemoryOrigin()
    origin.put("b/empty", b"")
    node = make_node()
    assert read_all(node, origin, "b/empty") == b""
    reader = node.open_reader(origin, origin.head("b/empty"))
    reader.prefetch(range(1))
    reader.close()
    assert origin.count("read") == 0
    assert generations(disk_of(node).segments.directory) == []


def test_native_opens_are_slices_of_a_segment(make_node: MakeNode) -> None:
    origin = filled(10)
    node = make_node()
    keys = [f"b/set/{n:03}.jpg" for n in range(10)]
    assert open_native(node, origin, origin.head(keys[0])) is None
    for key in keys:
        read_all(node, origin, key)
    for _ in range(3):
        for key in keys:
            found = node.find_native(origin, origin.head(key))
            assert found is not None
            assert found.buffer.to_pybytes() == content(origin, key)
    assert found.slot is not None
    assert found.slot.buffer.slice(found.offset, found.entry.size).equals(found.buffer)
    assert node.counters()["native_opens"] == 30
    assert open_native(make_node(native=False), origin, origin.head(keys[0])) is None


def test_many_threads_fetch_a_small_object_once(make_node: MakeNode) -> None:
    origin = filled(4)
    origin.before_read = lambda *_: time.sleep(0.02)
    node = make_node()
    with ThreadPoolExecutor(32) as pool:
        keys = [f"b/set/{n % 4:03}.jpg" for n in range(64)]
        assert list(pool.map(lambda key: read_all(node, origin, key), keys)) == [content(origin, key) for key in keys]
    assert origin.count("read") == 4


def test_prefetches_of_several_small_objects_run_concurrently(make_node: MakeNode) -> None:
    origin = filled(8)
    together = threading.Barrier(8)
    origin.before_read = lambda *_: together.wait(300) and None
    node = make_node()
    readers = [node.open_reader(origin, origin.head(f"b/set/{n:03}.jpg")) for n in range(8)]
    for reader in readers:
        reader.prefetch(range(1))
        reader.prefetch(range(1))
        reader.prefetch(range(0))
    for n, reader in enumerate(readers):
        assert bytes(reader.read(0, 1 << 30)) == content(origin, f"b/set/{n:03}.jpg")
        reader.close()
    assert origin.count("read") == 8


def test_fetch_error_of_small_object_reaches_all_readers_and_next_read_retries(make_node: MakeNode) -> None:
    origin = filled(1)

    def fail(*_: object) -> None:
        time.sleep(0.1)
        raise OriginUnavailableError("memory:// is down", next_step="wait")

    origin.before_read = fail
    node = make_node()

    def attempt(_: int) -> bool:
        try:
            read_all(node, origin, "b/set/000.jpg")
        except OriginUnavailableError:
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(attempt, range(8)))
    origin.before_read = None
    assert read_all(node, origin, "b/set/000.jpg") == content(origin, "b/set/000.jpg")


def test_interrupted_fetch_does_not_interrupt_waiting_readers(make_node: MakeNode) -> None:
    origin = filled(1)
    begun, go = threading.Event(), threading.Event()

    def interrupt(*_: object) -> None:
        begun.set()
        go.wait(300)
        raise KeyboardInterrupt

    origin.before_read = interrupt
    node = make_node()
    raised: list[type[BaseException]] = []

    def attempt() -> None:
        try:
            read_all(node, origin, "b/set/000.jpg")
        except BaseException as error:  # noqa: BLE001 - the test checks the type
            raised.append(type(error))

    first = threading.Thread(target=attempt)
    first.start()
    assert begun.wait(300)
    second = threading.Thread(target=attempt)
    second.start()
    while not disk_of(node).flights.join(entry_name(origin, "b/set/000.jpg"), (0,))[1]:
        time.sleep(0.001)
    go.set()
    first.join()
    second.join()
    # The second may have started late, and then fetched and was interrupted itself.
    assert KeyboardInterrupt in raised
    assert set(raised) <= {KeyboardInterrupt, OriginUnavailableError}


def entry_name(origin: MemoryOrigin, key: str) -> bytes:
    info = origin.head(key)
    return object_id(origin.identity, info.key, info.version, info.size)


def test_small_objects_without_space_are_held_in_memory(make_node: MakeNode, caplog: pytest.LogCaptureFixture) -> None:
    origin = filled(3)
    node = make_node(capacity=0)
    for _ in range(3):
        assert read_all(node, origin, "b/set/000.jpg") == content(origin, "b/set/000.jpg")
    assert origin.count("read") == 1
    assert node.entries() == []
    assert node.counters()["uncached_bytes"] == 5000
    assert "reads continue uncached" in caplog.text


def test_many_threads_stay_inside_the_capacity(make_node: MakeNode) -> None:
    origin = filled(40, size=100_000)
    node = make_node(capacity=1_000_000)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: read_all(node, origin, f"b/set/{n:03}.jpg"), range(40)))
    assert node.disks()[0][1] <= 1_000_000
    for n in range(40):  # of concurrent ones, some found no space although there was some in the end
        read_all(node, origin, f"b/set/{n:03}.jpg")
    assert 800_000 <= node.disks()[0][1] <= 1_000_000


def test_overwritten_object_is_never_mixed(make_node: MakeNode) -> None:
    origin = filled(1)
    node = make_node()
    old = content(origin, "b/set/000.jpg")
    info = origin.head("b/set/000.jpg")
    begun, unread = node.open_reader(origin, info), node.open_reader(origin, info)
    assert bytes(begun.read(0, 10)) == old[:10]
    origin.put(info.key, b"new")
    node.discard(origin, info)
    assert bytes(begun.read(0, info.size)) == old  # an open reader continues
    with pytest.raises(ObjectChangedError):
        unread.read(0, 1)
    begun.close()
    unread.close()
    assert read_all(node, origin, info.key) == b"new"


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("by", ["reader", "native open"])
def test_damaged_small_object_is_counted_and_fetched_again(
    make_node: MakeNode, native: bool, by: str, events: list[Event]
) -> None:
    origin = filled(5)
    node = make_node(native=native)
    for n in range(5):
        read_all(node, origin, f"b/set/{n:03}.jpg")
    entry = entry_of(node, origin, "b/set/002.jpg")
    flip(data_path(disk_of(node).segments.directory, entry.place), entry.offset + 7)
    if by == "native open":
        assert open_native(node, origin, origin.head("b/set/002.jpg")) is None
    for n in range(5):
        assert read_all(node, origin, f"b/set/{n:03}.jpg") == content(origin, f"b/set/{n:03}.jpg")
    assert origin.count("read") == 6
    assert [event.name for event in events] == ["cache.block.corrupt"]
    assert node.counters()["corrupt_blocks"] == 1
    assert len(node.entries()) == 5


def test_reads_without_native_files_are_always_verified(make_node: MakeNode) -> None:
    origin = filled(1)
    node = make_node(native=False)
    for _ in range(3):
        read_all(node, origin, "b/set/000.jpg")
    entry = entry_of(node, origin, "b/set/000.jpg")
    flip(data_path(disk_of(node).segments.directory, entry.place), entry.offset)
    assert read_all(node, origin, "b/set/000.jpg") == content(origin, "b/set/000.jpg")
    assert node.counters()["corrupt_blocks"] == 1


def test_removed_segment_file_is_fetched_again_and_frees_its_space(make_node: MakeNode, events: list[Event]) -> None:
    origin = filled(5)
    node = make_node()
    for n in range(5):
        read_all(node, origin, f"b/set/{n:03}.jpg")
    for path in disk_of(node).segments.directory.iterdir():
        path.unlink()
    for n in range(5):
        assert read_all(node, origin, f"b/set/{n:03}.jpg") == content(origin, f"b/set/{n:03}.jpg")
    assert [event.name for event in events] == ["cache.file.lost"]  # once for all objects in it
    assert len(node.entries()) == 5
    assert node.disks()[0][1] == os.stat(next(disk_of(node).segments.directory.glob("*.data"))).st_size


def test_object_evicted_during_open_is_not_reported_as_lost(make_node: MakeNode, events: list[Event]) -> None:
    origin = filled(1)
    node = make_node()
    read_all(node, origin, "b/set/000.jpg")
    entry, disk = entry_of(node, origin, "b/set/000.jpg"), disk_of(node)
    disk.store.index.remove_segment(entry.place)
    for path in disk.segments.directory.iterdir():
        path.unlink()
    assert stored_object(disk, entry) is None
    assert events == []
    assert read_all(node, origin, "b/set/000.jpg") == content(origin, "b/set/000.jpg")


def test_segment_without_a_record_takes_no_more_objects(make_node: MakeNode) -> None:
    origin = filled(3)
    node = make_node()
    read_all(node, origin, "b/set/000.jpg")
    segment = entry_of(node, origin, "b/set/000.jpg").place
    disk_of(node).store.index.remove_segment(segment)
    read_all(node, origin, "b/set/001.jpg")
    assert entry_of(node, origin, "b/set/001.jpg").place != segment
    assert len(node.entries()) == 1


def test_listed_directory_is_the_group(make_node: MakeNode) -> None:
    origin = MemoryOrigin()
    for key in ("b/a/b/c/d/1", "b/a/b/c/e/2", "b/a/b/f/3"):
        origin.put(key, b"x" * 1000)
    node = make_node(consistency="immutable")
    list(node.metadata.list_all(origin, "b/a/b/c"))
    for key in ("b/a/b/c/d/1", "b/a/b/c/e/2", "b/a/b/f/3"):
        read_all(node, origin, key)
    directory = disk_of(node).segments.directory
    assert [group_in(directory, generation) for generation in generations(directory)] == [
        "memory b/a/b/c",
        "memory b/a/b",
    ]


def test_small_reader_in_forked_child_reads(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "millrace.store.segments._IDLE_SECONDS", math.inf
    )  # another process may append to an idle segment
    origin = filled(3)
    node = make_node()
    reader = node.open_reader(origin, origin.head("b/set/000.jpg"))
    read_all(node, origin, "b/set/001.jpg")
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        right = bytes(reader.read(0, 1 << 20)) == content(origin, "b/set/000.jpg")
        right = right and read_all(cache_node(node.options), origin, "b/set/001.jpg") == content(
            origin, "b/set/001.jpg"
        )
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bytes(reader.read(0, 1 << 20)) == content(origin, "b/set/000.jpg")
    assert origin.count("read") == 1  # of this process: the child has fetched the other one
    reader.close()
    read_all(node, origin, "b/set/002.jpg")
    places = {entry_of(node, origin, f"b/set/{n:03}.jpg").place for n in range(3)}
    assert len(places) == 2  # parent and child never append to the same segment


def test_small_objects_survive_the_loss_of_the_index(make_node: MakeNode) -> None:
    origin = filled(30)
    for n in range(30):
        read_all(make_node(), origin, f"b/set/{n:03}.jpg")
    directory = disk_of(make_node()).store.directory
    used = make_node().disks()[0][1]
    entry = entry_of(make_node(), origin, "b/set/007.jpg")
    close_nodes()
    (directory / "index" / "index.mdb").unlink()
    flip(str(directory / "segments" / f"{entry.place}.data"), entry.offset + 1)
    (directory / "segments" / "12345.data").write_bytes(b"no records")
    (directory / "segments" / "stray").mkdir()
    node = make_node()
    assert len(node.entries()) == 30
    assert node.disks()[0][1] == used
    for n in range(30):
        assert read_all(node, origin, f"b/set/{n:03}.jpg") == content(origin, f"b/set/{n:03}.jpg")
    assert origin.count("read") == 31
    assert sorted(path.name for path in (directory / "segments").iterdir()) == [
        f"{entry.place}.data",
        f"{entry.place}.idx",
    ]


def test_rebuild_uses_the_newest_record_of_an_object(make_node: MakeNode) -> None:
    origin = filled(2)
    for attempt in range(3):
        for n in range(2):
            read_all(make_node(), origin, f"b/set/{n:03}.jpg")
        if attempt == 0:  # appended twice to the same segment
            disk = disk_of(make_node())
            disk.store.index.remove(entry_name(origin, "b/set/000.jpg"))
        if attempt == 1:  # and to another one
            disk.store.index.remove(entry_name(origin, "b/set/000.jpg"))
            disk.segments.drop(entry_of(make_node(), origin, "b/set/001.jpg").place)
    newest = entry_of(make_node(), origin, "b/set/000.jpg")
    index = disk_of(make_node()).store.index
    before = {record.generation: record for record in index.segment_records()}
    directory = disk_of(make_node()).store.directory
    close_nodes()
    (directory / "index" / "index.mdb").unlink()
    node = make_node()
    now = entry_of(node, origin, "b/set/000.jpg")
    assert (now.place, now.offset, now.checksum) == (newest.place, newest.offset, newest.checksum)
    after = {record.generation: record for record in disk_of(node).store.index.segment_records()}
    assert {g: r.live_bytes for g, r in after.items()} == {g: r.live_bytes for g, r in before.items()}
    assert {r.group for r in after.values()} == {"memory b/set"}


@pytest.mark.slow
def test_small_reads_leak_no_descriptors_or_maps(make_node: MakeNode) -> None:
    """200 MB of objects of 26 KB, read three times."""
    data = os.urandom(26_000)
    origin = MemoryOrigin()
    node = make_node()
    infos = [ObjectInfo(f"b/set/{n}", len(data), "v1", 0.0) for n in range(8000)]
    origin._objects = {info.key: (data, 1, 0.0) for info in infos}
    for info in infos[:10]:
        node.open_reader(origin, info).read(0, 1)
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        for info in infos:
            found = open_native(node, origin, info)
            if found is None:
                reader = node.open_reader(origin, info)
                assert len(memoryview(reader.read(0, info.size))) == info.size
                reader.close()
            else:
                assert found.size() == info.size
    assert origin.count("read") == 8000
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
    assert _maps_of(".data") <= 4  # 208 MB in segments of 64 MiB
    assert isinstance(found, pa.BufferReader)


def _maps_of(ending: str) -> int:
    return sum(line.rstrip().endswith(ending) for line in Path("/proc/self/maps").read_text().splitlines())
