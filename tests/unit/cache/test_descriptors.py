"""A process without free descriptors continues to read, and stores nothing."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.computed import ComputedOrigin

from millrace.cache.node import CacheNode, cache_node
from millrace.config import resolve
from millrace.events import Event, add_hook
from millrace.store.records import BLOCK_BYTES

pytestmark = pytest.mark.usefixtures("no_maintenance")

SIZE = 3 * BLOCK_BYTES + 1


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Nothing can be opened: the descriptors that there are stay good."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def read(node: CacheNode, origin: ComputedOrigin, key: str) -> None:
    reader = node.open_reader(origin, origin.head(key))
    try:
        assert bytes(reader.read(0, SIZE)) == bytes(origin.expected(key, 0, SIZE))
    finally:
        reader.close()


def test_fetch_without_descriptor_returns_bytes_and_stores_nothing(tmp_path: Path) -> None:
    origin = ComputedOrigin({f"b/{name}": SIZE for name in ("first", "open", "late")})
    node = cache_node(resolve({"cache_dir": str(tmp_path / "cache"), "min_free": 0}, environ={}, file={}))
    read(node, origin, "b/first")  # whatever is imported or opened once is there by now
    kept = node.open_disks[0].store.index.used_bytes()
    reported: list[Event] = []
    reader = node.open_reader(origin, origin.head("b/open"))
    remove = add_hook(reported.append)
    try:
        with no_more_descriptors():
            assert bytes(reader.read(0, SIZE)) == bytes(origin.expected("b/open", 0, SIZE))
            read(node, origin, "b/late")  # its file cannot even be made
        assert node.open_disks[0].store.index.used_bytes() == kept
        assert any("ulimit -n" in event.detail for event in reported)
        node.open_disks[0].held.clear()
        assert bytes(reader.read(0, SIZE)) == bytes(origin.expected("b/open", 0, SIZE))
        read(node, origin, "b/late")
        assert node.open_disks[0].store.index.used_bytes() == kept + 2 * SIZE
    finally:
        remove()
        reader.close()
