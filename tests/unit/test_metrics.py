"""The declarations of the metrics, and their exposition."""

from __future__ import annotations

import os
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.cache.counters import NAMES
from millrace.cache.measures import samples_from
from millrace.errors import ConfigurationError
from millrace.metrics import (
    CAPACITY,
    COUNTERS,
    HISTOGRAMS,
    METRICS,
    READ_BYTES,
    READ_SECONDS,
    READS,
    SERVED_CACHED_BYTES,
    Distribution,
    Metric,
    Sample,
    flat_metrics,
    flat_samples,
)
from millrace.node import telemetry
from millrace.node.measures import Prices, exposition

PLACES = ((0, READS), (1, READ_BYTES))
COUNTER = Metric("millrace_a_total", "counter", "Help.", ("tier",))
GAUGE = Metric("millrace_b_bytes", "gauge", "Help.", ("disk",))
HISTOGRAM = Metric("millrace_c_seconds", "histogram", "Help.", (), (0.1, 1.0))


def test_names_are_unique_and_follow_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"millrace_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.bounds) == (metric.kind == "histogram")
        assert list(metric.bounds) == sorted(set(metric.bounds))
        assert metric.help.endswith(".")


def test_every_counter_of_a_store_is_exported() -> None:
    exported = {series.counter for series in COUNTERS}
    # Bytes and reads from disk are derived: all cached bytes without the mapped ones, and the count of a histogram.
    assert exported - {"disk_bytes", "disk_reads"} == set(NAMES) - {"cache_bytes"}
    for series in (*COUNTERS, *HISTOGRAMS):
        assert len(series.labels) == len(series.metric.labels)


def test_exposition_is_read_back_by_prometheus_parser() -> None:
    samples = [
        Sample(COUNTER, ("disk",), 3),
        Sample(COUNTER, ("origin",), 4),
        Sample(GAUGE, ('/a "disk"\\ of\nmine',), 5),
        Sample(HISTOGRAM, (), Distribution((1, 2, 3), 7.5)),
    ]
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(exposition(samples).decode())
        for sample in family.samples
    }
    assert found == {
        ("millrace_a_total", "disk"): 3,
        ("millrace_a_total", "origin"): 4,
        ("millrace_b_bytes", '/a "disk"\\ of\nmine'): 5,
        ("millrace_c_seconds_bucket", "0.1"): 1,
        ("millrace_c_seconds_bucket", "1.0"): 3,
        ("millrace_c_seconds_bucket", "+Inf"): 6,
        ("millrace_c_seconds_count",): 6,
        ("millrace_c_seconds_sum",): 7.5,
    }


def test_exposition_of_names_that_are_not_utf8_is_utf8() -> None:
    text = exposition([Sample(GAUGE, (os.fsdecode(b"/disk-\xff"),), 5)]).decode()
    assert 'millrace_b_bytes{disk="/disk-\\\\udcff"} 5' in text


@pytest.mark.parametrize("kind", ["counter", "gauge"])
def test_exposition_has_help_and_kind(kind: str) -> None:
    metric = COUNTER if kind == "counter" else GAUGE
    text = exposition([Sample(metric, ("x",), 1)]).decode()
    assert f"# HELP {metric.name} Help.\n# TYPE {metric.name} {kind}\n" in text


def test_flat_samples_have_no_histogram() -> None:
    flat = flat_samples([Sample(COUNTER, ("disk",), 3), Sample(HISTOGRAM, (), Distribution((1, 2, 3), 7.5))])
    assert [(sample.metric.name, sample.metric.kind, sample.value) for sample in flat] == [
        ("millrace_a_total", "counter", 3),
        ("millrace_c_seconds_count_total", "counter", 6),
        ("millrace_c_seconds_sum_total", "counter", 7.5),
    ]
    assert all(metric.kind != "histogram" for metric in flat_metrics())


def test_opentelemetry_exports_the_samples() -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    samples = [
        Sample(READS, ("origin",), 4),
        Sample(CAPACITY, ("/a",), 5),
        Sample(READ_SECONDS, ("disk",), Distribution((1, 2), 7.5)),
    ]
    reader = InMemoryMetricReader()
    telemetry.instrument(lambda: samples, meter_provider=MeterProvider([reader]))
    data = reader.get_metrics_data()
    assert data is not None
    found = {
        metric.name: [(dict(point.attributes), point.value) for point in metric.data.data_points]
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    assert {name: points for name, points in found.items() if points} == {
        "millrace_reads": [({"tier": "origin"}, 4)],
        "millrace_capacity_bytes": [({"disk": "/a"}, 5)],
        "millrace_read_duration_seconds_count": [({"tier": "disk"}, 3)],
        "millrace_read_duration_seconds_sum": [({"tier": "disk"}, 7.5)],
    }


def test_savings_are_reads_from_disks_and_bytes_that_a_node_had_cached_for_another() -> None:
    samples = samples_from([])
    assert {sample.value for sample in Prices().savings(samples)} == {0}
    tiers = {"mapped": (2000, 4e9), "disk": (1000, 1e9), "peer": (500, 3e9), "origin": (7, 7e9)}
    samples = [Sample(metric, (tier,), pair[place]) for tier, pair in tiers.items() for place, metric in PLACES]
    samples.append(Sample(SERVED_CACHED_BYTES, (), 2e9))
    assert [sample.value for sample in Prices(0.5, 0.01).savings(samples)] == [3000, 7e9, pytest.approx(1.5 + 0.07)]


def test_prices_come_from_the_environment() -> None:
    assert Prices.of({}) == Prices(0.0004, 0.0)
    assert Prices.of({"MILLRACE_PRICE_PER_1000_REQUESTS": "0.005", "MILLRACE_PRICE_PER_GB": " 0.09 "}) == Prices(
        0.005, 0.09
    )


@pytest.mark.parametrize("text", ["free", "-1", "nan", "inf"])
def test_invalid_price_is_a_configuration_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="MILLRACE_PRICE_PER_GB"):
        Prices.of({"MILLRACE_PRICE_PER_GB": text})
