"""Real damage to a cache directory; every read must return the right bytes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from tests.support.fork_server import ForkedProcess, node_server
from tests.support.small_disks import fill_disk, small_disk

import millrace
from millrace.cache.node import close_nodes
from millrace.errors import StorageError
from millrace.runtime.locks import NamedLocks


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "small.bin").write_bytes(random.Random(1).randbytes(100_000))
    (tmp_path / "large.bin").write_bytes(random.Random(2).randbytes(9_000_000))
    return tmp_path


def check(data: Path, cache: Path) -> None:
    fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0)
    for name in ("small.bin", "large.bin"):
        expected = (data / name).read_bytes()
        assert fs.cat_file(f"{data}/{name}") == expected
        with fs.open(f"{data}/{name}") as file:
            assert file.read() == expected
        assert fs.open_input_file(f"{data}/{name}").read() == expected
    assert len(fs.ls(str(data))) >= 2


def test_cache_deleted_under_running_process_fails_no_read(data: Path) -> None:
    cache = data / "cache"
    check(data, cache)
    shutil.rmtree(cache)
    check(data, cache)


@pytest.mark.parametrize("harm", ["noise at the head", "cut to a page", "cut in half", "empty", "deleted"])
def test_index_damaged_between_two_runs_is_rebuilt(data: Path, harm: str) -> None:
    cache = data / "cache"
    check(data, cache)
    close_nodes()
    path = next(cache.glob("millrace/local/index/index.mdb"))
    size = path.stat().st_size
    match harm:
        case "noise at the head":
            with open(path, "r+b") as file:
                file.write(os.urandom(8192))
        case "cut to a page":
            os.truncate(path, 4096)
        case "cut in half":
            os.truncate(path, size // 2 // 4096 * 4096)
        case "empty":
            os.truncate(path, 0)
        case "deleted":
            path.unlink()
    check(data, cache)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["full", "nearly full", "read-only"])
def test_disk_unusable_from_the_start_fails_no_read(data: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {"full": "size=1m", "nearly full": "size=1500k", "read-only": "size=1m,ro"}[kind]
    with small_disk(data / "disk", options) as disk:
        if kind == "full":
            fill_disk(disk)
        check(data, disk / "cache")
        assert "no caching in" in caplog.text


@pytest.mark.root
def test_writes_with_a_full_cache_disk_succeed_and_are_visible(data: Path) -> None:
    path = data / "changing"
    with small_disk(data / "disk", "size=16m") as disk:
        fs = millrace.filesystem(
            "file", cache_dir=str(disk / "cache"), consistency="immutable", members="none", min_free=0
        )
        path.write_bytes(b"old")
        assert fs.cat_file(str(path)) == b"old"
        fill_disk(disk)
        names = [f"{data}/{'n' * 150}{number}" for number in range(500)]  # the index has a record of each write
        for name in [*names, str(path)]:
            fs.pipe_file(name, b"newer")
        assert {fs.cat_file(name) for name in [*names, str(path)]} == {b"newer"}


READER_ON_TWO_DISKS = """
import sys
import millrace
from millrace.runtime.failures import FailingDiskError

*directories, folder = sys.argv[1:]
paths = [f"{folder}/file{number}" for number in range(8)]
fs = millrace.filesystem("file", cache_dir=directories, min_free=0, consistency="immutable")
for line in sys.stdin:
    if line == "fail\\n":
        min(fs.node.open_disks, key=lambda disk: disk.store.directory).report(FailingDiskError("no disk", next_step=""))
    elif line == "write\\n":
        fs.pipe({path: b"new" for path in paths})
    else:
        print(*{fs.open_input_file(path).read() for path in paths}, flush=True)
        continue
    print(flush=True)
