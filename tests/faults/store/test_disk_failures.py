"""A disk that fails while a process uses it. The failure is real: an ext4 on a loop device is shut down, as the
kernel does by itself after an I/O error. Every write, and every read of bytes outside the page cache, then raises EIO.
Or the disk is made read-only: by the kernel after a triggered error, or by the administrator between two processes.

Not tested: a device that removes mapped pages (SIGBUS), which ends a process that reads natively.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import millrace
from millrace.cache.node import close_nodes
from millrace.events import Event, add_hook

pytestmark = pytest.mark.root

_EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
_NO_LOG_FLUSH = 2
_BLOCK = 4 << 20


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Path]]:
    """Two file systems of 96 MiB, each an ext4 on a loop device."""
    places = [tmp_path / f"disk{number}" for number in range(2)]
    mounted = []
    try:
        for place in places:
            place.mkdir()
            image = tmp_path / f"{place.name}.img"
            with open(image, "wb") as file:
                file.truncate(96 << 20)
            subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
            done = subprocess.run(["mount", "-o", "loop", str(image), str(place)], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no loop mounts here: {done.stderr.strip()}")
            mounted.append(place)
        yield places
    finally:
        close_nodes()
        for place in mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


def shut_down(disk: Path) -> None:
    descriptor = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(descriptor)
    with pytest.raises(OSError, match=r"Input/output error|Read-only"):
        (disk / "probe").write_bytes(b"x")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(8):
        (folder / f"large{number}").write_bytes(random.Random(number).randbytes(_BLOCK + 1000))
    for number in range(24):  # so many that hardly ever all are on one disk
        (folder / f"small{number}").write_bytes(random.Random(number + 100).randbytes(20_000))
    return folder


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("filled", [True, False])
def test_disk_that_fails_is_left_out_and_the_other_is_used(
    disks: list[Path], data: Path, native: bool, which: int, filled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caches = [str(disk / "cache") for disk in disks]
    fs = millrace.filesystem("file", cache_dir=caches, min_free=0, native=native, consistency="immutable")

    def check() -> None:
        for path in sorted(data.iterdir()):
            expected = path.read_bytes()
            assert fs.cat_file(str(path)) == expected
            assert fs.open_input_file(str(path)).read() == expected

    assert fs.cat_file(str(data / "large0")) == (data / "large0").read_bytes()
    if filled:
        check()
        assert all(used for _, used, _ in fs.node.disks())
    events: list[Event] = []
    remove = add_hook(events.append)  # before: maintenance may be the first to notice
    try:
        shut_down(disks[which])
        check()
        for path in data.iterdir():  # uncached data needs a disk to write to
            (data / f"new-{path.name}").write_bytes(path.read_bytes())
        check()
        assert [event.name for event in events].count("cache.disk.left_out") == 1
        assert "is left out from now on" in caplog.text
        events.clear()
        fetched = [fs.cache_counters()["origin_bytes"]]
        while len(fetched) < 2 or fetched[-1] != fetched[-2]:  # until all is on the other
            assert len(fetched) < 10
            check()
            fetched.append(fs.cache_counters()["origin_bytes"])
        assert events == []  # it gets no more requests
        assert [directory.is_relative_to(disks[1 - which]) for directory, _, _ in fs.node.disks()] == [True]
    finally:
        remove()


def make_read_only(disk: Path) -> None:
    """Have the kernel find an error, after which it remounts the disk read-only while files of it are open for writing."""
    device = os.path.basename(
        subprocess.run(
            ["findmnt", "-no", "SOURCE", str(disk)], check=True, capture_output=True, text=True
        ).stdout.strip()
    )
    trigger = Path(f"/sys/fs/ext4/{device}/trigger_fs_error")
    if not trigger.exists():
        pytest.skip("this kernel triggers no errors of ext4")
    subprocess.run(["mount", "-o", "remount,errors=remount-ro", str(disk)], check=True)
    trigger.write_text("a test")
    with pytest.raises(OSError, match="Read-only"):
        (disk / "probe").write_bytes(b"x")


def mount_again(disk: Path) -> None:
    """Unmount a disk, mend it as an administrator does, and mount it writable.

    As a copy: another test that runs at the same time may have copied the mount into a namespace, where the read-only disk
    stays.
    """
    image = disk.with_name(f"{disk.name}-mended.img")
    subprocess.run(["umount", str(disk)], check=True)
    shutil.copyfile(disk.with_name(f"{disk.name}.img"), image)
    assert subprocess.run(["fsck.ext4", "-p", "-f", str(image)], capture_output=True, check=False).returncode in (0, 1)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)


_JOB = """
import json, sys
from pathlib import Path
import millrace, millrace.errors
fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0, consistency="immutable")

