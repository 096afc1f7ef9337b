"""The records of the last save of each run."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from millrace.cache.measures import FAILED, MOST_RUNS, SAVED, SavedRuns, updated
from millrace.errors import StorageError
from millrace.events import Event

FIGURES = {"save_bytes": 40, "save_raw_bytes": 100, "save_seconds": 2.5, "blocked_seconds": 0.5}


def saved(step: int, kind: str = "full", url: str = "s3://b/run") -> Event:
    return Event(name=SAVED, subject=url, values={"step": step, f"{kind}_saves": 1, **FIGURES})


def failed(step: int, detail: str = "no space") -> Event:
    return Event(name=FAILED, subject="s3://b/run", detail=detail, values={"step": step, "save_failures": 1})


def after(*events: Event) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for number, event in enumerate(events):
        record = updated(record, event, float(number))
    return record


def test_record_after_saves_has_the_figures_of_the_last_one() -> None:
    assert after(saved(1), saved(2, "delta")) == {
        "url": "s3://b/run",
        "time": 1.0,
        "saves": 2,
        "failures": 0,
        "step": 2,
        "kind": "delta",
        "stored_bytes": 40,
        "raw_bytes": 100,
        "seconds": 2.5,
        "blocked_seconds": 0.5,
        "failed_step": None,
        "error": "",
    }


def test_record_after_a_failure_keeps_the_last_complete_save() -> None:
    record = after(saved(1), failed(2))
    assert (record["step"], record["failed_step"], record["error"], record["failures"]) == (1, 2, "no space", 1)


def test_record_after_a_save_that_follows_a_failure_has_no_error() -> None:
    record = after(failed(2), saved(2))
    assert (record["step"], record["failed_step"], record["error"], record["failures"]) == (2, None, "", 1)


def test_runs_are_listed_the_newest_first_from_private_files(tmp_path: Path) -> None:
    times = count(1.0)
    runs = SavedRuns(tmp_path / "runs", lambda: next(times))
    for url in ("s3://b/one", "s3://b/two", "s3://b/one"):
        runs.record(saved(1, url=url))
    assert [(row["url"], row["saves"]) for row in runs.all()] == [("s3://b/one", 2), ("s3://b/two", 1)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "runs").iterdir()} == {0o600}


def test_runs_of_a_store_without_saves_are_empty(tmp_path: Path) -> None:
    assert SavedRuns(tmp_path / "runs").all() == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"time": 1, "saves": "x"}', b"\xff"])
def test_damaged_record_is_left_out_and_replaced_by_the_next_save(tmp_path: Path, damage: bytes) -> None:
    runs = SavedRuns(tmp_path / "runs")
    runs.record(saved(1))
    [path] = (tmp_path / "runs").iterdir()
    path.write_bytes(damage)
    assert runs.all() == []
    runs.record(saved(2))
    assert [row["step"] for row in runs.all()] == [2]


def test_records_above_the_limit_drop_the_oldest_run(tmp_path: Path) -> None:
    runs = SavedRuns(tmp_path / "runs")
    for number in range(MOST_RUNS + 2):
        runs.record(saved(1, url=f"s3://b/{number}"))
    urls = {row["url"] for row in runs.all()}
    assert len(urls) == MOST_RUNS
    assert f"s3://b/{MOST_RUNS + 1}" in urls


def test_saves_of_many_threads_are_recorded_without_an_error(tmp_path: Path) -> None:
    runs = SavedRuns(tmp_path / "runs")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: runs.record(saved(1, url=f"s3://b/{number % 20}")), range(400)))
    assert len(runs.all()) == 20


def test_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        SavedRuns(tmp_path / "runs").record(saved(1))
    assert not list((tmp_path / "elsewhere").iterdir())
