"""A disk that fails while a process uses it. The failure is real: an ext4 on a loop device is told to shut down, as the
kernel does by itself after an I/O error; every write, and every read of what is not in memory, then gives EIO.

What is not shown: a device that takes mapped pages away (SIGBUS), which a process does not survive natively.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
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
