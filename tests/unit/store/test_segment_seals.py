"""Seals of segments: the objects that another process need not verify."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from tests.support.harms import flip
from tests.support.origins import MemoryOrigin

from millrace.cache.disk import Disk
from millrace.cache.node import CacheNode, cache_node, close_nodes
from millrace.cache.reading.locations import open_entry, stored_object
from millrace.config import resolve
from millrace.events import Event
from millrace.runtime.failures import LostDataError
from millrace.runtime.locks import NamedLocks, lock_number
from millrace.store import segment_maps as segment_maps_module
from millrace.store import segments as segments_module
from millrace.store.maps import is_resident
from millrace.store.records import Entry, ObjectName, object_id, segment_unit
from millrace.store.seals import SegmentSeal, SegmentSealer
from millrace.store.segment_files import data_path

pytestmark = pytest.mark.usefixtures("no_maintenance")


class Node:
    """A cache with small objects in one segment, as several processes see it one after the other."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self.origin = MemoryOrigin()
        self.new_process()

    def new_process(self, **options: object) -> None:
        """Start again like a new process."""
        close_nodes()
        given = {"cache_dir": str(self._cache_dir), "min_free": 0, **options}
        self.node: CacheNode = cache_node(resolve(given, environ={}, file={}))

    @property
    def disk(self) -> Disk:
        return self.node.open_disks[0]

    @property
    def segment(self) -> int:
        return self.disk.store.index.segment_records()[0].generation

    @property
    def path(self) -> str:
        return data_path(self.disk.segments.directory, self.segment)

    def add(self, *datas: bytes) -> list[str]:
        """Put objects to the origin and read each, so that it is cached; returns their keys."""
        keys = [f"b/set/{len(self.origin._objects) + number:04}" for number in range(len(datas))]
        for key, data in zip(keys, datas, strict=True):
            self.origin.put(key, data)
            self.read(key)
        return keys

    def read(self, key: str) -> bytes:
        info = self.origin.head(key)
        reader = self.node.open_reader(self.origin, info)
        try:
            return bytes(reader.read(0, info.size))
        finally:
            reader.close()

    def entry(self, key: str) -> Entry:
        info = self.origin.head(key)
        found = self.disk.store.index.get(object_id(self.origin.identity, info.key, info.version, info.size))
        assert found is not None
        return found

    def seal(self) -> bool:
        return self.disk.segment_sealer.seal(self.segment)

    def is_slice(self, key: str) -> bool:
        """Whether the next read of an object by this process does not verify its bytes; they must be right."""
        found = stored_object(self.disk, self.entry(key))
        assert found is not None
        assert bytes(pa.py_buffer(found[0])) == self.origin._objects[key][0]
        return found[1] is not None

    def settle(self) -> None:
        """Wait for the seals that are made in the background."""
        self.disk.segment_sealer._pool.submit(lambda: None).result()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "cache")


def datas(number: int = 20, size: int = 5000) -> list[bytes]:
    return [os.urandom(size + n) for n in range(number)]


# --- objects that need no verification ----------------------------------------------------------------


def test_sealed_segment_in_new_process_is_not_verified(node: Node) -> None:
    keys = node.add(*datas(), b"tiny", b"x" * 511)
    node.new_process()
    assert not any(node.is_slice(key) for key in keys)
    assert node.seal()
    node.new_process()
    assert all(node.is_slice(key) for key in keys)
    assert not node.disk.segment_maps._verified
    entry = node.entry(keys[3])
    found = open_entry(node.disk, entry, None)
    assert found is not None
    assert found.slot is node.disk.maps.get(node.segment)
    assert found.buffer.address % 64 == 0


