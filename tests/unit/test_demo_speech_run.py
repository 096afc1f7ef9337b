"""Settings, the log, the choice of a checkpoint to resume from, and what is told of a run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from millrace.demo.place import Place
from millrace.demo.speech.log import LOG_NAME, EpochRecord, TrainingLog, WorkerTimes, final_epochs, read_events
from millrace.demo.speech.run import describe
from millrace.demo.speech.settings import SpeechSettings
from millrace.errors import ConfigurationError

SETTINGS = SpeechSettings(data_url="s3://b/cv", run_url="s3://b/run")


def worker(rank: int) -> WorkerTimes:
    return WorkerTimes(
        rank=rank, node="n", clips=4, steps=2, wait_seconds=0.5, compute_seconds=2.0, evaluate_seconds=0.25,
        stall_seconds=0.25,
    )  # fmt: skip


def record(epoch: int, *, attempt: int = 0, loss: float = 1.0) -> EpochRecord:
    return EpochRecord(
        epoch=epoch, attempt=attempt, train_loss=loss, dev_cer=0.5, clips=8, clips_digest="ab", steps=2, seconds=3.0,
        origin_bytes=2_000_000 if epoch == 1 else 0, cache_bytes=0 if epoch == 1 else 2_000_000, learning_rate=0.1,
        peer_bytes=0, workers=(worker(0), worker(1)),
    )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(fs=pyarrow.fs.LocalFileSystem(), url=str(tmp_path / "run"))


# --- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"epochs": 0}, {"batch_size": 0}, {"num_workers": 0}, {"hidden_size": 30}, {"warmup": 1.0}, {"kill_in_epoch": 11},
     {"kill_in_epoch": 0}],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(change))):
        replace(SETTINGS, **change)


def test_the_rate_rises_falls_and_ends_at_zero() -> None:
    rates = [SETTINGS.learning_rate_at(step / 100) for step in range(101)]
    top = rates.index(max(rates))
    assert top == 15
    assert rates[top] == pytest.approx(SETTINGS.learning_rate)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[0] < 0.1 * SETTINGS.learning_rate
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_quick_keeps_the_kill_unless_there_was_none() -> None:
    assert SETTINGS.quick().kill_in_epoch == 2
    assert replace(SETTINGS, kill_in_epoch=None).quick().kill_in_epoch is None


# --- places -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path"), [("s3://bucket/a/b/", "bucket/a/b"), ("/tmp/a", "/tmp/a"), ("file:///tmp/a", "/tmp/a")]
)
def test_a_place_takes_its_scheme_off(url: str, path: str) -> None:
    assert Place(fs=pyarrow.fs.LocalFileSystem(), url=url).path == path


def test_a_place_reads_what_it_wrote(place: Place) -> None:
    assert place.sizes() == {}
    assert place.folders() == []
    assert place.read_if_there("a/b.txt") is None
    place.write("a/b.txt", b"one")
    place.write("a/b.txt", b"three")
    assert place.read("a/b.txt") == b"three"
    assert place.at("a").sizes() == {"b.txt": 5}
    assert place.folders() == ["a"]


# --- log --------------------------------------------------------------------------------------------


def test_the_log_goes_on_after_a_restart(place: Place) -> None:
    first = TrainingLog(place)
    first.add("start", resumed_after=0)
    first.add_epoch(record(1))
    second = TrainingLog(place)
    assert second.attempt == 1
    second.add("start", resumed_after=1)
    second.add_epoch(record(2, attempt=1))
    events = read_events(place)
    assert [(event["event"], event["attempt"]) for event in events] == [
        ("start", 0), ("epoch", 0), ("start", 1), ("epoch", 1),
    ]  # fmt: skip
    assert final_epochs(events) == [record(1), record(2, attempt=1)]
    assert place.read(LOG_NAME).count(b"\n") == 4


def test_of_an_epoch_done_twice_the_last_counts(place: Place) -> None:
    log = TrainingLog(place)
    for loss in (2.0, 1.0):
        log.add_epoch(record(1, loss=loss))
    assert [epoch.train_loss for epoch in final_epochs(read_events(place))] == [1.0]


def test_what_is_told_of_events() -> None:
    epoch = {"event": "epoch", **asdict(record(1))}
    assert describe(epoch) == (
        "epoch   1  loss  1.000  dev CER  50.0%    3.0 s    2.00 MB from origin    0.00 MB from cache"
    )
    start = {"event": "start", "resumed_after": 0, "parameters": 1_150_000, "workers": 2}
    assert describe(start) == "training 1.15 M parameters on 2 worker(s)"
    assert describe({**start, "resumed_after": 4}) == "         resumed from the checkpoint of epoch 4"
    assert "from scratch" in str(describe({**start, "attempt": 1}))
    assert describe({"event": "kill", "pid": 7, "epoch": 5}) == (
        "         killed training process 7 on purpose in epoch 5"
    )
    assert describe({"event": "end"}) is None
    assert describe({"event": "checkpoint"}) is None
    assert describe({"event": "warning", "text": "take care"}) == "         take care"


def test_ray_is_imported_only_when_a_run_starts() -> None:
    # The settings that keep a cluster private are read when Ray is imported, so nothing may import it before.
    code = "import sys, millrace.demo.speech.run, millrace.demo.speech_data; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
