"""Fixtures of the tests of reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.cache.node import CacheNode, cache_node
from millrace.config import resolve


@pytest.fixture
def make_node(tmp_path: Path) -> Callable[..., CacheNode]:
    def make(**options: object) -> CacheNode:
        given = {"cache_dir": str(tmp_path / "cache"), "min_free": 0, **options}
        return cache_node(resolve(given, environ={}, file={}))

    return make
