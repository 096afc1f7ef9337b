"""The events of a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millrace.events import Event, add_hook


@contextmanager
def seen_events() -> Iterator[list[Event]]:
    """Yields a list to which each of them is appended."""
    seen: list[Event] = []
    remove = add_hook(seen.append)
    try:
        yield seen
    finally:
        remove()
