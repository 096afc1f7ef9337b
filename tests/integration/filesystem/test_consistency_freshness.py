"""The freshness of metadata: requests counted in front of a real S3 server, by processes whose clock is set."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.asked_processes import AskedProcess
from tests.support.interrupts import interrupted_inside
from tests.support.versioned import PAGE, content, versions_in
from tests.support.waiting import wait_until

import millrace
from millrace.errors import ConfigurationError
from millrace.origin import Origin, open_origin
from millrace.origin.obstore_library import obstore_library
from millrace.origin.store_access import interruptible
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

# In one segment; in a file of its own, of two blocks.
SIZES = {"small.bin": 4 * PAGE, "large.bin": (4 << 20) + 4 * PAGE}


@pytest.fixture
def options(s3: S3Server, region: EmulatedRegion, s3_options: dict[str, Any]) -> dict[str, Any]:
    return {**s3_options, "target_options": {**s3.target_options, "endpoint_url": region.endpoint_url}}


@pytest.fixture
def start(tmp_path: Path, options: dict[str, Any]) -> Iterator[Callable[..., AskedProcess]]:
    started: list[AskedProcess] = []
    now = time.time()

    def start(**more: Any) -> AskedProcess:
        started.append(AskedProcess(tmp_path / f"reader-{len(started)}.log", {**options, **more}, clock=now))
        return started[-1]

    yield start
    for reader in started:
        reader.stop()


def asked(region: EmulatedRegion) -> int:
    """Requests since the last call."""
    requests = region.stats().requests
    region.reset()
    return requests


def put(origin: Origin, bucket: str, version: int) -> None:
    for name, size in SIZES.items():
        origin.put(f"{bucket}/d/{name}", content(version, size))


def versions(reader: AskedProcess, key: str) -> set[int]:
    """The versions that the three ways to read an object give."""
    return {version for way in ("cat", "open", "native") for version in versions_in(reader.read(key, way))}


def see(reader: AskedProcess, bucket: str) -> tuple[set[int], int]:
    """The versions that all ways to read give, and how many objects are listed."""
    seen = {version for name in SIZES for version in versions(reader, f"{bucket}/d/{name}")}
    names = reader.ask("ls", f"{bucket}/d")
    found = reader.ask("find", f"{bucket}/d")
    assert names == sorted(found)
    for name in names:
        assert reader.ask("info", name) == found[name]
    return seen, len(names)


@pytest.mark.slow
@pytest.mark.parametrize("consistency", [None, "60s"])  # which is also the default
def test_metadata_is_fresh_for_sixty_seconds(
    bucket: str, origin: Origin, region: EmulatedRegion, start: Callable[..., AskedProcess], consistency: str | None
) -> None:
    put(origin, bucket, 1)
    reader = start(**({} if consistency is None else {"consistency": consistency}))
    assert see(reader, bucket) == ({1}, 2)
    put(origin, bucket, 2)
    origin.put(f"{bucket}/d/new.bin", content(2, PAGE))
    asked(region)
    reader.advance(50)
    assert see(reader, bucket) == ({1}, 2)
    assert asked(region) == 0
    reader.advance(11)
    assert see(reader, bucket) == ({2}, 3)
    assert 0 < asked(region) < 12
    # From then on it is fresh for the same time again, also for processes that start now.
    put(origin, bucket, 3)
    reader.advance(45)
    assert see(reader, bucket) == ({2}, 3)
    assert asked(region) == 0
    origin.delete([f"{bucket}/d/new.bin"])
    assert reader.ask("exists", f"{bucket}/d/new.bin")
    reader.advance(16)
    assert not reader.ask("exists", f"{bucket}/d/new.bin")
    assert see(reader, bucket) == ({3}, 2)


def test_missing_object_is_never_cached(bucket: str, origin: Origin, start: Callable[..., AskedProcess]) -> None:
    """A new object is found by its name at once, despite cached listings; listings contain it after they expire."""
    put(origin, bucket, 1)
    reader, new = start(consistency="60s"), f"{bucket}/d/new.bin"
    assert see(reader, bucket) == ({1}, 2)
    for _ in range(2):
        assert not reader.ask("exists", new)
    origin.put(new, content(7, PAGE))
    assert reader.ask("exists", new)
    assert versions(reader, new) == {7}
    reader.advance(61)
    assert reader.ask("ls", f"{bucket}/d") == sorted([new, *(f"{bucket}/d/{name}" for name in SIZES)])


@pytest.mark.slow
def test_reader_with_consistency_always_sees_every_change(
    bucket: str, origin: Origin, start: Callable[..., AskedProcess]
) -> None:
    reader = start(consistency="always")
    for version in range(1, 7):
        put(origin, bucket, version)
        assert see(reader, bucket) == ({version}, 2)
        origin.put(f"{bucket}/d/new.bin", b"1" * version)
        assert reader.ask("exists", f"{bucket}/d/new.bin")
        assert len(reader.ask("ls", f"{bucket}/d")) == 3
        origin.delete([f"{bucket}/d/new.bin"])
        assert not reader.ask("exists", f"{bucket}/d/new.bin")
        assert len(reader.ask("ls", f"{bucket}/d")) == 2


@pytest.mark.slow
def test_hot_open_with_immutable_sends_no_request(
    bucket: str, origin: Origin, region: EmulatedRegion, start: Callable[..., AskedProcess]
) -> None:
    put(origin, bucket, 1)
    reader = start(consistency="immutable")
    assert see(reader, bucket) == ({1}, 2)
    put(origin, bucket, 2)
    asked(region)
    for years in (0, 1, 10):
        reader.advance(years * 365 * 86_400)
        assert see(reader, bucket) == ({1}, 2)
        assert see(start(consistency="immutable"), bucket) == ({1}, 2)
    origin.delete([f"{bucket}/d/{name}" for name in SIZES])
    assert see(reader, bucket) == ({1}, 2)
    assert asked(region) == 0
    # It sends no request without an invalidation; a file system with less freshness, over the same cache, does.
    assert start(consistency="always").ask("exists", f"{bucket}/d/small.bin") is False


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["always", "60s", "immutable"])
def test_own_writes_are_seen_at_once(
    bucket: str, origin: Origin, start: Callable[..., AskedProcess], consistency: str
) -> None:
    """By the process that writes and by all others over the same cache, with any freshness."""
    put(origin, bucket, 1)
    readers = [start(consistency=consistency), start(consistency=consistency), start(consistency="immutable")]
    for reader in readers[:2]:
        assert see(reader, bucket) == ({1}, 2)
    for version, writer in enumerate(readers, 2):
        for name, size in SIZES.items():
            writer.write(f"{bucket}/d/{name}", content(version, size))
        assert [see(reader, bucket) for reader in readers] == [({version}, 2)] * 3
    readers[0].ask("rm", f"{bucket}/d/small.bin")
    for reader in readers:
        assert not reader.ask("exists", f"{bucket}/d/small.bin")
        assert reader.ask("ls", f"{bucket}/d") == [f"{bucket}/d/large.bin"]


def test_short_consistency_expires_on_the_real_clock(bucket: str, s3: S3Server, s3_options: dict[str, Any]) -> None:
    """The same with the real clock: metadata is requested again after it expires."""
    origin, key = open_origin("s3", s3.target_options), f"{bucket}/x.bin"
    origin.put(key, content(1, PAGE))
    fs = millrace.filesystem("s3", consistency="2s", **s3_options)
    before = time.time()
    assert versions_in(fs.cat_file(key)) == {1}
    origin.put(key, content(2, PAGE))
    while (found := versions_in(fs.cat_file(key))) == {1}:
        assert time.time() < before + 60
        time.sleep(0.05)
    assert found == {2}
    # Requested after `before`, it could not expire earlier.
    assert time.time() - before >= 2


@pytest.mark.parametrize("consistency", ["soon", "-1s", "60y", "", math.nan])
def test_invalid_consistency_is_refused(options: dict[str, Any], consistency: object) -> None:
    with pytest.raises(ConfigurationError, match="consistency"):
        millrace.filesystem("s3", **{**options, "consistency": consistency})


@pytest.mark.parametrize(
    ("nbytes", "waits_in"), [(PAGE, interruptible), (17 << 20, threading.Thread.join)], ids=["one request", "parts"]
)
def test_write_that_continues_after_ctrl_c_is_seen_when_it_has_ended(
    bucket: str,
    s3_options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    nbytes: int,
    waits_in: Callable[..., object],
) -> None:
    fs = millrace.filesystem("s3", **s3_options, consistency="immutable")
    key, library = f"{bucket}/key", obstore_library()
    begun, continues = threading.Event(), threading.Event()
    put = library.put

    def put_late(client: Any, path: str, data: Any, **options: Any) -> Any:
        data = data if isinstance(data, memoryview) else iter(list(data))
        begun.set()
        assert continues.wait(300)
        return put(client, path, data, **options)

    fs.pipe_file(key, b"old")
    monkeypatch.setattr(library, "put", put_late)
    while not begun.is_set():  # an interrupt before the request begins ends the write
        with pytest.raises(KeyboardInterrupt):
            interrupted_inside(waits_in, lambda: fs.pipe_file(key, bytes(nbytes)))
    assert fs.info(key)["size"] == 3  # cached from now on
    continues.set()
    wait_until(lambda: fs.info(key)["size"] == nbytes)
