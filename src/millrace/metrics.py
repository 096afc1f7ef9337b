"""The metrics: each is declared here once, with its kind, labels, unit and help.

`/metrics` of a node, `ray.util.metrics`, OpenTelemetry and `docs/reference/metrics.md` are made from these declarations.
Names follow Prometheus: base units (seconds, bytes), and `_total` for counters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One metric. `bounds` are the upper limits of a histogram's buckets, without infinity."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


class Distribution(NamedTuple):
    """The value of a histogram: how many observations each bucket has, the last one without a limit, and their sum."""

    counts: tuple[int, ...]
    sum: float


class Sample(NamedTuple):
    """A metric's value for one set of label values."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Distribution


_READ_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SAVE_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_SAVE_BYTES = (1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12)

# --- reads -----------------------------------------------------------------------------------------

READS = Metric(
    "millrace_reads_total",
    "counter",
    "Reads by source: mapped (opens of complete cached objects), disk, peer and origin (requests).",
    ("tier",),
)
READ_BYTES = Metric(
    "millrace_read_bytes_total",
    "counter",
    "Bytes by source. A mapped object counts at each open, with its size, whatever part of it is read.",
    ("tier",),
)
READ_SECONDS = Metric(
    "millrace_read_duration_seconds",
    "histogram",
    "Duration of reads from disk and of requests to peers and the origin. Mapped reads are not timed.",
    ("tier",),
    _READ_SECONDS,
)
UNCACHED_BYTES = Metric(
    "millrace_uncached_bytes_total", "counter", "Bytes that were fetched and not stored, for lack of space."
)

JOB_READS = Metric(
    "millrace_job_reads_total",
    "counter",
    "Reads by job and prefix (a URL, two levels below the bucket), from this machine's disks (cache), a peer or the origin.",
    ("job", "prefix", "source"),
)
JOB_BYTES = Metric(
    "millrace_job_read_bytes_total",
    "counter",
    "Bytes by job and prefix. At most 256 pairs are separate; all others share one pair with empty labels.",
    ("job", "prefix", "source"),
)

# --- cluster ---------------------------------------------------------------------------------------

SERVED_REQUESTS = Metric("millrace_served_requests_total", "counter", "Requests of other nodes that this node served.")
SERVED_BYTES = Metric("millrace_served_bytes_total", "counter", "Bytes that this node sent to other nodes.")
SERVED_CACHED_BYTES = Metric(
    "millrace_served_cached_bytes_total", "counter", "Bytes that this node sent to readers and had cached before."
)
RELAYED_BYTES = Metric(
    "millrace_relayed_bytes_total",
    "counter",
    "Bytes that this node fetched for reads of other nodes. millrace_read_bytes_total has them twice: here with their "
    "source, and on the other node as peer.",
)
PEER_FAILURES = Metric("millrace_peer_failures_total", "counter", "Requests to a peer without a correct response.")
MOVED_BYTES = Metric(
    "millrace_moved_bytes_total", "counter", "Bytes that moved to this node because nodes joined or left."
)
MEMBERS = Metric("millrace_cluster_members", "gauge", "Nodes of the cluster in this node's view, by state.", ("state",))
OPEN_BREAKERS = Metric("millrace_open_breakers", "gauge", "Peers that this machine skips because they do not respond.")
CONNECTIONS = Metric("millrace_connections", "gauge", "Open connections to this node.")
LOADS = Metric("millrace_running_loads", "gauge", "Load jobs that run on this node.")

# --- store -----------------------------------------------------------------------------------------

CAPACITY = Metric("millrace_capacity_bytes", "gauge", "Most bytes that the cache may hold on a disk.", ("disk",))
USED = Metric("millrace_used_bytes", "gauge", "Bytes that the cache holds on a disk.", ("disk",))
FREE = Metric("millrace_disk_free_bytes", "gauge", "Free bytes of the file system of a disk.", ("disk",))
EVICTIONS = Metric("millrace_evictions_total", "counter", "Objects and segments that were removed to make room.")
EVICTED_BYTES = Metric("millrace_evicted_bytes_total", "counter", "Bytes that were removed to make room.")
CORRUPT_BLOCKS = Metric(
    "millrace_corrupt_blocks_total", "counter", "Cached blocks whose checksum was wrong. They were fetched again."
)
CORRUPT_RECORDS = Metric("millrace_corrupt_records_total", "counter", "Damaged records of the index that were removed.")

# --- origins ---------------------------------------------------------------------------------------

ORIGIN_IN_FLIGHT = Metric(
    "millrace_origin_requests_in_flight", "gauge", "Requests of this machine to origins that are in progress."
)

# --- checkpoints -----------------------------------------------------------------------------------

