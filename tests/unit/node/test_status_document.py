"""The document behind the status page: what it contains for given reports of the nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.node.status_document import MOST_ROWS, SCHEMA_VERSION, status_document

NO_SAVES = {"full": 0, "delta": 0, "failures": 0, "raw_bytes": 0, "stored_bytes": 0, "seconds": 0.0}
NO_HISTORY: dict[str, list[int]] = {"mapped": [], "disk": [], "peer": [], "origin": []}


def report(name: str, *, counters: dict[str, int] | None = None, **details: Any) -> dict[str, Any]:
    """The report of a node that answers, with these parts of its details."""
    parts = {"history": NO_HISTORY, "saves": NO_SAVES}
    parts.update({part: [] for part in ("datasets", "rules", "jobs", "loads", "runs", "events")})
    return {
        "member_id": f"id-{name}",
        "address": f"{name}:1",
        "answers": True,
        "state": "here",
        "version": "1",
        "seconds": 5.0,
        "used_bytes": 10,
        "capacity_bytes": 100,
        "objects": 2,
        "hit_ratio": None,
        "breakers": [],
        "waiting_for": [],
        "counters": counters or {},
        "details": {**parts, **details},
    }


SILENT = {"member_id": "id-s", "address": "s:1", "answers": False, "error": "s:1: refused"}


def document(*reports: dict[str, Any]) -> dict[str, Any]:
    found = status_document(reports, address="a:1", now=100.0)
    assert json.loads(json.dumps(found)) == found
    return found


def test_document_of_an_idle_node_has_zeros_and_no_ratios() -> None:
    found = document(report("a"))
    assert (found["schema_version"], found["time"], found["address"]) == (SCHEMA_VERSION, 100.0, "a:1")
    assert found["totals"]["answering"] == 1
    assert found["totals"]["hit_ratio"] is found["totals"]["recent_hit_ratio"] is None
    assert found["saves"][0]["ratio"] is found["saves"][0]["mean_seconds"] is None
    for name in ("datasets", "rules", "jobs", "loads", "runs", "events"):
        assert found[name] == []


def test_document_names_a_silent_node_and_leaves_it_out_of_the_sums() -> None:
    found = document(report("a", counters={"cache_bytes": 30, "origin_bytes": 10}), SILENT)
    assert found["totals"]["silent"] == ["s:1"]
    assert (found["totals"]["used_bytes"], found["totals"]["capacity_bytes"]) == (10, 100)
    assert found["totals"]["hit_ratio"] == 0.75
    assert found["nodes"][1] == {**SILENT, "history": {}}


def test_document_without_an_answering_node_is_valid() -> None:
    assert document(SILENT)["totals"]["answering"] == 0


def test_node_of_a_version_without_details_has_no_rows() -> None:
    old = report("b")
    del old["details"]
    found = document(report("a"), old)
    assert found["nodes"][1]["history"] == {}
    assert found["saves"][1]["node"] == "b:1"


def test_skipped_peers_are_named_by_their_addresses() -> None:
    found = document({**report("a"), "breakers": ["id-s", "id-of-one-that-left"]}, SILENT)
    assert found["nodes"][0]["skips"] == ["s:1"]


@pytest.mark.parametrize(
    ("history", "per_second", "ratio"),
    [
        ({"mapped": [], "origin": []}, {"mapped": 0.0, "origin": 0.0}, None),
        ({"mapped": [0, 0], "origin": [0, 0]}, {"mapped": 0.0, "origin": 0.0}, None),
        ({"mapped": [30], "origin": [10]}, {"mapped": 30.0, "origin": 10.0}, 0.75),
        ({"mapped": [6], "origin": [9], "relayed": [7]}, {"mapped": 6.0, "origin": 9.0, "relayed": 7.0}, 0.75),
        ({"mapped": [900, 0, 0, 0, 0, 5], "origin": [900, 0, 0, 0, 0, 15]}, {"mapped": 1.0, "origin": 3.0}, 0.25),
    ],
)
def test_recent_figures_are_means_of_the_last_ten_seconds(
    history: dict[str, list[int]], per_second: dict[str, float], ratio: float | None
) -> None:
    [node] = document(report("a", history=history))["nodes"]
    assert (node["per_second"], node["recent_hit_ratio"]) == (per_second, ratio)


def test_histories_of_different_lengths_are_added_from_their_ends() -> None:
    found = document(
        report("a", history={"mapped": [1, 2, 3], "origin": [0, 0, 9]}),
        report("b", history={"mapped": [10], "origin": [1]}),
        SILENT,
    )
    assert found["totals"]["history"] == {"mapped": [1, 2, 13], "origin": [0, 0, 10]}


def dataset(url: str, nbytes: int) -> dict[str, Any]:
    return {"origin": "s3", "url": url, "objects": 2, "complete_objects": 1, "nbytes": nbytes}


def test_dataset_on_two_nodes_is_one_row_with_both() -> None:
    found = document(
        report("a", datasets=[dataset("s3://b/x", 5), dataset("s3://b/y", 7)]),
        report("b", datasets=[dataset("s3://b/x", 6)]),
    )
    both = {"objects": 4, "complete_objects": 2, "nbytes": 11, "nodes": {"a:1": 5, "b:1": 6}}
    assert found["datasets"][0] == {"origin": "s3", "url": "s3://b/x", **both}
    assert [row["url"] for row in found["datasets"]] == ["s3://b/x", "s3://b/y"]


def test_equal_urls_of_two_services_are_two_datasets() -> None:
    other = {**dataset("s3://b/x", 5), "origin": "s3+http://other"}
    assert len(document(report("a", datasets=[dataset("s3://b/x", 5), other]))["datasets"]) == 2


def test_datasets_above_the_limit_are_one_row() -> None:
    many = [dataset(f"s3://b/{number}", number) for number in range(MOST_ROWS + 3)]
    rows = document(report("a", datasets=many))["datasets"]
    assert len(rows) == MOST_ROWS + 1
    assert (rows[-1]["url"], rows[-1]["objects"], rows[-1]["nbytes"]) == ("", 6, 0 + 1 + 2)


@pytest.mark.parametrize("name", ["rules", "events"])
def test_list_of_the_document_has_a_limited_number_of_rows(name: str) -> None:
    many = [{"time": number} for number in range(MOST_ROWS + 3)]
    assert len(document(report("a", **{name: many}))[name]) == MOST_ROWS


def test_jobs_beyond_the_most_rows_are_summed_in_the_row_without_names() -> None:
    read = {
        "cached_reads": 1,
        "cached_bytes": 3,
        "fetched_reads": 1,
        "fetched_bytes": 1,
        "peer_reads": 0,
        "peer_bytes": 0,
    }
    many = [{"job": f"job {number}", "prefix": "s3://b/train", **read} for number in range(MOST_ROWS + 3)]
    for others, count in (([], 3), ([{"job": "", "prefix": "", **read}], 4)):
        rows = document(report("a", jobs=[*many, *others]))["jobs"]
        assert len(rows) == MOST_ROWS + 1
        (row,) = [row for row in rows if not row["job"]]
        assert (row["prefix"], row["cached_bytes"], row["fetched_bytes"], row["hit_ratio"]) == (
            "",
            3 * count,
            count,
            0.75,
        )


def test_job_on_two_nodes_is_one_row_with_its_hit_ratio() -> None:
    row = {"job": "j", "prefix": "b/x", "cached_reads": 1, "cached_bytes": 30, "fetched_reads": 1, "fetched_bytes": 10}
    none = {**row, "job": "k", "cached_bytes": 0, "fetched_bytes": 0}
    found = document(report("a", jobs=[row, none]), report("b", jobs=[{**row, "fetched_bytes": 50}]))["jobs"]
    assert (found[0]["cached_bytes"], found[0]["fetched_bytes"], found[0]["hit_ratio"]) == (60, 60, 0.5)
    assert (found[1]["job"], found[1]["hit_ratio"]) == ("k", None)


def test_load_on_two_nodes_has_the_sum_of_their_progress() -> None:
    numbers = {
        "objects": 3,
        "done_objects": 1,
        "nbytes": 30,
        "done_bytes": 10,
        "fetched_bytes": 9,
        "bytes_per_second": 2.0,
    }
    row = {"job": "1", "urls": ["s3://b/x"], "listed": True, "seconds": 4.0, **numbers}
    [load] = document(report("a", loads=[row]), report("b", loads=[{**row, "listed": False, "seconds": 5.0}]))["loads"]
    assert (load["nbytes"], load["done_bytes"], load["nodes"], load["listed"]) == (60, 20, 2, False)
    assert (load["seconds"], load["bytes_per_second"]) == (5.0, 4.0)


def test_run_with_records_of_two_machines_shows_the_newest_save_and_all_counts() -> None:
    old = {"url": "s3://b/run", "time": 1.0, "saves": 3, "failures": 1, "step": 3, "stored_bytes": 5, "raw_bytes": 10}
    new = {**old, "time": 2.0, "saves": 1, "failures": 0, "step": 4, "stored_bytes": 8}
    [run] = document(report("a", runs=[new]), report("b", runs=[old]))["runs"]
    assert (run["step"], run["node"], run["saves"], run["failures"], run["ratio"]) == (4, "a:1", 4, 1, 0.8)


def test_run_whose_first_save_failed_has_no_ratio() -> None:
    failed = {"url": "s3://b/run", "time": 1.0, "saves": 0, "failures": 1, "failed_step": 3, "error": "full"}
    [run] = document(report("a", runs=[failed]))["runs"]
    assert (run["ratio"], run["error"]) == (None, "full")


def test_saves_of_a_machine_have_means_and_a_ratio() -> None:
    saves = {
        **NO_SAVES,
        "full": 1,
        "delta": 1,
        "raw_bytes": 100,
        "stored_bytes": 40,
        "seconds": 3.0,
        "blocked_seconds": 1.0,
    }
    [row] = document(report("a", saves=saves))["saves"]
    assert (row["ratio"], row["mean_seconds"], row["mean_blocked_seconds"]) == (0.4, 1.5, 0.5)


def test_events_of_all_nodes_are_the_newest_first() -> None:
    found = document(
        report("a", events=[{"time": 3.0, "text": "x"}, {"time": 1.0, "text": "y"}]),
        report("b", events=[{"time": 2.0, "text": "z"}]),
    )
    assert [(event["time"], event["node"]) for event in found["events"]] == [(3.0, "a:1"), (2.0, "b:1"), (1.0, "a:1")]
