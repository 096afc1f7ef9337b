"""Seals of segments: what another process may believe because of one, and what it may not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from millrace.cache import segment_maps as segment_maps_module
from millrace.cache import segments as segments_module
from millrace.cache.blocks import object_id
from millrace.cache.disk import Disk
from millrace.cache.failures import LostDataError
from millrace.cache.flight import ProcessLocks
from millrace.cache.maps import is_resident
from millrace.cache.native import open_entry
from millrace.cache.node import CacheNode, cache_node, close_nodes
from millrace.cache.records import Entry, ObjectName, segment_unit
from millrace.cache.segment_files import data_path
from millrace.cache.segment_seals import SegmentSeal, SegmentSealer
from millrace.cache.small import stored_object
from millrace.config import resolve
from millrace.events import Event
from millrace.testing.origins import MemoryOrigin


class Node:
    """A cache with small objects in one segment, as several processes see it one after the other."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self.origin = MemoryOrigin()
        self.new_process()

    def new_process(self, **options: object) -> None:
        """Begin anew as a process that has just started."""
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
        """Put objects to the origin and read each, so that it is cached; gives their keys."""
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
        """Whether the next read of an object by this process is believed without a look at its bytes; they must be right."""
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


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


# --- what is believed ---------------------------------------------------------------------------------


def test_in_a_sealed_segment_a_new_process_verifies_nothing(node: Node) -> None:
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


def test_a_seal_that_holds_is_not_made_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.add(*datas())
    assert node.seal()
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("read again"))
    assert not node.seal()


@pytest.mark.parametrize("kind", ["flip", "replace", "touch"])
def test_after_a_change_of_the_file_every_object_is_verified(node: Node, events: list[Event], kind: str) -> None:
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
    assert node.seal()  # what is left
    node.new_process()
    assert all(node.is_slice(key) for number, key in enumerate(keys) if kind != "flip" or number != 5)
    assert node.read(keys[5]) == node.origin._objects[keys[5]][0]


def test_a_segment_that_was_cut_is_noticed_before_it_is_mapped(node: Node) -> None:
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


def test_what_is_appended_later_is_verified_and_breaks_the_seal(node: Node) -> None:
    keys = node.add(*datas(5))
    assert node.seal()
    later = node.add(*datas(5))
    assert {node.entry(key).place for key in keys + later} == {node.segment}
    node.new_process()
    assert not any(node.is_slice(key) for key in keys + later)
    assert node.seal()
    node.new_process()
    assert all(node.is_slice(key) for key in keys + later)


def test_what_is_entered_after_the_seal_was_not_verified_by_it(node: Node) -> None:
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


def test_a_map_that_was_given_up_is_compared_again(node: Node) -> None:
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


def test_after_another_start_of_the_machine_everything_is_verified(node: Node, tmp_path: Path) -> None:
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


def test_without_native_files_every_read_is_verified(node: Node) -> None:
    keys = node.add(*datas())
    assert node.seal()
    node.new_process(native=False)
    assert node.read(keys[1]) == node.origin._objects[keys[1]][0]
    flip(node.path, node.entry(keys[1]).offset)
    assert node.read(keys[1]) == node.origin._objects[keys[1]][0]
    assert node.node.counters()["corrupt_blocks"] == 1


def test_a_removed_segment_is_not_believed(node: Node) -> None:
    keys = node.add(*datas())
    assert node.seal()
    node.new_process()
    assert node.is_slice(keys[0])
    entry = node.entry(keys[1])
    assert node.disk._evict_segment(node.segment)
    with pytest.raises(LostDataError, match="gone"):
        node.disk.segment_maps.get(entry)


# --- what is in memory --------------------------------------------------------------------------------


def test_a_map_that_is_not_all_in_memory_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    with pa.memory_map(str(path)) as mapped:
        buffer = mapped.read_buffer()
    assert is_resident(buffer)
    assert is_resident(buffer.slice(5000, 100_000))
    os.truncate(path, 2 << 20)  # what was never written nor read is in no memory
    with pa.memory_map(str(path)) as mapped:
        longer = mapped.read_buffer()  # for which Arrow asks the kernel
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 1 << 20, 1 << 20, os.POSIX_FADV_DONTNEED)
    assert not is_resident(longer)
    assert is_resident(longer.slice(0, 1 << 20))


