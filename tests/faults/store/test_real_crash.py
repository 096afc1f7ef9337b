"""The state of a store on a real file system after a crash: an ext4 on a loop device is shut down, as at a power cut.

Nothing that was not flushed survives. Before that, something else is flushed: the journal then holds the names and sizes of
files of which no byte was written, which a mount without allocation in advance shows as zeros of the right size.
"""

from __future__ import annotations

import fcntl
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
from millrace.store.setup import boot_id

pytestmark = pytest.mark.root

_EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
_NO_LOG_FLUSH = 2

_FILL = """
import pathlib, sys, millrace
fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0)
for path in sorted(pathlib.Path(sys.argv[2]).iterdir()):
    fs.cat_file(str(path))
fs.resize("90%")
"""

Mount = Callable[[str], None]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def mount(tmp_path: Path, place: Path) -> Iterator[Mount]:
    """Mounts the image with these options, a new ext4 of 96 MiB at first.

    As a copy: another test that runs at the same time may have copied the mount into a namespace, where the stopped disk
    stays.
    """
    images = [tmp_path / "disk-0.img"]
    with open(images[0], "wb") as file:
        file.truncate(96 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(images[0])], check=True)

    def mount(options: str) -> None:
        image = tmp_path / f"disk-{len(images)}.img"
        shutil.copyfile(images[-1], image)
        images.append(image)
        done = subprocess.run(["mount", "-o", options, str(image), str(place)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no loop mounts here: {done.stderr.strip()}")

    yield mount
    close_nodes()
    if place.is_mount():
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(6):
        size = 5_000_000 if number < 3 else 30_000
        (folder / f"{number}.bin").write_bytes(random.Random(number).randbytes(size))
    return folder


PROBES, PROBE = 64, b"never flushed" * 4096


def stop_the_machine(place: Path) -> None:
    """Write the journal, but no data. Then drop the page cache.

    The kernel may have flushed earlier writes if they took long. So the files that show the loss are written last: some
    before the journal, and some after it, which on a busy disk takes long itself.
    """
    for number in range(PROBES // 2):
        (place / f"probe-{number}").write_bytes(PROBE)
    with open(place / "other", "wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    for number in range(PROBES // 2, PROBES):
        (place / f"probe-{number}").write_bytes(PROBE)
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(descriptor)
    subprocess.run(["umount", str(place)], check=True)


def lost_something(place: Path) -> bool:
    """Whether this was a crash."""
    probes = [place / f"probe-{number}" for number in range(PROBES)]
    return not all(probe.exists() and probe.read_bytes() == PROBE for probe in probes)


def read_all(data: Path, cache: Path, *, native: bool) -> int:
    """Read everything; returns the bytes that came from the origin."""
    fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0, native=native)
    before = fs.cache_counters()["origin_bytes"]
    for path in sorted(data.iterdir()):
        expected = path.read_bytes()
        assert fs.cat_file(str(path), start=100, end=200) == expected[100:200]
        assert fs.open_input_file(str(path)).read() == expected
        assert fs.cat_file(str(path)) == expected
    return fs.cache_counters()["origin_bytes"] - before


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("options", ["loop", "loop,nodelalloc,data=writeback"])
def test_store_after_power_loss_returns_right_bytes(
    data: Path, place: Path, mount: Mount, options: str, native: bool
) -> None:
    cache = place / "cache"
    store = cache / "millrace" / "local"
    mount(options)
    subprocess.run([sys.executable, "-c", _FILL, str(cache), str(data)], check=True, timeout=300)
    stop_the_machine(place)
    mount("loop")
    assert lost_something(place)
    assert (store / "FORMAT").read_text() == f"millrace-store 4\n{boot_id()}\n"
    assert '"90.0%"' in (store / "rules.json").read_text()
    (store / "FORMAT").write_text("millrace-store 4\nthe-boot-before\n")  # the machine that runs this did not stop
    read_all(data, cache, native=native)
    assert read_all(data, cache, native=native) == 0
