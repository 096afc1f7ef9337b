"""The figures of a node's stores as metrics, and the way of figures of saves into the counters of a store.

The counters of a store count saves and have no names. `SavedRuns` names the runs, for the status page: one small file for
each run that a process of this machine has saved.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from millrace.cache.attribution import JobAndPrefix, Reads
from millrace.cache.counters import LIVE_NAMES, NAMES, Counters, Measures
from millrace.cache.node import CacheNode, default_store, first_open_disk
from millrace.errors import MillraceError, StorageError, without_queries
from millrace.events import Event
from millrace.metrics import (
    CAPACITY,
    COUNTERS,
    FREE,
    HISTOGRAMS,
    JOB_BYTES,
    JOB_READS,
    UPLOAD_BACKLOG,
    USED,
    Distribution,
    Sample,
)
from millrace.runtime import forks
from millrace.runtime.failures import disk_errors
from millrace.runtime.private_files import make_folder, new_file, read_file

SAVED, FAILED = "run.saved", "run.save.ended"
MOST_RUNS = 64


def updated(before: Mapping[str, Any], event: Event, now: float) -> dict[str, Any]:
    """The record of a run after a save has ended: the figures of the last complete save, and of a later failure. Pure."""
    values = event.values or {}
    record = {"saves": 0, "failures": 0, **before, "url": without_queries(event.subject), "time": now}
    step = int(values.get("step", -1))
    if event.name == FAILED:
        return {
            **record,
            "failures": record["failures"] + 1,
            "failed_step": step,
            "error": without_queries(event.detail),
        }
    return {
        **record,
        "saves": record["saves"] + 1,
        "step": step,
        "kind": "delta" if "delta_saves" in values else "full",
        "stored_bytes": int(values.get("save_bytes", 0)),
        "raw_bytes": int(values.get("save_raw_bytes", 0)),
        "seconds": values.get("save_seconds", 0.0),
        "blocked_seconds": values.get("blocked_seconds", 0.0),
        "failed_step": None,
        "error": "",
    }


class SavedRuns:
    """The records in `directory`. For any number of processes and threads; of two that save one run, the last one counts."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock

    def record(self, event: Event) -> None:
        """Update the record of the run of a `run.saved` or `run.save.ended`. Raises `StorageError`."""
        name = xxhash.xxh3_64_hexdigest(event.subject.encode("utf-8", "replace"))
        path, temporary = self._directory / f"{name}.json", self._directory / f"{name}.{uuid.uuid4().hex[:12]}.new"
        with disk_errors(self._directory):
            make_folder(self._directory)
            is_new = not path.exists()
            record = updated(_read(path) or {}, event, self._clock())
            with open(new_file(temporary), "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(temporary, path)
            if is_new:
                self._remove_oldest()

    def all(self) -> list[dict[str, Any]]:
        """Every record, the newest first. Leaves out damaged ones. Raises `StorageError`."""
        with disk_errors(self._directory):
            found = [_read(path) for path in self._directory.glob("*.json")]
        return sorted((each for each in found if each is not None), key=lambda each: -each["time"])

    def _remove_oldest(self) -> None:
        ages: dict[Path, float] = {}
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread or process has renamed it
                ages[path] = path.lstat().st_mtime
        for path in sorted(ages, key=ages.__getitem__)[:-MOST_RUNS]:
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    numbers = ("time", "saves", "failures")
    is_valid = isinstance(record, dict) and all(isinstance(record.get(name), int | float) for name in numbers)
    return record if is_valid and isinstance(record.get("url"), str) else None


_log = logging.getLogger("millrace.cache")

_OBSERVED = frozenset(series.counter for series in HISTOGRAMS)


def samples_of(node: CacheNode) -> list[Sample]:
    """The metrics of the stores of `node`: sums over all processes, and the state of each disk."""
    for disk in node.open_disks:
        disk.add_up()
    samples = samples_from([disk.measures() for disk in node.all_disks])
    samples += _attributed([disk.attributed() for disk in node.all_disks])
    for disk in node.open_disks:
        label = (str(disk.store.directory),)
        try:
            samples += [
                Sample(CAPACITY, label, disk.store.space.capacity_bytes()),
                Sample(USED, label, disk.store.index.used_bytes()),
                Sample(FREE, label, disk.store.space.free_bytes()),
            ]
        except StorageError as error:
            disk.report(error)
    return samples


def samples_from(measures: Iterable[Measures]) -> list[Sample]:
    """The sums of the measures of several stores as metrics. Pure."""
    found = list(measures)
    counts = {name: sum(each.counters[name] for each in found) for name in NAMES}
    histograms = {name: _sum([each.histograms[name] for each in found]) for name in _OBSERVED} if found else {}
    counts["disk_bytes"] = max(0, counts["cache_bytes"] - counts["mapped_bytes"])
    counts["disk_reads"] = sum(histograms["disk_seconds"].counts) if histograms else 0
    samples = [Sample(series.metric, series.labels, counts[series.counter]) for series in COUNTERS]
    samples += [Sample(series.metric, series.labels, histograms[series.counter]) for series in HISTOGRAMS if histograms]
    samples.append(Sample(UPLOAD_BACKLOG, (), sum(each.live["upload_backlog_bytes"] for each in found)))
    return samples


def _attributed(totals: Iterable[Mapping[JobAndPrefix, Reads]]) -> list[Sample]:
    sums: dict[JobAndPrefix, Reads] = {}
    for found in totals:
        for part, reads in found.items():
            sums[part] = sums[part].plus(reads) if part in sums else reads
    samples = []
    for part, reads in sums.items():
        sources = {
            "cache": (reads.cached_reads, reads.cached_bytes),
            "peer": (reads.peer_reads, reads.peer_bytes),
            "origin": (reads.fetched_reads - reads.peer_reads, reads.fetched_bytes - reads.peer_bytes),
        }
        for source, (number, nbytes) in sources.items():
            samples += [Sample(JOB_READS, (*part, source), number), Sample(JOB_BYTES, (*part, source), nbytes)]
    return samples


def _sum(distributions: list[Distribution]) -> Distribution:
    counts = tuple(sum(place) for place in zip(*(each.counts for each in distributions), strict=True))
    return Distribution(counts, sum(each.sum for each in distributions))


# --- saves --------------------------------------------------------------------------------------------------


class _SaveCounters:
    """The counters for saves of this process: of a cache that it has open, or of the machine's default cache, if any.

    A training process may save without reading through a cache. The node of the machine exports the sums either way.
    Thread-safe.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._own: Counters | None = None
        self._failed = False

    def get(self) -> Counters | None:
        with self._lock:
            # Once they exist they are kept: a live value must not be set in two places.
            if self._own is None:
                disk = first_open_disk()
                if disk is not None:
                    return disk.counters
                directory = default_store()
                self._own = None if directory is None else Counters(directory / "counters")
            return self._own

    def report(self, error: MillraceError) -> None:
        """Log an error of `get` once in a process."""
        if not self._failed:
            self._failed = True
            _log.warning("the saves of this process are missing in the metrics: %s", error)

    def reset_in_child(self) -> None:
        if self._own is not None:
            self._own.abandon()
            forks.keep_inherited(self._own)
        self.reset()


_saves = _SaveCounters()
forks.reset_in_child(_saves.reset_in_child)


def count_event(event: Event) -> None:
    """Add the values of an event to the counters of the same names. `import millrace` registers this as an event hook."""
    if event.values is None:
        return
    try:
        counters = _saves.get()
    except MillraceError as error:
        _saves.report(error)
        return
    if counters is None:
        return
    for name, value in event.values.items():
        if name in _OBSERVED:
            counters.observe(name, value)
        elif name in LIVE_NAMES:
            counters.set_live(name, int(value))
        elif name in NAMES:
            counters.add(name, int(value))
    if event.name in (SAVED, FAILED):
        try:
            runs_of(counters.directory).record(event)
        except StorageError as error:
            _saves.report(error)


def runs_of(counters_directory: Path) -> SavedRuns:
    """The records of the runs that were saved with this store."""
    return SavedRuns(counters_directory / "runs")
