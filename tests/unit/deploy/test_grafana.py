"""The dashboard and the alert rules name only metrics and labels that are declared."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from tests.support.grafana import ALERTS, DASHBOARD, alert_expressions, panel_expressions

from millrace.event_log import EVENTS
from millrace.metrics import METRICS

DECLARED = {metric.name: metric for metric in METRICS}
OF_PROMETHEUS = {"instance", "job", "le", "up"}


@pytest.mark.parametrize("expression", [*panel_expressions(), *alert_expressions()])
def test_expression_names_declared_metrics_and_labels(expression: str) -> None:
    names = re.findall(r"\b(millrace_[a-z_]+|up)\b", expression)
    assert names
    labels = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!=|=)", expression))
    labels |= {label for group in re.findall(r"(?:by|without) \(([^)]*)\)", expression) for label in group.split(", ")}
    known = set(OF_PROMETHEUS)
    for name in set(names) - OF_PROMETHEUS:
        metric = DECLARED.get(name) or DECLARED[re.sub(r"_(bucket|sum|count)$", "", name)]
        assert (metric.name != name) == (metric.kind == "histogram")
        known |= set(metric.labels)
    assert labels <= known


def test_alerts_name_declared_events() -> None:
    patterns = re.findall(r'event=~"([^"]+)"', ALERTS.read_text())
    for pattern in patterns:
        assert any(re.fullmatch(pattern.replace("\\\\", "\\"), name) for name in EVENTS)


def test_every_alert_has_a_summary_a_next_step_and_a_severity() -> None:
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_panels_have_distinct_ids_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
