"""Fixtures of the tests of eviction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.cache.disk import HeldBlocks
from millrace.cache.node import CacheNode, cache_node
from millrace.config import resolve


@pytest.fixture
def make_node(tmp_path: Path) -> Callable[..., CacheNode]:
    """With no memory for blocks: those that were not stored are read from the origin, and counted there."""

    def make(**options: object) -> CacheNode:
        given = {"cache_dir": str(tmp_path / "cache"), "min_free": 0, **options}
        node = cache_node(resolve(given, environ={}, file={}))
        node.open_disks[0].held = HeldBlocks(0)
        return node

    return make
