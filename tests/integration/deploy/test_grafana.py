"""The dashboard and the alert rules, with metrics of a real cluster in a real Prometheus."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from tests.support.grafana import ALERTS, alert_expressions, panel_expressions
from tests.support.local_cluster import TOKEN, LocalCluster
from tests.support.prometheus import PrometheusServer, find_prometheus

import millrace
from millrace.origin import open_origin
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.prometheus

OBJECTS, OBJECT_BYTES = 8, 50_000


class Monitored:
    """A cluster of two nodes, and the Prometheus that scrapes it."""

    def __init__(self, cluster: LocalCluster, prometheus: PrometheusServer) -> None:
        self.cluster = cluster
        self.prometheus = prometheus

    def read(self, bucket: str) -> None:
        """Read all objects on the machine of each node, twice."""
        for node in self.cluster.nodes:
            fs = millrace.filesystem("s3", **self.cluster.arguments(node))
            for _ in range(2):
                for number in range(OBJECTS):
                    fs.cat_file(f"{bucket}/{number}")
            fs.cache_counters(settled=True)

    def until(self, expression: str, holds: Callable[[list[Any]], bool]) -> list[Any]:
        """The result of an expression as soon as it holds."""
        deadline = time.monotonic() + 120
        while not holds(found := self.prometheus.query(expression)):
            assert time.monotonic() < deadline, (expression, found)
            time.sleep(0.2)
        return found


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> Iterator[Monitored]:
    directory = tmp_path_factory.mktemp("monitored")
    token = directory / "token"
    token.write_text(TOKEN)
    with LocalCluster(directory / "cluster", 2, target_options=s3.target_options) as cluster:
        scrape = {
            "job_name": "millrace",
            "scrape_interval": "500ms",
            "scrape_timeout": "500ms",
            "authorization": {"credentials_file": str(token)},
            "static_configs": [{"targets": [node.address for node in cluster.nodes]}],
        }
        configuration = {
            "global": {"evaluation_interval": "500ms"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [scrape],
        }
        with PrometheusServer(directory / "prometheus", configuration) as prometheus:
            yield Monitored(cluster, prometheus)


@pytest.mark.slow
def test_every_query_has_a_result_in_a_real_prometheus(monitored: Monitored, s3: S3Server, bucket: str) -> None:
    origin = open_origin("s3", s3.target_options)
    for number in range(OBJECTS):
        origin.put(f"{bucket}/{number}", bytes([number]) * OBJECT_BYTES)
    # Two scrapes at least before the reads: otherwise there is nothing to compute a rate from.
    monitored.until("min(count_over_time(up[1m]))", lambda found: bool(found) and float(found[0]["value"][1]) >= 2)
    monitored.read(bucket)
    monitored.until(
        'sum(millrace_reads_total{tier="mapped"})', lambda found: bool(found) and float(found[0]["value"][1]) > 0
    )
    for expression in panel_expressions(interval="1m"):
        monitored.until(expression, bool)  # after a slow scrape there is no value for a moment
    for expression in alert_expressions():
        monitored.prometheus.query(expression)
    counted = monitored.cluster.counters()["origin_bytes"]
    assert counted >= OBJECTS * OBJECT_BYTES
    monitored.until(
        'sum(millrace_read_bytes_total{tier="origin"})', lambda found: float(found[0]["value"][1]) == counted
    )
    (hits,) = monitored.until(panel_expressions(interval="1m")[0], bool)
    assert 0 < float(hits["value"][1]) <= 1
    assert not math.isnan(float(hits["value"][1]))


def test_dead_node_is_an_alert(monitored: Monitored) -> None:
    node = monitored.cluster.nodes[1]
    node.kill()
    try:
        # Of this node: on a busy machine, a scrape of the other one may take too long.
        monitored.until(f'ALERTS{{alertname="MillraceNodeDown",instance="{node.address}"}}', bool)
    finally:
        node.start()
        monitored.cluster.wait(node)
    monitored.until("sum(up)", lambda found: float(found[0]["value"][1]) == 2)


def test_promtool_accepts_the_rules_and_the_metrics(monitored: Monitored) -> None:
    tool = find_prometheus("promtool")
    rules = subprocess.run([tool, "check", "rules", ALERTS], capture_output=True, text=True)
    assert rules.returncode == 0, rules.stdout + rules.stderr
    connection = HTTPConnection(monitored.cluster.nodes[0].address, timeout=300)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    page = connection.getresponse().read()
    connection.close()
    metrics = subprocess.run([tool, "check", "metrics"], input=page, capture_output=True)
    assert metrics.returncode == 0, metrics.stdout + metrics.stderr