def cached():
    try:
        return {found.key: found.cached_bytes for found in fs.cached()}
    except millrace.errors.StorageError:
        assert not fs.node.disks()
        return {}

for _ in sys.stdin:
    found_here = cached()
    for path in sorted(Path(sys.argv[2]).iterdir()):
        expected = path.read_bytes()
        assert fs.cat_file(str(path)) == expected, path
        assert fs.open_input_file(str(path)).read() == expected, path
        assert fs.cat_file(str(path), 100, 5000) == expected[100:5000], path
    left_here = cached()
    print(json.dumps([len(fs.node.disks()), found_here, left_here]), flush=True)
"""


class Job:
    """A process that reads all data through the cache, in every way, on each request."""

    def __init__(self, cache: Path, data: Path) -> None:
        command = [sys.executable, "-c", _JOB, str(cache), str(data)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def read_everything(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """The number of disks in use afterwards, and the cached bytes by key before and afterwards."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        disks, found_here, left_here = json.loads(self._process.stdout.readline())
        return disks, found_here, left_here

    def kill(self) -> None:
        """Kill the process at any point."""
        self._process.kill()
        self._process.communicate()

    def end(self) -> str:
        """End the process and return its warnings. A disk can be made read-only only when no file is open."""
        _, log = self._process.communicate(timeout=300)
        assert self._process.returncode == 0, log
        return log


@pytest.fixture
def start_job(data: Path) -> Iterator[Callable[[Path], Job]]:
    jobs: list[Job] = []

    def start(disk: Path) -> Job:
        jobs.append(Job(disk / "cache", data))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.mark.parametrize(
    "how", ["an error in use, unflushed", "an error in use, flushed", "remounted between two jobs"]
)
def test_disk_that_becomes_read_only_is_left_out_until_reopened(
    disks: list[Path], data: Path, start_job: Callable[[Path], Job], how: str
) -> None:
    """Unflushed data is lost when the kernel gives up, and fetched again: the store does not treat it as valid."""
    disk, live = disks[0], "in use" in how
    sizes = {str(path): path.stat().st_size for path in data.iterdir()}
    job = start_job(disk)
    assert job.read_everything() == (1, {}, sizes)
    if how != "an error in use, unflushed":
        subprocess.run(["sync", "-f", str(disk)], check=True)
    if live:
        make_read_only(disk)
    else:
        job.end()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        job = start_job(disk)

    (data / "new").write_bytes(os.urandom(_BLOCK + 5))  # has to be written somewhere
    for _ in range(2):
        assert job.read_everything()[0] == 0
    assert ("is left out from now on" if live else "no caching in") in job.end()

    (data / "new").unlink()
    if live:
        mount_again(disk)
    else:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    job = start_job(disk)
    used, found, left = job.read_everything()
    assert (used, left) == (1, sizes), job.end()
    assert found == sizes or how == "an error in use, unflushed"
    (data / "new").write_bytes(os.urandom(_BLOCK + 5))
    assert job.read_everything()[2][str(data / "new")] == _BLOCK + 5  # and it takes more
    assert job.end() == ""
