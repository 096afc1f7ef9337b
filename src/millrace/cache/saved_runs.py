"""The last save of each checkpoint run that a process of this machine has saved: one small file for each run.

The counters of a store count saves and have no names. These records name the runs, for the status page.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from millrace.errors import without_queries
from millrace.events import Event
from millrace.runtime.failures import disk_errors
from millrace.runtime.private_files import make_folder, new_file, read_file

SAVED, FAILED = "run.saved", "run.save.ended"
MOST_RUNS = 64


def updated(before: Mapping[str, Any], event: Event, now: float) -> dict[str, Any]:
    """The record of a run after a save has ended: the figures of the last complete save, and of a later failure. Pure."""
    values = event.values or {}
    record = {"saves": 0, "failures": 0, **before, "url": without_queries(event.subject), "time": now}
    step = int(values.get("step", -1))
    if event.name == FAILED:
        return {
            **record,
            "failures": record["failures"] + 1,
            "failed_step": step,
            "error": without_queries(event.detail),
        }
    return {
        **record,
        "saves": record["saves"] + 1,
        "step": step,
        "kind": "delta" if "delta_saves" in values else "full",
        "stored_bytes": int(values.get("save_bytes", 0)),
        "raw_bytes": int(values.get("save_raw_bytes", 0)),
        "seconds": values.get("save_seconds", 0.0),
        "blocked_seconds": values.get("blocked_seconds", 0.0),
        "failed_step": None,
        "error": "",
    }


class SavedRuns:
    """The records in `directory`. For any number of processes and threads; of two that save one run, the last one counts."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock

    def record(self, event: Event) -> None:
        """Update the record of the run of a `run.saved` or `run.save.ended`. Raises `StorageError`."""
        name = xxhash.xxh3_64_hexdigest(event.subject.encode("utf-8", "replace"))
        path, temporary = self._directory / f"{name}.json", self._directory / f"{name}.{uuid.uuid4().hex[:12]}.new"
        with disk_errors(self._directory):
            make_folder(self._directory)
            is_new = not path.exists()
            record = updated(_read(path) or {}, event, self._clock())
            with open(new_file(temporary), "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(temporary, path)
            if is_new:
                self._remove_oldest()

    def all(self) -> list[dict[str, Any]]:
        """Every record, the newest first. Leaves out damaged ones. Raises `StorageError`."""
        with disk_errors(self._directory):
            found = [_read(path) for path in self._directory.glob("*.json")]
        return sorted((each for each in found if each is not None), key=lambda each: -each["time"])

    def _remove_oldest(self) -> None:
        ages: dict[Path, float] = {}
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread or process has renamed it
                ages[path] = path.lstat().st_mtime
        for path in sorted(ages, key=ages.__getitem__)[:-MOST_RUNS]:
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    numbers = ("time", "saves", "failures")
    is_valid = isinstance(record, dict) and all(isinstance(record.get(name), int | float) for name in numbers)
    return record if is_valid and isinstance(record.get("url"), str) else None
