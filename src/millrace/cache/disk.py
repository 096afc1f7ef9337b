"""One cache directory, as one process has it open: its store, and what goes with it."""

from __future__ import annotations

import logging
from pathlib import Path

from millrace.cache.counters import Counters
from millrace.cache.flight import Flights, ProcessLocks
from millrace.cache.held import HeldBlocks
from millrace.cache.maps import MapCache
from millrace.cache.store import Store
from millrace.config import CacheOptions
from millrace.events import Event, emit

_log = logging.getLogger("millrace")


class Disk:
    """A store with its locks, counters, maps and fetches. One a process and directory, whatever the options."""

    def __init__(self, directory: Path, options: CacheOptions) -> None:
        self.store = Store(directory, capacity=options.capacity, min_free=options.min_free)
        self.locks = ProcessLocks(directory / "locks")
        self.counters = Counters(directory / "counters")
        self.maps = MapCache()
        self.flights = Flights()
        self.held = HeldBlocks()
        self._limits = (options.capacity, options.min_free)
        self._full_reported = False

    def limit(self, options: CacheOptions) -> None:
        """Take the limits of `options`; the newest hold."""
        limits = (options.capacity, options.min_free)
        if limits != self._limits:
            _log.warning("the cache in %s gets new limits: capacity or min_free differ", self.store.directory)
            self._limits = limits
            self.store.set_limits(capacity=options.capacity, min_free=options.min_free)

    def remove(self, object_id: bytes) -> None:
        """Forget an object version, its file and its map. Readers that have it open keep reading."""
        entry = self.store.index.get(object_id)
        if entry is not None:
            self.maps.drop(self.store.path(entry))
            self.store.remove(object_id)

    def report_full(self) -> None:
        """Say once a process that reads go on without being kept: nobody should find out by a slow second epoch."""
        if not self._full_reported:
            self._full_reported = True
            emit(Event(name="cache.full", subject=str(self.store.directory)))
            _log.warning(
                "the cache in %s is full (capacity %.1f GB, used %.1f GB, or min_free is reached): reads go on uncached",
                self.store.directory,
                self.store.capacity_bytes() / 1e9,
                self.store.index.used_bytes() / 1e9,
            )

    def close(self) -> None:
        """Close everything; files and maps that are in use stay readable."""
        self.counters.close()
        self.locks.close()
        self.store.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's kernel locks, and touch nothing else of it."""
        self.counters.abandon()
        self.locks.close()
