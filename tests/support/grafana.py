"""The queries of the dashboard and of the alert rules in `deploy/grafana`."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
DASHBOARD = FOLDER / "millrace.json"
ALERTS = FOLDER / "alerts.yaml"


def panel_expressions(*, interval: str = "5m") -> list[str]:
    """The queries of all panels, for all instances."""
    texts = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", ())
    ]
    return [text.replace("$__rate_interval", interval).replace("$instance", ".*") for text in texts]


def alert_expressions() -> list[str]:
    """The conditions of all alerts."""
    return [rule["expr"] for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]]
