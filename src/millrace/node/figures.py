"""A node's figures: its weight, its contents, and its savings."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from millrace.cache.catalog import PlacedRule, placed_rules
from millrace.cache.disk import Disk
from millrace.cache.eviction.usage import group_of
from millrace.cache.node import CacheNode
from millrace.errors import StorageError
from millrace.figures import hit_ratio

_FRESH_TIMES = 50.0
_PATIENCE_SECONDS = 1.0
_PAGE = 1000
_MOST_DIRECTORIES = 10_000
_WEIGHT_CHANGE = 0.1
"""The share of a weight by which it must change to be published again: every change moves blocks between nodes."""


@dataclass(slots=True)
class Dataset:
    """The cached objects of one data set, as attribution divides them: a prefix of at most two levels below its bucket."""

    objects: int = 0
    complete_objects: int = 0
    nbytes: int = 0


class Contents(NamedTuple):
    """The data sets by the identity of their origin and their prefix, and the retention rules with their sums."""

    datasets: Mapping[tuple[str, str], Dataset]
    rules: Sequence[PlacedRule]


class NodeFigures:
    """The figures of a node. Thread-safe.

    There may be millions of objects: a count is reused for fifty times the time that it took. A later count runs in a
    thread, and one that takes longer than a second does not delay its caller, who receives the count before.
    """

    def __init__(self, node: CacheNode) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._fresh_until = 0.0
        self._contents: Contents | None = None
        self._counting: Future[None] | None = None
        self._at_start = node.counters()

    def counters(self, *, settled: bool) -> dict[str, dict[str, int]]:
        """The node's counters: `now`, and `at_start` of this process. Fast, unlike the other figures; takes half a
        second with `settled`.
        """
        return {"now": self._node.counters(settled=settled), "at_start": self._at_start}

    def now(self) -> dict[str, Any]:
        """The figures as plain values."""
        counters = self._node.counters()
        datasets = self.contents().datasets.values()
        disks = [
            {"directory": str(directory), "used_bytes": used, "capacity_bytes": capacity}
            for directory, used, capacity in self._node.disks()
        ]
        return {
            "disks": disks,
            "used_bytes": sum(disk["used_bytes"] for disk in disks),
            "capacity_bytes": sum(disk["capacity_bytes"] for disk in disks),
            "objects": sum(each.objects for each in datasets),
            "complete_objects": sum(each.complete_objects for each in datasets),
            "hit_ratio": hit_ratio(counters),
            "counters": counters,
        }

    def contents(self) -> Contents:
        """The cached objects by data set, and the retention rules. Raises `StorageError`."""
        with self._lock:
            if self._counting is None and time.monotonic() >= self._fresh_until:
                begun: Future[None] = Future()
                threading.Thread(target=self._recount, args=(begun,), name="millrace-count", daemon=True).start()
                self._counting = begun  # after the start, which may fail: later calls wait for it
            counting = self._counting
        if counting is not None:
            with contextlib.suppress(TimeoutError):
                counting.result(None if self._contents is None else _PATIENCE_SECONDS)
        assert self._contents is not None
        return self._contents

    def _recount(self, counting: Future[None]) -> None:
        began = time.monotonic()
        error: BaseException | None = None
        try:
            contents = self._count()
        except BaseException as failure:  # noqa: BLE001 - the callers raise it
            error = failure
        with self._lock:
            self._counting = None
            if error is None:
                ended = time.monotonic()
                self._contents, self._fresh_until = contents, ended + _FRESH_TIMES * (ended - began)
        counting.set_result(None) if error is None else counting.set_exception(error)

    def _count(self) -> Contents:
        found: dict[tuple[str, str], Dataset] = {}
        # Most objects share their directory, so that one lookup for each is enough.
        by_directory: dict[tuple[str, str], Dataset] = {}
        for disk in self._node.open_disks:
            index, after = disk.store.index, b""
            while page := index.page(after, _PAGE):
                after = page[-1].object_id
                for entry in page:
                    if not entry.cached_bytes:
                        continue
                    origin, key, _ = entry.name
                    place = origin, key.rpartition("/")[0]
                    dataset = by_directory.get(place)
                    if dataset is None:
                        if len(by_directory) >= _MOST_DIRECTORIES:
                            by_directory.clear()
                        dataset = by_directory[place] = found.setdefault((origin, dataset_of(key)), Dataset())
                    dataset.objects += 1
                    if entry.complete:
                        dataset.complete_objects += 1
                        dataset.nbytes += entry.size
                    else:
                        dataset.nbytes += entry.cached_bytes
        return Contents(found, placed_rules(self._node))


def dataset_of(key: str) -> str:
    """The prefix of the data set of a key, without the query of a web address."""
    return group_of("", key.partition("?")[0]).strip()


def usable_bytes(capacity: int, used: int, free: int, min_free: int) -> int:
    """The usable size of a disk: its capacity, or less if other programs leave less."""
    return max(0, min(capacity, used + max(0, free - min_free)))


def weight_of(node: CacheNode) -> float:
    """The usable size of all disks of a node in bytes, at least 1. A failed disk counts 0."""
    return float(max(1, sum(_of_disk(disk) for disk in node.open_disks)))


def _of_disk(disk: Disk) -> int:
    store = disk.store
    try:
        return usable_bytes(
            store.space.capacity_bytes(),
            store.index.used_bytes(),
            store.space.free_bytes(),
            store.space.min_free_bytes(),
        )
    except StorageError as error:
        disk.report(error)
        return 0


def differs_enough(published: float, now: float) -> bool:
    """Whether a weight differs enough from the published one to publish it."""
    return abs(now - published) > _WEIGHT_CHANGE * published
