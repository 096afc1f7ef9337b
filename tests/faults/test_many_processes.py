"""Two hundred processes on one store at once: every byte right, every block fetched about once, nothing left behind."""

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from millrace.cache.node import close_nodes
from millrace.filesystem import filesystem

_PROCESSES = 200
_LARGE, _SMALL = 5_000_000, 30_000  # two blocks; a segment's object
_PATIENCE_SECONDS = 400  # they take some seconds, and on a machine with other work to do some minutes
_PR_SET_PDEATHSIG = 1


def _contents() -> dict[str, bytes]:
    """The content of each file, by its name."""
    contents = {}
    for number in range(8):
        pattern = bytes((number * 31 + position) % 251 for position in range(251))
        contents[str(number)] = (pattern * (_LARGE // 251 + 1))[: _LARGE if number < 3 else _SMALL]
    return contents


def _read_everything(data: Path, cache: Path, contents: dict[str, bytes], number: int) -> None:
    """The work of one process: all objects, beginning at its own, through fsspec or pyarrow."""
    fs = filesystem("file", cache_dir=str(cache), min_free=0, capacity="200MB", consistency="immutable")
    files = sorted(data.iterdir())
    for step in range(len(files)):
        path = files[(number + step) % len(files)]
        if number % 2:
            with fs.open_input_file(str(path)) as file:
                read = file.read()
        else:
            read = fs.cat_file(str(path))
        assert read == contents[path.name], path


def _run(data: Path, cache: Path, contents: dict[str, bytes], number: int, start: int) -> int:
    """In a forked child: wait for the start, then read; returns the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # however the test ends, no process remains
    try:
        os.read(start, 1)
        _read_everything(data, cache, contents, number)
    except BaseException:  # noqa: BLE001 - a forked child reports and ends, whatever happened
        traceback.print_exc()
        return 1
    return 0


def _wait(children: list[int]) -> list[int]:
    """The exit statuses; a process that does not end in time is killed, and has -9."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    statuses = []
    for child in children:
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        statuses.append(os.waitstatus_to_exitcode(ended[1]))
    return statuses


def _fork_all(data: Path, cache: Path) -> list[int]:
    """The exit statuses of all children of this process."""
    contents = _contents()
    start, release = os.pipe()
    children = []
    for number in range(_PROCESSES):
        child = os.fork()
        if child == 0:
            os.close(release)
            os._exit(_run(data, cache, contents, number, start))
        children.append(child)
    os.close(start)
    os.close(release)  # everybody reads the end of the pipe at once
    return _wait(children)


@pytest.mark.slow
def test_two_hundred_concurrent_processes_read_right_bytes(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    for name, content in _contents().items():
        (data / name).write_bytes(content)
    # Children of a process of their own: those of one that has run a thousand tests inherit its heap, two hundred times.
    ran = subprocess.run(
        [sys.executable, __file__, str(data), str(cache)],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS + 100,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == ["0"] * _PROCESSES

    fs = filesystem("file", cache_dir=str(cache), min_free=0, capacity="200MB", consistency="immutable")
    counters = fs.cache_counters()
    total = 3 * _LARGE + 5 * _SMALL
    assert counters["corrupt_blocks"] == 0
    # A process that takes another one for a stopped one fetches by itself: allowed, but not many.
    assert total <= counters["origin_bytes"] <= 2 * total
    # A small object that two have fetched is stored twice.
    assert total <= fs.node.disks()[0][1] <= total + 5 * _SMALL + _PROCESSES * 64
    close_nodes()


if __name__ == "__main__":
    # Once, not in each of two hundred processes.
    for name in ("millrace.cache.rebuild", "millrace.origin.object_store", "obstore.store"):
        importlib.import_module(name)

    print(*_fork_all(Path(sys.argv[1]), Path(sys.argv[2])))