"""


@pytest.mark.parametrize("of", ["writer", "reader"])
def test_write_when_a_disk_failed_in_one_process_leaves_no_older_bytes_to_another(data: Path, of: str) -> None:
    """A node's metadata is on the first disk that a process can use. So the two use different ones."""
    log = data / "log"
    program = (node_server(), READER_ON_TWO_DISKS, f"{data}/one", f"{data}/two", str(data))
    for number in range(8):
        (data / f"file{number}").write_bytes(b"old")

    def send(process: ForkedProcess, line: str) -> bytes:
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
        return process.stdout.readline().strip()

    with ForkedProcess(*program, log=log, pipes=True) as writer, ForkedProcess(*program, log=log, pipes=True) as reader:
        assert [send(process, "read") for process in (writer, reader, reader)] == [b"b'old'"] * 3
        send(writer if of == "writer" else reader, "fail")
        assert [send(reader, "read") for _ in range(3)] == [b"b'old'"] * 3
        send(writer, "write")
        assert [send(reader, "read") for _ in range(3)] == [b"b'new'"] * 3, log.read_text()


def test_write_after_another_process_replaced_the_index_leaves_it_no_older_bytes(data: Path) -> None:
    """The writing process expired metadata in the index that was replaced, also by all later writes."""
    cache, log = data / "cache", data / "log"
    paths = [f"{data}/file{number}" for number in range(8)]
    for path in paths:
        Path(path).write_bytes(b"old")
    fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0, consistency="immutable")
    assert fs.cat_file(paths[0]) == b"old"
    (cache / "millrace/local/index/damaged").touch()
    program = (node_server(), READER_ON_TWO_DISKS, str(cache), str(data))
    with ForkedProcess(*program, log=log, pipes=True) as reader:

        def check_reader(expected: bytes) -> None:
            for _ in range(3):
                reader.stdin.write(b"read\n")
                reader.stdin.flush()
                assert reader.stdout.readline().strip() == repr(expected).encode(), log.read_text()

        check_reader(b"old")
        with pytest.raises(StorageError, match="discarded"):
            fs.pipe_file(paths[0], b"new")
        for path in paths[1:]:
            fs.pipe_file(path, b"new")
        check_reader(b"new")
        for path in paths:
            fs.pipe_file(path, b"newer")
        check_reader(b"newer")


@pytest.mark.slow
def test_killed_readers_lose_no_returned_bytes(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = data / "cache"
    for number in range(6):
        (data / f"{number}.bin").write_bytes(random.Random(number).randbytes(24_000_000))
    code = (
        "import sys, millrace; fs = millrace.filesystem('file', cache_dir=sys.argv[1], min_free=0)\n"
        "print('ready', flush=True)\n"
        "[(fs.cat_file(f'{sys.argv[2]}/{n}.bin'), print(n, flush=True)) for n in range(6)]"
    )
    chooser = random.Random(3)
    returned = set()
    for attempt in range(12):
        log = cache.with_suffix(".log")
        with ForkedProcess(node_server(), code, str(cache), str(data), log=log, pipes=True) as process:
            assert process.stdout.readline() == b"ready\n", log.read_text()
            # Every other time something has been read: else, on a busy disk, there may be nothing to lose.
            first = process.stdout.readline() if attempt % 2 else b""
            time.sleep(chooser.uniform(0, 0.3))
            with contextlib.suppress(ProcessLookupError):  # it has read everything
                os.kill(process.pid, signal.SIGKILL)
            returned |= {f"{data}/{int(number)}.bin" for number in (first + process.stdout.read()).split()}
        # No bytes that a read has returned are lost, whichever process was killed since.
        fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0)
        assert returned <= {found.key for found in fs.cached() if found.complete}
        close_nodes()
    assert returned
    refused: list[int] = []
    try_acquire = NamedLocks.try_acquire

    def noting(locks: NamedLocks, number: int) -> bool:
        taken = try_acquire(locks, number)
        if not taken:
            refused.append(number)
        return taken

    monkeypatch.setattr(NamedLocks, "try_acquire", noting)
    for native in (False, True):
        fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0, native=native)
        for number in range(6):
            assert fs.cat_file(f"{data}/{number}.bin") == (data / f"{number}.bin").read_bytes()
        assert fs.cache_counters()["corrupt_blocks"] == 0
    assert refused == []  # no dead process has a lock
