"""The document behind the status page: the reports of the nodes as one JSON object. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from millrace.figures import hit_ratio

SCHEMA_VERSION = 1
"""It changes when a field is removed or gets another meaning, not when one is added."""

MOST_ROWS = 100
_RECENT_SAMPLES = 5  # ten seconds

Report = Mapping[str, Any]
"""The status of a node with `answers`, and with `details` if it responds; see `NodeProcess.status`."""

_NODE_FIELDS = ("member_id", "address", "state", "version", "seconds", "used_bytes", "capacity_bytes", "objects")


def status_document(reports: Sequence[Report], *, address: str, now: float) -> dict[str, Any]:
    """The document of the node at `address` at the time `now` (Unix seconds).

    A node that did not respond is in `nodes` with its error, and in no sum. Lists have at most a hundred rows, and one for
    the sums of others.
    """
    responding = [report for report in reports if report["answers"]]
    nodes = [_node(report, reports) for report in reports]
    counters = _sums(report["counters"] for report in responding)
    return {
        "schema_version": SCHEMA_VERSION,
        "time": now,
        "address": address,
        "nodes": nodes,
        "totals": {
            "answering": len(responding),
            "silent": [report["address"] for report in reports if not report["answers"]],
            **{
                name: sum(report[name] for report in responding) for name in ("used_bytes", "capacity_bytes", "objects")
            },
            "hit_ratio": hit_ratio(counters),
            **_throughput(_added_series(node["history"] for node in nodes)),
        },
        "datasets": _datasets(responding),
        "rules": _rows(responding, "rules")[:MOST_ROWS],
        "jobs": _jobs(responding),
        "loads": _loads(responding),
        "saves": [_saves(report) for report in responding],
        "runs": _runs(responding),
        "events": sorted(_rows(responding, "events"), key=lambda event: -event["time"])[:MOST_ROWS],
    }


def _node(report: Report, reports: Sequence[Report]) -> dict[str, Any]:
    if not report["answers"]:
        return {**{name: report[name] for name in ("member_id", "address", "answers", "error")}, "history": {}}
    addresses = {other["member_id"]: other["address"] for other in reports}
    return {
        **{name: report[name] for name in _NODE_FIELDS},
        "answers": True,
        "hit_ratio": report["hit_ratio"],
        "skips": [addresses[name] for name in report["breakers"] if name in addresses],  # others have gone
        "waiting_for": list(report["waiting_for"]),
        **_throughput(_details(report).get("history", {})),
    }


def _throughput(history: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """A history with the rates and the hit ratio of its last ten seconds. `recent_hit_ratio` is None without reads."""
    recent = {tier: sum(series[-_RECENT_SAMPLES:]) for tier, series in history.items()}
    taken = max((len(series[-_RECENT_SAMPLES:]) for series in history.values()), default=0)
    cached = recent.get("mapped", 0) + recent.get("disk", 0)
    # Relayed bytes are in two tiers. Other nodes count them, too, as reads from this node.
    read = cached + max(0, recent.get("peer", 0) + recent.get("origin", 0) - recent.get("relayed", 0))
    return {
        "history": {tier: list(series) for tier, series in history.items()},
        "per_second": {tier: total / taken if taken else 0.0 for tier, total in recent.items()},
        "recent_hit_ratio": cached / read if read else None,
    }


def _added_series(histories: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """The sums of several histories. All end now, so that they are added from their ends."""
    sums: dict[str, list[int]] = {}
    for history in histories:
        for tier, series in history.items():
            pairs = zip_longest(reversed(sums.get(tier, [])), reversed(series), fillvalue=0)
            sums[tier] = [a + b for a, b in pairs][::-1]
    return sums


def _datasets(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The data sets of all nodes, the largest first, each with its bytes on each node. What is left out is one more row."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    names = ("objects", "complete_objects", "nbytes")
    for report, row in _with_reports(reports, "datasets"):
        empty = {"origin": row["origin"], "url": row["url"], **dict.fromkeys(names, 0), "nodes": {}}
        dataset = found.setdefault((row["origin"], row["url"]), empty)
        dataset.update({name: dataset[name] + row[name] for name in names})
        dataset["nodes"][report["address"]] = row["nbytes"]
    largest = sorted(found.values(), key=lambda dataset: -dataset["nbytes"])
    left_out = largest[MOST_ROWS:]
    if left_out:
        others = _sums({name: row[name] for name in names} for row in left_out)
        return [*largest[:MOST_ROWS], {"origin": "", "url": "", **others, "nodes": {}}]
    return largest


def _jobs(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The reads of all nodes by job and prefix, the most bytes first. What is left out is added to the row without names."""
    sums: dict[tuple[str, str], dict[str, int]] = {}
    for _, row in _with_reports(reports, "jobs"):
        numbers = {name: value for name, value in row.items() if name not in ("job", "prefix")}
        key = row["job"], row["prefix"]
        sums[key] = _sums((sums.get(key, {}), numbers))
    named = sorted(filter(any, sums), key=lambda key: -(sums[key]["cached_bytes"] + sums[key]["fetched_bytes"]))
    if left_out := named[MOST_ROWS:]:
        sums["", ""] = _sums([sums.get(("", ""), {}), *map(sums.pop, left_out)])
    rows: list[dict[str, Any]] = []
    for (job, prefix), numbers in sums.items():
        read = numbers["cached_bytes"] + numbers["fetched_bytes"]
        ratio = numbers["cached_bytes"] / read if read else None
        rows.append({"job": job, "prefix": prefix, **numbers, "hit_ratio": ratio})
    return sorted(rows, key=lambda row: -(row["cached_bytes"] + row["fetched_bytes"]))


