"""`load`, `cached`, `free`, `pin`, `limit` and `resize` of the file system, over local files."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import millrace
from millrace.cache import catalog
from millrace.cache.node import close_nodes
from millrace.errors import (
    ConfigurationError,
    DiskFullError,
    ObjectNotFoundError,
    OriginUnavailableError,
    UsageError,
)
from millrace.filesystem.loading import LoadProgress
from millrace.origin.object_store import ObjectStoreOrigin

MB = 1_000_000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Small and large objects, in two folders."""
    for name, nbytes in {
        "train/a.bin": 3 * MB,
        "train/b.bin": 20 * MB,
        "train/c.txt": 1000,
        "train/deep/d.bin": 5,
        "training/e.bin": 2 * MB,
        "empty": 0,
    }.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(nbytes))
    return tmp_path / "data"


@pytest.fixture
def make_fs(tmp_path: Path) -> Callable[..., millrace.MillraceFileSystem]:
    def make(**options: Any) -> millrace.MillraceFileSystem:
        options = {"cache_dir": str(tmp_path / "cache"), "min_free": 0, **options}
        return millrace.filesystem("file", skip_instance_cache=True, **options)

    return make


@pytest.fixture
def fs(make_fs: Callable[..., millrace.MillraceFileSystem]) -> millrace.MillraceFileSystem:
    return make_fs()


def names(fs: millrace.MillraceFileSystem, prefix: Path | None = None) -> list[str]:
    found = fs.cached(None if prefix is None else str(prefix))
    return sorted(Path(item.key).name for item in found if item.complete)


# --- load -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("train", ["a.bin", "b.bin", "c.txt", "d.bin"]),
        ("train/", ["a.bin", "b.bin", "c.txt", "d.bin"]),
        ("train/c.txt", ["c.txt"]),
        ("train/*.bin", ["a.bin", "b.bin"]),
        ("train/**/*.bin", ["a.bin", "b.bin", "d.bin"]),
        ("tr*/[ae].bin", ["a.bin", "e.bin"]),
        ("", ["a.bin", "b.bin", "c.txt", "d.bin", "e.bin"]),
    ],
)
def test_what_a_url_names(fs: millrace.MillraceFileSystem, data: Path, url: str, expected: list[str]) -> None:
    fs.load(f"{data}/{url}")
    assert names(fs) == expected


def test_load_brings_everything_once_and_says_so(fs: millrace.MillraceFileSystem, data: Path) -> None:
    seen: list[LoadProgress] = []
    total = 25 * MB + 1005
    done = fs.load([f"{data}/train", f"file://{data}/train/*.bin", f"{data}/training"], progress=seen.append)
    assert (done.objects, done.done_objects, done.nbytes, done.done_bytes, done.fetched_bytes) == (
        5,
        5,
        total,
        total,
        total,
    )
    assert done.listed
    assert done.seconds_left == 0
    assert seen[-1] == done
    again = fs.load(f"{data}/train")
    assert (again.done_objects, again.fetched_bytes) == (4, 0)
    assert fs.cache_counters()["origin_bytes"] == total
    assert fs.open_input_file(f"{data}/train/b.bin").read() == (data / "train/b.bin").read_bytes()
    assert fs.cache_counters()["origin_bytes"] == total


def test_what_is_partly_here_is_completed(fs: millrace.MillraceFileSystem, data: Path) -> None:
    with fs.open(f"{data}/train/b.bin") as file:
        file.seek(9 * MB)
        file.read(10)
    before = fs.cache_counters()["origin_bytes"]
    assert 0 < before < 20 * MB
    done = fs.load(f"{data}/train/b.bin")
    assert done.fetched_bytes == 20 * MB - before
    assert fs.cache_counters()["origin_bytes"] == 20 * MB


@pytest.mark.parametrize("url", ["nothing", "nothing/*.bin", "train/*.parquet"])
def test_what_names_nothing_is_an_error_before_anything_is_fetched(
    fs: millrace.MillraceFileSystem, data: Path, url: str
) -> None:
    with pytest.raises(ObjectNotFoundError, match=f"{data}/nothing|matches nothing"):
        fs.load([f"{data}/train", f"{data}/{url}"])
    assert fs.cache_counters()["origin_bytes"] == 0


def test_a_full_cache_is_an_error_that_says_how_much_fitted(
    make_fs: Callable[..., millrace.MillraceFileSystem], data: Path
) -> None:
    fs = make_fs(capacity=10 * MB)
    with pytest.raises(
        DiskFullError, match=r"the cache is full: \d of 4 objects, [0-9.]+ MB of 23\.0 MB, are in it: enlarge"
    ):
        fs.load(f"{data}/train")
    assert 0 < fs.node.disks()[0][1] <= 10 * MB


