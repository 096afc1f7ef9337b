"""No kind of open leaves descriptors or maps behind."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path

import pytest
from tests.support.descriptors import open_below

from millrace.filesystem import MillraceFileSystem, filesystem


def _write_objects(folder: Path) -> list[str]:
    folder.mkdir()
    sizes = [1_500_000 + 1000 * number for number in range(8)] + [10_000 + 500 * number for number in range(40)] + [0]
    for number, size in enumerate(sizes):
        (folder / f"{number:02}").write_bytes(random.Random(number).randbytes(size))
    (folder / "incomplete").write_bytes(random.Random(99).randbytes(9_000_000))
    return [str(path) for path in sorted(folder.iterdir())]


def _open_in_every_way(fs: MillraceFileSystem, path: str, *, finish: bool) -> int:
    """Read a few bytes by every kind of file, closed or just dropped, and by a range; returns how many opens that were."""
    opens = (fs.open_input_file, fs.open_input_stream, fs.open)
    for open_one in opens:
        file = open_one(path)
        assert len(file.read(3)) == min(3, file.size() if callable(file.size) else file.size)
        if finish:
            file.close()
    fs.cat_file(path, 0, 4)
    return len(opens) + 1


def _left_behind(data: Path, store: Path, *, mapped: int) -> list[str]:
    """Descriptors of cached and origin objects, and maps of objects if there are more than `mapped`."""
    gc.collect()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if f" {store}/objects/" in line]
    descriptors = [*open_below(data), *open_below(store / "objects")]
    segments = open_below(store / "segments")  # one may still be appended to
    return descriptors + segments[4:] + (maps if len(maps) > mapped else [])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("capacity", ["100MB", "9MB", "0"], ids=["all fits", "evicting", "full"])
@pytest.mark.parametrize("rounds", [20, pytest.param(85, marks=pytest.mark.slow)], ids=["24,000", "100,000"])
def test_file_system_leaks_no_descriptors_or_maps(tmp_path: Path, rounds: int, capacity: str, native: bool) -> None:
    """The number of opens, over all six cases, of cached, uncached and partly cached objects."""
    paths = _write_objects(tmp_path / "data")
    fs = filesystem(
        "file",
        cache_dir=str(tmp_path / "cache"),
        capacity=capacity,
        min_free=0,
        native=native,
        consistency="immutable",
        skip_instance_cache=True,
    )
    opens = sum(_open_in_every_way(fs, path, finish=number % 2 == 0) for number in range(rounds) for path in paths)
    assert opens == 4 * rounds * len(paths)
    [(store, _, _)] = fs.node.disks()
    large = sum(found.complete and found.size > 1 << 20 for found in fs.cached())
    deadline = time.monotonic() + 120
    while left := _left_behind(tmp_path / "data", store, mapped=large if native else 0):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
