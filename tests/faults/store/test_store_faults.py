"""A store after a crash of the machine, a killed process or foreign changes; every read must be right.

A crash is simulated by copying a live store that nothing has flushed and doing to the copy what ext4 may do: ranges of zeros
in files of the right size, files cut, names without content, an index with holes, and another boot. Everything else is real.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.harms import (
    and_set_back_the_times,
    empty,
    replace_by_a_fifo,
    replace_by_a_folder,
    replace_by_a_full_folder,
    replace_by_noise,
    zeros,
)
from tests.support.harms import flip as flip_byte

import millrace
from millrace.cache.node import cache_node, close_nodes
from millrace.config import resolve
from millrace.events import Event

BLOCK = 4 << 20
NAMES = ("a.bin", "b.bin", "c.bin")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        (folder / name).write_bytes(random.Random(number).randbytes(BLOCK * 2 + 1000 * (number + 1)))
    (folder / "small.bin").write_bytes(random.Random(9).randbytes(26_000))
    return folder


def check(data: Path, cache: Path, *, native: bool = True) -> dict[str, int]:
    """Read everything in every way; returns the counters."""
    fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0, native=native)
    for path in sorted(data.iterdir()):
        expected = path.read_bytes()
        assert fs.open_input_file(str(path)).read() == expected
        assert fs.cat_file(str(path)) == expected
        assert fs.cat_file(str(path), start=BLOCK - 10, end=BLOCK + 10) == expected[BLOCK - 10 : BLOCK + 10]
        assert fs.open_input_stream(str(path)).read() == expected
    return fs.cache_counters()


def fill(data: Path, cache: Path) -> None:
    """Fill the cache in another process, which then ends."""
    code = (
        "import sys, pathlib, millrace;"
        "fs = millrace.filesystem('file', cache_dir=sys.argv[1], min_free=0);"
        "[fs.cat_file(str(path)) for path in pathlib.Path(sys.argv[2]).iterdir()]"
    )
    subprocess.run([sys.executable, "-c", code, str(cache), str(data)], check=True, timeout=300)


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("millrace/local/objects/*/*[0-9]"), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    flip_byte(path, BLOCK + 5)


def cut(path: Path) -> None:
    os.truncate(path, BLOCK + 100)


def replace_by_a_symlink(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    elsewhere = path.parents[3] / "elsewhere"
    elsewhere.write_bytes(os.urandom(size))
    path.symlink_to(elsewhere)


HARMS: list[Callable[[Path], None]] = [
    flip,
    and_set_back_the_times(flip),
    cut,
    empty,
    zeros,
    Path.unlink,
    replace_by_noise,
    replace_by_a_folder,
    replace_by_a_full_folder,
    replace_by_a_symlink,
    replace_by_a_fifo,
]


@pytest.mark.parametrize(("harm", "native"), [(flip, True), (flip, False), (replace_by_noise, True)])
def test_file_damaged_between_two_processes_is_found(
    data: Path, tmp_path: Path, harm: Callable[[Path], None], native: bool
) -> None:
    cache = tmp_path / "cache"
    fill(data, cache)
    harm(files(cache)[-1])
    check(data, cache, native=native)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("harm", HARMS)
def test_file_damaged_while_unmapped_is_found(
    data: Path, tmp_path: Path, harm: Callable[[Path], None], events: list[Event], native: bool
) -> None:
    cache = tmp_path / "cache"
    check(data, cache)
    close_nodes()
    path = files(cache)[-1]
    harm(path)
    check(data, cache, native=native)
    assert {event.name for event in events} & {"cache.file.changed", "cache.file.lost", "cache.block.corrupt"}
    close_nodes()
    events.clear()
    check(data, cache, native=native)
    assert events == []  # and it is mended


def test_flipped_bit_is_found_and_counted_once(data: Path, tmp_path: Path, events: list[Event]) -> None:
    cache = tmp_path / "cache"
    before = check(data, cache)
    close_nodes()
    flip(files(cache)[-1])
    after = check(data, cache)
    assert [event.name for event in events] == ["cache.file.changed", "cache.block.corrupt"]
    assert after["corrupt_blocks"] == before["corrupt_blocks"] + 1
    assert after["origin_bytes"] == before["origin_bytes"] + BLOCK


def test_file_touched_with_right_bytes_needs_no_request(data: Path, tmp_path: Path, events: list[Event]) -> None:
    cache = tmp_path / "cache"
    before = check(data, cache)
    close_nodes()
    for path in files(cache):
        os.chmod(path, 0o640)
    after = check(data, cache)
    assert {event.name for event in events} == {"cache.file.changed"}
    assert after["origin_bytes"] == before["origin_bytes"]
    assert after["corrupt_blocks"] == before["corrupt_blocks"]


def test_object_without_seal_is_verified_by_block(data: Path, tmp_path: Path, events: list[Event]) -> None:
    cache = tmp_path / "cache"
    fs = millrace.filesystem("file", cache_dir=str(cache), min_free=0)
    name = str(data / "c.bin")
    content = (data / "c.bin").read_bytes()
    fs.cat_file(name, start=0, end=BLOCK + 10)  # two blocks of three
    close_nodes()
    flip(files(cache)[-1])
    assert fs.cat_file(name, start=100, end=200) == content[100:200]
    assert events == []
    assert fs.cat_file(name, start=BLOCK, end=BLOCK + 10) == content[BLOCK : BLOCK + 10]
    assert [event.name for event in events] == ["cache.block.corrupt"]


def crash_image(cache: Path, image: Path, seed: int) -> None:
    """Damage that an ext4 without a flush may have after a crash of the machine."""
    shutil.copytree(cache, image)
    chooser = random.Random(seed)
    store = image / "millrace" / "local"
    (store / "FORMAT").write_text("millrace-store 4\nthe-boot-before\n")
    (store / "rules.json").write_text('{"version": 1, "capacity": "90%", "rules": []}')
    found = [path for path in store.glob("**/*") if path.is_file() and path.stat().st_size]
    for path in sorted(found, key=lambda path: path.relative_to(store).parts):
        size = path.stat().st_size
        choices = ["whole", "zeros", "zeros", "cut", "empty", "missing", "noise at the end"]
        if path.name == "FORMAT":
            choices.pop()  # it is flushed before it gets its name: another program wrote the noise
        match chooser.choice(choices):
            case "missing":
                path.unlink()
            case "zeros":
                with open(path, "r+b") as file:
                    for _ in range(chooser.randint(1, 3)):
                        start = chooser.randrange(size) // 4096 * 4096
                        file.seek(start)
                        file.write(bytes(min(size - start, 4096 * chooser.randint(1, 300))))
            case "cut":
                os.truncate(path, chooser.randrange(size))
            case "empty":
                os.truncate(path, 0)
            case "noise at the end":
                with open(path, "r+b") as file:
                    file.seek(max(0, size - 4096))
                    file.write(chooser.randbytes(min(size, 4096)))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_store_after_machine_crash_returns_right_bytes(data: Path, tmp_path: Path, seed: int, native: bool) -> None:
    cache, image = tmp_path / "cache", tmp_path / "image"
    check(data, cache)  # and the store stays open
    crash_image(cache, image, seed)
    close_nodes()
    check(data, image, native=native)


@pytest.mark.parametrize("native", [True, False])
def test_blocks_of_zeros_after_reboot_are_found_and_fetched_again(
    data: Path, tmp_path: Path, native: bool, events: list[Event]
) -> None:
    """The trailers reached the disk, but the bytes of the blocks did not."""
    cache = tmp_path / "cache"
    before = check(data, cache)
    close_nodes()
    for path in files(cache):
        with open(path, "r+b") as file:
            file.write(bytes(BLOCK * 2 + 1000))
    (cache / "millrace" / "local" / "FORMAT").write_text("millrace-store 4\nthe-boot-before\n")
    after = check(data, cache, native=native)
    wrong = [(event.subject, event.detail) for event in events if event.name == "cache.block.corrupt"]
    assert len(set(wrong)) == 9
    # Rarely, a block counts twice: one reader checks it before another fetches it again.
    assert after["corrupt_blocks"] - before["corrupt_blocks"] == len(wrong)
    assert [event.name for event in events].count("cache.store.rebuilt") == 1


def test_store_after_reboot_needs_no_request(data: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = check(data, cache)
    close_nodes()
    (cache / "millrace" / "local" / "FORMAT").write_text("millrace-store 4\nthe-boot-before\n")
    after = check(data, cache)
    assert after["origin_bytes"] == before["origin_bytes"]
    options = resolve({"cache_dir": str(cache), "min_free": 0}, environ={}, file={})
    assert all(entry.complete for entry in cache_node(options).entries())
