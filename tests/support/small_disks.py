"""Small disks in memory, and full ones. For tests that run as root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.cache.node import close_nodes


@contextmanager
def small_disk(place: Path, options: str) -> Iterator[Path]:
    """A tmpfs with these options at `place`, which is created. Closes all caches before it is unmounted.

    The test is skipped on a machine that allows no mounts.
    """
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    try:
        yield place
    finally:
        close_nodes()
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill_disk(disk: Path) -> None:
    """Take all its free space, with the file `ballast`."""
    with open(disk / "ballast", "wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, os.statvfs(disk).f_bavail * 4096)
