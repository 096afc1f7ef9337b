"""Fixtures of the cache's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cache_events import events
from tests.support.indexes import new_index

from millrace.store.index import Index

__all__ = ["events"]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with new_index(tmp_path / "index") as index:
        yield index
