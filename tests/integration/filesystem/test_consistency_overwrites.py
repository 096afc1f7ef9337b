"""Objects that are overwritten in the middle of a read: the reader gets one version, or an error, and never a mix.

Every 4 KiB of an object contain their version. Several threads read in every way. Others overwrite past the
cache. A reader of the first piece of an object often waits for the next overwrite, or makes one, before it reads the
second piece.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.azurite import AzuriteServer
from tests.support.versioned import PAGE, assert_store_holds_only, content, versions_in

import millrace
from millrace.errors import ObjectChangedError
from millrace.origin import Origin, open_origin
from millrace.testing.s3 import S3Server

TRIES = 1000
ENOUGH_REFUSED = 5
_PATIENCE_SECONDS = 120.0
BLOCK = 4 << 20
# In a segment, in a file of one block, and in files of two: only there a read takes more than one request.
SIZES = [16 * PAGE, BLOCK // 2, *([BLOCK + 16 * PAGE] * 3)]


@dataclass
class Overwritten:
    """Objects at an origin that are overwritten again and again."""

    origin: Origin
    keys: list[str]
    pause_seconds: float
    contents: dict[str, bytes] = field(default_factory=dict)
    """By version, as the origin names it."""
    written: int = 0
    turns: list[threading.Lock] = field(default_factory=lambda: [threading.Lock() for _ in SIZES])
    changed: threading.Condition = field(default_factory=threading.Condition)

    def overwrite(self, number: int) -> None:
        """Make a new version of one object."""
        with self.changed:
            self.written += 1
            version = self.written
        data = content(version, SIZES[number])
        with self.turns[number]:  # so that what the origin calls the newest version is this one
            self.origin.put(self.keys[number], data)
            self.contents[self.origin.head(self.keys[number]).version] = data
        with self.changed:
            self.changed.notify_all()

    def run(self, numbers: list[int], stop: threading.Event) -> None:
        """Overwrite these one after the other until stopped."""
        while not stop.is_set():
            for number in numbers:
                self.overwrite(number)
                if stop.wait(self.pause_seconds):
                    return

    def wait_for_another(self, seconds: float) -> None:
        """Until something was overwritten, or for so long."""
        with self.changed:
            self.changed.wait(seconds)


@dataclass
class Reader:
    """Reads one object after the other, each in another way. Every way gives pieces and where they begin."""

    fs: millrace.MillraceFileSystem
    overwritten: Overwritten
    chance: random.Random
    right: int = 0
    refused: int = 0
    mixed: list[tuple[str, str, set[int]]] = field(default_factory=list)

    def read(self, tries: Iterator[int], go_on: Callable[[int], bool]) -> None:
        """Take one number of `tries` after the other, and read once for each, as long as `go_on` of it."""
        ways: list[Callable[[str, int], Iterator[tuple[int, Any]]]] = [
            self._by_file, self._by_native_file, self._by_stream, self._by_ranges, self._whole, self._by_origin,
        ]  # fmt: skip
        for number in tries:
            if not go_on(number):
                return
            place = self.chance.randrange(len(SIZES))
            key, size = self.overwritten.keys[place], SIZES[place]
            way = ways[number % len(ways)]
            seen: set[int] = set()
            try:
                for start, data in way(key, size):
                    seen |= versions_in(data, start)
            except ObjectChangedError:
                self.refused += 1
            else:
                self.right += 1
            if len(seen) > 1:  # also of a read that was refused in the end
                self.mixed.append((way.__name__, key, seen))

    def _in_between(self, key: str) -> None:
        what = self.chance.random()
        if what < 0.1:
            self.overwritten.overwrite(self.overwritten.keys.index(key))
        elif what < 0.25:
            self.overwritten.wait_for_another(0.3)

    def _by_file(self, key: str, size: int) -> Iterator[tuple[int, Any]]:
        with self.fs.open(key, "rb") as file:
            yield 0, file.read(PAGE)
            self._in_between(key)
            for start in (size - PAGE, self.chance.randrange(size // PAGE) * PAGE):
                file.seek(start)
                yield start, file.read(PAGE)

    def _by_native_file(self, key: str, size: int) -> Iterator[tuple[int, Any]]:
        with self.fs.open_input_file(key) as file:
            yield size - PAGE, file.read_at(PAGE, size - PAGE)
            self._in_between(key)
            yield 0, file.read_at(4 * PAGE, 0)

    def _by_stream(self, key: str, size: int) -> Iterator[tuple[int, Any]]:
        start = 0
        with self.fs.open_input_stream(key) as file:
            while data := file.read(256 * PAGE):
                yield start, data
                if not start:
                    self._in_between(key)
                start += len(data)
        assert start == size

    def _by_ranges(self, key: str, size: int) -> Iterator[tuple[int, Any]]:
        spans = [(size - PAGE, size), (0, PAGE), (size // 2 // PAGE * PAGE, size)]
        starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
        yield from zip(starts, self.fs.cat_ranges([key] * 3, starts, stops, on_error="raise"), strict=True)

    def _whole(self, key: str, size: int) -> Iterator[tuple[int, Any]]:
        data = self.fs.cat_file(key)
        assert len(data) == size
        yield 0, data

    def _by_origin(self, key: str, size: int) -> Iterator[tuple[int, Any]]:
        origin = self.fs.as_origin()
        info = origin.head(key)
        for start in (0, size - PAGE):
            yield start, origin.read(key, start, start + PAGE, version=info.version)
            self._in_between(key)


def storm(overwritten: Overwritten, make: Callable[..., millrace.MillraceFileSystem], tries: int = TRIES) -> None:
    """Read and overwrite at the same time; then see that nothing wrong was kept.

    The scheduler decides how often an overwrite is in the middle of a read: after `tries` it continues until enough were.
    """
    for number in range(len(SIZES)):
        overwritten.overwrite(number)
    # Some send a request before every open, and so begin with the newest version; others use outdated metadata for an hour.
    readers = [
        Reader(make(consistency="1h" if number == 3 else "always"), overwritten, random.Random(number))
        for number in range(4)
    ]
    stop = threading.Event()
    numbers = itertools.count()
    deadline = time.monotonic() + _PATIENCE_SECONDS

    def go_on(number: int) -> bool:
        if number < tries:
            return True
        return sum(reader.refused for reader in readers) < ENOUGH_REFUSED and time.monotonic() < deadline

    with ThreadPoolExecutor(len(readers) + 2) as pool:
        writers = [pool.submit(overwritten.run, mine, stop) for mine in ([0, 2, 4], [3, 1])]
        try:
            for reading in [pool.submit(reader.read, numbers, go_on) for reader in readers]:
                reading.result()
        finally:
            stop.set()
        for writing in writers:
            writing.result()
    assert [reader.mixed for reader in readers] == [[]] * len(readers)
    right, refused = (sum(getattr(reader, name) for reader in readers) for name in ("right", "refused"))
    assert right + refused >= tries
    assert right > 0
    assert refused >= ENOUGH_REFUSED  # overwrites did fall into the middle of reads
    # The bytes stored under a version are of that version.
    fs = make(consistency="always")
    for key in overwritten.keys:
        fs.cat_file(key)
    assert assert_store_holds_only(fs, overwritten.contents) >= len(overwritten.keys)


@pytest.mark.slow
def test_read_of_s3_object_is_of_one_version(bucket: str, s3: S3Server, s3_options: dict[str, Any]) -> None:
    def make(**options: Any) -> millrace.MillraceFileSystem:
        return millrace.filesystem("s3", **s3_options, **options)

    keys = [f"{bucket}/{number}.bin" for number in range(len(SIZES))]
    storm(Overwritten(open_origin("s3", s3.target_options), keys, pause_seconds=0.02), make)


@pytest.mark.slow
@pytest.mark.azurite
def test_read_of_azure_blob_is_of_one_version(azurite: AzuriteServer, container: str, tmp_path: Path) -> None:
    def make(**options: Any) -> millrace.MillraceFileSystem:
        given = {"cache_dir": str(tmp_path / "cache"), "min_free": 0, **options}
        return millrace.filesystem("az", target_options=azurite.target_options, **given)

    keys = [f"{container}/{number}.bin" for number in range(len(SIZES))]
    storm(Overwritten(open_origin("az", azurite.target_options), keys, pause_seconds=0.02), make, tries=TRIES // 4)


@pytest.mark.slow
def test_read_of_local_file_is_of_one_version(tmp_path: Path) -> None:
    """Files are replaced by a rename, as required for files that others read meanwhile."""

    def make(**options: Any) -> millrace.MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, **options)

    os.mkdir(tmp_path / "data")
    keys = [f"{tmp_path}/data/{number}.bin" for number in range(len(SIZES))]
    # Not faster than the clock of the file system: of the same size and time, in a node that is used again, is the same.
    storm(Overwritten(open_origin("file"), keys, pause_seconds=0.02), make)


def test_read_after_overwrite_gets_the_new_version(bucket: str, s3: S3Server, s3_options: dict[str, Any]) -> None:
    """A refused reader only needs to open again, with any freshness: it does not get the old description twice."""
    origin, key, size = open_origin("s3", s3.target_options), f"{bucket}/x.bin", 2 * BLOCK
    fs = millrace.filesystem("s3", consistency="immutable", **s3_options)
    for version in range(1, 6):
        origin.put(key, content(2 * version, size))
        fs.invalidate_cache(key)
        file = fs.open(key, "rb")
        assert versions_in(file.read(PAGE)) == {2 * version}
        origin.put(key, content(2 * version + 1, size))
        file.seek(BLOCK)
        with pytest.raises(ObjectChangedError, match="open it again"):
            file.read(PAGE)
        # This discards the old version. Neither this file nor any other returns it again.
        file.seek(0)
        with pytest.raises(ObjectChangedError, match="open it again"):
            file.read(PAGE)
        file.close()
        assert versions_in(fs.cat_file(key)) == {2 * version + 1}
