import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.cache import disk as disk_module
from millrace.cache.disk import HELD_BYTES, Disk, HeldBlocks
from millrace.config import resolve

NAME = bytes(16)


def test_held_blocks_drop_the_least_recently_used_first() -> None:
    held = HeldBlocks(capacity_bytes=30)
    for block in range(3):
        held.put((NAME, block), bytes([block]) * 10)
    assert held.get(NAME, [0]) == {0: bytes(10)}
    held.put((NAME, 3), b"x" * 10)
    assert sorted(held.get(NAME, range(4))) == [0, 2, 3]
    held.put((NAME, 3), b"y" * 20)  # replaces, and counts its new size
    assert held.get(NAME, [3]) == {3: b"y" * 20}
    assert len(held.get(NAME, range(4))) == 2


def test_block_larger_than_the_memory_is_not_held() -> None:
    held = HeldBlocks(capacity_bytes=5)
    held.put((NAME, 0), b"123456")
    assert held.get(NAME, [0]) == {}


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Disk]]:
    opened = []
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        opened.append(Disk(directory, resolve({"cache_dir": str(directory), "min_free": 0})))
    yield opened
    for disk in opened:
        disk.close()


_BLOCK = HELD_BYTES // 8


def held_by(disk: Disk) -> list[int]:
    return sorted(disk.held.get(NAME, range(16)))


def test_two_disks_share_the_limit_of_held_blocks(disks: list[Disk]) -> None:
    for block in range(8):
        for disk in disks:
            disk.held.put((NAME, block), bytes(_BLOCK))
    assert [held_by(disk) for disk in disks] == [[4, 5, 6, 7]] * 2


def test_held_blocks_of_disk_are_separate_and_dropped_at_close(disks: list[Disk]) -> None:
    one, other = disks
    one.held.put((NAME, 0), b"one")
    assert held_by(other) == []
    other.held.put((NAME, 0), b"other")
    other.held.drop(NAME, [0])
    assert one.held.get(NAME, [0]) == {0: b"one"}
    for block in range(1, 8):  # with the blocks of the closed disk this would exceed the limit
        other.held.put((NAME, block), bytes(_BLOCK))
    other.held.clear()
    for block in range(8, 15):
        one.held.put((NAME, block), bytes(_BLOCK))
    assert held_by(one) == [0, *range(8, 15)]


def test_closing_a_disk_frees_its_share(disks: list[Disk], tmp_path: Path) -> None:
    directory = tmp_path / "short"
    directory.mkdir()
    short = Disk(directory, resolve({"cache_dir": str(directory), "min_free": 0}))
    disks[0].held.put((NAME, 0), b"stays")
    for block in range(7):
        short.held.put((NAME, block), bytes(_BLOCK))
    short.close()
    for block in range(1, 8):
        disks[0].held.put((NAME, block), bytes(_BLOCK))
    assert held_by(disks[0]) == list(range(8))


def test_held_blocks_in_forked_child_are_empty_and_unlocked() -> None:
    parent = HeldBlocks()
    parent.put((NAME, 0), b"of the parent")
    with disk_module._held_memory.lock:  # as another thread of the parent may have it
        child = os.fork()
        if child == 0:
            right = False
            try:
                signal.alarm(300)
                own = HeldBlocks()
                own.put((NAME, 1), b"x")
                right = own.get(NAME, [0, 1]) == {1: b"x"} and disk_module._held_memory.used == 1
            finally:
                os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    parent.clear()
