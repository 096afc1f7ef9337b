"""The metrics of a node for OpenTelemetry: observable instruments, made from the declarations.

`opentelemetry-instrument millrace node run ...` exports them as its environment configures. OpenTelemetry is imported at the
first use.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from millrace._version import __version__
from millrace.errors import MissingDependencyError
from millrace.metrics import Metric, Sample, flat_metrics, flat_samples

_FRESH_SECONDS = 1.0
"""A collection reads every instrument; all of them use one set of samples."""


def instrument(samples: Callable[[], Sequence[Sample]], *, meter_provider: Any = None) -> None:
    """Export `samples` through `meter_provider`, by default the global one. Raises `MissingDependencyError`."""
    try:
        from opentelemetry import metrics
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "OpenTelemetry is not installed", next_step="pip install 'millrace[opentelemetry]'"
        ) from error
    meter = metrics.get_meter("millrace", __version__, meter_provider=meter_provider)
    latest = _Latest(samples)

    def callback_of(metric: Metric) -> Callable[[Any], Iterable[metrics.Observation]]:
        def observe(_: Any) -> Iterable[metrics.Observation]:
            for sample in latest.of(metric):
                assert isinstance(sample.value, (int, float))
                yield metrics.Observation(sample.value, dict(zip(metric.labels, sample.labels, strict=True)))

        return observe

    for metric in flat_metrics():
        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        # The exporter for Prometheus adds the unit and "_total" to a name again.
        create(metric.name.removesuffix("_total"), [callback_of(metric)], description=metric.help)


def is_in_use() -> bool:
    """Whether this process uses OpenTelemetry's metrics already, as under `opentelemetry-instrument`."""
    return "opentelemetry.metrics" in sys.modules


class _Latest:
    """The newest samples, by metric. Thread-safe."""

    def __init__(self, samples: Callable[[], Sequence[Sample]]) -> None:
        self._samples = samples
        self._lock = threading.Lock()
        self._until = 0.0
        self._by_metric: dict[str, list[Sample]] = {}

    def of(self, metric: Metric) -> list[Sample]:
        with self._lock:
            if time.monotonic() >= self._until:
                found: dict[str, list[Sample]] = {}
                for sample in flat_samples(self._samples()):
                    found.setdefault(sample.metric.name, []).append(sample)
                self._by_metric, self._until = found, time.monotonic() + _FRESH_SECONDS
            return self._by_metric.get(metric.name, [])
