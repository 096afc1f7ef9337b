"""Background tasks of a disk."""

from pathlib import Path

import pytest
from tests.support.origins import MemoryOrigin

from millrace.cache import disk as disk_module
from millrace.cache.node import cache_node
from millrace.config import resolve
from millrace.events import Event

pytestmark = pytest.mark.usefixtures("no_maintenance")


def test_metadata_beyond_its_bound_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    origin = MemoryOrigin()
    for number in range(100):
        origin.put(f"b/{number}", b"x")
    node = cache_node(resolve({"cache_dir": str(tmp_path), "min_free": 0, "consistency": "immutable"}))
    (disk,) = node.open_disks
    for _ in node.metadata.list_all(origin, "b"):
        pass
    kept = disk.store.index.meta_bytes()
    assert kept > 0
    disk.tidy()
    assert disk.store.index.meta_bytes() == kept
    assert node.metadata.known(origin, "b/7") is not None

    monkeypatch.setattr(disk_module, "_MOST_METADATA_BYTES", 1)
    for _ in range(100):  # it looks only now and then
        disk.tidy()
    assert node.metadata.known(origin, "b/7") is None
    assert node.metadata.stat(origin, "b/7").size == 1
    assert "cache.metadata.cleared" in [event.name for event in events]
