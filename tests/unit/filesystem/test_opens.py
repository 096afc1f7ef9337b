"""Repeated opens: when their results are valid, and what they keep."""

import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.support.waiting import wait_until

import millrace
from millrace.cache.node import close_nodes
from millrace.filesystem.opens import HotOpen, HotOpens, drop_hot_opens
from millrace.runtime import maintenance

Make = Callable[..., millrace.MillraceFileSystem]
SIZE = 3 << 20


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "x.bin", b"a")


def write(path: Path, letter: bytes, size: int = SIZE) -> str:
    path.write_bytes(letter * size)
    return str(path)


def warm(fs: millrace.MillraceFileSystem, path: str) -> None:
    fs.cat_file(path)
    fs.cat_file(path)
    assert fs._hot.find(path) is not None


def first(fs: millrace.MillraceFileSystem, path: str) -> bytes:
    """The first byte by every way to read, which must all return the same."""
    with fs.open(path) as file:
        seen = {file.read(1), fs.cat_file(path, 0, 1), fs.open_input_file(path).read(1)}
    seen |= {fs.open_input_stream(path).read(1), fs.handler.open_input_file(path).read(1)}
    (only,) = seen
    return only


CHILD = """
import os, sys, pickle, time
fs = pickle.load(open(sys.argv[1], "rb"))
def maps():
    return sum("/objects/" in line and "(deleted)" in line for line in open("/proc/self/maps"))
for line in sys.stdin:
    verb, path, text = line.rstrip("\\n").split(" ", 2)
    if verb == "read":
        try:
            fs.cat_file(path, 0, 1)
            answer = fs.cat_file(path, 0, 1).decode()
        except FileNotFoundError:
            answer = "missing"
    elif verb == "hot":
        answer = str(fs._hot.find(path) is not None)
    elif verb == "write":
        answer = str(fs.pipe_file(path, text.encode() * %d))
    elif verb == "remove":
        answer = str(fs.rm(path))
    elif verb == "evict":
        for disk in fs.node._disks:
            for entry in disk.store.index.entries():
                disk.remove(entry.object_id)
        answer = "evicted"
    elif verb == "let-go":  # idle until the maps of removed files are gone
        deadline = time.monotonic() + 120
        while maps() and time.monotonic() < deadline:
            time.sleep(0.05)
        answer = str(maps())
    elif verb == "maps":
        answer = str(maps())
    print(answer, flush=True)
"""


