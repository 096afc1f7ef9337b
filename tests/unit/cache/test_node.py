"""The cache of a process: what one takes over from another, and how its open readers continue."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from tests.support.computed import ComputedOrigin

from millrace.cache.counters import Counters
from millrace.cache.metadata.metadata import ORIGIN_METADATA
from millrace.cache.node import CacheNode, cache_node, close_nodes, open_node, store_directory
from millrace.cache.reading.fetching import DirectSource
from millrace.config import CacheOptions, resolve
from millrace.events import Event
from millrace.origin import ObjectInfo, Origin
from millrace.store.records import BLOCK_BYTES
from millrace.store.signals import METADATA_SINCE


class Sources:
    """Makes sources of missing blocks, and counts them."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, origin: Origin, info: ObjectInfo, counters: Counters | None) -> DirectSource:
        self.made += 1
        return DirectSource(origin, info, counters)


def options_of(*directories: Path) -> CacheOptions:
    return resolve({"cache_dir": [str(path) for path in directories], "min_free": 0}, environ={}, file={})


def open_again(options: CacheOptions, sources: Sources) -> CacheNode:
    return open_node(
        options, source=sources, metadata_source=ORIGIN_METADATA, reopen=lambda: open_again(options, sources)
    )


def test_reader_of_a_removed_object_continues_through_the_sources_of_its_node(tmp_path: Path) -> None:
    origin, sources = ComputedOrigin({"b/k": 3 * BLOCK_BYTES}), Sources()
    node, info = CacheNode(options_of(tmp_path), source=sources), origin.head("b/k")
    copies = node.open_disks[0].copies

    def still_a_copy(object_id: bytes, size: int) -> bool:
        return False

    node.distinguish_copies(still_a_copy)
    with contextlib.closing(node.open_reader(origin, info)) as reader:
        reader.read(0, 10)
        node.discard(origin, info)
        for block in (1, 2):
            start, stop = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
            assert bytes(reader.read(start, stop)) == bytes(origin.expected("b/k", start, stop))
    assert sources.made == 2  # of the reader, and of the one that continued
    assert copies.still_a_copy is still_a_copy
    node.close()


def test_node_that_is_opened_again_reads_through_its_new_sources(tmp_path: Path) -> None:
    origin, first, second = ComputedOrigin({"b/k": 2 * BLOCK_BYTES}), Sources(), Sources()
    options, info = options_of(tmp_path), origin.head("b/k")
    earlier = open_again(options, first)
    with contextlib.closing(earlier.open_reader(origin, info)) as open_before:
        later = open_again(options, second)
        assert cache_node(options) is later
        with contextlib.closing(later.open_reader(origin, info)) as reader:
            assert bytes(reader.read(0, BLOCK_BYTES)) == bytes(origin.expected("b/k", 0, BLOCK_BYTES))
        stop = 2 * BLOCK_BYTES
        assert bytes(open_before.read(0, stop)) == bytes(origin.expected("b/k", 0, stop))
    assert (first.made, second.made) == (1, 1)
    assert origin.bytes_read == stop  # both have the same disk


def test_node_that_is_opened_again_takes_over_disks_threads_and_failures(tmp_path: Path, events: list[Event]) -> None:
    (tmp_path / "file").touch()
    options = options_of(tmp_path / "disk", tmp_path / "file")
    earlier = open_again(options, Sources())
    later = open_again(options, Sources())
    assert later.all_disks is earlier.all_disks
    assert later._threads is earlier._threads
    assert [event.subject for event in events if event.name == "cache.disk.failed"] == [str(tmp_path / "file")]


@pytest.mark.parametrize("opened", [1, 3])
def test_node_without_a_usable_disk_has_the_same_error_when_it_is_opened_again(tmp_path: Path, opened: int) -> None:
    (tmp_path / "file").touch()
    for _ in range(opened):
        node = open_again(options_of(tmp_path / "file"), Sources())
    assert str(tmp_path / "file") in str(node.unusable())


def test_writes_by_a_process_that_cannot_expire_metadata_report_it_once_and_expire_it_when_it_can(
    tmp_path: Path, events: list[Event]
) -> None:
    origin = ComputedOrigin({"b/k": 10})
    CacheNode(options_of(tmp_path)).close()
    close_nodes()
    folder = store_directory(tmp_path)
    folder.rename(tmp_path / "aside")
    folder.write_bytes(b"")  # no directory, so neither opening nor expiring is possible
    node = CacheNode(options_of(tmp_path))
    for _ in range(3):
        node.metadata.invalidate(origin, "b/k")
    details = [event.detail for event in events if event.name == "cache.disk.failed"]
    assert [detail.partition(":")[0] for detail in details] == [
        "no caching in this directory",
        "other processes may use old metadata in this directory",
    ]
    folder.unlink()
    (tmp_path / "aside").rename(folder)
    before = time.time()
    (disk,) = CacheNode(options_of(tmp_path)).open_disks
    assert disk.signals.times[METADATA_SINCE] >= before


def test_write_with_a_cache_directory_that_cannot_be_looked_at_raises_nothing(
    tmp_path: Path, events: list[Event]
) -> None:
    node = CacheNode(options_of(tmp_path / ("n" * 300)))
    node.metadata.invalidate(ComputedOrigin({"b/k": 10}), "b/k")
    assert any("other processes may use old metadata" in event.detail for event in events)