def _loads(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The running loads: each has one job on several nodes."""
    found: dict[str, dict[str, Any]] = {}
    names = ("objects", "done_objects", "nbytes", "done_bytes", "fetched_bytes", "bytes_per_second")
    for _, row in _with_reports(reports, "loads"):
        empty = {"job": row["job"], "urls": row["urls"], "listed": True, "seconds": 0.0, "nodes": 0}
        load = found.setdefault(row["job"], {**empty, **dict.fromkeys(names, 0)})
        load.update({name: load[name] + row[name] for name in names})
        load["listed"] = load["listed"] and row["listed"]
        load["seconds"] = max(load["seconds"], row["seconds"])
        load["nodes"] += 1
    return list(found.values())


def _saves(report: Report) -> dict[str, Any]:
    """The saves of a machine since its cache was created, with their means."""
    saves = dict(_details(report).get("saves", {}))
    number = saves.get("full", 0) + saves.get("delta", 0)
    for name in ("seconds", "blocked_seconds"):
        saves[f"mean_{name}"] = saves.get(name, 0) / number if number else None
    return {"node": report["address"], **saves, "ratio": _ratio(saves)}


def _runs(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The last save of each run. A run that moved to another machine has records on both: the newest counts."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(_rows(reports, "runs"), key=lambda row: row["time"]):
        before = found.get(row["url"], {"saves": 0, "failures": 0})
        sums = {name: before[name] + row[name] for name in ("saves", "failures")}
        found[row["url"]] = {**row, **sums, "ratio": _ratio(row)}
    return sorted(found.values(), key=lambda row: -row["time"])[:MOST_ROWS]


def _ratio(row: Mapping[str, Any]) -> float | None:
    """Stored bytes by raw bytes; None without a save."""
    return row["stored_bytes"] / row["raw_bytes"] if row.get("raw_bytes") else None


def _rows(reports: Sequence[Report], name: str) -> list[dict[str, Any]]:
    return [{**row, "node": report["address"]} for report, row in _with_reports(reports, name)]


def _with_reports(reports: Sequence[Report], name: str) -> list[tuple[Report, Mapping[str, Any]]]:
    return [(report, row) for report in reports for row in _details(report).get(name, ())]


def _details(report: Report) -> Mapping[str, Any]:
    found: Mapping[str, Any] = report.get("details", {})
    return found


def _sums(counted: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for counters in counted:
        for name, value in counters.items():
            sums[name] = sums.get(name, 0) + value
    return sums
