import os
import threading
from pathlib import Path

import pytest

from millrace.runtime.failures import LostDataError
from millrace.store.maps import MapCache, Sweeper


def make_file(directory: Path, number: int, size: int = 4096) -> str:
    path = directory / str(number)
    path.write_bytes(bytes([number % 256]) * size)
    return str(path)


def test_map_opened_twice_is_the_same(tmp_path: Path) -> None:
    maps = MapCache()
    path = make_file(tmp_path, 1)
    slot = maps.open(1, path, 4000)
    assert slot.buffer is not None
    assert slot.buffer.to_pybytes() == b"\x01" * 4000
    assert (slot.inode, slot.ctime_ns) == (os.stat(path).st_ino, os.stat(path).st_ctime_ns)
    os.unlink(path)
    assert maps.open(1, path, 4000) is slot
    assert maps.get(1) is slot
    assert maps.get(2) is None


@pytest.mark.parametrize("size", [4097, 1 << 20])
def test_map_of_missing_or_cut_file_raises_lost_data(tmp_path: Path, size: int) -> None:
    maps = MapCache()
    with pytest.raises(LostDataError, match="gone"):
        maps.open(1, str(tmp_path / "none"), 10)
    with pytest.raises(LostDataError, match="shorter"):
        maps.open(2, make_file(tmp_path, 2), size)
    assert len(maps) == 0


def test_map_used_recently_stays_open(tmp_path: Path) -> None:
    maps = MapCache(max_maps=3)
    slots = [maps.open(number, make_file(tmp_path, number), 10) for number in range(3)]
    slots[0].used = True  # as the hot path does
    held = slots[1].buffer
    maps.open(3, make_file(tmp_path, 3), 10)
    assert [slot.buffer is None for slot in slots] == [False, True, False]
    assert held is not None
    assert held.to_pybytes() == b"\x01" * 10  # an open buffer stays readable
    assert len(maps) == 3
    maps.open(4, make_file(tmp_path, 4), 10)  # its mark of use is cleared: the next one is closed first
    assert [slot.buffer is None for slot in slots] == [False, True, True]


def test_map_cache_with_every_map_in_use_stays_within_its_limit(tmp_path: Path) -> None:
    maps = MapCache(max_maps=2)
    for number in range(10):
        maps.open(number, make_file(tmp_path, number), 10)
        for each in range(number + 1):
            maps.get(each)
    assert len(maps) == 2


def test_sweep_closes_maps_of_unlinked_files(tmp_path: Path) -> None:
    maps = MapCache()
    slots = [maps.open(number, make_file(tmp_path, number), 10) for number in range(3)]
    assert maps.unchecked
    maps.sweep(all_of_them=False)
    assert not maps.unchecked
    os.unlink(tmp_path / "1")
    maps.sweep(all_of_them=False)
    assert slots[1].buffer is not None  # not looked at
    maps.sweep(all_of_them=True)
    assert [slot.buffer is None for slot in slots] == [False, True, False]
    assert len(maps) == 2


def test_map_created_during_removal_is_closed_by_next_sweep(tmp_path: Path) -> None:
    maps = MapCache()
    path = make_file(tmp_path, 1)
    slot = maps.open(1, path, 10)
    os.unlink(path)
    maps.sweep(all_of_them=False)
    assert slot.buffer is None


def test_cleared_and_dropped_maps_are_closed(tmp_path: Path) -> None:
    maps = MapCache()
    slots = [maps.open(number, make_file(tmp_path, number), 10) for number in range(3)]
    maps.drop(0)
    maps.drop(0)
    assert [slot.buffer is None for slot in slots] == [True, False, False]
    maps.clear()
    assert [slot.buffer is None for slot in slots] == [True, True, True]
    assert len(maps) == 0


def test_maps_in_child_are_closed_when_parent_held_the_lock(tmp_path: Path) -> None:
    maps = MapCache()
    slot = maps.open(1, make_file(tmp_path, 1), 10)
    maps._lock.acquire()
    maps.abandon()
    assert slot.buffer is None
    maps.open(2, make_file(tmp_path, 2), 10)


def test_map_opened_by_threads_is_the_same(tmp_path: Path) -> None:
    maps = MapCache(max_maps=8)
    paths = [make_file(tmp_path, number) for number in range(16)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(300):
            number = (seed * 7 + step) % 16
            slot = maps.get(number) or maps.open(number, paths[number], 4096)
            buffer = slot.buffer
            if buffer is not None and buffer[4095] != number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(maps) <= 8


def test_sweep_is_due_after_removals_and_periodically() -> None:
    sweeper = Sweeper()
    assert [sweeper.due(0) for _ in range(5)] == [True, True, True, False, False]
    assert [sweeper.due(7) for _ in range(4)] == [True, True, True, False]
    assert sum(sweeper.due(7) for _ in range(120)) == 2  # now and then in any case
