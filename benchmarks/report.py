"""Writes the measurements of the harness as JSON and a Markdown table, with the machine and the versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.figures import Spread, paired_ratio, with_spread
from benchmarks.harness import ROOT, Outcome

PACKAGES = (
    "millrace",
    "torch",
    "ray",
    "pyarrow",
    "fsspec",
    "s3fs",
    "obstore",
    "aiohttp",
    "backports.zstd",
    "zstandard",
    "lmdb",
    "numpy",
)
_COMPARED = ("wall s", "CPU s")
_HIDDEN = ("system s",)


def _first(path: str, start: str) -> str:
    lines = Path(path).read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(start)), "unknown")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # an export, or no git


def machine() -> dict[str, Any]:
    """What the figures depend on, apart from the code."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": _revision(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _first("/proc/cpuinfo", "model name"),
        "memory GiB": round(int(_first("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "load before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def as_json(outcome: Outcome, about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "case": outcome.case.name,
        "title": outcome.case.title,
        "quick": outcome.quick,
        "rounds": outcome.rounds,
        "machine": dict(about),
        "notes": list(outcome.notes),
        "failures": list(outcome.failures),
        "runs": [
            {"contender": run.contender, "round": run.round, "phases": run.phases, "result": run.result}
            for run in outcome.runs
        ],
    }


def _column(outcome: Outcome, contender: str, phase: str, figure: str) -> list[float]:
    """One figure of one contender's phase, in the order of the rounds; empty when it did not report it every time."""
    runs = sorted((run for run in outcome.runs if run.contender == contender), key=lambda run: run.round)
    values = [run.phases.get(phase, {}).get(figure) for run in runs]
    return [value for value in values if value is not None] if None not in values else []


def _phase_table(outcome: Outcome, phase: str) -> list[str]:
    names = [name for name in outcome.case.contenders if _column(outcome, name, phase, "wall s")]
    figures: list[str] = []
    for run in outcome.runs:
        figures += [figure for figure in run.phases.get(phase, {}) if figure not in (*figures, *_HIDDEN)]
    lines = [
        f"| {phase} | " + " | ".join(figures) + " | wall to baseline | CPU to baseline |",
        "|---" * (len(figures) + 3) + "|",
    ]
    for name in names:
        cells = [name]
        for figure in figures:
            column = _column(outcome, name, phase, figure)
            cells.append(with_spread(Spread.of(column)) if column else "")
        baseline = outcome.case.contenders[name].baseline
        for figure in _COMPARED:
            below = _column(outcome, baseline, phase, figure) if baseline else []
            ratio = paired_ratio(_column(outcome, name, phase, figure), below) if below else None
            cells.append(with_spread(ratio) if ratio else "")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def as_markdown(outcome: Outcome, about: Mapping[str, Any]) -> str:
    phases: list[str] = []
    for run in outcome.runs:
        phases += [phase for phase in run.phases if phase not in phases]
    lines = [f"## {outcome.case.title}", ""]
    lines += [f"- {note}" for note in outcome.notes]
    by_baseline: dict[str, list[str]] = {}
    for one in outcome.case.contenders.values():
        if one.baseline:
            by_baseline.setdefault(one.baseline, []).append(one.name)
    lines += [f"- Baseline, round by round, of {'; '.join(names)}: {below}." for below, names in by_baseline.items()]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines += [
        f"- Rounds: {outcome.rounds}{' (quick)' if outcome.quick else ''}; median (lowest–highest). "
        f"{about['time']}, revision {about['revision']}.",
        f"- {about['cores']} cores {about['processor']}, {about['memory GiB']} GiB, Linux {about['kernel']}, "
        f"load before {about['load before']}; Python {about['python']}, {versions}.",
        "",
    ]
    for phase in phases:
        lines += [*_phase_table(outcome, phase), ""]
    lines += [f"**Wrong result**: {failure}" for failure in outcome.failures]
    return "\n".join(lines).rstrip() + "\n"