def test_seal_that_holds_is_not_repeated(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.add(*datas())
    assert node.seal()
    pread, segment = os.pread, os.stat(node.path)

    def refused(descriptor: int, size: int, offset: int) -> bytes:
        if os.path.samestat(os.fstat(descriptor), segment):
            pytest.fail("read again")
        return pread(descriptor, size, offset)  # the sign of the lock's holder

    monkeypatch.setattr(os, "pread", refused)
    assert not node.seal()


@pytest.mark.parametrize("kind", ["flip", "replace", "touch"])
def test_objects_of_changed_file_are_verified(node: Node, events: list[Event], kind: str) -> None:
    keys = node.add(*datas())
    assert node.seal()
    place = node.entry(keys[5]).offset
    path = node.path
    match kind:
        case "flip":
            flip(path, place + 7)
        case "replace":
            shutil.copy2(path, f"{path}.new")
            os.replace(f"{path}.new", path)
        case "touch":
            os.utime(path)
    node.new_process()
    for number, key in enumerate(keys):
        if kind == "flip" and number == 5:
            assert stored_object(node.disk, node.entry(key)) is None
        else:
            assert not node.is_slice(key)
    assert node.node.counters()["corrupt_blocks"] == (kind == "flip")
    assert [event.name for event in events if "corrupt" in event.name] == ["cache.block.corrupt"] * (kind == "flip")
    assert node.seal()  # the remaining segments
    node.new_process()
    assert all(node.is_slice(key) for number, key in enumerate(keys) if kind != "flip" or number != 5)
    assert node.read(keys[5]) == node.origin._objects[keys[5]][0]


def test_segment_that_was_cut_is_found_before_its_map(node: Node) -> None:
    keys = node.add(*datas())
    assert node.seal()
    os.truncate(node.path, node.entry(keys[10]).offset)
    node.new_process()
    assert not node.is_slice(keys[0])
    assert stored_object(node.disk, node.entry(keys[15])) is None
    os.truncate(node.path, 0)
    node.new_process()
    with pytest.raises(LostDataError, match="shorter"):
        node.disk.segment_maps.get(node.entry(keys[1]))
    assert node.read(keys[1]) == node.origin._objects[keys[1]][0]


def test_objects_appended_after_the_seal_are_verified(node: Node) -> None:
    keys = node.add(*datas(5))
    assert node.seal()
    later = node.add(*datas(5))
    assert {node.entry(key).place for key in keys + later} == {node.segment}
    node.new_process()
    assert not any(node.is_slice(key) for key in keys + later)
    assert node.seal()
    node.new_process()
    assert all(node.is_slice(key) for key in keys + later)


def test_objects_recorded_after_the_seal_are_not_covered(node: Node) -> None:
    """Its bytes were in the file already, and wrong: the file has not changed since."""
    (key,) = node.add(b"first" * 1000)
    name = ObjectName("memory", "b/late", "v")
    placed = [node.disk.segments.append("memory b/set", bytes([n]) * 16, name, bytes([n]) * 5000) for n in (1, 2)]
    assert {place.segment for place in placed} == {node.segment}
    flip(node.path, placed[0].offset)
    assert node.seal()
    for n, place in enumerate(placed, 1):
        node.disk.store.index.add_small(
            bytes([n]) * 16, 5000, name, segment=place.segment, offset=place.offset, checksum=place.checksum
        )
    node.new_process()
    assert node.is_slice(key)
    wrong, right = (node.disk.store.index.get(bytes([n]) * 16) for n in (1, 2))
    assert wrong is not None
    assert right is not None
    assert node.disk.segment_maps.get(wrong) is None
    found = node.disk.segment_maps.get(right)
    assert found is not None
    assert found[1] is None


def test_map_that_was_closed_is_compared_again(node: Node) -> None:
    keys = node.add(*datas())
    assert node.seal()
    node.new_process()
    assert node.is_slice(keys[0])
    node.disk.maps.clear()
    assert node.is_slice(keys[1])
    node.disk.maps.clear()
    flip(node.path, node.entry(keys[2]).offset)
    assert stored_object(node.disk, node.entry(keys[2])) is None
    assert not node.is_slice(keys[3])


def test_seal_after_reboot_is_ignored(node: Node, tmp_path: Path) -> None:
    keys = node.add(*datas())
    assert node.seal()
    flip(node.path, node.entry(keys[4]).offset)
    close_nodes()
    marker = node.disk.store.directory / "FORMAT"
    lines = marker.read_text().splitlines()
    marker.write_text(f"{lines[0]}\nanother-boot\n")
    node.new_process()
    assert node.disk.segment_sealer.get(node.segment) is None
    assert not any(node.is_slice(key) for key in keys[:4])
    assert stored_object(node.disk, node.entry(keys[4])) is None


def test_reads_without_native_files_are_always_verified(node: Node) -> None:
    keys = node.add(*datas())
    assert node.seal()
    node.new_process(native=False)
    assert node.read(keys[1]) == node.origin._objects[keys[1]][0]
    flip(node.path, node.entry(keys[1]).offset)
    assert node.read(keys[1]) == node.origin._objects[keys[1]][0]
    assert node.node.counters()["corrupt_blocks"] == 1


def test_seal_of_removed_segment_is_ignored(node: Node) -> None:
    keys = node.add(*datas())
    assert node.seal()
    node.new_process()
    assert node.is_slice(keys[0])
    entry = node.entry(keys[1])
    assert node.disk._evict_segment(node.segment)
    with pytest.raises(LostDataError, match="gone"):
        node.disk.segment_maps.get(entry)


# --- resident maps ------------------------------------------------------------------------------------


def test_map_partly_in_memory_is_not_resident(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    with pa.memory_map(str(path)) as mapped:
        buffer = mapped.read_buffer()
    assert is_resident(buffer)
    assert is_resident(buffer.slice(5000, 100_000))
    os.truncate(path, 2 << 20)  # bytes that were never written or read are not in memory
    with pa.memory_map(str(path)) as mapped:
        longer = mapped.read_buffer()  # which Arrow requests from the kernel
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 1 << 20, 1 << 20, os.POSIX_FADV_DONTNEED)
    assert not is_resident(longer)
    assert is_resident(longer.slice(0, 1 << 20))


def test_slices_are_requested_until_segment_is_resident(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = node.add(*datas())
    assert node.seal()
    node.new_process()
    now, asked, looks = [1000.0], [0], [0]
    resident = False

    def look(_: pa.Buffer) -> bool:
        looks[0] += 1
        return resident

    monkeypatch.setattr(segment_maps_module, "_REQUESTS_BEFORE_A_LOOK", 5)
    monkeypatch.setattr(segment_maps_module, "will_need", lambda _: asked.__setitem__(0, asked[0] + 1))
    monkeypatch.setattr(segment_maps_module, "is_resident", look)
    monkeypatch.setattr(segment_maps_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def read_all() -> tuple[int, int]:
        asked[0] = looks[0] = 0
        assert all(node.is_slice(key) for key in keys)
        return asked[0], looks[0]

    assert read_all() == (20, 1)  # not all of it: each is loaded, and the test is not repeated at once
    resident = True
    now[0] += 10.0
    assert read_all() == (1, 1)
    assert read_all() == (0, 0)
    now[0] += 10.0
    assert read_all() == (5, 1)


# --- making them --------------------------------------------------------------------------------------


def test_seal_with_wrong_objects_removes_them(node: Node, events: list[Event]) -> None:
    keys = node.add(*datas())
    flip(node.path, node.entry(keys[7]).offset)
    assert node.seal()
    assert [event.name for event in events if "corrupt" in event.name] == ["cache.block.corrupt"]
    assert node.node.counters()["corrupt_blocks"] == 1
    assert len(node.disk.store.index.entries_in(node.segment)) == 19
    node.new_process()
    assert all(node.is_slice(key) for number, key in enumerate(keys) if number != 7)
    assert node.read(keys[7]) == node.origin._objects[keys[7]][0]


def test_seal_of_file_written_meanwhile_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = node.add(*datas())
    real, path, last = os.pread, node.path, node.entry(keys[-1]).offset

    def pread_and_harm(descriptor: int, nbytes: int, offset: int) -> bytes:
        data = real(descriptor, nbytes, offset)
        if offset == last:
            flip(path, 0)  # of the first object, which was found right a moment ago
        return data

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread_and_harm)
        assert not node.seal()
    node.new_process()
    assert stored_object(node.disk, node.entry(keys[0])) is None


def test_seal_while_another_process_seals_is_refused(node: Node) -> None:
    node.add(*datas())
    other = NamedLocks(node.disk.store.directory / "locks")
    assert other.try_acquire(lock_number(segment_unit(node.segment)))
    assert not node.seal()
    other.close()
    assert node.seal()


def test_seal_of_removed_segment_is_not_recorded_and_old_ones_are_deleted(node: Node) -> None:
    node.add(*datas())
    assert node.seal()
    seals, removed = node.disk.segment_sealer._seals, node.segment
    assert node.disk._evict_segment(removed)
    assert not seals.put(removed, SegmentSeal(1, 2, 3))
    assert seals.get(removed) is not None  # no longer read by any process
    node.new_process()
    node.add(*datas())
    assert node.segment != removed
    assert node.seal()
    seals = node.disk.segment_sealer._seals
    assert seals.get(removed) is None
    assert seals.get(node.segment) is not None


def test_segment_that_is_idle_is_sealed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = node.add(*datas())
    node.disk.tidy()
    node.settle()
    assert node.disk.segment_sealer.get(node.segment) is None  # more may come
    monkeypatch.setattr(segments_module, "_IDLE_SECONDS", -1.0)
    node.disk.tidy()
    node.settle()
    assert node.disk.segment_sealer.get(node.segment) is not None
    node.new_process()
    assert all(node.is_slice(key) for key in keys)


def test_segment_that_is_full_is_sealed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "SEGMENT_BYTES", 20_000)
    node.add(*datas(6))
    node.settle()
    first, second = node.disk.store.index.segment_records()
    assert node.disk.segment_sealer.get(first.generation) is not None
    assert node.disk.segment_sealer.get(second.generation) is None


def test_segment_verified_in_part_is_sealed(node: Node) -> None:
    keys = node.add(*datas(32))
    node.new_process()
    for key in keys[:3]:
        assert not node.is_slice(key)
    node.disk.tidy()
    node.settle()
    assert node.disk.segment_sealer.get(node.segment) is None
    for key in keys[3:5]:
        assert not node.is_slice(key)
    node.disk.tidy()
    node.settle()
    assert node.disk.segment_sealer.get(node.segment) is not None
    node.disk.tidy()  # this process looks for it again, too
    assert all(node.is_slice(key) for key in keys[5:])


def test_seal_tried_recently_is_not_repeated(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.add(*datas())
    now = [100.0]
    tried: list[int] = []
    disk = node.disk
    sealer = SegmentSealer(
        disk.segments.directory,
        disk.store.index,
        disk.locks,
        on_wrong=disk.drop_wrong,
        report=disk.report,
        clock=lambda: now[0],
    )
    monkeypatch.setattr(SegmentSealer, "seal", lambda _, segment: tried.append(segment))
    for now[0] in (100.0, 101.0, 109.0, 110.5, 111.0):
        sealer.start(node.segment)
        sealer.start(7)
    sealer._pool.submit(lambda: None).result()
    sealer.close()
    sealer.start(8)
    assert tried == [node.segment, 7, node.segment, 7]


def test_seal_on_failing_disk_reports_the_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.add(*datas())
    disk = node.disk

    def failing(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing)
        disk.segment_sealer.start(node.segment)
        disk.segment_sealer._pool.submit(lambda: None).result()
    assert disk.failed


def test_close_ends_a_seal_in_progress(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.add(*datas())
    real: Callable[[int, int, int], bytes] = os.pread
    sealer = node.disk.segment_sealer

    def pread_and_close(descriptor: int, nbytes: int, offset: int) -> bytes:
        sealer._closed = True
        return real(descriptor, nbytes, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread_and_close)
        assert not node.seal()
    assert sealer.get(node.segment) is None


@pytest.mark.parametrize("kind", ["flip", "replace", "append"])
def test_objects_of_file_changed_while_unmapped_are_verified_again(node: Node, kind: str) -> None:
    """Without a seal. Maps are given up when there are too many of them."""
    keys = node.add(*datas())
    node.new_process()
    assert [node.is_slice(keys[5]) for _ in range(2)] == [False, True]
    node.disk.maps.clear()
    assert node.is_slice(keys[5])  # nothing has happened to the file
    entry, path = node.entry(keys[5]), node.path
    node.disk.maps.clear()
    match kind:
        case "flip":
            flip(path, entry.offset + 7)
        case "replace":
            noise = os.urandom(os.stat(path).st_size)
            os.unlink(path)
            Path(path).write_bytes(noise)
        case "append":
            node.add(b"more" * 1000)
    if kind == "append":
        assert [node.is_slice(keys[5]) for _ in range(2)] == [False, True]
    else:
        assert stored_object(node.disk, entry) is None
    assert node.read(keys[5]) == node.origin._objects[keys[5]][0]


def test_verified_object_stays_a_slice_while_segment_grows(node: Node) -> None:
    keys = node.add(*datas())
    node.new_process()
    assert not any(node.is_slice(key) for key in keys)
    assert all(node.is_slice(key) for key in keys)
    (more,) = node.add(b"more" * 1000)
    assert all(node.is_slice(key) for key in keys)
    assert [node.is_slice(more) for _ in range(2)] == [False, True]
    assert [node.is_slice(keys[0]) for _ in range(2)] == [False, True]  # the file is another one since
