"""A node's part of the status page, in addition to its status: history, data sets, rules, jobs, loads, saves, events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from millrace.cache.attribution import NO_READS, JobAndPrefix, Reads
from millrace.cache.catalog import PlacedRule
from millrace.cache.eviction.usage import url_of
from millrace.cache.measures import runs_of, samples_from
from millrace.errors import MillraceError, without_queries
from millrace.metrics import (
    BLOCKED_SECONDS,
    RAW_BYTES,
    SAVE_BYTES,
    SAVE_FAILURES,
    SAVE_SECONDS,
    SAVES,
    UPLOAD_BACKLOG,
    Distribution,
    Sample,
)
from millrace.node.figures import Contents
from millrace.node.history import History, RecentEvents

if TYPE_CHECKING:
    from millrace.node.process import NodeProcess

_MOST_ROWS = 200


def details_of(node: NodeProcess, contents: Contents, history: History, events: RecentEvents) -> dict[str, Any]:
    """The part of `node` as plain values. Lists are limited to the 200 largest rows."""
    cache = node.node
    datasets = [
        {"origin": origin, "url": url_of(origin, prefix), **asdict(dataset)}
        for (origin, prefix), dataset in contents.datasets.items()
    ]
    reads: dict[JobAndPrefix, Reads] = {}
    for disk in cache.all_disks:
        for part, found in disk.attributed().items():
            reads[part] = reads.get(part, NO_READS).plus(found)
    jobs = [{**part._asdict(), **found._asdict()} for part, found in reads.items()]
    return {
        "history": history.rates(),
        "datasets": _largest(datasets, "nbytes"),
        "rules": [_rule(rule) for rule in contents.rules],
        "jobs": _largest(jobs, "cached_bytes", "fetched_bytes"),
        "loads": node.jobs.running_loads(),
        "saves": saves_in(samples_from(disk.measures() for disk in cache.all_disks)),
        "runs": _runs(node),
        "events": events.newest_first(),
    }


def _rule(rule: PlacedRule) -> dict[str, Any]:
    """A rule without the query of a web address, which may contain a signature."""
    url = without_queries(rule.url)
    return {"url": url, **rule._asdict(), "prefix": rule.prefix if url == rule.url else url.partition("://")[2]}


def _largest(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -sum(row[name] for name in names))[:_MOST_ROWS]


def _runs(node: NodeProcess) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    for disk in node.node.open_disks:
        try:
            runs += runs_of(disk.counters.directory).all()
        except MillraceError:
            continue  # the other disks have theirs
    return runs


def saves_in(samples: Sequence[Sample]) -> dict[str, float]:
    """The sums over all saves of a machine, from its metrics. Pure."""
    found: dict[str, float] = {}
    for metric, labels, value in samples:
        if isinstance(value, Distribution):
            found[metric.name] = value.sum
            found[f"{metric.name} count"] = sum(value.counts)
        else:
            name = " ".join((metric.name, *labels))
            found[name] = found.get(name, 0) + value
    sums = {
        "full": f"{SAVES.name} full",
        "delta": f"{SAVES.name} delta",
        "failures": SAVE_FAILURES.name,
        "raw_bytes": RAW_BYTES.name,
        "stored_bytes": SAVE_BYTES.name,
        "seconds": SAVE_SECONDS.name,
        "blocked_seconds": BLOCKED_SECONDS.name,
        "upload_backlog_bytes": UPLOAD_BACKLOG.name,
    }
    return {name: found.get(key, 0) for name, key in sums.items()}
