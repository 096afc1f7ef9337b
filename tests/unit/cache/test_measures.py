"""Values of events in the counters of a store: by processes with and without a cache of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import millrace
from millrace.cache.counters import totals
from millrace.cache.measures import samples_of
from millrace.cache.node import close_nodes, store_directory
from millrace.metrics import READ_BYTES, Distribution, Metric
from millrace.runtime.failures import FailingDiskError

pytestmark = pytest.mark.usefixtures("no_maintenance")

_SAVES = """
import os, sys, threading, millrace
from millrace.events import Event, emit
def save():
    emit(Event(name="run.saved", subject="run", values={"full_saves": 1, "save_seconds": 0.5}))
threads = [threading.Thread(target=save) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
pid = os.fork()
if pid == 0:
    save()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


def saving(cache_dir: Path) -> str:
    """Run a process that only saves; returns its output for errors."""
    variables = {**os.environ, "MILLRACE_CACHE_DIR": str(cache_dir)}
    # Python 3.12 warns of a fork next to threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _SAVES]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def counters_of(cache_dir: Path) -> Path:
    return store_directory(cache_dir) / "counters"


def make_cache(folder: Path) -> Path:
    (folder / "data").write_bytes(b"x")
    millrace.filesystem("file", cache_dir=str(folder / "cache"), min_free=0).cat_file(str(folder / "data"))
    close_nodes()
    return folder / "cache"


def values_of(fs: millrace.MillraceFileSystem) -> dict[tuple[Metric, tuple[str, ...]], float]:
    """The values of the counters."""
    return {
        (metric, labels): value
        for metric, labels, value in samples_of(fs.node)
        if metric.kind == "counter" and not isinstance(value, Distribution)
    }


def read_files(folder: Path, **options: object) -> millrace.MillraceFileSystem:
    """A file system on two disks that has read 20 files twice."""
    disks = [str(folder / name) for name in ("one", "two")]
    fs = millrace.filesystem("file", cache_dir=disks, min_free=0, **options)
    for number in range(20):
        path = folder / str(number)
        path.write_bytes(b"x" * 1000)
        for _ in range(2):
            fs.cat_file(str(path))
    for disk in fs.node.open_disks:
        disk.write_down_uses()
    return fs


def test_counters_when_a_disk_fails_keep_its_totals(tmp_path: Path) -> None:
    fs = read_files(tmp_path)
    before, counters = values_of(fs), fs.node.counters()
    assert before[READ_BYTES, ("origin",)] == counters["origin_bytes"] == 20_000
    disk, other = fs.node.open_disks
    disk.report(FailingDiskError("a disk: failed", next_step="replace it"))
    assert list(fs.node.open_disks) == [other]
    assert values_of(fs) == before
    assert fs.node.counters() == counters


def test_counters_of_a_disk_whose_lock_holder_is_stopped_are_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.runtime.locks.SILENCE_SECONDS", 0.3)
    fs = read_files(tmp_path)
    before = values_of(fs)
    code = (
        "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print(flush=True); time.sleep(60)"
    )
    directory = fs.node.open_disks[0].store.directory / "counters"
    command = [sys.executable, "-c", code, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        try:
            assert values_of(fs) == before
        finally:
            holder.kill()
    assert values_of(fs) == before


def test_saves_of_a_process_that_only_saves_are_counted(tmp_path: Path) -> None:
    cache_dir = make_cache(tmp_path)
    for runs in (1, 2):
        assert saving(cache_dir) == ""
        assert totals(counters_of(cache_dir))["full_saves"] == 9 * runs


def test_saves_without_a_cache_create_none(tmp_path: Path) -> None:
    assert saving(tmp_path / "cache") == ""
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["link", "other version"])
def test_saves_with_an_unusable_cache_log_one_line_and_change_nothing(tmp_path: Path, damage: str) -> None:
    cache_dir = make_cache(tmp_path)
    if damage == "link":
        shutil.rmtree(counters_of(cache_dir).parent / "index")
        (counters_of(cache_dir).parent / "index").symlink_to("elsewhere")
    else:
        (counters_of(cache_dir).parent / "FORMAT").write_text("millrace store 999\n")
    before = sorted(counters_of(cache_dir).iterdir())
    # One line of the process and one of its forked child.
    assert saving(cache_dir).count("the saves of this process are missing in the metrics") == 2
    assert sorted(counters_of(cache_dir).iterdir()) == before
