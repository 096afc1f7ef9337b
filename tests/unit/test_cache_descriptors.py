"""A process that has no descriptors left reads on, without keeping what it reads."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.cache.blocks import BLOCK_BYTES
from millrace.cache.node import CacheNode, cache_node
from millrace.config import resolve
from millrace.events import Event, add_hook
from millrace.testing.computed import ComputedOrigin

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


def test_a_fetch_without_a_descriptor_gives_the_bytes_and_keeps_nothing(tmp_path: Path) -> None:
    origin = ComputedOrigin({f"b/{name}": SIZE for name in ("first", "open", "late")})
    node = cache_node(resolve({"cache_dir": str(tmp_path / "cache"), "min_free": 0}, environ={}, file={}))
    read(node, origin, "b/first")  # whatever is imported or opened once is there by now
    kept = node.open_disks[0].store.index.used_bytes()
    told: list[Event] = []
    reader = node.open_reader(origin, origin.head("b/open"))
    remove = add_hook(told.append)
    try:
        with no_more_descriptors():
            assert bytes(reader.read(0, SIZE)) == bytes(origin.expected("b/open", 0, SIZE))
            read(node, origin, "b/late")  # its file cannot even be made
        assert node.open_disks[0].store.index.used_bytes() == kept
        assert any("ulimit -n" in event.detail for event in told)
        node.open_disks[0].held.clear()
        assert bytes(reader.read(0, SIZE)) == bytes(origin.expected("b/open", 0, SIZE))
        read(node, origin, "b/late")
        assert node.open_disks[0].store.index.used_bytes() == kept + 2 * SIZE
    finally:
        remove()
        reader.close()