def test_slices_are_asked_for_until_all_of_the_segment_is_seen_to_be_in_memory(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = node.add(*datas())
    assert node.seal()
    node.new_process()
    now, asked, looks = [1000.0], [0], [0]
    resident = False

    def look(_: pa.Buffer) -> bool:
        looks[0] += 1
        return resident

    monkeypatch.setattr(segment_maps_module, "_ASKED_BEFORE_A_LOOK", 5)
    monkeypatch.setattr(segment_maps_module, "will_need", lambda _: asked.__setitem__(0, asked[0] + 1))
    monkeypatch.setattr(segment_maps_module, "is_resident", look)
    monkeypatch.setattr(segment_maps_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def read_all() -> tuple[int, int]:
        asked[0] = looks[0] = 0
        assert all(node.is_slice(key) for key in keys)
        return asked[0], looks[0]

    assert read_all() == (20, 1)  # not all of it is: each is asked for, and nobody looks again at once
    resident = True
    now[0] += 10.0
    assert read_all() == (1, 1)
    assert read_all() == (0, 0)
    now[0] += 10.0
    assert read_all() == (5, 1)


# --- making them --------------------------------------------------------------------------------------


def test_wrong_objects_are_forgotten_and_the_others_sealed(node: Node, events: list[Event]) -> None:
    keys = node.add(*datas())
    flip(node.path, node.entry(keys[7]).offset)
    assert node.seal()
    assert [event.name for event in events if "corrupt" in event.name] == ["cache.block.corrupt"]
    assert node.node.counters()["corrupt_blocks"] == 1
    assert len(node.disk.store.index.entries_in(node.segment)) == 19
    node.new_process()
    assert all(node.is_slice(key) for number, key in enumerate(keys) if number != 7)
    assert node.read(keys[7]) == node.origin._objects[keys[7]][0]


def test_a_file_that_is_written_to_meanwhile_is_not_sealed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_one_process_at_a_time_makes_a_seal(node: Node) -> None:
    node.add(*datas())
    other = ProcessLocks(node.disk.store.directory / "locks")
    assert other.try_acquire((segment_unit(node.segment), 0))
    assert not node.seal()
    other.close()
    assert node.seal()


def test_no_seal_is_recorded_of_a_removed_segment_and_old_ones_go(node: Node) -> None:
    node.add(*datas())
    assert node.seal()
    seals, removed = node.disk.segment_sealer._seals, node.segment
    assert node.disk._evict_segment(removed)
    assert not seals.put(removed, SegmentSeal(1, 2, 3))
    assert seals.get(removed) is not None  # nobody reads it any more
    node.new_process()
    node.add(*datas())
    assert node.segment != removed
    assert node.seal()
    seals = node.disk.segment_sealer._seals
    assert seals.get(removed) is None
    assert seals.get(node.segment) is not None


def test_who_fills_a_segment_seals_it_when_he_rests(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_full_segment_is_sealed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "SEGMENT_BYTES", 20_000)
    node.add(*datas(6))
    node.settle()
    first, second = node.disk.store.index.segment_records()
    assert node.disk.segment_sealer.get(first.generation) is not None
    assert node.disk.segment_sealer.get(second.generation) is None


def test_who_verifies_a_part_of_a_segment_seals_the_rest(node: Node) -> None:
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


def test_a_segment_is_not_tried_again_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_disk_that_fails_in_the_background_is_reported(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.add(*datas())
    disk = node.disk

    def failing(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing)
        disk.segment_sealer.start(node.segment)
        disk.segment_sealer._pool.submit(lambda: None).result()
    assert disk.failed


def test_closing_ends_a_seal_under_way(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_was_verified_is_verified_again_once_its_file_changed_while_it_was_not_mapped(
    node: Node, kind: str
) -> None:
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


def test_what_was_verified_stays_a_slice_of_its_map_while_the_segment_grows(node: Node) -> None:
    keys = node.add(*datas())
    node.new_process()
    assert not any(node.is_slice(key) for key in keys)
    assert all(node.is_slice(key) for key in keys)
    (more,) = node.add(b"more" * 1000)
    assert all(node.is_slice(key) for key in keys)
    assert [node.is_slice(more) for _ in range(2)] == [False, True]
    assert [node.is_slice(keys[0]) for _ in range(2)] == [False, True]  # the file is another one since
