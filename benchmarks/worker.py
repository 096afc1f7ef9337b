"""The process in which one contender runs once: measures its phases and reports them to the harness.

CPU time is that of this process and of everything that it has started, also of what is still running (a Ray worker) and
of what was orphaned: this process is the one that orphans fall to. Peak memory is the sum of the peaks of those
processes, and `added MiB` what of it was not there when the phase began; pages of mapped files that are in memory count,
as they do for the kernel.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_RESET_PEAK = "5"


def _descendants() -> list[psutil.Process]:
    children: list[psutil.Process] = psutil.Process().children(recursive=True)
    return children


def cpu_seconds() -> tuple[float, float]:
    """User and system time of this process, all its living descendants, and those that these have waited for.

    For this process itself to the microsecond, for the others to the kernel's tick.
    """
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    user, system = sum(usage.ru_utime for usage in own), sum(usage.ru_stime for usage in own)
    for process in _descendants():
        with suppress(psutil.NoSuchProcess):  # gone since the listing: its parent has its time now
            times = process.cpu_times()
            user += times.user + times.children_user
            system += times.system + times.children_system
    return user, system


def _reset_peaks() -> None:
    for pid in (os.getpid(), *(process.pid for process in _descendants())):
        with suppress(OSError):  # gone since the listing, or not ours
            Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)


def _resident_mib(field: str) -> float:
    """The sum over all processes of a field of /proc/PID/status: `VmRSS` is now, `VmHWM` the peak."""
    total = 0
    for pid in (os.getpid(), *(process.pid for process in _descendants())):
        with suppress(OSError):  # gone since the listing
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(f"{field}:"):
                    total += int(line.split()[1])
    return total / 1024


class _Measure:
    """Implements `harness.Measure` over the pipes to the harness."""

    def __init__(self, commands: IO[str], reports: IO[str]) -> None:
        self._commands, self._reports = commands, reports

    def send(self, message: dict[str, Any]) -> None:
        self._reports.write(json.dumps(message) + "\n")
        self._reports.flush()

    def _mark(self, message: dict[str, Any]) -> None:
        self.send(message)
        self._commands.readline()  # the harness has read its counters

    @contextmanager
    def __call__(self, phase: str) -> Iterator[dict[str, float]]:
        figures: dict[str, float] = {}
        self._mark({"at": "start", "phase": phase})
        _reset_peaks()
        resident = _resident_mib("VmRSS")
        user, system = cpu_seconds()
        started = time.perf_counter()
        yield figures
        wall = time.perf_counter() - started
        user_after, system_after = cpu_seconds()
        peak = _resident_mib("VmHWM")
        measured = {
            "wall s": wall,
            "CPU s": user_after - user + system_after - system,
            "system s": system_after - system,
            "peak MiB": peak,
            "added MiB": max(0.0, peak - resident),
        }
        if "raw GB" in figures:
            gigabytes = figures.pop("raw GB")
            measured |= {f"{name}/GB": measured[name] / gigabytes for name in ("wall s", "CPU s")}
        self._mark({"at": "stop", "phase": phase, "figures": {**measured, **figures}})


def main() -> None:
    # What libraries print must not get between the reports.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what the contender has started is ended by it
    task = json.loads(sys.stdin.readline())
    contender = importlib.import_module(task["module"]).case.contenders[task["contender"]]
    measure = _Measure(sys.stdin, reports)
    result = contender.run(measure, task["context"])
    measure.send({"at": "end", "result": result})
    reports.close()


if __name__ == "__main__":
    main()
