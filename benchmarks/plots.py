"""Draws the plots of the documentation from the JSON of benchmark runs.

    python -m benchmarks opens scans checkpoint_sizes --json docs/figures/results.json
    python -m benchmarks.plots

Reads `docs/figures/results.json`, a list of results of `python -m benchmarks --json`, and writes a page of SVG for each plot
to `docs/assets`. Bars are medians of ratios, round by round; the lines on them reach from the lowest to the highest round.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.figures import Spread, paired_ratio
from benchmarks.harness import ROOT

RESULTS = ROOT / "docs" / "figures" / "results.json"
ASSETS = ROOT / "docs" / "assets"

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _GROUP, _TOP = 760, 250, 130, 16, 4, 14, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot: a group of bars for each phase of a case, a bar for each contender.

    `figure` is drawn as it is where `baseline` is None, otherwise as the ratio to the baseline's.
    """

    file: str
    case: str
    title: str
    figure: str
    phases: Mapping[str, str]
    contenders: Mapping[str, str | None]


PLOTS = (
    Plot(
        file="figures-opens.svg",
        case="opens",
        title="CPU time of warm reads, to the same library on local files (lower is better)",
        figure="CPU s",
        phases={
            "small files": "open and read 26 KB",
            "large files, open": "open a large file",
            "64 KiB reads": "64 KiB random reads",
        },
        contenders={
            "Millrace, pyarrow's face": "pyarrow, local files",
            "Millrace, fsspec's face": "fsspec, local files",
            "fsspec filecache over s3fs": "fsspec, local files",
            "fsspec blockcache over s3fs": "fsspec, local files",
        },
    ),
    Plot(
        file="figures-scans.svg",
        case="scans",
        title="CPU time of scans of cached Parquet, to local files (lower is better)",
        figure="CPU s",
        phases={
            "read_table": "pyarrow's read_table",
            "data set, pre-buffered": "a pyarrow data set",
            "data set, buffered as by Ray": "a data set, as Ray Data reads it",
            "read_table, one column": "read_table of one column",
        },
        contenders={"Millrace": "LocalFileSystem"},
    ),
    Plot(
        file="figures-sizes.svg",
        case="checkpoint_sizes",
        title="Size of a checkpoint, to its raw bytes (lower is better)",
        figure="size to raw",
        phases={
            "save bf16": "bf16 weights",
            "save fp32": "fp32 weights",
            "save bf16 + Adam": "bf16 weights and Adam",
            "save fp32 + Adam": "fp32 weights and Adam",
        },
        contenders={"Millrace": None, "Millrace max": None, "stock ZStandard": None},
    ),
    Plot(
        file="figures-saves.svg",
        case="checkpoint_sizes",
        title="CPU time of one thread, to torch's uncompressed save and load (lower is better)",
        figure="CPU s",
        phases={
            "save bf16": "save bf16 weights",
            "load bf16": "load bf16 weights",
            "save fp32 + Adam": "save fp32 weights and Adam",
            "load fp32 + Adam": "load fp32 weights and Adam",
        },
        contenders={"Millrace": "stock plain", "Millrace max": "stock plain", "stock ZStandard": "stock plain"},
    ),
)


def bars_of(plot: Plot, result: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, Spread]]]]:
    """The groups of a plot: the label of a phase, and the spread of each contender."""

    def column(contender: str, phase: str) -> list[float]:
        runs = sorted((run for run in result["runs"] if run["contender"] == contender), key=lambda run: run["round"])
        return [run["phases"][phase][plot.figure] for run in runs]

    groups = []
    for phase, label in plot.phases.items():
        bars = []
        for contender, baseline in plot.contenders.items():
            values = column(contender, phase)
            spread = Spread.of(values) if baseline is None else paired_ratio(values, column(baseline, phase))
            if spread is None:
                raise SystemExit(f"{plot.case}: no ratio of {contender} to {baseline} in {phase}")
            bars.append((contender, spread))
        groups.append((label, bars))
    return groups


def draw(plot: Plot, result: Mapping[str, Any]) -> str:
    """The plot as SVG, in the colours of the reader's system."""
    groups = bars_of(plot, result)
    highest = max(spread.high for _, bars in groups for _, spread in bars)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(highest, 1.0)
    parts, y = [], _TOP
    for label, bars in groups:
        parts.append(_text(8, y + 12, label, "group"))
        y += 20
        for number, (contender, spread) in enumerate(bars):
            middle = y + _BAR / 2
            parts += [
                _text(_LEFT - 8, y + 12, contender, "name"),
                f'<rect class="bar{number}" x="{_LEFT}" y="{y}" width="{spread.median * scale:.1f}" height="{_BAR}"/>',
                f'<path d="M{_LEFT + spread.low * scale:.1f} {middle:.1f}H{_LEFT + spread.high * scale:.1f}"/>',
                _text(_LEFT + spread.high * scale + 6, y + 12, _number(spread), "value"),
            ]
            y += _BAR + _GAP
        y += _GROUP
    one = _LEFT + scale
    machine = result["machine"]
    when = f"{machine['time'][:10]}, {machine['revision']}"
    rounds = f"{result['rounds']} round{'s' if result['rounds'] > 1 else ''}"
    note = f"{rounds} on {machine['cores']} cores {machine['processor']}, {when}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 24}" width="{_WIDTH}" role="img" '
            'font-family="sans-serif" font-size="12">',
            f"<title>{escape(plot.title)}</title>",
            "<style>text{fill:#222}path{stroke:#222;fill:none}.name,.value{font-size:11px}.name{text-anchor:end}"
            ".group{font-weight:bold}.note{font-size:10px}.one{stroke-dasharray:4 3;opacity:.5}"
            ".bar0{fill:#00897b}.bar1{fill:#4db6ac}.bar2{fill:#b0bec5}.bar3{fill:#cfd8dc}"
            "@media (prefers-color-scheme:dark){text{fill:#ddd}path{stroke:#ddd}.bar2{fill:#607d8b}.bar3{fill:#455a64}}"
            "</style>",
            _text(8, 20, plot.title, "group"),
            _text(8, 38, note, "note"),
            f'<path class="one" d="M{one:.1f} {_TOP - 8}V{y - _GROUP}"/>',
            _text(one - 3, _TOP - 12, "1", "value"),
            *parts,
            "</svg>",
            "",
        ]
    )


def plots(results: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The SVG of each plot, by file name. Raises SystemExit if a case is missing or a run is unusable."""
    by_case = {result["case"]: result for result in results}
    drawn = {}
    for plot in PLOTS:
        result = by_case.get(plot.case)
        if result is None or result["quick"] or result["failures"]:
            raise SystemExit(f"{RESULTS.name} has no complete run of {plot.case}: run python -m benchmarks {plot.case}")
        drawn[plot.file] = draw(plot, result)
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the plots."""
    del arguments
    for name, svg in plots(json.loads(RESULTS.read_text())).items():
        (ASSETS / name).write_text(svg)
        print(ASSETS / name)
    return 0


def _number(spread: Spread) -> str:
    around = "" if spread.low == spread.high else f" ({spread.low:.2f}–{spread.high:.2f})"
    return f"{spread.median:.2f}{around}"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


if __name__ == "__main__":
    raise SystemExit(main())
