"""Passes the metrics of a Ray node's Millrace node to `ray.util.metrics`, so that Ray's own monitoring has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millrace.metrics import Metric, Sample, flat_samples

FEED_SECONDS = 10.0
"""The interval; that of Ray's own reports."""


class RayMetrics:
    """The metrics of this process in Ray. For one thread.

    Ray adds "ray_" to the names, and "_total" to those of counters.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def feed(self, samples: Iterable[Sample]) -> None:
        """Set the gauges, and add what the counters have grown by. A counter that was reset counts from zero."""
        for metric, labels, value in flat_samples(samples):
            assert isinstance(value, (int, float))
            tags = dict(zip(metric.labels, labels, strict=True))
            if metric.kind == "gauge":
                self._of(metric).set(value, tags)
                continue
            before = self._last.get((metric.name, labels), 0.0)
            self._last[metric.name, labels] = value
            grown = value - before if value >= before else value
            if grown > 0:
                self._of(metric).inc(grown, tags)

    def _of(self, metric: Metric) -> Any:
        made = self._made.get(metric.name)
        if made is None:
            from ray.util import metrics

            make = metrics.Counter if metric.kind == "counter" else metrics.Gauge
            name = metric.name.removesuffix("_total")
            made = self._made[metric.name] = make(name, description=metric.help, tag_keys=metric.labels)
        return made