def test_a_load_into_a_cache_that_was_enlarged_goes_on(
    make_fs: Callable[..., millrace.MillraceFileSystem], tmp_path: Path
) -> None:
    # Small enough that all that the first load could not keep is still held in memory.
    for number in range(6):
        (tmp_path / f"data/{number}").parent.mkdir(exist_ok=True)
        (tmp_path / f"data/{number}").write_bytes(os.urandom(3 * MB if number % 2 else MB // 2))
    fs = make_fs()
    fs.resize(5 * MB)
    with pytest.raises(DiskFullError):
        fs.load(f"{tmp_path}/data")
    fs.resize(50 * MB)
    assert fs.load(f"{tmp_path}/data").done_objects == 6


def test_an_error_of_the_origin_says_what_was_achieved_and_the_next_load_goes_on(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.load(f"{data}/train/a.bin")
    real = ObjectStoreOrigin.read

    def read(self: ObjectStoreOrigin, key: str, *args: Any, **kwargs: Any) -> Any:
        if key.endswith("b.bin"):
            raise OriginUnavailableError("the server is gone", next_step="start it")
        return real(self, key, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStoreOrigin, "read", read)
        with pytest.raises(OriginUnavailableError) as caught:
            fs.load(f"{data}/train")
    text = str(caught.value)
    assert text.startswith("the server is gone; ")
    assert text.endswith(" of 4 objects are in the cache: start it, then load again to go on with the rest")
    assert fs.load(f"{data}/train").done_objects == 4
    assert fs.cache_counters()["origin_bytes"] == 23 * MB + 1005


def test_an_object_that_changes_meanwhile_is_loaded_as_it_is_now(
    make_fs: Callable[..., millrace.MillraceFileSystem], data: Path
) -> None:
    fs = make_fs(consistency="immutable")
    fs.find(str(data))  # remembers the versions
    (data / "train/b.bin").write_bytes(os.urandom(9 * MB))
    (data / "train/a.bin").unlink()
    with pytest.raises(ObjectNotFoundError, match=r"1 of 4 objects have gone since they were listed.*a\.bin"):
        fs.load(f"{data}/train")
    assert names(fs, data / "train") == ["b.bin", "c.txt", "d.bin"]
    assert fs.cat_file(f"{data}/train/b.bin") == (data / "train/b.bin").read_bytes()


def test_verify_finds_a_flipped_byte_and_mends_it(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.load(f"{data}/train")
    assert fs.load(f"{data}/train", verify=True).bad_blocks == 0
    (disk,) = fs.node.open_disks
    flipped = 0
    for path in disk.store.directory.rglob("*"):
        if path.is_file() and path.stat().st_size > 15 * MB and "index" not in path.parts:
            with open(path, "r+b") as file:
                file.seek(5 * MB)
                byte = file.read(1)
                file.seek(5 * MB)
                file.write(bytes([byte[0] ^ 1]))
            flipped += 1
    assert flipped == 1
    done = fs.load(f"{data}/train", verify=True)
    assert done.bad_blocks == 1
    assert 0 < done.fetched_bytes <= 4 << 20
    close_nodes()
    assert fs.cat_file(f"{data}/train/b.bin") == (data / "train/b.bin").read_bytes()


def test_an_interrupt_ends_a_load_and_the_next_goes_on(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = threading.Event()
    real = ObjectStoreOrigin.read

    def read(self: ObjectStoreOrigin, key: str, *args: Any, **kwargs: Any) -> Any:
        if key.endswith("b.bin"):
            hold.wait(20)
        return real(self, key, *args, **kwargs)

    def interrupt(state: LoadProgress) -> None:
        if state.done_objects == 3 and not hold.is_set():
            hold.set()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStoreOrigin, "read", read)
        with pytest.raises(KeyboardInterrupt):
            fs.load(f"{data}/train", progress=interrupt)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("millrace-load")]
    assert fs.load(f"{data}/train").done_objects == 4
    assert fs.cache_counters()["origin_bytes"] == 23 * MB + 1005


def test_two_loads_at_a_time_fetch_each_byte_once(fs: millrace.MillraceFileSystem, data: Path) -> None:
    threads = [threading.Thread(target=fs.load, args=(str(data),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fs.cache_counters()["origin_bytes"] == 25 * MB + 1005


# --- what is here -----------------------------------------------------------------------------------------


def test_cached_names_what_is_here(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.load(f"{data}/train")
    with fs.open(f"{data}/training/e.bin") as file:
        file.read(1)
    found = {Path(item.key).name: item for item in fs.cached(str(data))}
    assert sorted(found) == ["a.bin", "b.bin", "c.txt", "d.bin", "e.bin"]
    item = found["a.bin"]
    assert (item.url, item.origin, item.size, item.cached_bytes) == (
        f"file://{data}/train/a.bin",
        "file",
        3 * MB,
        3 * MB,
    )
    assert item.version == fs.describe(f"{data}/train/a.bin").version
    assert names(fs, data / "train") == ["a.bin", "b.bin", "c.txt", "d.bin"]
    assert names(fs, data / "tra") == []


def test_free_drops_what_is_below_and_readers_read_on(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.load(str(data))
    reader = fs.open_input_file(f"{data}/train/b.bin")
    assert fs.free(f"{data}/train") == 23 * MB + 1005
    assert names(fs) == ["e.bin"]
    assert reader.read() == (data / "train/b.bin").read_bytes()
    assert fs.free([f"{data}/train", f"{data}/none"]) == 0
    before = fs.cache_counters()["origin_bytes"]
    fs.cat_file(f"{data}/train/c.txt")
    assert fs.cache_counters()["origin_bytes"] == before + 1000


def test_free_gives_back_the_room_of_small_objects_too(
    fs: millrace.MillraceFileSystem, data: Path, tmp_path: Path
) -> None:
    small = tmp_path / "data/small"
    small.mkdir()
    for number in range(20):
        (small / f"{number}.txt").write_bytes(os.urandom(10_000))
    fs.load([f"{data}/train", str(small)])
    used = fs.node.disks()[0][1]
    fs.free(str(small))
    assert fs.node.disks()[0][1] <= used - 200_000
    assert fs.open_input_file(f"{data}/train/c.txt").read() == (data / "train/c.txt").read_bytes()
    fs.free(str(data))
    assert fs.node.disks()[0][1] == 0
    assert not list((tmp_path / "cache/millrace/local/segments").iterdir())
    fs.load(str(small))
    assert fs.cat_file(f"{small}/7.txt") == (small / "7.txt").read_bytes()


def test_what_is_pinned_is_not_freed(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.pin([f"{data}/train/deep", f"{data}/train/a.bin"])
    fs.load(str(data))
    assert {Path(item.key).name for item in fs.cached() if item.pinned} == {"a.bin", "d.bin"}
    assert catalog.free(fs.node, None) == catalog.Freed(objects=3, nbytes=22 * MB + 1000, pinned_objects=2)
    assert names(fs) == ["a.bin", "d.bin"]
    with pytest.raises(UsageError, match=r"x\.bin has no pin of its own, a prefix above it has"):
        fs.unpin(f"{data}/train/deep/x.bin")
    fs.unpin(str(data))
    with pytest.raises(UsageError, match="has no pin of its own: "):
        fs.unpin(str(data))
    assert fs.free(str(data)) == 3 * MB + 5


def test_rules_are_of_prefixes_not_of_patterns(fs: millrace.MillraceFileSystem) -> None:
    for call in (fs.pin, fs.unpin, fs.free, fs.limit):
        with pytest.raises(UsageError, match="is a pattern"):
            call("/data/*.bin")


# --- limits -------------------------------------------------------------------------------------------------


def test_limits_are_kept_by_the_store(
    make_fs: Callable[..., millrace.MillraceFileSystem], data: Path, tmp_path: Path
) -> None:
    two = [str(tmp_path / "one"), str(tmp_path / "two")]
    fs = make_fs(cache_dir=two)
    fs.limit(str(data), quota="3GB", ttl="1d")
    fs.limit(f"{data}/train", quota="60MB")
    fs.load(str(data))
    close_nodes()
    outer, inner = catalog.placed_rules(make_fs(cache_dir=two).node)
    assert (outer.prefix, outer.quota_bytes, outer.ttl_seconds) == (str(data), 3_000 * MB, 86400)
    assert (outer.used_bytes, outer.objects) == (2 * MB, 1)  # what lies below the inner one counts there
    assert (inner.quota_bytes, inner.used_bytes, inner.objects) == (60 * MB, 23 * MB + 1005, 4)
    # Each disk has its share.
    for disk in fs.node.open_disks:
        applied = disk.store.rules.current().rule_for("file", f"{data}/x")
        assert applied.quota is not None
        assert applied.quota.nbytes == 1_500 * MB
    fs.limit(str(data))
    fs.limit(f"{data}/train")
    assert catalog.placed_rules(fs.node) == []


@pytest.mark.parametrize("options", [{"quota": "much"}, {"ttl": "long"}, {"ttl": 0}, {"quota": -1}])
def test_a_bad_limit_is_refused(fs: millrace.MillraceFileSystem, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        fs.limit("/data", **options)


def test_a_resized_store_stays_so_until_it_is_given_back(
    make_fs: Callable[..., millrace.MillraceFileSystem], data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fs = make_fs(capacity="50MB")
    assert fs.node.disks()[0][2] == 50 * MB
    fs.resize("30MB")
    assert fs.node.disks()[0][2] == 30 * MB
    close_nodes()
    with caplog.at_level(logging.WARNING, logger="millrace"):
        assert make_fs(capacity="40MB").node.disks()[0][2] == 30 * MB
    assert "resize --default" in caplog.text
    caplog.clear()
    close_nodes()
    make_fs().node.disks()  # who has no wish of his own is not warned
    assert caplog.text == ""
    other = make_fs(capacity="40MB")
    other.resize(None)
    assert other.node.disks()[0][2] == 40 * MB
    with pytest.raises(ConfigurationError, match="capacity"):
        fs.resize("many")


def test_a_smaller_store_gives_its_space_back_but_not_what_is_pinned(
    fs: millrace.MillraceFileSystem, data: Path
) -> None:
    fs.pin(f"{data}/train/a.bin")
    fs.load(f"{data}/train")
    fs.resize("10MB")
    assert fs.node.disks()[0][1] <= 10 * MB
    assert "a.bin" in names(fs)
    fs.resize("1MB")
    assert "a.bin" in names(fs)
