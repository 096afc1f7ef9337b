"""`make demo` from its command to its report, cut short: real S3, real Ray, a process killed, a second run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import millrace
from millrace.checkpoint import describe
from millrace.testing.s3 import S3Server

DEMO = Path(__file__).parents[3] / "examples" / "speech" / "demo.py"

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SECONDS = 120.0
"""Enough for processes to end on a very busy machine."""


def demo(directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(DEMO), "--quick", "--directory", str(directory), *arguments]


def run(directory: Path, *arguments: str) -> tuple[dict[str, Any], list[str]]:
    command = demo(directory, "--json", *arguments)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    wait_for_none_of(directory)
    assert not (directory / "ray").exists()
    return json.loads(done.stdout), done.stderr.splitlines()


def processes_of(directory: Path) -> list[str]:
    """Processes that name the directory, or are Ray's and have it in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            where = [*process.cmdline(), process.cwd(), process.environ().get("TESTED_DEMO_MARK", "")]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if any(str(directory) in text for text in where) and process.pid != os.getpid():
            found.append(f"{process.pid} {process.name()}")
    return found


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path, as most clones have: Ray's sockets fit into it."""
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as short:
        # Every process that the demo starts inherits it, and is found by it.
        monkeypatch.setenv("TESTED_DEMO_MARK", f"{short}/demo")
        # Ray Train runs all in processes with an environment of its own: Ray's first ones would start in vain.
        monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")
        yield Path(short, "demo")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory without settings."""
    for name in [*(name for name in os.environ if name.startswith(("XDG_", "MILLRACE_"))), "MPLCONFIGDIR"]:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.timeout(1200)  # two runs of up to ten minutes
def test_second_demo_run_in_the_same_directory_succeeds(directory: Path, home: Path, tmp_path: Path) -> None:
    result, lines = run(directory)
    assert list(home.rglob("*")) == []  # everything is in the directory

    # Killed in the middle of the second epoch, which the second attempt does again, whole.
    epochs = result["epochs"]
    assert [(epoch["epoch"], epoch["attempt"], epoch["clips"]) for epoch in epochs] == [
        (1, 0, 48),
        (2, 1, 48),
        (3, 1, 48),
    ]
    assert result["restarts"] == 1
    assert result["recovery_seconds"] > 0
    words = [line.split()[0] for line in lines]
    assert words[-6:] == ["training", "epoch", "killed", "resumed", "epoch", "epoch"]

    # Only the first epoch reads the origin; the region, which is outside the cache, counted the same.
    assert epochs[0]["origin_bytes"] > 100_000
    assert [epoch["origin_bytes"] for epoch in epochs[1:]] == [0, 0]
    assert all(epoch["cache_bytes"] > 100_000 for epoch in epochs[1:])
    # The same clips are the same bytes, also where an epoch takes less time than readers take to count what they read.
    assert len({epoch["cache_bytes"] for epoch in epochs[1:]}) == 1
    assert result["origin_bytes"] == result["witness_bytes"]
    assert len({epoch["clips_digest"] for epoch in epochs}) == 1
    saved = result["checkpoints"]
    assert list(saved) == ["1", "2", "3"]
    assert all(0 < checkpoint["stored_bytes"] < checkpoint["raw_bytes"] for checkpoint in saved.values())
    assert [[worker["rank"] for worker in epoch["workers"]] for epoch in epochs] == [[0], [0], [0]]
    assert 0 < result["metrics"]["test_clips_held_out"] < result["metrics"]["test_clips"] == 12

    page = Path(result["report"]).read_text(encoding="utf-8")
    assert page.count("<svg") >= 4
    assert 'src="http' not in page
    assert "<script" not in page

    with S3Server(directory / "s3") as server:
        options = {"target_options": server.target_options, "cache_dir": str(tmp_path / "look"), "min_free": 0}
        fs = millrace.filesystem("s3", **options)
        base = result["run"].removeprefix("s3://")
        names = {path.removeprefix(f"{base}/") for path in fs.find(base)}
        wanted = {"model/config.json", "model/model.safetensors", "training.jsonl", "metrics.json", "report.html"}
        assert wanted <= names
        events = [json.loads(line)["event"] for line in fs.cat_file(f"{base}/training.jsonl").splitlines()]
        assert sorted(events) == sorted(["start"] * 2 + ["kill"] + ["epoch"] * 3 + ["end"])
        assert fs.cat_file(f"{base}/report.html").decode() == page
        for epoch, checkpoint in saved.items():
            url = f"{result['run']}/checkpoints/step-{int(epoch):012d}"
            assert describe(url, target_options=server.target_options).stored_bytes == checkpoint["stored_bytes"]

    again, lines = run(directory, "--no-chaos", "--epochs", "1")
    assert again["restarts"] == 0
    assert again["origin_bytes"] == again["witness_bytes"] == 0  # all from the cache of the first run
    assert any("from an earlier run" in line for line in lines)


def start(directory: Path, line: str) -> subprocess.Popen[str]:
    """A demo that has come to `line`."""
    process = subprocess.Popen(
        demo(directory), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert any(line in text for text in process.stdout)
    return process


def wait_for_none_of(directory: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while (left := processes_of(directory)) and time.monotonic() < deadline:
        time.sleep(0.2)  # killed ones take a moment to be gone
    assert left == []


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "starting Ray"),
        # Later than the other: while Ray starts, its own handler may receive SIGTERM, and aborts.
        (signal.SIGTERM, 143, "starting 1 worker"),
    ],
)
def test_demo_ended_by_signal_leaves_no_process_and_no_ray_directory(
    directory: Path, number: signal.Signals, code: int, line: str
) -> None:
    process = start(directory, line)
    time.sleep(3)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    process.communicate(timeout=180)
    assert process.returncode == code
    wait_for_none_of(directory)
    assert not (directory / "ray").exists()


def test_kill_9_leaves_no_process_and_no_file_elsewhere(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start(directory, "starting 1 worker")
    time.sleep(3)
    assert (directory / "ray").stat().st_mode & 0o777 == 0o700  # no other user can use Ray's sockets
    process.kill()
    process.communicate(timeout=SECONDS)
    wait_for_none_of(directory)  # Ray's processes end by themselves within a minute
    assert list(tmp_path.iterdir()) == []


def test_demo_with_unusable_directory_prints_one_line(directory: Path) -> None:
    with S3Server(directory / "s3"):
        second = subprocess.run(demo(directory), check=False, capture_output=True, text=True, timeout=300)
    assert (second.returncode, second.stdout) == (1, "")
    assert "another S3 server is using" in second.stderr
    assert second.stderr.count("\n") == 1
    (directory / "common-voice").write_text("a file where a folder should be")
    blocked = subprocess.run(demo(directory), check=False, capture_output=True, text=True, timeout=300)
    assert blocked.returncode == 1
    assert blocked.stderr.count("\n") == 1
    assert "common-voice" in blocked.stderr
    assert processes_of(directory) == []
