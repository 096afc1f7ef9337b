"""The events that these tests compare."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.cache_events import cache_events

from millrace.events import Event


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """Every event of the caches, as it comes."""
    with cache_events() as seen:
        yield seen
