"""A node's metrics, and its pages for monitors: `/metrics`, `/healthz` and `/readyz`. For people: `status_page.py`.

`exposition` writes the text format of Prometheus (version 0.0.4), which every scraper reads. It does not use Prometheus'
client library, which needs three times as long, and 1,000 sets of labels exceed 5 ms.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from millrace._version import __version__
from millrace.cache.measures import samples_of
from millrace.cluster.dataplane.server import Page, PlaneServer
from millrace.cluster.membership import MemberState
from millrace.errors import ConfigurationError
from millrace.event_log import EVENTS as DECLARED_EVENTS
from millrace.events import Event, add_hook
from millrace.metrics import (
    CONNECTIONS,
    EVENTS,
    LOADS,
    MEMBERS,
    NODE_INFO,
    OPEN_BREAKERS,
    ORIGIN_IN_FLIGHT,
    READ_BYTES,
    READS,
    SAVED_BYTES,
    SAVED_COST,
    SAVED_REQUESTS,
    SCRAPE_SECONDS,
    SERVED_CACHED_BYTES,
    START_TIME,
    Distribution,
    Metric,
    Sample,
)
from millrace.origin.base import requests_in_flight
from millrace.runtime import forks

if TYPE_CHECKING:
    from millrace.node.process import NodeProcess


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposition(samples: Iterable[Sample]) -> bytes:
    """The samples as a page for Prometheus."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.metric.name, []).append(sample)
    lines: list[str] = []
    for group in groups.values():
        metric = group[0].metric
        lines += (f"# HELP {metric.name} {_help(metric)}", f"# TYPE {metric.name} {metric.kind}")
        line = f"{_template(metric.name, metric.labels)} %s"
        for _, labels, value in group:
            if isinstance(value, Distribution):
                lines += _histogram(metric, labels, value)
            else:
                lines.append(line % (*map(_escaped, labels), value))
    return "\n".join((*lines, "")).encode()


def _help(metric: Metric) -> str:
    return metric.help.replace("\\", r"\\").replace("\n", r"\n")


def _histogram(metric: Metric, labels: tuple[str, ...], value: Distribution) -> Iterator[str]:
    """The lines of a histogram: the count of each bucket with those below it, the number of observations and their sum."""
    names, values = metric.labels, tuple(map(_escaped, labels))
    line = f"{_template(f'{metric.name}_bucket', (*names, 'le'))} %d"
    for bound, count in zip((*metric.bounds, "+Inf"), accumulate(value.counts), strict=True):
        yield line % (*values, bound, count)
    yield f"{_template(f'{metric.name}_count', names)} %d" % (*values, sum(value.counts))
    yield f"{_template(f'{metric.name}_sum', names)} %s" % (*values, value.sum)


def _template(name: str, labels: Iterable[str]) -> str:
    """The text before a value, with a placeholder for the value of each label."""
    pairs = ",".join(f'{label}="%s"' for label in labels)
    return f"{name}{{{pairs}}}" if pairs else name


@functools.lru_cache(4096)
def _escaped(text: str) -> str:
    # Names of directories need not be UTF-8. The backslashes of their replacement are escaped, too.
    return text.encode("utf-8", "backslashreplace").decode().translate(_ESCAPES)


_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Prices:
    """The list prices of an origin, in any currency. The defaults are those of S3 for readers in its own region."""

    per_1000_requests: float = 0.0004
    per_gb: float = 0.0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Prices:
        """The prices of the environment. Raises `ConfigurationError`."""
        return cls(
            _price(environ, "MILLRACE_PRICE_PER_1000_REQUESTS", cls().per_1000_requests),
            _price(environ, "MILLRACE_PRICE_PER_GB", cls().per_gb),
        )

    def savings(self, samples: Sequence[Sample]) -> list[Sample]:
        """What the reads of `samples` have saved, compared with reads from the origin. Pure."""
        requests = _sum(samples, READS, ("mapped", "disk"))
        # Bytes from peers count on the node that had them cached. It may have fetched them for the read.
        nbytes = _sum(samples, READ_BYTES, ("mapped", "disk")) + _sum(samples, SERVED_CACHED_BYTES)
        cost = requests / 1000 * self.per_1000_requests + nbytes / 1e9 * self.per_gb
        return [Sample(SAVED_REQUESTS, (), requests), Sample(SAVED_BYTES, (), nbytes), Sample(SAVED_COST, (), cost)]


