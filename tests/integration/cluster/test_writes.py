"""A write through one of three nodes is visible to the next read on every node, whatever it had cached.

Three real nodes over a real S3 server; on each two processes that read, one with a freshness of a minute and one with
`immutable`. The test itself writes, on each of the nodes' machines.
"""

from __future__ import annotations

import base64
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from tests.support.asked_processes import AskedError, AskedProcess
from tests.support.local_cluster import LocalCluster, LocalNode
from tests.support.versioned import PAGE, content, versions_in

import millrace
from millrace.cluster.listings import metadata_id
from millrace.cluster.membership import View
from millrace.cluster.placement import Placement
from millrace.errors import OriginUnavailableError
from millrace.origin import Origin
from millrace.testing.s3 import S3Server

MB = 1 << 20
BELIEFS = ("60s", "immutable")


@pytest.fixture(scope="module")
def cluster(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("writes")
    with LocalCluster(directory, 3, target_options=s3.target_options, patient=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def readers(cluster: LocalCluster) -> Iterator[list[AskedProcess]]:
    """On node 0, 1 and 2 with one freshness, then with the other."""
    started = [
        AskedProcess(node.directory / f"{freshness}.log", cluster.arguments(node, consistency=freshness), patient=True)
        for freshness in BELIEFS
        for node in cluster.nodes
    ]
    yield started
    for reader in started:
        reader.stop()


@pytest.fixture
def on_node(cluster: LocalCluster, patient_peers: None) -> Callable[..., millrace.MillraceFileSystem]:
    """A file system of this process on a node's machine."""

    def make(number: int, **options: object) -> millrace.MillraceFileSystem:
        return millrace.filesystem("s3", **cluster.arguments(cluster.nodes[number], consistency="60s", **options))

    return make


# --- ways to write --------------------------------------------------------------------------------


def _open(fs: millrace.MillraceFileSystem, key: str, data: bytes, tmp_path: Path) -> None:
    with fs.open(key, "wb") as file:
        file.write(data[:1000])
        file.write(data[1000:])


def _pipe(fs: millrace.MillraceFileSystem, key: str, data: bytes, tmp_path: Path) -> None:
    fs.pipe({key: data})


def _put(fs: millrace.MillraceFileSystem, key: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "local.bin").write_bytes(data)
    fs.put(f"{tmp_path}/local.bin", key)


def _arrow(fs: millrace.MillraceFileSystem, key: str, data: bytes, tmp_path: Path) -> None:
    with fs.open_output_stream(key) as out:
        out.write(data)


def _arrow_in_parts(fs: millrace.MillraceFileSystem, key: str, data: bytes, tmp_path: Path) -> None:
    with fs.open_output_stream(key) as out:
        for number in range(17):  # more than one part has
            out.write(bytes([number]) * MB)
        out.write(data)


def _parquet(fs: millrace.MillraceFileSystem, key: str, data: bytes, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": np.frombuffer(data, np.uint64)}), key, filesystem=fs)


def _pandas(fs: millrace.MillraceFileSystem, key: str, data: bytes, tmp_path: Path) -> None:
    pd.DataFrame({"a": np.frombuffer(data, np.uint64)}).to_parquet(key, filesystem=fs)


def _copy(fs: millrace.MillraceFileSystem, key: str, data: bytes, tmp_path: Path) -> None:
    fs.pipe_file(f"{key}.source", data)
    fs.cp_file(f"{key}.source", key)


def _move(fs: millrace.MillraceFileSystem, key: str, data: bytes, tmp_path: Path) -> None:
    fs.pipe_file(f"{key}.moved", data)
    fs.mv(f"{key}.moved", key)


def _arrow_move(fs: millrace.MillraceFileSystem, key: str, data: bytes, tmp_path: Path) -> None:
    fs.pipe_file(f"{key}.moved", data)
    pafs.FileSystem.move(fs, f"{key}.moved", key)


def _touch(fs: millrace.MillraceFileSystem, key: str, data: bytes, tmp_path: Path) -> None:
    fs.touch(key)


WAYS: dict[str, Callable[[millrace.MillraceFileSystem, str, bytes, Path], None]] = {
    "open": _open,
    "pipe": _pipe,
    "put": _put,
    "pyarrow": _arrow,
    "pyarrow, in parts": _arrow_in_parts,
    "parquet": _parquet,
    "pandas": _pandas,
    "copy": _copy,
    "move": _move,
    "pyarrow's move": _arrow_move,
    "touch": _touch,
}


def everywhere(readers: list[AskedProcess], do: Callable[[AskedProcess], object]) -> list[object]:
    """Have all do the same at a time."""
    with ThreadPoolExecutor(len(readers)) as pool:
        return list(pool.map(do, readers))


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_write_is_visible_on_every_node(
    readers: list[AskedProcess],
    on_node: Callable[..., millrace.MillraceFileSystem],
    origin: Origin,
    bucket: str,
    tmp_path: Path,
    way: str,
) -> None:
    number = list(WAYS).index(way) % 3  # which node is the one that lists for all is of no matter
    keys = [f"{bucket}/d/old.bin", f"{bucket}/d/new.bin"]
    origin.put(keys[0], content(1, 4 * PAGE))
    for _ in range(2):  # from the origin, then from memory
        assert everywhere(readers, lambda reader: reader.read(keys[0])) == [content(1, 4 * PAGE)] * len(readers)
        assert everywhere(readers, lambda reader: reader.ask("ls", f"{bucket}/d")) == [keys[:1]] * len(readers)
    fs = on_node(number)
    for key in keys:
        WAYS[way](fs, key, content(2, 8 * PAGE), tmp_path)
        info = origin.head(key)
        expected = bytes(origin.read(key, 0, info.size))
        assert expected != content(1, 4 * PAGE)
        for how in ("cat", "open", "native") if len(expected) < MB else ("cat",):
            assert everywhere(readers, lambda reader, key=key, how=how: reader.read(key, how)) == (  # type: ignore[misc]
                [expected] * len(readers)
            )
        assert set(everywhere(readers, lambda reader, key=key: reader.ask("info", key))) == {info.version}  # type: ignore[misc]
    there = [f"{bucket}/d/{name}" for name in ("new.bin", "old.bin")]
    there += [f"{key}.source" for key in there] if way == "copy" else []
    assert everywhere(readers, lambda reader: reader.ask("ls", f"{bucket}/d")) == [sorted(there)] * len(readers)


@pytest.mark.slow
def test_removal_is_visible_on_every_node(
    readers: list[AskedProcess], on_node: Callable[..., millrace.MillraceFileSystem], origin: Origin, bucket: str
) -> None:
    names = [f"{bucket}/{directory}/{number}.bin" for directory in ("a", "b", "c") for number in range(4)]
    for name in names:
        origin.put(name, content(1, PAGE))

    def look(reader: AskedProcess) -> tuple[list[str], list[str]]:
        readable = []
        for name in names:
            try:
                assert versions_in(reader.read(name)) == {1}
                readable.append(name)
            except AskedError as error:
                if "ObjectNotFoundError" not in str(error) or reader.ask("exists", name):
                    raise
        return readable, sorted(reader.ask("find", bucket))

    assert everywhere(readers, look) == [(names, names)] * len(readers)
    on_node(0).rm(names[0])
    assert everywhere(readers, look) == [(names[1:], names[1:])] * len(readers)
    on_node(1).rm(f"{bucket}/b", recursive=True)
    left = [*names[1:4], *names[8:]]
    assert everywhere(readers, look) == [(left, left)] * len(readers)
    on_node(2).mv(names[1], names[0])
    left = [names[0], *names[2:4], *names[8:]]
    assert everywhere(readers, look) == [(left, left)] * len(readers)
    on_node(0).delete_dir(f"{bucket}/c")
    left = left[:3]
    assert everywhere(readers, look) == [(left, left)] * len(readers)
    on_node(1, native=False).delete_file(names[0])
    assert everywhere(readers, look) == [(left[1:], left[1:])] * len(readers)


def test_write_with_consistency_always_is_visible_everywhere(
    cluster: LocalCluster, readers: list[AskedProcess], origin: Origin, bucket: str
) -> None:
    key = f"{bucket}/x.bin"
    origin.put(key, content(1, PAGE))
    assert everywhere(readers, lambda reader: reader.read(key)) == [content(1, PAGE)] * len(readers)
    options = cluster.arguments(cluster.nodes[2], consistency="always")
    writer = AskedProcess(cluster.directory / "always.log", options, patient=True)
    try:
        writer.write(key, content(2, PAGE))
    finally:
        writer.stop()
    assert everywhere(readers, lambda reader: reader.read(key)) == [content(2, PAGE)] * len(readers)


@pytest.mark.slow
def test_read_after_a_write_never_returns_the_old_object(
    readers: list[AskedProcess], on_node: Callable[..., millrace.MillraceFileSystem], bucket: str
) -> None:
    """Readers that never stop, so that responses with old metadata are in flight during every write."""
    key = f"{bucket}/x.bin"
    writers = [on_node(number) for number in range(3)]
    writers[0].pipe_file(key, content(0, PAGE))
    chance = random.Random(1)
    published = 0
    stop = threading.Event()

    def watch(reader: AskedProcess) -> tuple[int, list[tuple[int, int]]]:
        """How many reads there were, and those that were of an older version than the last one published before."""
        wrong = []
        tries = reads = 0
        while not stop.is_set():
            floor = published
            tries += 1
            try:
                data = reader.read(key, ("cat", "open", "native")[tries % 3])
            except AskedError as error:
                # Written a second time, while the read that had met the first write was tried again.
                if "ObjectChangedError" not in str(error):
                    raise
                continue
            (seen,) = versions_in(data)
            reads += 1
            if seen < floor:
                wrong.append((seen, floor))
        return reads, wrong

    with ThreadPoolExecutor(len(readers)) as pool:
        watching = [pool.submit(watch, reader) for reader in readers]
        try:
            for version in range(1, 120):
                writers[version % 3].pipe_file(key, content(version, PAGE))
                published = version
                time.sleep(chance.choice((0.0, 0.0, 0.02, 0.05)))  # now and then all of them get to the end of a read
        finally:
            stop.set()
        found = [each.result() for each in watching]
    assert [wrong for _, wrong in found] == [[]] * len(readers)
    assert sum(reads for reads, _ in found) > 100


@pytest.mark.slow
def test_write_with_an_unreachable_node_succeeds_and_invalidates_later(
    s3: S3Server, tmp_path: Path, bucket: str, origin: Origin
) -> None:
    """Until then its own readers may see the old object, for as long as their `consistency` allows: here forever."""
    keys = [f"{bucket}/{number}.bin" for number in range(4)]
    for key in keys:
        origin.put(key, content(1, PAGE))
    with LocalCluster(tmp_path / "nodes", 3, target_options=s3.target_options) as cluster:
        readers = [
            AskedProcess(tmp_path / f"{node.number}.log", cluster.arguments(node, consistency="immutable"))
            for node in cluster.nodes
        ]
        try:
            for reader in readers:
                assert [reader.read(key) for key in keys] == [content(1, PAGE)] * len(keys)
            fs = millrace.filesystem("s3", **cluster.arguments(cluster.nodes[0], consistency="60s"))
            cluster.nodes[2].suspend()
            for key in keys[:2]:
                fs.pipe_file(key, content(2, PAGE))
                assert readers[0].read(key) == readers[1].read(key) == content(2, PAGE)
                assert versions_in(readers[2].read(key)) <= {1, 2}
            cluster.nodes[2].resume()
            _wait_for(lambda: [readers[2].read(key) for key in keys[:2]] == [content(2, PAGE)] * 2)
            cluster.nodes[2].kill()
            for key in keys[2:]:
                fs.pipe_file(key, content(3, PAGE))
                assert readers[0].read(key) == readers[1].read(key) == content(3, PAGE)
                assert versions_in(readers[2].read(key)) <= {1, 3}
            fs.rm(keys[0])
            assert not readers[1].ask("exists", keys[0])
            cluster.start_one(2)  # on what it remembered
            _wait_for(lambda: [readers[2].read(key) for key in keys[2:]] == [content(3, PAGE)] * 2)
            _wait_for(lambda: not readers[2].ask("exists", keys[0]))
            assert [readers[1].read(key) for key in keys[2:]] == [content(3, PAGE)] * 2
        finally:
            for reader in readers:
                reader.stop()


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["killed", "suspended"])
def test_metadata_owner_that_missed_a_write_does_not_serve_older_metadata(
    s3: S3Server, tmp_path: Path, bucket: str, origin: Origin, failure: str
) -> None:
    """The writing process has ended, so no later invalidation is sent."""
    keys = [f"{bucket}/{number}.bin" for number in range(60)]
    for key in keys:
        origin.put(key, content(1, PAGE))
    with LocalCluster(tmp_path / "nodes", 3, target_options=s3.target_options) as cluster, ExitStack() as stack:

        def process(name: str, node: LocalNode) -> AskedProcess:
            found = AskedProcess(tmp_path / f"{name}.log", cluster.arguments(node, consistency="immutable"))
            stack.callback(found.stop)
            return found

        placement = Placement(View.of(cluster.member(node) for node in cluster.nodes))
        by_id = {cluster.member(node).id: node for node in cluster.nodes}
        owner, _, other = (by_id[member.id] for member in placement.order(metadata_id(origin.identity, bucket)))
        reader = process("reader", other)
        assert [reader.read(key) for key in keys] == [content(1, PAGE)] * len(keys)
        if failure == "killed":
            owner.kill()
        else:
            owner.suspend()
        writer = process("writer", other)
        for key in keys:
            writer.ask("write", key, value=base64.b64encode(content(2, PAGE)).decode())
        writer.stop()
        if failure == "killed":
            cluster.start_one(owner.number)
        else:
            owner.resume()
        for key in keys:
            assert reader.read(key) == content(2, PAGE)
            time.sleep(0.2)  # at first the reader skips the owner
        unknown = itertools.count()

        def has_no_open_breakers() -> bool:
            reader.ask("exists", f"{bucket}/unknown-{next(unknown)}")  # the owner is asked, or looked at again
            status = cluster.client.call(cluster.member(other).address, "GET", "/v1/status", deadline=60.0)
            return bool(status["breakers"] == [])

        _wait_for(has_no_open_breakers)


def _wait_for(is_so: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_failed_upload_is_visible_nowhere(
    readers: list[AskedProcess], on_node: Callable[..., millrace.MillraceFileSystem], origin: Origin, bucket: str
) -> None:
    key = f"{bucket}/x.bin"
    origin.put(key, content(1, PAGE))
    assert everywhere(readers, lambda reader: reader.read(key)) == [content(1, PAGE)] * len(readers)

    def write_half() -> None:
        with on_node(0).open(key, "wb") as file:
            file.write(os.urandom(20 * MB))
            raise OriginUnavailableError("on purpose")

    with pytest.raises(OriginUnavailableError, match="on purpose"):
        write_half()
    assert everywhere(readers, lambda reader: reader.read(key)) == [content(1, PAGE)] * len(readers)
