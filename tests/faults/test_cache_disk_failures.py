"""A disk that fails while a process uses it. The failure is real: an ext4 on a loop device is told to shut down, as the
kernel does by itself after an I/O error; every write, and every read of what is not in memory, then gives EIO. Or it is made
read-only, by the kernel after an error that is triggered, or by the administrator between two processes.

What is not shown: a device that takes mapped pages away (SIGBUS), which a process does not survive natively.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
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
        (folder / f"small{number}").write_bytes(random.Random(number + 100).randbytes(20_000))
    return folder


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("filled", [True, False])
def test_a_disk_that_fails_is_left_out_and_the_other_goes_on(
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
    remove = add_hook(events.append)  # before: housekeeping may be the first to notice
    try:
        shut_down(disks[which])
        check()
        for path in data.iterdir():  # what is not here yet has to be written somewhere
            (data / f"new-{path.name}").write_bytes(path.read_bytes())
        check()
        assert [event.name for event in events].count("cache.disk.left_out") == 1
        assert "is left out from now on" in caplog.text
        events.clear()
        fs.cache_counters()
        before = fs.cache_counters()["origin_bytes"]
        check()
        assert events == []  # nothing is asked of it any more
        assert fs.cache_counters()["origin_bytes"] == before  # all is on the other
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
    """Unmount a disk, mend it as an administrator does, and mount it writable."""
    image = disk.with_name(f"{disk.name}.img")
    subprocess.run(["umount", str(disk)], check=True)
    assert subprocess.run(["fsck.ext4", "-p", "-f", str(image)], capture_output=True, check=False).returncode in (0, 1)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)


_JOB = """
import json, sys
from pathlib import Path
import millrace
fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0, consistency="immutable")
for _ in sys.stdin:
    for path in sorted(Path(sys.argv[2]).iterdir()):
        expected = path.read_bytes()
        assert fs.cat_file(str(path)) == expected, path
        assert fs.open_input_file(str(path)).read() == expected, path
        assert fs.cat_file(str(path), 100, 5000) == expected[100:5000], path
    here = {found.key: found.cached_bytes for found in fs.cached()}
    print(json.dumps([len(fs.node.disks()), fs.cache_counters()["origin_bytes"], here]), flush=True)
"""


class Job:
    """A process that reads all data through the cache, in every way, as often as it is asked to."""

    def __init__(self, cache: Path, data: Path) -> None:
        command = [sys.executable, "-c", _JOB, str(cache), str(data)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def read_everything(self) -> tuple[int, int, dict[str, int]]:
        """How many disks it uses after that, the bytes from the origin so far, and what is here: bytes by key."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        disks, origin_bytes, here = json.loads(self._process.stdout.readline())
        return disks, origin_bytes, here

    def end(self) -> str:
        """What it said aloud. Afterwards it has no file open: only then can a disk be made read-only by request."""
        _, log = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, log
        return log


@pytest.mark.parametrize("live", [True, False], ids=["by the kernel while it is in use", "between two jobs"])
def test_a_filled_disk_that_becomes_read_only_is_left_out_and_comes_back(
    disks: list[Path], data: Path, live: bool
) -> None:
    disk = disks[0]
    sizes = {str(path): path.stat().st_size for path in data.iterdir()}
    job = Job(disk / "cache", data)
    assert job.read_everything() == (1, sum(sizes.values()), sizes)
    if live:
        make_read_only(disk)
    else:
        job.end()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        job = Job(disk / "cache", data)

    (data / "new").write_bytes(os.urandom(_BLOCK + 5))  # has to be written somewhere
    for _ in range(2):
        assert job.read_everything()[0] == 0
    assert ("is left out from now on" if live else "no caching in") in job.end()

    (data / "new").unlink()
    if live:
        mount_again(disk)
    else:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    job = Job(disk / "cache", data)
    assert job.read_everything() == (1, sum(sizes.values()), sizes)  # as it was left: nothing more from the origin
    (data / "new").write_bytes(os.urandom(_BLOCK + 5))
    assert job.read_everything()[2][str(data / "new")] == _BLOCK + 5  # and it takes more
    assert job.end() == ""
