"""The fixture `events`: the events that these tests compare."""

from tests.support.cache_events import events

__all__ = ["events"]
