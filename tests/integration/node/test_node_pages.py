"""The pages of a node: `/metrics`, `/healthz` and `/readyz` for monitors, and the parts of the status page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.fork_server import ForkedProcess, torch_server

import millrace
from millrace.cache.eviction.usage import Tally
from millrace.cluster.attach import close_all
from millrace.config import resolve
from millrace.event_log import EVENTS
from millrace.events import Event, emit
from millrace.metrics import METRICS
from millrace.node.process import NodeProcess
from millrace.origin import open_origin
from millrace.store.records import ObjectName
from millrace.testing.process import free_ports
from millrace.testing.s3 import S3Server

TOKEN = "a-token-for-tests-only"
Start = Callable[..., NodeProcess]


@pytest.fixture
def start(tmp_path: Path, s3: S3Server) -> Iterator[Start]:
    """Starts a node of one member."""
    (port,) = free_ports(1)
    given = {"cache_dir": str(tmp_path / "cache"), "min_free": 0, "cluster_token": TOKEN}
    running = []

    def start_node(**more: Any) -> NodeProcess:
        options = resolve({**given, "members": f"static://127.0.0.1:{port}"})
        node = NodeProcess(options, port=port, origins=[open_origin("s3", s3.target_options)], **more)
        node.start()
        running.append(node)
        return node

    yield start_node
    close_all()
    for node in running:
        node.close()


def get(node: NodeProcess, path: str, *, token: str | None = None, method: str = "GET") -> tuple[int, str, str]:
    """The status, type and text of a page."""
    connection = HTTPConnection(node.address, timeout=300)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        return response.status, response.headers.get("Content-Type", ""), response.read().decode()
    finally:
        connection.close()


def scraped(node: NodeProcess) -> dict[tuple[str, ...], float]:
    """The values of `/metrics` by the name and the values of the labels."""
    status, _, text = get(node, "/metrics", token=TOKEN)
    assert status == 200
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_probes_need_no_token_and_show_no_detail(start: Start) -> None:
    node = start()
    assert node.wait_here(300)
    for path in ("/healthz", "/readyz"):
        assert get(node, path) == (200, "text/plain; charset=utf-8", "ok\n")
        assert get(node, path, token=TOKEN) == (200, "text/plain; charset=utf-8", "ok\n")
        assert get(node, path, token="a wrong one") == (200, "text/plain; charset=utf-8", "ok\n")
        assert get(node, path, method="HEAD") == (200, "text/plain; charset=utf-8", "")
        assert get(node, path, method="POST")[0] == 401
        assert get(node, f"{path}/more")[0] == 401


def test_node_that_has_left_is_healthy_and_not_ready(start: Start) -> None:
    node = start()
    assert node.wait_here(300)
    node.drain(0.0)
    assert get(node, "/healthz")[0] == 200
    assert get(node, "/readyz") == (503, "text/plain; charset=utf-8", "unavailable\n")


def test_metrics_need_the_token_unless_they_are_public(start: Start) -> None:
    node = start()
    assert get(node, "/metrics") == (401, "", "")
    assert get(node, "/metrics", token="a wrong one")[0] == 401
    status, content_type, text = get(node, "/metrics", token=TOKEN)
    assert status == 200
    assert content_type.startswith("text/plain; version=")
    assert TOKEN not in text


def test_public_metrics_are_served_without_the_token(start: Start) -> None:
    node = start(public_metrics=True)
    assert get(node, "/metrics")[0] == 200
    assert get(node, "/v1/status")[0] == 401


def test_metrics_are_the_sums_over_all_processes_of_the_store(
    start: Start, bucket: str, s3: S3Server, tmp_path: Path
) -> None:
    node = start()
    assert node.wait_here(300)
    open_origin("s3", s3.target_options).put(f"{bucket}/key", b"x" * 30_000)
    code = (
        "import json, sys, millrace; fs = millrace.filesystem('s3', **json.loads(sys.argv[1]))\n"
        "for _ in range(3): fs.cat_file(sys.argv[2])\n"
        "fs.cache_counters(settled=True)"
    )
    options = {
        "target_options": s3.target_options,
        "cache_dir": str(tmp_path / "cache"),
        "min_free": 0,
        "members": node._options.members,
        "cluster_token": TOKEN,
    }
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, json.dumps(options), f"{bucket}/key"], check=True)
    found = scraped(node)
    assert found["millrace_read_bytes_total", "origin"] == 30_000
    assert found["millrace_read_duration_seconds_count", "origin"] == found["millrace_reads_total", "origin"] == 1
    assert found["millrace_reads_total", "mapped"] >= 3
    assert found["millrace_read_bytes_total", "mapped"] == 30_000 * found["millrace_reads_total", "mapped"]
    assert found["millrace_used_bytes", str(node.node.open_disks[0].store.directory)] >= 30_000
    assert found["millrace_cluster_members", "here"] == 1
    assert found["millrace_origin_requests_in_flight",] == 0


def test_events_that_have_not_happened_are_exported_as_zero(start: Start) -> None:
    found = scraped(start())
    assert found["millrace_events_total", "cache.disk.left_out"] == 0
    assert {labels[1] for labels in found if labels[0] == "millrace_events_total"} == {*EVENTS, "other"}


def test_every_metric_of_the_declarations_is_exported(start: Start) -> None:
    node = start()
    name = ObjectName("s3", "bucket/train/key", "version").pack()
    node.node.open_disks[0].attribution.add([Tally(b"unit", 0, 10, name, hits=2, hit_bytes=20)])
    emit(Event(name="cache.over_capacity", subject="a disk"))
    emit(Event(name="an.event.of.another.program", subject="x"))
    _, _, text = get(node, "/metrics", token=TOKEN)
    assert {family.name for family in text_string_to_metric_families(text)} == {
        metric.name.removesuffix("_total") for metric in METRICS
    }
    found = scraped(node)
    assert found["millrace_events_total", "cache.over_capacity"] == 1
    assert found["millrace_events_total", "other"] == 1
    # The labels are in the order of their names: job, prefix, source.
    assert found["millrace_job_read_bytes_total", "", "s3://bucket/train", "cache"] == 20


@pytest.mark.slow
def test_saves_of_a_training_process_are_exported_by_the_node(start: Start, tmp_path: Path) -> None:
    node = start()
    code = (
        "import sys, torch; from millrace.checkpoint import CheckpointManager\n"
        "with CheckpointManager(sys.argv[1], local=sys.argv[2]) as run:\n"
        "    for step in range(3): run.save(step, {'weight': torch.arange(100000) + step})"
    )
    places = [str(tmp_path / "run"), str(tmp_path / "local")]
    environment = {**os.environ, "MILLRACE_CACHE_DIR": str(tmp_path / "cache")}
    with ForkedProcess(torch_server(), code, *places, log=tmp_path / "log", env=environment, pipes=True) as saving:
        saving.output()
    found = scraped(node)
    saves = sum(found["millrace_checkpoint_saves_total", kind] for kind in ("full", "delta"))
    assert saves == found["millrace_checkpoint_save_duration_seconds_count",] == 3
    assert found["millrace_checkpoint_blocked_seconds_count",] == 3
    assert found["millrace_checkpoint_raw_bytes_total",] == 3 * 800_000
    assert 0 < found["millrace_checkpoint_size_bytes_sum",] < 3 * 800_000
    assert found["millrace_checkpoint_upload_backlog_bytes",] == 0
    document = json.loads(get(node, "/status.json", token=TOKEN)[2])
    [run] = document["runs"]
    assert (run["url"], run["step"], run["saves"], run["error"]) == (places[0], 2, 3, "")
    assert run["raw_bytes"] == 800_000
    assert document["saves"][0]["full"] + document["saves"][0]["delta"] == 3


# --- the status page (in a browser: test_status_page.py) ----------------------------------------------------


def test_status_page_needs_no_token_and_is_the_same_for_everyone(start: Start) -> None:
    node = start()
    status, content_type, text = get(node, "/")
    assert (status, content_type) == (200, "text/html; charset=utf-8")
    assert get(node, "/", token=TOKEN)[2] == text
    assert not {node.member_id, node.address, TOKEN} & set(re.findall(r"[\w.:-]+", text))
    assert get(node, "/", method="POST")[0] == 401


def test_status_page_names_no_other_server_and_allows_only_its_own_script(start: Start) -> None:
    connection = HTTPConnection(start().address, timeout=300)
    connection.request("GET", "/")
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall(r"'sha256-[\w+/=]{44}'", policy)) == 2
    assert set(re.findall(r"https?://[\w.]+", text)) == {"http://www.w3.org"}  # the name of SVG, which is not requested
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_status_document_needs_the_token(start: Start) -> None:
    node = start(public_metrics=True)
    assert get(node, "/status.json") == (401, "", "")
    assert get(node, "/status.json", token="a wrong one")[0] == 401
    status, content_type, text = get(node, "/status.json", token=TOKEN)
    assert (status, content_type) == (200, "application/json")
    assert TOKEN not in text


def test_status_document_contains_reads_rules_and_events(
    start: Start, bucket: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_peers: None
) -> None:
    monkeypatch.setenv("MILLRACE_JOB", "a-job")
    node = start()
    assert node.wait_here(300)
    open_origin("s3", s3.target_options).put(f"{bucket}/train/key", b"x" * 30_000)
    fs = millrace.filesystem(
        "s3",
        target_options=s3.target_options,
        cache_dir=str(tmp_path / "cache"),
        min_free=0,
        members=node._options.members,
        cluster_token=TOKEN,
    )
    fs.pin(f"s3://{bucket}/train")
    for _ in range(3):
        fs.cat_file(f"{bucket}/train/key")
    fs.cache_counters(settled=True)
    deadline = time.monotonic() + 120
    joined = False  # the event comes after the state
    while not (
        (found := json.loads(get(node, "/status.json", token=TOKEN)[2]))["jobs"] and found["datasets"] and joined
    ):
        joined = any(event["text"] == "this node has joined the cluster" for event in found["events"])
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    [row] = found["nodes"]
    assert (row["address"], row["answers"], row["state"]) == (node.address, True, "here")
    [dataset] = found["datasets"]
    assert (dataset["url"], dataset["nbytes"], dataset["complete_objects"]) == (f"s3://{bucket}/train", 30_000, 1)
    assert dataset["nodes"] == {node.address: 30_000}
    [rule] = found["rules"]
    assert (rule["url"], rule["pinned"], rule["quota_bytes"]) == (f"s3://{bucket}/train", True, None)
    assert {(job["job"], job["prefix"]) for job in found["jobs"]} == {("a-job", f"s3://{bucket}/train")}
    assert found["loads"] == found["runs"] == []


def test_status_document_hides_the_query_of_a_pinned_web_address(start: Start, tmp_path: Path) -> None:
    node = start()
    assert node.wait_here(300)
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "members": node._options.members}
    millrace.filesystem("https", min_free=0, cluster_token=TOKEN, **options).pin("https://host/key?signature=abc")
    deadline = time.monotonic() + 120
    while not (found := json.loads(text := get(node, "/status.json", token=TOKEN)[2]))["rules"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [(rule["url"], rule["prefix"]) for rule in found["rules"]] == [("https://host/key?...", "host/key?...")]
    assert "signature" not in text


def test_status_document_after_the_node_has_left_shows_its_state(start: Start) -> None:
    node = start()
    assert node.wait_here(300)
    node.drain(0.0)
    [row] = json.loads(get(node, "/status.json", token=TOKEN)[2])["nodes"]
    assert (row["address"], row["state"]) == (node.address, "left")


def test_status_without_details_has_none(start: Start) -> None:
    assert "details" not in start().status()