class Child:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, verb: str, path: str = "-", text: str = "") -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{verb} {path} {text}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@contextmanager
def child(fs: millrace.MillraceFileSystem, tmp_path: Path) -> Iterator[Child]:
    (tmp_path / "fs.pickle").write_bytes(pickle.dumps(fs))
    command = [sys.executable, "-c", CHILD % SIZE, str(tmp_path / "fs.pickle")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Child(process)  # which ends when its input does


def test_second_open_sends_no_request(make: Make, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = make()
    warm(fs, path)
    monkeypatch.setattr(type(fs), "_look_up", lambda *_: pytest.fail("asked"))
    assert first(fs, path) == b"a"
    assert isinstance(fs.open_input_stream(path), pa.BufferReader)


@pytest.mark.parametrize("scheme", ["file://", "millrace://", ""])
def test_hot_open_accepts_every_spelling_of_a_path(
    make: Make, path: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = make()
    named = scheme + path
    fs.cat_file(path)
    for read in (lambda: fs.open(named).read(1), lambda: fs.cat_file(named, 0, 1), lambda: fs.open(named, "r").read(1)):
        read()
        with monkeypatch.context() as patch:
            patch.setattr(type(fs), "_look_up", lambda *_: pytest.fail("asked"))
            assert read() in (b"a", "a")


def test_write_or_removal_by_another_process_is_visible_at_next_open(make: Make, path: str, tmp_path: Path) -> None:
    fs = make(consistency="immutable")
    with child(fs, tmp_path) as other:
        for letter in "bcd":
            warm(fs, path)
            assert other("read", path) == first(fs, path).decode()
            assert other("hot", path) == "True"
            other("write", path, letter)
            assert first(fs, path) == letter.encode()
        warm(fs, path)
        fs.pipe_file(path, b"e" * SIZE)  # and the reverse
        assert other("read", path) == "e"
        other("remove", path)
        with pytest.raises(FileNotFoundError):
            fs.open_input_file(path)
        assert other("read", path) == "missing"


def test_object_evicted_by_another_process_is_not_kept_on_disk(make: Make, path: str, tmp_path: Path) -> None:
    fs = make()
    with child(fs, tmp_path) as other:
        assert other("read", path) == "a"
        assert other("hot", path) == "True"
        warm(fs, path)
        fs.node._disks[0].remove(next(fs.node._disks[0].store.index.entries()).object_id)
        assert other("maps") in ("0", "1")
        assert other("let-go") == "0"  # without any request
        assert other("hot", path) == "False"
        assert other("read", path) == "a"


def test_evicted_file_is_dropped_from_hot_opens(make: Make, path: str, tmp_path: Path) -> None:
    fs = make()
    warm(fs, path)
    kept = fs.open_input_file(path)
    with child(fs, tmp_path) as other:
        other("evict")
    assert fs._hot.find(path) is None
    for _ in range(3):
        maintenance.run_tasks()
    assert len(fs.node._disks[0].maps) == 0
    assert kept.read() == b"a" * SIZE  # an open reader continues
    assert first(fs, path) == b"a"


def test_removal_of_other_object_costs_an_open_one_lookup(make: Make, path: str, tmp_path: Path) -> None:
    fs = make()
    other = write(tmp_path / "y.bin", b"y")
    warm(fs, path)
    warm(fs, other)
    info = fs.describe(other)
    fs.node.discard(fs._origin, info)
    assert fs._hot.find(other) is None
    assert fs._hot.find(path) is not None
    assert first(fs, path) == b"a"


def test_refilled_object_opens_its_new_file(make: Make, path: str) -> None:
    fs = make()
    warm(fs, path)
    fs.node.discard(fs._origin, fs.describe(path))
    fs.cat_file(path)  # a new file, of another generation
    assert fs._hot.find(path) is None
    assert fs.node.find_native(fs._origin, fs.describe(path)) is not None


def test_hot_open_of_expired_metadata_requests_the_origin(
    make: Make, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = make(consistency="60s")
    now = SimpleNamespace(value=time.time())
    monkeypatch.setattr(fs._hot, "clock", lambda: now.value)
    monkeypatch.setattr(fs.node.metadata, "_clock", lambda: now.value)
    warm(fs, path)
    write(Path(path), b"b")  # without the cache
    now.value += 59
    assert first(fs, path) == b"a"
    now.value += 2
    assert fs._hot.find(path) is None
    assert first(fs, path) == b"b"


def test_hot_open_with_always_requests_every_time(make: Make, path: str) -> None:
    fs = make(consistency="always")
    for letter in (b"a", b"b", b"c"):
        write(Path(path), letter)
        os.utime(path, (1, ord(letter)))
        assert first(fs, path) == letter
        assert len(fs._hot) == 0


def test_hot_open_with_immutable_sends_no_request(make: Make, path: str) -> None:
    fs = make(consistency="immutable")
    warm(fs, path)
    write(Path(path), b"b")
    fs._hot.clock = lambda: time.time() + 1e9
    assert first(fs, path) == b"a"


def test_invalidated_metadata_ends_hot_opens(make: Make, path: str) -> None:
    fs = make(consistency="immutable")
    warm(fs, path)
    write(Path(path), b"b")
    fs.invalidate_cache(path)
    assert first(fs, path) == b"b"
    warm(fs, path)
    write(Path(path), b"c")
    fs.invalidate_cache()
    assert first(fs, path) == b"c"


def test_relative_path_follows_the_working_directory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = make()
    for letter in ("a", "b"):
        (tmp_path / letter).mkdir()
        write(tmp_path / letter / "f", letter.encode())
    for _ in range(3):
        for letter in ("a", "b"):
            monkeypatch.chdir(tmp_path / letter)
            assert first(fs, "f") == letter.encode()


def test_opens_without_native_files_are_not_hot(make: Make, path: str) -> None:
    fs = make(native=False)
    for _ in range(3):
        assert first(fs, path) == b"a"
    assert len(fs._hot) == 0


def test_closed_caches_are_opened_again(make: Make, path: str) -> None:
    fs = make()
    warm(fs, path)
    close_nodes()
    assert fs._hot.find(path) is None
    assert first(fs, path) == b"a"


def test_closed_signals_end_hot_opens(make: Make, path: str) -> None:
    fs = make()
    warm(fs, path)
    fs._hot._young[path].metadata = memoryview(b"")
    fs._hot._young[path].metadata.release()  # as if the disk with the metadata failed, and not this one
    assert fs._hot.find(path) is None
    assert first(fs, path) == b"a"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_hot_opens_in_forked_child_start_empty(make: Make, path: str) -> None:
    fs = make(consistency="immutable")
    warm(fs, path)
    before = fs.cache_counters()["native_opens"]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            cold = fs._hot.find(path) is None
            warm(fs, path)
            fs.pipe_file(path, b"b" * SIZE)
            code = 0 if cold and first(fs, path) == b"b" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert first(fs, path) == b"b"
    assert fs.cache_counters()["native_opens"] > before


def test_pickle_contains_no_hot_opens(make: Make, path: str) -> None:
    fs = make()
    warm(fs, path)
    other = pickle.loads(pickle.dumps(fs))
    assert len(pickle.dumps(fs)) < 2000
    assert first(other, path) == b"a"


def test_hot_opens_of_many_threads_during_eviction_return_right_bytes(make: Make, tmp_path: Path) -> None:
    fs = make(consistency="immutable")
    paths = [write(tmp_path / f"{letter}.bin", letter.encode(), 2 << 20) for letter in "abcdef"]
    wrong: list[Any] = []
    stop = threading.Event()

    def read(seed: int) -> None:
        try:
            for step in range(60):
                path = paths[(seed + step) % len(paths)]
                letter = os.path.basename(path)[:1].encode()
                if fs.open_input_file(path).read(100) != letter * 100 or fs.cat_file(path, -3) != letter * 3:
                    wrong.append(path)
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            wrong.append(error)

    def evict() -> None:
        while not stop.is_set():
            for entry in fs.node.entries():
                fs.node._disks[0].remove(entry.object_id)
            stop.wait(0.05)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(128)]
    evictor = threading.Thread(target=evict)
    for thread in (*threads, evictor):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    evictor.join()
    assert not wrong


def test_hot_opens_are_bounded(make: Make, tmp_path: Path) -> None:
    fs = make(consistency="immutable")
    fs._hot._limit = 3
    paths = [write(tmp_path / f"{number}", b"%d" % number, 2 << 20) for number in range(8)]
    for path in paths:
        warm(fs, path)
    assert len(fs._hot) <= 6
    assert fs._hot.find(paths[0]) is None
    assert fs._hot.find(paths[-3]) is not None
    assert [first(fs, path) for path in paths] == [b"%d" % number for number in range(8)]


def test_hot_opens_leak_no_descriptors_maps_or_memory(make: Make, path: str) -> None:
    fs = make(consistency="immutable")
    warm(fs, path)

    def held() -> tuple[int, int]:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return len(os.listdir("/proc/self/fd")), sum("/objects/" in line for line in maps)

    gc.collect()  # what earlier tests left
    before = held()
    opens = 25_000
    for _ in range(opens):
        fs.open_input_stream(path).read(1)
        fs.open_input_file(path).read_at(1, 5)
        fs.open(path).close()
        fs.cat_file(path, 5, 6)
    # Leftovers of earlier tests may end meanwhile, and maintenance has a folder open for a moment.
    wait_until(lambda: held()[0] <= before[0])
    assert held()[1] == before[1]
    assert before[1] == 1
    assert fs.cache_counters()["native_opens"] >= 4 * opens


def test_small_objects_are_slices_of_one_map(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, now = make(consistency="immutable"), time.time()
    fs._hot.clock = lambda: now
    paths = [write(tmp_path / f"{number}", b"%d" % (number % 10), 26_000) for number in range(50)]
    for _ in range(3):  # fetched, verified, then a slice
        for path in paths:
            fs.cat_file(path)
    assert all(fs._hot.find(path) is not None for path in paths)
    assert len(fs.node._disks[0].maps) == 1
    assert [first(fs, path) for path in paths] == [b"%d" % (number % 10) for number in range(50)]
    asked: list[int] = []
    monkeypatch.setattr(sys.modules[type(fs._hot).__module__], "will_need", lambda buffer: asked.append(buffer.size))
    fs.open_input_stream(paths[0])
    assert asked == []
    fs._hot.clock = lambda: now + 11  # long enough for its pages to be dropped
    fs.open_input_stream(paths[0])
    fs.open_input_stream(paths[0])
    assert asked == [26_000]
    fs.pipe_file(paths[1], b"x" * 10_000)
    assert first(fs, paths[1]) == b"x"
    assert first(fs, paths[2]) == b"2"


def test_native_opens_of_another_process_are_counted_soon(make: Make, path: str, tmp_path: Path) -> None:
    fs = make()
    with child(fs, tmp_path) as other:
        for _ in range(5):
            assert other("read", path) == "a"
        deadline = time.monotonic() + 120
        while fs.cache_counters()["native_opens"] < 9 and time.monotonic() < deadline:
            time.sleep(0.05)  # its maintenance adds up twice a second
        assert fs.cache_counters()["native_opens"] == 9  # of ten: the first filled it


def test_hot_open_counts_all_bytes_of_the_file(make: Make, path: str) -> None:
    fs = make()
    warm(fs, path)
    before = fs.cache_counters()
    for _ in range(10):
        fs.open_input_file(path)
    after = fs.cache_counters()
    assert after["native_opens"] - before["native_opens"] == 10
    assert after["cache_bytes"] - before["cache_bytes"] == 10 * SIZE


def test_mapped_file_behaves_like_a_file(make: Make, tmp_path: Path) -> None:
    content = b"".join(b"line %d\n" % number for number in range(300_000))
    (tmp_path / "lines.txt").write_bytes(content)
    path = str(tmp_path / "lines.txt")
    fs = make()
    warm(fs, path)
    with fs.open(path) as file:
        assert (file.name, file.mode, file.size) == (path, "rb", len(content))
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        assert file.readline() == b"line 0\n"
        assert next(file) == b"line 1\n"
        assert file.tell() == 14
        assert file.read_buffer(6).to_pybytes() == b"line 2"
        assert file.tell() == 20
        assert file.seek(-3, 2) == len(content) - 3
        assert file.read() == content[-3:]
        assert file.read() == b""
        assert file.read_buffer().to_pybytes() == b""
        file.seek(5 << 20)
        assert file.read(1) == b""
        assert file.read_buffer(3).to_pybytes() == b""
        file.seek(1000)
        target = bytearray(1 << 20)
        assert file.readinto(target) == 1 << 20
        assert bytes(target) == content[1000 : 1000 + (1 << 20)]
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        file.read()
    with fs.open(path, "r") as text:
        assert sum(1 for _ in text) == 300_000
    with pytest.raises(FileNotFoundError):
        fs.open(f"{tmp_path}/nothing")


def test_hot_opens_are_dropped_while_another_thread_creates_file_systems() -> None:
    kept, ended = HotOpens(), threading.Event()
    kept._young = {"a": cast(HotOpen, None)}

    def create() -> None:
        while not ended.is_set():
            some = [HotOpens() for _ in range(50)]
            del some

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=create)
    thread.start()
    try:
        for _ in range(300):
            drop_hot_opens()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert len(kept) == 0
