"""A node's metrics, and its pages for monitors: `/metrics`, `/healthz` and `/readyz`. For people: `status_page.py`."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    START_TIME,
    Distribution,
    Metric,
    Sample,
)
from millrace.origin.base import requests_in_flight
from millrace.runtime import forks

if TYPE_CHECKING:
    from millrace.node.process import NodeProcess

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
        nbytes = _sum(samples, READ_BYTES, ("mapped", "disk", "peer"))
        cost = requests / 1000 * self.per_1000_requests + nbytes / 1e9 * self.per_gb
        return [Sample(SAVED_REQUESTS, (), requests), Sample(SAVED_BYTES, (), nbytes), Sample(SAVED_COST, (), cost)]


def _sum(samples: Iterable[Sample], metric: Metric, tiers: Sequence[str]) -> float:
    values = [each.value for each in samples if each.metric is metric and each.labels[0] in tiers]
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
        from millrace.node.exposition import CONTENT_TYPE, exposition

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
