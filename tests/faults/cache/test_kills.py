"""Processes that are killed -9 while they read through a store: no returned bytes are lost, no file is damaged,
and waiters of a killed process continue at once.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.computed import ComputedOrigin

import millrace
from millrace.cache.disk import Disk
from millrace.cache.node import CacheNode, cache_node
from millrace.cache.reading.locations import stored_object
from millrace.config import resolve
from millrace.runtime.locks import LockWait, NamedLocks
from millrace.store.records import BLOCK_BYTES, PAGE_BYTES, Entry, blocks_of, page_span, span_of
from millrace.store.signals import CHECKED_AT, Signals
from millrace.store.transactions import SIGNALS_NAME

_LARGE, _SMALL = 5, 40
_KILLS, _KILLS_A_ROUND = 50, 5

Page = tuple[str, int]
"""The name of an object and the number of a page in it."""


@pytest.fixture
def contents(tmp_path: Path) -> dict[str, bytes]:
    """The objects by name; they are in the folder `data`."""
    sizes = {f"large{number}": 2 * BLOCK_BYTES + 1000 * (number + 1) for number in range(_LARGE)}
    sizes |= {f"small{number}": 5_000 + 700 * number for number in range(_SMALL)}
    contents = {name: random.Random(name).randbytes(size) for name, size in sizes.items()}
    (tmp_path / "data").mkdir()
    for name, content in contents.items():
        (tmp_path / "data" / name).write_bytes(content)
    return contents


_READERS = """
import os, random, sys, millrace
cache, data, seed = sys.argv[1:]
fs = millrace.filesystem("file", cache_dir=cache, min_free=0, capacity="1GB", consistency="immutable")
sizes = {name: os.path.getsize(f"{data}/{name}") for name in sorted(os.listdir(data))}
life = 0
while os.read(0, 1):
    life += 1
    child = os.fork()
    if child == 0:
        os.write(1, b"pid %d 0\\n" % os.getpid())
        chooser = random.Random(f"{seed} {life}")
        while True:
            name = chooser.choice(list(sizes))
            start = chooser.randrange(sizes[name])
            stop = min(sizes[name], start + chooser.randrange(1, 3_000_000))
            fs.cat_file(f"{data}/{name}", start=start, end=stop)
            os.write(1, b"%s %d %d\\n" % (name.encode(), start, stop))
    os.waitpid(child, 0)
    os.write(1, b"dead 0 0\\n")
"""


class Reader:
    """A process with children, one at a time, which read at random and print the result of each read."""

    def __init__(self, cache: Path, data: Path, seed: int) -> None:
        command = [sys.executable, "-c", _READERS, str(cache), str(data), str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._child = 0

    def begin(self) -> None:
        """Let it have a child."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        what, pid, _ = self._line()
        assert what == "pid"
        self._child = pid

    def kill(self, reads: int, seconds: float) -> set[Page]:
        """Kill the child so long after so many reads; returns the pages of all that its reads have returned."""
        returned = [self._line() for _ in range(reads)]
        time.sleep(seconds)  # any moment will do
        self._kill_child()
        while (line := self._line())[0] != "dead":
            returned.append(line)
        return {(name, page) for name, start, stop in returned for page in blocks_of(start, stop, PAGE_BYTES)}

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._kill_child()
        self._process.stdin.close()
        self._process.wait(timeout=300)
        self._process.stdout.close()

    def _kill_child(self) -> None:
        child, self._child = self._child, 0
        if child:
            os.kill(child, 9)

    def _line(self) -> tuple[str, int, int]:
        assert self._process.stdout is not None
        word, first, second = self._process.stdout.readline().split()
        return word.decode(), int(first), int(second)


def node_of(cache: Path) -> CacheNode:
    return cache_node(resolve({"cache_dir": str(cache), "min_free": 0, "capacity": "1GB"}, environ={}, file={}))


def pages_here(disk: Disk, contents: dict[str, bytes]) -> set[Page]:
    """Every page that the index has, each compared with what it must be."""
    here = set()
    for entry in disk.store.index.entries():
        name = Path(entry.name.key).name
        if entry.place:
            found = stored_object(disk, entry, verify=True)
            assert found is not None
            assert bytes(found[0]) == contents[name]
            here |= {(name, page) for page in blocks_of(0, entry.size, PAGE_BYTES)}
        else:
            here |= {(name, page) for page in _pages_of_file(disk, entry, contents[name])}
    return here


