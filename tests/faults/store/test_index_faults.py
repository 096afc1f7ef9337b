"""An index on a full disk: it refuses new records early enough that it can always remove some."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.support.indexes import new_index
from tests.support.small_disks import fill_disk, small_disk

from millrace.cache.metadata.page_map import PageMap
from millrace.errors import DiskFullError
from millrace.store.index import Index
from millrace.store.records import ObjectName

pytestmark = pytest.mark.root

NAME = ObjectName("s3://?region=eu", "k" * 150, "etag")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=16m") as disk:
        yield disk


@pytest.fixture
def index(disk: Path) -> Iterator[Index]:
    with new_index(disk / "index") as index:
        yield index


def until_full(act: Callable[[int], object]) -> int:
    """Repeat `act` until it raises `DiskFullError`; returns how often it succeeded."""
    for number in count():
        try:
            act(number)
        except DiskFullError:
            return number
    raise AssertionError


def test_full_disk_leaves_pages_for_removals(disk: Path, index: Index) -> None:
    fill_disk(disk)

    def create(number: int) -> None:
        index.add_block(index.create(number.to_bytes(16, "big"), 100, 100, NAME), 0, 1)

    created = until_full(create)
    assert created > 100  # the disk has no space for one without the pages that the index has allocated
    for number in range(created):
        PageMap(index).clear()
        assert index.remove(number.to_bytes(16, "big")) is not None
    assert (index.used_bytes(), list(index.entries())) == (0, [])
    assert until_full(create) >= created // 2  # the pages are used again


def test_killed_reader_does_not_prevent_clearing_metadata_on_a_full_disk(disk: Path, index: Index) -> None:
    pages = PageMap(index)
    code = (
        "import sys, time; from pathlib import Path; from millrace.store.index import Index;"
        "index = Index(Path(sys.argv[1])); reading = index.meta_reading(); reading.__enter__();"
        "print('reading', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(disk / "index")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        fill_disk(disk)
        until_full(lambda number: pages.change("origin", str(number)))
        until_full(lambda number: pages.clear())  # the reader could still see the pages that these free
        process.kill()
    pages.clear()
