"""`load`, `cached`, `free`, `pin`, `limit` and `resize` of the file system, over local files."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.harms import flip
from tests.support.waiting import wait_until

import millrace
from millrace.cache import catalog
from millrace.cache.node import close_nodes
from millrace.errors import (
    ConfigurationError,
    DiskFullError,
    ObjectChangedError,
    ObjectNotFoundError,
    OriginUnavailableError,
    StorageError,
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


# --- disks that cannot be used --------------------------------------------------------------------------


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("is_full", [True, False])
def test_management_without_usable_directory_raises(
    make_fs: Callable[..., millrace.MillraceFileSystem],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_full: bool,
) -> None:
    if is_full:
        monkeypatch.setattr("millrace.cache.node.make_folder", no_space)
    else:
        (tmp_path / "cache").write_bytes(b"")
    fs, url = make_fs(), str(data / "train")
    calls: list[Callable[[], Any]] = [
        lambda: fs.load(url),
        lambda: fs.free(url),
        lambda: list(fs.cached()),
        lambda: fs.pin(url),
        lambda: fs.unpin(url),
        lambda: fs.limit(url, quota="1MB"),
        lambda: fs.resize("1GB"),
    ]
    for call in calls:
        with pytest.raises(StorageError) as raised:
            call()
        assert isinstance(raised.value, DiskFullError) == is_full
        assert ("free disk space" in str(raised.value)) == is_full


def test_load_with_disk_that_becomes_full_raises_disk_full(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DiskFullError("index: no space left on the disk", next_step="free disk space")

    monkeypatch.setattr(type(fs.node), "_locate", full)
    with pytest.raises(DiskFullError, match=r"no space left.*free disk space, then load again"):
        fs.load(str(data))


def test_rules_on_full_disk_name_the_full_disk(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not list(fs.cached())
    monkeypatch.setattr("millrace.runtime.private_files.new_file", no_space)
    calls: list[Callable[[], Any]] = [
        lambda: fs.pin(str(data)),
        lambda: fs.limit(str(data), quota="1MB"),
        lambda: fs.resize("1GB"),
    ]
    for call in calls:
        with pytest.raises(DiskFullError, match="no space left on the disk: free disk space"):
            call()


def test_directory_in_place_of_locks_is_replaced(
    make_fs: Callable[..., millrace.MillraceFileSystem], data: Path, tmp_path: Path
) -> None:
    make_fs().load(str(data))
    close_nodes()
    locks = tmp_path / "cache" / "millrace" / "local" / "locks"
    locks.unlink()
    locks.mkdir()
    assert make_fs().load(str(data)).fetched_bytes == 0
    assert locks.is_file()


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
def test_load_of_url_names_object_or_directory(
    fs: millrace.MillraceFileSystem, data: Path, url: str, expected: list[str]
) -> None:
    fs.load(f"{data}/{url}")
    assert names(fs) == expected


def test_load_fetches_everything_once_and_reports_it(fs: millrace.MillraceFileSystem, data: Path) -> None:
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


def test_two_loads_at_once_count_each_byte_once(
    make_fs: Callable[..., millrace.MillraceFileSystem], data: Path
) -> None:
    fs = make_fs()
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: fs.load(f"{data}/train"), range(2)))
    assert [each.done_objects for each in done] == [4, 4]
    assert sum(each.fetched_bytes for each in done) == fs.cache_counters()["origin_bytes"]


def test_load_completes_partly_cached_object(fs: millrace.MillraceFileSystem, data: Path) -> None:
    with fs.open(f"{data}/train/b.bin") as file:
        file.seek(9 * MB)
        file.read(10)
    before = fs.cache_counters()["origin_bytes"]
    assert 0 < before < 20 * MB
    done = fs.load(f"{data}/train/b.bin")
    assert done.fetched_bytes == 20 * MB - before
    assert fs.cache_counters()["origin_bytes"] == 20 * MB


@pytest.mark.parametrize("url", ["nothing", "nothing/*.bin", "train/*.parquet"])
def test_load_of_missing_path_raises_before_any_fetch(fs: millrace.MillraceFileSystem, data: Path, url: str) -> None:
    with pytest.raises(ObjectNotFoundError, match=f"{data}/nothing|matches nothing"):
        fs.load([f"{data}/train", f"{data}/{url}"])
    assert fs.cache_counters()["origin_bytes"] == 0


def test_load_into_full_cache_raises_with_the_stored_bytes(
    make_fs: Callable[..., millrace.MillraceFileSystem], data: Path
) -> None:
    fs = make_fs(capacity=10 * MB)
    with pytest.raises(DiskFullError, match=r"is full: \d of 4 objects, [0-9.]+ MB of 23\.0 MB, were loaded: enlarge"):
        fs.load(f"{data}/train")
    assert 0 < fs.node.disks()[0][1] <= 10 * MB


def test_load_into_full_quota_raises_an_error_that_names_quotas(
    make_fs: Callable[..., millrace.MillraceFileSystem], data: Path
) -> None:
    fs = make_fs(capacity=100 * MB)
    fs.limit(f"{data}/train", quota=10 * MB)
    with pytest.raises(DiskFullError, match=r"^the cache or a quota in it is full: .* or 'millrace limit', "):
        fs.load(f"{data}/train")


def test_load_into_enlarged_cache_continues(
    make_fs: Callable[..., millrace.MillraceFileSystem], tmp_path: Path
) -> None:
    # Small enough that all blocks that the first load could not store are still held in memory.
    for number in range(6):
        (tmp_path / f"data/{number}").parent.mkdir(exist_ok=True)
        (tmp_path / f"data/{number}").write_bytes(os.urandom(3 * MB if number % 2 else MB // 2))
    fs = make_fs()
    fs.resize(5 * MB)
    with pytest.raises(DiskFullError):
        fs.load(f"{tmp_path}/data")
    fs.resize(50 * MB)
    assert fs.load(f"{tmp_path}/data").done_objects == 6


def test_load_after_origin_error_continues(
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
    # The list of objects may end after the error.
    rest = r" of (4|\d or more) objects are in the cache: start it, then load again to continue with the rest$"
    assert re.search(rest, text)
    assert fs.load(f"{data}/train").done_objects == 4
    assert fs.cache_counters()["origin_bytes"] == 23 * MB + 1005


def test_load_of_changed_object_stores_the_new_version(
    make_fs: Callable[..., millrace.MillraceFileSystem], data: Path
) -> None:
    fs = make_fs(consistency="immutable")
    fs.find(str(data))  # remembers the versions
    (data / "train/b.bin").write_bytes(os.urandom(9 * MB))
    (data / "train/a.bin").unlink()
    with pytest.raises(ObjectNotFoundError, match=r"1 of 4 objects were deleted after they were listed.*a\.bin"):
        fs.load(f"{data}/train")
    assert names(fs, data / "train") == ["b.bin", "c.txt", "d.bin"]
    assert fs.cat_file(f"{data}/train/b.bin") == (data / "train/b.bin").read_bytes()


def test_read_as_origin_after_an_overwrite_fails_once(
    make_fs: Callable[..., millrace.MillraceFileSystem], data: Path
) -> None:
    path = data / "train/b.bin"
    origin = make_fs(consistency="1h").as_origin()
    assert bytes(origin.read(str(path), 0, 9)) == path.read_bytes()[:9]
    path.write_bytes(os.urandom(20 * MB))
    with pytest.raises(ObjectChangedError):
        origin.read(str(path), 19 * MB, 20 * MB)
    assert bytes(origin.read(str(path), 19 * MB, 20 * MB)) == path.read_bytes()[19 * MB :]


def test_verify_finds_a_flipped_byte_and_mends_it(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.load(f"{data}/train")
    assert fs.load(f"{data}/train", verify=True).bad_blocks == 0
    (disk,) = fs.node.open_disks
    flipped = 0
    for path in disk.store.directory.rglob("*"):
        if path.is_file() and path.stat().st_size > 15 * MB and "index" not in path.parts:
            flip(path, 5 * MB)
            flipped += 1
    assert flipped == 1
    done = fs.load(f"{data}/train", verify=True)
    # The background verification of a file that was modified may find the block before the load does.
    assert done.bad_blocks <= 1
    assert fs.cache_counters()["corrupt_blocks"] == 1
    assert 0 < done.fetched_bytes <= 4 << 20
    close_nodes()
    assert fs.cat_file(f"{data}/train/b.bin") == (data / "train/b.bin").read_bytes()


def test_load_after_interrupt_continues(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = threading.Event()
    real = ObjectStoreOrigin.read

    def read(self: ObjectStoreOrigin, key: str, *args: Any, **kwargs: Any) -> Any:
        if key.endswith("b.bin"):
            hold.wait(120)
        return real(self, key, *args, **kwargs)

    def interrupt(state: LoadProgress) -> None:
        if state.done_objects == 3 and not hold.is_set():
            hold.set()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStoreOrigin, "read", read)
        with pytest.raises(KeyboardInterrupt):
            fs.load(f"{data}/train", progress=interrupt)
    # The load waits a second for them.
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith("millrace-load")])
    assert fs.load(f"{data}/train").done_objects == 4
    assert fs.cache_counters()["origin_bytes"] == 23 * MB + 1005


def test_two_concurrent_loads_fetch_each_byte_once(fs: millrace.MillraceFileSystem, data: Path) -> None:
    threads = [threading.Thread(target=fs.load, args=(str(data),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fs.cache_counters()["origin_bytes"] == 25 * MB + 1005


# --- cached objects ---------------------------------------------------------------------------------------


def test_cached_after_loads_and_reads_returns_each_object_with_its_cached_bytes(
    fs: millrace.MillraceFileSystem, data: Path
) -> None:
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


def test_free_removes_objects_below_and_readers_continue(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.load(str(data))
    reader = fs.open_input_file(f"{data}/train/b.bin")
    assert fs.free(f"{data}/train") == 23 * MB + 1005
    assert names(fs) == ["e.bin"]
    assert reader.read() == (data / "train/b.bin").read_bytes()
    assert fs.free([f"{data}/train", f"{data}/none"]) == 0
    before = fs.cache_counters()["origin_bytes"]
    fs.cat_file(f"{data}/train/c.txt")
    assert fs.cache_counters()["origin_bytes"] == before + 1000


def test_free_releases_the_space_of_small_objects(fs: millrace.MillraceFileSystem, data: Path, tmp_path: Path) -> None:
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


def test_pinned_object_is_not_freed(fs: millrace.MillraceFileSystem, data: Path) -> None:
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


def test_object_that_is_pinned_while_others_are_freed_is_kept(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.load(str(data))
    [disk] = fs.node.open_disks
    remove = disk.remove

    def pin_then_remove(object_id: bytes) -> None:
        fs.pin(str(data))
        remove(object_id)

    monkeypatch.setattr(disk, "remove", pin_then_remove)
    before = len(names(fs))
    assert catalog.free(fs.node, None).objects == 1
    assert len(names(fs)) == before - 1


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
    assert (outer.used_bytes, outer.objects) == (2 * MB, 1)  # objects below the inner one count there
    assert (inner.quota_bytes, inner.used_bytes, inner.objects) == (60 * MB, 23 * MB + 1005, 4)
    # Each disk gets its share.
    for disk in fs.node.open_disks:
        applied = disk.rules.current().rule_for("file", f"{data}/x")
        assert applied.quota is not None
        assert applied.quota.nbytes == 1_500 * MB
    fs.limit(str(data))
    fs.limit(f"{data}/train")
    assert catalog.placed_rules(fs.node) == []


@pytest.mark.parametrize("options", [{"quota": "much"}, {"ttl": "long"}, {"ttl": 0}, {"quota": -1}])
def test_invalid_limit_raises(fs: millrace.MillraceFileSystem, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        fs.limit("/data", **options)


def test_rules_hold_on_a_disk_that_was_replaced_since(
    make_fs: Callable[..., millrace.MillraceFileSystem], data: Path, tmp_path: Path
) -> None:
    disks = [str(tmp_path / "one"), str(tmp_path / "two")]
    fs = make_fs(cache_dir=disks)
    fs.pin(str(data / "train"))
    fs.limit(str(data), quota=200 * MB, ttl="1h")
    fs.resize(300 * MB)
    before = catalog.placed_rules(fs.node)
    close_nodes()
    shutil.rmtree(disks[1])
    fs = make_fs(cache_dir=disks)
    assert catalog.placed_rules(fs.node) == before
    assert [capacity for _, _, capacity in fs.node.disks()] == [300 * MB] * 2
    fs.load(str(data / "train"))
    assert fs.free(str(data)) == 0
    fs.unpin(str(data))
    close_nodes()
    assert not any(rule.pinned for rule in catalog.placed_rules(make_fs(cache_dir=disks).node))


def test_resized_capacity_stays_until_it_is_reset(
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
    make_fs().node.disks()  # without an explicit option there is no warning
    assert caplog.text == ""
    other = make_fs(capacity="40MB")
    other.resize(None)
    assert other.node.disks()[0][2] == 40 * MB
    with pytest.raises(ConfigurationError, match="capacity"):
        fs.resize("many")


def test_resize_to_less_evicts_all_but_pinned_objects(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.pin(f"{data}/train/a.bin")
    fs.load(f"{data}/train")
    fs.resize("10MB")
    assert fs.node.disks()[0][1] <= 10 * MB
    assert "a.bin" in names(fs)
    fs.resize("1MB")
    assert "a.bin" in names(fs)


def test_local_folder_whose_removal_is_interrupted_is_removed_at_once(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An impatient second Ctrl-C. Its links would keep the objects on the disk as long as this process runs."""
    remove, calls = shutil.rmtree, list[str]()

    def interrupted(path: str, *arguments: Any, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), fs.local_folder(f"{data}/train") as folder:
        assert os.path.exists(f"{folder}/a.bin")
    assert not os.path.exists(folder)
    assert len(calls) == 2