def _pages_of_file(disk: Disk, entry: Entry, content: bytes) -> Iterator[int]:
    cached = entry.size - sum(stop - start for start, stop in disk.store.gaps(entry, 0, entry.size))
    assert entry.cached_bytes == cached or disk.store.index.get(entry.object_id) != entry  # others write
    descriptor = disk.store.open_data(entry)
    try:
        blocks = range(-(-entry.size // entry.block_bytes))
        for block, state in zip(blocks, disk.store.index.block_states(entry, blocks), strict=True):
            start, stop = span_of(block, block + 1, entry.size, entry.block_bytes)
            if isinstance(state, int):
                assert disk.store.read_block(entry, descriptor, block) == content[start:stop]
                yield from blocks_of(start, stop, PAGE_BYTES)
            for start, stop in [page_span(entry, block, page) for page in state] if isinstance(state, dict) else ():
                found = disk.store.read_pages(entry, descriptor, start, stop)
                # None: completed since, by another process
                assert found == content[start:stop] or disk.store.index.checksums(entry, [block]) != [None]
                yield start // PAGE_BYTES
    finally:
        os.close(descriptor)


def test_cached_blocks_survive_50_kills(contents: dict[str, bytes], tmp_path: Path) -> None:
    """Two children at a time fill one store; at 50 random moments one of them is killed. After each of these every page of
    every read that had returned since the store was last emptied is there, and whatever is there is right.
    """
    cache, chooser = tmp_path / "cache", random.Random(5)
    node = node_of(cache)
    [disk] = node.open_disks
    readers = [Reader(cache, tmp_path / "data", seed) for seed in range(2)]
    seen = 0
    try:
        for _ in range(_KILLS // _KILLS_A_ROUND):
            for reader in readers:
                reader.begin()
            returned: set[Page] = set()
            for number in range(_KILLS_A_ROUND):
                reader = readers[number % 2]
                returned |= reader.kill(chooser.randrange(6), chooser.uniform(0, 0.02))
                assert returned <= pages_here(disk, contents)
                if number < _KILLS_A_ROUND - 2:
                    reader.begin()
            seen += len(returned)
            # Else nine deaths in a transaction, each less than a minute after the one before, discard the index.
            Signals(disk.store.directory / "index" / SIGNALS_NAME).numbers[CHECKED_AT] = 0
            for entry in list(disk.store.index.entries()):  # no process is alive: all start again
                disk.remove(entry.object_id)
    finally:
        for reader in readers:
            reader.end()
    assert seen > _KILLS
    fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0, capacity="1GB", consistency="immutable")
    assert all(fs.cat_file(f"{tmp_path}/data/{name}") == content for name, content in contents.items())
    assert fs.cache_counters()["corrupt_blocks"] == 0


# --- who waits for the dead -----------------------------------------------------------------------------

_HOLDER = """
import os, sys, time
from millrace.cache.node import cache_node
from millrace.config import resolve
from tests.support.computed import ComputedOrigin

class Silent(ComputedOrigin):
    def read(self, *arguments, **options):
        os.write(1, b"holds\\n")
        time.sleep(600)

size = int(sys.argv[2])
node = cache_node(resolve({"cache_dir": sys.argv[1], "min_free": 0, "capacity": "1GB"}, environ={}, file={}))
if size:
    origin = Silent({"b/x": size})
    node.open_reader(origin, origin.head("b/x")).read(0, size)
else:
    with node.open_disks[0].locks.processes(b"a listing"):
        os.write(1, b"holds\\n")
        time.sleep(600)
"""


def _read(node: CacheNode, size: int) -> None:
    origin = ComputedOrigin({"b/x": size})
    reader = node.open_reader(origin, origin.head("b/x"))
    try:
        assert bytes(reader.read(0, size)) == bytes(origin.expected("b/x", 0, size))
    finally:
        reader.close()


def _take_turn(node: CacheNode, size: int) -> None:
    with node.open_disks[0].locks.processes(b"a listing"):
        pass


@pytest.mark.parametrize(
    ("size", "work"),
    [(3 * BLOCK_BYTES, _read), (30_000, _read), (0, _take_turn)],
    ids=["blocks", "a small object", "a turn"],
)
def test_waiter_of_killed_process_continues_when_its_lock_is_free(
    tmp_path: Path, size: int, work: Callable[[CacheNode, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any deadline: the kernel frees the lock, and the waiter acquires it."""
    cache = tmp_path / "cache"
    node = node_of(cache)
    refused, ended = threading.Event(), threading.Event()
    try_acquire = NamedLocks.try_acquire

    def note(self: NamedLocks, number: int) -> bool:
        taken = try_acquire(self, number)
        if not taken:
            refused.set()
        return taken

    def wait() -> None:
        work(node, size)
        ended.set()

    monkeypatch.setattr(LockWait, "is_over", lambda *_: False)
    waiting = threading.Thread(target=wait)
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(cache), str(size)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        monkeypatch.setattr(NamedLocks, "try_acquire", note)
        waiting.start()
        assert refused.wait(300)
        time.sleep(0.2)  # it looks as rarely as it ever will
        assert not ended.is_set()
    finally:
        holder.kill()
        holder.communicate()
    assert ended.wait(300)
    waiting.join()
