"""The events of caches, without those of nodes and requests that earlier tests of the process have left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millrace.events import Event, add_hook


@contextmanager
def cache_events() -> Iterator[list[Event]]:
    """Yields a list to which each of them is appended."""
    seen: list[Event] = []
    remove = add_hook(lambda event: seen.append(event) if event.name.startswith("cache.") else None)
    try:
        yield seen
    finally:
        remove()


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """Every event of the caches, as it comes."""
    with cache_events() as seen:
        yield seen
