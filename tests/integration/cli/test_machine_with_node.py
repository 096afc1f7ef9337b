"""Commands and readers on the machine of a node: its limits apply to them, and the commands report them."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.cli import main
from millrace.cluster.attach import close_all
from millrace.config import resolve
from millrace.events import Event, emit
from millrace.node.process import NodeProcess
from millrace.origin import open_origin
from millrace.testing.process import free_ports

CAPACITY = 3_000_000
TOKEN = "a-token-only-in-the-nodes-folder"

Json = Callable[..., Any]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeProcess]:
    """A node with limits that this process's own configuration does not have."""
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "cache"))
    (port,) = free_ports(1)
    members = f"static://127.0.0.1:{port}"
    options = resolve(
        {"members": members, "cluster_token": TOKEN, "capacity": CAPACITY, "min_free": "0B", "replicas": 2}
    )
    running = NodeProcess(options, port=port, origins=[open_origin("file")])
    running.start()
    yield running
    close_all()
    running.close()


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Json:
    """Runs a command with `--json`; returns its document."""

    def run(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def shown(document: Any) -> dict[str, tuple[Any, str]]:
    return {each["name"]: (each["value"], each["source"]) for each in document["options"]}


def test_config_show_next_to_a_node_prints_its_limits(node: NodeProcess, printed: Json) -> None:
    found, source = shown(printed("config", "show")), f"node {node.address}"
    assert (found["capacity"], found["min_free"]) == (("3MB", source), ("0B", source))
    assert (found["replicas"], found["cluster_token"]) == ((1, "default"), (None, "default"))  # not in its cluster


def test_config_show_in_the_cluster_of_a_node_prints_what_it_takes_from_it(
    node: NodeProcess, printed: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_MEMBERS", f"static://{node.address}")
    found, source = shown(printed("config", "show")), f"node {node.address}"
    assert found["capacity"] == ("3MB", source)
    assert (found["replicas"], found["cluster_token"], found["tls"]) == ((2, source), ("set", source), (None, source))


def test_config_show_after_resize_prints_the_size_and_resize(node: NodeProcess, printed: Json, tmp_path: Path) -> None:
    printed("resize", "7GB")
    assert shown(printed("config", "show"))["capacity"] == ("7GB", "resize")
    both = ["--cache-dir", str(tmp_path / "cache"), "--cache-dir", str(tmp_path / "new")]
    assert shown(printed("config", "show", *both))["capacity"] == (["7GB", "3MB"], "resize")
    printed("resize", "--default")
    assert shown(printed("config", "show"))["capacity"] == ("3MB", f"node {node.address}")
    assert not (tmp_path / "new").exists()


def test_status_next_to_a_node_prints_its_capacity(node: NodeProcess, printed: Json) -> None:
    state = printed("status")
    assert [disk["capacity_bytes"] for disk in state["disks"]] == [state["cluster"]["capacity_bytes"]] == [CAPACITY]


def test_reader_without_members_next_to_a_node_stays_within_its_capacity(node: NodeProcess, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.bin").write_bytes(bytes(1_250_000))
    code = """
import sys
import millrace
fs = millrace.filesystem("file", members="none")
for path in sys.argv[1:]:
    assert len(fs.cat_file(path)) == 1_250_000
"""
    paths = [str(tmp_path / f"{number}.bin") for number in range(4)]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=300)
    ((_, used, capacity),) = node.node.disks()
    assert 0 < used <= capacity == CAPACITY


def test_debug_bundle_next_to_a_node_has_its_limits_events_and_metrics_and_no_secret(
    node: NodeProcess, printed: Json, tmp_path: Path
) -> None:
    emit(
        Event(name="cluster.member.lost", subject="10.0.0.5:1", detail=f"uses {TOKEN}, https://host/key?signature=abc")
    )
    printed("debug", "bundle", "--output", str(tmp_path / "bundle.tar.gz"))
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        files = {entry.name.rpartition("/")[2]: archive.extractfile(entry) for entry in archive}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    parts = {name: json.loads(text) for name, text in texts.items()}
    assert shown({"options": parts["options.json"]})["capacity"] == ("3MB", f"node {node.address}")
    assert parts["status.json"]["disks"][0]["capacity_bytes"] == CAPACITY
    (status,) = parts["nodes.json"]
    assert (status["address"], status["answers"], status["capacity_bytes"]) == (node.address, True, CAPACITY)
    details = {event["subject"]: event["detail"] for event in status["details"]["events"]}
    assert details["10.0.0.5:1"] == "uses ***, https://host/key?..."
    assert any(line.startswith("millrace_capacity_bytes") for line in status["metrics"])
    everything = "".join(texts.values())
    assert TOKEN not in everything
    assert "signature=abc" not in everything
