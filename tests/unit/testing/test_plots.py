"""The plots of the documentation: what they draw, and that they are those of the stored results."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from benchmarks.plots import ASSETS, PLOTS, RESULTS, Plot, bars_of, draw, plots

PLOT = Plot(
    file="x.svg", case="x", title="a < b", figure="CPU s", phases={"read": "reads"}, contenders={"ours": "theirs"}
)


def result(**changes: Any) -> dict[str, Any]:
    runs = [
        {"contender": name, "round": number, "phases": {"read": {"CPU s": seconds}}}
        for name, values in (("ours", (1.0, 3.0)), ("theirs", (2.0, 4.0)))
        for number, seconds in enumerate(values)
    ]
    machine = {"cores": 2, "processor": "P", "time": "2026-01-02T03:04:05", "revision": "abc"}
    return {"case": "x", "rounds": 2, "quick": False, "failures": [], "machine": machine, "runs": runs, **changes}


def test_bars_are_ratios_taken_round_by_round() -> None:
    [(label, [(contender, spread)])] = bars_of(PLOT, result())
    assert (label, contender) == ("reads", "ours")
    assert (spread.median, spread.low, spread.high) == (0.625, 0.5, 0.75)


def test_plot_is_well_formed_and_names_the_run() -> None:
    svg = draw(PLOT, result())
    texts = [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in texts
    assert "0.62 (0.50–0.75)" in texts
    assert any("2026-01-02, abc" in (text or "") for text in texts)


@pytest.mark.parametrize("changes", [{"quick": True}, {"failures": ["wrong"]}, {"case": "y"}])
def test_unusable_results_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="no complete run"):
        plots([result(case=PLOTS[0].case) | changes])


def test_stored_plots_are_those_of_the_stored_results() -> None:
    for name, svg in plots(json.loads(RESULTS.read_text())).items():
        assert (ASSETS / name).read_text() == svg, f"{name}: run python -m benchmarks.plots"