def _sum(samples: Iterable[Sample], metric: Metric, tiers: Sequence[str] = ()) -> float:
    values = [each.value for each in samples if each.metric is metric and (not tiers or each.labels[0] in tiers)]
    return sum(value for value in values if not isinstance(value, Distribution))


def _price(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "").strip()
    try:
        price = float(text) if text else default
    except ValueError:
        price = -1.0
    if not 0.0 <= price < math.inf:
        raise ConfigurationError(f"{name}={text!r} is not a price", next_step="write a number, such as 0.0004")
    return price


class NodeMeasures:
    """The metrics of a node and its stores. Thread-safe. Counts the events of its process until `close`.

    Raises `ConfigurationError` for invalid prices in the environment.
    """

    def __init__(self, node: NodeProcess, server: PlaneServer) -> None:
        self._node = node
        self._server = server
        self._prices = Prices.of(os.environ)
        # From 0: an increase from a series that appears with 1 is none to Prometheus.
        self._events: Counter[str] = Counter(dict.fromkeys((*DECLARED_EVENTS, "other"), 0))
        self._owner = forks.Owner()
        self._counting = threading.Lock()
        self.close: Callable[[], None] = add_hook(self._count)

    def _count(self, event: Event) -> None:
        if not self._owner.is_this_process:  # the lock may be held by a thread that the fork did not copy
            return
        name = event.name if event.name in DECLARED_EVENTS else "other"
        with self._counting:
            self._events[name] += 1

    def samples(self) -> list[Sample]:
        """All metrics, now."""
        began = time.perf_counter()
        node = self._node
        states = Counter(str(member.state) for member in node.view().members)
        cache_dirs = dict.fromkeys(node.node.options.cache_dirs)
        samples = samples_of(node.node)
        samples += self._prices.savings(samples)
        samples += [Sample(MEMBERS, (str(state),), states[str(state)]) for state in MemberState]
        samples += [
            Sample(OPEN_BREAKERS, (), len(node.open_breakers())),
            Sample(CONNECTIONS, (), self._server.connections),
            Sample(LOADS, (), node.jobs.running()),
            Sample(ORIGIN_IN_FLIGHT, (), sum(map(requests_in_flight, cache_dirs))),
            Sample(NODE_INFO, (__version__, node.state), 1),
            Sample(START_TIME, (), node.started_at),
        ]
        with self._counting:
            events = sorted(self._events.items())
        samples += [Sample(EVENTS, (name,), count) for name, count in events]
        samples.append(Sample(SCRAPE_SECONDS, (), time.perf_counter() - began))
        return samples


def add_pages(server: PlaneServer, node: NodeProcess, measures: NodeMeasures, *, public_metrics: bool) -> None:
    """Register the pages of a node. The pages for probes need no token and contain no detail."""

    def metrics() -> Page:
        return Page(200, CONTENT_TYPE, exposition(measures.samples()))

    def healthy() -> Page:
        return _probe(node.is_alive())

    def ready() -> Page:
        return _probe(node.state == MemberState.HERE)

    server.page("/metrics", metrics, public=public_metrics)
    server.page("/healthz", healthy, public=True)
    server.page("/readyz", ready, public=True)


def _probe(good: bool) -> Page:
    return Page(200, _TEXT, b"ok\n") if good else Page(503, _TEXT, b"unavailable\n")
