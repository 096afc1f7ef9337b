"""Footers of Parquet files that the cache had no room for."""

import io
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.clocks import Clock
from tests.support.indexes import fail_on
from tests.support.origins import MemoryOrigin

from millrace.cache.footers import MOST_TAIL_BYTES, TAIL_BYTES, Footers, parquet_tail
from millrace.cache.node import CacheNode, cache_node, close_nodes
from millrace.config import resolve
from millrace.filesystem.files import CachedFile
from millrace.store.index import Index

pytestmark = pytest.mark.usefixtures("no_maintenance")


def ending(footer: int, body: int = 200_000) -> bytes:
    return os.urandom(body) + os.urandom(footer) + struct.pack("<I", footer) + b"PAR1"


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (ending(1000), TAIL_BYTES),
        (ending(1000, body=10), 1018),
        (ending(100_000), 100_008),
        (ending(MOST_TAIL_BYTES), None),
        (ending(100_000)[-65536:], None),  # not all of the footer
        (b"PAR1", None),
        (b"", None),
        (os.urandom(1000) + b"PAR2", None),
    ],
)
def test_parquet_tail_returns_the_part_to_keep(data: bytes, kept: int | None) -> None:
    found = parquet_tail(data, 5_000_000)
    if kept is None:
        assert found is None
    else:
        assert found == (5_000_000 + len(data) - kept, data[-kept:])


def test_footer_is_stored_verified_and_dropped(index: Index) -> None:
    footers = Footers(index, capacity_bytes=lambda: 1 << 40, may_grow=lambda _: True, clock=Clock(1e9), report=fail_on)
    data = ending(1000)
    assert footers.get(name(1)) is None
    assert footers.put(name(1), 10, data)
    stop = 10 + len(data)
    assert footers.get(name(1)) == (stop - TAIL_BYTES, data[-TAIL_BYTES:])
    assert footers.read(name(1), stop - 8, stop) == data[-8:]
    assert footers.read(name(1), stop - TAIL_BYTES, stop) == data[-TAIL_BYTES:]
    assert footers.read(name(1), stop - TAIL_BYTES - 1, stop) is None
    record = index.tail(name(1))
    assert record is not None
    index.put_tail(name(1), record[:-1] + bytes([record[-1] ^ 1]))
    assert footers.get(name(1)) is None
    assert index.tail(name(1)) is None
    footers.put(name(1), 10, data)
    footers.drop(name(1))
    footers.drop(name(1))
    assert footers.get(name(1)) is None
    assert index.tail_bytes() == 0


def test_ends_stay_inside_their_bound_until_some_are_idle(index: Index) -> None:
    clock = Clock(1e9)
    footers = Footers(index, capacity_bytes=lambda: 64 << 20, may_grow=lambda _: True, clock=clock, report=fail_on)
    data = ending(1000)
    kept = [number for number in range(40) if footers.put(name(number), 0, data)]
    assert kept == list(range(15))  # of 64 KiB and a header, in 1 MiB
    for _ in range(3):
        clock.now += 5 * 3600
        assert all(footers.get(name(number)) for number in kept)  # which notes the use
        assert not footers.put(name(99), 0, data)
    clock.now += 7 * 3600
    assert footers.get(name(3)) is not None
    assert footers.put(name(99), 0, data)
    assert footers.get(name(3)) is not None
    assert index.tail_bytes() <= 1 << 20


def test_footer_is_not_stored_on_full_disk(index: Index) -> None:
    footers = Footers(index, capacity_bytes=lambda: 1 << 40, may_grow=lambda _: False, clock=Clock(1e9), report=fail_on)
    assert not footers.put(name(1), 0, ending(1000))


@pytest.fixture
def make_node(tmp_path: Path) -> Callable[[], CacheNode]:
    def make() -> CacheNode:
        """A node whose memory is empty and whose disk takes no object."""
        close_nodes()
        options = {"cache_dir": str(tmp_path / "cache"), "min_free": 0, "capacity": "64MiB"}
        node = cache_node(resolve(options, environ={}, file={}))
        for disk in node._disks:
            disk.store.space.shortage = lambda nbytes: nbytes  # type: ignore[method-assign]
        return node

    return make


def test_footers_of_files_that_are_not_kept_cost_one_request(make_node: Callable[[], CacheNode]) -> None:
    origin = MemoryOrigin()
    out = io.BytesIO()
    table = pa.table({"a": np.random.default_rng(0).random(1_500_000)})
    pq.write_table(table, out, row_group_size=100_000)
    origin.put("b/x.parquet", out.getvalue())
    info = origin.head("b/x.parquet")

    def read(rows: bool) -> pq.FileMetaData:
        node = make_node()
        reader = node.open_reader(origin, info)
        with CachedFile(reader, path="x", sequential=False) as file, pq.ParquetFile(file) as parquet:
            if rows:
                assert parquet.read() == table
            return parquet.metadata

    first = read(rows=False)
    requests = origin.count("read")
    assert requests == 1
    assert read(rows=False) == first
    assert origin.count("read") == requests
    assert read(rows=True) == first  # bytes before the end still come from the origin
    assert origin.count("read") > requests
    origin.put("b/x.parquet", b"other")
    node = make_node()
    assert node._disks[0].store.index.tail_bytes() > 0
    node.discard(origin, info)
    assert node._disks[0].store.index.tail_bytes() == 0