SAVES = Metric(
    "millrace_checkpoint_saves_total", "counter", "Saves that became durable, full or as a delta.", ("kind",)
)
SAVE_FAILURES = Metric("millrace_checkpoint_save_failures_total", "counter", "Saves that failed.")
SAVE_SECONDS = Metric(
    "millrace_checkpoint_save_duration_seconds",
    "histogram",
    "Time from the call until a save was durable, without a later upload.",
    (),
    _SAVE_SECONDS,
)
BLOCKED_SECONDS = Metric(
    "millrace_checkpoint_blocked_seconds",
    "histogram",
    "Time for which a save blocked the training: the wait for an earlier save, and the copy of the state.",
    (),
    _SAVE_SECONDS,
)
SAVE_BYTES = Metric(
    "millrace_checkpoint_size_bytes", "histogram", "Stored bytes of a save, after compression.", (), _SAVE_BYTES
)
RAW_BYTES = Metric("millrace_checkpoint_raw_bytes_total", "counter", "Bytes of the saved states, before compression.")
UPLOAD_BACKLOG = Metric(
    "millrace_checkpoint_upload_backlog_bytes",
    "gauge",
    "Bytes of saves on this machine's disk that are not at the run's URL yet, of live processes.",
)

# --- cost ------------------------------------------------------------------------------------------

SAVED_REQUESTS = Metric(
    "millrace_saved_requests_total",
    "counter",
    "Reads from this machine's disks, each of which is a request less to an origin.",
)
SAVED_BYTES = Metric(
    "millrace_saved_bytes_total",
    "counter",
    "Bytes that readers got from this machine's disks, also on other nodes. A mapped object counts with its size.",
)
SAVED_COST = Metric(
    "millrace_saved_cost_total",
    "counter",
    "The saved requests and bytes at the prices of MILLRACE_PRICE_PER_1000_REQUESTS and MILLRACE_PRICE_PER_GB.",
)

# --- the process -----------------------------------------------------------------------------------

EVENTS = Metric("millrace_events_total", "counter", "Events of the node's process.", ("event",))
NODE_INFO = Metric(
    "millrace_node_info", "gauge", "1, with the version and the state of the node.", ("version", "state")
)
START_TIME = Metric("millrace_start_time_seconds", "gauge", "Start of the node, in Unix time.")
SCRAPE_SECONDS = Metric("millrace_scrape_duration_seconds", "gauge", "Time to collect these metrics.")

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order of their declarations."""


class Series(NamedTuple):
    """A counter or histogram of the store's counter files (`cache/counters.py`), and its exported name."""

    counter: str
    metric: Metric
    labels: tuple[str, ...] = ()


COUNTERS = (
    Series("native_opens", READS, ("mapped",)),
    Series("disk_reads", READS, ("disk",)),
    Series("peer_requests", READS, ("peer",)),
    Series("origin_requests", READS, ("origin",)),
    Series("mapped_bytes", READ_BYTES, ("mapped",)),
    Series("disk_bytes", READ_BYTES, ("disk",)),
    Series("peer_bytes", READ_BYTES, ("peer",)),
    Series("origin_bytes", READ_BYTES, ("origin",)),
    Series("uncached_bytes", UNCACHED_BYTES),
    Series("served_requests", SERVED_REQUESTS),
    Series("served_bytes", SERVED_BYTES),
    Series("served_cached_bytes", SERVED_CACHED_BYTES),
    Series("relayed_bytes", RELAYED_BYTES),
    Series("peer_failures", PEER_FAILURES),
    Series("moved_bytes", MOVED_BYTES),
    Series("evictions", EVICTIONS),
    Series("evicted_bytes", EVICTED_BYTES),
    Series("corrupt_blocks", CORRUPT_BLOCKS),
    Series("corrupt_records", CORRUPT_RECORDS),
    Series("full_saves", SAVES, ("full",)),
    Series("delta_saves", SAVES, ("delta",)),
    Series("save_failures", SAVE_FAILURES),
    Series("save_raw_bytes", RAW_BYTES),
)

HISTOGRAMS = (
    Series("disk_seconds", READ_SECONDS, ("disk",)),
    Series("peer_seconds", READ_SECONDS, ("peer",)),
    Series("origin_seconds", READ_SECONDS, ("origin",)),
    Series("save_seconds", SAVE_SECONDS),
    Series("blocked_seconds", BLOCKED_SECONDS),
    Series("save_bytes", SAVE_BYTES),
)
"""The order is that of their places in the counter files: append only."""

# --- without histograms ----------------------------------------------------------------------------
# The interfaces of Ray and OpenTelemetry accept single observations only. There a histogram is two counters.


def flat_metrics() -> list[Metric]:
    """The declarations with two counters in place of each histogram: the number of observations and their sum."""
    return [flat for metric in METRICS for flat in _flat_metrics(metric)]


def flat_samples(samples: Iterable[Sample]) -> list[Sample]:
    """The samples of `flat_metrics`. Pure."""
    found: list[Sample] = []
    for metric, labels, value in samples:
        if isinstance(value, Distribution):
            number, total = _flat_metrics(metric)
            found += [Sample(number, labels, sum(value.counts)), Sample(total, labels, value.sum)]
        else:
            found.append(Sample(metric, labels, value))
    return found


@functools.cache
def _flat_metrics(metric: Metric) -> tuple[Metric, ...]:
    if metric.kind != "histogram":
        return (metric,)
    return (
        Metric(f"{metric.name}_count_total", "counter", f"Number of observations. {metric.help}", metric.labels),
        Metric(f"{metric.name}_sum_total", "counter", f"Sum of the observations. {metric.help}", metric.labels),
    )
